"""One connection to a backend: carries one exchange at a time, in HTTP/1.1, or waits in its backend's pool.

This is the seam towards the upstream's protocol: an exchange gives it a request (``begin``, ``write_body``,
``end_body``) and is told the response by events (``UpstreamUser``). What is on the wire is known here only.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from proxy.protocol.http1 import (
    CLOSED,
    LAST_CHUNK,
    NO_BODY,
    EndOfMessage,
    Incomplete,
    ProtocolError,
    ResponseDecoder,
    ResponseHead,
    Trailers,
    encode_chunk,
    encode_last_chunk,
)
from proxy.stream.stream import HIGH_WATER_BYTES, Stream

if TYPE_CHECKING:
    from proxy.upstream.backend import Backend
    from proxy.upstream.pool import UpstreamPool


class UpstreamUser(Protocol):
    """The exchange that has the connection now. It may release the connection inside any of these."""

    def on_response_whole(self, head: ResponseHead, body: bytes) -> None:
        """A final head, the whole body (maybe empty) and the end, all at once."""

    def on_response_head(self, head: ResponseHead) -> None:
        """A head: interim ones come first, then the final one. After 101 the connection is a tunnel."""

    def on_response_body(self, data: bytes) -> None:
        """A piece of the body; never empty."""

    def on_response_end(self, trailers: Trailers) -> None:
        """The response is complete."""

    def on_response_paused(self) -> None:
        """All that has come so far has been told; what was made of it can go on its way."""

    def on_response_cut_short(self) -> None:
        """The response has begun and will have no end."""

    def on_response_invalid(self, reason: str) -> None:
        """What came is no response; ``reason`` is out of ``RESPONSE_REASONS``."""

    def on_no_response(self, error: str) -> None:
        """The connection ended before the first byte of a response, or broke before its head was complete."""

    def on_upstream_write_failed(self) -> None:
        """The backend takes no more of the request; it may have answered before."""

    def on_upstream_drained(self) -> None:
        """The backend took what was buffered: more of the request body can come."""

    def on_upstream_timed_out(self) -> None:
        """Nothing came, or the request was not read, for too long."""


class UpstreamFailure(NamedTuple):
    """Why there is no connection: the status to answer with (RFC 9110 section 15.6) and a word for the log."""

    status: int
    reason: str


class UpstreamLink(Protocol):
    """What an exchange holds of its upstream: a connection of HTTP/1.1, or a stream of one of HTTP/2."""

    @property
    def backend(self) -> Backend: ...
    @property
    def uses(self) -> int:
        """How many requests its connection has carried, this one included."""

    @property
    def received(self) -> bool:
        """Whether anything of the response has come."""

    @property
    def unprocessed(self) -> bool:
        """Whether the backend has said that it did not act on the request."""

    @property
    def holds_back(self) -> bool: ...
    @property
    def reading(self) -> bool: ...

    def begin(self, method: bytes, head: bytes, deadline: float) -> None: ...
    def begin_with_body(self, method: bytes, head: bytes, chunked: bool) -> None: ...
    def flush_head(self) -> None: ...
    def write_body(self, data: bytes) -> None: ...
    def end_body(self, trailers: Trailers) -> None: ...
    def expect(self, when: float) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> bool: ...
    def keep_watching(self) -> None: ...
    def release(self, request_done: bool) -> None: ...


class UpstreamConnection:
    """Owns the stream to a backend from the moment it is connected until it is closed.

    A connection without a user is idle: anything that comes in then (an unsolicited response, the end) closes it.
    """

    unprocessed: Final = False

    __slots__ = (
        "_broken",
        "_chunked",
        "_ended",
        "_head_unsent",
        "_keeps_alive",
        "_peek",
        "_pool",
        "backend",
        "decoder",
        "received",
        "stream",
        "user",
        "uses",
    )

    def __init__(self, pool: UpstreamPool, backend: Backend, stream: Stream, decoder: ResponseDecoder) -> None:
        self._pool = pool
        self.backend = backend
        self.stream = stream
        self.decoder = decoder
        self.user: UpstreamUser | None = None
        self.uses = 0
        self.received = False
        self._keeps_alive = False  # as the last final head says
        self._broken = False  # takes no more of the request
        self._ended = False  # nothing more will come
        self._chunked = False
        self._head_unsent: bytes | None = None
        self._peek: Callable[[int], list[tuple[int, int]]] | None = None
        stream.handler = self
        stream.on_release = pool.closed

    # -- the request ---------------------------------------------------------------------------------------------------

    def begin(self, method: bytes, head: bytes, deadline: float) -> None:
        """Send a request that has no body and expect its response until ``deadline`` (monotonic seconds)."""
        self.decoder.start(method)
        self.received = False
        self.stream.write(head)
        self.stream.expect(deadline)

    def begin_with_body(self, method: bytes, head: bytes, chunked: bool) -> None:
        """Begin a request whose body follows. The head goes with its first piece, or by ``flush_head``."""
        self.decoder.start(method)
        self.received = False
        self._chunked = chunked
        self._head_unsent = head

    def flush_head(self) -> None:
        """Send the head alone, unless it has gone."""
        if self._head_unsent is not None:
            self._write(b"")

    def write_body(self, data: bytes) -> None:
        """Send a piece of the body; never empty. It is dropped where the backend takes no more."""
        self._write(encode_chunk(data) if self._chunked else data)

    def end_body(self, trailers: Trailers) -> None:
        """The request is complete."""
        if self._chunked:
            self._write(encode_last_chunk(trailers) if trailers else LAST_CHUNK)

    def _write(self, data: bytes) -> None:
        if self._head_unsent is not None:
            data = self._head_unsent + data
            self._head_unsent = None
        if not self._broken:
            self.stream.write(data)

    @property
    def holds_back(self) -> bool:
        """Whether no more of the request body can be taken now."""
        return self._broken or self.stream.buffered > HIGH_WATER_BYTES

    # -- the response --------------------------------------------------------------------------------------------------

    def expect(self, when: float) -> None:
        """Until when (monotonic seconds, infinity: no matter) more must have come."""
        self.stream.expect(when)

    @property
    def reading(self) -> bool:
        """Whether the response is being read, see ``pause`` and ``resume``."""
        return self.stream.reading

    def pause(self) -> None:
        """Read no more of the response for now, and wait without end."""
        self.stream.pause_reading()
        self.stream.read_deadline = inf

    def resume(self) -> bool:
        """Read on; False when nothing more will come."""
        if self._ended:
            return False
        self.stream.resume_reading()
        return True

    def keep_watching(self) -> None:
        """See ``Stream.keep_watching``."""
        self.stream.keep_watching()

    def _decode(self, user: UpstreamUser) -> None:
        next_event = self.decoder.next_event
        try:
            while self.user is user:
                event = next_event()
                kind = type(event)
                if kind is bytes:
                    user.on_response_body(event)  # type: ignore[arg-type]
                elif kind is ResponseHead:
                    self._keeps_alive = event.keep_alive  # type: ignore[union-attr]
                    user.on_response_head(event)  # type: ignore[arg-type]
                    if event.status == 101:  # type: ignore[union-attr]
                        return
                    if event.framing == NO_BODY and not event.interim and self.user is user:  # type: ignore[union-attr]
                        user.on_response_end(())
                        return
                elif kind is EndOfMessage:
                    user.on_response_end(event.trailers)  # type: ignore[union-attr]
                    return
                elif event is CLOSED:
                    user.on_no_response("closed without a response")
                    return
                else:
                    user.on_response_paused()
                    return
        except Incomplete:
            user.on_response_cut_short()
        except ProtocolError as error:
            user.on_response_invalid(error.reason)

    # -- the end -------------------------------------------------------------------------------------------------------

    def release(self, request_done: bool) -> None:
        """The exchange is done with it. It is used again where request and response have both ended cleanly."""
        self.user = None
        self._head_unsent = None
        self.backend.active -= 1
        stream = self.stream
        if (
            request_done
            and self.decoder.at_rest
            and self._keeps_alive
            and not self._broken
            and not self._ended
            and not stream.buffered
            and not stream.closed
        ):
            self._pool.check_in(self)
        else:
            self._discard()
        group = self.backend.group
        if group is not None:
            self._pool.left(group)

    def _discard(self) -> None:
        # The pool's count hangs on the stream's on_release. What is left of a request that nobody waits for is dropped:
        # a backend that does not read it must not keep the descriptor.
        if self.stream.buffered and not self.stream.closing:
            self.stream.abort()
        else:
            self.stream.close()

    def _end_idle(self) -> None:
        self.backend.idle.remove(self)
        self._discard()

    # -- StreamHandler -----------------------------------------------------------------------------------------------

    def on_open(self) -> None: ...

    def on_data(self, data: bytes) -> None:
        user = self.user
        if user is None:
            self._end_idle()
            return
        self.received = True
        decoder = self.decoder
        whole = decoder.take_whole(data)
        if whole is None:
            decoder.feed(data)
            self._decode(user)
        else:
            head, body = whole
            self._keeps_alive = head.keep_alive
            user.on_response_whole(head, body)

    def on_eof(self) -> None:
        self._ended = True
        if self.user is not None:
            self.decoder.feed_eof()
            self._decode(self.user)
        else:
            self._end_idle()

    def on_lost(self, error: OSError) -> None:
        self._ended = True
        if self.user is not None:
            self.user.on_no_response(str(error))
        else:
            self._end_idle()

    def on_write_failed(self, error: OSError) -> None:
        self._broken = True
        if self.user is not None:
            self.stream.resume_reading()
            self.stream.keep_watching()
            self.user.on_upstream_write_failed()
        else:
            self._end_idle()

    def on_drained(self) -> None:
        if self.user is not None:
            self.user.on_upstream_drained()

    def on_read_deadline(self) -> None:
        if self.user is not None:
            self.user.on_upstream_timed_out()
        else:
            self._end_idle()

    def on_write_deadline(self) -> None:
        if self.user is not None:
            self.user.on_upstream_timed_out()

    # -- the pool's --------------------------------------------------------------------------------------------------

    def take(self, user: UpstreamUser) -> bool:
        """Take an idle connection into use; False when it was found dead or has something to read: then it is closed.

        The look costs one system call. It is what keeps a response that nobody asked for, already in the socket but not
        yet reported by the event loop, from being taken for the answer to ``user``'s request.
        """
        if self._peek is None:
            self._peek = self.stream.make_peek()
        if self.stream.closed or self._peek(0):
            self._discard()
            return False
        self.stream.read_deadline = inf
        self.user = user
        self.uses += 1
        self.backend.active += 1
        return True

    def rest(self, idle_secs: float) -> None:
        """Wait in the pool for at most ``idle_secs``."""
        self.stream.resume_reading()
        self.stream.expect(monotonic() + idle_secs)
