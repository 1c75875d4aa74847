"""Numbers by client, shared by all workers without a lock: a table a slot, written by its worker alone, read by all.

Made by the master before the fork, like the counters. What a client's key has is the sum of its rows over all tables:

    view = tables.view(slot)              # in the worker of that slot
    at = view.claim(key)                  # the client's own row here: an index into view.cells, or NO_ROW
    view.cells[at] += 1                   # written first,
    if view.total(key) > cap: ...         # then read: two workers that do so at once both see both

So a limit is never exceeded (two that come at the same moment may both be told no), and a worker that is stopped or
killed holds nothing that another waits for: the master calls ``clear(slot)`` when it has reaped a worker.

A key is a keyed 64-bit hash (``key_of``), made with a secret of the master's: nobody outside can choose keys that meet.
A table is an array of sets of eight rows; a key may stand in any row of its set. A row is ``width`` cells of 8 bytes, 0
at first. When all rows of a set are taken, ``claim`` gives NO_ROW, or takes over the row whose first cell is the
smallest (``claim(key, oldest=True)``: for rows that begin with a time, such as those of rate limits).
"""

from __future__ import annotations

import hashlib
import mmap
import os
from typing import Final

CELL_BYTES: Final = 8
ROWS_A_SET: Final = 8
"""The keys of a set are one cache line."""
NO_ROW: Final = -1
_KEY_BYTES: Final = 8
_SECRET_BYTES: Final = 32


class SharedTables:
    """The memory of all slots. Kept by the master, inherited by every child."""

    def __init__(self, slots: int, rows: int, width: int = 1) -> None:
        """Map a table for each of ``slots`` (at least 1) with at least ``rows`` rows of ``width`` cells.

        Memory is taken by what is used of it only. OSError when none is to be had.
        """
        sets = 1 << max(0, (-(-rows // ROWS_A_SET) - 1).bit_length())
        self.width: Final = width
        self.rows: Final = sets * ROWS_A_SET
        self._set_mask = sets - 1
        self._secret = os.urandom(_SECRET_BYTES)
        size = self.rows * (1 + width) * CELL_BYTES
        self._maps = tuple(mmap.mmap(-1, size, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS) for _ in range(slots))
        self._tables = tuple(memoryview(one).cast("Q") for one in self._maps)

    def key_of(self, identity: bytes) -> int:
        """The key of a client (its network prefix, with whatever else tells rows apart): never 0."""
        # The secret before the text is as good as a key to this function, and half the work.
        digest = hashlib.blake2b(self._secret + identity, digest_size=_KEY_BYTES).digest()
        return int.from_bytes(digest, "little") or 1

    def view(self, slot: int) -> TableView:
        """The table of ``slot`` to write, and all of them to read."""
        return TableView(self._tables, slot, self._set_mask, self.width)

    def clear(self, slot: int) -> None:
        """Forget what a dead worker held. Only for a slot whose process has been reaped."""
        # The kernel gives the pages back, and who reads meanwhile reads 0.
        self._maps[slot].madvise(mmap.MADV_REMOVE)


class TableView:
    """A worker's own table, and all of them to be summed. ``cells`` is its own, indexed by what ``claim`` gave."""

    __slots__ = ("_mask", "_others", "_span", "_width", "cells")

    def __init__(self, tables: tuple[memoryview, ...], slot: int, mask: int, width: int) -> None:
        self.cells: Final = tables[slot]
        self._others = tables[:slot] + tables[slot + 1 :]
        self._mask = mask
        self._width = width
        self._span = ROWS_A_SET * (1 + width)

    def find(self, key: int) -> int:
        """The first cell of the key's row here, or NO_ROW."""
        start = (key & self._mask) * self._span
        keys = self.cells[start : start + ROWS_A_SET].tolist()
        return start + ROWS_A_SET + keys.index(key) * self._width if key in keys else NO_ROW

    def claim(self, key: int, *, oldest: bool = False) -> int:
        """As ``find``, but takes a row for the key (its cells 0) where it has none.

        With ``oldest`` a full set gives up the row whose first cell is the smallest; else NO_ROW stands for: no room.
        """
        start = (key & self._mask) * self._span
        cells, width, values = self.cells, self._width, start + ROWS_A_SET
        keys = cells[start:values].tolist()
        if key in keys:
            return values + keys.index(key) * width
        if 0 in keys:
            way = keys.index(0)
        elif oldest:
            way = min(range(ROWS_A_SET), key=lambda one: cells[values + one * width])
        else:
            return NO_ROW
        at = values + way * width
        # Nobody's while it is being emptied: who sums up meanwhile must not take the old numbers for the new key's.
        cells[start + way] = 0
        for cell in range(at, at + width):
            cells[cell] = 0
        cells[start + way] = key
        return at

    def release(self, at: int) -> None:
        """Give up the row that ``claim`` gave."""
        start = at - at % self._span
        self.cells[start + (at - start - ROWS_A_SET) // self._width] = 0

    def elsewhere(self, key: int, cell: int = 0) -> int:
        """The sum of the key's ``cell`` (of its row) over the tables of all other slots."""
        start = (key & self._mask) * self._span
        values = start + ROWS_A_SET
        total = 0
        for cells in self._others:
            keys = cells[start:values].tolist()
            if key in keys:
                total += cells[values + keys.index(key) * self._width + cell]
        return total

    def total(self, key: int, cell: int = 0) -> int:
        """``elsewhere`` and here.

        A reader in another process sees what was written before: a processor's own stores wait in a buffer of some
        dozens, and an interpreter has made thousands between a store here and this.
        """
        at = self.find(key)
        return self.elsewhere(key, cell) + (0 if at == NO_ROW else self.cells[at + cell])
