"""One exchange: a request and its response, between a client and an upstream, whatever protocol each of them speaks.

Theory of operation. The session pushes the request's body in (``on_request_body``, ``on_request_end``); the upstream
connection pushes the response in (``UpstreamUser``). Both directions stream, each held back by the other side: while
``holds_back`` the session pulls no body out of its decoder, while ``client_is_full`` the upstream is not read. The
exchange ends in exactly one of

    _finish       the response was written whole; the client's connection lives on if nothing forbids it
    _fail         no response had begun: the proxy answers itself
    _cut          a response had begun: it is broken off, so that it cannot be taken for complete
    client_gone   there is nobody to answer, or no more: the end of a tunnel

and each of them goes through ``_end``, which gives the upstream connection back, counts and logs.

How a response is written is a matter of the client's protocol, in the subclasses (``Http1Exchange``). How a request is
written and a response is read is a matter of the upstream's, in the connection (``UpstreamConnection``).
"""

from __future__ import annotations

from bisect import bisect_left
from math import inf
from time import monotonic
from typing import Protocol

from proxy.limit.pace import Pace
from proxy.observe.counters import (
    REQUESTS,
    RESPONSES_1XX,
    TIMEOUTS_BODY,
    TIMEOUTS_SLOW,
    TIMEOUTS_UPSTREAM,
    TIMEOUTS_WRITE,
    UNDERSCORE_FIELDS_DROPPED,
    UPSTREAM_RETRIES,
)
from proxy.observe.rows import BOUNDS_SECS
from proxy.observe.tallies import CODE_CELL
from proxy.protocol.http1 import EndOfMessage, RequestHead, ResponseHead, Trailers
from proxy.relay.answer import CLIENT_GONE, PreparedResponse, prepare_response
from proxy.relay.context import RelayContext
from proxy.relay.forward import ForwardedBy, Prepared
from proxy.relay.tunnel import Tunnel
from proxy.upstream.connection import UpstreamConnection, UpstreamFailure, UpstreamLink
from proxy.upstream.pool import Pending

IDEMPOTENT_METHODS = frozenset((b"GET", b"HEAD", b"OPTIONS", b"PUT", b"DELETE"))
"""RFC 9110 section 9.2.2: what may be sent twice."""

MAX_RETRIES = 2


class ClientSide(Protocol):
    """What an exchange needs of the session that it serves."""

    @property
    def forwarded(self) -> ForwardedBy: ...
    @property
    def tls_version(self) -> bytes: ...

    def exchange_ended(self, exchange: Exchange) -> None:
        """The exchange is over; what there is of its response has been written."""


