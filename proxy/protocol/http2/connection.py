"""An HTTP/2 connection, either side (stub: being written; names and signatures are final)."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.protocol.http2.events import Event
from proxy.protocol.http2.limits import DEFAULT_LIMITS, Limits
from proxy.protocol.http2.request import RequestHeads
from proxy.protocol.http2.response import ResponseHeads


class Connection:
    """What both roles have. See the package's text for how it is used."""

    # -- state, to be read ---------------------------------------------------------------------------------------------

    @property
    def open_streams(self) -> int:
        """How many streams are open."""
        raise NotImplementedError

    @property
    def last_stream_id(self) -> int:
        """The highest stream that the peer has opened (server role) or we have (client role); 0: none yet."""
        raise NotImplementedError

    @property
    def settings_acked(self) -> bool:
        """Whether the peer has acknowledged our SETTINGS (RFC 9113 section 6.5.3: it may be given a time for it)."""
        raise NotImplementedError

    @property
    def started(self) -> bool:
        """Whether the peer's preface, its first SETTINGS, has come (a server's client owes it like a request head)."""
        raise NotImplementedError

    @property
    def mid_head(self) -> bool:
        """Whether the peer has begun a frame or a header block and not ended it (header timeout)."""
        raise NotImplementedError

    @property
    def failed(self) -> bool:
        """Whether `ConnectionFailed` has been told."""
        raise NotImplementedError

    @property
    def finished(self) -> bool:
        """Whether a final GOAWAY was sent or received, no stream is open and no output waits: to be closed."""
        raise NotImplementedError

    @property
    def has_output(self) -> bool:
        """Whether ``take_output`` would return something now."""
        raise NotImplementedError

    def queued(self, stream_id: int) -> int:
        """Bytes of body that were given to ``send_data`` and not yet taken."""
        raise NotImplementedError

    def blocked(self, stream_id: int) -> bool:
        """Whether the producer of this stream is to stop: its queue is above 64 KB, or, while all queues of the
        connection together are above 1 MB, above 16 KB. ``take_drained`` will name the stream."""
        raise NotImplementedError

    def stalled(self, stream_id: int) -> bool:
        """Whether something is queued that only a WINDOW_UPDATE of the peer can set going (zero-window hold)."""
        raise NotImplementedError

    # -- input ---------------------------------------------------------------------------------------------------------

    def feed(self, data: bytes, now: float) -> list[Event]:
        """Take input; ``now``: monotonic seconds, for the rates. Raises nothing; deaf after `ConnectionFailed`."""
        raise NotImplementedError

    def consumed(self, stream_id: int, size_bytes: int) -> None:
        """So much of the stream's `Body` was passed on: the peer may send more."""
        raise NotImplementedError

    # -- output --------------------------------------------------------------------------------------------------------

    def take_output(self, max_bytes: int = 65_536) -> bytes:
        """Control frames and heads, then about ``max_bytes`` of bodies: by urgency, those of equal urgency one after
        another, or in turns where they are incremental (RFC 9218 section 10)."""
        raise NotImplementedError

    def take_drained(self) -> Sequence[int]:
        """The streams for which ``blocked`` was True and is no more, since the last call."""
        raise NotImplementedError

    def send_head(self, stream_id: int, block: bytes, *, end_stream: bool = False) -> None:
        """Send a head made by ``encode_response``; interim ones (1xx) may come before the final one."""
        raise NotImplementedError

    def send_data(self, stream_id: int, data: bytes, *, end_stream: bool = False) -> None:
        """Queue a piece of the body, maybe empty with ``end_stream``."""
        raise NotImplementedError

    def send_trailers(self, stream_id: int, block: bytes) -> None:
        """Queue the end of the body with trailers made by ``encode_fields``."""
        raise NotImplementedError

    def reset(self, stream_id: int, code: int) -> None:
        """End the stream with RST_STREAM; what is queued on it is dropped. No event follows."""
        raise NotImplementedError

    def ping(self, data: bytes) -> None:
        """Send a PING with 8 bytes of ``data``; a `Pong` answers it."""
        raise NotImplementedError

    def shut_down(self) -> None:
        """GOAWAY in two steps (RFC 9113 section 6.8): the first call announces it and sends a PING; when that is
        answered, or by a second call, the final GOAWAY follows. Streams that are open go on."""
        raise NotImplementedError

    def fail(self, code: int) -> None:
        """End the connection for a reason of the user's own (SETTINGS_TIMEOUT, NO_ERROR, ...): GOAWAY, then deaf.

        All streams are gone; flush and close."""
        raise NotImplementedError


class ServerConnection(Connection):
    """The side that clients connect to. Its SETTINGS are in the first ``take_output``."""

    def __init__(self, limits: Limits = DEFAULT_LIMITS, heads: RequestHeads | None = None) -> None:
        raise NotImplementedError


class ClientConnection(Connection):
    """The side that connects to an upstream. The preface is in the first ``take_output``."""

    def __init__(self, limits: Limits = DEFAULT_LIMITS, heads: ResponseHeads | None = None) -> None:
        raise NotImplementedError

    @property
    def free_streams(self) -> int:
        """How many streams may be opened now by the peer's SETTINGS_MAX_CONCURRENT_STREAMS; 0 after GOAWAY."""
        raise NotImplementedError

    def open(self, block: bytes, *, method: bytes, end_stream: bool) -> int:
        """Send a request's head made by ``encode_request``; returns its stream.

        Raises RuntimeError without ``free_streams``."""
        raise NotImplementedError
