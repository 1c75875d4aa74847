"""A reset right behind data: what came is delivered, and the reset is noticed at once, on either side.

The worker is stopped while data and reset arrive, so that it meets both in one wake-up of its event loop.
"""

from __future__ import annotations

import contextlib
import os
import signal
import ssl
import threading
from collections.abc import Iterator

import pytest

from proxy.session.client import LINGER_SECS
from tests.harness import Wire, wait_until
from tests.harness.stage import Stage, open_stage

HOST = b"Host: www.example.org\r\n"
GET = b"GET / HTTP/1.1\r\n" + HOST + b"\r\n"
SIZE = 50_000
"""Fits the window of a fresh connection: what a reset finds unsent is dropped."""
PATIENCE_SECS = 20.0
AT_ONCE_SECS = 5.0
"""Less than the least timeout that would end these connections."""


@pytest.fixture(scope="module")
def theatre() -> Iterator[Stage]:
    with open_stage() as stage:
        yield stage


@contextlib.contextmanager
def worker_stopped(stage: Stage) -> Iterator[None]:
    (worker,) = stage.appliance.workers
    os.kill(worker, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(worker, signal.SIGCONT)


def answer_and_reset(stage: Stage, response: bytes, client: Wire, request: bytes = GET, prelude: bytes = b"") -> None:
    """The upstream sends ``response`` and resets, all of it while the worker looks away.

    ``prelude`` comes before it in peace and is read by the client; it widens the window.
    """
    asked, go, done = threading.Event(), threading.Event(), threading.Event()

    def play(wire: Wire) -> None:
        wire.read_head()
        asked.set()
        wire.send(prelude)
        assert go.wait(PATIENCE_SECS)
        wire.send(response)
        wire.reset()
        done.set()

    stage.play(play)
    client.send(request)
    assert asked.wait(PATIENCE_SECS)
    if prelude:
        client.read_head()
        client.read_exactly(len(prelude.partition(b"\r\n\r\n")[2]))
    with worker_stopped(stage):
        go.set()
        assert done.wait(PATIENCE_SECS)


def test_a_whole_response_before_a_reset_is_delivered(stage: Stage) -> None:
    client = stage.client()
    answer_and_reset(stage, b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % SIZE + bytes(SIZE), client)
    assert client.read_response().body == bytes(SIZE)


@pytest.mark.parametrize("missing", [0, 1], ids=["whole", "cut"])
def test_what_needs_several_reads_before_a_reset_is_delivered(stage: Stage, missing: int) -> None:
    client = stage.client()
    first, rest = 5_000_000, 150_000
    prelude = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (first + rest + missing) + bytes(first)
    answer_and_reset(stage, bytes(rest), client, prelude=prelude)
    client.sock.settimeout(AT_ONCE_SECS)
    if missing:
        with pytest.raises((ConnectionError, ssl.SSLEOFError)):
            client.read_to_end()
    else:
        assert client.read_exactly(rest) == bytes(rest)


def test_a_response_that_a_reset_cuts_is_cut_at_once(stage: Stage) -> None:
    client = stage.client()
    answer_and_reset(stage, b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % SIZE + bytes(SIZE - 1), client)
    client.sock.settimeout(AT_ONCE_SECS)
    with pytest.raises((ConnectionError, ssl.SSLEOFError)):
        client.read_to_end()


def test_a_head_that_a_reset_cuts_is_a_bad_gateway_at_once(stage: Stage) -> None:
    client = stage.client()
    answer_and_reset(stage, b"HTTP/1.1 200", client)
    client.sock.settimeout(AT_ONCE_SECS)
    assert client.read_response().status == 502


def test_an_early_answer_before_a_reset_is_delivered(stage: Stage) -> None:
    """An upstream that closes with a part of the upload unread sends a reset."""
    client = stage.client()
    request = b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 100000000\r\n\r\n" + bytes(1_000_000)
    answer_and_reset(
        stage, b"HTTP/1.1 413 Content Too Large\r\nContent-Length: %d\r\n\r\n" % SIZE + bytes(SIZE), client, request
    )
    response = client.read_response()
    assert (response.status, response.body) == (413, bytes(SIZE))


def listen(wire: Wire) -> None:
    wire.read_to_end()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HT",
        b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 100\r\n\r\nhello",
        b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhel",
    ],
    ids=["head", "body", "chunk"],
)
def test_a_client_that_resets_behind_its_data_is_let_go_at_once(stage: Stage, data: bytes) -> None:
    stage.play(listen)
    client = stage.client()
    wait_until(lambda: stage.counter("connections_open") == 1, "the connection to be open")
    with worker_stopped(stage):
        client.send(data)
        client.reset()
    wait_until(lambda: stage.counter("connections_open") == 0, "the connection to be let go", AT_ONCE_SECS)


@pytest.mark.parametrize("side", ["client", "upstream"])
def test_a_tunnel_ends_at_once_when_a_side_resets_behind_its_data(stage: Stage, side: str) -> None:
    go, done = threading.Event(), threading.Event()
    heard: list[bytes] = []

    def play(wire: Wire) -> None:
        wire.read_head()
        wire.send(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        if side == "upstream":
            assert go.wait(PATIENCE_SECS)
            wire.send(b"last words")
            wire.reset()
            done.set()
        else:
            heard.append(wire.read_to_end())

    stage.play(play)
    client = stage.client()
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
    assert client.request(GET[:-2] + upgrade + b"\r\n").status == 101
    with worker_stopped(stage):
        if side == "upstream":
            go.set()
            assert done.wait(PATIENCE_SECS)
        else:
            client.send(b"last words")
            client.reset()
    if side == "upstream":
        client.sock.settimeout(AT_ONCE_SECS)
        assert client.read_to_end() == b"last words"
    wait_until(lambda: stage.counter("tunnels_open") == 0, "the tunnel to end", AT_ONCE_SECS)
    if side == "client":
        wait_until(lambda: heard == [b"last words"], "the upstream to hear the client", AT_ONCE_SECS)


def test_a_client_that_resets_while_its_upload_is_dropped_is_let_go_at_once(stage: Stage) -> None:
    """The early answer's lingering close, which a reset ends before its time."""

    def play(wire: Wire) -> None:
        wire.read_head()
        wire.send(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n")
        wire.read_to_end()

    stage.play(play)
    client = stage.client()
    assert client.request(b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 100000000\r\n\r\n").status == 401
    with worker_stopped(stage):
        client.send(bytes(SIZE))
        client.reset()
    wait_until(lambda: stage.counter("connections_open") == 0, "the connection to be let go", LINGER_SECS - 1)
