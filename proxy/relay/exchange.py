"""One exchange: a request and its response, between a client's stream and an upstream's.

Theory of operation. The session parses the request and pushes its body in (``on_request_body``,
``on_request_end``); the upstream connection pushes the response's bytes in (``on_upstream_data``). Both directions
stream, each held back by the other side's buffer: while ``holds_back`` the session pulls no body out of its decoder,
while the client's buffer is above the high-water mark the upstream is not read. The exchange ends in exactly one of

    _finish       the response was written whole; the client's connection lives on if nothing forbids it
    _fail         no response had begun: the proxy answers itself
    _cut          a response had begun: the client's connection is reset, so that it cannot be taken for complete
    client_gone   there is nobody to answer, or no more: the end of a tunnel

and each of them goes through ``_end``, which gives the upstream connection back, counts and logs.
"""

from __future__ import annotations

from bisect import bisect_left
from math import inf
from time import monotonic
from typing import Protocol

from proxy.observe.counters import (
    REQUESTS,
    RESPONSES_1XX,
    TIMEOUTS_BODY,
    TIMEOUTS_UPSTREAM,
    TIMEOUTS_WRITE,
    UNDERSCORE_FIELDS_DROPPED,
    UPSTREAM_RETRIES,
)
from proxy.observe.rows import BOUNDS_SECS
from proxy.observe.tallies import CODE_CELL
from proxy.protocol.http1 import (
    CHUNKED,
    CLOSED,
    LAST_CHUNK,
    NO_BODY,
    UNTIL_CLOSE,
    EndOfMessage,
    Incomplete,
    ProtocolError,
    RequestDecoder,
    RequestHead,
    ResponseHead,
    Trailers,
    encode_chunk,
    encode_last_chunk,
)
from proxy.relay.answer import (
    CLIENT_GONE,
    CONNECTION_CLOSE,
    CONNECTION_KEEP_ALIVE,
    TRANSFER_CHUNKED,
    PreparedResponse,
    own_response,
    prepare_response,
)
from proxy.relay.context import RelayContext
from proxy.relay.forward import ForwardedBy, Prepared
from proxy.relay.tunnel import Tunnel
from proxy.stream.stream import HIGH_WATER_BYTES, Stream
from proxy.upstream.connection import UpstreamConnection
from proxy.upstream.pool import RETRY_AFTER_SECS, Pending, UpstreamFailure

IDEMPOTENT_METHODS = frozenset((b"GET", b"HEAD", b"OPTIONS", b"PUT", b"DELETE"))
"""RFC 9110 section 9.2.2: what may be sent twice."""

MAX_RETRIES = 2


class ClientSide(Protocol):
    """What an exchange needs of the session that it serves."""

    @property
    def stream(self) -> Stream: ...
    @property
    def decoder(self) -> RequestDecoder: ...
    @property
    def forwarded(self) -> ForwardedBy: ...
    @property
    def tls_version(self) -> bytes: ...

    def pump_body(self) -> None:
        """Pull what there is of the request body out of the decoder."""

    def exchange_ended(self, close: bool) -> None:
        """The exchange is over; ``close``: so is the connection, after what has been written."""


