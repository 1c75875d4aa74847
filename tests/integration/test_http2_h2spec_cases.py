"""What a conformance tester of HTTP/2 asks a server, over a real connection: frames that are right and frames that are
wrong, section by section of RFC 9113 and of RFC 7541 (HPACK), each with the one outcome that this server has.

Where the RFC leaves a choice between a stream's error and the connection's, the outcome is ours. Every case of h2spec
2 (RFC 7540) has its counterpart here, often stricter: h2spec is content with the end of the connection wherever it asks
for an error.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final

import pytest

from proxy.protocol.http2 import CANCEL, NO_ERROR, PROTOCOL_ERROR
from proxy.protocol.http2.errors import (
    COMPRESSION_ERROR,
    FLOW_CONTROL_ERROR,
    FRAME_SIZE_ERROR,
    REFUSED_STREAM,
    STREAM_CLOSED,
)
from tests.harness import Wire
from tests.harness import http2 as h
from tests.harness.http2_cases import (
    BODY,
    PINGED,
    Acknowledges,
    Case,
    Ends,
    Lives,
    Outcome,
    Pongs,
    Resets,
    Sends,
    Serves,
    Step,
    Talk,
    Until,
    judge,
)
from tests.harness.stage import Stage, open_stage
from tests.harness.upstream import answering

LARGEST: Final = 2**31 - 1
FRAME_BYTES: Final = 16_384
HOST: Final = "www.example.org"
GET: Final[h.Headers] = ((":method", "GET"), (":scheme", "https"), (":authority", HOST), (":path", "/"))
POST: Final[h.Headers] = ((":method", "POST"), *GET[1:])
HPACK_GET: Final = b"\x82\x87\x84\x01\x0fwww.example.org"
"""``GET`` out of the static table, and a literal that is not indexed."""


# -- what is sent


def get(stream_id: int = 1, *more: tuple[str, str], **options: Any) -> bytes:
    return h.headers(stream_id, (*GET, *more), **options)


def post(stream_id: int = 1, *more: tuple[str, str]) -> bytes:
    """The head of a request whose body is to follow."""
    return h.headers(stream_id, (*POST, *more), end_stream=False)


def part(stream_id: int = 1, *, ended: bool = True, size: int = 5) -> bytes:
    """The first octets of a head: what follows must be CONTINUATION."""
    return h.frame(h.HEADERS, h.END_STREAM if ended else 0, stream_id, h.block(GET)[:size])


def more(stream_id: int = 1, start: int = 5, end: int | None = None) -> bytes:
    """CONTINUATION with the rest of what ``part`` began, or octets of it."""
    return h.frame(h.CONTINUATION, h.END_HEADERS if end is None else 0, stream_id, h.block(GET)[start:end])


def packed(block: bytes, stream_id: int = 1) -> bytes:
    """A request whose header block is written out."""
    return h.frame(h.HEADERS, h.END_HEADERS | h.END_STREAM, stream_id, block)


def priority(stream_id: int, dependency: int = 0, weight: int = 15, *, exclusive: bool = False) -> bytes:
    return h.frame(h.PRIORITY, 0, stream_id, struct.pack(">LB", dependency | exclusive << 31, weight))


def with_priority(stream_id: int, dependency: int, weight: int = 15, *, exclusive: bool = False) -> bytes:
    prefix = struct.pack(">LB", dependency | exclusive << 31, weight)
    return get(stream_id, flags=h.HAS_PRIORITY, prefix=prefix)


def without(name: str) -> bytes:
    return h.headers(1, [field for field in GET if field[0] != name])


LONG_FIELD: Final = ("x-long", "x" * 4_000)
PING: Final = h.frame(h.PING, payload=PINGED)


# -- what is right

VALID: Final[dict[str, Case]] = {
    "5.1 PRIORITY on an idle stream": ([priority(3), get(5)], Serves((5,))),
    "5.1 WINDOW_UPDATE on half-closed (remote)": ([get() + h.window_update(1, 100)], Serves()),
    "5.1 PRIORITY on half-closed (remote)": ([get() + priority(1)], Serves()),
    "5.1 RST_STREAM on half-closed (remote)": ([get() + h.rst_stream(1, CANCEL)], Lives()),
    "5.1 PRIORITY on a closed stream": ([get(), Until(1), priority(1)], Lives()),
    "5.1 WINDOW_UPDATE on a closed stream": ([get(), Until(1), h.window_update(1, 1)], Lives()),
    "5.1 RST_STREAM on a closed stream": ([get(), Until(1), h.rst_stream(1)], Lives()),
    "6.1 DATA": ([post() + h.data(1, b"body", end_stream=True)], Serves()),
    "6.1 several DATA": ([post() + h.data(1, b"bo") + h.data(1, b"dy") + h.data(1, end_stream=True)], Serves()),
    "6.1 padded DATA": (
        [post() + h.frame(h.DATA, h.PADDED | h.END_STREAM, 1, b"\x06body" + bytes(6))],
        Serves(),
    ),
    "6.1 DATA of padding only": ([post() + h.frame(h.DATA, h.PADDED | h.END_STREAM, 1, b"\x06" + bytes(6))], Serves()),
    "6.2 HEADERS": ([get()], Serves()),
    "6.2 padded HEADERS": (
        [h.frame(h.HEADERS, h.PADDED | h.END_STREAM | h.END_HEADERS, 1, b"\x06" + h.block(GET) + bytes(6))],
        Serves(),
    ),
    "6.2 HEADERS with priority": ([with_priority(1, 0, 255)], Serves()),
    "6.2 HEADERS with priority, exclusive, on an idle stream": ([with_priority(1, 11, exclusive=True)], Serves()),
    "6.3 PRIORITY of weight 1": ([priority(1, 0, 0) + get()], Serves()),
    "6.3 PRIORITY of weight 256": ([priority(1, 0, 255) + get()], Serves()),
    "6.3 PRIORITY that depends on a stream": ([priority(1, 3) + get()], Serves()),
    "6.3 PRIORITY that is exclusive": ([priority(1, 3, exclusive=True) + get()], Serves()),
    "6.3 PRIORITY on an idle stream closes none below it": ([priority(3), get(1)], Serves()),
    "6.3 PRIORITY on an idle stream that depends on one below it": ([priority(3, 1), get(1)], Serves()),
    "6.3 PRIORITY between requests": ([get(1) + priority(1, 3) + get(3) + priority(3, 1)], Serves((1, 3))),
    "6.4 RST_STREAM": ([post() + h.rst_stream(1, CANCEL)], Lives()),
    "6.5 SETTINGS": ([h.settings((0x1, 4096), (0x3, 100), (0x4, 65_535))], Acknowledges()),
    "6.5 every SETTINGS of the RFC": (
        [h.settings((0x1, 4096), (0x2, 1), (0x3, 100), (0x4, 65_535), (0x5, FRAME_BYTES), (0x6, 100))],
        Acknowledges(),
    ),
    "6.5.2 unknown SETTINGS": ([h.settings((0xFF, 1), (0x0, 7))], Acknowledges()),
    "6.5.2 the largest values": ([h.settings((0x4, LARGEST), (0x5, 2**24 - 1), (0x1, 2**32 - 1))], Acknowledges()),
    "6.5.3 SETTINGS without values": ([h.settings()], Acknowledges()),
    "6.5.3 the last of equal SETTINGS counts": ([h.settings((0x4, 100), (0x4, 1)), get()], Sends([1])),
    "6.7 PING": ([PING, PING], Pongs(2)),
    "6.7 PING with ACK": ([h.frame(h.PING, h.ACK, 0, PINGED)], Pongs(0)),
    "6.9 WINDOW_UPDATE on the connection": ([h.window_update(0, 1), get()], Serves()),
    "6.9 WINDOW_UPDATE on a stream": ([get() + h.window_update(1, 1)], Serves()),
    "6.10 CONTINUATION": ([part() + more()], Serves()),
    "6.10 several CONTINUATION": ([part() + more(1, 5, 9) + more(1, 9, 9) + more(1, 9)], Serves()),
    "6.10 CONTINUATION with long fields": (
        [
            h.headers(1, GET, end_headers=False)
            + h.frame(h.CONTINUATION, 0, 1, h.block([LONG_FIELD]))
            + h.frame(h.CONTINUATION, h.END_HEADERS, 1, h.block([LONG_FIELD]))
        ],
        Serves(),
    ),
    "4.1 an unknown frame": ([h.frame(0x16, 0, 0, b"what"), h.frame(0x16, 0xFF, 1, b"what")], Lives()),
    "4.1 undefined flags": ([h.frame(h.PING, 0x16, 0, PINGED)], Pongs(1)),
    "4.1 the reserved bit": ([h.frame(h.PING, 0, 1 << 31, PINGED)], Pongs(1)),
    "4.2 DATA of 2^14 octets": ([post() + h.data(1, bytes(FRAME_BYTES), end_stream=True)], Serves()),
    "5.5 an unknown frame between requests": ([get(1) + h.frame(0xAB) + get(3)], Serves((1, 3))),
    "6.9.2 settings change the window of open streams": (
        [h.settings((0x4, 0)), get() + h.settings((0x4, 1))],
        Sends([1]),
    ),
    "6.9.1 a window of 1": ([h.settings((0x4, 1)), get()], Sends([1])),
    "6.9.2 a negative window": (
        [h.settings((0x4, 3)), get(), Until(1, 3), h.settings((0x4, 2)), h.window_update(1, 2)],
        Sends([3, 1]),
    ),
    "6.9.2 a window of 0 and an update": ([h.settings((0x4, 0)), get(), h.window_update(1, 4)], Sends([4])),
    "7 RST_STREAM with an unknown code": ([post() + h.rst_stream(1, 0xFF)], Lives()),
    "8.1 GET": ([get()], Serves()),
    "8.1 OPTIONS of the server": ([h.headers(1, [(":method", "OPTIONS"), *GET[1:3], (":path", "*")])], Serves()),
    "8.1 POST with trailers": ([post() + h.data(1, b"body") + h.headers(1, [("x-sum", "1")])], Serves()),
    "8.1 POST with trailers that were announced": (
        [post(1, ("trailer", "x-sum")) + h.data(1, b"body") + h.headers(1, [("x-sum", "1")])],
        Serves(),
    ),
    "8.1.1 content-length that agrees": (
        [post(1, ("content-length", "4")) + h.data(1, b"bo") + h.data(1, b"dy", end_stream=True)],
        Serves(),
    ),
    "8.2.2 TE: trailers": ([get(1, ("te", "trailers"))], Serves()),
    "8.3.1 two requests at once": ([get(1) + get(3)], Serves((1, 3))),
    "8.3.1 ids with gaps": ([get(1) + get(9)], Serves((1, 9))),
}

# -- HPACK (RFC 7541)

HPACK_VALID: Final[dict[str, Case]] = {
    "6.1 indexed": ([packed(HPACK_GET)], Serves()),
    "6.1 indexed, with an empty value": ([packed(HPACK_GET + b"\xba")], Serves()),
    "6.1 indexed, of the dynamic table": (
        [packed(b"\x82\x87\x84\x41\x0fwww.example.org") + packed(b"\x82\x87\x84\xbe", 3)],
        Serves((1, 3)),
    ),
    "6.2.1 literal with indexing, indexed name": ([packed(HPACK_GET + b"\x7a\x01a")], Serves()),
    "6.2.1 literal with indexing, new name": ([packed(HPACK_GET + b"\x40\x03x-a\x01a")], Serves()),
    "6.2.1 literal with indexing, Huffman": ([packed(HPACK_GET + b"\x40\x81\x1f\x81\x1f")], Serves()),
    "6.2.2 literal without indexing, indexed name": ([packed(HPACK_GET + b"\x0f\x2b\x01a")], Serves()),
    "6.2.2 literal without indexing, new name": ([packed(HPACK_GET + b"\x00\x03x-a\x01a")], Serves()),
    "6.2.2 literal without indexing, Huffman": ([packed(HPACK_GET + b"\x00\x81\x1f\x81\x1f")], Serves()),
    "6.2.3 literal never indexed, indexed name": ([packed(HPACK_GET + b"\x1f\x2b\x01a")], Serves()),
    "6.2.3 literal never indexed, new name": ([packed(HPACK_GET + b"\x10\x03x-a\x01a")], Serves()),
    "6.2.3 literal never indexed, Huffman": ([packed(HPACK_GET + b"\x10\x81\x1f\x81\x1f")], Serves()),
    "6.3 a table size": ([packed(b"\x3f\x61" + HPACK_GET)], Serves()),
    "6.3 several table sizes": ([packed(b"\x20\x3f\xe1\x1f" + HPACK_GET)], Serves()),
    "4.4 a table size of 0 empties the table": (
        [packed(b"\x82\x87\x84\x41\x0fwww.example.org"), packed(b"\x20\x82\x87\x84\xbe", 3)],
        Ends(COMPRESSION_ERROR),
    ),
}
HPACK_INVALID: Final = {
    "2.3.3 an index past the table": HPACK_GET + b"\xc6",
    "2.3.3 a literal with an index past the table": HPACK_GET + b"\x7f\x07\x01a",
    "4.2 a table size at the end of the block": HPACK_GET + b"\x20",
    "5.1 an integer without end": HPACK_GET + b"\xff" + b"\x80" * 20,
    "5.2 a string past the block": HPACK_GET + b"\x00\x03x-a\x10a",
    "5.2 Huffman padding longer than 7 bits": HPACK_GET + b"\x00\x03x-a\x82\x1f\xff",
    "5.2 Huffman padding of zeros": HPACK_GET + b"\x00\x03x-a\x81\x18",
    "5.2 Huffman with EOS": HPACK_GET + b"\x00\x03x-a\x84\xff\xff\xff\xff",
    "6.1 index 0": HPACK_GET + b"\x80",
    "6.3 a table size above SETTINGS_HEADER_TABLE_SIZE": b"\x3f\xe2\x1f" + HPACK_GET,
}

# -- what is wrong

CLOSED: Final[tuple[Step, ...]] = (get(), Until(1))
INVALID: Final[dict[str, Case]] = {
    "4.2 DATA above SETTINGS_MAX_FRAME_SIZE": ([post() + h.data(1, bytes(FRAME_BYTES + 1))], Ends(FRAME_SIZE_ERROR)),
    "4.2 HEADERS above SETTINGS_MAX_FRAME_SIZE": ([packed(HPACK_GET + bytes(FRAME_BYTES))], Ends(FRAME_SIZE_ERROR)),
    "4.3 a header block that is none": ([packed(b"\xff\xff\xff\xff\xff")], Ends(COMPRESSION_ERROR)),
    "4.3 a header block that breaks off": ([packed(b"\x40")], Ends(COMPRESSION_ERROR)),
    "4.3 PRIORITY within a header block": ([part() + priority(1) + more()], Ends(PROTOCOL_ERROR)),
    "4.3 HEADERS of another stream within a header block": ([part() + get(3)], Ends(PROTOCOL_ERROR)),
    "5.1 idle: DATA": ([h.data(1, b"x", end_stream=True)], Ends(PROTOCOL_ERROR)),
    "5.1 idle: RST_STREAM": ([h.rst_stream(1)], Ends(PROTOCOL_ERROR)),
    "5.1 idle: WINDOW_UPDATE": ([h.window_update(1, 100)], Ends(PROTOCOL_ERROR)),
    "5.1 idle: CONTINUATION": ([more()], Ends(PROTOCOL_ERROR)),
    "5.1 half-closed (remote): DATA": ([get() + h.data(1, b"x", end_stream=True)], Resets(STREAM_CLOSED)),
    "5.1 half-closed (remote): HEADERS": ([get() + get()], Resets(STREAM_CLOSED)),
    "5.1 half-closed (remote): CONTINUATION": ([get() + more()], Ends(PROTOCOL_ERROR)),
    "5.1 closed by RST_STREAM: DATA": ([post() + h.rst_stream(1) + h.data(1, b"x")], Ends(STREAM_CLOSED)),
    "5.1 closed by RST_STREAM: HEADERS": ([post() + h.rst_stream(1) + get()], Ends(STREAM_CLOSED)),
    "5.1 closed by RST_STREAM: CONTINUATION": ([post() + h.rst_stream(1) + more()], Ends(PROTOCOL_ERROR)),
    "5.1 closed by END_STREAM: DATA": ([*CLOSED, h.data(1, b"x")], Ends(STREAM_CLOSED)),
    "5.1 closed by END_STREAM: HEADERS": ([*CLOSED, get()], Ends(STREAM_CLOSED)),
    "5.1 closed by END_STREAM: CONTINUATION": ([*CLOSED, more()], Ends(PROTOCOL_ERROR)),
    "5.1.1 an even id": ([get(2)], Ends(PROTOCOL_ERROR)),
    "5.1.1 an id below one that was used": ([get(5) + get(3)], Ends(PROTOCOL_ERROR)),
    "5.1.2 more streams than allowed": (
        [b"".join(map(get, range(1, 259, 2))), *map(Until, range(1, 257, 2))],
        Resets(REFUSED_STREAM, 257),
    ),
    "5.1.2 more streams than allowed while none can end": (
        [
            h.settings((0x4, 0)) + b"".join(map(get, range(1, 259, 2))) + h.settings((0x4, 65_535)),
            *map(Until, range(1, 257, 2)),
        ],
        Resets(REFUSED_STREAM, 257),
    ),
    "5.3.1 HEADERS that depend on themselves": ([with_priority(1, 1)], Resets(PROTOCOL_ERROR)),
    "5.3.1 PRIORITY that depends on itself": ([post() + priority(1, 1)], Resets(PROTOCOL_ERROR)),
    "5.3.1 PRIORITY that depends on itself, idle": ([priority(3, 3)], Ends(PROTOCOL_ERROR)),
    "5.4.1 an error of the connection": ([h.frame(h.PING, 0, 3, PINGED)], Ends(PROTOCOL_ERROR)),
    "5.5 an unknown frame within a header block": ([part() + h.frame(0x16) + more()], Ends(PROTOCOL_ERROR)),
    "6.1 DATA on stream 0": ([post() + h.data(0, b"x")], Ends(PROTOCOL_ERROR)),
    "6.1 DATA padded beyond its length": ([post() + h.frame(h.DATA, 0x9, 1, b"\x06data")], Ends(PROTOCOL_ERROR)),
    "6.2 HEADERS without END_HEADERS, then PRIORITY": ([part() + priority(1)], Ends(PROTOCOL_ERROR)),
    "6.2 HEADERS without END_HEADERS, then others": ([part() + h.data(1, b"x")], Ends(PROTOCOL_ERROR)),
    "6.2 HEADERS on stream 0": ([get(0)], Ends(PROTOCOL_ERROR)),
    "6.2 HEADERS padded beyond their length": (
        [h.frame(h.HEADERS, 0xD, 1, b"\xff" + HPACK_GET)],
        Ends(PROTOCOL_ERROR),
    ),
    "6.3 PRIORITY on stream 0": ([priority(0)], Ends(PROTOCOL_ERROR)),
    "6.3 PRIORITY of 4 octets": ([post() + h.frame(h.PRIORITY, 0, 1, bytes(4))], Resets(FRAME_SIZE_ERROR)),
    "6.4 RST_STREAM on stream 0": ([h.rst_stream(0)], Ends(PROTOCOL_ERROR)),
    "6.4 RST_STREAM on an idle stream": ([h.rst_stream(7)], Ends(PROTOCOL_ERROR)),
    "6.4 RST_STREAM of 3 octets": ([post() + h.frame(h.RST_STREAM, 0, 1, bytes(3))], Ends(FRAME_SIZE_ERROR)),
    "6.5 SETTINGS with ACK and values": ([h.settings((0x4, 1), flags=h.ACK)], Ends(FRAME_SIZE_ERROR)),
    "6.5 SETTINGS with ACK and an octet": ([h.frame(h.SETTINGS, h.ACK, 0, b"\0")], Ends(FRAME_SIZE_ERROR)),
    "6.5 SETTINGS on a stream": ([h.frame(h.SETTINGS, 0, 1, bytes(6))], Ends(PROTOCOL_ERROR)),
    "6.5 SETTINGS of 3 octets": ([h.frame(h.SETTINGS, 0, 0, bytes(3))], Ends(FRAME_SIZE_ERROR)),
    "6.5.2 SETTINGS_ENABLE_PUSH of 2": ([h.settings((0x2, 2))], Ends(PROTOCOL_ERROR)),
    "6.5.2 SETTINGS_INITIAL_WINDOW_SIZE of 2^31": ([h.settings((0x4, 2**31))], Ends(FLOW_CONTROL_ERROR)),
    "6.5.2 SETTINGS_MAX_FRAME_SIZE of 2^14 - 1": ([h.settings((0x5, FRAME_BYTES - 1))], Ends(PROTOCOL_ERROR)),
    "6.5.2 SETTINGS_MAX_FRAME_SIZE of 2^24": ([h.settings((0x5, 2**24))], Ends(PROTOCOL_ERROR)),
    "6.7 PING on a stream": ([h.frame(h.PING, 0, 1, PINGED)], Ends(PROTOCOL_ERROR)),
    "6.7 PING of 6 octets": ([h.frame(h.PING, 0, 0, bytes(6))], Ends(FRAME_SIZE_ERROR)),
    "6.8 GOAWAY on a stream": ([h.frame(h.GOAWAY, 0, 1, bytes(8))], Ends(PROTOCOL_ERROR)),
    "6.8 GOAWAY of 7 octets": ([h.frame(h.GOAWAY, 0, 0, bytes(7))], Ends(FRAME_SIZE_ERROR)),
    "6.9 WINDOW_UPDATE of 0": ([h.window_update(0, 0)], Ends(PROTOCOL_ERROR)),
    "6.9 WINDOW_UPDATE of 0 on a stream": ([post() + h.window_update(1, 0)], Resets(PROTOCOL_ERROR)),
    "6.9 WINDOW_UPDATE of 3 octets": ([h.frame(h.WINDOW_UPDATE, 0, 0, bytes(3))], Ends(FRAME_SIZE_ERROR)),
    "6.9.1 the connection's window above 2^31 - 1": ([h.window_update(0, LARGEST) * 2], Ends(FLOW_CONTROL_ERROR)),
    "6.9.1 a stream's window above 2^31 - 1": ([post() + h.window_update(1, LARGEST) * 2], Resets(FLOW_CONTROL_ERROR)),
    "6.9.2 SETTINGS that make a window too large": (
        [h.settings((0x4, 0)), post() + h.window_update(1, LARGEST) + h.settings((0x4, 1))],
        Ends(FLOW_CONTROL_ERROR),
    ),
    "6.10 CONTINUATION, then another frame": ([part() + more(1, 5, 9) + h.data(1, b"x")], Ends(PROTOCOL_ERROR)),
    "6.10 CONTINUATION on stream 0": ([part() + more(0)], Ends(PROTOCOL_ERROR)),
    "6.10 CONTINUATION of another stream": ([part() + more(3)], Ends(PROTOCOL_ERROR)),
    "6.10 CONTINUATION after HEADERS with END_HEADERS": ([post() + more()], Ends(PROTOCOL_ERROR)),
    "6.10 CONTINUATION after CONTINUATION with END_HEADERS": (
        [part(ended=False) + more() + more()],
        Ends(PROTOCOL_ERROR),
    ),
    "6.10 CONTINUATION after DATA": ([post() + h.data(1, b"x") + more()], Ends(PROTOCOL_ERROR)),
    "8.1 a second HEADERS without END_STREAM": (
        [post() + h.headers(1, [("x-sum", "1")], end_stream=False)],
        Resets(PROTOCOL_ERROR),
    ),
    "8.1 trailers without END_STREAM": (
        [post() + h.data(1, b"body") + h.headers(1, [("x-sum", "1")], end_stream=False)],
        Resets(PROTOCOL_ERROR),
    ),
    "8.1 HEADERS after trailers": (
        [post() + h.headers(1, [("x-sum", "1")]) + h.headers(1, [("x-sum", "1")])],
        Resets(STREAM_CLOSED),
    ),
    "8.1.1 content-length and another size": (
        [post(1, ("content-length", "1")) + h.data(1, b"test", end_stream=True)],
        Resets(PROTOCOL_ERROR),
    ),
    "8.1.1 content-length and another size of several DATA": (
        [post(1, ("content-length", "9")) + h.data(1, b"test") + h.data(1, b"test", end_stream=True)],
        Resets(PROTOCOL_ERROR),
    ),
    "8.1.1 content-length and a larger size of several DATA": (
        [post(1, ("content-length", "1")) + h.data(1, b"test") + h.data(1, b"test", end_stream=True)],
        Resets(PROTOCOL_ERROR),
    ),
    "8.1.1 content-length and no DATA": ([get(1, ("content-length", "1"))], Resets(PROTOCOL_ERROR)),
    "8.2.1 an upper-case name": ([get(1, ("X-TEST", "ok"))], Resets(PROTOCOL_ERROR)),
    "8.2.1 a name with a colon": ([get(1, ("x:test", "ok"))], Resets(PROTOCOL_ERROR)),
    "8.2.1 a value with a line feed": ([get(1, ("x-test", "o\nk"))], Resets(PROTOCOL_ERROR)),
    "8.2.1 a value that ends with a space": ([get(1, ("x-test", "ok "))], Resets(PROTOCOL_ERROR)),
    "8.2.2 Connection": ([get(1, ("connection", "keep-alive"))], Resets(PROTOCOL_ERROR)),
    "8.2.2 Transfer-Encoding": ([post(1, ("transfer-encoding", "chunked"))], Resets(PROTOCOL_ERROR)),
    "8.2.2 TE other than trailers": ([get(1, ("te", "trailers, deflate"))], Resets(PROTOCOL_ERROR)),
    "8.3 an unknown pseudo-header field": ([get(1, (":test", "ok"))], Resets(PROTOCOL_ERROR)),
    "8.3 a pseudo-header field of responses": ([get(1, (":status", "200"))], Resets(PROTOCOL_ERROR)),
    "8.3 a pseudo-header field behind others": (
        [h.headers(1, (*GET[:3], ("x-test", "ok"), GET[3]))],
        Resets(PROTOCOL_ERROR),
    ),
    "8.1 a pseudo-header field in trailers": ([post() + h.headers(1, [(":method", "GET")])], Resets(PROTOCOL_ERROR)),
    "8.1 a pseudo-header field in trailers without END_STREAM": (
        [post() + h.data(1, b"body") + h.headers(1, [(":method", "POST")], end_stream=False)],
        Resets(PROTOCOL_ERROR),
    ),
    "8.3.1 an empty :path": ([h.headers(1, (*GET[:3], (":path", "")))], Resets(PROTOCOL_ERROR)),
    "8.3.1 no :method": ([without(":method")], Resets(PROTOCOL_ERROR)),
    "8.3.1 no :method and no :scheme": ([h.headers(1, GET[2:])], Resets(PROTOCOL_ERROR)),
    "8.3.1 no :scheme": ([without(":scheme")], Resets(PROTOCOL_ERROR)),
    "8.3.1 no :path": ([without(":path")], Resets(PROTOCOL_ERROR)),
    "8.3.1 no :authority and no Host": ([without(":authority")], Resets(PROTOCOL_ERROR)),
    "8.3.1 two :method": ([get(1, GET[0])], Resets(PROTOCOL_ERROR)),
    "8.3.1 two :scheme": ([get(1, GET[1])], Resets(PROTOCOL_ERROR)),
    "8.3.1 two :authority": ([get(1, GET[2])], Resets(PROTOCOL_ERROR)),
    "8.3.1 two :path": ([get(1, GET[3])], Resets(PROTOCOL_ERROR)),
    "8.4 PUSH_PROMISE": (
        [h.frame(h.PUSH_PROMISE, h.END_HEADERS, 1, struct.pack(">L", 2) + h.block(GET))],
        Ends(PROTOCOL_ERROR),
    ),
    "8.4 PUSH_PROMISE on an open stream": (
        [post() + h.frame(h.PUSH_PROMISE, h.END_HEADERS, 1, struct.pack(">L", 2) + h.block(GET))],
        Ends(PROTOCOL_ERROR),
    ),
    "8.5 CONNECT with :scheme and :path": ([h.headers(1, [(":method", "CONNECT"), *GET[1:]])], Resets(PROTOCOL_ERROR)),
}

# -- what comes on a stream whose answer was whole before its request

EARLY: Final[dict[str, tuple[bytes, bytes, Outcome]]] = {
    "5.1 RST_STREAM": (post(), h.rst_stream(1, CANCEL), Lives()),
    "5.1 RST_STREAM, then DATA": (post(), h.rst_stream(1) + h.data(1, b"x", end_stream=True), Ends(STREAM_CLOSED)),
    "5.1 RST_STREAM, then HEADERS": (post(), h.rst_stream(1) + get(), Ends(STREAM_CLOSED)),
    "6.1 DATA with END_STREAM": (post(), h.data(1, b"body", end_stream=True), Lives()),
    "6.9 WINDOW_UPDATE of 0": (post(), h.window_update(1, 0), Resets(PROTOCOL_ERROR)),
    "6.9.1 a window above 2^31 - 1": (post(), h.window_update(1, LARGEST) * 2, Resets(FLOW_CONTROL_ERROR)),
    "8.1 trailers": (post(), h.data(1, b"body") + h.headers(1, [("x-sum", "1")]), Lives()),
    "8.1 trailers without END_STREAM": (
        post(),
        h.data(1, b"body") + h.headers(1, [("x-sum", "1")], end_stream=False),
        Resets(PROTOCOL_ERROR),
    ),
    "8.1 a pseudo-header field in trailers": (post(), h.headers(1, [(":method", "POST")]), Resets(PROTOCOL_ERROR)),
    "8.1.1 content-length and another size": (
        post(1, ("content-length", "1")),
        h.data(1, b"test", end_stream=True),
        Resets(PROTOCOL_ERROR),
    ),
}


@pytest.fixture(scope="module")
def theatre() -> Iterator[Stage]:
    with open_stage(lambda urls: {"sites": [{"hosts": ["*"], "upstreams": [urls[0]]}]}) as stage:
        yield stage


@pytest.fixture
def wire(stage: Stage) -> Wire:
    stage.play(answering(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)))
    return stage.client(alpn=("h2",))


@pytest.mark.parametrize("name", VALID)
def test_rfc9113_what_is_right(wire: Wire, name: str) -> None:
    judge(wire, VALID[name])


@pytest.mark.parametrize("name", INVALID)
def test_rfc9113_what_is_wrong(wire: Wire, name: str) -> None:
    judge(wire, INVALID[name])


@pytest.mark.parametrize("name", HPACK_VALID)
def test_rfc7541_what_is_right(wire: Wire, name: str) -> None:
    judge(wire, HPACK_VALID[name])


@pytest.mark.parametrize("name", HPACK_INVALID)
def test_rfc7541_what_is_wrong(wire: Wire, name: str) -> None:
    judge(wire, ([packed(HPACK_INVALID[name])], Ends(COMPRESSION_ERROR)))


def test_3_4_the_servers_preface_is_settings(wire: Wire) -> None:
    """It comes before anything is asked."""
    talk = Talk(wire)
    wire.send(h.PREFACE + h.settings())
    talk.until(lambda: talk.frames)
    first = talk.frames[0]
    assert (first.kind, first.flags, first.stream_id) == (h.SETTINGS, 0, 0)


@pytest.mark.parametrize(
    "start",
    [
        b"INVALID CONNECTION PREFACE\r\n\r\n",
        h.PREFACE + h.frame(h.PING, payload=bytes(8)),
        h.PREFACE + get(),
        h.PREFACE + h.settings(flags=h.ACK),
    ],
    ids=["another preface", "PING first", "HEADERS first", "an acknowledgement first"],
)
def test_3_4_a_preface_that_is_none(wire: Wire, start: bytes) -> None:
    talk = Talk(wire)
    wire.send(start)
    Ends(PROTOCOL_ERROR).judge(talk)


def test_6_5_3_a_client_that_never_acknowledges_our_settings_is_served(wire: Wire) -> None:
    """It goes by the windows of the defaults, of which it has read nothing else."""
    talk = Talk(wire)
    body = [h.data(1, bytes(FRAME_BYTES - 1)) for _ in range(4)]  # 65,532 of 65,535
    wire.send(h.PREFACE + h.settings() + post() + b"".join(body) + h.data(1, end_stream=True) + get(3))
    Serves((1, 3)).judge(talk)


def test_6_8_a_goaway_with_an_unknown_code_lets_streams_end(wire: Wire) -> None:
    """Section 7: an unknown code is no error. The connection ends in order after its last stream."""
    talk = Talk(wire)
    wire.send(h.PREFACE + h.settings() + get() + h.goaway(0, 0xFF))
    while talk.next():
        pass
    assert talk.ended(1)
    assert talk.octets(1) == len(BODY)
    assert [frame.code for frame in talk.of(h.GOAWAY)] in ([], [NO_ERROR])


@pytest.mark.parametrize("frame", [h.goaway(0, 0), h.goaway(0, 0xFF)], ids=["NO_ERROR", "an unknown code"])
def test_6_8_a_goaway_ends_a_connection_without_streams_in_order(wire: Wire, frame: bytes) -> None:
    talk = Talk(wire)
    wire.send(h.PREFACE + h.settings() + frame + PING)
    while talk.next():
        pass
    assert [frame.code for frame in talk.of(h.GOAWAY)] in ([], [NO_ERROR])


@pytest.fixture
def early(stage: Stage) -> Talk:
    """A connection whose requests are answered by their heads, whatever follows them."""

    def answer_heads(wire: Wire) -> None:
        while True:
            try:
                wire.wait_for_more()
                wire.read_head()
            except EOFError:
                return
            wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY))

    stage.play(answer_heads)
    talk = Talk(stage.client(alpn=("h2",)))
    talk.wire.send(h.PREFACE + h.settings())
    return talk


@pytest.mark.parametrize("name", EARLY)
def test_8_1_what_comes_behind_an_early_answer_is_judged(early: Talk, name: str) -> None:
    head, rest, outcome = EARLY[name]
    early.play([head, Until(1), rest])
    outcome.judge(early)


def test_8_1_a_client_that_does_not_end_what_was_answered_is_told_to_stop(early: Talk) -> None:
    early.play([post(), Until(1)])
    early.until(lambda: early.of(h.RST_STREAM))
    assert [(frame.stream_id, frame.code) for frame in early.of(h.RST_STREAM)] == [(1, NO_ERROR)]
    early.play([h.data(1, b"late", end_stream=True)])
    Lives().judge(early)


def test_8_1_many_requests_that_end_behind_their_answers(early: Talk) -> None:
    """More in a moment than may be open at once. Section 8.1.1 asks no whole body of who has its answer."""
    streams = range(1, 301, 2)
    for stream_id in streams:
        early.play([post(stream_id, ("content-length", "9")), Until(stream_id)])
        early.play([h.data(stream_id, b"x", end_stream=True)])
    Serves(tuple(streams)).judge(early)
    assert not early.of(h.RST_STREAM)


def test_8_1_a_client_that_goes_on_after_its_answer_is_told_to_stop_at_once(early: Talk) -> None:
    early.play([post(), Until(1), h.data(1, bytes(1_024)) + PING])
    early.until(lambda: any(frame.payload == PINGED for frame in early.of(h.PING)))
    early.still_lives()
    assert [(frame.stream_id, frame.code) for frame in early.of(h.RST_STREAM)] == [(1, NO_ERROR)]


def test_8_1_head_has_no_body(wire: Wire) -> None:
    talk = Talk(wire)
    wire.send(h.PREFACE + h.settings() + h.headers(1, [(":method", "HEAD"), *GET[1:]]))
    talk.until(lambda: talk.ended(1))
    assert talk.octets(1) == 0
    assert not talk.resets()
