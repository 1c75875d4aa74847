"""An exchange whose client speaks HTTP/2: one stream of its connection.

What is sent goes to the codec; the session writes it for all streams at once when the wake-up is over. Deadlines are
the stream's own here (``Deadlined``), since the connection's say nothing about one of its streams.
"""

from __future__ import annotations

from collections import deque
from math import inf
from time import monotonic
from typing import Protocol

from proxy.protocol.http1 import NO_BODY, EndOfMessage, RequestHead, ResponseHead, Trailers
from proxy.protocol.http2 import CANCEL, INTERNAL_ERROR, JOINED_BYTES, ServerConnection, encode_fields
from proxy.relay.answer import PreparedResponse, http2_block, own_fields
from proxy.relay.context import RelayContext
from proxy.relay.exchange import ClientSide, Exchange
from proxy.relay.forward import Prepared
from proxy.upstream.pool import RETRY_AFTER_SECS


class Http2Side(ClientSide, Protocol):
    """What such an exchange needs of its session."""

    @property
    def codec(self) -> ServerConnection: ...

    def wake(self, stream_id: int) -> None:
        """Something of the stream was given to the codec: write it when the wake-up is over."""


class Http2Exchange(Exchange):
    """One stream until its response has been given to the codec; what waits there is the session's to watch."""

    __slots__ = (
        "_code",
        "_end_of_body",
        "_ends_with_head",
        "_held",
        "_input_deadline",
        "_out",
        "due",
        "given_bytes",
        "stream_id",
    )

    _client: Http2Side

    def __init__(
        self, context: RelayContext, client: Http2Side, head: RequestHead, prepared: Prepared, stream_id: int
    ) -> None:
        super().__init__(context, client, head, prepared)
        self.stream_id = stream_id
        self.due = inf
        self._input_deadline = inf
        self.given_bytes = 0
        """To the codec, of the response's body."""
        self._ends_with_head = False
        self._code = INTERNAL_ERROR
        self._held: deque[bytes] | None = None
        self._end_of_body: EndOfMessage | None = None
        self._out = b""

    @property
    def write_timeout_secs(self) -> float:
        """For how long the client may take nothing of what waits."""
        return self._prepared.route.write_timeout_secs

    # -- the request's body ------------------------------------------------------------------------------------------

    def on_body(self, data: bytes) -> None:
        """A piece of the request body. The client may send more once it is passed on."""
        held = self._held
        if held is None:
            held = self._held = deque()
        if held and len(held[-1]) + len(data) <= JOINED_BYTES:
            held[-1] += data
        else:
            held.append(data)
        if not self._ended:
            self.pump_body()

    def on_body_end(self, trailers: Trailers) -> None:
        """The end of it."""
        self._end_of_body = EndOfMessage(trailers)
        if not self._ended:
            self.pump_body()

    def pump_body(self) -> None:
        held, codec = self._held, self._client.codec
        while not self._ended and not self.request_done:
            if self.holds_back:
                self._input_deadline = inf
                self.hold_body()
                return
            if held:
                data = held.popleft()
                codec.consumed(self.stream_id, len(data))
                self._client.wake(self.stream_id)
                self.on_request_body(data)
            elif self._end_of_body is not None:
                self._input_deadline = inf
                self.on_request_end(self._end_of_body)
            else:
                self.expect_input(self.body_deadline(monotonic()))
                return

    # -- the response ------------------------------------------------------------------------------------------------

    @property
    def client_is_full(self) -> bool:
        return self._client.codec.blocked(self.stream_id)

    def give(self, data: bytes, *, end_stream: bool = False) -> None:
        """A piece of what the client gets, to the codec."""
        self.given_bytes += len(data)
        self._client.codec.send_data(self.stream_id, data, end_stream=end_stream)

    def send_whole(self, head: ResponseHead, response: PreparedResponse, body: bytes) -> None:
        self.given_bytes += len(body)
        self._client.codec.send_whole(self.stream_id, response.block, body)
        self._client.wake(self.stream_id)

    def send_interim(self, head: ResponseHead, response: PreparedResponse) -> None:
        self._client.codec.send_head(self.stream_id, response.block, interim=True)
        self._client.wake(self.stream_id)

    def send_head(self, head: ResponseHead, response: PreparedResponse) -> None:
        self._ends_with_head = head.framing == NO_BODY
        self._client.codec.send_head(self.stream_id, response.block, end_stream=self._ends_with_head)

    def send_body(self, data: bytes) -> None:
        # One piece is kept back, so that the end of the body, where it has come too, goes with it.
        if self._out:
            self.give(self._out)
        self._out = data

    def send_end(self, trailers: Trailers) -> None:
        data, self._out = self._out, b""
        if trailers:
            if data:
                self.give(data)
            block = encode_fields([(name.lower(), value) for name, value in trailers])
            self._client.codec.send_trailers(self.stream_id, block)
        elif not self._ends_with_head:
            self.give(data, end_stream=True)
        self._client.wake(self.stream_id)

    def flush(self) -> None:
        data, self._out = self._out, b""
        if data:
            self.give(data)
        self._client.wake(self.stream_id)

    def send_own(self, status: int) -> int:
        fields, body = own_fields(
            self._context,
            status,
            request_id=self._request_id,
            retry_after_secs=RETRY_AFTER_SECS if status == 503 else None,
        )
        if self._head.method == b"HEAD":
            body = b""
        self._client.codec.send_head(self.stream_id, http2_block(status, fields), end_stream=not body)
        if body:
            self.give(body, end_stream=True)
        self._client.wake(self.stream_id)
        return len(body)

    def break_off(self) -> None:
        self._client.codec.reset(self.stream_id, self._code)
        self._client.wake(self.stream_id)

    def client_stopped_reading(self) -> None:
        """See ``Exchange``: the client holds this stream's window closed; the others go on."""
        self._code = CANCEL
        super().client_stopped_reading()

    # -- its deadline ------------------------------------------------------------------------------------------------

    def expect_input(self, when: float) -> None:
        """The client must have sent more on this stream until ``when`` (monotonic seconds)."""
        self._input_deadline = when
        if when < self.due:
            self._context.deadlines.watch(self, when)

    def next_deadline(self) -> float:
        """See ``Deadlined``."""
        return self._input_deadline

    def on_deadline(self, now: float) -> None:
        """See ``Deadlined``."""
        self._input_deadline = inf
        self.input_timed_out()

    def input_timed_out(self) -> None:
        """The client has not sent anything for too long."""
        if not self._ended:
            self.body_timed_out()

    def forget(self) -> None:
        """No deadline is left."""
        self._input_deadline = inf
        self._context.deadlines.forget(self)
