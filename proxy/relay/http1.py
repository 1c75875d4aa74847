"""An exchange whose client speaks HTTP/1.1: how its responses are framed, and what closes its connection."""

from __future__ import annotations

from typing import Protocol

from proxy.protocol.http1 import (
    CHUNKED,
    LAST_CHUNK,
    UNTIL_CLOSE,
    RequestDecoder,
    ResponseHead,
    Trailers,
    encode_chunk,
    encode_last_chunk,
)
from proxy.relay.answer import (
    CONNECTION_CLOSE,
    CONNECTION_KEEP_ALIVE,
    TRANSFER_CHUNKED,
    PreparedResponse,
    own_response,
)
from proxy.relay.exchange import ClientSide, Exchange
from proxy.relay.tunnel import Tunnel
from proxy.stream.stream import HIGH_WATER_BYTES, Stream
from proxy.upstream.connection import UpstreamConnection
from proxy.upstream.pool import RETRY_AFTER_SECS


class Http1Side(ClientSide, Protocol):
    """What such an exchange needs of its session."""

    @property
    def stream(self) -> Stream: ...
    @property
    def decoder(self) -> RequestDecoder: ...

    def pump_body(self) -> None:
        """See ``Exchange.pump_body``."""


class Http1Exchange(Exchange):
    """``closes``, once there is a response: the client's connection ends after it."""

    __slots__ = ("_chunked", "_out", "closes")

    _client: Http1Side
    stream_id = 0

    def pump_body(self) -> None:
        self._client.pump_body()

    @property
    def client_is_full(self) -> bool:
        return self._client.stream.buffered > HIGH_WATER_BYTES

    def send_whole(self, head: ResponseHead, response: PreparedResponse, body: bytes) -> None:
        data = self._render(head, response)
        self._client.stream.write(data + body if body else data)

    def send_interim(self, head: ResponseHead, response: PreparedResponse) -> None:
        if self._head.version == 11:  # RFC 9110 section 15.2: not for a client of HTTP/1.0
            self._client.stream.write(response.whole)

    def send_head(self, head: ResponseHead, response: PreparedResponse) -> None:
        self._out = [self._render(head, response)]

    def _render(self, head: ResponseHead, response: PreparedResponse) -> bytes:
        request, framing = self._head, b""
        # An early answer: the rest of the request is of no use to anybody (RFC 9112 section 9.6).
        close = not request.keep_alive or not self.request_done or self._context.draining
        self._chunked = False
        if head.framing == CHUNKED or head.framing == UNTIL_CLOSE:
            if request.version == 11:
                self._chunked = True
                framing = TRANSFER_CHUNKED
            else:
                close = True
        self.closes = close
        if close:
            return b"".join((response.start, framing, CONNECTION_CLOSE, b"\r\n"))
        if request.version == 10:
            return b"".join((response.start, framing, CONNECTION_KEEP_ALIVE, b"\r\n"))
        return b"".join((response.start, framing, b"\r\n")) if framing else response.whole

    def send_body(self, data: bytes) -> None:
        self._out.append(encode_chunk(data) if self._chunked else data)

    def send_end(self, trailers: Trailers) -> None:
        if self._chunked:
            self._out.append(encode_last_chunk(trailers) if trailers else LAST_CHUNK)
        self.flush()

    def flush(self) -> None:
        out = self._out
        if out:
            self._out = []
            self._client.stream.write(b"".join(out) if len(out) > 1 else out[0])

    def send_own(self, status: int) -> int:
        request = self._head
        # What is left of the request body would have to be read to keep the connection; it is closed instead.
        self.closes = not request.keep_alive or not self.request_done or self._context.draining
        data, size = own_response(
            self._context,
            status,
            method=request.method,
            request_id=self._request_id,
            close=self.closes,
            version=request.version,
            retry_after_secs=RETRY_AFTER_SECS if status == 503 else None,
        )
        self._client.stream.write(data)
        return size

    def break_off(self) -> None:
        self.closes = True
        self._client.stream.abort()

    def open_tunnel(self, connection: UpstreamConnection, response: PreparedResponse) -> Tunnel:
        client, asked = self._client, self._prepared.upgrade
        client.stream.min_write_rate = 0
        assert asked is not None
        client.stream.write(b"%bConnection: Upgrade\r\nUpgrade: %b\r\n\r\n" % (response.start, asked))
        return Tunnel(
            client.stream,
            connection.stream,
            idle_secs=self._prepared.route.tunnel_idle_timeout_secs,
            from_client=client.decoder.take_rest(),
            from_upstream=connection.decoder.take_rest(),
            cells=self._context.cells,
            on_end=self.client_gone,
        )
