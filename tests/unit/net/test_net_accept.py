"""The accept loop on a real event loop and a real listener, whose accept fails as the script says."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import uvloop

from proxy.net.accept import (
    ACCEPT_BATCH,
    CONNECTION_ERRORS_IN_A_ROW,
    ERROR_CLASSES,
    RESOURCE_BACKOFF_SECS,
    UNKNOWN_BACKOFF_SECS,
    AcceptLoop,
    ErrorClass,
)
from proxy.net.admission import Permit, Permits
from proxy.observe.counters import ACCEPT_ERRORS, ACCEPT_PAUSES, CONNECTIONS_ACCEPTED, private_cells

WAIT_SECS = 10.0
HASTE = 20
"""Timers of the loop under test run so many times faster; what was asked for is written down."""

DRAINED = (errno.EAGAIN, errno.EWOULDBLOCK)
# The network errors are those that accept(2) lists.
CONNECTION = (
    errno.ECONNABORTED,
    errno.EPROTO,
    errno.ENETDOWN,
    errno.ENOPROTOOPT,
    errno.EHOSTDOWN,
    errno.ENONET,
    errno.EHOSTUNREACH,
    errno.EOPNOTSUPP,
    errno.ENETUNREACH,
)
RESOURCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
NO_SUCH_ERRNO = 4095
UNKNOWN = (errno.EPERM, NO_SUCH_ERRNO)


class HastyLoop:
    """The real loop, but for ``call_later``."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.delays: list[float] = []
        self.handles: list[asyncio.TimerHandle] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def call_later(self, delay: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        self.delays.append(delay)
        handle = self._loop.call_later(delay / HASTE, callback)
        self.handles.append(handle)
        return handle


class FaultyListener:
    """A listening socket whose next accepts raise what stands in ``faults``."""

    def __init__(self) -> None:
        self._sock = socket.create_server(("127.0.0.1", 0))
        self._sock.setblocking(False)
        self.port: int = self._sock.getsockname()[1]
        self.faults: list[Exception] = []
        self.calls = 0

    def fileno(self) -> int:
        return self._sock.fileno()

    def accept(self) -> tuple[socket.socket, object]:
        self.calls += 1
        if self.faults:
            raise self.faults.pop(0)
        return self._sock.accept()

    def close(self) -> None:
        self._sock.close()


class Reports:
    """A reporter that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []

    def report(self, signature: str, message: str, *, level: str = "error", **fields: Any) -> None:
        self.told.append((signature, {"message": message, "level": level, **fields}))

    @property
    def signatures(self) -> list[str]:
        return [signature for signature, _ in self.told]


class Rig:
    """Accept loops that share ``permits``, and clients of theirs."""

    def __init__(self, limit: int = 8, listeners: int = 1) -> None:
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self.loop_faults: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda _loop, context: self.loop_faults.append(context))
        self.hasty = HastyLoop(self.loop)
        self.cells = private_cells()
        self.permits = Permits(limit)
        self.reports = Reports()
        self.accepted: list[tuple[socket.socket, Permit]] = []
        self.on_accept: Callable[[socket.socket, object, Permit], None] = self.keep
        self.listeners = [FaultyListener() for _ in range(listeners)]
        self.clients: list[socket.socket] = []
        self.loops = [
            AcceptLoop(
                self.hasty,  # type: ignore[arg-type]
                listener,  # type: ignore[arg-type]
                label=f"listener {number}",
                permits=self.permits,
                on_accept=self._hand_over,
                reporter=self.reports,
                cells=self.cells,
            )
            for number, listener in enumerate(self.listeners)
        ]
        for accept_loop in self.loops:
            accept_loop.start()

    @property
    def listener(self) -> FaultyListener:
        return self.listeners[0]

    def _hand_over(self, sock: socket.socket, peer: object, permit: Permit) -> None:
        self.on_accept(sock, peer, permit)

    def keep(self, sock: socket.socket, _peer: object, permit: Permit) -> None:
        self.accepted.append((sock, permit))

    def connect(self, number: int = 0) -> socket.socket:
        client = socket.create_connection(("127.0.0.1", self.listeners[number].port), WAIT_SECS)
        self.clients.append(client)
        return client

    def run_until(self, holds: Callable[[], bool], what: str) -> None:
        async def wait() -> None:
            deadline = time.monotonic() + WAIT_SECS
            while not holds():
                assert time.monotonic() < deadline, f"not within {WAIT_SECS} s: {what}; {self.reports.told}"
                await asyncio.sleep(0.001)

        self.loop.run_until_complete(wait())

    def turn(self, secs: float = 0.05) -> None:
        """Let the loop run: what must not happen gets its chance."""
        self.loop.run_until_complete(asyncio.sleep(secs))

    def serves(self, number: int = 0) -> None:
        """A new client is accepted at once, and lets go again."""
        before = len(self.accepted)
        self.connect(number)
        self.run_until(lambda: len(self.accepted) == before + 1, "one more client is accepted")

    def close(self) -> None:
        for accept_loop in self.loops:
            accept_loop.stop()
        for sock in (*self.clients, *(sock for sock, _ in self.accepted)):
            sock.close()
        for listener in self.listeners:
            listener.close()
        self.loop.close()
        assert self.loop_faults == []


@pytest.fixture
def rigs() -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(**options: int) -> Rig:
        made.append(Rig(**options))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


def fault(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def test_the_table_is_the_documented_one() -> None:
    expected = (
        dict.fromkeys(DRAINED, ErrorClass.DRAINED)
        | {errno.EINTR: ErrorClass.TRANSIENT}
        | dict.fromkeys(CONNECTION, ErrorClass.CONNECTION)
        | dict.fromkeys(RESOURCE, ErrorClass.RESOURCE)
    )
    assert expected == ERROR_CLASSES
    assert (RESOURCE_BACKOFF_SECS, UNKNOWN_BACKOFF_SECS) == (1.0, 0.1)
    assert (ACCEPT_BATCH, CONNECTION_ERRORS_IN_A_ROW) == (32, 16)


@pytest.mark.parametrize("number", [*DRAINED, errno.EINTR])
def test_what_is_no_error_is_neither_reported_nor_waited_for(rigs: Callable[..., Rig], number: int) -> None:
    rig = rigs()
    rig.listener.faults = [fault(number)] * 3
    rig.serves()
    rig.turn()
    # Three faults, the client, and the accept that finds nothing more.
    assert (rig.listener.calls, rig.reports.told, rig.hasty.delays) == (5, [], [])
    assert rig.permits.held == 1
    rig.serves()


@pytest.mark.parametrize("number", CONNECTION)
def test_an_aborted_connection_is_reported_and_delays_nobody(rigs: Callable[..., Rig], number: int) -> None:
    rig = rigs()
    rig.listener.faults = [fault(number)] * (CONNECTION_ERRORS_IN_A_ROW - 1)
    rig.serves()
    name = f"accept.{errno.errorcode[number].lower()}"
    assert rig.reports.signatures == [name] * (CONNECTION_ERRORS_IN_A_ROW - 1)
    assert rig.reports.told[0][1]["backoff_ms"] == 0
    assert rig.hasty.delays == []
    assert rig.permits.held == 1
    rig.serves()


@pytest.mark.parametrize("number", [*RESOURCE, *UNKNOWN])
def test_other_errors_are_reported_and_waited_for_with_one_timer(rigs: Callable[..., Rig], number: int) -> None:
    rig = rigs()
    rig.listener.faults = [fault(number)] * 3
    rig.serves()
    rig.turn()
    backoff_secs = 1.0 if number in RESOURCE else 0.1
    name = errno.errorcode.get(number, "unknown").lower()
    assert rig.reports.signatures == [f"accept.{name}"] * 3
    fields = rig.reports.told[0][1]
    assert fields["level"] == "error"
    assert fields["listener"] == "listener 0"
    assert fields["error"] == str(fault(number))
    assert fields["backoff_ms"] == backoff_secs * 1000
    assert (fields["permits_held"], fields["permits"]) == (0, 8)
    assert rig.hasty.delays == [backoff_secs] * 3
    # Each fault one accept: no second one while the timer runs.
    assert rig.listener.calls == 3 + 2
    assert (rig.cells[ACCEPT_ERRORS], rig.cells[ACCEPT_PAUSES], rig.cells[CONNECTIONS_ACCEPTED]) == (3, 3, 1)
    rig.serves()


def test_what_is_no_oserror_is_an_unknown_error_with_its_traceback(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    rig.listener.faults = [ValueError("one\ntwo")]
    rig.serves()
    ((signature, fields),) = rig.reports.told
    assert (signature, rig.hasty.delays) == ("accept.valueerror", [0.1])
    assert isinstance(fields["exc"], ValueError)
    rig.serves()


def test_connection_errors_in_a_row_without_a_success_are_waited_for(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    rig.listener.faults = [fault(errno.ECONNABORTED)] * (CONNECTION_ERRORS_IN_A_ROW + 1)
    rig.serves()
    backoffs = [fields["backoff_ms"] for _, fields in rig.reports.told]
    # The sixteenth waits; so does the next, since nothing has succeeded in between.
    assert backoffs == [0] * 15 + [1000, 1000]
    assert rig.hasty.delays == [1.0, 1.0]
    # The success began the count anew.
    rig.listener.faults = [fault(errno.ECONNABORTED)] * (CONNECTION_ERRORS_IN_A_ROW - 1)
    rig.serves()
    assert rig.hasty.delays == [1.0, 1.0]


def test_an_error_that_never_ends_costs_one_accept_a_timer(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    rig.listener.faults = [fault(errno.EMFILE)] * 100_000
    rig.connect()
    rig.run_until(lambda: len(rig.hasty.delays) >= 5, "five back-offs")
    assert rig.listener.calls == len(rig.hasty.delays)
    live = [handle for handle in rig.hasty.handles if not handle.cancelled() and handle.when() > rig.loop.time()]
    assert len(live) <= 1
    assert rig.permits.held == 0


def test_a_burst_is_taken_in_bounded_batches(rigs: Callable[..., Rig]) -> None:
    rig = rigs(limit=1000)
    rig.listener.faults = [fault(errno.EINTR)] * (3 * ACCEPT_BATCH)
    turns: list[int] = []

    def other_work() -> None:
        turns.append(rig.listener.calls)
        rig.loop.call_soon(other_work)

    rig.connect()
    rig.loop.call_soon(other_work)
    rig.run_until(lambda: bool(rig.accepted), "the client is accepted")
    steps = [after - before for before, after in pairwise(turns)]
    assert max(steps) <= ACCEPT_BATCH


def test_an_exception_in_on_accept_costs_its_connection_only(rigs: Callable[..., Rig]) -> None:
    rig = rigs(limit=2)
    broken: list[socket.socket] = []

    def fail(sock: socket.socket, _peer: object, _permit: Permit) -> None:
        broken.append(sock)
        raise RuntimeError("set-up")

    rig.on_accept = fail
    for number in range(1, 4):  # more than there are permits
        client = rig.connect()
        rig.run_until(lambda number=number: len(broken) == number, "it is handed over")  # type: ignore[misc]
        assert client.recv(1) == b""
    assert [sock.fileno() for sock in broken] == [-1, -1, -1]
    assert rig.permits.held == 0
    assert rig.reports.signatures == ["accept.setup_failed"] * 3
    rig.on_accept = rig.keep
    rig.serves()


def test_listeners_share_the_permits_and_are_all_woken(rigs: Callable[..., Rig]) -> None:
    rig = rigs(limit=2, listeners=3)
    rig.connect(0)
    rig.connect(1)
    rig.run_until(lambda: len(rig.accepted) == 2, "two are accepted")
    for number in range(3):
        rig.connect(number)
    rig.turn()
    assert (len(rig.accepted), rig.permits.held) == (2, 2)
    calls = [listener.calls for listener in rig.listeners]
    rig.turn()
    assert [listener.calls for listener in rig.listeners] == calls, "a full house is not polled"
    while len(rig.accepted) < 5:
        before = len(rig.accepted)
        sock, permit = rig.accepted[before - 2]
        sock.close()
        permit.release()
        rig.run_until(lambda before=before: len(rig.accepted) == before + 1, "the next is accepted")  # type: ignore[misc]
        assert rig.permits.held == 2


def test_a_listener_without_a_client_does_not_keep_the_free_permit_from_another(rigs: Callable[..., Rig]) -> None:
    rig = rigs(limit=1, listeners=2)
    rig.connect(0)
    rig.run_until(lambda: len(rig.accepted) == 1, "the only permit is taken")
    # The first listener waits too: it had looked for one more. Woken alone it would find nobody and wake nobody.
    rig.connect(1)
    rig.turn()
    rig.accepted[0][1].release()
    rig.run_until(lambda: len(rig.accepted) == 2, "the other listener's client is accepted")


def test_a_free_permit_does_not_end_a_back_off_early(rigs: Callable[..., Rig]) -> None:
    rig = rigs(limit=1, listeners=2)
    rig.listeners[1].faults = [fault(errno.EMFILE)] * 10_000
    rig.connect(1)
    rig.run_until(lambda: bool(rig.hasty.delays), "it backs off")
    rig.connect(0)
    rig.run_until(lambda: len(rig.accepted) == 1, "the other goes on")
    for _ in range(5):
        rig.accepted[-1][1].release()
        rig.serves(0)
    assert rig.listeners[1].calls <= len(rig.hasty.delays)


def test_a_permit_is_given_back_once(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    rig.serves()
    rig.serves()
    permit = rig.accepted[0][1]
    permit.release()
    permit.release()
    assert rig.permits.held == 1


@pytest.mark.parametrize("state", ["accepting", "backing off", "waiting for a permit"])
def test_nothing_is_accepted_after_stop(rigs: Callable[..., Rig], state: str) -> None:
    rig = rigs(limit=1)
    if state == "waiting for a permit":
        rig.serves()
        rig.connect()
        rig.turn()
    elif state == "backing off":
        rig.listener.faults = [fault(errno.EMFILE)]
        rig.connect()
        rig.run_until(lambda: bool(rig.hasty.delays), "it backs off")
    rig.loops[0].stop()
    calls = rig.listener.calls
    for _, permit in rig.accepted:
        permit.release()
    rig.connect()
    rig.turn(2 / HASTE)
    assert rig.listener.calls == calls
    rig.loops[0].stop()
