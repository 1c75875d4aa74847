"""What the sessions of a TLS listener have in common, whatever protocol was agreed on: who the client is, what the
certificate stands for, and what becomes of a request."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import Protocol

from proxy.observe.counters import BAD_REQUESTS, MISDIRECTED
from proxy.protocol.http1 import RequestHead
from proxy.relay.context import RelayContext
from proxy.relay.forward import REFUSED_METHODS, ForwardedBy, Prepared, RedirectTo, Refusal, prepare
from proxy.session.client import ClientSession
from proxy.stream.stream import TlsStream

REFUSAL_COUNTERS = {400: BAD_REQUESTS, 421: MISDIRECTED}
"""What counts a request that has no route."""

MISDIRECTED_REQUEST = Refusal(421, "misdirected")


class Names(Protocol):
    """The names that a certificate stands for."""

    def covers(self, host: bytes) -> bool: ...


class SecuredSession(ClientSession):
    """One client connection of a TLS listener."""

    __slots__ = ("_covered", "_forwarded", "_names_of", "_peer", "_port", "_tls_version")

    def __init__(
        self, context: RelayContext, *, peer: bytes, port: bytes, names_of: Callable[[ssl.SSLSocket], Names]
    ) -> None:
        super().__init__(context)
        self._peer = peer
        self._port = port
        self._names_of = names_of
        self._forwarded: ForwardedBy | None = None
        self._covered: bytes | None = None
        self._tls_version = b""

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

    def judge(self, head: RequestHead) -> Prepared | RedirectTo | Refusal:
        """Where a request goes, or how it is answered at once. What is refused is counted."""
        context = self._context
        prepared = head.memo
        if prepared is None:
            prepared = head.memo = prepare(context, head)
        gate = context.gate
        if gate is not None:
            refused = gate.refuses(self.forwarded, head, prepared)
            if refused is not None:
                return refused
        if head.host != self._covered and head.method not in REFUSED_METHODS and not self._covers(head.host):
            context.cells[MISDIRECTED] += 1
            return MISDIRECTED_REQUEST
        if type(prepared) is Refusal and prepared.status in REFUSAL_COUNTERS:
            context.cells[REFUSAL_COUNTERS[prepared.status]] += 1
        return prepared  # type: ignore[return-value]  # the memo is what prepare has made

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
