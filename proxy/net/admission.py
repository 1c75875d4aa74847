"""Permits: the right to hold one client connection, counted once for all listeners that share them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Admission(Protocol):
    """What an accept loop asks before it accepts, and what decides on whom it has accepted."""

    @property
    def held(self) -> int:
        """Connections that have been let in."""

    @property
    def limit(self) -> int:
        """How many may be."""

    def may_enter(self) -> bool:
        """Whether one more could be let in now."""

    def enter(self, peer: object) -> Permit | None:
        """Let in whom accept(2) has just given, after ``may_enter``; None: not this one, who is to be closed."""

    def wait(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` once, when it is worth to ask ``may_enter`` again."""

    def descriptors_gone(self) -> None:
        """accept(2) found no free descriptor; a pause follows."""


class Permit:
    """One held permit. Whoever holds the connection releases it; a second release does nothing."""

    __slots__ = ("_permits",)

    def __init__(self, permits: Permits) -> None:
        self._permits: Permits | None = permits

    def release(self) -> None:
        """Give the permit back (idempotent)."""
        permits = self._permits
        if permits is not None:
            self._permits = None
            permits._give_back()


class Permits:
    """At most ``limit`` permits are held at any time.

    ``cells`` and ``index`` name a shared counter that always shows how many are held.
    """

    __slots__ = ("_cells", "_index", "_waiting", "held", "limit")

    def __init__(self, limit: int, cells: memoryview | None = None, index: int = 0) -> None:
        self.limit = limit
        self.held = 0
        self._cells = cells
        self._index = index
        self._waiting: list[Callable[[], None]] = []

    def try_acquire(self) -> Permit | None:
        """A permit, or None when all are held."""
        if self.held >= self.limit:
            return None
        self.take()
        return Permit(self)

    def take(self) -> None:
        """Count one as held, for a ``Permit`` of the caller's own making; only where ``may_enter``."""
        self.held += 1
        if self._cells is not None:
            self._cells[self._index] = self.held

    def may_enter(self) -> bool:
        """See ``Admission``."""
        return self.held < self.limit

    def enter(self, peer: object) -> Permit | None:
        """See ``Admission``: whoever it is."""
        return self.try_acquire()

    def descriptors_gone(self) -> None:
        """See ``Admission``: there is nobody to ask to leave."""

    def resize(self, limit: int) -> None:
        """Change the limit. A lower one takes nothing back: it counts once enough has been released."""
        raised = limit > self.limit
        self.limit = limit
        if raised:
            self._wake()

    def wait(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` once, as soon as a permit is free. All that wait are woken: the one that is woken alone may
        have lost its client meanwhile, and the others would stay asleep beside a free permit."""
        self._waiting.append(wake)

    def _give_back(self) -> None:
        self.held -= 1
        if self._cells is not None:
            self._cells[self._index] = self.held
        if self.held < self.limit:
            self._wake()

    def _wake(self) -> None:
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for wake in waiting:
                wake()
