"""Simulated time, and workers with their listeners' queues around the real ``ClientAdmission``."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from math import inf

from proxy.budget import shares
from proxy.net.admission import Permit, Permits
from proxy.net.client_admission import ClientAdmission, Entry
from proxy.net.clients import ClientCounts, Prefixes
from proxy.net.policy import Evictions, Member
from proxy.observe.counters import CONNECTIONS_OPEN, HANDSHAKES_OPEN, CounterBook
from proxy.observe.record import Value
from proxy.observe.refusals import RefusalRing
from proxy.observe.shared_tables import SharedTables
from proxy.session.standing import Standing

HANDSHAKE_TIMEOUT_SECS = 10.0
HEAD_TIMEOUT_SECS = 10.0
IDLE_TIMEOUT_SECS = 60.0
QUEUE_LENGTH = 4096


class Event:
    """Something that will happen, unless it is cancelled."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class Clock:
    """Time that passes as fast as events are worked off."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Event]] = []
        self._numbers = count()

    def call_later(self, delay: float, callback: Callable[[], None], /) -> Event:
        return self.call_at(self.now + delay, callback)

    def call_at(self, when: float, callback: Callable[[], None]) -> Event:
        event = Event(callback)
        heapq.heappush(self._events, (when, next(self._numbers), event))
        return event

    def run(self, until: float) -> None:
        events = self._events
        while events and events[0][0] <= until:
            self.now, _, event = heapq.heappop(events)
            if event.callback is not None:
                event.callback()
        self.now = until


class Silent:
    """A reporter that tells nobody."""

    def report(
        self, signature: str, message: str, *, level: str = "error", exc: BaseException | None = None, **fields: Value
    ) -> None: ...


class NobodyLeaves(Evictions[Member]):
    """The policy without eviction: who is inside stays until a timeout ends it."""

    def candidate(self, now: float, *, only_handshakes: bool = False) -> None:
        return None

    def wait_secs(self, now: float, *, only_handshakes: bool = False) -> float:
        return HANDSHAKE_TIMEOUT_SECS


@dataclass(frozen=True)
class Setup:
    """An appliance; ``handshakes`` None: as many as permits."""

    permits: int
    workers: int = 1
    handshakes: int | None = None
    grace_secs: float = 1.0
    cap: int | None = None
    evicts: bool = True


class Session:
    """A connection, from its client's connect to its end. ``on_open``, ``on_end`` are its client's."""

    __slots__ = (
        "_deadline",
        "_front",
        "_looks_at",
        "address",
        "connected_at",
        "entry",
        "hello",
        "on_accepted",
        "on_end",
        "over",
        "since",
        "state",
        "was_busy_when_evicted",
    )

    def __init__(
        self, front: Front, address: str, *, hello: bool, on_accepted: Callable[[], None], on_end: Callable[[], None]
    ) -> None:
        """``hello``: the client sends its part of the handshake at once, and not never."""
        self._front = front
        self.address = address
        self.hello = hello
        self.on_accepted = on_accepted
        self.on_end = on_end
        self.connected_at = front.clock.now
        self.entry: Entry | None = None
        self.state = Standing.HANDSHAKE
        self.since = 0.0
        self.over = False
        self.was_busy_when_evicted = False
        self._deadline = inf
        self._looks_at = inf

    def standing(self) -> tuple[Standing, float]:
        return (Standing.BUSY, 0.0) if self.over else (self.state, self.since)

    def evict(self, reason: str) -> None:
        self._front.appliance.evicted += 1
        self.was_busy_when_evicted = self.state is Standing.BUSY
        self.end()

    def has_descriptor_below(self, limit: int) -> bool:
        return True

    def become(self, state: Standing) -> None:
        """The next phase begins."""
        if self.state is Standing.HANDSHAKE and state is not Standing.HANDSHAKE and self.entry is not None:
            self.entry.handshake_ended()
        self.state = state
        self.since = self._front.clock.now
        self._deadline = self.since + TIMEOUTS_SECS[state]
        if self._deadline < self._looks_at:
            self._looks_at = self._deadline
            self._front.clock.call_at(self._deadline, self._on_deadline)

    def _on_deadline(self) -> None:
        # As the deadline wheel does: a deadline that was moved later costs nothing until then.
        self._looks_at = inf
        if self.over:
            return
        if self._deadline <= self._front.clock.now:
            self.end()
        elif self._deadline < inf:
            self._looks_at = self._deadline
            self._front.clock.call_at(self._deadline, self._on_deadline)

    def end(self) -> None:
        """Closed, by whomever."""
        if self.over:
            return
        self.over = True
        if self.entry is not None:
            self.entry.release()
        self.on_end()


TIMEOUTS_SECS = {
    Standing.HANDSHAKE: HANDSHAKE_TIMEOUT_SECS,
    Standing.HEAD: HEAD_TIMEOUT_SECS,
    Standing.IDLE: IDLE_TIMEOUT_SECS,
    Standing.BUSY: inf,
}


class Front:
    """A worker: the queue that the kernel keeps for it, and its admission."""

    def __init__(self, appliance: Appliance, slot: int, permits: int, handshakes: int) -> None:
        setup, cells = appliance.setup, appliance.book.page(slot)
        self.appliance = appliance
        self.clock = appliance.clock
        self.admission = ClientAdmission(
            self.clock,
            Permits(permits, cells, CONNECTIONS_OPEN),
            handshakes=Permits(handshakes, cells, HANDSHAKES_OPEN),
            counts=ClientCounts(appliance.tables, slot, cells),
            prefixes=Prefixes(32, 64, ()),
            cap=setup.cap,
            grace_secs=setup.grace_secs,
            cells=cells,
            reporter=Silent(),
            refusals=RefusalRing(cells, self._time),
            clock=self._time,
        )
        if not setup.evicts:
            self.admission.evictions = NobodyLeaves(self.admission.members, setup.grace_secs)  # type: ignore[assignment]
        self.queue: deque[Session] = deque()
        self._waits = False

    def _time(self) -> float:
        return self.clock.now

    def connect(self, session: Session) -> None:
        """A client's connection is complete, as the kernel sees it."""
        if len(self.queue) >= QUEUE_LENGTH:
            self.clock.call_later(1.0, session.end)  # its SYN is not answered
            return
        self.queue.append(session)
        self.accept()

    def accept(self) -> None:
        """What the accept loop does at a wake-up."""
        admission = self.admission
        while self.queue and not self._waits:
            if not admission.may_enter():
                self._waits = True
                admission.wait(self._wake)
                return
            session = self.queue.popleft()
            permit = admission.enter((session.address, 0))
            if permit is None:
                session.over = True
                self.clock.call_later(0.0, session.on_end)
                continue
            self._seat(session, permit)

    def _seat(self, session: Session, permit: Permit) -> None:
        assert isinstance(permit, Entry)
        if session.over:  # its client has given up in the queue
            permit.release()
            return
        session.entry = permit
        session.become(Standing.HANDSHAKE)
        silent_secs = 0.0 if session.hello else self.clock.now - session.connected_at
        permit.seat(session, owing_secs=silent_secs if permit.evicts else 0.0)
        session.on_accepted()

    def _wake(self) -> None:
        # As the loop's readers are: called when the work at hand is done.
        self.clock.call_later(0.0, self._resume)

    def _resume(self) -> None:
        self._waits = False
        self.accept()


class Appliance:
    """Workers that share what is the appliance's."""

    def __init__(self, clock: Clock, setup: Setup, seed: int = 0) -> None:
        self.clock = clock
        self.setup = setup
        self.evicted = 0
        self.book = CounterBook(setup.workers)
        self.tables = SharedTables(setup.workers, 65_536)
        self._random = random.Random(seed)
        permits = shares(setup.permits, setup.workers)
        handshakes = shares(setup.permits if setup.handshakes is None else setup.handshakes, setup.workers)
        self.fronts = [Front(self, slot, permits[slot], handshakes[slot]) for slot in range(setup.workers)]

    def connect(
        self, address: str, *, hello: bool, on_accepted: Callable[[Session], None], on_end: Callable[[Session], None]
    ) -> Session:
        """A client connects; the kernel chooses the worker."""
        front = self._random.choice(self.fronts)
        session = Session(
            front, address, hello=hello, on_accepted=lambda: on_accepted(session), on_end=lambda: on_end(session)
        )
        front.connect(session)
        return session

    @property
    def held(self) -> list[int]:
        """Permits held, by worker."""
        return [front.admission.held for front in self.fronts]
