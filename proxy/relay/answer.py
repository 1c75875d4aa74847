"""What a response looks like on its way to the client, and the responses that the proxy makes itself."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus

from proxy.protocol.http1 import ResponseHead, Trailers
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

    __slots__ = ("kept_out", "route", "start", "whole")

    def __init__(self, head: ResponseHead, route: RouteEntry, date: bytes) -> None:
        self.route = route
        edits = edited(route.set_response_headers, route.remove_response_headers)
        self.kept_out = head.hop_by_hop | edits
        lines = [b"HTTP/1.1 %d %b" % (head.status, head.reason)]
        has_date = b"date" in edits  # set, or not wanted
        for lower, name, value in head.fields:
            if lower in self.kept_out or lower in _FRAMING:
                continue
            if lower == b"date":
                has_date = True
            lines.append(b"%b: %b" % (name, value))
        lines.extend(b"%b: %b" % (name, value) for name, value in route.set_response_headers)
        if not has_date and not head.interim and head.status != 101:
            lines.append(b"Date: " + date)  # RFC 9110 section 6.6.1
        if head.content_length is not None and head.status != 204 and not head.interim and head.status != 101:
            lines.append(b"Content-Length: %d" % head.content_length)
        lines.append(b"")
        self.start = b"\r\n".join(lines)
        self.whole = self.start + b"\r\n"
        """The head as it is where framing and Connection need no word: a length, HTTP/1.1, and the connection lives."""

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
    """A response of the proxy's own, with ``fields`` of its own: its bytes and the size of its body (0 for HEAD)."""
    reason = _REASONS.get(status, b"Error")
    body = b"%d %b\n\nrequest id: %b\n" % (status, reason, request_id)
    lines = [
        b"HTTP/1.1 %d %b" % (status, reason),
        b"Date: " + context.date(),
        b"Content-Type: text/plain; charset=utf-8",
        b"Content-Length: %d" % len(body),
        b"X-Request-Id: " + request_id,
        b"Cache-Control: no-store" if location is None else b"Location: " + location,
    ]
    lines.extend(b"%b: %b" % field for field in fields)
    if retry_after_secs is not None:
        lines.append(b"Retry-After: %d" % retry_after_secs)
    if status == 405:
        lines.append(b"Allow: GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS")
    if close:
        lines.append(b"Connection: close")
    elif version == 10:
        lines.append(b"Connection: keep-alive")
    if method == b"HEAD":
        body = b""
    return b"\r\n".join(lines) + b"\r\n\r\n" + body, len(body)
