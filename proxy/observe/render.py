"""A line of the event log as text or JSON: one record is one line of printable ASCII, whatever is in it."""

from __future__ import annotations

import json
import re

from proxy.observe.merge import Line
from proxy.observe.record import Value

_BARE_VALUE = re.compile(r"[!#-<>-\[\]-~]+")
"""Printable, without space, quote, equals sign and backslash."""
_NOT_IN_NAME = re.compile(r"[^!#-<>-\[\]-~]")


def as_text(line: Line, time: str) -> bytes:
    """``time LEVEL signature key=value ... msg="..."`` and a line feed; strings quoted as in JSON where need be."""
    fields: dict[str, Value] = {**line.fields, "msg": line.message}
    if line.trace:
        fields["trace"] = line.trace
    pairs = " ".join(f"{_name(name)}={_value(value)}" for name, value in fields.items())
    return f"{time} {line.level.upper()} {_name(line.signature)} {pairs}\n".encode("ascii")


def as_json(line: Line, time: str) -> bytes:
    """One object: time, level, event, message, the fields, and trace where there is one."""
    own: dict[str, Value] = {"time": time, "level": line.level, "event": line.signature, "message": line.message}
    if line.trace:
        own["trace"] = line.trace
    others = {name: value for name, value in line.fields.items() if name not in own}
    return json.dumps({**own, **others}).encode("ascii") + b"\n"


def _name(name: str) -> str:
    return _NOT_IN_NAME.sub("_", name)


def _value(value: Value) -> str:
    text = str(value)
    return text if _BARE_VALUE.fullmatch(text) else json.dumps(text)
