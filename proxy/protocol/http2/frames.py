"""Frames of HTTP/2 (RFC 9113 sections 4.1 and 6, RFC 9218 section 7.1): numbers and how they are packed."""

from __future__ import annotations

from struct import Struct
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADER_BYTES: Final = 9

DATA: Final = 0x0
HEADERS: Final = 0x1
PRIORITY: Final = 0x2
RST_STREAM: Final = 0x3
SETTINGS: Final = 0x4
PUSH_PROMISE: Final = 0x5
PING: Final = 0x6
GOAWAY: Final = 0x7
WINDOW_UPDATE: Final = 0x8
CONTINUATION: Final = 0x9
PRIORITY_UPDATE: Final = 0x10

END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
HAS_PRIORITY: Final = 0x20

# Section 6.5.2; RFC 8441 section 3; RFC 9218 section 2.1
SETTINGS_HEADER_TABLE_SIZE: Final = 0x1
SETTINGS_ENABLE_PUSH: Final = 0x2
SETTINGS_MAX_CONCURRENT_STREAMS: Final = 0x3
SETTINGS_INITIAL_WINDOW_SIZE: Final = 0x4
SETTINGS_MAX_FRAME_SIZE: Final = 0x5
SETTINGS_MAX_HEADER_LIST_SIZE: Final = 0x6
SETTINGS_ENABLE_CONNECT_PROTOCOL: Final = 0x8
SETTINGS_NO_RFC7540_PRIORITIES: Final = 0x9

DEFAULT_WINDOW: Final = 65_535
MAX_WINDOW: Final = 2**31 - 1
MIN_MAX_FRAME_BYTES: Final = 16_384
MAX_MAX_FRAME_BYTES: Final = 2**24 - 1
MAX_STREAM_ID: Final = 2**31 - 1

_HEADER: Final = Struct(">HBBBL")
_SETTING: Final = Struct(">HL")
_LONG: Final = Struct(">L")
_TWO_LONGS: Final = Struct(">LL")

unpack_header = _HEADER.unpack_from
"""Length (its upper 16 bits, its lower 8), type, flags, stream with the reserved bit."""
unpack_long = _LONG.unpack_from
unpack_two_longs = _TWO_LONGS.unpack_from
iter_settings = _SETTING.iter_unpack


def header(length: int, kind: int, flags: int, stream_id: int) -> bytes:
    """A frame's header."""
    return _HEADER.pack(length >> 8, length & 0xFF, kind, flags, stream_id)


def settings(values: dict[int, int]) -> bytes:
    """A SETTINGS frame."""
    payload = b"".join([_SETTING.pack(*item) for item in values.items()])
    return header(len(payload), SETTINGS, 0, 0) + payload


SETTINGS_ACK: Final = header(0, SETTINGS, ACK, 0)


def ping(data: bytes, flags: int = 0) -> bytes:
    """A PING frame with 8 bytes of ``data``."""
    return header(8, PING, flags, 0) + data


def rst_stream(stream_id: int, code: int) -> bytes:
    """A RST_STREAM frame."""
    return header(4, RST_STREAM, 0, stream_id) + _LONG.pack(code)


def window_update(stream_id: int, increment: int) -> bytes:
    """A WINDOW_UPDATE frame; stream 0 is the connection."""
    return header(4, WINDOW_UPDATE, 0, stream_id) + _LONG.pack(increment)


def goaway(last_stream_id: int, code: int, debug: bytes = b"") -> bytes:
    """A GOAWAY frame."""
    return header(8 + len(debug), GOAWAY, 0, 0) + _TWO_LONGS.pack(last_stream_id, code) + debug


def header_block(stream_id: int, block: bytes, max_frame_bytes: int, flags: int) -> list[bytes]:
    """HEADERS and what CONTINUATION it takes; ``flags``: `END_STREAM` or none."""
    size = len(block)
    if size <= max_frame_bytes:
        return [header(size, HEADERS, flags | END_HEADERS, stream_id), block]
    parts: list[bytes] = []
    kind = HEADERS
    for start in range(0, size, max_frame_bytes):
        piece = block[start : start + max_frame_bytes]
        ends = END_HEADERS if start + max_frame_bytes >= size else 0
        parts += (header(len(piece), kind, flags | ends, stream_id), piece)
        kind, flags = CONTINUATION, 0
    return parts
