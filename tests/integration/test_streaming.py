"""Bodies stream, each side held back by the other: nothing is collected, however large it is, however slow a side."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from tests.harness import Response, Wire, answering, wait_until
from tests.harness.stage import Stage, open_stage

HOST = b"Host: www.example.org\r\n"
GET = b"GET / HTTP/1.1\r\n" + HOST + b"\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
PIECE = bytes(1_048_576)
HUGE_BYTES = 4 * 1024**3
GROWTH_LIMIT_BYTES = 20_000_000
BOUND_BYTES = 40_000_000
"""Far more than the buffers of the kernel (both sockets, TCP's automatic tuning) and of the proxy together."""
STALL_SECS = 0.5
PATIENCE_SECS = 60.0


@pytest.fixture(scope="module")
def theatre() -> Iterator[Stage]:
    with open_stage() as stage:
        yield stage


def resident(pid: int) -> tuple[int, int]:
    """Resident memory of a process now and at its peak, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    sizes = {
        name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines) if "kB" in rest
    }
    return sizes["VmRSS"], sizes["VmHWM"]


class MemoryWatch:
    """Samples a worker's resident memory until the end of the block; ``growth`` is the largest over the begin."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self.start_bytes = 0
        self.samples: list[int] = []

    def _sample(self) -> None:
        while not self._stop.wait(0.05):
            self.samples.append(resident(self._pid)[0])

    def __enter__(self) -> Self:
        self.start_bytes, _ = resident(self._pid)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def growth(self) -> int:
        """By the samples and by the kernel's own record of the peak."""
        return max(*self.samples, resident(self._pid)[1]) - self.start_bytes


def warm_up(stage: Stage) -> int:
    """The worker's process id, after it has carried a body each way."""
    stage.play(lambda wire: sink(wire, OK))
    assert upload(stage.client(), 50_000_000).body == b"ok"
    stage.play(lambda wire: source(wire, 50_000_000))
    assert download(stage.client()) == 50_000_000
    (worker,) = stage.appliance.workers
    return worker


def sink(wire: Wire, answer: bytes) -> None:
    head = wire.read_head()
    left = int(head.lower().partition(b"content-length:")[2].split()[0])
    left -= wire.unread_bytes  # what had come with the head
    buffer = bytearray(len(PIECE))
    while left:
        size = wire.sock.recv_into(buffer)
        assert size, "the upload was cut"
        left -= size
    wire.send(answer)


def source(wire: Wire, size: int) -> None:
    wire.read_head()
    wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
    left = size
    while left:
        left -= wire.sock.send(PIECE[:left] if left < len(PIECE) else PIECE)


def upload(client: Wire, size: int) -> Response:
    client.sock.settimeout(PATIENCE_SECS)
    client.send(b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: %d\r\n\r\n" % size)
    left = size
    while left:
        client.send(PIECE[:left] if left < len(PIECE) else PIECE)
        left -= min(left, len(PIECE))
    return client.read_response("POST")


def download(client: Wire) -> int:
    """The number of body bytes; they are not kept."""
    client.sock.settimeout(PATIENCE_SECS)
    client.send(GET)
    head = client.read_head()
    size = int(head.lower().partition(b"content-length:")[2].split()[0])
    got = client.unread_bytes
    buffer = bytearray(len(PIECE))
    while got < size:
        count = client.sock.recv_into(buffer)
        assert count, "the download was cut"
        got += count
    return got


def push_until_blocked(sock: socket.socket, limit: int = BOUND_BYTES * 2) -> int:
    """Sends until nothing more is taken for a while: how much that was."""
    sock.settimeout(STALL_SECS)
    sent = 0
    with contextlib.suppress(TimeoutError):
        while sent < limit:
            sent += sock.send(PIECE)
    sock.settimeout(PATIENCE_SECS)
    return sent


# -- one side slow


def test_a_reader_that_stops_holds_the_upstream_back(stage: Stage) -> None:
    total = BOUND_BYTES * 2
    pushed: list[int] = []
    blocked = threading.Event()

    def play(wire: Wire) -> None:
        wire.read_head()
        wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % total)
        sent = push_until_blocked(wire.sock, total)
        pushed.append(sent)
        blocked.set()
        while sent < total:
            sent += wire.sock.send(PIECE[: total - sent])

    stage.play(play)
    client = stage.client()
    client.send(GET)
    assert blocked.wait(PATIENCE_SECS)
    assert pushed[0] < BOUND_BYTES
    head = client.read_head()
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert client.read_exactly(total) == bytes(total)


def test_an_upstream_that_does_not_read_holds_the_client_back(stage: Stage) -> None:
    total = BOUND_BYTES * 2
    go = threading.Event()

    def play(wire: Wire) -> None:
        assert go.wait(PATIENCE_SECS)
        sink(wire, OK)

    stage.play(play)
    client = stage.client()
    client.send(b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: %d\r\n\r\n" % total)
    sent = push_until_blocked(client.sock, total)
    assert sent < BOUND_BYTES
    go.set()
    while sent < total:
        sent += client.sock.send(PIECE[: total - sent])
    assert client.read_response("POST").body == b"ok"


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
def test_a_slow_reader_and_a_slow_upstream_lose_no_byte(stage: Stage, chunked: bool) -> None:
    """Both bodies at the same time, each read in small pieces by a side that lags."""
    size = 3_000_000
    body = bytes(range(256)) * (size // 256)

    def play(wire: Wire) -> None:
        head = wire.read_head()
        wire.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        received = wire.read_body(head)
        for start in range(0, len(received), 10_000):
            piece = received[start : start + 10_000]
            wire.send(b"%x\r\n%b\r\n" % (len(piece), piece))
        wire.send(b"0\r\n\r\n")

    stage.play(play)
    client = stage.client()
    framing = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % len(body)
    client.send(b"POST / HTTP/1.1\r\n" + HOST + framing + b"\r\n\r\n")
    for start in range(0, len(body), 7000):
        piece = body[start : start + 7000]
        client.send(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
    if chunked:
        client.send(b"0\r\n\r\n")
    assert client.read_response("POST").body == body


def test_slow_clients_do_not_stall_others(stage: Stage) -> None:
    stalled = threading.Semaphore(0)
    end = threading.Event()

    def play(wire: Wire) -> None:
        head = wire.read_head()
        if b"/slow" not in head:
            wire.send(OK)
            return
        wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
        push_until_blocked(wire.sock)
        stalled.release()
        end.wait(PATIENCE_SECS)

    stage.play(play)
    for _ in range(10):
        stage.client().send(GET.replace(b"/ ", b"/slow "))
    for _ in range(10):
        assert stalled.acquire(timeout=PATIENCE_SECS)
    stage.play(answering())
    for _ in range(20):
        assert stage.ask(GET).body == b"ok"
    end.set()


def test_many_stalled_downloads_cost_a_bounded_amount_of_memory(stage: Stage) -> None:
    """Fifty clients that do not read, each with an upstream that would send without end."""
    worker = warm_up(stage)
    stalled = threading.Semaphore(0)
    end = threading.Event()

    def play(wire: Wire) -> None:
        wire.read_head()
        wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
        push_until_blocked(wire.sock)
        stalled.release()
        end.wait(PATIENCE_SECS)

    stage.play(play)
    before, _ = resident(worker)
    for _ in range(50):
        stage.client().send(GET)
    for _ in range(50):
        assert stalled.acquire(timeout=PATIENCE_SECS)
    assert resident(worker)[0] - before < 50 * 400_000
    end.set()


# -- huge bodies; last, because they take long


@pytest.mark.timeout(400)
def test_a_4_gb_download_leaves_memory_flat(stage: Stage) -> None:
    worker = warm_up(stage)
    stage.play(lambda wire: source(wire, HUGE_BYTES))
    with MemoryWatch(worker) as watch:
        assert download(stage.client()) == HUGE_BYTES
    assert watch.growth < GROWTH_LIMIT_BYTES
    wait_until(lambda: stage.counter("requests_active") == 0, "the exchange to end")


@pytest.mark.timeout(400)
def test_a_4_gb_upload_leaves_memory_flat(stage: Stage) -> None:
    worker = warm_up(stage)
    stage.play(lambda wire: sink(wire, OK))
    with MemoryWatch(worker) as watch:
        response = upload(stage.client(), HUGE_BYTES)
    assert response.body == b"ok"
    assert watch.growth < GROWTH_LIMIT_BYTES
