"""HTTP/2 frames written by hand, and a peer of our codec that sees every frame it sends."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hpack import Decoder, Encoder

from proxy.protocol.http2 import ClientConnection, Event, Limits, RequestHeads, ResponseHeads, ServerConnection

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
PRIORITY_UPDATE = 0x10
END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
HAS_PRIORITY = 0x20

Headers = Sequence[tuple[str, str]]

GET: Headers = (
    (":method", "GET"),
    (":scheme", "https"),
    (":authority", "example.org"),
    (":path", "/"),
)
POST: Headers = ((":method", "POST"), *GET[1:])
OK: Headers = ((":status", "200"),)


class Frame(NamedTuple):
    """A frame as it was seen."""

    kind: int
    flags: int
    stream_id: int
    payload: bytes

    @property
    def code(self) -> int:
        """The error code of RST_STREAM or GOAWAY."""
        return int.from_bytes(self.payload[:4] if self.kind == RST_STREAM else self.payload[4:8], "big")


def frame(kind: int, flags: int = 0, stream_id: int = 0, payload: bytes = b"") -> bytes:
    """Any frame, right or wrong."""
    return struct.pack(">HBBBL", len(payload) >> 8, len(payload) & 0xFF, kind, flags, stream_id) + payload


def settings(*pairs: tuple[int, int], flags: int = 0) -> bytes:
    return frame(SETTINGS, flags, 0, b"".join(struct.pack(">HL", *pair) for pair in pairs))


def block(headers: Iterable[tuple[str, str]]) -> bytes:
    """A header block that leaves the peer's dynamic table alone."""
    return b"".join(_literal(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers)


def _literal(name: bytes, value: bytes) -> bytes:
    return b"\x00" + _string(name) + _string(value)


def _string(text: bytes) -> bytes:
    size = len(text)
    if size < 127:
        return bytes((size,)) + text
    octets = bytearray((127,))
    size -= 127
    while size >= 128:
        octets.append(size & 127 | 128)
        size >>= 7
    octets.append(size)
    return bytes(octets) + text


def headers(
    stream_id: int,
    fields: Iterable[tuple[str, str]] = GET,
    *,
    end_stream: bool = True,
    end_headers: bool = True,
    flags: int = 0,
    prefix: bytes = b"",
) -> bytes:
    flags |= (END_STREAM if end_stream else 0) | (END_HEADERS if end_headers else 0)
    return frame(HEADERS, flags, stream_id, prefix + block(fields))


def data(stream_id: int, body: bytes = b"", *, end_stream: bool = False) -> bytes:
    return frame(DATA, END_STREAM if end_stream else 0, stream_id, body)


def rst_stream(stream_id: int, code: int = 8) -> bytes:
    return frame(RST_STREAM, 0, stream_id, struct.pack(">L", code))


def window_update(stream_id: int, increment: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream_id, struct.pack(">L", increment))


def goaway(last_stream_id: int = 0, code: int = 0) -> bytes:
    return frame(GOAWAY, 0, 0, struct.pack(">LL", last_stream_id, code))


def split_frames(sent: bytes) -> list[Frame]:
    """What a peer sent, frame by frame; it must end with a whole one."""
    frames: list[Frame] = []
    at = 0
    while at < len(sent):
        upper, lower, kind, flags, stream_id = struct.unpack_from(">HBBBL", sent, at)
        end = at + 9 + (upper << 8 | lower)
        assert end <= len(sent), "a frame was sent in part"
        frames.append(Frame(kind, flags, stream_id, sent[at + 9 : end]))
        at = end
    return frames


class _Peer:
    """Feeds our codec and collects what comes out of it."""

    def __init__(self, connection: ServerConnection | ClientConnection) -> None:
        self.connection = connection
        self.events: list[Event] = []
        self.frames: list[Frame] = []
        self.now = 1000.0
        self.encoder = Encoder()
        self.decoder = Decoder()

    def feed(self, *parts: bytes) -> list[Event]:
        """The events of these bytes; what the codec sends in turn is in ``frames``."""
        events: list[Event] = []
        for part in parts:
            events += self.connection.feed(part, self.now)
        self.events += events
        self.take()
        return events

    def take(self) -> list[Frame]:
        """Take everything that the codec would send now."""
        taken: list[Frame] = []
        while self.connection.has_output:
            taken += split_frames(self.connection.take_output())
        self.frames += taken
        return taken

    def of(self, kind: int, stream_id: int | None = None) -> list[Frame]:
        return [f for f in self.frames if f.kind == kind and stream_id in (None, f.stream_id)]

    def goaway_codes(self) -> list[int]:
        return [f.code for f in self.of(GOAWAY)]

    def reset_codes(self, stream_id: int) -> list[int]:
        return [f.code for f in self.of(RST_STREAM, stream_id)]

    def body(self, stream_id: int) -> bytes:
        return b"".join(f.payload for f in self.of(DATA, stream_id))


class ClientPeer(_Peer):
    """A client of a `ServerConnection`; the preface has been exchanged unless ``bare``."""

    connection: ServerConnection

    def __init__(self, limits: Limits | None = None, *, bare: bool = False, acked: bool = True) -> None:
        limits = Limits() if limits is None else limits
        super().__init__(ServerConnection(limits, RequestHeads(limits)))
        if not bare:
            self.feed(PREFACE + settings() + (settings(flags=ACK) if acked else b""))
            self.frames.clear()


class ServerPeer(_Peer):
    """A server to a `ClientConnection`."""

    connection: ClientConnection

    def __init__(self, limits: Limits | None = None) -> None:
        limits = Limits() if limits is None else limits
        super().__init__(ClientConnection(limits, ResponseHeads(limits)))
        first = self.connection.take_output()
        assert first.startswith(PREFACE)
        self.frames += split_frames(first[len(PREFACE) :])
        self.feed(settings() + settings(flags=ACK))
        self.frames.clear()
