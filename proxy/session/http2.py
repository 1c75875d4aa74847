"""An HTTP/2 session over TLS: one connection, an exchange a stream.

Whatever a wake-up brings to the streams, from the client or from their upstreams, is written once when it is over
(``wake``, ``_flush``): one TLS record or a few instead of one a stream. What waits in the codec for the client's window
is watched stream by stream (``_Waiting``), since a client that takes one stream's data may hold up another's.

The end is announced (``go_away``): GOAWAY twice, RFC 9113 section 6.8, so that no request that is on its way is lost.
Then the connection lingers (``linger``): a client that still reads an answer sends WINDOW_UPDATE, and one that meets a
closed socket would make the kernel reset the connection and drop what it holds of that answer.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from math import inf
from time import monotonic
from typing import Any, ClassVar, Final

from proxy.observe.counters import (
    BAD_REQUESTS,
    HTTP2_CONNECTION_ERRORS,
    HTTP2_CONNECTIONS,
    HTTP2_STREAM_ERRORS,
    HTTP2_STREAMS,
    TIMEOUTS_HEADER,
    TIMEOUTS_IDLE,
    TIMEOUTS_SLOW,
    TIMEOUTS_WRITE,
    http2_reason_cell,
)
from proxy.protocol.http1 import RequestHead
from proxy.protocol.http2 import (
    CANCEL,
    ENHANCE_YOUR_CALM,
    LAST_WORDS_BYTES,
    NO_ERROR,
    Body,
    BodyEnd,
    ConnectionFailed,
    GoAway,
    Pong,
    Request,
    RequestRefused,
    ServerConnection,
    StreamReset,
)
from proxy.relay.answer import http2_block, own_fields
from proxy.relay.context import RelayContext
from proxy.relay.exchange import Exchange
from proxy.relay.forward import Prepared, RedirectTo, Refusal, logged_request
from proxy.relay.http2 import Http2Exchange
from proxy.relay.http2_connect import Http2Connect
from proxy.session.client import HEADER_TIMEOUT, LINGER_SECS, NO_REQUEST, Phase
from proxy.session.secured import Names, SecuredSession
from proxy.session.standing import Standing
from proxy.stream.deadlines import Deadlines
from proxy.stream.stream import HIGH_WATER_BYTES, Stream

GO_AWAY_SECS: Final = 1.0
"""Between the two steps at most; a client that answers the PING behind the first one makes it a round trip."""

LINGER_LOOK_SECS: Final = 0.5
"""A lingering connection is looked at so often. What was just sent is acknowledged between two looks, and counts as
taken then: looks that are LINGER_SECS apart would make the end last twice as long."""

LAST_WORDS_SECS: Final = 1.0
"""A client whose request was answered before it had ended may end it for so long; then the stream is reset."""

NOT_SUPPORTED = Refusal(501, "protocol")
"""RFC 8441 section 4: an extended CONNECT for a protocol that the route does not switch to."""


class Http2Session(SecuredSession):
    """Takes the stream over from the session that the handshake was made with; ``begin`` follows."""

    __slots__ = (
        "_due",
        "_exchanges",
        "_going",
        "_head_begins_at",
        "_in_wakeup",
        "_looked_at",
        "_quiet_since",
        "_taken",
        "_taken_at",
        "_taken_before",
        "_touched",
        "_unended",
        "_waiting",
        "codec",
    )

    def __init__(
        self,
        context: RelayContext,
        stream: Stream,
        *,
        peer: bytes,
        port: bytes,
        names_of: Callable[[ssl.SSLSocket], Names],
        tls_version: bytes,
    ) -> None:
        super().__init__(context, peer=peer, port=port, names_of=names_of)
        self._tls_version = tls_version
        self._stream = stream
        self.codec = ServerConnection(context.http2_limits, context.http2_heads)
        self._exchanges: dict[int, Http2Exchange] = {}
        self._waiting: dict[int, _Waiting] = {}
        self._unended: _Unended | None = None
        self._touched: list[int] = []
        self._in_wakeup = False
        self._going = False
        self._due = inf  # what the read deadline is, unless a frame has begun
        self._quiet_since = 0.0  # no stream has been open since; 0.0: one has begun
        self._head_begins_at = 0
        self._looked_at = 0.0  # first, see _goes_on_taking; 0.0: not yet
        self._taken_before = 0  # by then
        self._taken = 0
        self._taken_at = 0.0

    @property
    def busy(self) -> bool:
        return bool(self._exchanges)

    @property
    def open_streams(self) -> int:
        """How many streams the client has open."""
        return self.codec.open_streams

    @property
    def tunnelling(self) -> bool:
        return bool(self._exchanges) and all(exchange.is_tunnel for exchange in self._exchanges.values())

    def begin(self) -> None:
        self._context.cells[HTTP2_CONNECTIONS] += 1
        self._stream.handler = self
        self._phase = Phase.HEAD
        self._quiet_since = monotonic()
        self._due = self._quiet_since + self._context.settings.header_timeout_secs
        self._stream.expect(self._due)
        self._flush()

    # -- the stream's ------------------------------------------------------------------------------------------------

    def on_data(self, data: bytes) -> None:
        handlers = self._HANDLERS
        self._in_wakeup = True
        try:
            for event in self.codec.feed(data, monotonic()):
                handlers[type(event)](self, event)
        finally:
            self._in_wakeup = False
        self._flush()

    def on_eof(self) -> None:
        self._closing = True
        self._give_up()
        self._stream.close()

    def on_lost(self, error: OSError) -> None:
        super().on_lost(error)
        self._give_up()

    def on_write_failed(self, error: OSError) -> None:
        super().on_write_failed(error)
        self._give_up()

    def on_drained(self) -> None:
        if self._phase is Phase.LINGER:
            super().on_drained()
        else:
            self._flush()

    def on_read_deadline(self) -> None:
        context = self._context
        if self._phase is Phase.LINGER:
            if self._stream.buffered or self._goes_on_taking(LINGER_SECS):
                self._stream.expect(monotonic() + LINGER_LOOK_SECS)
            else:
                self._stream.close()
        elif self._going:
            self.codec.shut_down()  # the second step, since the first was not answered
            self._going = False
            self._due = inf
            self._flush()
        elif not self._served or (self.codec.mid_head and monotonic() < self._due):
            context.cells[TIMEOUTS_HEADER] += 1
            self.note(HEADER_TIMEOUT)
            self.codec.fail(NO_ERROR)
            self._say_goodbye()
        elif self._is_being_taken():
            self._rest()
            self._settle()
        else:
            context.cells[TIMEOUTS_IDLE] += 1
            self.go_away()

    # -- output ------------------------------------------------------------------------------------------------------

    def wake(self, stream_id: int) -> None:
        """See ``Http2Side``."""
        touched = self._touched
        if not touched and not self._in_wakeup:
            self._stream.call_soon(self._flush)
        touched.append(stream_id)

    def _flush(self) -> None:
        if self._closing:
            return
        codec, stream = self.codec, self._stream
        while codec.has_output and stream.buffered <= HIGH_WATER_BYTES:
            stream.write(codec.take_output())
        touched = self._touched
        if touched:
            self._touched = []
            for stream_id in touched:
                if codec.queued(stream_id) and stream_id not in self._waiting:
                    self._waiting[stream_id] = _Waiting(self, stream_id)
        for stream_id in codec.take_drained():
            exchange = self._exchanges.get(stream_id)
            if exchange is not None:
                exchange.on_client_drained()
        half_closed = codec.take_half_closed()
        if half_closed:
            if self._unended is None:
                self._unended = _Unended(self, self._context.http2_limits.max_concurrent_streams)
            for stream_id in half_closed:
                self._unended.add(stream_id)
        if codec.finished:
            self.linger()
        else:
            self._settle()

    def _settle(self) -> None:
        """What the connection waits for now. It is idle from the end of its last stream, whatever frames come after."""
        codec, stream = self.codec, self._stream
        open_streams = codec.open_streams
        if open_streams:
            if not self._going:
                self._due = inf
        elif not self._quiet_since:
            self._rest()
        if codec.mid_head:
            self._await_head()
            return
        self._head_since = 0.0
        self._phase = Phase.EXCHANGE if open_streams else Phase.IDLE if self._served else Phase.HEAD
        if stream.read_deadline != self._due:
            stream.expect(self._due)

    def _rest(self) -> None:
        """Idleness begins."""
        self._quiet_since = monotonic()
        if not self._going:
            self._due = self._quiet_since + self._idle_secs

    def _await_head(self) -> None:
        settings, now = self._context.settings, monotonic()
        if not self._head_since:
            self._head_since = now
            self._head_begins_at = self._stream.bytes_read
        self._phase = Phase.HEAD
        total = self._head_since + settings.header_total_timeout_secs
        # A frame that has begun puts off nothing; but a first request that began in time has that of any other head.
        asks_first = not self._served and not self._going and self._head_since < self._due
        bound = self._quiet_since + settings.header_total_timeout_secs if asks_first else self._due
        if self.codec.started:
            # Nothing else may come inside a head (RFC 9113 section 6.10).
            size = self._stream.bytes_read - self._head_begins_at
            least = self._context.least_rate_until(self._head_since, size)
            self._stream.expect(min(now + settings.header_timeout_secs, total, least, bound))
        self._stream.keep_watching()

    # -- told by what waits for the client's window ------------------------------------------------------------------

    @property
    def deadlines(self) -> Deadlines:
        """The wheel."""
        return self._context.deadlines

    def exchange_of(self, stream_id: int) -> Http2Exchange | None:
        """The exchange of a stream, unless it has ended."""
        return self._exchanges.get(stream_id)

    def waits_no_more(self, stream_id: int) -> None:
        """The client has taken all there was."""
        self._waiting.pop(stream_id, None)

    def count_slow(self) -> None:
        """A stream was taken too slowly."""
        self._context.cells[TIMEOUTS_SLOW] += 1

    def stalled(self, stream_id: int) -> None:
        """The client has taken nothing of the stream for too long, although it is its turn."""
        self._waiting.pop(stream_id, None)
        exchange = self._exchanges.get(stream_id)
        if exchange is not None:
            exchange.client_stopped_reading()
        else:
            self._context.cells[TIMEOUTS_WRITE] += 1
            self.note("write-timeout")
            self.codec.reset(stream_id, CANCEL)
            self.wake(stream_id)

    # -- events of the codec -----------------------------------------------------------------------------------------

    def _stream_began(self) -> None:
        self._served = True
        self._quiet_since = self._looked_at = 0.0
        self._context.cells[HTTP2_STREAMS] += 1

    def _on_request(self, event: Request) -> None:
        stream_id, head = event.stream_id, event.head
        self._stream_began()
        verdict = self.judge(head)
        if type(verdict) is Prepared:
            if not head.protocol:
                exchange = Http2Exchange(self._context, self, head, verdict, stream_id)
            elif verdict.upgrade is not None:
                exchange = Http2Connect(self._context, self, head, verdict, stream_id)
            else:
                self._answer(stream_id, head, NOT_SUPPORTED)
                return
            self._exchanges[stream_id] = exchange
            exchange.start()
        else:
            assert not isinstance(verdict, Prepared)
            self._answer(stream_id, head, verdict)

    def _on_body(self, event: Body) -> None:
        exchange = self._exchanges.get(event.stream_id)
        if exchange is not None:
            exchange.on_body(event.data)
        elif self._unended is not None and len(event.data) >= LAST_WORDS_BYTES:
            self._unended.stop(event.stream_id)

    def _on_body_end(self, event: BodyEnd) -> None:
        exchange = self._exchanges.get(event.stream_id)
        if exchange is not None:
            exchange.on_body_end(event.trailers)

    def _on_request_refused(self, event: RequestRefused) -> None:
        context = self._context
        self._stream_began()
        context.cells[BAD_REQUESTS] += 1
        request_id = context.new_request_id()
        fields, body = own_fields(context, event.status, request_id=request_id)
        self._log(self.forwarded.peer, NO_REQUEST, event.status, len(body), request_id, event.stream_id)
        context.tallies.count(None, b"", event.status, 0.0)
        self.note("bad-request", status=event.status, detail=event.reason)
        self._send(event.stream_id, event.status, fields, body)

    def _on_stream_reset(self, event: StreamReset) -> None:
        waiting = self._waiting.pop(event.stream_id, None)
        if waiting is not None:
            waiting.forget()
        if not event.by_peer:
            self._context.cells[HTTP2_STREAM_ERRORS] += 1
            self._context.cells[BAD_REQUESTS] += 1
            self.note("bad-request", detail=event.reason)
        exchange = self._exchanges.pop(event.stream_id, None)
        if exchange is not None:
            exchange.forget()
            exchange.client_gone()

    def _on_connection_failed(self, event: ConnectionFailed) -> None:
        context = self._context
        context.cells[HTTP2_CONNECTION_ERRORS] += 1
        context.cells[http2_reason_cell(event.reason)] += 1
        abuse = event.code == ENHANCE_YOUR_CALM
        self.note("http2-abuse" if abuse else "http2-error", detail=event.reason)
        if abuse:
            context.reporter.report(
                f"http2.abuse.{event.reason}",
                "a client went past a bound of HTTP/2 and was told to calm down",
                level="warning",
                client=self._peer.decode("ascii"),
                reason=event.reason,
            )
        self._say_goodbye()

    def _on_go_away(self, _event: GoAway) -> None:
        """The client opens no more streams; ``finished`` tells when those there are have ended."""

    def _on_pong(self, _event: Pong) -> None:
        """Nothing is asked here but what the codec asks itself."""

    _HANDLERS: ClassVar[dict[type, Callable[[Any, Any], None]]] = {
        Request: _on_request,
        Body: _on_body,
        BodyEnd: _on_body_end,
        RequestRefused: _on_request_refused,
        StreamReset: _on_stream_reset,
        ConnectionFailed: _on_connection_failed,
        GoAway: _on_go_away,
        Pong: _on_pong,
    }

    # -- answers of the proxy's own ----------------------------------------------------------------------------------

    def _answer(self, stream_id: int, head: RequestHead, verdict: RedirectTo | Refusal) -> None:
        context = self._context
        status, request_id = verdict.status, self.forwarded.request_id(head)
        if type(verdict) is RedirectTo:
            fields, body = own_fields(context, status, request_id=request_id, location=verdict.location)
        else:
            assert type(verdict) is Refusal
            fields, body = own_fields(context, status, request_id=request_id, fields=verdict.fields)
        if head.method == b"HEAD":
            body = b""
        client = self.forwarded.client(head)
        self._log(client, logged_request(head), status, len(body), request_id, stream_id)
        site = context.routes.site(head.host)
        context.tallies.count(None if site is None else site.name, head.method, status, 0.0)
        if type(verdict) is Refusal:
            context.refusals.note(client, verdict.reason or "refused", status=status)
        self._send(stream_id, status, fields, body)

    def _send(self, stream_id: int, status: int, fields: list[tuple[bytes, bytes]], body: bytes) -> None:
        self.codec.end_tunnel(stream_id)
        self.codec.send_head(stream_id, http2_block(status, fields), end_stream=not body)
        if body:
            self.codec.send_data(stream_id, body, end_stream=True)
        self.wake(stream_id)

    # -- the end -----------------------------------------------------------------------------------------------------

    def exchange_ended(self, exchange: Exchange) -> None:
        """See ``ClientSide``."""
        ended = self._exchanges.pop(exchange.stream_id, None)
        if ended is not None:
            ended.forget()
            if type(ended) is Http2Connect:
                self.codec.end_tunnel(ended.stream_id)

    def go_away(self) -> None:
        """Announce the end: no new streams after a moment, those there are go on."""
        if self._closing or self._going:
            return
        self._going = True
        self.codec.shut_down()
        self._due = monotonic() + GO_AWAY_SECS
        self._stream.expect(self._due)
        self._flush()

    def drain(self) -> None:
        self.go_away()

    def standing(self) -> tuple[Standing, float]:
        if self.codec.open_streams:
            return Standing.BUSY, 0.0
        standing, _ = super().standing()
        if standing is Standing.BUSY or (self._served and self._is_being_taken()):
            return Standing.BUSY, 0.0
        if self._phase is Phase.LINGER:
            return Standing.HEAD, self._taken_at
        if not self._served:
            return Standing.HEAD, self._quiet_since
        if not self._quiet_since:
            return Standing.BUSY, 0.0  # what ended the last stream is still to be sent
        # A frame that has just begun is no reason to stay: until it has lasted, the connection is as idle as before.
        since = self._head_since
        if since and monotonic() - since >= self._context.settings.eviction_grace_secs:
            return Standing.HEAD, since
        return Standing.IDLE, self._quiet_since

    def evict(self, reason: str) -> None:
        self.note(reason)
        self.codec.fail(NO_ERROR)
        self._give_up()
        if not self._closing:
            self._stream.write(self.codec.take_output())
            self._closing = True
            self._stream.close()
        self._stream.abort()  # where the GOAWAY was not taken at once

    def linger(self, clean: bool = False) -> None:
        """See ``ClientSession``; here LINGER_SECS from when the client last took what the kernel holds for it."""
        super().linger(clean)
        self._looked_at = 0.0
        if self._goes_on_taking(LINGER_SECS):
            self._stream.expect(monotonic() + LINGER_LOOK_SECS)

    def _is_being_taken(self) -> bool:
        """Whether the kernel holds something of an answer, which the client is taking."""
        stream = self._stream
        return stream.waiting_in_kernel() > 0 and self._goes_on_taking(stream.write_timeout_secs)

    def _goes_on_taking(self, within_secs: float) -> bool:
        """Whether the client took something within so long, and not less than the least rate since the first look."""
        stream, now = self._stream, monotonic()
        if stream.closed:
            return False
        taken = stream.taken_by_peer()
        if not self._looked_at:
            self._looked_at = self._taken_at = now
            self._taken_before = self._taken = taken
            return True
        if taken > self._taken:
            self._taken, self._taken_at = taken, now
        secs = now - self._looked_at
        is_slow = secs >= max(stream.rate_grace_secs, stream.write_timeout_secs) and (
            taken - self._taken_before < stream.min_write_rate * secs
        )
        return now - self._taken_at < within_secs and not is_slow

    def _say_goodbye(self) -> None:
        """Send the GOAWAY so that the client can read it although it may still be sending."""
        self._give_up()
        self._stream.write(self.codec.take_output())
        self.linger()

    def _give_up(self) -> None:
        """There is nobody to answer any more."""
        while self._exchanges:
            _, exchange = self._exchanges.popitem()
            exchange.forget()
            exchange.client_gone()
        while self._waiting:
            self._waiting.popitem()[1].forget()
        if self._unended is not None:
            self._unended.forget()
            # It knows this session: without this both, and their generation, would wait for the garbage collection.
            self._unended = None

    def end_tunnel(self) -> None:
        for exchange in list(self._exchanges.values()):
            exchange.end_tunnel()

    def released(self) -> None:
        self._closing = True
        self._give_up()
        super().released()


class _Unended:
    """The requests of a connection that were answered before they had ended (``Deadlined``). RFC 9113 section 8.1: the
    client may be asked to stop, and most have nothing more to say than the end of it, which is on its way."""

    __slots__ = ("_most", "_session", "_until", "due")

    def __init__(self, session: Http2Session, most: int) -> None:
        self._session = session
        self._most = most
        self._until: dict[int, float] = {}  # by stream, in their order
        self.due = inf

    def add(self, stream_id: int) -> None:
        """The client may still end the stream, for a moment; where there are many, the first one's is over."""
        if len(self._until) >= self._most:
            self.stop(next(iter(self._until)))
        self._until[stream_id] = when = monotonic() + LAST_WORDS_SECS
        if when < self.due:
            self._session.deadlines.watch(self, self.next_deadline())

    def stop(self, stream_id: int) -> None:
        """The client is to stop sending on the stream, if it is one of these and has not ended."""
        if self._until.pop(stream_id, None) is not None:
            self._session.codec.reset(stream_id, NO_ERROR)
            self._session.wake(stream_id)

    def next_deadline(self) -> float:
        """See ``Deadlined``."""
        return next(iter(self._until.values()), inf)

    def on_deadline(self, now: float) -> None:
        """See ``Deadlined``."""
        for stream_id in [stream_id for stream_id, when in self._until.items() if when <= now]:
            self.stop(stream_id)
        self._session.deadlines.watch(self, self.next_deadline())

    def forget(self) -> None:
        """No deadline is left."""
        self._until.clear()
        self._session.deadlines.forget(self)


