"""What is taken for a read that does not end."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from proxy.stream.read_guard import LOOK_SECS, ReadGuard
from tests.harness import wait_until

MANY_LOOKS_SECS = 6 * LOOK_SECS


class Reader:
    """Something that is read from."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.was_cut = threading.Event()

    @property
    def descriptor(self) -> int:
        """The socket's."""
        return self.sock.fileno()

    def cut(self) -> None:
        """Called by the loop."""
        self.was_cut.set()


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture
def guard(loop: asyncio.AbstractEventLoop) -> Iterator[ReadGuard]:
    guard = ReadGuard()
    guard.start(loop)
    yield guard
    guard.stop()


@pytest.fixture
def reader() -> Iterator[Reader]:
    near, far = socket.socketpair()
    with near, far:
        near.settimeout(1)
        yield Reader(near)


def work(secs: float) -> None:
    """Keep the processor busy."""
    ends_at = time.thread_time() + secs
    while time.thread_time() < ends_at:
        pass


def test_a_read_that_waits_for_the_processor_is_left_alone(guard: ReadGuard, reader: Reader) -> None:
    """Which is what a read on a busy machine does: it is the same at many looks, and has done nothing."""
    guard.turn += 1
    guard.reading = reader
    time.sleep(MANY_LOOKS_SECS)
    guard.reading = None
    assert guard.ended == 0
    with pytest.raises(TimeoutError):
        reader.sock.recv(1)


def test_reads_one_after_another_are_left_alone(guard: ReadGuard, reader: Reader) -> None:
    ends_at = time.monotonic() + MANY_LOOKS_SECS
    while time.monotonic() < ends_at:
        guard.turn += 1
        guard.reading = reader
        work(LOOK_SECS / 50)
        guard.reading = None
    assert guard.ended == 0


def test_a_read_that_works_and_works_is_cut_and_its_stream_told(
    guard: ReadGuard, reader: Reader, loop: asyncio.AbstractEventLoop
) -> None:
    guard.turn += 1
    guard.reading = reader
    for _ in range(100):  # so long that looks fall into it on a busy machine too
        work(LOOK_SECS)
        if guard.ended:
            break
    guard.reading = None
    assert guard.ended == 1
    assert reader.sock.recv(1) == b""
    assert not reader.was_cut.is_set(), "it is the loop that tells"

    async def turn() -> None:
        await asyncio.sleep(0)

    def told() -> bool:
        loop.run_until_complete(turn())
        return reader.was_cut.is_set()

    wait_until(told, "the stream is told")
