"""An HTTP/2 connection, either side (RFC 9113). See the package's text for how it is used.

Theory of operation. ``feed`` takes whole frames off the input; a table leads from a frame's type to its method. A
`ConnectionFault` raised anywhere below ends the connection, a `StreamFault` ends the stream that the frame is about.
Streams that are open or half-closed have a `Stream`; of those closed, the last ones that we reset are remembered, with
the window that the peer had left: what still comes on them is dropped, and more than fits into that window cannot have
been under way when we reset the stream, so it is counted. On others it is an error (section 5.1). Whatever is sent
waits in the `Outbox` until ``take_output``, and a stream is closed only when its last frame has been taken: so what
waits is bounded by the streams that the peer may have open.

Memory for bodies that come in: the connection's window is given back on receipt, so that no stream waits for another;
what bounds them is each stream's own window, see `Limits`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

from proxy.protocol.http1 import Trailers
from proxy.protocol.http2 import frames
from proxy.protocol.http2.errors import (
    CONNECTION_REASONS,
    NO_ERROR,
    REFUSED_STREAM,
    STREAM_REASONS,
    ConnectionFault,
    StreamFault,
)
from proxy.protocol.http2.events import Body, BodyEnd, ConnectionFailed, Event, GoAway, Pong, StreamReset
from proxy.protocol.http2.fields import check_trailers
from proxy.protocol.http2.frames import DEFAULT_WINDOW, HEADER_BYTES, MAX_STREAM_ID, MAX_WINDOW
from proxy.protocol.http2.hpack_decoder import HeaderList, HeaderListTooLargeError, HpackDecoder, HpackError
from proxy.protocol.http2.limits import Limits, Rate
from proxy.protocol.http2.outbox import Outbox
from proxy.protocol.http2.stream import Stream

_REMEMBERED_RESETS: Final = 256  # at least; at most twice as many
_LATE_HEAD_BYTES: Final = 1024  # of the window, at least, that a header block on a stream that we have reset takes
_ENDED: Final = -1  # in place of the window: nothing more can be under way

_LAST_CALL: Final = b"last-id?"  # the PING whose answer says that the first GOAWAY has been read
_SETTINGS_A_TOKEN: Final = 16
SMALL_BYTES: Final = 32
"""Less in a DATA frame that ends nothing costs more to take than to send: it is counted."""


class Bucket:
    """A token bucket for a `Rate`."""

    __slots__ = ("_at", "_rate", "_tokens")

    def __init__(self, rate: Rate, now: float) -> None:
        self._rate = rate
        self._tokens = rate.burst
        self._at = now

    def spend(self, cost: float, now: float) -> bool:
        """Whether ``cost`` tokens were there."""
        tokens = min(self._rate.burst, self._tokens + (now - self._at) * self._rate.per_sec)
        self._at = now
        self._tokens = tokens - cost
        return self._tokens >= 0


class Connection:
    """What both roles have. See the package's text for how it is used."""

    __slots__ = (
        "_block",
        "_block_ended",
        "_block_fault",
        "_block_frames",
        "_block_stream",
        "_bodies",
        "_buckets",
        "_decoder",
        "_events",
        "_failed",
        "_final_goaway",
        "_held",
        "_last_call",
        "_limits",
        "_more",
        "_need",
        "_now",
        "_outbox",
        "_peer_goaway",
        "_peer_initial_window",
        "_pool",
        "_receive_full",
        "_receive_used",
        "_receive_window",
        "_resets",
        "_resets_before",
        "_settings_acked",
        "_started",
        "_streams",
    )

    _limits: Limits

    def __init__(self, limits: Limits, preface: bytes, settings: dict[int, int]) -> None:
        self._limits = limits
        self._outbox = Outbox(self._local_ended)
        self._decoder = HpackDecoder()
        self._streams: dict[int, Stream] = {}
        self._resets: dict[int, int] = {}
        self._resets_before: dict[int, int] = {}
        self._events: list[Event] = []
        # What one ``feed`` brings of a body is one event, however many frames it came in: where the stream's is in
        # ``_events``, and by that what follows it.
        self._bodies: dict[int, int] = {}
        self._more: dict[int, list[bytes]] = {}
        self._buckets: dict[str, Bucket] = {}
        self._now = 0.0
        self._held = bytearray()
        self._need = 0
        self._started = False
        self._failed = False
        self._last_call = False
        self._final_goaway = False
        self._peer_goaway = False
        self._settings_acked = False
        self._peer_initial_window = DEFAULT_WINDOW
        self._pool = limits.window_pool_bytes
        self._receive_window = self._receive_full = max(limits.connection_window_bytes, DEFAULT_WINDOW)
        self._receive_used = 0
        self._block: bytearray | None = None
        self._block_stream = 0
        self._block_ended = False
        self._block_fault = ""
        self._block_frames = 0
        self._outbox.control(preface + frames.settings(settings))
        if self._receive_window > DEFAULT_WINDOW:
            self._outbox.window_update(0, self._receive_window - DEFAULT_WINDOW)

    # -- state, to be read ---------------------------------------------------------------------------------------------

    @property
    def open_streams(self) -> int:
        """How many streams are open."""
        return len(self._streams)

    @property
    def last_stream_id(self) -> int:
        """The highest stream that the peer has opened (server role) or we have (client role); 0: none yet."""
        raise NotImplementedError

    @property
    def settings_acked(self) -> bool:
        """Whether the peer has acknowledged our SETTINGS (RFC 9113 section 6.5.3: it may be given a time for it)."""
        return self._settings_acked

    @property
    def started(self) -> bool:
        """Whether the peer's preface, its first SETTINGS, has come (a server's client owes it like a request head)."""
        return self._started

    @property
    def mid_head(self) -> bool:
        """Whether the peer has begun a frame other than DATA, or a header block, and not ended it (header timeout)."""
        if self._block is not None or not self._started:
            return True
        held = self._held
        return bool(held) and not (len(held) > 3 and held[3] == frames.DATA)

    @property
    def failed(self) -> bool:
        """Whether `ConnectionFailed` has been told, or ``fail`` called."""
        return self._failed

    @property
    def finished(self) -> bool:
        """Whether a final GOAWAY was sent or received, no stream is open and no output waits: to be closed."""
        over = self._final_goaway or self._peer_goaway or self._failed
        return over and not self._streams and not self._outbox.pending

    @property
    def has_output(self) -> bool:
        """Whether ``take_output`` would return something now."""
        return self._outbox.pending

    def queued(self, stream_id: int) -> int:
        """Bytes of body that were given to ``send_data`` and not yet taken."""
        stream = self._streams.get(stream_id)
        return 0 if stream is None else stream.queued

    def blocked(self, stream_id: int) -> bool:
        """Whether the producer of this stream is to stop: its queue is above 64 KB, or, while all queues of the
        connection together are above 1 MB, above 16 KB. ``take_drained`` will name the stream."""
        stream = self._streams.get(stream_id)
        return stream is not None and self._outbox.blocked(stream)

    def stalled(self, stream_id: int) -> bool:
        """Whether something is queued that only a WINDOW_UPDATE of the peer can set going (zero-window hold)."""
        stream = self._streams.get(stream_id)
        return stream is not None and stream.queued > 0 and (stream.send_window <= 0 or self._outbox.window <= 0)

    # -- input ---------------------------------------------------------------------------------------------------------

    def feed(self, data: bytes, now: float) -> list[Event]:
        """Take input; ``now``: monotonic seconds, for the rates. Raises nothing; deaf after `ConnectionFailed`."""
        events: list[Event] = []
        self._events = events
        if self._failed:
            return events
        self._now = now
        if self._held:
            self._held += data
            if len(self._held) < self._need:
                return events
            data = bytes(self._held)
            self._held.clear()
        try:
            start = self._take_preface(data)
            rest = self._take_frames(data, start) if start >= 0 else 0
            if rest < len(data):
                self._held += memoryview(data)[rest:]
            self._check_answers()
        except ConnectionFault as fault:
            code = CONNECTION_REASONS[fault.reason]
            self._end(code, fault.reason.encode())
            events.append(ConnectionFailed(code, fault.reason))
        if self._bodies:
            self._bodies.clear()
            if self._more:
                for place, pieces in self._more.items():
                    first = events[place]
                    assert type(first) is Body
                    events[place] = Body(first.stream_id, b"".join((first.data, *pieces)))
                self._more.clear()
        return events

    def _take_preface(self, data: bytes) -> int:
        """Where frames begin; -1 when the preface has not come whole (``_need`` is set then)."""
        return 0

    def _take_frames(self, data: bytes, pos: int) -> int:
        size = len(data)
        max_bytes = self._limits.max_frame_bytes
        handlers = self._HANDLERS
        while True:
            start = pos + HEADER_BYTES
            if start > size:
                self._need = HEADER_BYTES
                return pos
            upper, lower, kind, flags, stream_id = frames.unpack_header(data, pos)
            length = upper << 8 | lower
            if length > max_bytes:
                raise ConnectionFault("frame-too-large")
            end = start + length
            if end > size:
                self._need = HEADER_BYTES + length
                return pos
            if not self._started:
                if kind != frames.SETTINGS or flags & frames.ACK:
                    raise ConnectionFault("preface")  # section 3.4
                self._started = True
            if self._block is not None and (
                kind != frames.CONTINUATION or stream_id & MAX_STREAM_ID != self._block_stream
            ):
                raise ConnectionFault("no-continuation")  # section 4.3
            handler = handlers.get(kind)
            if handler is None:
                self._spend("unknown-frame-flood", self._limits.unknown_frames)
            else:
                handler(self, stream_id & MAX_STREAM_ID, flags, data[start:end])
            pos = end

    def _check_answers(self) -> None:
        if self._outbox.control_bytes > self._limits.max_control_bytes:
            raise ConnectionFault("unread-answers")

    def _spend(self, reason: str, rate: Rate, cost: float = 1) -> None:
        bucket = self._buckets.get(reason)
        if bucket is None:
            bucket = self._buckets[reason] = Bucket(rate, self._now)
        if not bucket.spend(cost, self._now):
            raise ConnectionFault(reason)

    # -- frames --------------------------------------------------------------------------------------------------------

    def _on_data(self, stream_id: int, flags: int, payload: bytes) -> None:
        """Section 6.1."""
        length = len(payload)
        if not stream_id:
            raise ConnectionFault("no-stream")
        data = payload
        if flags & frames.PADDED:
            if not length or payload[0] >= length:
                raise ConnectionFault("padding")
            data = payload[1 : length - payload[0]]
        self._receive_window -= length
        if self._receive_window < 0:
            raise ConnectionFault("window-exceeded")
        self._receive_used += length
        if self._receive_used > self._receive_full >> 1:
            self._outbox.window_update(0, self._receive_used)
            self._receive_window += self._receive_used
            self._receive_used = 0
        ended = flags & frames.END_STREAM
        if not ended and len(data) < SMALL_BYTES:
            if data:
                self._spend("small-frame-flood", self._limits.small_frames)
            else:
                self._spend("empty-frame-flood", self._limits.empty_frames)
        stream = self._streams.get(stream_id)
        if stream is None:
            self._on_late_frame(stream_id, length, bool(ended))
            return
        try:
            self._take_body(stream, data, length)
            if ended:
                self._body_ended(stream, ())
        except StreamFault as fault:
            self._stream_fault(stream_id, fault.reason)

    def _take_body(self, stream: Stream, data: bytes, length: int) -> None:
        if stream.remote_ended:
            raise StreamFault("half-closed")
        stream.receive_window -= length
        if stream.receive_window < 0:
            raise StreamFault("stream-window-exceeded")
        if stream.refused:
            return
        self._check_body(stream)
        size = len(data)
        if stream.content_left is not None:
            stream.content_left -= size
            if stream.content_left < 0:
                raise StreamFault("length-mismatch")
        stream.receive_held += size
        if size:
            place = self._bodies.get(stream.id)
            if place is None:
                self._bodies[stream.id] = len(self._events)
                self._events.append(Body(stream.id, data))
            else:
                self._more.setdefault(place, []).append(data)
        if length > size:
            self._open_window(stream)

    def _check_body(self, stream: Stream) -> None:
        """Whether DATA may come on the stream now. Raises `StreamFault`."""

    def _body_ended(self, stream: Stream, trailers: Trailers) -> None:
        if stream.content_left and not stream.answered:
            raise StreamFault("length-mismatch")  # section 8.1.1
        # A client may cut its body short when it sees that the answer is an error, as curl does: what is left of the
        # answer is for it, and the body is never told to be complete.
        if not stream.refused and not stream.content_left:
            self._events.append(BodyEnd(stream.id, trailers))
        self._remote_ended(stream)

    def _on_headers(self, stream_id: int, flags: int, payload: bytes) -> None:
        """Section 6.2."""
        if not stream_id:
            raise ConnectionFault("no-stream")
        self._block_fault = ""
        if flags & (frames.PADDED | frames.HAS_PRIORITY):
            payload = self._strip(stream_id, flags, payload)
        ended = bool(flags & frames.END_STREAM)
        if flags & frames.END_HEADERS:
            self._on_block(stream_id, payload, ended)
            return
        self._count_block_frame(payload)
        self._block = bytearray(payload)
        self._block_stream = stream_id
        self._block_ended = ended
        self._block_frames = 0

    def _strip(self, stream_id: int, flags: int, payload: bytes) -> bytes:
        start, end = 0, len(payload)
        if flags & frames.PADDED:
            if not end:
                raise ConnectionFault("frame-size")
            start, end = 1, end - payload[0]
        if flags & frames.HAS_PRIORITY:
            if len(payload) < start + 5:
                raise ConnectionFault("frame-size")
            # RFC 7540 section 5.3.1; of priorities of that kind nothing else is left (RFC 9113 section 5.3.2).
            if frames.unpack_long(payload, start)[0] & MAX_STREAM_ID == stream_id:
                self._block_fault = "depends-on-itself"
            start += 5
        if start > end:
            raise ConnectionFault("padding")
        return payload[start:end]

    def _count_block_frame(self, payload: bytes) -> None:
        if not payload:
            self._spend("empty-frame-flood", self._limits.empty_frames)

    def _on_continuation(self, stream_id: int, flags: int, payload: bytes) -> None:
        """Section 6.10."""
        block = self._block
        if block is None:
            raise ConnectionFault("continuation")
        self._block_frames += 1
        if self._block_frames > self._limits.max_continuations:
            raise ConnectionFault("continuation-flood")
        self._count_block_frame(payload)
        block += payload
        if len(block) > self._limits.max_header_list_bytes * self._limits.hard_factor:
            raise ConnectionFault("header-block-size")
        if flags & frames.END_HEADERS:
            self._block = None
            self._on_block(stream_id, bytes(block), self._block_ended)

    def _on_block(self, stream_id: int, block: bytes, ended: bool) -> None:
        """A whole header block."""
        stream = self._streams.get(stream_id)
        if stream is None:
            self._on_other_block(stream_id, block, ended)
            return
        headers = self._decode(block)
        fault_before = self._block_fault or ("half-closed" if stream.remote_ended else "")
        if fault_before:
            self._stream_fault(stream_id, fault_before)
            return
        try:
            self._on_next_block(stream, headers, ended)
        except StreamFault as fault:
            self._stream_fault(stream_id, fault.reason)

    def _on_late_block(self, stream_id: int, block: bytes, ended: bool) -> None:
        """A header block that may have been under way when we reset the stream: the table must stay in step."""
        self._on_late_frame(stream_id, max(len(block), _LATE_HEAD_BYTES), ended)
        self._decode(block)

    def _on_other_block(self, stream_id: int, block: bytes, ended: bool) -> None:
        """A header block on a stream that is not open."""
        raise NotImplementedError

    def _on_next_block(self, stream: Stream, headers: HeaderList, ended: bool) -> None:
        """A header list on an open stream. Raises `StreamFault`."""
        raise NotImplementedError

    def _on_trailers(self, stream: Stream, headers: HeaderList, ended: bool) -> None:
        if stream.tunnel:
            raise StreamFault("connect")  # section 8.5
        if not ended:
            raise StreamFault("trailers-without-end")
        limits = self._limits
        self._body_ended(stream, check_trailers(headers, limits.max_fields, limits.max_trailer_bytes))

    def _decode(self, block: bytes) -> HeaderList:
        try:
            return self._decoder.decode(block, self._limits.max_header_list_bytes * self._limits.hard_factor)
        except HpackError:
            raise ConnectionFault("hpack") from None
        except HeaderListTooLargeError:
            raise ConnectionFault("header-list-size") from None

    def _on_priority(self, stream_id: int, flags: int, payload: bytes) -> None:
        """Section 6.3."""
        if not stream_id:
            raise ConnectionFault("no-stream")
        self._spend("priority-flood", self._limits.priorities)
        if len(payload) != 5:
            self._fault_anywhere(stream_id, "frame-size", "frame-size")
        elif frames.unpack_long(payload)[0] & MAX_STREAM_ID == stream_id:
            self._fault_anywhere(stream_id, "depends-on-itself", "idle-stream")

    def _fault_anywhere(self, stream_id: int, reason: str, connection_reason: str) -> None:
        """A stream error where there is a stream, else one of the connection."""
        if stream_id not in self._streams:
            raise ConnectionFault(connection_reason)
        self._stream_fault(stream_id, reason)

    def _on_rst_stream(self, stream_id: int, flags: int, payload: bytes) -> None:
        """Section 6.4."""
        if not stream_id:
            raise ConnectionFault("no-stream")
        if len(payload) != 4:
            raise ConnectionFault("frame-size")
        if self._is_idle(stream_id):
            raise ConnectionFault("idle-stream")
        stream = self._streams.get(stream_id)
        if not self._is_due_reset(stream_id, stream):
            self._spend("reset-flood", self._limits.resets)
        if stream is not None:
            self._close(stream)
            code = frames.unpack_long(payload)[0]
            self._events.append(StreamReset(stream_id, code, True, "reset-by-peer", code == REFUSED_STREAM))

    def _is_due_reset(self, stream_id: int, stream: Stream | None) -> bool:
        """Whether the peer's RST_STREAM takes nothing back: it has its answer and just does not end its request (gRPC
        clients do so with each call that fails early); or it has crossed our own, which may happen once."""
        if stream is not None:
            return stream.answered and stream.local_ended
        resets = self._resets if stream_id in self._resets else self._resets_before
        if resets.get(stream_id, _ENDED) == _ENDED:
            return False
        resets[stream_id] = _ENDED
        return True

    def _on_settings(self, stream_id: int, flags: int, payload: bytes) -> None:
        """Section 6.5."""
        if stream_id:
            raise ConnectionFault("not-on-stream-0")
        size = len(payload)
        if size % 6 or (size and flags & frames.ACK):
            raise ConnectionFault("frame-size")
        self._spend("settings-flood", self._limits.settings, 1 + size // 6 // _SETTINGS_A_TOKEN)
        if flags & frames.ACK:
            if not self._settings_acked:
                self._settings_acked = True
                self._shift_receive_windows()
            return
        for key, value in frames.iter_settings(payload):
            self._on_setting(key, value)
        self._outbox.control(frames.SETTINGS_ACK)

    def _on_setting(self, key: int, value: int) -> None:
        if key == frames.SETTINGS_INITIAL_WINDOW_SIZE:
            if value > MAX_WINDOW:
                raise ConnectionFault("settings-window")
            self._shift_send_windows(value - self._peer_initial_window)
            self._peer_initial_window = value
        elif key == frames.SETTINGS_MAX_FRAME_SIZE:
            # What is sent here never needs more than the least that may be announced.
            if not frames.MIN_MAX_FRAME_BYTES <= value <= frames.MAX_MAX_FRAME_BYTES:
                raise ConnectionFault("settings-value")
        elif key in _BOOLEANS and value > 1:
            raise ConnectionFault("settings-value")

    def _shift_send_windows(self, change: int) -> None:
        """Section 6.9.2."""
        for stream in self._streams.values():
            stream.send_window += change
            if stream.send_window > MAX_WINDOW:
                raise ConnectionFault("settings-window")
            self._outbox.consider(stream)

    def _shift_receive_windows(self) -> None:
        # Until it has read our SETTINGS, the peer takes windows to be what they are without (section 6.9.2).
        change = self._limits.initial_window_bytes - DEFAULT_WINDOW
        for stream in self._streams.values():
            stream.receive_window += change

    def _on_push_promise(self, stream_id: int, flags: int, payload: bytes) -> None:
        """Section 6.6: a server may not send it, and a client that forbids it neither gets it."""
        raise ConnectionFault("push-promise")

    def _on_ping(self, stream_id: int, flags: int, payload: bytes) -> None:
        """Section 6.7."""
        if stream_id:
            raise ConnectionFault("not-on-stream-0")
        if len(payload) != 8:
            raise ConnectionFault("frame-size")
        self._spend("ping-flood", self._limits.pings)
        if not flags & frames.ACK:
            self._outbox.control(frames.ping(payload, frames.ACK))
        elif payload != _LAST_CALL:
            self._events.append(Pong(payload))
        elif self._last_call and not self._final_goaway:
            self._say_last_id()

    def _on_goaway(self, stream_id: int, flags: int, payload: bytes) -> None:
        """Section 6.8."""
        if stream_id:
            raise ConnectionFault("not-on-stream-0")
        if len(payload) < 8:
            raise ConnectionFault("frame-size")
        last_stream_id, code = frames.unpack_two_longs(payload)
        last_stream_id &= MAX_STREAM_ID
        self._spend("settings-flood", self._limits.settings)
        self._peer_goaway = True
        self._on_last_id(last_stream_id)
        self._events.append(GoAway(last_stream_id, code))

    def _on_last_id(self, last_stream_id: int) -> None:
        """The peer takes no streams of ours above ``last_stream_id``."""

    def _on_window_update(self, stream_id: int, flags: int, payload: bytes) -> None:
        """Section 6.9."""
        if len(payload) != 4:
            raise ConnectionFault("frame-size")
        outbox = self._outbox
        if outbox.update_credit:
            outbox.update_credit -= 1
        else:
            self._spend("window-update-flood", self._limits.window_updates)
        increment = frames.unpack_long(payload)[0] & MAX_WINDOW
        if not stream_id:
            if not increment:
                raise ConnectionFault("window-increment")
            outbox.window += increment
            if outbox.window > MAX_WINDOW:
                raise ConnectionFault("window-overflow")
            return
        stream = self._streams.get(stream_id)
        if stream is None:
            if self._is_idle(stream_id):
                raise ConnectionFault("idle-stream")
        elif not increment:
            self._stream_fault(stream_id, "stream-window-increment")
        elif stream.send_window + increment > MAX_WINDOW:
            self._stream_fault(stream_id, "stream-window-overflow")
        else:
            stream.send_window += increment
            outbox.consider(stream)

    def _on_priority_update(self, stream_id: int, flags: int, payload: bytes) -> None:
        """RFC 9218 section 7.1: only a client sends it."""
        raise ConnectionFault("priority-update")

    _HANDLERS: ClassVar[dict[int, Callable[[Any, int, int, bytes], None]]] = {
        frames.DATA: _on_data,
        frames.HEADERS: _on_headers,
        frames.PRIORITY: _on_priority,
        frames.RST_STREAM: _on_rst_stream,
        frames.SETTINGS: _on_settings,
        frames.PUSH_PROMISE: _on_push_promise,
        frames.PING: _on_ping,
        frames.GOAWAY: _on_goaway,
        frames.WINDOW_UPDATE: _on_window_update,
        frames.CONTINUATION: _on_continuation,
        frames.PRIORITY_UPDATE: _on_priority_update,
    }

    # -- streams -------------------------------------------------------------------------------------------------------

    def _is_idle(self, stream_id: int) -> bool:
        """Whether nobody has opened the stream yet (section 5.1)."""
        raise NotImplementedError

    def _new_stream(self, stream_id: int) -> Stream:
        target = self._limits.initial_window_bytes
        stream = self._streams[stream_id] = Stream(
            stream_id, self._peer_initial_window, target if self._settings_acked else DEFAULT_WINDOW, target
        )
        return stream

    def _on_late_frame(self, stream_id: int, size: int, ended: bool) -> None:
        """DATA or HEADERS have come on a stream that is not open; ``size``: what they take of its window.

        Raises `ConnectionFault` unless the stream is one that we have reset and it was under way, or is not too much.
        """
        if self._is_idle(stream_id):
            raise ConnectionFault("idle-stream")
        resets = self._resets if stream_id in self._resets else self._resets_before
        left = resets.get(stream_id)
        if left is None:
            raise ConnectionFault("closed-stream")
        if left < 0 or not (ended or 0 < size <= left):
            self._spend("late-frame-flood", self._limits.late_frames)
        elif ended:
            resets[stream_id] = _ENDED
        else:
            resets[stream_id] = left - size

    def _remote_ended(self, stream: Stream) -> None:
        stream.remote_ended = True
        if stream.local_ended:
            self._close(stream)

    def _local_ended(self, stream: Stream) -> None:
        """END_STREAM has been taken."""
        stream.local_ended = True
        if stream.remote_ended:
            self._close(stream)
        else:
            self._on_half_closed(stream)

    def _on_half_closed(self, stream: Stream) -> None:
        """We have ended our side, the peer has not."""

    def _close(self, stream: Stream) -> None:
        if stream.ready or stream.queued:
            self._outbox.forget(stream)
        self._pool += stream.receive_target - self._limits.initial_window_bytes
        del self._streams[stream.id]

    def _reset(self, stream_id: int, code: int, stream: Stream | None) -> None:
        """Send RST_STREAM, for a stream that is not in the register any more; None: it never was."""
        if len(self._resets) >= _REMEMBERED_RESETS:
            self._resets_before = self._resets
            self._resets = {}
        if stream is None:
            left = self._limits.initial_window_bytes if self._settings_acked else DEFAULT_WINDOW
        else:
            left = _ENDED if stream.remote_ended else stream.receive_window
        self._resets[stream_id] = left
        self._outbox.reset(stream_id, code)

    def _stream_fault(self, stream_id: int, reason: str) -> None:
        """Section 5.4.2: the peer made us reset a stream."""
        code = STREAM_REASONS[reason]
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._close(stream)
        self._reset(stream_id, code, stream)
        self._events.append(StreamReset(stream_id, code, False, reason))
        self._spend("reset-flood", self._limits.resets)

    def consumed(self, stream_id: int, size_bytes: int) -> None:
        """So much of the stream's `Body` was passed on: the peer may send more."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            stream.receive_held -= size_bytes
            self._open_window(stream)

    def _open_window(self, stream: Stream) -> None:
        if stream.remote_ended:
            return
        target = stream.receive_target
        if target - stream.receive_held - stream.receive_window < target >> 1:
            return
        if not stream.receive_held and target < self._limits.max_window_bytes and self._pool > 0:
            # All of it was consumed as it came: what holds the peer back is the window.
            growth = min(target, self._limits.max_window_bytes - target, self._pool)
            self._pool -= growth
            stream.receive_target = target = target + growth
        increment = target - stream.receive_held - stream.receive_window
        stream.receive_window += increment
        self._outbox.window_update(stream.id, increment)

    # -- output --------------------------------------------------------------------------------------------------------

    def take_output(self, max_bytes: int = 65_536) -> bytes:
        """Control frames and heads, then about ``max_bytes`` of bodies: by urgency, those of equal urgency one after
        another, or in turns where they are incremental (RFC 9218 section 10)."""
        return self._outbox.take(max_bytes)

    def take_drained(self) -> Sequence[int]:
        """The streams for which ``blocked`` was True and is no more, since the last call."""
        return self._outbox.take_drained()

    def send_head(self, stream_id: int, block: bytes, *, end_stream: bool = False, interim: bool = False) -> None:
        """Send a head made by ``encode_response``; ``interim`` ones (1xx) may come before the final one."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            stream.answered = not interim
            self._outbox.block(stream, block, end_stream)

    def send_whole(self, stream_id: int, block: bytes, body: bytes) -> None:
        """Send a final head and the whole body, maybe empty: ``send_head`` and ``send_data`` in one."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            stream.answered = True
            self._outbox.whole(stream, block, body)

    def send_data(self, stream_id: int, data: bytes, *, end_stream: bool = False) -> None:
        """Queue a piece of the body, maybe empty with ``end_stream``."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        if end_stream:
            stream.ending = True
        if data:
            self._outbox.data(stream, data)
        elif end_stream:
            self._outbox.consider(stream)

    def send_trailers(self, stream_id: int, block: bytes) -> None:
        """Queue the end of the body with trailers made by ``encode_fields``."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            stream.trailers = block
            stream.ending = True
            self._outbox.consider(stream)

    def reset(self, stream_id: int, code: int) -> None:
        """End the stream with RST_STREAM; what is queued on it is dropped. No event follows."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._close(stream)
            self._reset(stream_id, code, stream)

    def ping(self, data: bytes) -> None:
        """Send a PING with 8 bytes of ``data``; a `Pong` answers it."""
        self._outbox.control(frames.ping(data))

    def shut_down(self) -> None:
        """GOAWAY in two steps (RFC 9113 section 6.8): the first call announces it and sends a PING; when that is
        answered, or by a second call, the final GOAWAY follows. Streams that are open go on."""
        if self._failed or self._final_goaway:
            return
        if self._last_call:
            self._say_last_id()
            return
        self._last_call = True
        self._outbox.control(frames.goaway(MAX_STREAM_ID, NO_ERROR))
        self._outbox.control(frames.ping(_LAST_CALL))

    def _say_last_id(self) -> None:
        self._final_goaway = True
        self._outbox.control(frames.goaway(self._last_peer_stream_id, NO_ERROR))

    @property
    def _last_peer_stream_id(self) -> int:
        return 0

    def fail(self, code: int) -> None:
        """End the connection for a reason of the user's own (SETTINGS_TIMEOUT, NO_ERROR, ...): GOAWAY, then deaf.

        All streams are gone; flush and close."""
        if not self._failed:
            self._end(code, b"")

    def _end(self, code: int, debug: bytes) -> None:
        self._failed = True
        self._streams.clear()
        self._held.clear()
        self._block = None
        self._outbox.clear()
        self._outbox.control(frames.goaway(self._last_peer_stream_id, code, debug))


_BOOLEANS: Final = frozenset(
    (
        frames.SETTINGS_ENABLE_PUSH,
        frames.SETTINGS_ENABLE_CONNECT_PROTOCOL,
        frames.SETTINGS_NO_RFC7540_PRIORITIES,
    )
)
