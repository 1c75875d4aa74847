"""Token buckets of the whole appliance: one table in memory that all workers share.

A bucket is one number, the time at which it will be full again (the generic cell rate algorithm, the same decisions as
a token bucket's): a request that is granted moves it later by one token's time. A bucket that is full is as good as
none, so nothing has to be cleaned up.

Reading and writing it must not be torn apart by another worker. Each row of the table has a record lock (fcntl(2),
F_SETLK on one byte of the table's own memory file), held for some microseconds and never waited for in the kernel: it
is tried for at most TRY_NS. The kernel takes it from a worker that is killed. One that is stopped inside keeps it;
then the others go on without, at once for PATIENCE_NS, and a bucket of that row may grant too much: by what two
workers grant in the same microseconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from time import monotonic_ns
from typing import Final

from proxy.observe.counters import BUCKETS_CONTENDED, BUCKETS_FORGOTTEN

WAYS: Final = 8
"""Buckets a row. Where all are in use the fullest gives way, so who is furthest over its rate is never forgotten."""
ROWS: Final = 8192
_ROW_CELLS: Final = 2 * WAYS
_BYTES: Final = ROWS * _ROW_CELLS * 8
TRY_NS: Final = 5_000_000
PATIENCE_NS: Final = 1_000_000_000
_KEY_MASK: Final = (1 << 64) - 1


class Buckets:
    """The table; made by the master before it forks, inherited by every worker. It holds one descriptor.

    A place in it is taken by use only: 65,536 buckets are 1 MB of addresses, of which untouched pages cost nothing.
    """

    __slots__ = ("_cells", "_fd", "_memory", "_no_wait_until", "_told", "contended", "forgotten")

    def __init__(self) -> None:
        """Raises OSError when there is no memory or descriptor."""
        self._fd = os.memfd_create("rate-limits")
        os.ftruncate(self._fd, _BYTES)
        self._memory = mmap.mmap(self._fd, _BYTES)
        self._cells = memoryview(self._memory).cast("Q")
        self._no_wait_until = 0
        self.contended = 0
        """How often this process went on without the lock."""
        self.forgotten = 0
        """How many buckets that were not full gave way to others in this process."""
        self._told = (0, 0)

    def take(self, key: int, interval_ns: int, tolerance_ns: int, now_ns: int | None = None) -> int:
        """Take a token: one comes each ``interval_ns``, and ``tolerance_ns`` is the time of those beyond the first that
        may be taken at once.

        Returns the time in ns that is left of the tolerance, 0 or more; a negative number when there is no token: so
        long it takes until there is one. ``now_ns`` is CLOCK_MONOTONIC, the same in all processes.
        """
        now = monotonic_ns() if now_ns is None else now_ns
        key = key & _KEY_MASK or 1
        row = key % ROWS
        held = self._lock(row, now)
        try:
            at, full_at = self._find(row, key, now)
            spare = tolerance_ns - (full_at - now)
            if spare >= 0:
                self._cells[at] = key
                self._cells[at + WAYS] = full_at + interval_ns
            return spare
        finally:
            if held:
                self._unlock(row)

    def give_back(self, key: int, interval_ns: int) -> None:
        """Undo a ``take`` that was granted: another limit has refused the request."""
        key = key & _KEY_MASK or 1
        row = key % ROWS
        now = monotonic_ns()
        held = self._lock(row, now)
        try:
            at, full_at = self._find(row, key, now)
            if self._cells[at] == key:
                self._cells[at + WAYS] = max(0, full_at - interval_ns)
        finally:
            if held:
                self._unlock(row)

    def _find(self, row: int, key: int, now: int) -> tuple[int, int]:
        """The cell of the key's bucket, or of the one that gives way to it, and when the bucket is full."""
        start = row * _ROW_CELLS
        found = self._cells[start : start + _ROW_CELLS].tolist()
        for way in range(WAYS):
            if found[way] == key:
                return start + way, max(found[WAYS + way], now)
        fullest = min(found[WAYS:])
        if fullest > now:
            self.forgotten += 1
        return start + found.index(fullest, WAYS) - WAYS, now

    def publish(self, cells: memoryview) -> None:
        """Add to a worker's page of counters what has been counted since the last call."""
        contended, forgotten = self._told
        cells[BUCKETS_CONTENDED] += self.contended - contended
        cells[BUCKETS_FORGOTTEN] += self.forgotten - forgotten
        self._told = (self.contended, self.forgotten)

    def _lock(self, row: int, now: int) -> bool:
        give_up_at = now if now < self._no_wait_until else monotonic_ns() + TRY_NS
        while True:
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, row)
            except OSError:
                if monotonic_ns() >= give_up_at:
                    break
                os.sched_yield()
            else:
                return True
        self.contended += 1
        self._no_wait_until = monotonic_ns() + PATIENCE_NS
        return False

    def _unlock(self, row: int) -> None:
        with contextlib.suppress(OSError):  # ENOLCK: then it was not to be had either
            fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, row)

    def close(self) -> None:
        """Give the memory up."""
        self._cells.release()
        self._memory.close()
        os.close(self._fd)
