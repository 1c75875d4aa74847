"""An HTTP/1.1 session over TLS: the user's traffic."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from math import inf
from time import monotonic

from proxy.observe.counters import BAD_REQUESTS, HANDSHAKES_FAILED, HANDSHAKES_OK, HANDSHAKES_TIMED_OUT, TIMEOUTS_SLOW
from proxy.protocol.http1 import ProtocolError, RequestHead
from proxy.relay.context import RelayContext
from proxy.relay.exchange import Exchange
from proxy.relay.forward import Prepared, RedirectTo, Refusal
from proxy.relay.http1 import Http1Exchange
from proxy.session.client import ClientSession, Phase
from proxy.session.http2 import Http2Session
from proxy.session.secured import Names, SecuredSession
from proxy.stream.stream import TlsStream

HTTP2 = "h2"
"""By ALPN (RFC 9113 section 3.2)."""

TLS_VERSIONS = {"TLSv1.3": b"TLSv1.3", "TLSv1.2": b"TLSv1.2"}


class Http1Session(SecuredSession):
    """One client connection of a TLS listener."""

    __slots__ = ("_exchange", "_succeed")

    def __init__(
        self,
        context: RelayContext,
        stream_of: Callable[[Http1Session], TlsStream],
        *,
        peer: str,
        port: bytes,
        names_of: Callable[[ssl.SSLSocket], Names],
        succeed: Callable[[ClientSession, ClientSession], None],
    ) -> None:
        """``succeed`` is called with this session and its successor, where the handshake ends in another protocol."""
        super().__init__(context, peer=peer.encode("ascii", "replace"), port=port, names_of=names_of)
        self._exchange: Http1Exchange | None = None
        self._succeed = succeed
        self._stream = stream_of(self)
        self._stream.expect(monotonic() + context.settings.tls_handshake_timeout_secs)

    @property
    def busy(self) -> bool:
        return self._exchange is not None

    @property
    def tunnelling(self) -> bool:
        return self._exchange is not None and self._exchange.is_tunnel

    # -- the handshake -----------------------------------------------------------------------------------------------

    def on_open(self) -> None:
        self._context.cells[HANDSHAKES_OK] += 1
        stream = self._stream
        assert isinstance(stream, TlsStream)
        self._tls_version = TLS_VERSIONS.get(stream.tls.version() or "", b"")
        if stream.tls.selected_alpn_protocol() == HTTP2:
            session = Http2Session(
                self._context,
                stream,
                peer=self._peer,
                port=self._port,
                names_of=self._names_of,
                tls_version=self._tls_version,
            )
            self._succeed(self, session)
            session.begin()
        else:
            self.begin()

    def on_lost(self, error: OSError) -> None:
        super().on_lost(error)
        if self._phase is Phase.HANDSHAKE:
            self._context.cells[HANDSHAKES_FAILED] += 1
            reason = getattr(error, "reason", None) or error.strerror or type(error).__name__
            self.note("handshake-failed", detail=reason)
            self._context.reporter.report(
                "tls.handshake_failed",
                "a client's TLS handshake failed",
                level="warning",
                client=self._peer.decode("ascii"),
                error=reason,
            )
        else:
            self._give_up()

    def _give_up(self) -> None:
        """There is nobody to answer any more."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.client_gone()

    def on_read_deadline(self) -> None:
        if self._phase is Phase.HANDSHAKE:
            self._context.cells[HANDSHAKES_TIMED_OUT] += 1
            self.note("handshake-timeout")
            self._context.reporter.report(
                "tls.handshake_timeout",
                "a client did not complete its TLS handshake in time",
                level="warning",
                client=self._peer.decode("ascii"),
                tls_handshake_timeout_secs=self._context.settings.tls_handshake_timeout_secs,
            )
            self._closing = True
            self._stream.close()
        elif self._phase is Phase.BODY and self._exchange is not None:
            self._exchange.body_timed_out()
        else:
            super().on_read_deadline()

    # -- requests ----------------------------------------------------------------------------------------------------

    def answer(self, head: RequestHead) -> None:
        verdict = self.judge(head)
        if type(verdict) is Prepared:
            self._stream.write_timeout_secs = verdict.route.write_timeout_secs
            exchange = self._exchange = Http1Exchange(self._context, self, head, verdict)
            exchange.start()
        elif type(verdict) is RedirectTo:
            self.respond(head, verdict.status, location=verdict.location)
        else:
            assert type(verdict) is Refusal
            self.respond(head, verdict.status, cause=verdict.reason, fields=verdict.fields)

    def on_busy_data(self) -> None:
        exchange = self._exchange
        assert exchange is not None
        if exchange.request_done:
            super().on_busy_data()
        else:
            self.pump_body()

    def pump_body(self) -> None:
        """See ``Exchange``."""
        exchange, decoder, stream = self._exchange, self._decoder, self._stream
        if exchange is None or decoder is None:
            return
        self._phase = Phase.BODY
        while exchange is self._exchange and not exchange.request_done:
            if exchange.holds_back:
                stream.pause_reading()
                stream.read_deadline = inf
                exchange.hold_body()
                return
            try:
                event = decoder.next_event()
            except ProtocolError as error:
                self._context.cells[BAD_REQUESTS] += 1
                exchange.reject_request(error.status, "bad-request", error.reason)
                return
            if event is None:
                stream.resume_reading()
                stream.expect(exchange.body_deadline(monotonic()))
                stream.keep_watching()
                return
            if type(event) is bytes:
                exchange.on_request_body(event)
            else:
                self._phase = Phase.EXCHANGE
                stream.read_deadline = inf
                stream.resume_reading()
                exchange.on_request_end(event)  # type: ignore[arg-type]

    def on_eof(self) -> None:
        if self._exchange is None:
            super().on_eof()
            return
        # As in nginx, a client that closes gives its request up.
        self._closing = True
        self._give_up()
        self._stream.close()

    def on_write_failed(self, error: OSError) -> None:
        super().on_write_failed(error)
        self._give_up()

    def on_write_deadline(self) -> None:
        self._context.cells[TIMEOUTS_SLOW] += self._stream.too_slow
        if self._exchange is not None:
            self._closing = True
            self._exchange.client_stopped_reading()
        else:
            super().on_write_deadline()

    def on_drained(self) -> None:
        if self._exchange is not None:
            self._exchange.on_client_drained()
        else:
            super().on_drained()

    def exchange_ended(self, exchange: Exchange) -> None:
        """See ``ClientSide``."""
        assert isinstance(exchange, Http1Exchange)
        self._exchange = None
        self.answered(exchange.closes or not exchange.request_done, clean=exchange.request_done)

    def end_tunnel(self) -> None:
        """See ``ClientSession``."""
        if self._exchange is not None:
            self._exchange.end_tunnel()

    def released(self) -> None:
        """See ``ClientSession``: an exchange ends with its connection, whatever ended that."""
        self._give_up()
        super().released()
