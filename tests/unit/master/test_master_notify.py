"""What the service manager is told; a datagram socket plays the manager."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.master.notify import MAX_UNSENT, STATUS_SECS, Notifier
from proxy.observe import counters
from proxy.observe.counters import CounterBook

NOW = 1000.0


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.setblocking(False)
        yield sock


def address_of(sock: socket.socket) -> str:
    name = sock.getsockname()
    return "@" + name[1:].decode() if isinstance(name, bytes) else str(name)


def told(sock: socket.socket) -> list[str]:
    messages = []
    while True:
        try:
            messages.append(sock.recv(65_536).decode())
        except BlockingIOError:
            return messages


def book(age_secs: float | None, connections: int = 0) -> CounterBook:
    made = CounterBook(2)
    if age_secs is not None:
        made.page(1)[counters.HEARTBEAT_MS] = int((NOW - age_secs) * 1000)
        made.page(1)[counters.READY] = 1
    made.page(0)[counters.CONNECTIONS_OPEN] = connections
    return made


def test_a_start_and_an_end(manager: socket.socket) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": address_of(manager)})
    notifier.ready()
    notifier.stopping()
    assert told(manager) == ["READY=1", "STOPPING=1\nSTATUS=draining"]


def test_an_abstract_socket() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(b"\0reverse-proxy-test-" + os.urandom(8).hex().encode())
        manager.setblocking(False)
        Notifier({"NOTIFY_SOCKET": address_of(manager)}).ready()
        assert told(manager) == ["READY=1"]


def test_a_reload_tells_its_monotonic_time(manager: socket.socket) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": address_of(manager)})
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    notifier.reloading()
    after = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    (message,) = told(manager)
    first, second = message.splitlines()
    assert first == "RELOADING=1"
    name, value = second.split("=")
    assert name == "MONOTONIC_USEC"
    assert before <= int(value) <= after


def test_the_variables_are_gone_for_the_children(manager: socket.socket) -> None:
    environ = {"NOTIFY_SOCKET": address_of(manager), "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1", "HOME": "/"}
    Notifier(environ)
    assert environ == {"HOME": "/"}


def test_the_status_is_sent_when_it_has_changed_and_not_too_often(manager: socket.socket) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": address_of(manager)})
    notifier.tick(book(0), 8, NOW, stopping=False)
    notifier.tick(book(0, 3), 8, NOW + STATUS_SECS / 2, stopping=False)
    assert told(manager) == ["STATUS=0 of 8 permits held, 1 of 2 workers ready"]
    notifier.tick(book(0, 3), 8, NOW + STATUS_SECS, stopping=False)
    notifier.tick(book(0, 3), 8, NOW + 2 * STATUS_SECS, stopping=False)
    assert told(manager) == ["STATUS=3 of 8 permits held, 1 of 2 workers ready"]


def test_the_watchdog_hears_of_a_beating_worker_at_half_its_time(manager: socket.socket) -> None:
    notifier = Notifier(
        {"NOTIFY_SOCKET": address_of(manager), "WATCHDOG_USEC": "4000000", "WATCHDOG_PID": str(os.getpid())}
    )
    for after_secs in (0.0, 1.9, 2.0, 3.9, 4.0):
        notifier.tick(book(-after_secs), 8, NOW + after_secs, stopping=False)
    assert told(manager).count("WATCHDOG=1") == 3
    assert notifier.wait_secs(NOW + 4.5) == 1.5
    assert notifier.wait_secs(NOW + 9) == 0


@pytest.mark.parametrize("age_secs", [None, 6.0])
def test_the_watchdog_hears_nothing_while_no_worker_beats(manager: socket.socket, age_secs: float | None) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": address_of(manager), "WATCHDOG_USEC": "4000000"})
    notifier.tick(book(age_secs), 8, NOW, stopping=False)
    assert "WATCHDOG=1" not in told(manager)
    notifier.tick(book(age_secs), 8, NOW + 2, stopping=True)
    assert told(manager) == ["WATCHDOG=1"]


@pytest.mark.parametrize(
    "variables",
    [
        {"WATCHDOG_USEC": "4000000", "WATCHDOG_PID": "1"},
        {"WATCHDOG_USEC": "soon"},
        {"WATCHDOG_USEC": "4000000", "WATCHDOG_PID": "x"},
        {"WATCHDOG_USEC": "0"},
        {},
    ],
)
def test_no_watchdog_that_waits_for_us(manager: socket.socket, variables: dict[str, str]) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": address_of(manager), **variables})
    notifier.tick(book(0), 8, NOW, stopping=False)
    assert "WATCHDOG=1" not in told(manager)
    assert notifier.wait_secs(NOW) == float("inf")


def test_a_full_queue_neither_blocks_nor_loses_readiness(manager: socket.socket) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": address_of(manager), "WATCHDOG_USEC": "2000000"})
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as flood:
        flood.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                flood.sendto(b"x", manager.getsockname())
    notifier.ready()
    for second in range(3):
        notifier.tick(book(0), 8, NOW + second, stopping=False)
    assert set(told(manager)) == {"x"}
    notifier.tick(book(0), 8, NOW + 3, stopping=False)
    messages = told(manager)
    assert messages[0] == "READY=1"
    assert messages.count("WATCHDOG=1") == 1, "an old beat is not sent late"


def test_a_manager_that_is_not_there_is_no_fault(tmp_path: Path) -> None:
    for address in (str(tmp_path / "none"), "/" + "x" * 300, "@", ""):
        notifier = Notifier({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "2000000"})
        for _ in range(2 * MAX_UNSENT):
            notifier.ready()
        notifier.tick(book(0), 8, NOW, stopping=False)
        notifier.stopping()
