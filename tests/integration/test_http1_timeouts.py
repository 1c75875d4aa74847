"""Each timeout, by what it bounds; and what it must not bound."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import StartAppliance
from tests.harness import RawUpstream, Wire, wait_until
from tests.harness.stage import Stage, open_stage

HOST = b"Host: www.example.org\r\n"
GET = b"GET / HTTP/1.1\r\n" + HOST + b"\r\n"
POST = b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 20\r\n\r\n"
STEP_SECS = 0.1
"""A fifth of each timeout: the pace of who is slow but steady."""


@pytest.fixture(scope="module")
def theatre() -> Iterator[Stage]:
    def configure(urls: Sequence[str]) -> dict[str, Any]:
        return {
            "header_timeout_secs": 0.5,
            "header_total_timeout_secs": 2,
            "connection_idle_timeout_secs": 0.5,
            "request_body_timeout_secs": 0.5,
            "write_timeout_secs": 0.5,
            "sites": [
                {"hosts": ["*"], "upstreams": [urls[0]]},
                {"hosts": ["patient.example.org"], "upstreams": [urls[0]], "request_body_timeout_secs": 30},
            ],
        }

    with open_stage(configure) as stage:
        yield stage


def pause() -> None:
    threading.Event().wait(STEP_SECS)


def test_a_client_that_says_nothing_is_closed(stage: Stage) -> None:
    before = stage.counter("timeouts_header")
    client = stage.client()
    assert client.at_end()
    assert not client.received
    assert stage.counter("timeouts_header") == before + 1


def test_a_head_that_stops_is_answered_408(stage: Stage) -> None:
    before = stage.counter("timeouts_header")
    client = stage.client()
    client.send(GET[:10])
    response = client.read_response()
    assert (response.status, response.get("Connection")) == (408, "close")
    assert client.at_end()
    assert stage.counter("timeouts_header") == before + 1


def test_a_second_head_that_stops_is_answered_408(stage: Stage) -> None:
    client = stage.client()
    assert client.request(GET).status == 200
    client.send(GET[:10])
    assert client.read_response().status == 408


def test_a_slow_but_steady_head_passes_within_its_total(stage: Stage) -> None:
    client = stage.client()
    for start in range(0, len(GET), 6):
        pause()
        client.send(GET[start : start + 6])
    assert client.read_response().status == 200


def test_a_head_that_never_ends_is_answered_408_after_its_total(stage: Stage) -> None:
    client = stage.client()
    client.send(GET[:-2] + b"X: ")
    stop = threading.Event()

    def drip() -> None:
        while not stop.wait(STEP_SECS):
            try:
                client.send(b"x")
            except OSError:
                return

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        assert client.read_response().status == 408
    finally:
        stop.set()
        thread.join()


def test_an_idle_connection_is_closed_without_a_word(stage: Stage) -> None:
    before = stage.counter("timeouts_idle")
    client = stage.client()
    assert client.request(GET).status == 200
    assert client.at_end()
    assert stage.counter("timeouts_idle") == before + 1


def test_the_idle_time_runs_only_between_exchanges(stage: Stage) -> None:
    def play(wire: Wire) -> None:
        wire.read_head()
        for _ in range(10):
            pause()
        wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        wire.read_to_end()

    stage.play(play)
    assert stage.ask(GET).body == b"ok"


def test_a_body_that_stops_is_answered_408(stage: Stage) -> None:
    cut = threading.Event()

    def play(wire: Wire) -> None:
        wire.read_head()
        assert wire.read_to_end() == b"hello"
        cut.set()

    stage.play(play)
    before = stage.counter("timeouts_body")
    client = stage.client()
    client.send(POST + b"hello")
    response = client.read_response("POST")
    assert (response.status, response.get("Connection")) == (408, "close")
    assert client.at_end()
    assert stage.counter("timeouts_body") == before + 1
    assert cut.wait(10)


def test_a_slow_but_steady_upload_passes_however_long_it_takes(stage: Stage) -> None:
    client = stage.client()
    client.send(POST)
    for _ in range(20):
        pause()
        client.send(b".")
    assert client.read_response("POST").body == b"ok"


def test_a_route_may_be_more_patient(stage: Stage) -> None:
    client = stage.client()
    client.send(POST.replace(b"www.", b"patient."))
    for _ in range(10):
        pause()
    client.send(b"." * 20)
    assert client.read_response("POST").body == b"ok"


def test_a_client_that_stops_reading_is_reset(stage: Stage) -> None:
    """The upstream meets the end of its connection while it still has more to send."""
    ended = threading.Event()
    before = stage.counter("timeouts_write")

    def play(wire: Wire) -> None:
        wire.read_head()
        wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
        try:
            while True:
                wire.send(bytes(1_000_000))
        finally:
            ended.set()

    stage.play(play)
    client = stage.client()
    client.send(GET)
    assert ended.wait(10)
    wait_until(lambda: stage.counter("timeouts_write") == before + 1, "the timeout to be counted")
    wait_until(lambda: stage.counter("connections_open") == 0, "the connection to be let go")


def test_a_slow_but_steady_reader_gets_everything(stage: Stage) -> None:
    """It takes a bit at each step, so that the whole lasts far longer than the timeout."""
    size = 8_000_000

    def play(wire: Wire) -> None:
        wire.read_head()
        wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + bytes(size))
        wire.read_to_end()

    stage.play(play)
    client = stage.client()
    client.send(GET)
    client.read_head()
    for _ in range(20):
        pause()
        assert client.read_exactly(size // 20) == bytes(size // 20)


def test_an_upstream_that_does_not_read_is_a_gateway_timeout(stage: Stage) -> None:
    def play(wire: Wire) -> None:
        wire.read_head()
        ended.wait(10)

    ended = threading.Event()
    stage.play(play)
    client = stage.client()
    client.send(b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 100000000\r\n\r\n")

    def push() -> None:
        try:
            while True:
                client.send(bytes(1_000_000))
        except OSError:
            return

    thread = threading.Thread(target=push)
    thread.start()
    try:
        assert client.read_response("POST").status == 504
    finally:
        ended.set()
        client.sock.close()
        thread.join()


def test_an_upstream_that_takes_no_more_and_stays_silent_is_a_gateway_timeout(
    appliance: StartAppliance, upstream: Callable[..., RawUpstream], tmp_path: Path
) -> None:
    """It is the upstream that owes something then: the client, which is not read any more, is not blamed with 408."""
    asked, over = threading.Event(), threading.Event()

    def play(wire: Wire) -> None:
        wire.read_head()
        wire.sock.shutdown(socket.SHUT_RD)  # of a Unix socket: the proxy's next write fails, its reads wait
        asked.set()
        over.wait(30)

    back = upstream(play, unix_path=str(tmp_path / "u"))
    front = appliance({"request_body_timeout_secs": 1, "upstream_response_timeout_secs": 3}, upstream=back.url)
    try:
        with front.connect() as client:
            client.send(POST + b"0123")
            assert asked.wait(10)
            client.send(b"4567")
            assert client.read_response("POST").status == 504
    finally:
        over.set()
