"""One round of a drill: good clients all along; attackers at twice the permits; descriptors taken away and given back.

0 %        good clients alone, and the state of rest is noted
10 %       attackers arrive
60 %       the workers' soft descriptor limit is set below what they have open
80 %       it is given back
100 %      attackers and good clients go; what is left is looked for
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from math import ceil
from time import monotonic
from typing import Any

from proxy.drill.clients import Answer, Attackers, GoodClients, HealthLook
from proxy.drill.copy import LOOPBACK, Copy
from proxy.errors import StartError

ATTACKERS_AT, TAKEN_AT, GIVEN_BACK_AT = 0.1, 0.6, 0.8
TAKEN_BELOW = 4
"""So many descriptors less than are open become the limit."""

COUNTED_EVERY_SECS = 1.1
SETTLE_SECS = 20.0
"""For the last clients to be let go: more than a handshake may last by default."""

ATTACKER_ADDRESSES = tuple(f"127.0.1.{number}" for number in range(1, 7))
GOOD_ADDRESSES = tuple(f"127.0.2.{number}" for number in range(1, 17))
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Figures:
    """What a round came to. Times in seconds, ``cpu_percent`` of one core over all processes of the copy."""

    round: str
    permits: int
    attackers: int
    attackers_arrived: int
    attackers_closed: int
    good: int
    good_percent: float
    faults: dict[str, int]
    """What kept good clients from being served, and how many."""
    p50_secs: float
    p99_secs: float
    event_lines: int
    event_bytes: int
    cpu_percent: float
    cpu_percent_while_taken: float
    recovery_secs: float
    health_failed: int
    health_slowest_secs: float
    not_ready: tuple[str, ...]
    leaked_permits: int
    leaked_descriptors: int


@dataclass(frozen=True, slots=True)
class Hooks:
    """What a round does to the proxy that it is played against, at its moments."""

    take: Callable[[], Awaitable[None]]
    give_back: Callable[[], Awaitable[None]]


async def timeline(*, secs: float, good: GoodClients, attackers: Attackers, hooks: Hooks) -> float:
    """Play for ``secs``. Returns the moment (monotonic) at which the descriptors were given back."""
    began = monotonic()

    async def until(part: float) -> None:
        await asyncio.sleep(max(0.0, began + part * secs - monotonic()))

    async with _running(good.run()):
        await until(ATTACKERS_AT)
        async with _running(attackers.run()):
            await until(TAKEN_AT)
            try:
                await hooks.take()
                await until(GIVEN_BACK_AT)
            finally:
                await hooks.give_back()
            given_back_at = monotonic()
            await until(1.0)
    await good.finish()
    return given_back_at


class _Round:
    """The hooks of a round against a copy, and what they note."""

    def __init__(self, copy: Copy) -> None:
        self._copy = copy
        self._before: dict[int, tuple[int, int]] = {}
        self._taken_at = 0.0
        self._cpu_taken = 0.0
        self.cpu_percent_while_taken = 0.0

    async def take(self) -> None:
        self._taken_at, self._cpu_taken = monotonic(), cpu_secs(self._copy.pid)
        workers = (await _status(self._copy))["workers"]
        lowest = min(worker["descriptors_open"] for worker in workers) - TAKEN_BELOW
        self._before = self._copy.lower_descriptors(max(1, lowest))

    async def give_back(self) -> None:
        self._copy.restore_descriptors(self._before)
        used_secs = cpu_secs(self._copy.pid) - self._cpu_taken
        self.cpu_percent_while_taken = 100.0 * used_secs / max(0.001, monotonic() - self._taken_at)


async def play(copy: Copy, *, name: str, secs: float, one_address: bool) -> Figures:
    """Play for ``secs``. Raises StartError when the copy no longer answers at its admin socket."""
    permits = copy.status()["permits"]
    attackers = Attackers(copy.ports.https, 2 * permits, (LOOPBACK,) if one_address else ATTACKER_ADDRESSES)
    good = GoodClients(copy.ports.https, (LOOPBACK,) if one_address else GOOD_ADDRESSES)
    health = HealthLook(copy.ports.health)
    noted = _Round(copy)
    await good.once()
    at_rest = await _at_rest(copy)
    began, cpu_began, log_began = monotonic(), cpu_secs(copy.pid), len(copy.event_log())
    async with _running(health.run()):
        given_back_at = await timeline(
            secs=secs, good=good, attackers=attackers, hooks=Hooks(noted.take, noted.give_back)
        )
    used_secs, lasted_secs = cpu_secs(copy.pid) - cpu_began, monotonic() - began
    leaked = await _leaked(copy, at_rest)
    log = copy.event_log()[log_began:]
    return Figures(
        round=name,
        permits=permits,
        attackers=attackers.most,
        attackers_arrived=len(attackers.seen),
        attackers_closed=attackers.closed_by_proxy,
        good=len(good.answers),
        good_percent=good_percent(good.answers),
        faults=dict(Counter(one.fault for one in good.answers if not one.good)),
        p50_secs=percentile(good.answers, 0.50),
        p99_secs=percentile(good.answers, 0.99),
        event_lines=log.count(b"\n"),
        event_bytes=len(log),
        cpu_percent=100.0 * used_secs / lasted_secs,
        cpu_percent_while_taken=noted.cpu_percent_while_taken,
        recovery_secs=recovery_secs(good.answers, given_back_at),
        health_failed=health.failed,
        health_slowest_secs=health.slowest_secs,
        not_ready=tuple(sorted(filter(None, health.not_ready))),
        leaked_permits=leaked[0],
        leaked_descriptors=leaked[1],
    )


@contextlib.asynccontextmanager
async def _running(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """``work`` goes on inside; a fault of it is raised at the end."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _status(copy: Copy) -> dict[str, Any]:
    return await asyncio.to_thread(copy.status)


