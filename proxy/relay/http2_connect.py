"""Extended CONNECT (RFC 8441): a stream becomes a tunnel to an upstream that speaks HTTP/1.1.

The codec gives such a request as a GET that asks to switch to ``head.protocol``. What the upgrade of HTTP/1.1 has and
HTTP/2 has not is added here: the key of a WebSocket and the check of its answer (RFC 6455 section 4.1).
"""

from __future__ import annotations

import os
from base64 import b64encode
from hashlib import sha1
from math import inf

from proxy.protocol.http1 import EndOfMessage, ResponseHead, Trailers
from proxy.protocol.http2 import CANCEL
from proxy.relay.answer import PreparedResponse
from proxy.relay.http2 import Http2Exchange
from proxy.relay.tunnel import Tunnel
from proxy.stream.stream import HIGH_WATER_BYTES, NOBODY, StreamHandler
from proxy.upstream.connection import UpstreamConnection

WEBSOCKET = b"websocket"
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
"""RFC 6455 section 1.3."""


class Http2Connect(Http2Exchange):
    """The exchange until the upstream has switched, then the client's end of the tunnel (``TunnelEnd``)."""

    __slots__ = ("_key", "_reading", "_shut", "handler")

    half_closes = False
    """As over HTTP/1.1 and TLS: when the upstream has ended, so has the tunnel."""
    _key: bytes
    _reading: bool
    _shut: bool
    handler: StreamHandler

    def start(self) -> None:
        self._key = b""
        self._reading = self._shut = False
        self.handler = NOBODY
        super().start()

    def late_fields(self) -> bytes:
        if self._head.protocol != WEBSOCKET:
            return b""
        self._key = b64encode(os.urandom(16))
        return b"\r\nSec-WebSocket-Key: " + self._key

    # -- the answer --------------------------------------------------------------------------------------------------

    def on_response_whole(self, head: ResponseHead, body: bytes) -> None:
        if 200 <= head.status < 300:
            self.on_response_invalid("not-switched")  # the client would take it for an open tunnel
        else:
            super().on_response_whole(head, body)

    def on_response_head(self, head: ResponseHead) -> None:
        if 200 <= head.status < 300:
            self.on_response_invalid("not-switched")
        elif head.status == 101 and self._key and head.get(b"sec-websocket-accept") != accept_of(self._key):
            self.on_response_invalid("websocket-accept")
        else:
            super().on_response_head(head)

    def open_tunnel(self, connection: UpstreamConnection, response: PreparedResponse) -> Tunnel:
        self._client.codec.send_head(self.stream_id, response.switched())
        self._client.wake(self.stream_id)
        return Tunnel(
            self,
            connection.stream,
            idle_secs=self._prepared.route.tunnel_idle_timeout_secs,
            from_client=b"",
            from_upstream=connection.decoder.take_rest(),
            cells=self._context.cells,
            on_end=self.client_gone,
        )

    # -- the client's end of the tunnel ------------------------------------------------------------------------------

    def on_body(self, data: bytes) -> None:
        super().on_body(data)
        self._deliver()

    def on_body_end(self, trailers: Trailers) -> None:
        self._end_of_body = EndOfMessage()
        self._deliver()

    def _deliver(self) -> None:
        held = self._held
        while self._reading and held:
            data = held.popleft()
            self._client.codec.consumed(self.stream_id, len(data))
            self._client.wake(self.stream_id)
            self.handler.on_data(data)
        if self._reading and self._end_of_body is not None:
            self._reading = False
            self.handler.on_eof()

    @property
    def buffered(self) -> int:
        """What matters of it: whether the source is to stop. The end goes behind what is queued by itself."""
        return HIGH_WATER_BYTES + 1 if self.client_is_full else 0

    def write(self, data: bytes) -> None:
        """See ``TunnelEnd``."""
        if not self._shut:
            self.give(data)
            self._client.wake(self.stream_id)

    def pause_reading(self) -> None:
        """See ``TunnelEnd``: what comes is held, and the client's window with it."""
        self._reading = False

    def resume_reading(self) -> None:
        """See ``TunnelEnd``."""
        self._reading = True
        self._deliver()

    def keep_watching(self) -> None:
        """See ``TunnelEnd``: the session watches."""

    def expect(self, when: float) -> None:
        """See ``TunnelEnd``."""
        self.expect_input(when)

    def shut_down_writing(self) -> None:
        """See ``TunnelEnd``."""
        if not self._shut:
            self._shut = True
            self.give(b"", end_stream=True)
            self._client.wake(self.stream_id)

    def close(self) -> None:
        """See ``TunnelEnd``."""
        self._reading = False
        self._input_deadline = inf
        self.handler = NOBODY
        self.shut_down_writing()

    def on_client_drained(self) -> None:
        if self._tunnel is None:
            super().on_client_drained()
        else:
            self.handler.on_drained()

    def client_gone(self) -> None:
        super().client_gone()
        self._tunnel = None  # it knows this exchange
        self._client.exchange_ended(self)

    def input_timed_out(self) -> None:
        if self._tunnel is not None:
            self.handler.on_read_deadline()

    def client_stopped_reading(self) -> None:
        if self._tunnel is None:
            super().client_stopped_reading()
        else:
            self._client.codec.reset(self.stream_id, CANCEL)
            self.handler.on_write_deadline()


def accept_of(key: bytes) -> bytes:
    """What answers a Sec-WebSocket-Key (RFC 6455 section 4.2.2)."""
    return b64encode(sha1(key + _GUID, usedforsecurity=False).digest())
