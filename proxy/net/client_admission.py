"""The admission of a worker's clients: permits, the bound on handshakes, the cap of each client, and who gives way.

The decisions are in ``policy``; this brings the permits, the sessions and the timers to them, and tells what was done.
The clock and the timers are handed in, so that a simulation can play with all of it (``python -m tests.simulation``).
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from time import monotonic
from typing import Protocol

from proxy.net.admission import Permit, Permits
from proxy.net.clients import ClientCounts, Prefixes, client_text
from proxy.net.policy import Evictions, Member, admits
from proxy.observe.counters import (
    EVICTED_FOR_DESCRIPTORS,
    EVICTED_HANDSHAKES,
    EVICTED_HEADS,
    EVICTED_IDLE,
    REFUSED_OVER_CLIENT_CAP,
)
from proxy.observe.events import Reporter
from proxy.observe.refusals import RefusalRing
from proxy.session.standing import Standing

MAX_EVICTED_FOR_DESCRIPTORS = 8
"""At each back-off of accept(2): enough for those that come next, few enough that a fault elsewhere closes not all."""

EVICTED_CELLS = {
    Standing.HANDSHAKE: EVICTED_HANDSHAKES,
    Standing.HEAD: EVICTED_HEADS,
    Standing.IDLE: EVICTED_IDLE,
}
REASONS = {
    Standing.HANDSHAKE: "evicted-handshake",
    Standing.HEAD: "evicted-head",
    Standing.IDLE: "evicted-idle",
}
"""What ``why`` tells."""
OVER_CAP = "too-many-connections"
NOT_COUNTED = 0
"""The key of a client that is exempt."""


class Timer(Protocol):
    """What ``call_later`` gives."""

    def cancel(self) -> None: ...


class Timers(Protocol):
    """What is needed of an event loop."""

    def call_later(self, delay: float, callback: Callable[[], None], /) -> Timer: ...


class Guest(Member, Protocol):
    """A session, as the admission sees it."""

    def evict(self, reason: str) -> None:
        """End at once; the permit is released before this returns."""

    def has_descriptor_below(self, limit: int) -> bool:
        """Whether its descriptor's number is less than ``limit``."""


class Entry(Permit):
    """The permit of one who has been let in, with what else is to be given back."""

    __slots__ = ("_admission", "_client", "_guest", "_handshake", "evicts")

    def __init__(self, admission: ClientAdmission, client: int, handshake: Permit | None, *, evicts: bool) -> None:
        """``client``: to be counted no more at the end; ``evicts``: somebody had to leave for this one."""
        super().__init__(admission.permits)
        self._admission = admission
        self._client = client
        self._handshake = handshake
        self._guest: Guest | None = None
        self.evicts = evicts

    def seat(self, guest: Guest, *, owing_secs: float = 0.0) -> None:
        """The session is there, or one that takes its place; see ``Evictions.handshake_began`` for ``owing_secs``."""
        if self._guest is not None:
            self._admission.members.discard(self._guest)
        self._guest = guest
        self._admission.members.add(guest)
        if self._handshake is not None:
            self._admission.evictions.handshake_began(guest, self._admission.clock(), owing_secs)

    def handshake_ended(self) -> None:
        """The handshake is done, well or not (idempotent)."""
        handshake, self._handshake = self._handshake, None
        if handshake is not None:
            if self._guest is not None:
                self._admission.evictions.handshake_ended(self._guest)
            handshake.release()

    def release(self) -> None:
        """Give everything back (idempotent)."""
        self.handshake_ended()
        guest, self._guest = self._guest, None
        if guest is not None:
            self._admission.members.discard(guest)
            self._admission.evictions.gone(guest)
        client, self._client = self._client, NOT_COUNTED
        if client != NOT_COUNTED:
            self._admission.counts.remove(client)
        super().release()


