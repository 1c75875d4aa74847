"""Who gives way to a newcomer when there is no room: decided from events and a clock that are handed in.

No sockets and no event loop, so that a simulation can play days in seconds (``python -m tests.simulation``).

Theory of operation. Nothing is kept for a request: what a connection waits for, and since when, is its own business
(``Member.standing``), and it is asked only when there is no room. Handshakes are few and short, so they stand in the
order of their age, the oldest first: finding one costs the same whatever their number. The others are found by a look
at all of them that yields a batch in order, and what of the batch has changed since is passed over. A batch is good for
a tenth of a second, or longer where there are very many members; a look before that is made only where a batch is used
up that had to leave some out, so that it paid for an eighth of all. So what an attack costs is bounded: some steps an
eviction, and beside them a small share of a processor.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Final, Generic, Protocol, TypeVar

from proxy.session.standing import Standing

BATCH: Final = 64
BATCH_PART: Final = 8
"""A look yields up to the larger of BATCH and a BATCH_PART-th of all members."""
LOOK_SECS: Final = 0.1
LOOK_SECS_A_MEMBER: Final = 10e-6
"""Between two looks: LOOK_SECS, or this for each member where that is more. A look takes some 0.4 us a member."""
LEAST_WAIT_SECS: Final = 0.005


class Member(Protocol):
    """A connection that has been let in."""

    def standing(self) -> tuple[Standing, float]:
        """What it waits for, and since when, in seconds of the clock. BUSY also when it is over."""


M = TypeVar("M", bound=Member)


class Evictions(Generic[M]):
    """Finds who gives way: the oldest handshake beyond the grace, then heads beyond it, then the longest idle."""

    __slots__ = ("_batch", "_good_until", "_handshakes", "_left_out", "_members", "grace_secs")

    def __init__(self, members: Collection[M], grace_secs: float) -> None:
        """``members``: all that have been let in and are not gone, kept by the caller."""
        self._members = members
        self.grace_secs = grace_secs
        self._handshakes: OrderedDict[M, float] = OrderedDict()
        self._batch: OrderedDict[M, tuple[Standing, float]] = OrderedDict()
        self._good_until = 0.0
        self._left_out = False

    def handshake_began(self, member: M, now: float, owing_secs: float = 0.0) -> None:
        """A member's handshake begins. ``owing_secs``: so long its client has already owed the next step, while it
        waited to be let in; counted where it is more than the grace."""
        if owing_secs >= self.grace_secs:
            self._handshakes[member] = now - owing_secs
            self._handshakes.move_to_end(member, last=False)
        else:
            self._handshakes[member] = now

    def handshake_ended(self, member: M) -> None:
        """The handshake is done (idempotent)."""
        self._handshakes.pop(member, None)

    def gone(self, member: M) -> None:
        """The member is no more."""
        self._handshakes.pop(member, None)
        self._batch.pop(member, None)

    def candidate(self, now: float, *, only_handshakes: bool = False) -> tuple[M, Standing] | None:
        """Who gives way now; None when nobody does. ``gone`` is to follow if the caller ends it."""
        for member, since in self._handshakes.items():
            if now - since >= self.grace_secs:
                return member, Standing.HANDSHAKE
            break
        if only_handshakes:
            return None
        found = None if now >= self._good_until else self._from_batch()
        if found is None and (now >= self._good_until or self._left_out):
            self._look(now)
            found = self._from_batch()
        return found

    def idle(self, count: int, fits: Callable[[M], bool]) -> list[M]:
        """The ``count`` longest idle members for which ``fits``."""
        found = [
            (since, number, member)
            for number, member in enumerate(self._members)
            for standing, since in (member.standing(),)
            if standing is Standing.IDLE and fits(member)
        ]
        return [member for _, _, member in heapq.nsmallest(count, found)]

    def wait_secs(self, now: float, *, only_handshakes: bool = False) -> float:
        """After so long it is worth to ask for a candidate again, if nothing else happens."""
        when = now + LOOK_SECS if only_handshakes else self._good_until
        for since in self._handshakes.values():
            when = min(when, since + self.grace_secs)
            break
        return max(LEAST_WAIT_SECS, when - now)

    def _from_batch(self) -> tuple[M, Standing] | None:
        batch = self._batch
        while batch:
            member, seen = next(iter(batch.items()))
            if member.standing() == seen:
                return member, seen[0]
            del batch[member]
        return None

    def _look(self, now: float) -> None:
        latest = now - self.grace_secs
        found = []
        for number, member in enumerate(self._members):
            standing, since = member.standing()
            if standing is Standing.IDLE or (standing is Standing.HEAD and since <= latest):
                found.append((standing, since, number, member))
        size = max(BATCH, len(self._members) // BATCH_PART)
        self._left_out = len(found) > size
        found = heapq.nsmallest(size, found) if self._left_out else sorted(found)
        self._good_until = now + max(LOOK_SECS, len(self._members) * LOOK_SECS_A_MEMBER)
        self._batch = OrderedDict((member, (standing, since)) for standing, since, _, member in found)


class Counts(Protocol):
    """How many connections each client has, over all workers."""

    def add(self, client: int) -> int:
        """Count one more. Returns how many there are now, those of other workers included."""

    def remove(self, client: int) -> None:
        """Count one less."""


def admits(counts: Counts, client: int, cap: int) -> bool:
    """Whether ``client`` may have one connection more; it is counted then, and ``counts.remove`` is owed.

    Counted first and looked at then, so that two workers that do so at once never let in one too many.
    """
    if counts.add(client) <= cap:
        return True
    counts.remove(client)
    return False
