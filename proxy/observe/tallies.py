"""Requests and durations by site, method and status: counted in plain lists, brought to the page by the heartbeat.

A list's cell costs a fifth of a shared page's. A worker that is killed takes the counts since its last heartbeat with
it, half a second's; what is counted exactly is in ``counters``.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

from proxy.observe.rows import BOUNDS_SECS, BUCKETS, CODE_AT, CODES, METHOD_AT, OTHER, OTHER_METHOD, SUM_AT, Rows

Tally = list[float]
"""Of one site and method: a cell a duration bucket, a cell a status code (``CODE_CELL``), and the sum of seconds last.

``tally[CODE_CELL[status]] += 1``; ``tally[bisect_left(BOUNDS_SECS, secs)] += 1``; ``tally[-1] += secs``."""

CODE_CELL: Final = tuple(BUCKETS + at for at in CODE_AT)
"""A tally's cell by status code."""
_CELLS: Final = BUCKETS + len(CODES) + 1


class Tallies:
    """All tallies of one worker, over its generations of configuration."""

    __slots__ = ("_cells", "_rows", "_tallies")

    def __init__(self, cells: memoryview) -> None:
        """``cells``: the worker's page."""
        self._cells = cells
        self._rows = Rows(cells)
        self._tallies: dict[tuple[str, int], Tally] = {}

    def of(self, site: str, method: bytes) -> Tally:
        """The tally of a site (``other`` where there is none) and a method, whatever that is."""
        key = (site, METHOD_AT.get(method, OTHER_METHOD))
        tally = self._tallies.get(key)
        if tally is None:
            tally = self._tallies[key] = [0] * _CELLS
        return tally

    def count(self, site: str | None, method: bytes, status: int, duration_secs: float) -> None:
        """Count one answered request, where its tally is not at hand."""
        tally = self.of(OTHER if site is None else site, method)
        tally[CODE_CELL[status]] += 1
        tally[bisect_left(BOUNDS_SECS, duration_secs)] += 1
        tally[-1] += duration_secs

    def publish(self) -> None:
        """Add to the page what has been counted since the last time."""
        cells = self._cells
        for (site, method), tally in self._tallies.items():
            if not any(tally):
                continue
            durations = self._rows.durations_at(site)
            requests = self._rows.requests_at(site, method) - BUCKETS
            cells[durations + SUM_AT] += int(tally.pop() * 1_000_000)
            for at, count in enumerate(tally):
                if count:
                    cells[(durations if at < BUCKETS else requests) + at] += int(count)
            tally[:] = [0] * _CELLS
