"""Strict by grammar: what is refused, with which status; the connection is closed, nothing reaches the upstream.

The codec's own tests have the whole grammar; here is a choice of each kind through the real proxy.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.stage import Stage, open_stage

HOST = b"Host: www.example.org\r\n"
LONG = b"x" * 40_000


@pytest.fixture(scope="module")
def theatre() -> Iterator[Stage]:
    with open_stage() as stage:
        yield stage


REFUSED: dict[str, tuple[int, bytes]] = {
    "bare LF": (400, b"GET / HTTP/1.1\nHost: a\n\n"),
    "bare CR": (400, b"GET / HTTP/1.1\r\nX: a\rb\r\n" + HOST + b"\r\n"),
    "folded line": (400, b"GET / HTTP/1.1\r\n" + HOST + b"X: a\r\n b\r\n\r\n"),
    "space before the colon": (400, b"GET / HTTP/1.1\r\n" + HOST + b"X : a\r\n\r\n"),
    "control byte in a name": (400, b"GET / HTTP/1.1\r\n" + HOST + b"X\x01: a\r\n\r\n"),
    "control byte in a value": (400, b"GET / HTTP/1.1\r\n" + HOST + b"X: a\x00b\r\n\r\n"),
    "no Host": (400, b"GET / HTTP/1.1\r\nX: a\r\n\r\n"),
    "empty Host": (400, b"GET / HTTP/1.1\r\nHost:\r\n\r\n"),
    "two Hosts": (400, b"GET / HTTP/1.1\r\n" + HOST + HOST + b"\r\n"),
    "Host outside its grammar": (400, b"GET / HTTP/1.1\r\nHost: a/b\r\n\r\n"),
    "absolute-form that contradicts": (400, b"GET http://b.example.org/ HTTP/1.1\r\n" + HOST + b"\r\n"),
    "HTTP/1.2": (505, b"GET / HTTP/1.2\r\n" + HOST + b"\r\n"),
    "HTTP/2.0": (505, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "HTTP/0.9": (400, b"GET /\r\n\r\n"),
    "differing Content-Lengths": (
        400,
        b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    ),
    "repeated Content-Length": (
        400,
        b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 1\r\nContent-Length: 1\r\n\r\na",
    ),
    "Content-Length with a sign": (400, b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: +1\r\n\r\na"),
    "both framings": (
        400,
        b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ),
    "unknown coding": (501, b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"),
    "disguised chunked": (501, b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n"),
    "Transfer-Encoding in 1.0": (400, b"POST / HTTP/1.0\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    "head over its limit": (431, b"GET / HTTP/1.1\r\n" + HOST + b"X: " + LONG + b"\r\n\r\n"),
    "too many fields": (431, b"GET / HTTP/1.1\r\n" + HOST + b"X: 1\r\n" * 200 + b"\r\n"),
    "target over its limit": (414, b"GET /" + LONG + b" HTTP/1.1\r\n" + HOST + b"\r\n"),
    "unknown expectation": (417, b"POST / HTTP/1.1\r\n" + HOST + b"Expect: 200-ok\r\nContent-Length: 1\r\n\r\na"),
    "TLS inside TLS": (400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(stage: Stage, name: str) -> None:
    status, request = REFUSED[name]
    before = stage.counter("bad_requests")
    client = stage.client()
    response = client.request(request, "GET")
    assert (response.status, response.get("Connection")) == (status, "close")
    assert client.at_end()
    assert stage.counter("bad_requests") == before + 1
    assert not stage.upstream.wires


CHUNKED = b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n"
BAD_BODIES: dict[str, tuple[int, bytes]] = {
    "chunk size with a sign": (400, b"+3\r\nabc\r\n0\r\n\r\n"),
    "chunk size with a prefix": (400, b"0x3\r\nabc\r\n0\r\n\r\n"),
    "chunk size with an underscore": (400, b"0_3\r\nabc\r\n0\r\n\r\n"),
    "chunk size with a space": (400, b"3 \r\nabc\r\n0\r\n\r\n"),
    "chunk size that overflows": (400, b"f" * 17 + b"\r\nabc"),
    "chunk extension too long": (400, b"3;" + b"x" * 40_000 + b"\r\nabc\r\n0\r\n\r\n"),
    "chunk with bytes over": (400, b"3\r\nabcd\r\n0\r\n\r\n"),
    "bare LF after a chunk": (400, b"3\r\nabc\n0\r\n\r\n"),
    "bad trailer": (400, b"3\r\nabc\r\n0\r\nX : 1\r\n\r\n"),
    "forbidden trailer": (400, b"3\r\nabc\r\n0\r\nContent-Length: 1\r\n\r\n"),
    "trailers over their limit": (431, b"3\r\nabc\r\n0\r\nX: " + LONG + b"\r\n\r\n"),
}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_a_request_whose_body_is_refused_is_never_completed(stage: Stage, name: str) -> None:
    status, body = BAD_BODIES[name]
    before = stage.counter("bad_requests")
    client = stage.client()
    response = client.request(CHUNKED + body, "POST")
    assert (response.status, response.get("Connection")) == (status, "close")
    assert client.at_end()
    assert not stage.reached().partition(b"\r\n\r\n")[2].endswith(b"0\r\n\r\n")
    assert stage.counter("bad_requests") == before + 1


def test_what_comes_after_a_refused_request_is_not_looked_at(stage: Stage) -> None:
    client = stage.client()
    smuggled = b"GET /smuggled HTTP/1.1\r\n" + HOST + b"\r\n"
    request = b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    client.send(request + smuggled)
    assert client.read_response().status == 400
    assert client.at_end()
    assert not stage.upstream.wires


def test_a_head_that_never_ends_is_refused_without_being_kept(stage: Stage) -> None:
    client = stage.client()
    client.send(b"GET / HTTP/1.1\r\n" + HOST + b"X: " + LONG)
    assert client.read_response().status == 431
    assert client.at_end()


@pytest.mark.parametrize(
    ("request_head", "status"),
    [
        (b"CONNECT www.example.org:443 HTTP/1.1\r\n" + HOST, 501),
        (b"TRACE / HTTP/1.1\r\n" + HOST, 405),
    ],
)
def test_methods_that_are_never_forwarded(stage: Stage, request_head: bytes, status: int) -> None:
    client = stage.client()
    response = client.request(request_head + b"\r\n")
    assert response.status == status
    assert (response.get("Allow") is not None) == (status == 405)
    assert not stage.upstream.wires


def test_an_incomplete_request_is_answered_400_when_the_client_ends(stage: Stage) -> None:
    client = stage.leave_to_me(stage.appliance.connect_redirect())
    client.send(b"GET / HTTP/1.1\r\nHost: a\r\n")
    client.end()
    assert client.read_response().status == 400
    assert client.at_end()


def test_the_answer_to_a_refused_request_names_the_request(stage: Stage) -> None:
    response = stage.ask(b"GET / HTTP/1.1\r\nHost: a/b\r\n\r\n")
    assert response.get("Content-Type") == "text/plain; charset=utf-8"
    assert response.get("Cache-Control") == "no-store"
    assert (response.get("X-Request-Id") or "-").encode() in response.body
