"""The server's side of a connection: requests come in (RFC 9113 sections 3.4, 5.1.1, 8.1 and 8.3.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

from proxy.protocol.http2 import frames
from proxy.protocol.http2.connection import Connection
from proxy.protocol.http2.errors import NO_ERROR, ConnectionFault, StreamFault
from proxy.protocol.http2.events import Request, RequestRefused
from proxy.protocol.http2.frames import MAX_STREAM_ID, PREFACE
from proxy.protocol.http2.hpack_decoder import HeaderList
from proxy.protocol.http2.limits import DEFAULT_LIMITS, Limits
from proxy.protocol.http2.priority import Priority, parse_priority
from proxy.protocol.http2.request import ParsedRequest, Refused, RequestHeads
from proxy.protocol.http2.stream import Stream

_MEMO_ENTRIES: Final = 16
_MEMO_BLOCK_BYTES: Final = 512
_MEMO_DECODED_BYTES: Final = 2_048
"""A short block may stand for a long head, by references to the dynamic table; what is kept of it must not be long."""
MEMO_BYTES: Final = 2 * _MEMO_ENTRIES * (_MEMO_BLOCK_BYTES + 4 * _MEMO_DECODED_BYTES)
"""What both memos of a connection hold at most: a block, and its head as it is decoded, passed on and logged."""
_MAX_GAPS: Final = 32
LAST_WORDS_BYTES: Final = 1_024
"""Less is the end of a request, which may well be under way when its response has ended; more is work for nothing."""


class ServerConnection(Connection):
    """The side that clients connect to. Its SETTINGS are in the first ``take_output``."""

    __slots__ = (
        "_changes",
        "_early_priorities",
        "_gaps",
        "_half_closed",
        "_heads",
        "_last_id",
        "_memo",
        "_memo_ended",
        "_no_old_priorities",
        "_preface_taken",
    )

    def __init__(self, limits: Limits = DEFAULT_LIMITS, heads: RequestHeads | None = None) -> None:
        super().__init__(
            limits,
            b"",
            {
                frames.SETTINGS_MAX_CONCURRENT_STREAMS: limits.max_concurrent_streams,
                frames.SETTINGS_INITIAL_WINDOW_SIZE: limits.initial_window_bytes,
                frames.SETTINGS_MAX_HEADER_LIST_SIZE: limits.max_header_list_bytes,
                frames.SETTINGS_ENABLE_CONNECT_PROTOCOL: 1,
                frames.SETTINGS_NO_RFC7540_PRIORITIES: 1,
            },
        )
        self._heads = RequestHeads(limits, max_entries=0) if heads is None else heads
        self._preface_taken = False
        self._last_id = 0
        self._gaps: list[range] = []
        self._half_closed: list[int] = []
        self._no_old_priorities: int | None = None
        self._early_priorities: dict[int, Priority] = {}
        # What a block means changes with the dynamic table only, so equal blocks need no decoding until then.
        self._memo: dict[bytes, ParsedRequest] = {}
        self._memo_ended: dict[bytes, ParsedRequest] = {}
        self._changes = 0

    @property
    def last_stream_id(self) -> int:
        """The highest stream that the peer has opened; 0: none yet."""
        return self._last_id

    @property
    def _last_peer_stream_id(self) -> int:
        return self._last_id

    def _is_idle(self, stream_id: int) -> bool:
        return stream_id > self._last_id or not stream_id & 1

    def _take_preface(self, data: bytes) -> int:
        """Section 3.4."""
        if self._preface_taken:
            return 0
        if not data.startswith(PREFACE):
            if not PREFACE.startswith(data):
                raise ConnectionFault("preface")
            self._need = len(PREFACE)
            return -1
        self._preface_taken = True
        return len(PREFACE)

    # -- requests ------------------------------------------------------------------------------------------------------

    def _on_other_block(self, stream_id: int, block: bytes, ended: bool) -> None:
        if stream_id <= self._last_id or not stream_id & 1:
            self._on_old_stream(stream_id, block, ended)
            return
        if stream_id != self._last_id + 2:
            self._skip_to(stream_id)
        self._last_id = stream_id
        if self._decoder.changes != self._changes:
            self._changes = self._decoder.changes
            self._memo.clear()
            self._memo_ended.clear()
        memo = self._memo_ended if ended else self._memo
        parsed = memo.get(block)
        headers = self._decode(block) if parsed is None else []
        if self._block_fault:
            self._stream_fault(stream_id, self._block_fault)
            return
        if len(self._streams) >= self._limits.max_concurrent_streams or self._final_goaway:
            self._stream_fault(stream_id, "too-many-streams")
            return
        if parsed is None:
            try:
                parsed = self._heads.parse(headers, ended)
            except StreamFault as fault:
                self._stream_fault(stream_id, fault.reason)
                return
            except Refused as refused:
                self._refuse(stream_id, ended, refused)
                return
            if (
                self._decoder.changes == self._changes
                and len(block) <= _MEMO_BLOCK_BYTES
                and sum([len(name) + len(value) for name, value in headers]) <= _MEMO_DECODED_BYTES
            ):
                if len(memo) >= _MEMO_ENTRIES:
                    memo.clear()
                memo[block] = parsed
        head, priority = parsed
        stream = self._new_stream(stream_id)
        stream.remote_ended = ended
        stream.priority = priority
        if self._early_priorities:
            stream.priority = self._early_priorities.pop(stream_id, priority)
        stream.content_left = head.content_length
        stream.tunnel = head.method == b"CONNECT" or head.protocol != b""
        self._events.append(Request(stream_id, head, ended))

    def _refuse(self, stream_id: int, ended: bool, refused: Refused) -> None:
        stream = self._new_stream(stream_id)
        stream.remote_ended = ended
        stream.refused = True
        self._spend("reset-flood", self._limits.resets)
        self._events.append(RequestRefused(stream_id, refused.status, refused.reason))

    def _skip_to(self, stream_id: int) -> None:
        # Section 5.1.1: the idle streams below are closed by this, and to use one of them is another error than to use
        # one that was open.
        if len(self._gaps) >= _MAX_GAPS:
            del self._gaps[0]
        self._gaps.append(range(self._last_id + 1, stream_id))

    def _on_old_stream(self, stream_id: int, block: bytes, ended: bool) -> None:
        if not stream_id & 1 or any(stream_id in gap for gap in self._gaps):
            raise ConnectionFault("stream-id")
        self._on_late_block(stream_id, block, ended)

    def _on_next_block(self, stream: Stream, headers: HeaderList, ended: bool) -> None:
        self._on_trailers(stream, headers, ended)

    def _on_half_closed(self, stream: Stream) -> None:
        # Section 8.1: the answer is whole, the rest of the request is of no use to anybody. Who has much more to say is
        # told to stop; who may have little left can end the stream in order, and its frames are judged until then.
        if stream.tunnel:
            return
        has_more = (stream.content_left or 0) >= LAST_WORDS_BYTES or stream.receive_window < stream.receive_target >> 1
        if has_more or stream.refused:
            self._close(stream)
            self._reset(stream.id, NO_ERROR, stream)
        else:
            self._half_closed.append(stream.id)

    def take_half_closed(self) -> Sequence[int]:
        """The streams whose response has ended before their request, since the last call: to be ``reset`` with
        NO_ERROR if the client goes on at length, or does not end them soon."""
        if not self._half_closed:
            return ()
        taken, self._half_closed = self._half_closed, []
        return taken

    def end_tunnel(self, stream_id: int) -> None:
        """A CONNECT was refused, or its tunnel has ended: what the client still says is of no use to anybody, so the
        stream is over with our end of it, like any other answer's."""
        stream = self._streams.get(stream_id)
        if stream is not None and stream.tunnel:
            stream.tunnel = False
            if stream.local_ended:
                self._on_half_closed(stream)

    # -- settings and priorities ---------------------------------------------------------------------------------------

    def _on_setting(self, key: int, value: int) -> None:
        super()._on_setting(key, value)
        if key == frames.SETTINGS_NO_RFC7540_PRIORITIES:
            # RFC 9218 section 2.1: it may not change.
            if self._no_old_priorities not in (None, value):
                raise ConnectionFault("settings-value")
            self._no_old_priorities = value

    def _on_priority_update(self, stream_id: int, flags: int, payload: bytes) -> None:
        """RFC 9218 section 7.1."""
        if stream_id:
            raise ConnectionFault("not-on-stream-0")
        if len(payload) < 4:
            raise ConnectionFault("frame-size")
        self._spend("priority-flood", self._limits.priorities)
        prioritized = frames.unpack_long(payload)[0] & MAX_STREAM_ID
        if not prioritized & 1:
            raise ConnectionFault("priority-update")
        priority = parse_priority(payload[4:])
        stream = self._streams.get(prioritized)
        if stream is not None:
            stream.priority = priority
        elif prioritized > self._last_id and len(self._early_priorities) < self._limits.max_concurrent_streams:
            self._early_priorities[prioritized] = priority

    _HANDLERS: ClassVar[dict[int, Callable[[Any, int, int, bytes], None]]] = {
        **Connection._HANDLERS,
        frames.PRIORITY_UPDATE: _on_priority_update,
    }
