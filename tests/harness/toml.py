"""Writes a configuration given as a dictionary. The standard library only reads TOML."""

from __future__ import annotations

import json
from collections.abc import Mapping

Value = object
"""str, bool, int, float, or a list, tuple or mapping of such."""


def _value(value: Value) -> str:
    match value:
        case str() | bool():
            return json.dumps(value)  # JSON's strings and booleans are TOML's
        case int() | float():
            return repr(value)
        case Mapping():
            return "{ " + ", ".join(f"{json.dumps(key)} = {_value(item)}" for key, item in value.items()) + " }"
        case list() | tuple():
            return "[" + ", ".join(map(_value, value)) + "]"
    raise TypeError(f"no TOML for {value!r}")


def to_toml(table: Mapping[str, Value]) -> str:
    """The table as a TOML document, a line a top-level key. Keys with the value None are left out."""
    return "".join(f"{key} = {_value(value)}\n" for key, value in table.items() if value is not None)
