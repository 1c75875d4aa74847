"""What is small on the wire must be neither much work nor much memory."""

from __future__ import annotations

from proxy.protocol.http1 import RequestHead
from proxy.protocol.http2 import Body, BodyEnd, Request
from tests.harness import http2 as h
from tests.harness.http2 import POST, ClientPeer

LONG = bytes(3_900).replace(b"\0", b"v")
"""A field that fits into the dynamic table of 4,096 bytes (RFC 7541 section 4.1)."""
NEWEST = b"\xbe"
"""Index 62: the newest entry of the dynamic table."""


def test_what_one_read_brings_of_a_body_is_one_piece() -> None:
    """However small its frames, and whatever comes between: an upstream is written to once a wake-up, not each time."""
    peer = ClientPeer()
    peer.feed(h.headers(1, POST, end_stream=False), h.headers(3, POST, end_stream=False))
    frames = [h.data(stream_id, bytes([65 + n])) for n in range(20) for stream_id in (1, 3)]
    ping = h.frame(h.PING, payload=bytes(8))
    events = peer.feed(b"".join([*frames, h.data(1, b"!", end_stream=True), ping, h.data(3, b"?")]))
    letters = bytes(range(65, 85))
    assert events == [Body(1, letters + b"!"), Body(3, letters + b"?"), BodyEnd(1, ())]
    assert peer.feed(h.data(3, b"more")) == [Body(3, b"more")]


def test_short_blocks_of_long_heads_are_not_kept() -> None:
    """A block of 40 bytes may stand for 28 KB by references to one entry of the dynamic table, and an idle connection
    would keep what is made of it."""
    peer = ClientPeer()
    literal = b"\x40\x03x-a\x7f" + _rest(len(LONG)) + LONG
    peer.feed(_request(1, _head(b"/") + literal))
    kept, not_kept = ([_seen(peer, _head(b"/") + fields) for _ in range(2)] for fields in (b"", 7 * NEWEST))
    assert kept[0] is kept[1]
    assert not_kept[0] is not not_kept[1]
    assert not_kept[0] == not_kept[1]


def _request(stream_id: int, block: bytes) -> bytes:
    return h.frame(h.HEADERS, h.END_HEADERS | h.END_STREAM, stream_id, block)


def _seen(peer: ClientPeer, block: bytes) -> RequestHead:
    (event,) = peer.feed(_request(peer.connection.last_stream_id + 2, block))
    assert isinstance(event, Request)
    return event.head


def _head(path: bytes) -> bytes:
    """:method GET, :scheme https, :path and :authority without use of the dynamic table (RFC 7541 section 6.2.2)."""
    return b"\x82\x87\x04" + bytes([len(path)]) + path + b"\x01\x01a"


def _rest(size: int) -> bytes:
    """What follows a prefix of 7 ones of an integer (RFC 7541 section 5.1)."""
    size -= 127
    out = bytearray()
    while size >= 128:
        out.append(size % 128 + 128)
        size //= 128
    return bytes([*out, size])
