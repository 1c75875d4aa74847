"""Upgrade: which protocols, who may switch, and the tunnel after it."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.harness import Script, Wire, wait_until
from tests.harness.stage import Stage, open_stage
from tests.integration.conftest import fields_of

HOST = b"Host: www.example.org\r\n"
ASK = (
    b"GET /socket HTTP/1.1\r\n"
    + HOST
    + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
SWITCH = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
PATIENCE_SECS = 20.0


@pytest.fixture(scope="module")
def theatre() -> Iterator[Stage]:
    def configure(urls: Sequence[str]) -> dict[str, Any]:
        (url,) = urls
        return {
            "sites": [
                {"hosts": ["*"], "upstreams": [url]},
                {"hosts": ["more.example.org"], "upstreams": [url], "upgrade_protocols": ["websocket", "irc/7"]},
                {"hosts": ["none.example.org"], "upstreams": [url], "upgrade_protocols": []},
                {"hosts": ["brief.example.org"], "upstreams": [url], "tunnel_idle_timeout_secs": 0.5},
            ]
        }

    with open_stage(configure) as stage:
        yield stage


def switching(then: Script, switch: bytes = SWITCH) -> Script:
    def play(wire: Wire) -> None:
        wire.read_head()
        wire.send(switch)
        then(wire)

    return play


def echo(wire: Wire) -> None:
    while data := wire.sock.recv(65_536):
        wire.sock.sendall(data)


def assert_end(wire: Wire) -> None:
    assert wire.at_end()


def tunnel(stage: Stage, then: Script = echo, ask: bytes = ASK) -> Wire:
    """A client whose tunnel stands."""
    stage.play(switching(then))
    client = stage.client()
    response = client.request(ask)
    assert (response.status, response.get("Upgrade"), response.get("Connection")) == (101, "websocket", "Upgrade")
    return client


def send_close_notify(client: Wire) -> None:
    """Ends the client's side only, which TLS can do though ``unwrap`` would wait for the other side."""
    sock = client.sock
    assert isinstance(sock, ssl.SSLSocket)
    sock.setblocking(False)
    with contextlib.suppress(ssl.SSLWantReadError):
        sock.unwrap()
    sock.settimeout(PATIENCE_SECS)


# -- who may switch


def test_websocket_is_forwarded(stage: Stage) -> None:
    client = tunnel(stage)
    fields = fields_of(stage.reached())
    assert [value for name, value in fields if name == "Upgrade"] == ["websocket"]
    assert [value for name, value in fields if name == "Connection"] == ["Upgrade"]
    client.send(b"\x81\x02hi")
    assert client.read_exactly(4) == b"\x81\x02hi"


