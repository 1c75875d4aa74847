"""Extended CONNECT (RFC 8441): a WebSocket on a stream, to an upstream that speaks HTTP/1.1."""

from __future__ import annotations

import base64
import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from tests.harness import Wire, answering, wait_until
from tests.harness.http2_wire import Http2Wire, connect_http2
from tests.harness.stage import Stage, open_stage
from tests.integration.conftest import fields_of

GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
WEBSOCKET = [(":protocol", "websocket")]
FIELDS = [("sec-websocket-version", "13"), ("origin", "https://www.example.org"), ("sec-websocket-key", "theirs")]
MEGABYTES = 3_000_000


@pytest.fixture(scope="module")
def theatre() -> Iterator[Stage]:
    def configure(urls: Sequence[str]) -> dict[str, Any]:
        (url,) = urls
        return {
            "write_timeout_secs": 1,
            "sites": [
                {"hosts": ["*"], "upstreams": [url]},
                {"hosts": ["none.example.org"], "upstreams": [url], "upgrade_protocols": []},
                {"hosts": ["brief.example.org"], "upstreams": [url], "tunnel_idle_timeout_secs": 0.5},
            ],
        }

    with open_stage(configure) as stage:
        yield stage


@pytest.fixture
def client(stage: Stage) -> Iterator[Http2Wire]:
    client = connect_http2(stage.appliance)
    yield client
    client.close()


def accept_of(head: bytes) -> bytes:
    (key,) = [value for name, value in fields_of(head) if name.lower() == "sec-websocket-key"]
    return base64.b64encode(hashlib.sha1(key.encode() + GUID, usedforsecurity=False).digest())


def switching(then: Callable[[Wire], None], accept: bytes | None = None) -> Callable[[Wire], None]:
    def play(wire: Wire) -> None:
        head = wire.read_head()
        answer = accept_of(head) if accept is None else accept
        wire.send(
            b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Protocol: chat\r\nSec-WebSocket-Accept: " + answer + b"\r\n\r\n"
        )
        then(wire)

    return play


def echo(wire: Wire) -> None:
    while piece := wire.sock.recv(65_536):
        wire.sock.sendall(piece)


def open_socket(client: Http2Wire, host: str = "www.example.org") -> int:
    return client.open("/ws", method="CONNECT", host=host, pseudo=WEBSOCKET, fields=FIELDS, end_stream=False)


def opened(client: Http2Wire, stream: int) -> None:
    client.wait(lambda: client.streams[stream].status, "the answer")
    assert client.streams[stream].status == 200


def test_the_server_announces_it(client: Http2Wire) -> None:
    client.get()
    assert client.conn.remote_settings.enable_connect_protocol == 1


def test_a_websocket_is_translated(stage: Stage, client: Http2Wire) -> None:
    stage.play(switching(echo))
    stream = open_socket(client)
    opened(client, stream)
    head = stage.reached().partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
    assert head.startswith(b"GET /ws HTTP/1.1\r\nHost: www.example.org\r\n")
    fields = [(name.lower(), value) for name, value in fields_of(head)]
    assert ("upgrade", "websocket") in fields
    assert ("connection", "Upgrade") in fields
    assert ("origin", "https://www.example.org") in fields
    (key,) = [value for name, value in fields if name == "sec-websocket-key"]
    assert key != "theirs"
    assert len(base64.b64decode(key)) == 16
    answer = client.streams[stream]
    assert answer.get("sec-websocket-protocol") == "chat"
    assert not {"upgrade", "connection", "sec-websocket-accept", "content-length"} & {name for name, _ in answer.fields}
    client.write(stream, b"hello")
    client.wait(lambda: bytes(answer.body) == b"hello", "the echo")
    wait_until(lambda: stage.counter("tunnels_open") == 1, "the tunnel to be counted")
    client.write(stream, b"", end_stream=True)
    assert client.finish(stream).ended
    wait_until(lambda: stage.counter("tunnels_open") == 0, "the tunnel to end")
    wait_until(lambda: any('"CONNECT /ws HTTP/2.0" 101' in line for line in stage.appliance.access_lines()), "its line")


