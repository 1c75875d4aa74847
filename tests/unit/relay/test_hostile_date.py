"""A response has one Date: the operator's, the upstream's, or ours, and ours is never an old one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from proxy.protocol.http1 import HeadCache, Limits, ResponseDecoder, ResponseHead
from proxy.relay.answer import prepare_response

OURS = b"Sun, 29 Nov 2026 22:00:00 GMT"
LATER = b"Sun, 29 Nov 2026 23:00:00 GMT"
THEIRS = b"Date: Thu, 01 Jan 2026 00:00:00 GMT\r\n"


def route(**edits: Any) -> Any:
    return SimpleNamespace(**({"set_response_headers": (), "remove_response_headers": frozenset()} | edits))


def parsed(fields: bytes) -> ResponseHead:
    decoder = ResponseDecoder(Limits(8192, 64), HeadCache())
    decoder.start(b"GET")
    decoder.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n" + fields + b"\r\n")
    head = decoder.next_event()
    assert isinstance(head, ResponseHead)
    return head


def dates(head: ResponseHead, to: Any, now: bytes = OURS) -> list[bytes]:
    context: Any = SimpleNamespace(date=lambda: now)
    lines = prepare_response(context, head, to).whole.split(b"\r\n")
    return [line[6:] for line in lines if line.startswith(b"Date: ")]


@pytest.mark.parametrize("fields", [b"", THEIRS])
def test_a_date_that_the_operator_sets_is_the_only_one(fields: bytes) -> None:
    assert dates(parsed(fields), route(set_response_headers=((b"Date", b"x"),))) == [b"x"]


@pytest.mark.parametrize("fields", [b"", THEIRS])
def test_a_date_that_the_operator_removes_does_not_come_back(fields: bytes) -> None:
    assert dates(parsed(fields), route(remove_response_headers=frozenset((b"date",)))) == []


def test_our_own_date_is_not_remembered() -> None:
    head, to = parsed(THEIRS + b"Connection: date\r\n"), route()
    assert [dates(head, to), dates(head, to, LATER)] == [[OURS], [LATER]]
