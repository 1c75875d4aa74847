"""Cases of conformance of HTTP/2: steps on a connection, and the one outcome that they must have."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from proxy.protocol.http2 import NO_ERROR
from tests.harness import http2 as h
from tests.harness.wire import Wire

MARK: Final = b"the end?"
PINGED: Final = b"octets 8"
BODY: Final = b"0123456789"
"""What the upstream answers to every request."""


class Until(NamedTuple):
    """A step: wait until the server has ended its side of a stream, or has sent so many octets of a body on it."""

    stream_id: int
    octets: int | None = None


Step = bytes | Until


class Talk:
    """A connection after the preface of both; ``frames`` are all that have come."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.frames: list[h.Frame] = []

    def next(self) -> bool:
        """Read a frame. False at the end."""
        try:
            upper, lower, kind, flags, stream_id = struct.unpack(">HBBBL", self.wire.read_exactly(9))
            size = upper << 8 | lower
            frame = h.Frame(kind, flags, stream_id, self.wire.read_exactly(size) if size else b"")
        except (EOFError, OSError):
            return False
        self.frames.append(frame)
        return True

    def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            assert self.next(), f"the connection ended: {self.frames[-5:]}"

    def of(self, kind: int, stream_id: int | None = None) -> list[h.Frame]:
        return [frame for frame in self.frames if frame.kind == kind and stream_id in (None, frame.stream_id)]

    def ended(self, stream_id: int) -> bool:
        return any(f.flags & h.END_STREAM for f in (*self.of(h.HEADERS, stream_id), *self.of(h.DATA, stream_id)))

    def octets(self, stream_id: int) -> int:
        return sum(len(frame.payload) for frame in self.of(h.DATA, stream_id))

    def play(self, steps: Sequence[Step]) -> None:
        for step in steps:
            if isinstance(step, bytes):
                self.wire.send(step)
            elif step.octets is None:
                self.until(lambda step=step: self.ended(step.stream_id))  # type: ignore[misc]
            else:
                self.until(lambda step=step: self.octets(step.stream_id) >= step.octets)  # type: ignore[misc]

    def still_lives(self) -> None:
        """A PING is answered, and no GOAWAY was said."""
        self.wire.send(h.frame(h.PING, payload=MARK))
        self.until(lambda: any(frame.payload == MARK and frame.flags & h.ACK for frame in self.of(h.PING)))
        assert not self.of(h.GOAWAY)

    def resets(self) -> list[tuple[int, int]]:
        # NO_ERROR: what is left of a request after its answer is not wanted (section 8.1).
        return [(frame.stream_id, frame.code) for frame in self.of(h.RST_STREAM) if frame.code != NO_ERROR]


class Serves(NamedTuple):
    """The requests are answered with 200 and the whole body, no stream is reset."""

    streams: tuple[int, ...] = (1,)

    def judge(self, talk: Talk) -> None:
        talk.until(lambda: all(map(talk.ended, self.streams)))
        for stream_id in self.streams:
            assert b"\x88" in talk.of(h.HEADERS, stream_id)[0].payload, "no :status of 200"
            assert talk.octets(stream_id) == len(BODY)
        talk.still_lives()
        assert not talk.resets()


class Lives(NamedTuple):
    """Nothing comes of it: no stream and no connection ends, and the next request is answered."""

    next_stream: int = 99

    def judge(self, talk: Talk) -> None:
        talk.still_lives()
        assert not talk.resets()
        talk.wire.send(h.headers(self.next_stream))
        Serves((self.next_stream,)).judge(talk)


class Resets(NamedTuple):
    """A stream error: RST_STREAM once with this code, and the connection lives."""

    code: int
    stream_id: int = 1

    def judge(self, talk: Talk) -> None:
        talk.still_lives()
        assert talk.resets() == [(self.stream_id, self.code)]
        talk.wire.send(h.headers(1001))
        talk.until(lambda: talk.ended(1001))
        assert talk.octets(1001) == len(BODY)
        assert talk.resets() == [(self.stream_id, self.code)]


class Ends(NamedTuple):
    """A connection error: GOAWAY once with this code, then the end."""

    code: int

    def judge(self, talk: Talk) -> None:
        while talk.next():
            pass
        assert [frame.code for frame in talk.of(h.GOAWAY)] == [self.code]


class Acknowledges(NamedTuple):
    """SETTINGS are acknowledged once more."""

    def judge(self, talk: Talk) -> None:
        talk.still_lives()
        acknowledged = [frame for frame in talk.of(h.SETTINGS) if frame.flags & h.ACK]
        assert [frame.payload for frame in acknowledged] == [b"", b""], "the preface's and this one's"


class Pongs(NamedTuple):
    """So many PING frames are answered, with their octets."""

    answers: int

    def judge(self, talk: Talk) -> None:
        talk.still_lives()
        pongs = [frame for frame in talk.of(h.PING) if frame.flags & h.ACK and frame.payload != MARK]
        assert [frame.payload for frame in pongs] == [PINGED] * self.answers


class Sends(NamedTuple):
    """DATA frames of these sizes on stream 1, and no more for want of a window."""

    sizes: list[int]

    def judge(self, talk: Talk) -> None:
        talk.until(lambda: talk.octets(1) >= sum(self.sizes))
        talk.still_lives()
        assert [len(frame.payload) for frame in talk.of(h.DATA, 1)] == self.sizes
        assert not talk.resets()


Outcome = Serves | Lives | Resets | Ends | Acknowledges | Pongs | Sends
Case = tuple[Sequence[Step], Outcome]


def judge(wire: Wire, case: Case) -> None:
    """Exchange the prefaces, play the steps, and look at what comes of it."""
    steps, outcome = case
    talk = Talk(wire)
    wire.send(h.PREFACE + h.settings() + h.settings(flags=h.ACK))
    talk.until(lambda: any(frame.flags & h.ACK for frame in talk.of(h.SETTINGS)))
    talk.play(steps)
    outcome.judge(talk)
