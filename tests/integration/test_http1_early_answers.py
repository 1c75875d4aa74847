"""An answer that comes before the request has ended can be read, by clients that send everything first too."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.harness import Wire, answering
from tests.harness.stage import Stage, open_stage

HOST = b"Host: www.example.org\r\n"
UPLOAD_BYTES = 50_000_000
PIECE = bytes(1_000_000)
LIMIT_BYTES = 100_000


@pytest.fixture(scope="module")
def theatre() -> Iterator[Stage]:
    def configure(urls: Sequence[str]) -> dict[str, Any]:
        (url,) = urls
        return {
            "sites": [
                {"hosts": ["*"], "upstreams": [url]},
                {"hosts": ["limited.example.org"], "upstreams": [url], "max_request_body_bytes": LIMIT_BYTES},
            ]
        }

    with open_stage(configure) as stage:
        yield stage


def send_everything(client: Wire, head: bytes, chunked: bool) -> None:
    """What a plain blocking client does: the answer is not looked for before all has been sent."""
    client.send(head)
    for _ in range(UPLOAD_BYTES // len(PIECE)):
        client.send(b"%x\r\n%b\r\n" % (len(PIECE), PIECE) if chunked else PIECE)
    if chunked:
        client.send(b"0\r\n\r\n")


def post(host: bytes, chunked: bool, size: int = UPLOAD_BYTES) -> bytes:
    framing = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % size
    return b"POST / HTTP/1.1\r\nHost: " + host + b"\r\n" + framing + b"\r\n\r\n"


def refusing(status: bytes, *, closes: bool) -> Any:
    def play(wire: Wire) -> None:
        wire.read_head()
        wire.read_exactly(1024)
        wire.send(b"HTTP/1.1 " + status + b"\r\nContent-Length: 2\r\n\r\nno")
        if not closes:
            wire.read_to_end()

    return play


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
@pytest.mark.parametrize("closes", [False, True], ids=["stays", "closes"])
def test_an_upload_that_the_upstream_refuses_early(stage: Stage, chunked: bool, closes: bool) -> None:
    stage.play(refusing(b"413 Content Too Large", closes=closes))
    client = stage.client()
    send_everything(client, post(b"www.example.org", chunked), chunked)
    response = client.read_response("POST")
    assert (response.status, response.body, response.get("Connection")) == (413, b"no", "close")
    assert client.at_end()


def test_the_answer_is_there_while_the_client_still_sends(stage: Stage) -> None:
    stage.play(refusing(b"401 Unauthorized", closes=False))
    client = stage.client()
    client.send(post(b"www.example.org", chunked=False) + PIECE)
    assert client.read_response("POST").status == 401
    assert client.at_end()


def test_the_rest_of_a_refused_upload_is_not_taken_for_a_request(stage: Stage) -> None:
    stage.play(refusing(b"401 Unauthorized", closes=False))
    client = stage.client()
    client.send(post(b"www.example.org", chunked=False, size=2048) + bytes(1024))
    assert client.read_response("POST").status == 401
    client.send(bytes(1024) + b"GET /smuggled HTTP/1.1\r\n" + HOST + b"\r\n")
    assert client.at_end()
    stage.play(answering())
    assert stage.ask(b"GET /other HTTP/1.1\r\n" + HOST + b"\r\n").status == 200
    assert b"smuggled" not in stage.reached()


def test_a_length_over_max_request_body_bytes_is_refused_without_the_upstream(stage: Stage) -> None:
    client = stage.client()
    send_everything(client, post(b"limited.example.org", chunked=False), chunked=False)
    response = client.read_response("POST")
    assert (response.status, response.get("Connection")) == (413, "close")
    assert client.at_end()
    assert not stage.upstream.wires


def test_a_chunked_body_over_max_request_body_bytes_is_refused_where_it_is_over(stage: Stage) -> None:
    client = stage.client()
    send_everything(client, post(b"limited.example.org", chunked=True), chunked=True)
    response = client.read_response("POST")
    assert (response.status, response.get("Connection")) == (413, "close")
    assert client.at_end()
    assert len(stage.reached()) < 2 * LIMIT_BYTES
    assert not stage.reached().endswith(b"\r\n0\r\n\r\n")


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
def test_a_body_of_just_max_request_body_bytes_passes(stage: Stage, chunked: bool) -> None:
    client = stage.client()
    body = bytes(LIMIT_BYTES)
    framed = b"%x\r\n%b\r\n0\r\n\r\n" % (LIMIT_BYTES, body) if chunked else body
    assert client.request(post(b"limited.example.org", chunked, LIMIT_BYTES) + framed).status == 200


def test_an_expecting_client_is_refused_before_its_body(stage: Stage) -> None:
    client = stage.client()
    response = client.request(
        b"POST / HTTP/1.1\r\nHost: limited.example.org\r\nExpect: 100-continue\r\nContent-Length: 100001\r\n\r\n"
    )
    assert (response.status, response.get("Connection")) == (413, "close")


def test_a_client_that_goes_on_sending_is_not_waited_for_without_end(stage: Stage) -> None:
    """LINGER_SECS later the connection is gone; the descriptor with it."""
    stage.play(refusing(b"401 Unauthorized", closes=False))
    client = stage.client()
    client.send(post(b"www.example.org", chunked=False) + PIECE[:2000])
    assert client.read_response("POST").status == 401

    def send_on() -> None:
        while True:
            client.send(PIECE)

    with pytest.raises((ConnectionError, ssl.SSLEOFError)):
        send_on()
