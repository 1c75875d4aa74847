"""The last connections and requests that were refused or cut, with the reason: a ring in a worker's page.

Who asks why reads the last ``REFUSALS_AT_ONCE`` of each worker. Under an attack they are written at most
``MAX_A_SECOND`` times a second, so that noting costs an addition and what went before is not gone at once; the rest is
only counted.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from proxy.observe.rows import CELL_BYTES, REFUSAL_BYTES, REFUSAL_HEADER_CELLS, REFUSALS_AT_ONCE, layout_of

MAX_A_SECOND: Final = 20
_RECORD: Final = struct.Struct("<QH46s32s40s")
"""Microseconds since the epoch (0: not written yet), status (0: none was sent), address, reason, detail."""
assert _RECORD.size == REFUSAL_BYTES

_WRITTEN_AT: Final = 0
_UNWRITTEN_AT: Final = 1


class Refusal(NamedTuple):
    """One refused or cut connection or request."""

    time: float
    """Seconds since the epoch."""
    address: str
    status: int
    """What the client was told; 0: nothing."""
    reason: str
    """From a closed set: ``header-timeout``, ``bad-request``, ``drain``..."""
    detail: str


class RefusalRing:
    """The worker's side."""

    __slots__ = ("_at", "_bytes", "_cells", "_clock", "_room", "_second")

    def __init__(self, cells: memoryview, clock: Callable[[], float] = time.time) -> None:
        """``cells``: the worker's page; ``clock`` gives seconds since the epoch."""
        self._cells = cells
        self._bytes = cells.cast("B")
        self._at = layout_of(cells).refusals
        self._clock = clock
        self._second = 0
        self._room = 0

    def note(self, address: bytes, reason: str, *, status: int = 0, detail: str = "") -> None:
        """Note one. ``reason`` and ``detail`` are never client text; what is too long is cut."""
        now = self._clock()
        second = int(now)
        if second != self._second:
            self._second = second
            self._room = MAX_A_SECOND
        cells, at = self._cells, self._at
        if not self._room:
            cells[at + _UNWRITTEN_AT] += 1
            return
        self._room -= 1
        written = cells[at + _WRITTEN_AT]
        start = (at + REFUSAL_HEADER_CELLS) * CELL_BYTES + written % REFUSALS_AT_ONCE * REFUSAL_BYTES
        record = _RECORD.pack(
            int(now * 1_000_000), status, address, reason.encode("ascii", "replace"), detail.encode("ascii", "replace")
        )
        self._bytes[start : start + REFUSAL_BYTES] = record
        cells[at + _WRITTEN_AT] = written + 1


def refusals(cells: memoryview) -> list[Refusal]:
    """Those in a page, the latest first. For another process: the one that is being written may be missing or mixed."""
    at = layout_of(cells).refusals
    data = cells.cast("B")
    written = cells[at + _WRITTEN_AT]
    found = []
    for number in range(written - 1, max(-1, written - 1 - REFUSALS_AT_ONCE), -1):
        start = (at + REFUSAL_HEADER_CELLS) * CELL_BYTES + number % REFUSALS_AT_ONCE * REFUSAL_BYTES
        time_us, status, *texts = _RECORD.unpack(data[start : start + REFUSAL_BYTES])
        address, reason, detail = (text.rstrip(b"\0").decode("ascii", "replace") for text in texts)
        found.append(Refusal(time_us / 1_000_000, address, status, reason, detail))
    return found


def refusal_counts(cells: memoryview) -> tuple[int, int]:
    """How many were noted and how many only counted, since the start."""
    at = layout_of(cells).refusals
    return cells[at + _WRITTEN_AT], cells[at + _UNWRITTEN_AT]
