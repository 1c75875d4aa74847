"""Which of several upstreams is asked, and when one of them is left out."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.harness import FreePorts, RawUpstream, Script, Wire, answering, wait_until
from tests.harness.stage import Stage, open_stage

PATIENCE_SECS = 20.0


@pytest.fixture(scope="module")
def theatre() -> Iterator[Stage]:
    def configure(urls: Sequence[str]) -> dict[str, Any]:
        return {
            "sites": [
                {"hosts": ["*"], "upstreams": [*urls]},
                {"hosts": ["least.example.org"], "upstreams": [*urls], "balance": "least_connections"},
                {"hosts": ["fail.example.org"], "upstreams": [*urls], "max_fails": 2, "fail_timeout_secs": 1},
            ]
        }

    with open_stage(configure, upstreams=3) as stage:
        yield stage


def get(host: str) -> bytes:
    return f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()


def named(stage: Stage) -> None:
    stage.play(*(answering(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n%d" % number) for number in range(3)))


def failing(wire: Wire) -> None:
    wire.read_head()


def test_round_robin_takes_them_in_turn(stage: Stage) -> None:
    named(stage)
    client = stage.client()
    answers = [client.request(get("www.example.org")).body for _ in range(9)]
    assert sorted(answers[:3]) == [b"0", b"1", b"2"]
    assert answers == answers[:3] * 3


def test_least_connections_takes_the_one_with_the_fewest(stage: Stage) -> None:
    asked: list[int] = []
    go = threading.Event()

    def busy(number: int) -> Script:
        def play(wire: Wire) -> None:
            wire.read_head()
            asked.append(number)
            assert go.wait(PATIENCE_SECS)
            wire.send(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 1\r\n\r\n%d" % number)

        return play

    stage.play(*map(busy, range(3)))
    clients = []
    for count in range(1, 10):
        client = stage.client()
        client.send(get("least.example.org"))
        wait_until(lambda count=count: len(asked) == count, "the request to arrive")  # type: ignore[misc]
        clients.append(client)
        loads = [asked.count(number) for number in range(3)]
        assert max(loads) - min(loads) <= 1
    go.set()
    for client in clients:
        assert client.read_response().status == 200


def test_an_upstream_that_fails_is_left_out_and_comes_back(stage: Stage) -> None:
    named(stage)
    stage.upstreams[1].script = failing
    before = stage.counter("upstream_ejected")
    statuses = [stage.ask(get("fail.example.org")).status for _ in range(12)]
    assert statuses.count(502) == 2
    assert stage.counter("upstream_ejected") == before + 1
    named(stage)
    wait_until(lambda: stage.ask(get("fail.example.org")).body == b"1", "the upstream to be asked again")
    answers = [stage.ask(get("fail.example.org")).body for _ in range(6)]
    assert sorted(answers) == [b"0", b"0", b"1", b"1", b"2", b"2"]


def test_failures_in_a_row_count_and_a_success_forgets_them(stage: Stage) -> None:
    named(stage)
    before = stage.counter("upstream_ejected")
    for _ in range(3):
        stage.upstreams[1].start_over()
        stage.upstreams[1].script = failing
        assert [stage.ask(get("fail.example.org")).status for _ in range(3)].count(502) == 1
        stage.upstreams[1].script = answering()
        assert [stage.ask(get("fail.example.org")).status for _ in range(3)].count(502) == 0
    assert stage.counter("upstream_ejected") == before


def test_an_upstream_that_refuses_is_left_out_and_no_client_notices() -> None:
    """Nobody has seen the request when a connect fails, so another upstream is asked."""
    ports = FreePorts()
    with RawUpstream() as up:
        site = {
            "hosts": ["*"],
            "upstreams": [up.url, f"http://127.0.0.1:{ports.take()}"],
            "max_fails": 1,
            "fail_timeout_secs": 600,
        }
        with open_stage(lambda _: {"sites": [site]}) as stage:
            assert {stage.ask(get("a")).status for _ in range(6)} == {200}
            assert stage.counter("upstream_ejected") == 1
            assert stage.counter("upstream_connect_failures") == 1
    ports.release()
