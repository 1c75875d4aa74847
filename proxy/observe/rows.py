"""The part of a counter page that depends on the configuration: rows for sites and for backends, and their names.

A page describes itself: the names stand in it, written by the master alone, so that a worker finds the rows of its
routes and the control process the names of the rows with nothing but the page. Row 0 of either table is ``other``: it
takes what has no name of its own, and the names for which no room was left. A name keeps its row as long as the master
lives, also over reloads, so that totals only grow.

A site has a row of requests (a cell for each known method and status code) and a row of durations (a cell a bucket and
one for the sum). A backend has a row of ``BACKEND_CELLS`` cells.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Final

CELL_BYTES: Final = 8
FIXED_CELLS: Final = mmap.PAGESIZE // CELL_BYTES
"""What every page has; the rows come after it."""
OTHER: Final = "other"

METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "TRACE", OTHER)
METHOD_AT: Final = {method.encode(): at for at, method in enumerate(METHODS[:-1])}
"""Index in METHODS by the bytes on the wire; whatever is not here is ``OTHER_METHOD``."""
OTHER_METHOD: Final = len(METHODS) - 1

CLIENT_GONE: Final = 499
CODES: Final = (*sorted({*(status.value for status in HTTPStatus), CLIENT_GONE}), 0)
"""The known status codes; the last, 0, stands for all others."""
CODE_AT: Final = tuple(CODES.index(code) if code in CODES else len(CODES) - 1 for code in range(1000))
"""Index in CODES by status code."""

BOUNDS_SECS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the duration buckets; one more bucket takes what is longer."""
BUCKETS: Final = len(BOUNDS_SECS) + 1
SUM_AT: Final = BUCKETS
"""In a row of durations, the sum in microseconds."""
DURATION_CELLS: Final = BUCKETS + 1

BACKEND_OPEN: Final = 0
BACKEND_IDLE: Final = 1
BACKEND_EJECTED: Final = 2
BACKEND_FAILURES: Final = 3
BACKEND_CELLS: Final = 8
"""A cache line: open and idle connections, in how many routes it is left out now, failures since the start."""

REFUSALS_AT_ONCE: Final = 256
REFUSAL_BYTES: Final = 128
REFUSAL_HEADER_CELLS: Final = 8

NAME_BYTES: Final = 512
_NAME_CELLS: Final = NAME_BYTES // CELL_BYTES
_SITE_ROWS_AT: Final = FIXED_CELLS - 1
_BACKEND_ROWS_AT: Final = FIXED_CELLS - 2
_METHOD_CELLS: Final = len(CODES)
REQUEST_CELLS: Final = len(METHODS) * _METHOD_CELLS

MIN_SITE_ROWS: Final = 32
MAX_SITE_ROWS: Final = 257
MIN_BACKEND_ROWS: Final = 64
MAX_BACKEND_ROWS: Final = 1025


def room(names: int, least: int, most: int) -> int:
    """Rows for ``names`` names of today, twice as many of tomorrow's, and ``other``."""
    return min(most, max(least, 2 * names + 1))


class Layout:
    """Where the rows of a page with so many rows are, in cells from its beginning."""

    __slots__ = ("backend_names", "backend_rows", "backends", "cells", "durations", "refusals", "requests", "site_rows")

    def __init__(self, site_rows: int, backend_rows: int) -> None:
        self.site_rows: Final = site_rows
        self.backend_rows: Final = backend_rows
        self.backend_names: Final = FIXED_CELLS + site_rows * _NAME_CELLS
        self.requests: Final = self.backend_names + backend_rows * _NAME_CELLS
        self.durations: Final = self.requests + site_rows * REQUEST_CELLS
        self.backends: Final = self.durations + site_rows * DURATION_CELLS
        self.refusals: Final = self.backends + backend_rows * BACKEND_CELLS
        self.cells: Final = self.refusals + REFUSAL_HEADER_CELLS + REFUSALS_AT_ONCE * REFUSAL_BYTES // CELL_BYTES

    def describe(self, cells: memoryview) -> None:
        """Write into a new page how it is laid out."""
        cells[_SITE_ROWS_AT] = self.site_rows
        cells[_BACKEND_ROWS_AT] = self.backend_rows


