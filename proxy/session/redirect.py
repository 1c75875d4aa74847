"""The plain listener beside the TLS ones: sends the client to https, for hosts that are configured."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from proxy.observe.counters import MISDIRECTED
from proxy.protocol.http1 import RequestHead
from proxy.relay.context import RelayContext
from proxy.relay.forward import ForwardedBy
from proxy.route.path import PathError, normalize_path
from proxy.session.client import ClientSession
from proxy.stream.stream import Stream

HTTPS_PORT = 443
PERMANENT_REDIRECT = 308
"""RFC 9110 section 15.4.9: method and body are kept."""


class RedirectSession(ClientSession):
    """One connection of the redirect listener."""

    __slots__ = ("_forwarded", "_https_port")

    def __init__(
        self,
        context: RelayContext,
        stream_of: Callable[[RedirectSession], Stream],
        *,
        peer: str,
        port: bytes,
        https_port: int,
    ) -> None:
        super().__init__(context)
        self._https_port = https_port
        self._forwarded = ForwardedBy(context, peer.encode("ascii", "replace"), port, b"http")
        self._stream = stream_of(self)
        self._stream.expect(monotonic() + context.settings.header_timeout_secs)
        self.begin()

    @property
    def forwarded(self) -> ForwardedBy:
        return self._forwarded

    def answer(self, head: RequestHead) -> None:
        if head.method == b"CONNECT":
            self.respond(head, 501, cause="method")
            return
        if not head.host or self._context.routes.site(head.host) is None:
            self._context.cells[MISDIRECTED] += 1
            self.respond(head, 421, cause="misdirected")
            return
        try:
            path = normalize_path(head.path)
        except PathError as error:
            self.respond(head, 400, cause=str(error) or "path")
            return
        host = b"[%b]" % head.host if b":" in head.host else head.host
        port = b"" if self._https_port == HTTPS_PORT else b":%d" % self._https_port
        location = b"https://%b%b%b" % (host, port, b"/" if path == b"*" else path)
        self.respond(head, PERMANENT_REDIRECT, location=location)
