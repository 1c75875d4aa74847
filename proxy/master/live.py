"""The live line of a terminal, drawn from the shared counters."""

from __future__ import annotations

import os
from typing import TextIO

from proxy.observe import counters
from proxy.observe.counters import CounterBook

_CLEAR_LINE = "\r\x1b[K"
_COLUMNS_IF_UNKNOWN = 80


class LiveLine:
    """One line that is drawn again and again in the same place.

    The cursor is left at its beginning, so that a log line of another process writes over it.
    """

    def __init__(self, stream: TextIO, permits: int) -> None:
        self._stream = stream
        self._permits = permits
        self._requests = 0
        self._drawn_at = 0.0
        self._visible = False

    def draw(self, book: CounterBook, now: float) -> None:
        """Show what holds now; requests a second are those since the last call. ``now`` in seconds, monotonic."""
        requests = book.total(counters.REQUESTS)
        elapsed_secs = now - self._drawn_at
        rate = (requests - self._requests) / elapsed_secs if self._drawn_at and elapsed_secs > 0 else 0.0
        self._requests, self._drawn_at = requests, now
        fullest = max(
            (book.page(slot) for slot in range(book.slots)), key=lambda cells: cells[counters.DESCRIPTORS_OPEN]
        )
        text = (
            f"connections {book.total(counters.CONNECTIONS_OPEN)}"
            f" | permits held {book.total(counters.CONNECTIONS_OPEN)} of {self._permits}"
            f" | requests/s {rate:.0f}"
            f" | descriptors {fullest[counters.DESCRIPTORS_OPEN]} of {fullest[counters.DESCRIPTORS_LIMIT]}"
        )
        self._write(f"{_CLEAR_LINE}{text[: self._columns() - 1]}\r")
        self._visible = True

    def clear(self) -> None:
        """Leave the line empty (idempotent)."""
        if self._visible:
            self._write(_CLEAR_LINE)
            self._visible = False

    def _columns(self) -> int:
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns
        except OSError:
            columns = 0
        return columns or _COLUMNS_IF_UNKNOWN  # serial consoles and some containers say 0

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            self._visible = False  # the terminal is gone; SIGHUP tells the rest