class Exchange:
    """See the module's text. ``start`` is called once, after the session has made itself ready to be called back."""

    __slots__ = (
        "_awaits_continue",
        "_body_bytes",
        "_chunked_out",
        "_client",
        "_close",
        "_connection",
        "_context",
        "_ended",
        "_finished_reading",
        "_forwarded",
        "_head",
        "_head_unsent",
        "_pending",
        "_prepared",
        "_received",
        "_request_body_bytes",
        "_request_id",
        "_response",
        "_retries",
        "_sent_at",
        "_started",
        "_status",
        "_tunnel",
        "_upstream_broken",
        "_upstream_keeps_alive",
        "_upstream_secs",
        "request_done",
    )

    def __init__(self, context: RelayContext, client: ClientSide, head: RequestHead, prepared: Prepared) -> None:
        self._context = context
        self._client = client
        self._head = head
        self._prepared = prepared
        self._connection: UpstreamConnection | None = None
        self._pending: Pending | None = None
        self._forwarded = forwarded = client.forwarded
        self._request_id = forwarded.request_id(head) if forwarded.trusted else context.new_request_id()
        self._started = self._sent_at = monotonic()
        self._upstream_secs = -1.0
        self._status = 0
        self._response: PreparedResponse | None = None
        self._body_bytes = 0
        self._request_body_bytes = 0
        self._received = False
        self._retries = 0
        self._close = not head.keep_alive
        self._chunked_out = False
        self._head_unsent: bytes | None = None
        self._upstream_broken = False
        self._upstream_keeps_alive = False
        self._finished_reading = False
        self._ended = False
        self._tunnel: Tunnel | None = None
        self.request_done = not head.has_body
        self._awaits_continue = head.expect_continue
        client.stream.write_timeout_secs = prepared.route.write_timeout_secs
        context.requests_active += 1
        if prepared.underscore_fields:
            context.cells[UNDERSCORE_FIELDS_DROPPED] += prepared.underscore_fields

    # -- the request's way ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Get a connection to the upstream and send the request's head on it."""
        got = self._context.pool.acquire(self._prepared.group, self)
        if type(got) is UpstreamConnection:
            self._send_head(got)
        elif type(got) is Pending:
            self._pending = got
        else:
            assert type(got) is UpstreamFailure
            self.on_upstream_failed(got)

    def on_upstream_ready(self, connection: UpstreamConnection) -> None:
        """See ``Acquirer``."""
        self._pending = None
        self._send_head(connection)

    def on_upstream_failed(self, failure: UpstreamFailure) -> None:
        """See ``Acquirer``."""
        self._pending = None
        self._fail(failure.status, failure.reason)

    def _send_head(self, connection: UpstreamConnection) -> None:
        self._connection = connection
        head, prepared, forwarded = self._head, self._prepared, self._forwarded
        connection.decoder.start(head.method)
        host = prepared.host or connection.backend.host_header
        if forwarded.trusted:
            forwarding = forwarded.trusted_fields(head, self._request_id)
        else:
            forwarding = b"%b%b%b" % (forwarded.plain, prepared.tail, self._request_id)
        data = b"%b%b%b%b\r\n\r\n" % (prepared.line, host, prepared.fields, forwarding)
        self._sent_at = now = monotonic()
        if self.request_done:
            connection.stream.write(data)
            connection.stream.expect(now + prepared.response_timeout_secs)
            return
        # The first piece of the body, where it is there already, goes with the head.
        self._head_unsent = data
        self._client.pump_body()
        self._send_lone_head(connection)

    def _send_lone_head(self, connection: UpstreamConnection) -> None:
        data, self._head_unsent = self._head_unsent, None
        if data is not None and not self._ended:
            connection.stream.write(data)
            if self._awaits_continue:
                connection.stream.expect(monotonic() + self._prepared.response_timeout_secs)

    @property
    def body_timeout_secs(self) -> float:
        """How long the client may be silent inside its body: while it waits for 100 (Continue), it is the upstream that
        owes something."""
        return inf if self._awaits_continue else self._prepared.route.request_body_timeout_secs

    @property
    def holds_back(self) -> bool:
        """Whether no more of the request body can be taken now."""
        connection = self._connection
        return connection is None or self._upstream_broken or connection.stream.buffered > HIGH_WATER_BYTES

    def on_request_body(self, data: bytes) -> None:
        """A piece of the request body, decoded."""
        if self._awaits_continue:
            self._continue(self._connection)
        self._request_body_bytes += len(data)
        limit = self._prepared.route.max_request_body_bytes
        if limit is not None and self._request_body_bytes > limit:
            self.reject_request(413, "body-too-large")
            return
        self._write_upstream(encode_chunk(data) if self._head.chunked else data)

    def on_request_end(self, end: EndOfMessage) -> None:
        """The request body is complete."""
        self.request_done = True
        if self._head.chunked:
            self._write_upstream(self._last_chunk(end.trailers) if end.trailers else LAST_CHUNK)
        connection = self._connection
        if connection is not None and connection.stream.reading:
            connection.stream.expect(monotonic() + self._prepared.response_timeout_secs)

    def _last_chunk(self, trailers: Trailers) -> bytes:
        kept, underscore_fields = self._prepared.trailers(trailers)
        self._context.cells[UNDERSCORE_FIELDS_DROPPED] += underscore_fields
        return encode_last_chunk(kept)

    def _continue(self, connection: UpstreamConnection | None) -> None:
        # The client sends its body now, because it was told to or because it has waited enough.
        self._awaits_continue = False
        if connection is not None:
            connection.stream.read_deadline = inf

    def _write_upstream(self, data: bytes) -> None:
        connection = self._connection
        if connection is None or self._upstream_broken:
            return
        if self._head_unsent is not None:
            data = self._head_unsent + data
            self._head_unsent = None
        connection.stream.write(data)

    def reject_request(self, status: int, reason: str, detail: str = "") -> None:
        """The request turned out to be bad, too big or too slow while its body came in."""
        if self._status == 0:
            self._fail(status, reason, detail)
        else:
            self._cut(reason, detail)

    def body_timed_out(self) -> None:
        """The client has not sent any of its body for too long."""
        self._context.cells[TIMEOUTS_BODY] += 1
        self.reject_request(408, "body-timeout")

    # -- the response's way --------------------------------------------------------------------------------------------

    def on_upstream_data(self, data: bytes) -> None:
        """Bytes of the response."""
        connection = self._connection
        assert connection is not None
        self._received = True
        decoder = connection.decoder
        whole = decoder.take_whole(data)
        if whole is None:
            decoder.feed(data)
            self._relay_response(connection)
            return
        head, body = whole
        out = self._response_head(head)
        if body:
            self._body_bytes = len(body)
            out += body
        self._client.stream.write(out)
        self._finish()

    def _relay_response(self, connection: UpstreamConnection) -> None:
        next_event = connection.decoder.next_event
        out: list[bytes] = []
        finished = False
        try:
            while True:
                event = next_event()
                kind = type(event)
                if kind is bytes:
                    self._body_bytes += len(event)  # type: ignore[arg-type]
                    out.append(encode_chunk(event) if self._chunked_out else event)  # type: ignore[arg-type]
                elif kind is ResponseHead:
                    if event.status == 101:  # type: ignore[union-attr]
                        self._switch_protocols(connection, event)  # type: ignore[arg-type]
                        return
                    out.append(self._response_head(event))  # type: ignore[arg-type]
                    if event.status == 100 and self._awaits_continue:  # type: ignore[union-attr]
                        self._continue(connection)
                        self._client.pump_body()
                    if event.framing == NO_BODY and not event.interim:  # type: ignore[union-attr]
                        finished = True
                        break
                elif kind is EndOfMessage:
                    if self._chunked_out:
                        trailers = event.trailers  # type: ignore[union-attr]
                        out.append(encode_last_chunk(self._kept_trailers(trailers)) if trailers else LAST_CHUNK)
                    finished = True
                    break
                elif event is CLOSED:
                    self._no_response("closed without a response")
                    return
                else:
                    break
        except Incomplete:
            self._upstream_cut_short(out)
            return
        except ProtocolError as error:
            self._invalid_response(error.reason)
            return
        client = self._client.stream
        if out:
            client.write(b"".join(out) if len(out) > 1 else out[0])
        if finished:
            self._finish()
            return
        if client.buffered > HIGH_WATER_BYTES:
            connection.stream.pause_reading()
            connection.stream.read_deadline = inf
            return
        if self.request_done:
            connection.stream.expect(monotonic() + self._prepared.response_timeout_secs)
        connection.stream.keep_watching()

    def _response_head(self, head: ResponseHead) -> bytes:
        request, route = self._head, self._prepared.route
        response = prepare_response(self._context, head, route)
        if head.interim:
            # RFC 9110 section 15.2: not for a client of HTTP/1.0.
            return response.whole if request.version == 11 else b""
        self._status = head.status
        self._response = response
        self._upstream_secs = monotonic() - self._sent_at
        self._upstream_keeps_alive = head.keep_alive
        connection = self._connection
        assert connection is not None
        connection.backend.succeeded()
        if not self.request_done or self._context.draining:
            # An early answer: the rest of the request is of no use to anybody (RFC 9112 section 9.6).
            self._close = True
        framing = b""
        if head.framing == CHUNKED or head.framing == UNTIL_CLOSE:
            if request.version == 11:
                self._chunked_out = True
                framing = TRANSFER_CHUNKED
            else:
                self._close = True
        if self._close:
            return b"".join((response.start, framing, CONNECTION_CLOSE, b"\r\n"))
        if request.version == 10:
            return b"".join((response.start, framing, CONNECTION_KEEP_ALIVE, b"\r\n"))
        return b"".join((response.start, framing, b"\r\n")) if framing else response.whole

    def _kept_trailers(self, trailers: Trailers) -> Trailers:
        assert self._response is not None
        return self._response.trailers(trailers)

    def on_upstream_eof(self) -> None:
        """The upstream ended its side."""
        connection = self._connection
        assert connection is not None
        self._finished_reading = True
        connection.decoder.feed_eof()
        self._relay_response(connection)

    def on_upstream_lost(self, error: OSError) -> None:
        """The connection to the upstream broke: whatever has no end yet has none."""
        self._finished_reading = True
        if self._status == 0:
            self._no_response(str(error))
        else:
            self._upstream_cut_short([])

    def on_upstream_write_failed(self, error: OSError) -> None:
        """The upstream takes no more of the request; it may have answered before it closed."""
        self._upstream_broken = True
        connection = self._connection
        assert connection is not None
        self._client.stream.pause_reading()
        connection.stream.resume_reading()
        connection.stream.keep_watching()
        connection.stream.expect(monotonic() + self._prepared.response_timeout_secs)

    def on_upstream_drained(self) -> None:
        """The upstream took what was buffered: more of the request body can come."""
        if not self.request_done:
            self._client.pump_body()

    def on_upstream_read_deadline(self) -> None:
        """Nothing came from the upstream for too long."""
        self._context.cells[TIMEOUTS_UPSTREAM] += 1
        self._upstream_failed("timeout", "an upstream did not answer in time")
        if self._status == 0:
            self._fail(504, "upstream-timeout")
        else:
            self._cut("upstream-timeout")

    def on_upstream_write_deadline(self) -> None:
        """The upstream did not read the request for too long."""
        self.on_upstream_read_deadline()

    def _no_response(self, error: str) -> None:
        """The connection ended before a response; nothing of it may have been seen by the upstream."""
        connection = self._connection
        assert connection is not None
        if (
            connection.uses > 1
            and not self._received
            and self._retries < MAX_RETRIES
            and self._head.method in IDEMPOTENT_METHODS
            and not self._head.has_body
        ):
            self._retries += 1
            self._context.cells[UPSTREAM_RETRIES] += 1
            self._connection = None
            self._finished_reading = False
            connection.release(reusable=False)
            self.start()
            return
        self._upstream_failed("no-response", "an upstream closed the connection without a response", error=error)
        self._fail(502, "upstream-no-response")

    def _invalid_response(self, reason: str) -> None:
        self._upstream_failed("invalid-response", "an upstream's response is invalid", error=reason)
        if self._status == 0:
            self._fail(502, "upstream-invalid-response", reason)
        else:
            self._cut("upstream-invalid-response", reason)

    def _upstream_cut_short(self, out: list[bytes]) -> None:
        self._upstream_failed("cut-short", "an upstream ended a response before its end")
        if self._status == 0:
            self._fail(502, "upstream-cut-short")
            return
        if out:
            self._client.stream.write(b"".join(out))
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

    # -- told by the session -------------------------------------------------------------------------------------------

    def on_client_drained(self) -> None:
        """The client took what was buffered: more of the response can come."""
        connection = self._connection
        if connection is not None and not self._finished_reading:
            connection.stream.resume_reading()
            if self.request_done:
                connection.stream.expect(monotonic() + self._prepared.response_timeout_secs)

    def client_gone(self) -> None:
        """The client has closed, reset, or stopped reading: there is nobody to answer."""
        if self._tunnel is not None:
            self._body_bytes = self._tunnel.bytes_to_client
            if self._tunnel.expired and not self._ended:
                self._note("tunnel-timeout")
            self._tunnel.end()
        self._end(self._status or CLIENT_GONE)

    def end_tunnel(self) -> None:
        """Close both sides of an open tunnel in order, after what is buffered. Without one nothing happens."""
        if self._tunnel is not None:
            self._tunnel.end()

    def client_stopped_reading(self) -> None:
        """The client took nothing of what was buffered for too long."""
        self._context.cells[TIMEOUTS_WRITE] += 1
        self._cut("write-timeout")

    # -- upgrade -------------------------------------------------------------------------------------------------------

    def _switch_protocols(self, connection: UpstreamConnection, head: ResponseHead) -> None:
        asked = self._prepared.upgrade
        if asked is None or asked not in head.upgrade or not self.request_done:
            self._invalid_response("unrequested-101")
            return
        client = self._client
        self._status = 101
        self._upstream_secs = monotonic() - self._sent_at
        connection.backend.succeeded()
        start = prepare_response(self._context, head, self._prepared.route).start
        client.stream.write(b"%bConnection: Upgrade\r\nUpgrade: %b\r\n\r\n" % (start, asked))
        connection.stream.read_deadline = inf
        self._tunnel = Tunnel(
            client.stream,
            connection.stream,
            idle_secs=self._prepared.route.tunnel_idle_timeout_secs,
            from_client=client.decoder.take_rest(),
            from_upstream=connection.decoder.take_rest(),
            cells=self._context.cells,
            on_end=self.client_gone,
        )
        self._tunnel.start()

    # -- the end -------------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        connection, client = self._connection, self._client
        assert connection is not None
        stream = connection.stream
        reusable = (
            self.request_done
            and connection.decoder.at_rest
            and self._upstream_keeps_alive
            and not self._upstream_broken
            and not self._finished_reading
            and stream.buffered == 0
        )
        self._end(self._status, reusable)
        client.exchange_ended(self._close or not self.request_done)

    def _fail(self, status: int, reason: str, detail: str = "") -> None:
        self._note(reason, status, detail)
        # What is left of the request body would have to be read to keep the connection; it is closed instead.
        close = self._close or not self.request_done or self._context.draining
        data, self._body_bytes = own_response(
            self._context,
            status,
            method=self._head.method,
            request_id=self._request_id,
            close=close,
            version=self._head.version,
            retry_after_secs=RETRY_AFTER_SECS if status == 503 else None,
        )
        client = self._client
        client.stream.write(data)
        self._end(status)
        client.exchange_ended(close)

    def _cut(self, reason: str, detail: str = "") -> None:
        self._note(reason, 0, detail)
        client = self._client
        self._end(self._status)
        client.stream.abort()
        client.exchange_ended(True)

    def _note(self, reason: str, status: int = 0, detail: str = "") -> None:
        """For who asks why: the client was told ``status``, or cut off (0)."""
        self._context.refusals.note(self._forwarded.client(self._head), reason, status=status, detail=detail)

    def _end(self, status: int, reusable: bool = False) -> None:
        """The one way out: exactly once."""
        if self._ended:
            return
        self._ended = True
        context = self._context
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None
        if self._connection is not None:
            self._connection.release(reusable)
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
        )
