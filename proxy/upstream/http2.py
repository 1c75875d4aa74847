"""Connections to backends that speak HTTP/2: one carries many exchanges, a stream each (RFC 9113).

An exchange holds an `Http2Request` and uses it like an `UpstreamConnection`; whatever a wake-up brings for the streams
of a connection is written once (``schedule_flush``). Back-pressure is by stream: what the exchange does not take is
held here and the stream's window stays closed, which bounds it; what the backend does not take stops the client's body.

A connection that has streams and hears nothing is asked by a PING; one that has none is closed after the idle time.
When the backend says GOAWAY, its streams end and the next exchange gets another connection.
"""

from __future__ import annotations

from collections import deque
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar, Final

from proxy.protocol.http1 import Trailers
from proxy.protocol.http2 import (
    CANCEL,
    JOINED_BYTES,
    NO_ERROR,
    Body,
    BodyEnd,
    ClientConnection,
    ConnectionFailed,
    Event,
    Response,
    StreamReset,
    encode_fields,
    encode_request,
)
from proxy.stream.stream import HIGH_WATER_BYTES, Stream, TlsStream
from proxy.upstream.connection import UpstreamFailure, UpstreamUser

if TYPE_CHECKING:
    from proxy.upstream.backend import Backend
    from proxy.upstream.pool import UpstreamPool

PING_AFTER_SECS: Final = 20.0
"""Of silence on a connection that has streams open."""
PING_TIMEOUT_SECS: Final = 10.0
PING_DATA: Final = b"upstream"

# What HTTP/1.1 says of a connection or of framing, and HTTP/2 says otherwise (RFC 9113 section 8.2.2).
_NOT_IN_HTTP2: Final = frozenset((b"connection", b"upgrade", b"transfer-encoding", b"te"))


def speaks_http2(stream: Stream) -> bool:
    """Whether HTTP/2 may be spoken on a stream that has just been connected: by ALPN over TLS, else it was agreed."""
    return not isinstance(stream, TlsStream) or stream.tls.selected_alpn_protocol() == "h2"


def request_block(head: bytes, scheme: bytes) -> bytes:
    """The header block for a head of HTTP/1.1 with its empty line, which the relay has made.

    ``te: trailers`` is always said (RFC 9110 section 10.1.4), because trailers are passed on: gRPC asks for it.
    """
    lines = head[:-4].split(b"\r\n")
    method, path, _ = lines[0].split(b" ")
    authority = b""
    fields: list[tuple[bytes, bytes]] = []
    for line in lines[1:]:
        name, _, value = line.partition(b":")
        lower = name.lower()
        if lower == b"host":
            authority = value.strip()
        elif lower not in _NOT_IN_HTTP2:
            fields.append((lower, value.strip()))
    fields.append((b"te", b"trailers"))
    return encode_request(method, scheme=scheme, authority=authority, path=path, fields=fields)


