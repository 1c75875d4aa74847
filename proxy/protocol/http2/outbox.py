"""What waits to be sent on a connection, and in which order it goes: one string a wake-up for all streams.

Order (RFC 9218 section 10): control frames first; then streams by urgency; within an urgency those that are not
incremental one after another in the order of their ids, and the incremental ones in turns of a frame. Where an urgency
has both kinds, the former are together one that takes turns with the latter.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Final

from proxy.protocol.http2 import frames
from proxy.protocol.http2.frames import DATA, DEFAULT_WINDOW, END_HEADERS, END_STREAM, HEADERS, MIN_MAX_FRAME_BYTES
from proxy.protocol.http2.hpack_encoder import TABLE_SIZE_ZERO
from proxy.protocol.http2.stream import Stream

HIGH_WATER_BYTES: Final = 65_536
LOW_WATER_BYTES: Final = 16_384
TOTAL_HIGH_WATER_BYTES: Final = 1_048_576
JOINED_BYTES: Final = 4_096
"""Pieces are put together up to so much: as objects, those of a few bytes take twenty times their size."""
_UPDATES_A_FRAME: Final = 4
_CREDITED_BYTES: Final = 512
"""A smaller frame earns WINDOW_UPDATE only if nothing is left to send, a short message say: else windows of an octet
could go on for ever."""
_MAX_UPDATE_CREDIT: Final = 100_000


class Outbox:
    """The sending side of a connection. ``on_ended`` is called when END_STREAM of a stream has been taken."""

    __slots__ = (
        "_control",
        "_drained",
        "_on_ended",
        "_ready",
        "_tick",
        "_updates",
        "control_bytes",
        "queued",
        "table_announced",
        "update_credit",
        "window",
    )

    def __init__(self, on_ended: Callable[[Stream], None]) -> None:
        self._on_ended = on_ended
        self._control: list[bytes] = []
        self.control_bytes = 0
        """How much of what waits answers frames of the peer."""
        self._updates: dict[int, int] = {}
        self._ready: list[Stream] = []
        self._drained: list[int] = []
        self._tick = 0
        self.queued = 0
        """Bytes of bodies that wait, of all streams."""
        self.window = DEFAULT_WINDOW
        """The connection's (RFC 9113 section 6.9)."""
        self.update_credit = 0
        """WINDOW_UPDATE frames that the peer may send for what it got."""
        self.table_announced = False

    @property
    def pending(self) -> bool:
        """Whether ``take`` would return something."""
        if self._control or self._updates:
            return True
        if not self._ready:
            return False
        return self.window > 0 or any(stream.blocks or not stream.queued for stream in self._ready)

    # -- what is to be sent --------------------------------------------------------------------------------------------

    def control(self, frame: bytes) -> None:
        """A frame that answers one of the peer's, or governs the connection."""
        self._control.append(frame)
        self.control_bytes += len(frame)

    def reset(self, stream_id: int, code: int) -> None:
        """RST_STREAM on a stream that is forgotten."""
        self._updates.pop(stream_id, None)
        self.control(frames.rst_stream(stream_id, code))

    def window_update(self, stream_id: int, increment: int) -> None:
        """WINDOW_UPDATE; several become one, so that a peer which does not read gets no more room and costs none."""
        self._updates[stream_id] = self._updates.get(stream_id, 0) + increment

    def open(self, stream: Stream, block: bytes, end_stream: bool) -> None:
        """A request's head: at once, since ids must rise on the wire (section 5.1.1)."""
        self._control += self._block(stream.id, block, END_STREAM if end_stream else 0)

    def block(self, stream: Stream, block: bytes, end_stream: bool) -> None:
        """A head on a stream that is open."""
        stream.blocks.append((block, end_stream))
        self.consider(stream)

    def whole(self, stream: Stream, block: bytes, body: bytes) -> None:
        """A head, and a body that is complete."""
        if body:
            stream.blocks.append((block, False))
            stream.queue.append(body)
            stream.ending = True
            size = len(body)
            stream.queued += size
            self.queued += size
        else:
            stream.blocks.append((block, True))
        if not stream.ready:
            stream.ready = True
            self._ready.append(stream)

    def data(self, stream: Stream, data: bytes) -> None:
        """A piece of a body, not empty."""
        size = len(data)
        queue = stream.queue
        if queue and len(queue[-1]) + size <= JOINED_BYTES:
            queue[-1] = b"".join((queue[-1], data))
        else:
            queue.append(data)
        stream.queued += size
        self.queued += size
        self.consider(stream)

    def consider(self, stream: Stream) -> None:
        """Something has changed: the stream may have become sendable."""
        if not stream.ready and stream.sendable:
            stream.ready = True
            self._ready.append(stream)

    def forget(self, stream: Stream) -> None:
        """The stream is gone: drop what waits."""
        self.queued -= stream.queued
        stream.queue.clear()
        stream.queued = 0
        stream.blocks.clear()
        stream.ending = False
        if stream.ready:
            stream.ready = False
            self._ready.remove(stream)

    def clear(self) -> None:
        """The connection is over: only control frames go out."""
        self._ready.clear()
        self._updates.clear()
        self.queued = 0

    # -- back-pressure -------------------------------------------------------------------------------------------------

    def blocked(self, stream: Stream) -> bool:
        """Whether the stream's producer is to stop; it will be named by ``take_drained`` then."""
        if stream.queued > HIGH_WATER_BYTES or (
            stream.queued > LOW_WATER_BYTES and self.queued > TOTAL_HIGH_WATER_BYTES
        ):
            stream.held_back = True
            return True
        return False

    def take_drained(self) -> list[int]:
        """The streams whose producers may go on."""
        drained = self._drained
        if drained:
            self._drained = []
        return drained

    # -- taking --------------------------------------------------------------------------------------------------------

    def take(self, max_bytes: int) -> bytes:
        """All control frames, and about ``max_bytes`` of bodies."""
        parts: list[bytes | memoryview] = list(self._control)
        self._control.clear()
        self.control_bytes = 0
        if self._updates:
            parts += [frames.window_update(*update) for update in self._updates.items()]
            self._updates.clear()
        ready = self._ready
        if len(ready) == 1:
            self._emit(ready[0], parts, max_bytes)
        elif ready:
            self._schedule(parts, max_bytes)
        if ready:
            self._ready = [stream for stream in self._ready if stream.ready]
        # What resets a stream that has just ended (section 8.1) waits for the next call, for a record of its own: curl
        # up to 7.88 drops an answer that comes in one piece with the reset behind it.
        return b"".join(parts)

    def _schedule(self, parts: list[bytes | memoryview], budget: int) -> None:
        urgencies: dict[int, list[Stream]] = {}
        for stream in self._ready:
            urgencies.setdefault(stream.priority.urgency, []).append(stream)
        for urgency in sorted(urgencies):
            budget = self._schedule_equals(urgencies[urgency], parts, budget)
            if budget <= 0:
                return

    def _schedule_equals(self, streams: list[Stream], parts: list[bytes | memoryview], budget: int) -> int:
        in_turns = [stream for stream in streams if stream.priority.incremental]
        in_order = [stream for stream in streams if not stream.priority.incremental]
        in_turns.sort(key=_by_turn)
        in_order.sort(key=_by_id)
        while in_turns or in_order:
            if in_order:
                first = in_order[0]
                budget -= self._emit(first, parts, min(budget, MIN_MAX_FRAME_BYTES) if in_turns else budget)
                if self.window <= 0 or not first.ready:
                    in_order.pop(0)
                if budget <= 0:
                    return budget
            for stream in in_turns:
                budget -= self._emit(stream, parts, min(budget, MIN_MAX_FRAME_BYTES))
                self._tick += 1
                stream.turn = self._tick
                if budget <= 0:
                    return budget
            in_turns = [stream for stream in in_turns if stream.ready and self.window > 0]
        return budget

    def _emit(self, stream: Stream, parts: list[bytes | memoryview], budget: int) -> int:
        """Heads, then at most ``budget`` of the body; returns how much of the budget that took."""
        size = stream.queued
        if (
            stream.ending
            and len(stream.blocks) == len(stream.queue) == 1
            and size <= MIN_MAX_FRAME_BYTES
            and size <= budget
            and size <= self.window
            and size <= stream.send_window
            and stream.trailers is None
        ):
            self._emit_whole(stream, parts, size)
            return size
        ended = False
        for block, end_stream in stream.blocks:
            parts += self._block(stream.id, block, END_STREAM if end_stream else 0)
            ended = end_stream
        stream.blocks.clear()
        sent = 0
        if stream.queued:
            left = min(budget, self.window, stream.send_window)
            queue = stream.queue
            done, count = 0, len(queue)
            while left > 0 and done < count:
                piece = queue[done]
                size = len(piece)
                take = min(size, left, MIN_MAX_FRAME_BYTES)
                if take < size:
                    view = memoryview(piece)
                    queue[done] = view[take:]
                    piece = view[:take]
                else:
                    done += 1
                    ended = stream.ending and done == count and stream.trailers is None
                parts += (frames.header(take, DATA, END_STREAM if ended else 0, stream.id), piece)
                left -= take
                sent += take
                if take >= _CREDITED_BYTES or done == count:
                    self.update_credit += _UPDATES_A_FRAME
            del queue[:done]
            if sent:
                self.window -= sent
                stream.send_window -= sent
                stream.queued -= sent
                self.queued -= sent
                if stream.held_back and stream.queued <= LOW_WATER_BYTES:
                    stream.held_back = False
                    self._drained.append(stream.id)
        if stream.ending and not stream.queued and not ended:
            ended = True
            if stream.trailers is None:
                parts.append(frames.header(0, DATA, END_STREAM, stream.id))
            else:
                parts += self._block(stream.id, stream.trailers, END_STREAM)
        if ended:
            # Heads and trailers too: a gRPC client sends two for a call, whatever it is answered.
            self.update_credit += _UPDATES_A_FRAME
            stream.ready = False
            stream.ending = False
            self._on_ended(stream)
        elif not stream.sendable:
            stream.ready = False
        self.update_credit = min(self.update_credit, _MAX_UPDATE_CREDIT)
        return sent

    def _emit_whole(self, stream: Stream, parts: list[bytes | memoryview], size: int) -> None:
        """A head and a body of a frame, after which nothing is left: what most answers are."""
        stream_id = stream.id
        block = stream.blocks[0][0]
        if self.table_announced and len(block) <= MIN_MAX_FRAME_BYTES:
            parts += (frames.header(len(block), HEADERS, END_HEADERS, stream_id), block)
        else:
            parts += self._block(stream_id, block, 0)
        parts += (frames.header(size, DATA, END_STREAM, stream_id), stream.queue[0])
        self.update_credit = min(self.update_credit + _UPDATES_A_FRAME, _MAX_UPDATE_CREDIT)
        self.window -= size
        self.queued -= size
        stream.blocks.clear()
        stream.queue.clear()
        stream.queued = 0
        stream.ready = stream.ending = False
        self._on_ended(stream)

    def _block(self, stream_id: int, block: bytes, flags: int) -> list[bytes]:
        if not self.table_announced:
            self.table_announced = True
            block = TABLE_SIZE_ZERO + block
        return frames.header_block(stream_id, block, MIN_MAX_FRAME_BYTES, flags)


_by_turn = attrgetter("turn")
_by_id = attrgetter("id")
