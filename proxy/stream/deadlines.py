"""Deadlines of many connections with one timer.

Most deadlines are moved forward on every byte and never fire. So moving one later costs an attribute: the wheel looks
at an item when its earliest known deadline would be due, and asks then what its deadline is now.
"""

from __future__ import annotations

import asyncio
import heapq
from math import inf
from time import monotonic
from typing import Protocol

GRANULARITY_SECS = 0.1


class Deadlined(Protocol):
    """What the wheel watches.

    ``due`` belongs to the wheel: it looks at the item a granularity after that (infinity: not watched). So a deadline
    that is not earlier than ``due`` needs no word to the wheel.
    """

    due: float

    def next_deadline(self) -> float:
        """Monotonic time of the earliest deadline now, infinity when there is none."""

    def on_deadline(self, now: float) -> None:
        """The earliest deadline has passed."""


def _bucket_of(due: float) -> int:
    return round(due / GRANULARITY_SECS) + 1


class Deadlines:
    """The wheel: items by the tenth of a second in which they are to be looked at.

    Whoever sets a deadline ``when`` on an item calls ``watch(item, when)`` if ``when < item.due``.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._buckets: dict[int, set[Deadlined]] = {}
        self._order: list[int] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_bucket = 0
        self._done = 0  # the newest bucket that was looked through: what is already late goes into the next one

    def watch(self, item: Deadlined, when: float) -> None:
        """Look at ``item`` at ``when`` (monotonic seconds), or up to a granularity later."""
        if when == inf:
            return
        if item.due != inf:
            self._buckets[_bucket_of(item.due)].discard(item)
        bucket = max(int(when / GRANULARITY_SECS), self._done) + 1
        item.due = (bucket - 1) * GRANULARITY_SECS
        items = self._buckets.get(bucket)
        if items is None:
            self._buckets[bucket] = {item}
            heapq.heappush(self._order, bucket)
            if self._timer is None or bucket < self._timer_bucket:
                self._arm()
        else:
            items.add(item)

    def forget(self, item: Deadlined) -> None:
        """The item is closed: hold no reference to it (idempotent)."""
        if item.due != inf:
            self._buckets[_bucket_of(item.due)].discard(item)
            item.due = inf

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_bucket = self._order[0]
        delay = self._timer_bucket * GRANULARITY_SECS - monotonic()
        self._timer = self._loop.call_later(max(delay, 0.0), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        now = monotonic()
        current = self._done = int(now / GRANULARITY_SECS)
        try:
            while self._order and self._order[0] <= current:
                items = self._buckets[self._order[0]]
                while items:
                    item = items.pop()
                    item.due = inf
                    when = item.next_deadline()
                    if when <= now:
                        item.on_deadline(now)
                    else:
                        self.watch(item, when)
                del self._buckets[heapq.heappop(self._order)]
        finally:
            # Whatever on_deadline raised goes to the loop's exception handler; the other deadlines go on.
            if self._order:
                self._arm()