class Http2Request:
    """One stream, for one exchange: see `UpstreamConnection` for what is not explained here."""

    __slots__ = (
        "_begun",
        "_connection",
        "_held",
        "_paused",
        "_response_deadline",
        "_response_done",
        "_write_deadline",
        "backend",
        "due",
        "gone",
        "received",
        "request_done",
        "stream_id",
        "unprocessed",
        "user",
        "uses",
    )

    def __init__(self, connection: Http2Upstream, user: UpstreamUser) -> None:
        self._connection = connection
        self.backend = connection.backend
        self.user: UpstreamUser | None = user
        self.uses = connection.served
        self.stream_id = 0
        self.received = False
        self.unprocessed = False
        """The backend says that it has not acted on the request (RFC 9113 section 8.7)."""
        self.gone = False
        """The stream can carry nothing more."""
        self.request_done = False
        self.due = inf
        self._response_deadline = inf
        self._write_deadline = inf
        self._response_done = False
        self._begun = False  # the final head has been told
        self._paused = False
        self._held: deque[Event] = deque()

    # -- the request ---------------------------------------------------------------------------------------------------

    def begin(self, method: bytes, head: bytes, deadline: float) -> None:
        self.request_done = True
        self._open(method, head)
        self.expect(deadline)

    def begin_with_body(self, method: bytes, head: bytes, chunked: bool) -> None:
        self._open(method, head)

    def _open(self, method: bytes, head: bytes) -> None:
        connection = self._connection
        block = request_block(head, connection.scheme)
        self.stream_id = connection.codec.open(block, method=method, end_stream=self.request_done)
        connection.add(self)

    def flush_head(self) -> None:
        """It goes out with the wake-up."""

    def write_body(self, data: bytes) -> None:
        if self.gone:
            return
        connection = self._connection
        connection.codec.send_data(self.stream_id, data)
        if connection.codec.blocked(self.stream_id) and self._write_deadline == inf:
            self._write_deadline = monotonic() + connection.stream.write_timeout_secs
            self._watch(self._write_deadline)
        connection.schedule_flush()

    def end_body(self, trailers: Trailers) -> None:
        self.request_done = True
        if self.gone:
            return
        codec = self._connection.codec
        if trailers:
            codec.send_trailers(self.stream_id, encode_fields([(name.lower(), value) for name, value in trailers]))
        else:
            codec.send_data(self.stream_id, b"", end_stream=True)
        self._connection.schedule_flush()

    @property
    def holds_back(self) -> bool:
        return self.gone or self._connection.codec.blocked(self.stream_id)

    def drained(self) -> None:
        """The backend took what was queued."""
        self._write_deadline = inf
        if self.user is not None:
            self.user.on_upstream_drained()

    # -- the response --------------------------------------------------------------------------------------------------

    def on_event(self, event: Event) -> None:
        """What has come on the stream."""
        held = self._held
        if not self._paused and not held:
            self._tell(event)
        elif held and type(event) is Body and type(held[-1]) is Body and len(held[-1].data) < JOINED_BYTES:
            held[-1] = Body(event.stream_id, held[-1].data + event.data)
        else:
            held.append(event)

    def _tell(self, event: Event) -> None:
        user = self.user
        if user is None:
            return
        if type(event) is Body:
            self._connection.codec.consumed(self.stream_id, len(event.data))
            user.on_response_body(event.data)
        elif type(event) is Response:
            self.received = True
            self._begun = not event.head.interim
            self._response_done = event.ended
            user.on_response_head(event.head)
            if event.ended and self.user is user:
                user.on_response_end(())
        elif type(event) is BodyEnd:
            self._response_done = True
            user.on_response_end(event.trailers)
        elif type(event) is StreamReset:
            self.gone = True
            self.unprocessed = event.unprocessed and not self.received
            if not event.by_peer:
                user.on_response_invalid(event.reason)
            elif self._begun:
                user.on_response_cut_short()
            else:
                user.on_no_response(f"the stream was reset with code {event.code}")

    def paused(self) -> None:
        """All that has come on the stream in this wake-up has been told."""
        if self.user is not None and not self._paused and not self._held:
            self.user.on_response_paused()

    def lost(self, error: str) -> None:
        """The connection is gone, with all that was held."""
        self.gone = True
        self._held.clear()
        if self.user is None:
            return
        if self._begun:
            self.user.on_response_cut_short()
        else:
            self.user.on_no_response(error)

    @property
    def reading(self) -> bool:
        return not self._paused

    def pause(self) -> None:
        self._paused = True
        self._response_deadline = inf

    def resume(self) -> bool:
        if self.user is None:
            return False
        if self._paused:
            self._paused = False
            if self._held:
                self._connection.stream.call_soon(self._tell_held)
        return not self.gone

    def _tell_held(self) -> None:
        held = self._held
        while held and not self._paused and self.user is not None:
            self._tell(held.popleft())
        self.paused()
        self._connection.schedule_flush()

    def keep_watching(self) -> None:
        """The connection is always being read."""

    # -- deadlines -----------------------------------------------------------------------------------------------------

    def expect(self, when: float) -> None:
        self._response_deadline = when
        self._watch(when)

    def _watch(self, when: float) -> None:
        if when < self.due:
            self._connection.pool.deadlines.watch(self, when)

    def next_deadline(self) -> float:
        """See ``Deadlined``."""
        return min(self._response_deadline, self._write_deadline)

    def on_deadline(self, now: float) -> None:
        """See ``Deadlined``."""
        self._response_deadline = self._write_deadline = inf
        if self.user is not None:
            self.user.on_upstream_timed_out()

    # -- the end -------------------------------------------------------------------------------------------------------

    def release(self, request_done: bool) -> None:
        self.user = None
        self._held.clear()
        self._response_deadline = self._write_deadline = inf
        self._connection.pool.deadlines.forget(self)
        connection, backend = self._connection, self.backend
        if not self._response_done or not self.request_done:
            connection.codec.reset(self.stream_id, CANCEL)
        backend.active -= 1
        connection.remove(self)
        if backend.group is not None:
            connection.pool.left(backend.group)


