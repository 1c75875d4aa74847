"""After 101: bytes both ways, unread, until both sides have ended or neither has said anything for too long."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Protocol

from proxy.observe.counters import TIMEOUTS_TUNNEL, TUNNELS_OPEN
from proxy.stream.stream import HIGH_WATER_BYTES, Stream, StreamHandler

HALF_CLOSED_IDLE_SECS = 60.0
"""What is left to the other side when one has ended: it is about to end too, or it has gone without a word."""


class TunnelEnd(Protocol):
    """What a tunnel needs of its client's side: a ``Stream``, or a stream of HTTP/2 that behaves like one."""

    @property
    def handler(self) -> StreamHandler: ...
    @handler.setter
    def handler(self, handler: StreamHandler) -> None: ...
    @property
    def half_closes(self) -> bool: ...
    @property
    def buffered(self) -> int: ...
    def write(self, data: bytes) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def keep_watching(self) -> None: ...
    def expect(self, when: float) -> None: ...
    def shut_down_writing(self) -> None: ...
    def close(self) -> None: ...


class Tunnel:
    """Joins two streams. It becomes their handler and closes them; then it calls ``on_end``."""

    __slots__ = (
        "_cells",
        "_client",
        "_ended",
        "_idle_secs",
        "_on_end",
        "_rest",
        "_sides",
        "_upstream",
        "bytes_to_client",
        "expired",
    )

    def __init__(
        self,
        client: TunnelEnd,
        upstream: Stream,
        *,
        idle_secs: float,
        from_client: bytes,
        from_upstream: bytes,
        cells: memoryview,
        on_end: Callable[[], None],
    ) -> None:
        self._client = client
        self._upstream = upstream
        self._idle_secs = idle_secs
        self._rest = (from_client, from_upstream)
        self._cells = cells
        self._on_end: Callable[[], None] | None = on_end
        self._ended = False
        self.bytes_to_client = 0
        self.expired = False
        self._sides: tuple[_Side, ...] = (_Side(self, client, upstream), _Side(self, upstream, client))

    def start(self) -> None:
        """Take the streams over, with what had come beyond the heads."""
        self._cells[TUNNELS_OPEN] += 1
        from_client, from_upstream = self._rest
        for side, early in zip(self._sides, (from_client, from_upstream), strict=True):
            side.stream.handler = side
            side.stream.resume_reading()
            if early and not self._ended:
                side.on_data(early)
        self.touch()

    def touch(self) -> None:
        """Something moved: the idle time begins anew. The client's stream keeps the time for both."""
        if not self._ended:
            self._client.expect(monotonic() + self._idle_secs)

    def count(self, source: TunnelEnd, size: int) -> None:
        """``size`` bytes came from ``source``."""
        if source is self._upstream:
            self.bytes_to_client += size

    def timed_out(self) -> None:
        """Neither side said anything for too long."""
        self._cells[TIMEOUTS_TUNNEL] += 1
        self.expired = True
        self.end()

    def side_ended(self) -> None:
        """One more side has ended: the tunnel ends with the second."""
        self._idle_secs = min(self._idle_secs, HALF_CLOSED_IDLE_SECS)
        self.touch()
        if all(side.ended for side in self._sides):
            self.end()

    def end(self) -> None:
        """Close both streams, after what they have buffered (idempotent)."""
        if self._ended:
            return
        self._ended = True
        self._cells[TUNNELS_OPEN] -= 1
        self._upstream.close()
        self._client.close()
        on_end, self._on_end = self._on_end, None
        # Each knows the other: without this both, and their generation, would wait for the garbage collection.
        self._sides = ()
        if on_end is not None:
            on_end()


class _Side:
    """One direction: what comes from ``stream`` goes to ``other``."""

    __slots__ = ("_other", "_shut", "_tunnel", "ended", "stream")

    def __init__(self, tunnel: Tunnel, stream: TunnelEnd, other: TunnelEnd) -> None:
        self._tunnel = tunnel
        self.stream = stream
        self._other = other
        self.ended = False
        self._shut = False  # our side of ``stream`` waits for its buffer to empty before it ends

    def on_open(self) -> None: ...

    def on_data(self, data: bytes) -> None:
        self._tunnel.count(self.stream, len(data))
        self._tunnel.touch()
        self.stream.keep_watching()
        self._other.write(data)
        if self._other.buffered > HIGH_WATER_BYTES:
            self.stream.pause_reading()

    def on_eof(self) -> None:
        self.ended = True
        if not self._other.half_closes:
            self._tunnel.end()
        elif self._other.buffered:
            handler = self._other.handler
            assert isinstance(handler, _Side)
            handler._shut = True
        else:
            self._other.shut_down_writing()
        self._tunnel.side_ended()

    def on_drained(self) -> None:
        if self._shut and not self.stream.buffered:
            self.stream.shut_down_writing()
        elif not self._peer_ended:
            self._tunnel.touch()
            self._other.resume_reading()

    @property
    def _peer_ended(self) -> bool:
        handler = self._other.handler
        return isinstance(handler, _Side) and handler.ended

    def on_lost(self, error: OSError) -> None:
        self._tunnel.end()

    def on_write_failed(self, error: OSError) -> None:
        self._tunnel.end()

    def on_read_deadline(self) -> None:
        self._tunnel.timed_out()

    def on_write_deadline(self) -> None:
        self._tunnel.timed_out()
