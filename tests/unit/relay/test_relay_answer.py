"""The responses that the proxy makes itself."""

from __future__ import annotations

from typing import Any, cast

import pytest

from proxy.protocol.http1 import Limits, ResponseDecoder, ResponseHead
from proxy.relay.answer import own_response
from proxy.relay.context import RelayContext


class Clock:
    """All that a response needs of the context."""

    def date(self) -> bytes:
        return b"Sun, 29 Nov 2026 22:00:00 GMT"


def made(status: int, **options: Any) -> tuple[bytes, int]:
    arguments: dict[str, Any] = {"method": b"GET", "request_id": b"id-1", "close": False} | options
    return own_response(cast("RelayContext", Clock()), status, **arguments)


def parsed(data: bytes, method: bytes = b"GET") -> tuple[ResponseHead, bytes]:
    decoder = ResponseDecoder(Limits(8192, 64))
    decoder.start(method)
    decoder.feed(data)
    head = decoder.next_event()
    assert isinstance(head, ResponseHead)
    body = decoder.next_event() if method != b"HEAD" else b""
    assert isinstance(body, bytes)
    return head, body


@pytest.mark.parametrize("status", [308, 400, 404, 405, 408, 413, 414, 417, 421, 431, 500, 501, 502, 503, 504, 505])
def test_each_is_a_whole_response_that_names_the_request(status: int) -> None:
    data, size = made(status)
    head, body = parsed(data)
    assert (head.status, head.get(b"x-request-id"), head.get(b"date")) == (status, b"id-1", Clock().date())
    assert head.reason
    assert len(body) == size == head.content_length
    assert b"request id: id-1" in body


def test_head_gets_the_length_only() -> None:
    data, size = made(404, method=b"HEAD")
    head, body = parsed(data, b"HEAD")
    assert (body, size, head.content_length) == (b"", 0, parsed(made(404)[0])[0].content_length)
    assert data.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("options", "connection"),
    [
        ({}, None),
        ({"close": True}, b"close"),
        ({"version": 10}, b"keep-alive"),
        ({"version": 10, "close": True}, b"close"),
    ],
)
def test_the_connection_is_said_where_it_is_not_the_default(options: dict[str, Any], connection: bytes | None) -> None:
    assert parsed(made(404, **options)[0])[0].get(b"connection") == connection


def test_fields_of_some_statuses() -> None:
    assert parsed(made(503, retry_after_secs=1)[0])[0].get(b"retry-after") == b"1"
    assert b"GET" in (parsed(made(405)[0])[0].get(b"allow") or b"")
    moved = parsed(made(308, location=b"https://example.org/")[0])[0]
    assert (moved.get(b"location"), moved.get(b"cache-control")) == (b"https://example.org/", None)
    assert parsed(made(404)[0])[0].get(b"cache-control") == b"no-store"
