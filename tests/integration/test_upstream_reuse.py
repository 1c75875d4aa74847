"""Which upstream connections carry a second request, and when a request may be sent twice."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.harness import Script, Wire, wait_until
from tests.harness.stage import Stage, open_stage

HOST = b"Host: www.example.org\r\n"
GET = b"GET / HTTP/1.1\r\n" + HOST + b"\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
EVIL = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil"
PATIENCE_SECS = 20.0


@pytest.fixture(scope="module")
def theatre() -> Iterator[Stage]:
    with open_stage() as stage:
        yield stage


class Cast:
    """The first connection plays ``first``, every other one answers ``ok``; ``closed``: the first has been closed."""

    def __init__(self, stage: Stage, first: Script) -> None:
        self._first = first
        self._lock = threading.Lock()
        self._begun = False
        self.closed = threading.Event()
        stage.play(self._play)

    def _play(self, wire: Wire) -> None:
        with self._lock:
            is_first, self._begun = not self._begun, True
        if is_first:
            self._first(wire)
            assert wire.at_end()
            self.closed.set()
        else:
            try:
                while True:
                    wire.read_body(wire.read_head())
                    wire.send(OK)
            except EOFError:
                return

    def assert_closed(self) -> None:
        assert self.closed.wait(PATIENCE_SECS), "the proxy did not close the connection"


def test_a_clean_connection_is_used_again_by_any_client(stage: Stage) -> None:
    before = stage.counter("upstream_connects")
    for _ in range(5):
        assert stage.ask(GET).body == b"ok"
    assert stage.counter("upstream_connects") == before + 1
    wait_until(lambda: stage.counter("upstream_idle") == 1, "the idle connection to be counted")


# -- responses that nobody asked for


def test_a_second_response_sent_with_the_first_reaches_nobody(stage: Stage) -> None:
    def play(wire: Wire) -> None:
        wire.read_head()
        wire.send(OK + EVIL)

    cast = Cast(stage, play)
    client = stage.client()
    for _ in range(2):
        assert client.request(GET).body == b"ok"
    cast.assert_closed()
    assert b"evil" not in client.received


def test_a_second_response_sent_right_after_the_first_reaches_nobody(stage: Stage) -> None:
    sent = threading.Event()

    def play(wire: Wire) -> None:
        wire.read_head()
        wire.send(OK)
        wire.send(EVIL)
        sent.set()

    cast = Cast(stage, play)
    assert stage.ask(GET).body == b"ok"
    assert sent.wait(PATIENCE_SECS)
    for _ in range(3):
        assert stage.ask(GET).body == b"ok"
    cast.assert_closed()


def test_a_second_response_sent_later_closes_the_pooled_connection(stage: Stage) -> None:
    answered = threading.Event()

    def play(wire: Wire) -> None:
        wire.read_head()
        wire.send(OK)
        assert answered.wait(PATIENCE_SECS)
        wire.send(EVIL)

    cast = Cast(stage, play)
    assert stage.ask(GET).body == b"ok"
    answered.set()
    cast.assert_closed()
    assert stage.ask(GET).body == b"ok"


def test_a_second_response_sent_just_before_the_next_request_reaches_nobody(stage: Stage) -> None:
    """The worker is stopped while the response and then the request arrive, so that both wait for it."""
    for _ in range(5):
        answered, sent = threading.Event(), threading.Event()

        def play(wire: Wire, answered: threading.Event = answered, sent: threading.Event = sent) -> None:
            wire.read_head()
            wire.send(OK)
            assert answered.wait(PATIENCE_SECS)
            wire.send(EVIL)
            sent.set()

        cast = Cast(stage, play)
        client, other = stage.client(), stage.client()
        assert client.request(GET).body == b"ok"
        (worker,) = stage.appliance.workers
        os.kill(worker, signal.SIGSTOP)
        try:
            # The other client's request arrives first: the event loop may look at it before the upstream's bytes.
            other.send(GET)
            answered.set()
            assert sent.wait(PATIENCE_SECS)
        finally:
            os.kill(worker, signal.SIGCONT)
        assert other.read_response().body == b"ok"
        assert client.request(GET).body == b"ok"
        cast.assert_closed()
        stage.strike()


@pytest.mark.parametrize("framing", ["length", "chunked", "no content", "head"])
def test_a_response_longer_than_announced_is_cut_and_its_connection_closed(stage: Stage, framing: str) -> None:
    responses = {
        "length": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\n\r\n",
        "chunked": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\nover",
        "no content": b"HTTP/1.1 204 No Content\r\n\r\nover",
        "head": b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nover",
    }

    def play(wire: Wire) -> None:
        wire.read_head()
        wire.send(responses[framing])

    cast = Cast(stage, play)
    client = stage.client()
    first = client.request(GET.replace(b"GET", b"HEAD") if framing == "head" else GET)
    assert first.body == (b"" if framing in ("head", "no content") else b"ok")
    cast.assert_closed()
    assert client.request(GET).body == b"ok"


def test_a_connection_whose_request_was_not_finished_is_not_used_again(stage: Stage) -> None:
    def play(wire: Wire) -> None:
        wire.read_head()
        wire.send(OK)

    cast = Cast(stage, play)
    client = stage.client()
    assert client.request(b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 10\r\n\r\n").body == b"ok"
    cast.assert_closed()
    assert stage.ask(GET).body == b"ok"


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n",
    ],
    ids=["close", "HTTP/1.0"],
)
def test_a_connection_that_the_upstream_gives_up_is_not_used_again(stage: Stage, head: bytes) -> None:
    def play(wire: Wire) -> None:
        wire.read_head()
        wire.send(head + b"ok")

    cast = Cast(stage, play)
    for _ in range(2):
        assert stage.ask(GET).body == b"ok"
    cast.assert_closed()


def test_a_connection_of_a_client_that_left_is_not_used_again(stage: Stage) -> None:
    asked = threading.Event()

    def play(wire: Wire) -> None:
        wire.read_head()
        asked.set()

    cast = Cast(stage, play)
    client = stage.client()
    client.send(GET)
    assert asked.wait(PATIENCE_SECS)
    client.close()
    cast.assert_closed()
    assert stage.ask(GET).body == b"ok"


def test_an_idle_connection_is_closed_after_its_time() -> None:
    def configure(urls: Sequence[str]) -> dict[str, Any]:
        (url,) = urls
        return {"upstream_idle_timeout_secs": 0.3, "sites": [{"hosts": ["*"], "upstreams": [url]}]}

    with open_stage(configure) as stage:

        def play(wire: Wire) -> None:
            wire.read_head()
            wire.send(OK)

        cast = Cast(stage, play)
        assert stage.ask(GET).body == b"ok"
        cast.assert_closed()
        stage.strike()


# -- retries


def dying(stage: Stage, then: Script) -> Cast:
    """A pooled connection that ends without a word once the next request has been sent on it."""

    def play(wire: Wire) -> None:
        wire.read_head()
        wire.send(OK)
        wire.read_head()
        then(wire)
        wire.reset()

    class Dying(Cast):
        def _play(self, wire: Wire) -> None:
            with self._lock:
                is_first, self._begun = not self._begun, True
            if is_first:
                play(wire)
                return
            self._begun = True
            super()._play(wire)

    return Dying(stage, play)


def nothing(wire: Wire) -> None: ...


@pytest.mark.parametrize("method", [b"GET", b"HEAD", b"OPTIONS", b"DELETE", b"PUT"])
def test_an_idempotent_request_on_a_dead_pooled_connection_is_sent_again(stage: Stage, method: bytes) -> None:
    dying(stage, nothing)
    before = stage.counter("upstream_retries")
    client = stage.client()
    assert client.request(GET).status == 200
    assert client.request(method + b" / HTTP/1.1\r\n" + HOST + b"\r\n").status == 200
    assert stage.counter("upstream_retries") == before + 1
    assert len(stage.upstream.wires) == 2


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 0\r\n\r\n",
        b"PATCH / HTTP/1.1\r\n" + HOST + b"\r\n",
        b"PUT / HTTP/1.1\r\n" + HOST + b"Content-Length: 3\r\n\r\nabc",
        b"GET / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n",
    ],
    ids=["POST", "PATCH", "PUT with a body", "GET with a body"],
)
def test_any_other_request_is_sent_once(stage: Stage, request_bytes: bytes) -> None:
    dying(stage, nothing)
    before = stage.counter("upstream_retries")
    client = stage.client()
    assert client.request(GET).status == 200
    assert client.request(request_bytes).status == 502
    assert stage.counter("upstream_retries") == before
    assert len(stage.upstream.wires) == 1


@pytest.mark.parametrize("part", [b"HTTP/1.1 2", b"HTTP/1.1 103 Early Hints\r\n\r\n"], ids=["a head", "interim"])
def test_a_get_is_not_sent_again_after_bytes_of_a_response(stage: Stage, part: bytes) -> None:
    dying(stage, lambda wire: wire.send(part))
    before = stage.counter("upstream_retries")
    client = stage.client()
    assert client.request(GET).status == 200
    client.send(GET)
    response = client.read_response()
    while response.status < 200:
        response = client.read_response()
    assert response.status == 502
    assert stage.counter("upstream_retries") == before
    assert len(stage.upstream.wires) == 1


def test_a_get_on_a_fresh_connection_is_not_sent_again(stage: Stage) -> None:
    def play(wire: Wire) -> None:
        wire.read_head()

    stage.play(play)
    before = stage.counter("upstream_retries")
    assert stage.ask(GET).status == 502
    assert stage.counter("upstream_retries") == before
    assert len(stage.upstream.wires) == 1


def test_a_request_that_is_sent_again_waits_for_its_own_dead_connection_to_be_counted_out() -> None:
    def configure(urls: Sequence[str]) -> dict[str, Any]:
        return {"max_upstream_connections": 1, "sites": [{"hosts": ["*"], "upstreams": [urls[0]]}]}

    with open_stage(configure) as stage:
        dying(stage, nothing)
        client = stage.client()
        for _ in range(3):
            assert client.request(GET).body == b"ok"
        assert stage.counter("upstream_retries") == 1
        stage.strike()


def test_many_pooled_connections_dead_at_once_do_not_fail_a_request(stage: Stage) -> None:
    """An upstream that was started again: every pooled connection is found dead before it is used."""
    together = threading.Barrier(8)

    def play(wire: Wire) -> None:
        wire.read_head()
        together.wait(PATIENCE_SECS)
        wire.send(OK)
        assert wire.at_end()

    stage.play(play)
    clients = [stage.client() for _ in range(8)]
    for client in clients:
        client.send(GET)
    for client in clients:
        assert client.read_response().body == b"ok"
    stage.upstream.start_over()
    for client in clients:
        assert client.request(b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 1\r\n\r\na").body == b"ok"
