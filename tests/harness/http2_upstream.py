"""An upstream of HTTP/2 for scripts of `RawUpstream`: frames by hand, right or wrong."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import NamedTuple

from hpack import Decoder

from tests.harness import http2 as h
from tests.harness.upstream import Script
from tests.harness.wire import Wire


class Asked(NamedTuple):
    """A request's head, as it came."""

    stream_id: int
    headers: list[tuple[str, str]]
    ended: bool

    def get(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)


class Http2Server:
    """One connection: the preface has been exchanged; ``frames`` are all that came, ``bodies`` the DATA by stream."""

    def __init__(self, wire: Wire, *pairs: tuple[int, int]) -> None:
        self.wire = wire
        assert wire.read_exactly(len(h.PREFACE)) == h.PREFACE
        wire.send(h.settings(*pairs))
        self.frames: list[h.Frame] = []
        self.bodies: dict[int, bytearray] = {}
        self._decoder = Decoder()

    def next(self) -> h.Frame:
        """The next frame; SETTINGS and PING are answered. Raises EOFError at the end."""
        upper, lower, kind, flags, stream_id = struct.unpack(">HBBBL", self.wire.read_exactly(9))
        size = upper << 8 | lower
        frame = h.Frame(kind, flags, stream_id, self.wire.read_exactly(size) if size else b"")
        self.frames.append(frame)
        if kind == h.SETTINGS and not flags & h.ACK:
            self.wire.send(h.settings(flags=h.ACK))
        elif kind == h.PING and not flags & h.ACK:
            self.wire.send(h.frame(h.PING, h.ACK, 0, frame.payload))
        elif kind == h.DATA:
            self.bodies.setdefault(stream_id, bytearray()).extend(frame.payload)
        return frame

    def until(self, condition: Callable[[h.Frame], object]) -> h.Frame:
        """The first frame from now on for which ``condition`` holds."""
        while True:
            frame = self.next()
            if condition(frame):
                return frame

    def asked(self) -> Asked:
        """The next request."""
        frame = self.until(lambda f: f.kind == h.HEADERS)
        fields = [(str(name), str(value)) for name, value in self._decoder.decode(frame.payload)]
        return Asked(frame.stream_id, fields, bool(frame.flags & h.END_STREAM))

    def body(self, stream_id: int) -> bytes:
        """The whole body of a request."""
        self.until(lambda f: f.stream_id == stream_id and f.flags & h.END_STREAM)
        return bytes(self.bodies.get(stream_id, b""))

    def answer(self, stream_id: int, body: bytes = b"ok", fields: Iterable[tuple[str, str]] = ()) -> None:
        """A whole response."""
        head = [(":status", "200"), ("content-length", str(len(body))), *fields]
        self.wire.send(h.headers(stream_id, head, end_stream=not body))
        if body:
            self.wire.send(h.data(stream_id, body, end_stream=True))


def serving(play: Callable[[Http2Server], None], *pairs: tuple[int, int]) -> Script:
    """A script that speaks HTTP/2 and announces the settings ``pairs``; the end of the connection ends it."""

    def script(wire: Wire) -> None:
        try:
            play(Http2Server(wire, *pairs))
        except EOFError:
            return

    return script


def answering_all(server: Http2Server) -> None:
    """Answers ``ok`` to every request."""
    while True:
        asked = server.asked()
        if not asked.ended:
            server.body(asked.stream_id)
        server.answer(asked.stream_id)
