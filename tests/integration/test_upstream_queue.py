"""``max_upstream_connections``: who gets none waits in turn, bounded in time."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.harness import Wire, wait_until
from tests.harness.stage import Stage, open_stage

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
PATIENCE_SECS = 20.0


def get(path: str, host: str = "www.example.org") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()


@pytest.fixture(scope="module")
def theatre() -> Iterator[Stage]:
    def configure(urls: Sequence[str]) -> dict[str, Any]:
        first, second = urls
        return {
            "max_upstream_connections": 1,
            "upstream_queue_timeout_secs": 2,
            "sites": [
                {"hosts": ["*"], "upstreams": [first]},
                {"hosts": ["second.example.org"], "upstreams": [second]},
            ],
        }

    with open_stage(configure, upstreams=2) as stage:
        yield stage


class Gate:
    """Holds the first answer back until ``open``; notes the paths in the order in which they came."""

    def __init__(self) -> None:
        self._go = threading.Event()
        self.paths: list[str] = []

    def open(self) -> None:
        self._go.set()

    def play(self, wire: Wire) -> None:
        try:
            while True:
                self.paths.append(wire.read_head().split(b" ")[1].decode())
                assert self._go.wait(PATIENCE_SECS)
                wire.send(OK)
        except EOFError:
            return


@pytest.fixture
def gate(stage: Stage) -> Iterator[Gate]:
    gate = Gate()
    stage.play(gate.play)
    yield gate
    gate.open()


def occupy(stage: Stage, gate: Gate) -> Wire:
    client = stage.client()
    client.send(get("/first"))
    wait_until(lambda: gate.paths == ["/first"], "the first request to reach the upstream")
    return client


def queued(stage: Stage, count: int) -> None:
    wait_until(lambda: stage.counter("upstream_queued") == count, f"{count} requests to wait")


def test_requests_wait_and_are_served_in_order(stage: Stage, gate: Gate) -> None:
    waiting = [stage.client() for _ in range(5)]  # their handshakes are no part of the wait
    clients = [occupy(stage, gate), *waiting]
    for number, client in enumerate(waiting):
        client.send(get(f"/{number}"))
        queued(stage, number + 1)
    gate.open()
    for client in clients:
        assert client.read_response().body == b"ok"
    assert gate.paths == ["/first", *(f"/{number}" for number in range(5))]
    assert len(stage.upstream.wires) == 1
    queued(stage, 0)


def test_who_waits_too_long_is_told_to_come_again(stage: Stage, gate: Gate) -> None:
    before = stage.counter("upstream_queue_timeouts")
    occupied = occupy(stage, gate)
    response = stage.ask(get("/late"))
    assert (response.status, response.get("Retry-After"), response.get("Connection")) == (503, "1", None)
    assert stage.counter("upstream_queue_timeouts") == before + 1
    gate.open()
    assert occupied.read_response().body == b"ok"
    assert gate.paths == ["/first"]


def test_a_client_that_leaves_gives_its_place_up(stage: Stage, gate: Gate) -> None:
    occupied = occupy(stage, gate)
    leaver, stayer = stage.client(), stage.client()
    leaver.send(get("/leaver"))
    queued(stage, 1)
    stayer.send(get("/stayer"))
    queued(stage, 2)
    leaver.close()
    queued(stage, 1)
    gate.open()
    assert occupied.read_response().body == b"ok"
    assert stayer.read_response().body == b"ok"
    assert gate.paths == ["/first", "/stayer"]


def test_a_request_with_a_body_waits_with_its_body(stage: Stage, gate: Gate) -> None:
    occupied = occupy(stage, gate)
    client = stage.client()
    body = bytes(1_000_000)
    sender = threading.Thread(
        target=client.send,
        args=(b"POST /post HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body,),
    )
    sender.start()
    queued(stage, 1)

    def play(wire: Wire) -> None:
        head = wire.read_head()
        wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n%7d" % len(wire.read_body(head)))

    stage.play(play)
    occupied.reset()  # its upstream connection is closed, so that a new one is made for the next in the queue
    assert client.read_response().body == b"1000000"
    sender.join(PATIENCE_SECS)


def test_an_idle_connection_of_another_upstream_gives_way(stage: Stage) -> None:
    for _ in range(3):
        assert stage.ask(get("/")).body == b"ok"
        assert stage.ask(get("/", "second.example.org")).body == b"ok"
    assert [len(upstream.wires) for upstream in stage.upstreams] == [3, 3]
    assert stage.counter("upstream_open") == 1


def test_a_freed_connection_of_another_upstream_makes_room_for_who_waits(stage: Stage, gate: Gate) -> None:
    occupied = occupy(stage, gate)
    other = stage.client()
    other.send(get("/", "second.example.org"))
    queued(stage, 1)
    gate.open()
    assert occupied.read_response().body == b"ok"
    assert other.read_response().body == b"ok"


def test_a_connect_that_fails_makes_room_for_who_waits(stage: Stage, gate: Gate) -> None:
    """The upstream that was occupied ends without an answer; whoever waited is served."""
    go = threading.Event()

    def play(wire: Wire) -> None:
        wire.read_head()
        go.wait(PATIENCE_SECS)

    stage.play(play)
    client, other = stage.client(), stage.client()
    client.send(get("/"))
    stage.upstream.next_wire()
    other.send(get("/", "second.example.org"))
    queued(stage, 1)
    go.set()
    assert client.read_response().status == 502
    assert other.read_response().body == b"ok"
    wait_until(lambda: stage.counter("upstream_open") <= 1, "the count to be right")
