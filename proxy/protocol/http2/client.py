"""The client's side of a connection: requests go out, responses come in (RFC 9113 sections 3.4, 6.8, 8.1 and 8.3.2)."""

from __future__ import annotations

from typing import Final

from proxy.protocol.http2 import frames
from proxy.protocol.http2.connection import Connection
from proxy.protocol.http2.errors import REFUSED_STREAM, ConnectionFault, StreamFault
from proxy.protocol.http2.events import Response, StreamReset
from proxy.protocol.http2.frames import MAX_STREAM_ID, PREFACE
from proxy.protocol.http2.hpack_decoder import HeaderList
from proxy.protocol.http2.limits import DEFAULT_LIMITS, Limits
from proxy.protocol.http2.response import BODILESS_STATUSES, ResponseHeads
from proxy.protocol.http2.stream import Stream

_BEFORE_SETTINGS: Final = 100  # RFC 9113 section 6.5.2: what nobody should go below


class ClientConnection(Connection):
    """The side that connects to an upstream. The preface is in the first ``take_output``."""

    __slots__ = ("_heads", "_last_allowed", "_next_id", "_peer_max_streams")

    def __init__(self, limits: Limits = DEFAULT_LIMITS, heads: ResponseHeads | None = None) -> None:
        super().__init__(
            limits,
            PREFACE,
            {
                frames.SETTINGS_ENABLE_PUSH: 0,
                frames.SETTINGS_INITIAL_WINDOW_SIZE: limits.initial_window_bytes,
                frames.SETTINGS_MAX_HEADER_LIST_SIZE: limits.max_header_list_bytes,
            },
        )
        self._heads = ResponseHeads(limits, max_entries=0) if heads is None else heads
        self._next_id = 1
        self._last_allowed = MAX_STREAM_ID
        self._peer_max_streams = _BEFORE_SETTINGS

    @property
    def last_stream_id(self) -> int:
        """The highest stream that we have opened; 0: none yet."""
        return max(self._next_id - 2, 0)

    @property
    def free_streams(self) -> int:
        """How many streams may be opened now by the peer's SETTINGS_MAX_CONCURRENT_STREAMS; 0 after GOAWAY."""
        if self._peer_goaway or self._failed or self._last_call or self._next_id > MAX_STREAM_ID:
            return 0
        return max(min(self._peer_max_streams, self._limits.max_concurrent_streams) - len(self._streams), 0)

    def open(self, block: bytes, *, method: bytes, end_stream: bool) -> int:
        """Send a request's head made by ``encode_request``; returns its stream.

        Raises RuntimeError without ``free_streams``."""
        if not self.free_streams:
            raise RuntimeError("no stream may be opened on this connection now")
        stream_id = self._next_id
        self._next_id += 2
        stream = self._new_stream(stream_id)
        stream.to_head = method == b"HEAD"
        stream.local_ended = end_stream
        self._outbox.open(stream, block, end_stream)
        return stream_id

    def _is_idle(self, stream_id: int) -> bool:
        return stream_id >= self._next_id or not stream_id & 1

    # -- responses -----------------------------------------------------------------------------------------------------

    def _on_other_block(self, stream_id: int, block: bytes, ended: bool) -> None:
        self._on_late_block(stream_id, block, ended)

    def _on_next_block(self, stream: Stream, headers: HeaderList, ended: bool) -> None:
        if stream.head_done:
            self._on_trailers(stream, headers, ended)
            return
        head = self._heads.parse(headers, ended, stream.to_head)
        self._events.append(Response(stream.id, head, ended))
        if head.interim:
            return
        stream.head_done = True
        bodiless = stream.to_head or head.status in BODILESS_STATUSES
        stream.content_left = 0 if bodiless else head.content_length
        if ended:
            self._remote_ended(stream)

    def _check_body(self, stream: Stream) -> None:
        if not stream.head_done:
            raise StreamFault("data-before-head")

    # -- settings and GOAWAY -------------------------------------------------------------------------------------------

    def _on_setting(self, key: int, value: int) -> None:
        super()._on_setting(key, value)
        if key == frames.SETTINGS_MAX_CONCURRENT_STREAMS:
            self._peer_max_streams = value
        elif key == frames.SETTINGS_ENABLE_PUSH and value:
            raise ConnectionFault("settings-value")  # section 6.5.2: not a server's to allow

    def _on_last_id(self, last_stream_id: int) -> None:
        """Section 6.8: requests above it were not processed (section 8.7)."""
        if last_stream_id > self._last_allowed:
            raise ConnectionFault("goaway-id")
        self._last_allowed = last_stream_id
        for stream in [stream for stream in self._streams.values() if stream.id > last_stream_id]:
            self._close(stream)
            self._events.append(StreamReset(stream.id, REFUSED_STREAM, True, "not-processed", True))
