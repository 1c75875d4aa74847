"""Trailers are fields: what a head may not bring to the other side, a trailer section may not bring either."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.harness import Wire, answering, wait_until
from tests.harness.stage import Stage, open_stage

POST = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def theatre() -> Iterator[Stage]:
    def configure(urls: Sequence[str]) -> dict[str, Any]:
        site = {
            "hosts": ["*"],
            "upstreams": [urls[0]],
            "request_headers": {"set": {"X-User": "nobody"}, "remove": ["X-Secret"]},
            "response_headers": {"set": {"X-Cache": "off"}, "remove": ["X-Backend"]},
        }
        return {"sites": [site]}

    with open_stage(configure) as stage:
        yield stage


def reads_a_chunked_body(wire: Wire) -> None:
    wire.read_until(b"\r\n\r\n")
    wire.read_until(b"0\r\n")
    wire.read_until(b"\r\n\r\n")
    wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")


@pytest.mark.parametrize(
    "trailer",
    [
        b"X_Real_IP: 192.0.2.66",
        b"X-Forwarded-Prefix: /evil",
        b"x-forwarded-ssl: on",
        b"X-User: admin",
        b"x-secret: 1",
        b"X-Hop: 1",
    ],
)
def test_what_a_request_may_not_say_its_trailers_may_not_say(stage: Stage, trailer: bytes) -> None:
    stage.play(reads_a_chunked_body)
    body = b"1\r\na\r\n0\r\nX-Sum: 9\r\n" + trailer + b"\r\n\r\n"
    assert stage.ask(POST + b"Connection: X-Hop\r\n\r\n" + body).status == 200
    assert stage.reached().endswith(b"1\r\na\r\n0\r\nX-Sum: 9\r\n\r\n")


def test_underscore_trailers_are_counted(stage: Stage) -> None:
    def dropped() -> int:
        return stage.counter("underscore_fields_dropped")

    stage.play(reads_a_chunked_body)
    before = dropped()
    assert stage.ask(POST + b"\r\n1\r\na\r\n0\r\nA_B: 1\r\nX-Sum: 9\r\nC_D: 2\r\n\r\n").status == 200
    wait_until(lambda: dropped() == before + 2, "two trailers counted")


def test_what_is_removed_from_a_response_is_removed_from_its_trailers(stage: Stage) -> None:
    stage.play(
        answering(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: X-Hop\r\n\r\n"
            b"1\r\na\r\n0\r\nX-Backend: 10.0.0.7\r\nX-Sum: 9\r\nx-cache: on\r\nX-Hop: 1\r\n\r\n"
        )
    )
    response = stage.ask(GET)
    assert (response.body, response.trailers) == (b"a", (("X-Sum", "9"),))
