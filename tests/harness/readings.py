"""What this project's codec, h11 and httptools make of the same bytes, told in the same words."""

from __future__ import annotations

from dataclasses import dataclass, field

import h11
import httptools

from proxy.protocol.http1 import (
    CLOSED,
    NO_BODY,
    EndOfMessage,
    Limits,
    ProtocolError,
    RequestDecoder,
    RequestHead,
    ResponseDecoder,
    ResponseHead,
)

LIMITS = Limits(max_head_bytes=16384, max_fields=100)


@dataclass
class Message:
    """What a parser made of a message. ``start``: method and target, or the status."""

    start: tuple[bytes, bytes] | int
    fields: list[tuple[bytes, bytes]]
    body: bytes = b""
    trailers: list[tuple[bytes, bytes]] = field(default_factory=list)


@dataclass
class Reading:
    """What a parser made of a connection: its complete messages, and why it stopped (empty: at the end of input).

    Reading ends after the first message that does not leave an ordinary connection (close, upgrade): ``last`` is True.
    """

    messages: list[Message]
    fault: str = ""
    last: bool = False


def ours_of_requests(data: bytes) -> Reading:
    decoder = RequestDecoder(LIMITS)
    decoder.feed(data)
    decoder.feed_eof()
    reading = Reading([])
    head: RequestHead | None = None
    body = b""
    try:
        while (event := decoder.next_event()) is not CLOSED:
            if isinstance(event, bytes):
                body += event
                continue
            if isinstance(event, RequestHead):
                head = event
                body = b""
            assert head is not None
            trailers = list(event.trailers) if isinstance(event, EndOfMessage) else []
            if isinstance(event, EndOfMessage) or not head.has_body:
                message = Message((head.method, head.target), _lower(head.fields), body, _lower_pairs(trailers))
                reading.messages.append(message)
                if not head.keep_alive or head.method == b"CONNECT" or head.get(b"upgrade") is not None:
                    reading.last = True
                    return reading
    except ProtocolError as error:
        reading.fault = error.reason
    return reading


def ours_of_responses(data: bytes) -> Reading:
    decoder = ResponseDecoder(LIMITS)
    decoder.start(b"GET")
    decoder.feed(data)
    decoder.feed_eof()
    reading = Reading([])
    message: Message | None = None
    try:
        while (event := decoder.next_event()) is not CLOSED:
            if isinstance(event, ResponseHead):
                message = Message(event.status, _lower(event.fields))
                if event.framing == NO_BODY:
                    reading.messages.append(message)
                    if not event.interim:
                        reading.last = True
                        return reading
            elif isinstance(event, bytes):
                assert message is not None
                message.body += event
            elif isinstance(event, EndOfMessage):
                assert message is not None
                message.trailers = _lower_pairs(list(event.trailers))
                reading.messages.append(message)
                reading.last = True
                return reading
    except ProtocolError as error:
        reading.fault = error.reason
    return reading


def _lower(fields: tuple[tuple[bytes, bytes, bytes], ...]) -> list[tuple[bytes, bytes]]:
    # Codings are case-insensitive, and h11 shows them in lower case.
    return [(lower, value.lower() if lower == b"transfer-encoding" else value) for lower, _, value in fields]


def _lower_pairs(pairs: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(name.lower(), value.strip(b" \t")) for name, value in pairs]


def h11_of_requests(data: bytes) -> Reading:
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(data)
    connection.receive_data(b"")
    reading = Reading([])
    message: Message | None = None
    try:
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Request):
                message = Message((event.method, event.target), list(event.headers))
            elif isinstance(event, h11.Data):
                assert message is not None
                message.body += event.data
            elif isinstance(event, h11.EndOfMessage):
                assert message is not None
                message.trailers = list(event.headers)
                reading.messages.append(message)
                connection.send(h11.Response(status_code=404, headers=[(b"content-length", b"0")]))
                connection.send(h11.EndOfMessage())
                if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                    reading.last = True
                    return reading
                connection.start_next_cycle()
            else:
                return reading
    except h11.RemoteProtocolError as error:
        reading.fault = str(error)
    return reading


def h11_of_responses(data: bytes) -> Reading:
    connection = h11.Connection(h11.CLIENT)
    connection.send(
        h11.Request(method="GET", target="/", headers=[("Host", "a"), ("Upgrade", "x"), ("Connection", "upgrade")])
    )
    connection.send(h11.EndOfMessage())
    connection.receive_data(data)
    connection.receive_data(b"")
    reading = Reading([])
    message: Message | None = None
    try:
        while True:
            event = connection.next_event()
            if isinstance(event, h11.InformationalResponse):
                reading.messages.append(Message(event.status_code, list(event.headers)))
                if event.status_code == 101:
                    reading.last = True
                    return reading
            elif isinstance(event, h11.Response):
                message = Message(event.status_code, list(event.headers))
            elif isinstance(event, h11.Data):
                assert message is not None
                message.body += event.data
            elif isinstance(event, h11.EndOfMessage):
                assert message is not None
                message.trailers = list(event.headers)
                reading.messages.append(message)
                reading.last = True
                return reading
            else:
                return reading
    except h11.RemoteProtocolError as error:
        reading.fault = str(error)
    return reading


_Parser = httptools.HttpRequestParser | httptools.HttpResponseParser


class _Collector:
    """The callbacks of httptools."""

    def __init__(self) -> None:
        self.reading = Reading([])
        self.parser: _Parser | None = None
        self._target = b""
        self._fields: list[tuple[bytes, bytes]] = []
        self._message: Message | None = None

    def on_message_begin(self) -> None:
        self._target = b""
        self._fields = []
        self._message = None

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        fields = self._fields if self._message is None else self._message.trailers
        fields.append((name.lower(), value.strip(b" \t")))
        if name.lower() == b"transfer-encoding":
            fields[-1] = (fields[-1][0], fields[-1][1].lower())

    def on_headers_complete(self) -> None:
        parser = self.parser
        if isinstance(parser, httptools.HttpRequestParser):
            self._message = Message((parser.get_method(), self._target), self._fields)
        else:
            assert parser is not None
            self._message = Message(parser.get_status_code(), self._fields)

    def on_body(self, body: bytes) -> None:
        assert self._message is not None
        self._message.body += body

    def on_message_complete(self) -> None:
        assert self._message is not None
        self.reading.messages.append(self._message)


def _httptools(collector: _Collector, parser: _Parser, data: bytes) -> Reading:
    collector.parser = parser
    try:
        parser.feed_data(data)
    except httptools.HttpParserUpgrade:
        collector.reading.last = True
    except httptools.HttpParserError as error:
        collector.reading.fault = str(error) or type(error).__name__
    return collector.reading


def httptools_of_requests(data: bytes) -> Reading:
    collector = _Collector()
    return _httptools(collector, httptools.HttpRequestParser(collector), data)


def httptools_of_responses(data: bytes) -> Reading:
    collector = _Collector()
    return _httptools(collector, httptools.HttpResponseParser(collector), data)