def layout_of(cells: memoryview) -> Layout:
    """The layout that a page says it has."""
    return Layout(cells[_SITE_ROWS_AT], cells[_BACKEND_ROWS_AT])


Names = Callable[[], dict[str, int]]


def _stored(name: str) -> str:
    """A name as a page holds it."""
    return name.encode("utf-8")[:NAME_BYTES].decode("utf-8", "ignore")


class Rows:
    """A page's rows by name. Names that were added since it was made are found too."""

    __slots__ = ("_backends", "_cells", "_names", "_sites", "layout")

    def __init__(self, cells: memoryview) -> None:
        self._cells = cells
        self._names = cells.cast("B")
        self.layout: Final = layout_of(cells)
        self._sites: dict[str, int] = {}
        self._backends: dict[str, int] = {}

    # -- for whoever counts

    def requests_at(self, site: str, method: int) -> int:
        """The cell of a site's requests with ``METHODS[method]`` and the first of CODES; the others follow."""
        row = self._row(self._sites, site, self.sites)
        return self.layout.requests + row * REQUEST_CELLS + method * _METHOD_CELLS

    def durations_at(self, site: str) -> int:
        """The cell of a site's first bucket; the others and the sum follow."""
        return self.layout.durations + self._row(self._sites, site, self.sites) * DURATION_CELLS

    def backend_at(self, label: str) -> int:
        """The first cell of a backend's row."""
        return self.layout.backends + self._row(self._backends, label, self.backends) * BACKEND_CELLS

    # -- for whoever reads

    def sites(self) -> dict[str, int]:
        """The sites' rows by name, ``other`` with row 0."""
        return self._read(FIXED_CELLS, self.layout.site_rows)

    def backends(self) -> dict[str, int]:
        """The backends' rows by label, ``other`` with row 0."""
        return self._read(self.layout.backend_names, self.layout.backend_rows)

    # -- for the master

    def assign(self, sites: Iterable[str], backends: Iterable[str]) -> None:
        """Give each name a row, unless it has one or there is none left. For the master alone, which writes every page
        alike; before a worker asks."""
        self._write(FIXED_CELLS, self.layout.site_rows, sites)
        self._write(self.layout.backend_names, self.layout.backend_rows, backends)

    def clear_gauges(self) -> None:
        """Set what a dead process held to 0."""
        for row in range(len(self.backends())):
            at = self.layout.backends + row * BACKEND_CELLS
            for gauge in (BACKEND_OPEN, BACKEND_IDLE, BACKEND_EJECTED):
                self._cells[at + gauge] = 0

    def _row(self, known: dict[str, int], name: str, read: Names) -> int:
        row = known.get(name)
        if row is None:
            known.update(read())
            row = known.setdefault(_stored(name), 0)
        return row

    def _read(self, at: int, rows: int) -> dict[str, int]:
        found = {OTHER: 0}
        for row in range(1, rows):
            start = at * CELL_BYTES + row * NAME_BYTES
            if not self._names[start]:
                break
            found[bytes(self._names[start : start + NAME_BYTES]).rstrip(b"\0").decode("utf-8", "replace")] = row
        return found

    def _write(self, at: int, rows: int, names: Iterable[str]) -> None:
        known = self._read(at, rows)
        for name in names:
            if _stored(name) in known or len(known) >= rows:
                continue
            row = known[_stored(name)] = len(known)
            data = _stored(name).encode("utf-8")
            start = at * CELL_BYTES + row * NAME_BYTES
            # The first byte last: it is what says that there is a name.
            self._names[start + 1 : start + len(data)] = data[1:]
            self._names[start] = data[0]