@pytest.mark.parametrize(
    ("host", "lines", "forwarded"),
    [
        (b"www.example.org", b"Connection: Upgrade\r\nUpgrade: h2c\r\n", []),
        (b"www.example.org", b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n", []),
        (b"www.example.org", b"Connection: Upgrade\r\nUpgrade: h2c, websocket\r\n", ["websocket"]),
        (b"www.example.org", b"Connection: keep-alive, upgrade\r\nUpgrade: WebSocket\r\n", ["websocket"]),
        (b"www.example.org", b"Upgrade: websocket\r\n", []),
        (b"www.example.org", b"Connection: Upgrade\r\nUpgrade: irc/7\r\n", []),
        (b"more.example.org", b"Connection: Upgrade\r\nUpgrade: irc/7\r\n", ["irc/7"]),
        (b"none.example.org", b"Connection: Upgrade\r\nUpgrade: websocket\r\n", []),
    ],
)
def test_which_protocols_are_forwarded(stage: Stage, host: bytes, lines: bytes, forwarded: list[str]) -> None:
    assert stage.ask(b"GET / HTTP/1.1\r\nHost: " + host + b"\r\n" + lines + b"\r\n").status == 200
    fields = fields_of(stage.reached())
    assert [value for name, value in fields if name.lower() == "upgrade"] == forwarded
    assert not [name for name, _ in fields if name.lower() == "http2-settings"]


def test_no_upgrade_for_http_1_0_nor_with_a_body(stage: Stage) -> None:
    lines = HOST + b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
    assert stage.ask(b"GET / HTTP/1.0\r\n" + lines + b"\r\n").status == 200
    assert stage.ask(b"POST / HTTP/1.1\r\n" + lines + b"Content-Length: 1\r\n\r\na").status == 200
    assert b"upgrade:" not in stage.reached().lower()


@pytest.mark.parametrize(
    ("request_head", "switch"),
    [
        (b"GET / HTTP/1.1\r\n" + HOST + b"\r\n", SWITCH),
        (ASK.replace(b"websocket", b"h2c"), SWITCH.replace(b"websocket", b"h2c")),
        (ASK, SWITCH.replace(b"websocket", b"h2c")),
        (ASK, b"HTTP/1.1 101 Switching Protocols\r\n\r\n"),
        (b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 1\r\n\r\na", SWITCH),
    ],
    ids=["not asked", "h2c removed", "another protocol", "no protocol", "with a body"],
)
def test_a_101_that_nobody_asked_for_is_a_bad_gateway(stage: Stage, request_head: bytes, switch: bytes) -> None:
    closed = threading.Event()

    def play(wire: Wire) -> None:
        wire.read_body(wire.read_head())
        wire.send(switch + b"smuggled")
        assert wire.at_end()
        closed.set()

    stage.play(play)
    client = stage.client()
    assert client.request(request_head).status == 502
    assert b"smuggled" not in client.received
    assert closed.wait(PATIENCE_SECS)


def test_an_upstream_may_decline(stage: Stage) -> None:
    client = stage.client()
    for _ in range(2):
        assert client.request(ASK).body == b"ok"
    assert len(stage.upstream.wires) == 1


# -- the tunnel


def test_bytes_that_came_with_the_heads_are_not_lost(stage: Stage) -> None:
    heard: list[bytes] = []

    def play(wire: Wire) -> None:
        wire.read_head()
        wire.send(SWITCH + b"with the 101")
        heard.append(wire.read_exactly(len(b"with the request")))

    stage.play(play)
    client = stage.client()
    response = client.request(ASK + b"with the request")
    assert response.status == 101
    assert client.read_exactly(12) == b"with the 101"
    assert client.at_end()
    assert heard == [b"with the request"]


def test_a_tunnel_carries_whatever_bytes_both_ways(stage: Stage) -> None:
    client = tunnel(stage)
    for data in (b"GET / HTTP/1.1\n\n", b"\x00\xff\r\n\r\n", bytes(range(256)) * 300):
        client.send(data)
        assert client.read_exactly(len(data)) == data


def test_the_client_ends_first_and_still_hears_the_upstream(stage: Stage) -> None:
    def until_end(wire: Wire) -> None:
        heard = wire.read_to_end()
        wire.send(b"heard %d bytes" % len(heard))

    client = tunnel(stage, until_end)
    client.send(b"x" * 1000)
    send_close_notify(client)
    assert client.read_to_end() == b"heard 1000 bytes"


def test_the_upstream_ends_first_and_the_client_hears_everything(stage: Stage) -> None:
    """TLS has no half close that loses nothing, so the upstream's end is the end of both."""

    def say_and_end(wire: Wire) -> None:
        assert wire.read_exactly(5) == b"heard"
        wire.send(b"y" * 1_000_000)
        wire.end()
        assert_end(wire)

    client = tunnel(stage, say_and_end)
    client.send(b"heard")
    assert client.read_to_end() == b"y" * 1_000_000
    wait_until(lambda: stage.counter("tunnels_open") == 0, "the tunnel to end")


def test_the_end_of_both_ends_the_tunnel(stage: Stage) -> None:
    client = tunnel(stage)
    assert stage.counter("tunnels_open") == 1
    client.close()
    wait_until(lambda: stage.counter("tunnels_open") == 0, "the tunnel to end")


@pytest.mark.parametrize("side", ["client", "upstream"])
def test_a_reset_of_one_side_ends_the_other(stage: Stage, side: str) -> None:
    reset = threading.Event()

    def play(wire: Wire) -> None:
        wire.send(b"there")
        if side == "upstream":
            assert reset.wait(PATIENCE_SECS)
            wire.reset()
        else:
            assert wire.at_end()

    client = tunnel(stage, play)
    assert client.read_exactly(5) == b"there"
    reset.set()
    if side == "client":
        client.reset()
    else:
        assert client.at_end()
    wait_until(lambda: stage.counter("tunnels_open") == 0, "the tunnel to end")


def test_a_silent_tunnel_ends_after_its_idle_time(stage: Stage) -> None:
    before = stage.counter("timeouts_tunnel")
    client = tunnel(stage, assert_end, ask=ASK.replace(b"www.", b"brief."))
    assert client.at_end()
    assert stage.counter("timeouts_tunnel") == before + 1


def test_traffic_in_either_direction_keeps_a_tunnel(stage: Stage) -> None:
    """The upstream alone speaks, for thrice the idle time in steps of a fifth of it."""
    pause = threading.Event()

    def drip(wire: Wire) -> None:
        for _ in range(15):
            wire.send(b".")
            pause.wait(0.1)
        wire.send(b"!")

    client = tunnel(stage, drip, ask=ASK.replace(b"www.", b"brief."))
    assert client.read_until(b"!") == b"." * 15 + b"!"


@pytest.mark.parametrize("direction", ["to the upstream", "to the client"])
def test_a_side_that_does_not_read_holds_the_other_back(stage: Stage, direction: str) -> None:
    """What fits into buffers of the kernel and of the proxy is bounded; then the sender blocks."""
    go = threading.Event()
    total = 64_000_000
    piece = bytes(1_000_000)
    received: list[int] = []

    def count(sock: socket.socket) -> int:
        seen = 0
        while seen < total:
            data = sock.recv(1_000_000)
            assert data, "the tunnel ended early"
            seen += len(data)
        return seen

    sent = 0

    def send_until_blocked(sock: socket.socket) -> None:
        nonlocal sent
        sock.settimeout(0.5)
        try:
            while sent < total:
                sent += sock.send(piece)
        except TimeoutError:
            pass
        sock.settimeout(PATIENCE_SECS)

    def play(wire: Wire) -> None:
        if direction == "to the upstream":
            assert go.wait(PATIENCE_SECS)
            received.append(count(wire.sock))
            wire.send(b"!")
        else:
            send_until_blocked(wire.sock)
            go.set()
            wire.sock.sendall(bytes(total - sent))
            wire.read_to_end()

    client = tunnel(stage, play)
    if direction == "to the upstream":
        send_until_blocked(client.sock)
        assert sent < total
        go.set()
        client.sock.sendall(bytes(total - sent))
        assert client.read_exactly(1) == b"!"
    else:
        assert go.wait(PATIENCE_SECS)
        assert sent < total
        received.append(count(client.sock))
    assert received == [total]


def test_the_access_log_says_101_and_the_bytes_of_the_tunnel(stage: Stage) -> None:
    client = tunnel(stage, ask=ASK.replace(b"/socket", b"/logged-socket"))
    client.send(b"12345")
    client.read_exactly(5)
    client.close()
    lines: list[str] = []

    def logged() -> bool:
        lines[:] = [line for line in stage.appliance.access_lines() if "/logged-socket" in line]
        return bool(lines)

    wait_until(logged, "the tunnel's line")
    assert '"GET /logged-socket HTTP/1.1" 101 5 ' in lines[0]
