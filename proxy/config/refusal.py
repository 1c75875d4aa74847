"""The one exception of a value that is not acceptable, and how values are shown to the operator."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping, Sequence
from typing import Final

from proxy.errors import ConfigError

_MAX_SHOWN_CHARACTERS: Final = 80


class RefusedError(ConfigError, ValueError):
    """A single value is not acceptable: what was found, what is wanted, and what to do.

    Also a ``ValueError``, so that it can be raised inside a pydantic validator and found again in its error.
    """

    def __init__(self, found: str, wanted: str, hint: str = "", also: Sequence[RefusedError] = ()) -> None:
        """``also``: what else is wrong with the same value, such as further lines of the file that it names."""
        super().__init__("; ".join(part for part in (f"found {found}", f"wanted {wanted}", hint) if part))
        self.found: Final = found
        self.wanted: Final = wanted
        self.hint: Final = hint
        self.also: Final = tuple(also)


def shown(value: object) -> str:
    """Return ``value`` as it would be written in TOML: one line, printable ASCII, of bounded length."""
    if isinstance(value, str):
        return json.dumps(_shortened(value)).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        # str() of a very long integer is refused by the interpreter itself.
        return str(value) if value.bit_length() < 256 else "an integer of too many digits"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, dt.datetime | dt.date | dt.time):
        return f"a date or time ({value.isoformat()})"
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, Sequence):
        return f"an array of {len(value)}"
    return "a value of an unknown kind"


def printable(text: str) -> str:
    """Return ``text`` with everything that a terminal could obey or a line reader split at escaped."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else text[:_MAX_SHOWN_CHARACTERS] + "..."