def test_much_goes_both_ways_beside_other_streams(stage: Stage, client: Http2Wire) -> None:
    stage.play(switching(echo))
    stream = open_socket(client)
    opened(client, stream)
    sent = bytes(range(256)) * (MEGABYTES // 256)
    half = len(sent) // 2
    client.write(stream, sent[:half])
    stage.play(answering())
    assert client.get("/beside").status == 200
    client.write(stream, sent[half:])
    client.wait(lambda: len(client.streams[stream].body) == len(sent), "all of the echo", 60)
    assert bytes(client.streams[stream].body) == sent


def test_what_the_client_says_before_the_answer_is_kept(stage: Stage, client: Http2Wire) -> None:
    go = threading.Event()

    def play(wire: Wire) -> None:
        assert go.wait(10)
        switching(echo)(wire)

    stage.play(play)
    stream = open_socket(client)
    client.write(stream, b"early")
    go.set()
    client.wait(lambda: bytes(client.streams[stream].body) == b"early", "the echo")


@pytest.mark.parametrize("accept", [b"wrong", b""])
def test_an_answer_that_does_not_fit_the_key_is_refused(stage: Stage, client: Http2Wire, accept: bytes) -> None:
    stage.play(switching(echo, accept))
    assert client.finish(open_socket(client)).status == 502
    assert stage.counter("tunnels_open") == 0


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", 502),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 502),
        (b"HTTP/1.1 403 Forbidden\r\nConnection: close\r\nContent-Length: 2\r\n\r\nno", 403),
        (b"HTTP/1.1 302 Found\r\nConnection: close\r\nLocation: /login\r\nContent-Length: 0\r\n\r\n", 302),
    ],
    ids=["200", "204", "403", "302"],
)
def test_only_a_switch_opens_it(stage: Stage, client: Http2Wire, answer: bytes, status: int) -> None:
    """A 200 of the upstream's would be taken for an open tunnel."""
    stage.play(answering(answer))
    assert client.finish(open_socket(client)).status == status
    stage.play(answering())
    assert client.get().status == 200


def test_a_protocol_that_the_route_does_not_switch_to(stage: Stage, client: Http2Wire) -> None:
    assert client.finish(open_socket(client, "none.example.org")).status == 501
    other = client.open("/", method="CONNECT", pseudo=[(":protocol", "irc")], end_stream=False)
    assert client.finish(other).status == 501
    assert not stage.upstream.wires


def test_the_upstream_ends_it(stage: Stage, client: Http2Wire) -> None:
    stage.play(switching(lambda wire: wire.send(b"last words")))
    answer = client.finish(open_socket(client))
    assert (answer.status, bytes(answer.body), answer.ended) == (200, b"last words", True)
    wait_until(lambda: stage.counter("tunnels_open") == 0, "the tunnel to end")


def test_the_client_resets_it(stage: Stage, client: Http2Wire) -> None:
    gone = threading.Event()

    def wait_for_end(wire: Wire) -> None:
        assert wire.at_end()
        gone.set()

    stage.play(switching(wait_for_end))
    stream = open_socket(client)
    opened(client, stream)
    client.conn.reset_stream(stream, 8)
    client.flush()
    assert gone.wait(10)
    wait_until(lambda: stage.counter("tunnels_open") == 0, "the tunnel to end")


def test_silence_ends_it(stage: Stage, client: Http2Wire) -> None:
    stage.play(switching(echo))
    before = stage.counter("timeouts_tunnel")
    answer = client.finish(open_socket(client, "brief.example.org"))
    assert (answer.status, answer.ended) == (200, True)
    assert stage.counter("timeouts_tunnel") == before + 1
    stage.play(answering())
    assert client.get().status == 200, "the connection lives on"


def test_a_window_that_stays_closed_ends_it(stage: Stage) -> None:
    stage.play(switching(echo))
    client = connect_http2(stage.appliance, settings={4: 0})
    stream = open_socket(client)
    opened(client, stream)
    client.held.add(stream)
    client.write(stream, bytes(20_000))
    assert client.finish(stream, 30).reset == 8
    wait_until(lambda: stage.counter("tunnels_open") == 0, "the tunnel to end")
    client.close()