class Http2Upstream:
    """Owns the stream to a backend from the moment it is connected until it is closed."""

    __slots__ = (
        "_flush_scheduled",
        "_idle_secs",
        "_in_wakeup",
        "_pinged",
        "_requests",
        "backend",
        "codec",
        "pool",
        "scheme",
        "served",
        "stream",
    )

    def __init__(
        self,
        pool: UpstreamPool,
        backend: Backend,
        stream: Stream,
        codec: ClientConnection,
        *,
        idle_secs: float,
        settings_timeout_secs: float,
    ) -> None:
        self.pool = pool
        self.backend = backend
        self.stream = stream
        self.codec = codec
        self.scheme = b"https" if backend.tls is not None else b"http"
        self.served = 0
        """Requests that it has carried."""
        self._idle_secs = idle_secs
        self._requests: dict[int, Http2Request] = {}
        self._flush_scheduled = False
        self._in_wakeup = False
        self._pinged = False
        stream.handler = self
        stream.on_release = self._released
        backend.sessions.append(self)
        stream.expect(monotonic() + settings_timeout_secs)
        self._flush()

    # -- requests ------------------------------------------------------------------------------------------------------

    @property
    def free(self) -> bool:
        """Whether one more request may be sent on it."""
        known = self.codec.started or not self._requests  # RFC 9113 section 5.1.2: how many the backend takes
        return known and self.codec.free_streams > 0 and not self.stream.closed and not self.stream.closing

    @property
    def idle(self) -> bool:
        """Whether nobody uses it."""
        return not self._requests

    def take(self, user: UpstreamUser) -> Http2Request:
        """A stream for ``user``, who begins its request at once."""
        self.served += 1
        self.backend.active += 1
        return Http2Request(self, user)

    def add(self, request: Http2Request) -> None:
        """A request has its stream."""
        self._requests[request.stream_id] = request
        if len(self._requests) == 1:
            self._await_input()
        self.schedule_flush()

    def remove(self, request: Http2Request) -> None:
        """An exchange is done with its stream."""
        self._requests.pop(request.stream_id, None)
        self.schedule_flush()
        if not self._requests:
            self._await_input()
        self.pool.stream_freed()

    def _await_input(self) -> None:
        self._pinged = False
        if not self.stream.closed and self.codec.started:
            self.stream.expect(monotonic() + (PING_AFTER_SECS if self._requests else self._idle_secs))

    def retire(self) -> None:
        """Take no more requests, and close after the last one."""
        self.codec.shut_down()
        self.codec.shut_down()
        self._flush()

    # -- output --------------------------------------------------------------------------------------------------------

    def schedule_flush(self) -> None:
        """Write what the codec has when this wake-up of the loop is over."""
        if not self._flush_scheduled and not self._in_wakeup:
            self._flush_scheduled = True
            self.stream.call_soon(self._flush_later)

    def _flush_later(self) -> None:
        self._flush_scheduled = False
        self._flush()

    def _flush(self) -> None:
        codec, stream = self.codec, self.stream
        while codec.has_output and stream.buffered <= HIGH_WATER_BYTES and not stream.closed:
            stream.write(codec.take_output())
        for stream_id in codec.take_drained():
            request = self._requests.get(stream_id)
            if request is not None:
                request.drained()
        if codec.finished and not self._requests:
            stream.close()

    # -- StreamHandler -------------------------------------------------------------------------------------------------

    def on_open(self) -> None: ...

    def on_data(self, data: bytes) -> None:
        now = monotonic()
        started = self.codec.started
        touched: dict[int, Http2Request] = {}
        self._in_wakeup = True
        try:
            for event in self.codec.feed(data, now):
                if type(event) in self._OF_STREAMS:
                    request = self._requests.get(event.stream_id)  # type: ignore[union-attr]
                    if request is not None:
                        touched[request.stream_id] = request
                        request.on_event(event)
                elif type(event) is ConnectionFailed:
                    self._fail(f"the upstream broke HTTP/2: {event.reason}")
            for request in touched.values():
                request.paused()
            self._await_input()
            if not started and self.codec.started:
                self.pool.regroup(self.backend.step_down(self))
        finally:
            self._in_wakeup = False
        self._flush()

    _OF_STREAMS: ClassVar[frozenset[type[Any]]] = frozenset((Response, Body, BodyEnd, StreamReset))

    def on_eof(self) -> None:
        self._fail("closed without a response")
        self.stream.close()

    def on_lost(self, error: OSError) -> None:
        self._fail(str(error))

    def on_write_failed(self, error: OSError) -> None:
        self._fail(str(error))
        self.stream.abort()

    def on_drained(self) -> None:
        self._flush()

    def on_write_deadline(self) -> None:
        self._fail("the upstream does not read")
        self.stream.abort()

    def on_read_deadline(self) -> None:
        if not self.codec.started:
            self._fail("no SETTINGS came: does it speak HTTP/2?")
            self.stream.abort()
        elif not self._requests:
            self.codec.fail(NO_ERROR)
            self._flush()
            self.stream.close()
        elif self._pinged:
            self._fail("no answer to a PING")
            self.stream.abort()
        else:
            self._pinged = True
            self.codec.ping(PING_DATA)
            self.stream.expect(monotonic() + PING_TIMEOUT_SECS)
            self._flush()

    def _fail(self, error: str) -> None:
        """No stream goes on."""
        self._leave()
        self.codec.fail(NO_ERROR)
        requests = list(self._requests.values())
        self._requests.clear()
        followers = self.backend.step_down(self)
        for request in requests:
            request.lost(error)
        self.pool.regroup(followers, self.backend, UpstreamFailure(502, "upstream-no-response"))

    def _leave(self) -> None:
        if self in self.backend.sessions:
            self.backend.sessions.remove(self)

    def _released(self) -> None:
        self._leave()
        self.pool.closed()
        self.pool.regroup(self.backend.step_down(self))
