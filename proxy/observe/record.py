"""What one process tells the event log: a record, and the bounded datagram that carries it."""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from typing import NamedTuple

Value = str | int | float

MAX_DATAGRAM_BYTES = 8192
MAX_FIELDS = 16
MAX_NAME_CHARS = 64
MAX_TRACE_FRAMES = 16

_NUMBER_LIMIT = 2**63

LEVELS: Mapping[str, int] = {"debug": 10, "info": 20, "warning": 30, "error": 40}
"""The levels, in order of weight. A report at any other level is an error."""
LEVEL_NAMES: Mapping[int, str] = {weight: name for name, weight in LEVELS.items()}


class _Room(NamedTuple):
    """How many characters each part of a datagram may have."""

    message: int
    trace: int
    value: int


# JSON writes a character as up to 12 bytes, so what fits in characters may not fit in bytes: the next row is tried.
# The last row fits whatever the characters: 12 * (source 64 + signature 128 + message 64 + trace 128 + 2 * (64 + 16)).
_ROOMS: tuple[tuple[int, _Room], ...] = (
    (MAX_FIELDS, _Room(message=1024, trace=4096, value=256)),
    (MAX_FIELDS, _Room(message=512, trace=1024, value=64)),
    (2, _Room(message=64, trace=128, value=16)),
)


class Record(NamedTuple):
    """One or more occurrences of one signature in one process."""

    source: str
    """Which process: "master", "control", "worker-0"."""
    signature: str
    """From a closed set ("accept.emfile"), never client text."""
    occurrences: int
    """Occurrences that this record stands for, at least 1."""
    level: str
    message: str
    fields: Mapping[str, Value]
    """Those of the latest occurrence."""
    trace: str
    """The formatted traceback of a first occurrence, else empty."""


class MalformedRecordError(ValueError):
    """A datagram that is not a record."""


def clip(text: str, limit: int) -> str:
    """``text``, cut to ``limit`` characters and a mark that tells how many are missing."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]}[cut {len(text) - limit}]"


def clip_front(text: str, limit: int) -> str:
    """As ``clip``, but keeps the end: a traceback's last lines say most."""
    if len(text) <= limit:
        return text
    return f"[cut {len(text) - limit}]{text[-limit:]}"


def format_trace(exc: BaseException) -> str:
    """The traceback as text: the innermost frames, whatever ``exc`` does when asked for its own text."""
    try:
        return "".join(traceback.format_exception(exc, limit=-MAX_TRACE_FRAMES)).rstrip("\n")
    except Exception as failure:  # noqa: BLE001 - a __str__ or __cause__ that raises must not end the report
        return f"{type(exc).__name__} (its traceback cannot be formatted: {type(failure).__name__})"


def encode(record: Record) -> bytes:
    """The datagram: JSON, at most MAX_DATAGRAM_BYTES; what does not fit is cut, with a mark."""
    data = b""
    for max_fields, room in _ROOMS:
        data = _encode(record, max_fields, room)
        if len(data) <= MAX_DATAGRAM_BYTES:
            break
    return data


def _is_plain_number(value: Value) -> bool:
    """Whether JSON has the number: not infinite, not NaN, and of bounded length."""
    return isinstance(value, int | float) and abs(value) < _NUMBER_LIMIT


def _encode(record: Record, max_fields: int, room: _Room) -> bytes:
    fields = {
        clip(str(name), MAX_NAME_CHARS): value if _is_plain_number(value) else clip(str(value), room.value)
        for name, value in list(record.fields.items())[:max_fields]
    }
    body = (
        clip(record.source, MAX_NAME_CHARS),
        clip(record.signature, 2 * MAX_NAME_CHARS),
        record.occurrences,
        record.level if record.level in LEVELS else "error",
        clip(str(record.message), room.message),
        fields,
        clip_front(record.trace, room.trace),
    )
    return json.dumps(body, separators=(",", ":")).encode("ascii")


def decode(data: bytes) -> Record:
    """The record of a datagram. MalformedRecordError for anything that ``encode`` does not make."""
    if len(data) > MAX_DATAGRAM_BYTES:
        raise MalformedRecordError("over-long")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise MalformedRecordError("not JSON") from None
    if not isinstance(body, list) or len(body) != len(Record._fields):
        raise MalformedRecordError("not a record")
    source, signature, occurrences, level, message, fields, trace = body
    texts_are_text = all(isinstance(text, str) for text in (source, signature, level, message, trace))
    count_is_count = isinstance(occurrences, int) and not isinstance(occurrences, bool) and occurrences > 0
    if not (texts_are_text and count_is_count and signature and level in LEVELS and isinstance(fields, dict)):
        raise MalformedRecordError("wrong types")
    if not all(isinstance(value, str | int | float) for value in fields.values()):
        raise MalformedRecordError("wrong types")
    return Record(source, signature, occurrences, level, message, fields, trace)