class _Waiting:
    """Something of a stream waits in the codec: the client must take some of it in time, and not too slowly
    (``Deadlined``)."""

    __slots__ = (
        "_exchange",
        "_left",
        "_rate_left",
        "_rate_since",
        "_session",
        "_stream_id",
        "_timeout_secs",
        "_when",
        "due",
    )

    def __init__(self, session: Http2Session, stream_id: int) -> None:
        self._session = session
        self._stream_id = stream_id
        self.due = inf
        # Kept beyond its end, since what it has given still counts; None: an answer of the proxy's own.
        self._exchange = exchange = session.exchange_of(stream_id)
        self._timeout_secs = session.stream.write_timeout_secs if exchange is None else exchange.write_timeout_secs
        self._left = self._rate_left = self._measure()
        self._rate_since = monotonic()
        self._when = self._rate_since + self._timeout_secs
        session.deadlines.watch(self, self._when)

    def _measure(self) -> int:
        """Falls with each byte that is taken, whatever is added."""
        given = 0 if self._exchange is None else self._exchange.given_bytes
        return self._session.codec.queued(self._stream_id) - given

    def next_deadline(self) -> float:
        """See ``Deadlined``."""
        return self._when

    def on_deadline(self, now: float) -> None:
        """See ``Deadlined``."""
        session, stream_id = self._session, self._stream_id
        if not session.codec.queued(stream_id):
            session.waits_no_more(stream_id)
            return
        left = self._measure()
        if session.codec.stalled(stream_id):
            if left == self._left:
                session.stalled(stream_id)
                return
            if self._is_slow(now, left):
                session.count_slow()
                session.stalled(stream_id)
                return
        # It went on, or what the client has room for waits for other streams, which is not its fault.
        self._left = left
        self._when = now + self._timeout_secs
        session.deadlines.watch(self, self._when)

    def _is_slow(self, now: float, left: int) -> bool:
        """Whether less than the least rate was taken since the last time, where that is long enough ago."""
        stream, secs = self._session.stream, now - self._rate_since
        if secs < stream.rate_grace_secs or (self._exchange is not None and self._exchange.is_tunnel):
            return False
        taken, self._rate_left, self._rate_since = self._rate_left - left, left, now
        return taken < stream.min_write_rate * secs

    def forget(self) -> None:
        """No deadline is left."""
        self._when = inf
        self._session.deadlines.forget(self)