class Exchange:
    """See the module's text. ``start`` is called once, after the session has made itself ready to be called back."""

    __slots__ = (
        "_awaits_continue",
        "_body_bytes",
        "_client",
        "_connection",
        "_context",
        "_ended",
        "_forwarded",
        "_head",
        "_pace",
        "_pending",
        "_prepared",
        "_request_body_bytes",
        "_request_id",
        "_response",
        "_retries",
        "_sent_at",
        "_started",
        "_status",
        "_tunnel",
        "_upstream_secs",
        "request_done",
    )

    stream_id: int
    """Of the client's connection, for the access log; 0 where its protocol has none."""

    def __init__(self, context: RelayContext, client: ClientSide, head: RequestHead, prepared: Prepared) -> None:
        self._context = context
        self._client = client
        self._head = head
        self._prepared = prepared
        self._connection: UpstreamLink | None = None
        self._pending: Pending | None = None
        self._forwarded = forwarded = client.forwarded
        self._request_id = forwarded.request_id(head) if forwarded.trusted else context.new_request_id()
        self._started = self._sent_at = monotonic()
        self._upstream_secs = -1.0
        self._status = 0
        self._response: PreparedResponse | None = None
        self._body_bytes = 0
        self._request_body_bytes = 0
        self._retries = 0
        self._ended = False
        self._tunnel: Tunnel | None = None
        self.request_done = not head.has_body
        self._awaits_continue = head.expect_continue
        self._pace: Pace | None = None
        route = prepared.route
        if head.has_body and route.min_request_body_bytes_per_sec:
            self._pace = Pace(
                route.min_request_body_bytes_per_sec,
                grace_secs=context.settings.min_rate_grace_secs,
                longest_secs=route.request_body_timeout_secs,
            )
        context.requests_active += 1
        if prepared.underscore_fields:
            context.cells[UNDERSCORE_FIELDS_DROPPED] += prepared.underscore_fields

    # -- for the subclasses: the client's protocol -------------------------------------------------------------------

    def pump_body(self) -> None:
        """Pull what there is of the request body out of the decoder, or stop reading it while ``holds_back``."""
        raise NotImplementedError

    @property
    def client_is_full(self) -> bool:
        """Whether no more of the response can be taken now; ``on_client_drained`` follows."""
        raise NotImplementedError

    def send_whole(self, head: ResponseHead, response: PreparedResponse, body: bytes) -> None:
        """Send a response whose body is complete."""
        raise NotImplementedError

    def send_interim(self, head: ResponseHead, response: PreparedResponse) -> None:
        """Send a 1xx head."""
        raise NotImplementedError

    def send_head(self, head: ResponseHead, response: PreparedResponse) -> None:
        """Send a final head; what follows it may be put together with it until ``flush``."""
        raise NotImplementedError

    def send_body(self, data: bytes) -> None:
        """Send a piece of the body."""
        raise NotImplementedError

    def send_end(self, trailers: Trailers) -> None:
        """The response is complete."""
        raise NotImplementedError

    def flush(self) -> None:
        """Send what has been put together."""
        raise NotImplementedError

    def send_own(self, status: int) -> int:
        """Send a whole response of the proxy's own. Returns the size of its body."""
        raise NotImplementedError

    def break_off(self) -> None:
        """Let the client see that the response that has begun is not complete."""
        raise NotImplementedError

    def open_tunnel(self, connection: UpstreamConnection, response: PreparedResponse) -> Tunnel:
        """Tell the client of the switch and join both sides."""
        raise NotImplementedError

    def late_fields(self) -> bytes:
        """What a request that switches to another protocol needs besides, each line after a CRLF."""
        return b""

    # -- the request's way -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Get a connection to the upstream and send the request's head on it."""
        got = self._context.pool.acquire(self._prepared.group, self)
        if type(got) is Pending:
            self._pending = got
        elif type(got) is UpstreamFailure:
            self.on_upstream_failed(got)
        else:
            self._send_request(got)  # type: ignore[arg-type]

    @property
    def client_address(self) -> bytes:
        """See ``Acquirer``."""
        return self._forwarded.client(self._head)

    def on_upstream_ready(self, connection: UpstreamLink) -> None:
        """See ``Acquirer``."""
        self._pending = None
        self._send_request(connection)

    def on_upstream_failed(self, failure: UpstreamFailure) -> None:
        """See ``Acquirer``."""
        self._pending = None
        self._fail(failure.status, failure.reason)

    def _send_request(self, connection: UpstreamLink) -> None:
        self._connection = connection
        head, prepared, forwarded = self._head, self._prepared, self._forwarded
        host = prepared.host or connection.backend.host_header
        if forwarded.trusted:
            forwarding = forwarded.trusted_fields(head, self._request_id)
        else:
            forwarding = b"%b%b%b" % (forwarded.plain, prepared.tail, self._request_id)
        late = self.late_fields() if head.protocol else b""
        data = b"%b%b%b%b%b\r\n\r\n" % (prepared.line, host, prepared.fields, forwarding, late)
        self._sent_at = now = monotonic()
        if self.request_done:
            connection.begin(head.method, data, now + prepared.response_timeout_secs)
            return
        connection.begin_with_body(head.method, data, head.chunked)
        self.pump_body()
        if self._ended:
            return
        connection.flush_head()
        if self._awaits_continue:
            connection.expect(monotonic() + prepared.response_timeout_secs)

    @property
    def body_timeout_secs(self) -> float:
        """How long the client may be silent inside its body: while it waits for 100 (Continue), it is the upstream that
        owes something."""
        return inf if self._awaits_continue else self._prepared.route.request_body_timeout_secs

    def body_deadline(self, now: float) -> float:
        """When the client is late with the next piece of its body (monotonic secs).

        Once the response has begun, both may go on as they like: nobody waits for the body alone.
        """
        pace, idle = self._pace, now + self.body_timeout_secs
        return idle if pace is None or self._awaits_continue or self._status else min(idle, pace.wait(now))

    def hold_body(self) -> None:
        """The client is not waited for: no more of its body is taken now."""
        if self._pace is not None:
            self._pace.rest(monotonic())

    @property
    def holds_back(self) -> bool:
        """Whether no more of the request body can be taken now."""
        connection = self._connection
        return connection is None or connection.holds_back

    def on_request_body(self, data: bytes) -> None:
        """A piece of the request body, decoded."""
        if self._awaits_continue:
            self._continue()
        self._request_body_bytes += len(data)
        if self._pace is not None:
            self._pace.moved(len(data), monotonic())
        limit = self._prepared.route.max_request_body_bytes
        if limit is not None and self._request_body_bytes > limit:
            self.reject_request(413, "body-too-large")
        elif self._connection is not None:
            self._connection.write_body(data)

    def on_request_end(self, end: EndOfMessage) -> None:
        """The request body is complete."""
        self.request_done = True
        connection = self._connection
        if connection is None:
            return
        trailers = end.trailers
        if trailers:
            trailers, underscore_fields = self._prepared.trailers(trailers)
            self._context.cells[UNDERSCORE_FIELDS_DROPPED] += underscore_fields
        connection.end_body(trailers)
        if connection.reading:
            connection.expect(monotonic() + self._prepared.response_timeout_secs)

    def _continue(self) -> None:
        # The client sends its body now, because it was told to or because it has waited enough.
        self._awaits_continue = False
        if self._connection is not None:
            self._connection.expect(inf)

    def reject_request(self, status: int, reason: str, detail: str = "") -> None:
        """The request turned out to be bad, too big or too slow while its body came in."""
        if self._status == 0:
            self._fail(status, reason, detail)
        else:
            self._cut(reason, detail)

    def body_timed_out(self) -> None:
        """The client has not sent any of its body for too long, or too little."""
        self._context.cells[TIMEOUTS_BODY] += 1
        now = monotonic()
        self._context.cells[TIMEOUTS_SLOW] += self._pace is not None and self._pace.wait(now) <= now
        self.reject_request(408, "body-timeout")

    def on_upstream_write_failed(self) -> None:
        """See ``UpstreamUser``: what the client still sends has nowhere to go, and it is the upstream's turn."""
        connection = self._connection
        assert connection is not None
        if not self.request_done:
            self.pump_body()
        connection.expect(monotonic() + self._prepared.response_timeout_secs)

    def on_upstream_drained(self) -> None:
        """See ``UpstreamUser``."""
        if not self.request_done:
            self.pump_body()

    # -- the response's way ------------------------------------------------------------------------------------------

    def on_response_whole(self, head: ResponseHead, body: bytes) -> None:
        """See ``UpstreamUser``."""
        response = self._begin_response(head)
        self._body_bytes = len(body)
        self.send_whole(head, response, body)
        self._finish()

    def on_response_head(self, head: ResponseHead) -> None:
        """See ``UpstreamUser``."""
        if head.interim:
            self.send_interim(head, prepare_response(self._context, head, self._prepared.route))
            if head.status == 100 and self._awaits_continue:
                self._continue()
                self.pump_body()
        elif head.status == 101:
            self._switch_protocols(head)
        else:
            self.send_head(head, self._begin_response(head))

    def on_response_body(self, data: bytes) -> None:
        """See ``UpstreamUser``."""
        self._body_bytes += len(data)
        self.send_body(data)

    def on_response_end(self, trailers: Trailers) -> None:
        """See ``UpstreamUser``."""
        if trailers:
            assert self._response is not None
            trailers = self._response.trailers(trailers)
        self.send_end(trailers)
        self._finish()

    def on_response_paused(self) -> None:
        """See ``UpstreamUser``."""
        connection = self._connection
        assert connection is not None
        if self._status:
            self.flush()
            if self.client_is_full:
                connection.pause()
                return
        if self.request_done:
            connection.expect(monotonic() + self._prepared.response_timeout_secs)
        connection.keep_watching()

    def _begin_response(self, head: ResponseHead) -> PreparedResponse:
        connection = self._connection
        assert connection is not None
        connection.backend.succeeded()
        self._status = head.status
        self._upstream_secs = monotonic() - self._sent_at
        self._response = response = prepare_response(self._context, head, self._prepared.route)
        return response

    def on_upstream_timed_out(self) -> None:
        """See ``UpstreamUser``."""
        self._context.cells[TIMEOUTS_UPSTREAM] += 1
        self._upstream_failed("timeout", "an upstream did not answer in time")
        if self._status == 0:
            self._fail(504, "upstream-timeout")
        else:
            self._cut("upstream-timeout")

    def on_no_response(self, error: str) -> None:
        """See ``UpstreamUser``; nothing of the request may have been seen by the upstream."""
        connection = self._connection
        assert connection is not None
        if self._status:
            self.on_response_cut_short()
            return
        if self._retries < MAX_RETRIES and self._may_be_sent_again(connection):
            self._retries += 1
            self._context.cells[UPSTREAM_RETRIES] += 1
            self._connection = None
            connection.release(request_done=False)
            self.start()
            return
        if connection.unprocessed:
            self._fail(503, "upstream-refused")
            return
        self._upstream_failed("no-response", "an upstream closed the connection without a response", error=error)
        self._fail(502, "upstream-no-response")

    def _may_be_sent_again(self, connection: UpstreamLink) -> bool:
        """Whether nothing of the request was seen or, where it was, twice is as good as once (RFC 9110 section 9.2.2,
        RFC 9113 section 8.7); a body that was passed on is gone."""
        if connection.unprocessed:
            return not self._head.has_body or not (self._request_body_bytes or self.request_done)
        return (
            connection.uses > 1
            and not connection.received
            and self._head.method in IDEMPOTENT_METHODS
            and not self._head.has_body
        )

    def on_response_invalid(self, reason: str) -> None:
        """See ``UpstreamUser``."""
        self._upstream_failed("invalid-response", "an upstream's response is invalid", error=reason)
        if self._status == 0:
            self._fail(502, "upstream-invalid-response", reason)
        else:
            self._cut("upstream-invalid-response", reason)

    def on_response_cut_short(self) -> None:
        """See ``UpstreamUser``."""
        self._upstream_failed("cut-short", "an upstream ended a response before its end")
        if self._status == 0:
            self._fail(502, "upstream-cut-short")
        else:
            self.flush()
            self._cut("upstream-cut-short")

    def _upstream_failed(self, reason: str, message: str, error: str = "") -> None:
        connection = self._connection
        if connection is None:
            return
        self._context.pool.backend_failed(connection.backend, reason)
        self._context.reporter.report(
            f"upstream.{reason}:{connection.backend.label}",
            message,
            level="warning",
            upstream=connection.backend.label,
            request_id=self._request_id.decode("ascii"),
            error=error,
        )

    def _switch_protocols(self, head: ResponseHead) -> None:
        asked, connection = self._prepared.upgrade, self._connection
        assert isinstance(connection, UpstreamConnection)  # the codec of HTTP/2 refuses 101
        if asked is None or asked not in head.upgrade or not self.request_done:
            self.on_response_invalid("unrequested-101")
            return
        response = self._begin_response(head)
        connection.expect(inf)
        self._tunnel = self.open_tunnel(connection, response)
        self._tunnel.start()

    # -- told by the session -----------------------------------------------------------------------------------------

    def on_client_drained(self) -> None:
        """The client took what was buffered: more of the response can come."""
        connection = self._connection
        if connection is not None and connection.resume() and self.request_done:
            connection.expect(monotonic() + self._prepared.response_timeout_secs)

    def client_gone(self) -> None:
        """The client has closed, reset, or stopped reading: there is nobody to answer."""
        if self._tunnel is not None:
            self._body_bytes = self._tunnel.bytes_to_client
            if self._tunnel.expired and not self._ended:
                self._note("tunnel-timeout")
            self._tunnel.end()
        self._end(self._status or CLIENT_GONE, clean=False)

    @property
    def is_tunnel(self) -> bool:
        """Whether both sides have switched to another protocol."""
        return self._tunnel is not None

    def end_tunnel(self) -> None:
        """Close both sides of an open tunnel in order, after what is buffered. Without one nothing happens."""
        if self._tunnel is not None:
            self._tunnel.end()

    def client_stopped_reading(self) -> None:
        """The client took nothing of what was buffered for too long."""
        self._context.cells[TIMEOUTS_WRITE] += 1
        self._cut("write-timeout")

    # -- the end -----------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        self._end(self._status)
        self._client.exchange_ended(self)

    def _fail(self, status: int, reason: str, detail: str = "") -> None:
        self._note(reason, status, detail)
        self._body_bytes = self.send_own(status)
        self._end(status, clean=False)
        self._client.exchange_ended(self)

    def _cut(self, reason: str, detail: str = "") -> None:
        self._note(reason, 0, detail)
        self._end(self._status, clean=False)
        self.break_off()
        self._client.exchange_ended(self)

    def _note(self, reason: str, status: int = 0, detail: str = "") -> None:
        """For who asks why: the client was told ``status``, or cut off (0)."""
        self._context.refusals.note(self.client_address, reason, status=status, detail=detail)

    def _end(self, status: int, clean: bool = True) -> None:
        """The one way out: exactly once. ``clean``: the upstream connection may be used again if it is at rest."""
        if self._ended:
            return
        self._ended = True
        context = self._context
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None
        if self._connection is not None:
            self._connection.release(clean and self.request_done)
            self._connection = None
        context.requests_active -= 1
        cells = context.cells
        cells[REQUESTS] += 1
        cells[RESPONSES_1XX - 1 + status // 100] += 1
        prepared, duration_secs = self._prepared, monotonic() - self._started
        tally = prepared.tally
        tally[CODE_CELL[status]] += 1
        if status != 101:  # a tunnel lasts as long as it is wanted, which says nothing about speed
            tally[bisect_left(BOUNDS_SECS, duration_secs)] += 1
            tally[-1] += duration_secs
        forwarded = self._forwarded
        context.access_log.request(
            forwarded.client(self._head) if forwarded.trusted else forwarded.peer,
            prepared.logged,
            status,
            self._body_bytes,
            duration_secs,
            self._upstream_secs,
            self._request_id,
            self._client.tls_version,
            self.stream_id,
        )
