"""Priorities (RFC 9218): the Priority field, and what stands in PRIORITY_UPDATE frames."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final, NamedTuple

_URGENCY: Final = re.compile(rb"u=([0-7])(?:;.*)?")
_INCREMENTAL: Final = re.compile(rb"i(?:=\?([01]))?(?:;.*)?")
_MAX_VALUE_BYTES: Final = 256


class Priority(NamedTuple):
    """How a response is sent among those of its connection."""

    urgency: int
    """0 (first) to 7 (background)."""
    incremental: bool
    """In turns with others of the same urgency; otherwise one after another."""


UNSIGNALLED: Final = Priority(3, True)
"""Of a stream whose client says nothing. RFC 9218 section 4.2 would have it sent whole before the next, made for pages;
the clients that say nothing are those of APIs, where one long answer must not stall the others."""


@lru_cache(maxsize=128)
def _parse(value: bytes) -> Priority:
    urgency, incremental = 3, False  # section 4
    for member in value.split(b","):
        item = member.strip(b" \t")
        if match := _URGENCY.fullmatch(item):
            urgency = int(match[1])
        elif match := _INCREMENTAL.fullmatch(item):
            incremental = match[1] != b"0"
    return Priority(urgency, incremental)


def parse_priority(value: bytes) -> Priority:
    """A Priority field's value (RFC 9218 section 4); what is not understood in it is ignored, as it asks."""
    return _parse(value) if len(value) <= _MAX_VALUE_BYTES else UNSIGNALLED
