"""When there is no room: who gives way, in which order, and what no client can take from the others."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import StartAppliance
from tests.harness import Appliance, RawUpstream, Wire, cli, connect_tcp, connect_tls, wait_until

REQUEST = b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
GRACE_SECS = 1.0
PATIENCE_SECS = 20.0
WORKERS = 4
TICKS_A_SEC = os.sysconf("SC_CLK_TCK")


def totals(one: Appliance) -> dict[str, int]:
    found: dict[str, int] = one.status()["totals"]
    return found


def evicted(one: Appliance) -> dict[str, int]:
    found = totals(one)
    return {name: found[name] for name in ("evicted_handshakes", "evicted_heads", "evicted_idle")}


def held(one: Appliance, key: str = "permits_held") -> int:
    return sum(worker[key] for worker in one.status()["workers"])


def is_closed(sock: socket.socket, timeout_secs: float = PATIENCE_SECS) -> bool:
    """Whether the other side has closed, or does in time."""
    sock.settimeout(timeout_secs)
    try:
        while sock.recv(65_536):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


@contextlib.contextmanager
def slow_answers(upstream: Callable[..., RawUpstream]) -> Iterator[tuple[str, threading.Event]]:
    """The URL of an upstream that answers ``/slow`` when the event is set, and anything else at once."""
    go_on = threading.Event()

    def play(wire: Wire) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                if b"/slow" in wire.read_head():
                    go_on.wait(120)
                wire.send(OK)

    try:
        yield upstream(play).url, go_on
    finally:
        go_on.set()


def test_who_gives_way_to_a_newcomer_and_in_which_order(
    appliance: StartAppliance, upstream: Callable[..., RawUpstream]
) -> None:
    with slow_answers(upstream) as (url, go_on):
        one = appliance({"max_connections": 4, "eviction_grace_secs": GRACE_SECS}, upstream=url)
        idle = one.connect()
        assert idle.request(REQUEST % b"").status == 200
        busy = one.connect()
        busy.send(REQUEST % b"slow")
        head = one.connect()
        head.send(b"GET / HTTP/1.1\r\nHo")
        stalled = connect_tcp(one.port)
        wait_until(lambda: held(one) == 4, "all permits are held")
        time.sleep(GRACE_SECS)
        newcomers = []
        expected = dict.fromkeys(("evicted_handshakes", "evicted_heads", "evicted_idle"), 0)
        for leaves, counter in zip((stalled, head, idle), tuple(expected), strict=True):
            expected[counter] = 1
            newcomer = one.connect()
            newcomer.send(REQUEST % b"slow")
            newcomers.append(newcomer)
            wait_until(lambda: held(one, "upstream_open") >= len(newcomers) + 1, "its exchange is under way")
            assert evicted(one) == expected
            assert is_closed(leaves.sock)
            assert held(one) == 4
        # Four exchanges: nobody gives way, whoever comes waits in the kernel's queue.
        waiting = socket.create_connection(("127.0.0.1", one.port), 10)
        with contextlib.closing(waiting.dup()) as same:
            assert not is_closed(same, 2 * GRACE_SECS)
        assert totals(one)["evicted_idle"] == 1
        go_on.set()
        for wire in (busy, *newcomers):
            assert wire.read_response().body == b"ok", "no exchange was cut"
        waiting.settimeout(PATIENCE_SECS)
        context = ssl._create_unverified_context()
        with Wire(context.wrap_socket(waiting, server_hostname="localhost")) as late:
            assert late.request(REQUEST % b"").status == 200
        told = cli("why", "--socket", one.admin_socket).stdout
        for reason in ("evicted-handshake", "evicted-head", "evicted-idle"):
            assert reason in told
        wait_until(lambda: any(" admission.evicted " in line for line in one.event_lines()), "it is reported")
        status, metrics = one.health("/metrics")
        assert status == 200
        assert b'reverse_proxy_evictions_total{reason="handshake"} 1' in metrics
        for wire in (idle, head, stalled, busy, *newcomers):
            wire.close()


def test_a_client_has_its_cap_over_all_workers(appliance: StartAppliance, upstream: Callable[..., RawUpstream]) -> None:
    config = {"workers": WORKERS, "max_connections_per_client": 5, "client_cap_exempt": ["127.0.0.9"]}
    with slow_answers(upstream) as (url, _), contextlib.ExitStack() as stack:
        _cap_of_a_client(appliance(config, upstream=url), stack)


def _cap_of_a_client(one: Appliance, stack: contextlib.ExitStack) -> None:
    wait_until(lambda: any(" started " in line for line in one.event_lines()), "the master supervises")

    def enter(source: str) -> Wire | None:
        try:
            wire = stack.enter_context(connect_tls(one.port, source=source))
            wire.request(REQUEST % b"")
        except (OSError, EOFError):
            return None
        return wire

    def inside(source: str, tries: int) -> list[Wire]:
        return [wire for wire in (enter(source) for _ in range(tries)) if wire is not None]

    greedy = inside("127.0.0.2", 30)
    assert len(greedy) == 5, "one after another: exact"
    assert totals(one)["refused_over_client_cap"] == 25
    assert sum(worker["permits_held"] > 0 for worker in one.status()["workers"]) >= 2, "of several workers"
    assert len(inside("127.0.0.9", 12)) == 12, "exempt"
    assert len(inside("127.0.0.3", 1)) == 1, "others have their own"
    assert "too-many-connections" in cli("why", "--socket", one.admin_socket).stdout
    assert one.health("/metrics")[1].count(b"reverse_proxy_refused_over_client_cap_total 25") == 1

    greedy.pop().close()
    wait_until(lambda: enter("127.0.0.2"), "one that leaves makes room", PATIENCE_SECS)

    # What a killed worker held is held no more.
    for pid in one.workers:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: held(one) == 0 and len(one.workers) == WORKERS and one.ready(), "all are new", PATIENCE_SECS)
    assert len(inside("127.0.0.2", 10)) == 5


def test_clients_at_the_same_moment_are_never_over_the_cap(appliance: StartAppliance) -> None:
    """Four workers, connections from many threads of one address: at no time more than the cap."""
    one = appliance({"workers": WORKERS, "max_connections_per_client": 6, "client_cap_exempt": []})
    stop = threading.Event()

    def come() -> None:
        mine: list[socket.socket] = []
        while not stop.is_set():
            with contextlib.suppress(OSError):
                mine.append(socket.create_connection(("127.0.0.1", one.port), 5))
            if len(mine) > 5:
                mine.pop(0).close()
        for sock in mine:
            sock.close()

    threads = [threading.Thread(target=come) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        end = time.monotonic() + 3.0
        most = 0
        while time.monotonic() < end or not totals(one)["refused_over_client_cap"]:
            assert time.monotonic() < end + PATIENCE_SECS
            most = max(most, held(one))
            # A connection that is being refused holds a permit for that moment, one a worker.
            assert most <= 6 + WORKERS
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert most >= 3
    wait_until(lambda: held(one) == 0, "all is given back", PATIENCE_SECS)


def test_handshakes_are_bounded_over_all_workers_and_leave_the_others_alone(
    appliance: StartAppliance, upstream: Callable[..., RawUpstream]
) -> None:
    one = appliance({"workers": WORKERS, "max_handshakes": 8, "eviction_grace_secs": 60}, upstream=upstream().url)
    kept = []
    for _ in range(12):
        kept.append(one.connect())
        assert kept[-1].request(REQUEST % b"").status == 200
    silent = [connect_tcp(one.port) for _ in range(80)]
    wait_until(lambda: held(one, "handshakes") == 8, "as many handshakes as may be")
    for _ in range(20):
        workers = one.status()["workers"]
        assert max(worker["handshakes"] for worker in workers) <= 2
        assert sum(worker["permits_held"] for worker in workers) <= 8 + 12
    for wire in kept:
        assert wire.request(REQUEST % b"").status == 200
    for wire in silent:
        wire.close()
    wait_until(lambda: held(one, "handshakes") == 0, "they are given back", PATIENCE_SECS)
    with one.connect() as wire:
        assert wire.request(REQUEST % b"").status == 200
    for wire in kept:
        wire.close()


# -- descriptors really gone


def lowest_free_descriptor(pid: int) -> int:
    taken = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    return next(number for number in range(len(taken) + 1) if number not in taken)


def lower(pid: int, soft: int) -> tuple[int, int]:
    """Lower the soft limit of a running process. Returns the limits of before."""
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, limits[1]))
    return limits


def test_without_descriptors_a_few_idle_ones_give_way_while_that_helps(
    appliance: StartAppliance, upstream: Callable[..., RawUpstream]
) -> None:
    with slow_answers(upstream) as (url, _):
        _evict_for_descriptors(appliance({"redirect": {"enabled": False}}, upstream=url))


def _evict_for_descriptors(one: Appliance) -> None:
    (worker,) = one.workers
    idle = []
    for _ in range(20):
        idle.append(one.connect())
        assert idle[-1].request(REQUEST % b"").status == 200
    # All numbers below the limit are taken, a good part of them by idle clients.
    limits = lower(worker, lowest_free_descriptor(worker))
    try:
        with one.connect(timeout_secs=PATIENCE_SECS) as newcomer:
            assert newcomer.request(REQUEST % b"").status == 200, "served, although the limit is as low as before"
            assert 1 <= totals(one)["evicted_for_descriptors"] <= 8
        # Now below everything that clients have: to close one of them frees no number that counts.
        resource.prlimit(worker, resource.RLIMIT_NOFILE, (8, limits[1]))
        before = totals(one)
        with connect_tcp(one.port):
            wait_until(lambda: totals(one)["accept_errors"] > before["accept_errors"], "it is met", PATIENCE_SECS)
            time.sleep(1.5)
        assert totals(one)["evicted_for_descriptors"] == before["evicted_for_descriptors"]
    finally:
        resource.prlimit(worker, resource.RLIMIT_NOFILE, limits)
    for wire in idle:
        wire.close()


def cpu_secs(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_A_SEC


DROUGHT_SECS = 60.0
PIECE = b"0123456789abcdef"
CHUNK = b"10\r\n" + PIECE + b"\r\n"


@pytest.mark.timeout(300)
def test_a_minute_without_descriptors(appliance: StartAppliance, upstream: Callable[..., RawUpstream]) -> None:
    """Quiet, cheap, nobody inside loses anything, health answers, readiness says why, and back at once."""
    stop = threading.Event()

    def play(wire: Wire) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                if b"/long" in wire.read_head():
                    wire.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                    while not stop.wait(0.2):
                        wire.send(CHUNK)
                    wire.send(b"0\r\n\r\n")
                else:
                    wire.send(OK)

    one = appliance(upstream=upstream(play).url)
    (worker,) = one.workers
    wait_until(lambda: any(" started " in line for line in one.event_lines()), "the master supervises")
    long_ones = [one.connect() for _ in range(4)]
    heads = []
    for wire in long_ones:
        wire.send(REQUEST % b"long")
        heads.append(wire.read_head())
    inside = [one.connect() for _ in range(3)]
    for wire in inside:
        assert wire.request(REQUEST % b"").status == 200
    lines_before, errors_before = len(one.event_lines()), totals(one)["accept_errors"]
    cpu_before = cpu_secs(worker)
    failures: list[Any] = []

    def knock() -> None:
        """Newcomers at a steady rate; none can be served meanwhile."""
        knocking: list[socket.socket] = []
        while not stop.wait(0.05):
            with contextlib.suppress(OSError):
                knocking.append(socket.create_connection(("127.0.0.1", one.port), 1))
            while len(knocking) > 50:
                knocking.pop(0).close()
        for sock in knocking:
            sock.close()

    def use() -> None:
        """Who is inside goes on: kept connections, kept upstream connections."""
        while not stop.wait(0.5):
            for wire in inside:
                response = wire.request(REQUEST % b"")
                if response.status != 200:
                    failures.append(response)

    threads = [threading.Thread(target=one_of) for one_of in (knock, use)]
    start = time.monotonic()
    limits = lower(worker, 8)
    try:
        for thread in threads:
            thread.start()
        slowest_secs = 0.0
        while time.monotonic() < start + DROUGHT_SECS:
            asked = time.monotonic()
            assert one.health() == (200, b"ok\n")
            slowest_secs = max(slowest_secs, time.monotonic() - asked)
            if asked > start + 5:
                status, reasons = one.health("/readyz")
                assert status == 503
                assert b"worker 0 is out of descriptors" in reasons
            time.sleep(0.25)
        spent_secs = cpu_secs(worker) - cpu_before
        lines = one.event_lines()[lines_before:]
        errors = totals(one)["accept_errors"] - errors_before
        resource.prlimit(worker, resource.RLIMIT_NOFILE, limits)
        restored = time.monotonic()
        with one.connect(timeout_secs=PATIENCE_SECS) as wire:
            assert wire.request(REQUEST % b"").status == 200
        recovery_secs = time.monotonic() - restored
    finally:
        resource.prlimit(worker, resource.RLIMIT_NOFILE, limits)
        stop.set()
        for thread in threads:
            thread.join()
    print(f"{len(lines)} lines, {errors} errors, CPU {spent_secs:.2f} s, health at most {slowest_secs * 1000:.0f} ms")
    print(f"recovery {recovery_secs:.2f} s")
    assert failures == []
    assert len(lines) <= 10, lines
    assert spent_secs <= DROUGHT_SECS * 0.05 * 10
    assert slowest_secs <= 1.0
    assert recovery_secs <= 20
    assert errors <= DROUGHT_SECS + 5
    for wire, head in zip(long_ones, heads, strict=True):
        pieces, rest = divmod(len(body := wire.read_body(head)), len(PIECE))
        assert (body, rest) == (PIECE * pieces, 0), "whole, to its end"
        assert pieces > 100
        wire.close()
    for wire in inside:
        assert wire.request(REQUEST % b"").status == 200
        wire.close()
    wait_until(one.ready, "ready again", PATIENCE_SECS)
    assert one.workers == (worker,)