class ClientAdmission:
    """One kind of listeners of a worker; see ``Admission`` for what the accept loops ask.

    ``handshakes``: permits for handshakes, of which each newcomer takes one until its own is done; None: there are none
    here. ``cap`` is the number of connections that each client may have, of the whole appliance; None: any.
    """

    def __init__(
        self,
        timers: Timers,
        permits: Permits,
        *,
        handshakes: Permits | None,
        counts: ClientCounts,
        prefixes: Prefixes,
        cap: int | None,
        grace_secs: float,
        cells: memoryview,
        reporter: Reporter,
        refusals: RefusalRing,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._timers = timers
        self.clock = clock
        self.permits = permits
        self.handshakes = handshakes
        self.counts = counts
        self._prefixes = prefixes
        self._cap = cap
        self._cells = cells
        self._reporter = reporter
        self._refusals = refusals
        self.members: set[Guest] = set()
        self.evictions: Evictions[Guest] = Evictions(self.members, grace_secs)
        self._wakes: list[Callable[[], None]] = []
        self._timer: Timer | None = None
        self._awaits: set[Permits] = set()

    def configure(self, *, prefixes: Prefixes, cap: int | None, grace_secs: float) -> None:
        """The values of a new generation. Whoever is inside stays, counted as before."""
        self._prefixes = prefixes
        self._cap = cap
        self.evictions.grace_secs = grace_secs

    # -- asked by the accept loops

    @property
    def held(self) -> int:
        """See ``Admission``."""
        return self.permits.held

    @property
    def limit(self) -> int:
        """See ``Admission``."""
        return self.permits.limit

    def may_enter(self) -> bool:
        """See ``Admission``: there is room, or somebody would give way."""
        lacks_handshake = self._lacks_handshake()
        if not lacks_handshake and self.permits.may_enter():
            return True
        return self._gives_way(lacks_handshake) is not None

    def enter(self, peer: object) -> Permit | None:
        """See ``Admission``. A client over its cap makes nobody leave."""
        client, cap = NOT_COUNTED, self._cap
        if cap is not None:
            prefix = self._prefixes.client_of(peer)
            if prefix is not None:
                client = self.counts.key_of(prefix)
                if not admits(self.counts, client, cap):
                    self._refuse(prefix, cap)
                    return None
        lacks_handshake = self._lacks_handshake()
        evicts = lacks_handshake or not self.permits.may_enter()
        if evicts:
            self._evict(lacks_handshake)
        handshake = None if self.handshakes is None else self.handshakes.try_acquire()
        if not self.permits.may_enter() or (handshake is None and self.handshakes is not None):
            # What gave way has not left: it cannot be, and if it is, the newcomer must not be one too many.
            if handshake is not None:
                handshake.release()
            if client != NOT_COUNTED:
                self.counts.remove(client)
            return None
        self.permits.take()
        return Entry(self, client, handshake, evicts=evicts)

    def wait(self, wake: Callable[[], None]) -> None:
        """See ``Admission``: at the next permit that is given back, or when somebody may have begun to give way."""
        self._wakes.append(wake)
        lacks_handshake = self._lacks_handshake()
        lacking = self.handshakes if lacks_handshake else self.permits
        if lacking is not None and lacking not in self._awaits:
            self._awaits.add(lacking)
            lacking.wait(lambda: self._freed(lacking))
        if self._timer is None:
            secs = self.evictions.wait_secs(self.clock(), only_handshakes=lacks_handshake)
            self._timer = self._timers.call_later(secs, self._on_timer)

    def descriptors_gone(self) -> None:
        """See ``Admission``. Only who holds a number below the limit makes one free that accept(2) may take."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        for guest in self.evictions.idle(MAX_EVICTED_FOR_DESCRIPTORS, lambda guest: guest.has_descriptor_below(limit)):
            self._cells[EVICTED_FOR_DESCRIPTORS] += 1
            guest.evict("evicted-for-descriptors")

    def close(self) -> None:
        """Wake nobody any more."""
        self._wakes.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- inside

    def _lacks_handshake(self) -> bool:
        return self.handshakes is not None and not self.handshakes.may_enter()

    def _gives_way(self, only_handshakes: bool) -> tuple[Guest, Standing] | None:
        if self.permits.held > self.permits.limit:
            return None  # lowered by a reload, which closes nothing: one that leaves makes no room yet
        return self.evictions.candidate(self.clock(), only_handshakes=only_handshakes)

    def _evict(self, only_handshakes: bool) -> None:
        found = self._gives_way(only_handshakes)
        if found is None:
            return
        guest, standing = found
        self._cells[EVICTED_CELLS[standing]] += 1
        guest.evict(REASONS[standing])
        self._reporter.report(
            "admission.evicted",
            "connections gave way to new ones, since all permits were held",
            level="warning",
            latest=REASONS[standing],
            handshakes_total=self._cells[EVICTED_HANDSHAKES],
            heads_total=self._cells[EVICTED_HEADS],
            idle_total=self._cells[EVICTED_IDLE],
            permits=self.permits.limit,
        )

    def _refuse(self, client: bytes, cap: int) -> None:
        self._cells[REFUSED_OVER_CLIENT_CAP] += 1
        text = client_text(client)
        self._refusals.note(text.encode(), OVER_CAP)
        self._reporter.report(
            "admission.over_client_cap",
            "a client has all connections that one client may have; one more was closed",
            level="warning",
            client=text,
            max_connections_per_client=cap,
        )

    def _freed(self, permits: Permits) -> None:
        self._awaits.discard(permits)
        self._wake()

    def _on_timer(self) -> None:
        self._timer = None
        self._wake()

    def _wake(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wakes, self._wakes = self._wakes, []
        for wake in wakes:
            wake()