async def _held(copy: Copy) -> tuple[int, int]:
    """Permits, and descriptors that no pooled upstream connection holds, over all workers. For a copy without clients:
    descriptors are counted once a second, the others at once."""
    workers = (await _status(copy))["workers"]
    permits = sum(worker["permits_held"] for worker in workers)
    return permits, sum(worker["descriptors_open"] - worker["upstream_open"] for worker in workers)


async def _at_rest(copy: Copy) -> int:
    """The descriptors that a copy without clients holds, read twice the same."""
    last = None
    for _ in range(int(SETTLE_SECS / COUNTED_EVERY_SECS)):
        permits, descriptors = await _held(copy)
        if permits == 0 and descriptors == last:
            return descriptors
        last = descriptors
        await asyncio.sleep(COUNTED_EVERY_SECS)
    raise StartError(f"the copy holds permits or descriptors without a client after {SETTLE_SECS:g} s")


async def _leaked(copy: Copy, at_rest: int) -> tuple[int, int]:
    """Permits still held, and descriptors more than at rest, once all clients have gone."""
    deadline = monotonic() + SETTLE_SECS
    while True:
        permits, descriptors = await _held(copy)
        leaked = permits, max(0, descriptors - at_rest)
        if leaked == (0, 0) or monotonic() > deadline:
            return leaked
        await asyncio.sleep(0.2)


def good_percent(answers: Sequence[Answer]) -> float:
    """How many of ``answers`` were good."""
    return 100.0 * sum(one.good for one in answers) / max(1, len(answers))


def percentile(answers: Sequence[Answer], part: float) -> float:
    """The time in seconds that ``part`` (0 to 1) of ``answers`` needed at most."""
    if not answers:
        return 0.0
    ordered = sorted(one.secs for one in answers)
    return ordered[min(len(ordered) - 1, ceil(part * len(ordered)) - 1)]


def recovery_secs(answers: Sequence[Answer], since: float) -> float:
    """Seconds from ``since`` to the first good answer after it; infinite without one."""
    return min((one.ended - since for one in answers if one.good and one.ended >= since), default=float("inf"))


def cpu_secs(master: int) -> float:
    """User and system time so far of the process ``master`` and of its children that still run."""
    total, parents = 0, {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
                parents[int(name)] = (int(fields[1]), int(fields[11]) + int(fields[12]))
    for pid, (parent, ticks) in parents.items():
        if master in (pid, parent):
            total += ticks
    return total / _TICKS
