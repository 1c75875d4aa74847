"""An HTTP/1.1 session over TLS: the user's traffic."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from math import inf
from time import monotonic
from typing import Protocol

from proxy.observe.counters import BAD_REQUESTS, HANDSHAKES_FAILED, HANDSHAKES_OK, HANDSHAKES_TIMED_OUT, MISDIRECTED
from proxy.protocol.http1 import ProtocolError, RequestHead
from proxy.relay.context import RelayContext
from proxy.relay.exchange import Exchange
from proxy.relay.forward import REFUSED_METHODS, ForwardedBy, Prepared, RedirectTo, prepare
from proxy.relay.http1 import Http1Exchange
from proxy.session.client import ClientSession, Phase
from proxy.stream.stream import TlsStream

TLS_VERSIONS = {"TLSv1.3": b"TLSv1.3", "TLSv1.2": b"TLSv1.2"}


REFUSAL_COUNTERS = {400: BAD_REQUESTS, 421: MISDIRECTED}
"""What counts a request that has no route."""


class Names(Protocol):
    """The names that a certificate stands for."""

    def covers(self, host: bytes) -> bool: ...


class Http1Session(ClientSession):
    """One client connection of a TLS listener."""

    __slots__ = ("_covered", "_exchange", "_forwarded", "_names_of", "_peer", "_port", "_tls_version")

    def __init__(
        self,
        context: RelayContext,
        stream_of: Callable[[Http1Session], TlsStream],
        *,
        peer: str,
        port: bytes,
        names_of: Callable[[ssl.SSLSocket], Names],
    ) -> None:
        super().__init__(context)
        self._exchange: Http1Exchange | None = None
        self._peer = peer.encode("ascii", "replace")
        self._port = port
        self._forwarded: ForwardedBy | None = None
        self._names_of = names_of
        self._covered: bytes | None = None
        self._tls_version = b""
        self._stream = stream_of(self)
        self._stream.expect(monotonic() + context.settings.tls_handshake_timeout_secs)

    @property
    def busy(self) -> bool:
        return self._exchange is not None

    @property
    def forwarded(self) -> ForwardedBy:
        # Made with the first request: a connection that never sends one costs nothing more.
        if self._forwarded is None:
            self._forwarded = ForwardedBy(self._context, self._peer, self._port)
        return self._forwarded

    @property
    def peer(self) -> bytes:
        return self._peer

    @property
    def tls_version(self) -> bytes:
        return self._tls_version

    # -- the handshake -----------------------------------------------------------------------------------------------

    def on_open(self) -> None:
        self._context.cells[HANDSHAKES_OK] += 1
        stream = self._stream
        assert isinstance(stream, TlsStream)
        self._tls_version = TLS_VERSIONS.get(stream.tls.version() or "", b"")
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
        context = self._context
        prepared = head.memo
        if prepared is None:
            prepared = head.memo = prepare(context, head)
        if head.host != self._covered and head.method not in REFUSED_METHODS and not self._covers(head.host):
            context.cells[MISDIRECTED] += 1
            self.respond(head, 421, cause="misdirected")
            return
        gate = context.gate
        refused = None if gate is None else gate.refuses(self.forwarded, head, prepared)
        if refused is not None:
            self.respond(head, refused.status, cause=refused.reason, fields=refused.fields)
        elif type(prepared) is Prepared:
            self._stream.write_timeout_secs = prepared.route.write_timeout_secs
            exchange = self._exchange = Http1Exchange(context, self, head, prepared)
            exchange.start()
        elif type(prepared) is RedirectTo:
            self.respond(head, prepared.status, location=prepared.location)
        else:
            status, cause = getattr(prepared, "status", 500), getattr(prepared, "reason", "")
            if status in REFUSAL_COUNTERS:
                context.cells[REFUSAL_COUNTERS[status]] += 1
            self.respond(head, status, cause=cause)

    def _covers(self, host: bytes) -> bool:
        """Whether the certificate that the client was shown stands for ``host`` (RFC 9110 section 7.4)."""
        if self._context.routes.has_any:
            self._covered = host
            return True
        stream = self._stream
        assert isinstance(stream, TlsStream)
        if not self._names_of(stream.tls).covers(host):
            return False
        self._covered = host
        return True

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
                return
            try:
                event = decoder.next_event()
            except ProtocolError as error:
                self._context.cells[BAD_REQUESTS] += 1
                exchange.reject_request(error.status, "bad-request", error.reason)
                return
            if event is None:
                stream.resume_reading()
                stream.expect(monotonic() + exchange.body_timeout_secs)
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
