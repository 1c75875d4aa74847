"""What a response looks like on its way to the client, and the responses that the proxy makes itself."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus

from proxy.protocol.http1 import ResponseHead, Trailers
from proxy.protocol.http2 import encode_response
from proxy.relay.context import RelayContext
from proxy.relay.forward import edited
from proxy.route.table import RouteEntry

CLIENT_GONE = 499
"""For the access log only: the client closed before it had an answer (nginx's number)."""

CONNECTION_CLOSE = b"Connection: close\r\n"
CONNECTION_KEEP_ALIVE = b"Connection: keep-alive\r\n"
TRANSFER_CHUNKED = b"Transfer-Encoding: chunked\r\n"

_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}


class PreparedResponse:
    """An upstream's head for the client, but for framing and Connection: the same for the same head and route."""

    __slots__ = ("_block", "_fields", "_status", "kept_out", "route", "start", "whole")

    def __init__(self, head: ResponseHead, route: RouteEntry, date: bytes) -> None:
        self.route = route
        edits = edited(route.set_response_headers, route.remove_response_headers)
        self.kept_out = head.hop_by_hop | edits
        fields: list[tuple[bytes, bytes]] = []
        has_date = b"date" in edits  # set, or not wanted
        for lower, name, value in head.fields:
            if lower in self.kept_out or lower in _FRAMING:
                continue
            if lower == b"date":
                has_date = True
            fields.append((name, value))
        fields.extend(route.set_response_headers)
        if not has_date and not head.interim and head.status != 101:
            fields.append((b"Date", date))  # RFC 9110 section 6.6.1
        if head.content_length is not None and head.status != 204 and not head.interim and head.status != 101:
            fields.append((b"Content-Length", b"%d" % head.content_length))
        self._status = head.status
        self._fields = fields
        self._block: bytes | None = None
        lines = [b"HTTP/1.1 %d %b" % (head.status, head.reason), *[b"%b: %b" % field for field in fields], b""]
        self.start = b"\r\n".join(lines)
        self.whole = self.start + b"\r\n"
        """The head as it is where framing and Connection need no word: a length, HTTP/1.1, and the connection lives."""

    @property
    def block(self) -> bytes:
        """The whole head as HTTP/2 has it."""
        if self._block is None:
            self._block = http2_block(self._status, self._fields)
        return self._block

    def switched(self) -> bytes:
        """The head of an answer to an extended CONNECT, which a 101 has become (RFC 8441 section 5)."""
        return http2_block(200, [field for field in self._fields if field[0].lower() != b"sec-websocket-accept"])

    def trailers(self, trailers: Trailers) -> Trailers:
        """Those that go on: what is removed from the head, or set in it, does not come back behind the body."""
        return tuple([trailer for trailer in trailers if trailer[0].lower() not in self.kept_out])


_FRAMING = frozenset((b"content-length", b"transfer-encoding"))


def prepare_response(context: RelayContext, head: ResponseHead, route: RouteEntry) -> PreparedResponse:
    """The head for the client, kept with the upstream's head when that has a date of its own."""
    memo = head.memo
    if type(memo) is PreparedResponse and memo.route is route:
        return memo
    prepared = PreparedResponse(head, route, context.date())
    if head.get(b"date") is not None and b"date" not in head.hop_by_hop:
        head.memo = prepared
    return prepared


def own_fields(
    context: RelayContext,
    status: int,
    *,
    request_id: bytes,
    location: bytes | None = None,
    retry_after_secs: int | None = None,
    fields: Iterable[tuple[bytes, bytes]] = (),
) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """A response of the proxy's own, with ``fields`` of its own: all its fields, and its body."""
    body = b"%d %b\n\nrequest id: %b\n" % (status, _REASONS.get(status, b"Error"), request_id)
    own = [
        (b"Date", context.date()),
        (b"Content-Type", b"text/plain; charset=utf-8"),
        (b"Content-Length", b"%d" % len(body)),
        (b"X-Request-Id", request_id),
        (b"Cache-Control", b"no-store") if location is None else (b"Location", location),
        *fields,
    ]
    if retry_after_secs is not None:
        own.append((b"Retry-After", b"%d" % retry_after_secs))
    if status == 405:
        own.append((b"Allow", b"GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"))
    return own, body


def own_response(
    context: RelayContext,
    status: int,
    *,
    method: bytes,
    request_id: bytes,
    close: bool,
    version: int = 11,
    location: bytes | None = None,
    retry_after_secs: int | None = None,
    fields: Iterable[tuple[bytes, bytes]] = (),
) -> tuple[bytes, int]:
    """``own_fields`` as a response of HTTP/1.1: its bytes and the size of its body (0 for HEAD)."""
    own, body = own_fields(
        context, status, request_id=request_id, location=location, retry_after_secs=retry_after_secs, fields=fields
    )
    if close:
        own.append((b"Connection", b"close"))
    elif version == 10:
        own.append((b"Connection", b"keep-alive"))
    if method == b"HEAD":
        body = b""
    lines = b"".join([b"%b: %b\r\n" % field for field in own])
    return b"HTTP/1.1 %d %b\r\n%b\r\n%b" % (status, _REASONS.get(status, b"Error"), lines, body), len(body)


def http2_block(status: int, fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The head of a response as HTTP/2 has it: names in lower case."""
    return encode_response(status, [(name.lower(), value) for name, value in fields])
