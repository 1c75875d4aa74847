"""The demo's embedded upstream, spoken to directly: what it answers, and that odd input never disturbs it."""

from __future__ import annotations

import html
from collections.abc import Iterator
from pathlib import Path

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from tests.harness import alive, connect_tcp, descriptor_count, wait_until
from tests.harness.programs import Demo, demo_upstream

WEBSOCKET_HEAD = (
    b"GET /ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
ALIVE_AND_WELL = b"GET /status/200 HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    with demo_upstream(tmp_path_factory.mktemp("demo") / "output") as demo:
        yield demo
    assert demo.output.read_text() == "", "it has nothing to say, tracebacks least of all"


def test_page_shows_the_request_as_received(demo: Demo) -> None:
    with connect_tcp(demo.port) as wire:
        response = wire.request(
            b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Odd: <b>&\xe9\r\nVia: 1.1 proxy\r\nConnection: close\r\n\r\n"
        )
        assert wire.at_end()
    page = response.body.decode()
    assert response.status == 200
    assert "It came through the proxy" in page
    assert html.escape("<b>&\xe9") in page
    assert "<b>" not in page
    assert "http://" not in page.replace("http://localhost", ""), "the page is self-contained"
    assert "https://" not in page


def test_page_does_not_claim_a_proxy_that_was_not_there(demo: Demo) -> None:
    with connect_tcp(demo.port) as wire:
        assert b"came directly" in wire.request(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").body


def test_echo_returns_method_target_fields_and_body(demo: Demo) -> None:
    with connect_tcp(demo.port) as wire:
        response = wire.request(
            b"PATCH /echo?a=%20b HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n"
        )
        assert response.body == b"PATCH /echo?a=%20b\nHost: localhost\nTransfer-Encoding: chunked\n\nhello world"
        assert (response.get("content-type") or "").startswith("text/plain")
        assert wire.request(ALIVE_AND_WELL).status == 200, "the connection is kept"


def test_echo_streams_while_the_body_still_comes(demo: Demo) -> None:
    with connect_tcp(demo.port) as wire:
        wire.send(b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\nfirst")
        wire.read_until(b"first")
        wire.send(b"-last")
        wire.read_until(b"-last")


def test_echo_invites_a_body_that_waits(demo: Demo) -> None:
    with connect_tcp(demo.port) as wire:
        wire.send(b"PUT /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
        assert wire.read_response().status == 100
        wire.send(b"ok")
        assert wire.read_response("PUT").body.endswith(b"\n\nok")


@pytest.mark.parametrize("count", [0, 1, 65_536, 1_000_003])
def test_bytes_sends_so_many(demo: Demo, count: int) -> None:
    with connect_tcp(demo.port) as wire:
        response = wire.request(b"GET /bytes/%d HTTP/1.1\r\nHost: localhost\r\n\r\n" % count)
        assert response.get("content-length") == str(count)
        assert len(response.body) == count


def test_head_has_no_body(demo: Demo) -> None:
    with connect_tcp(demo.port) as wire:
        for target in (b"/", b"/echo", b"/bytes/1000", b"/slow?secs=60", b"/status/404", b"/nothing"):
            wire.request(b"HEAD %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % target)
        assert wire.request(ALIVE_AND_WELL).status == 200


def test_slow_trickles(demo: Demo) -> None:
    with connect_tcp(demo.port) as wire:
        response = wire.request(b"GET /slow?secs=0.7 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert response.body.count(b"\n") == 2


@pytest.mark.parametrize("secs", ["-1", "nan", "inf", "9999", "x"])
def test_slow_refuses_what_is_no_duration(demo: Demo, secs: str) -> None:
    with connect_tcp(demo.port) as wire:
        response = wire.request(f"GET /slow?secs={secs} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert response.status == 400


@pytest.mark.parametrize("status", [200, 204, 304, 404, 418, 503, 599])
def test_status_answers_that_status(demo: Demo, status: int) -> None:
    with connect_tcp(demo.port) as wire:
        assert wire.request(b"GET /status/%d HTTP/1.1\r\nHost: localhost\r\n\r\n" % status).status == status
        assert wire.request(ALIVE_AND_WELL).status == 200


@pytest.mark.parametrize(
    "target", ["/nothing", "/status/100", "/status/600", "/status/2000", "/bytes/-1", "/bytes/x", "*"]
)
def test_anything_else_is_not_found(demo: Demo, target: str) -> None:
    with connect_tcp(demo.port) as wire:
        assert wire.request(f"OPTIONS {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()).status == 404


@pytest.mark.parametrize("body", [b"x" * 100_000, b""])
def test_unread_body_does_not_disturb_the_next_request(demo: Demo, body: bytes) -> None:
    with connect_tcp(demo.port) as wire:
        head = b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
        assert wire.request(head + body).status == 404
        assert wire.request(ALIVE_AND_WELL).status == 200


def test_websocket_echoes_text_and_bytes(demo: Demo) -> None:
    with connect(f"ws://127.0.0.1:{demo.port}/ws", proxy=None) as socket_:
        for message in ("h\xe9llo", "", b"\x00\xff", b"x" * 500_000):
            socket_.send(message)
            assert socket_.recv(timeout=10) == message
        assert socket_.ping().wait(10)


def test_websocket_without_its_key_is_refused(demo: Demo) -> None:
    with connect_tcp(demo.port) as wire:
        response = wire.request(
            b"GET /ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n"
        )
        assert response.status == 400
        assert wire.at_end()


def test_websocket_elsewhere_is_refused(demo: Demo) -> None:
    with pytest.raises(InvalidStatus), connect(f"ws://127.0.0.1:{demo.port}/nothing", proxy=None):
        pass


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\nshort",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\nshort",
        b"GET /" + b"x" * 200_000,
        WEBSOCKET_HEAD + b"\xff\xff\xff\xff\xff",
        b"",
    ],
)
@pytest.mark.parametrize("ending", ["end", "reset"])
def test_odd_input_ends_its_own_connection_only(demo: Demo, garbage: bytes, ending: str) -> None:
    with connect_tcp(demo.port) as other:
        assert other.request(ALIVE_AND_WELL).status == 200
        with connect_tcp(demo.port) as wire:
            wire.send(garbage)
            if ending == "end":
                wire.end()
                wire.read_to_end()
            else:
                wire.reset()
        assert other.request(ALIVE_AND_WELL).status == 200
    assert alive(demo.process.pid)


def test_closed_connections_give_their_descriptors_back(demo: Demo) -> None:
    with connect_tcp(demo.port) as wire:
        assert wire.request(ALIVE_AND_WELL).status == 200
        before = descriptor_count(demo.process.pid)
        wires = [connect_tcp(demo.port) for _ in range(10)]
        for one in wires:
            assert one.request(ALIVE_AND_WELL).status == 200
        assert descriptor_count(demo.process.pid) >= before + 10
        for one in wires:
            one.close()
        wait_until(lambda: descriptor_count(demo.process.pid) <= before, "descriptors are back")


def test_sigterm_ends_it_with_connections_open(tmp_path: Path) -> None:
    with (
        demo_upstream(tmp_path / "output") as own,  # asserts the exit code
        connect_tcp(own.port) as idle,
        connect_tcp(own.port) as busy,
    ):
        assert idle.request(ALIVE_AND_WELL).status == 200
        busy.send(b"GET /slow?secs=60 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        busy.read_until(b"seconds\n")
        own.process.terminate()
        own.process.wait(10)
    assert own.output.read_text() == ""
