"""A process's side of the bounded reporter: count every occurrence, send the first whole, the rest as numbers.

Whatever loops, a call for a known signature is an addition and two assignments; the datagrams are at most one a
signature and flush. What the channel does not take stays counted here and goes with a later flush.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol

from proxy.observe import counters
from proxy.observe.record import LEVELS, MAX_NAME_CHARS, Record, Value, clip, encode, format_trace

FLUSH_INTERVAL_SECS = 1.0
RETRY_INTERVAL_SECS = 0.1
"""After a flush that the channel did not take whole: its buffer holds about 250 datagrams for all processes."""
QUIET_SECS = 5.0
"""A signature without an occurrence for so long is forgotten: its next one is a first, whole, again. Shorter than the
event log's window, so that a new storm there begins with a whole record."""
MAX_SIGNATURES = 256
OVERFLOW = "events.overflow"

WHOLE_OCCURRENCES: Mapping[int, int] = {LEVELS["debug"]: 16, LEVELS["info"]: 16}
"""How many occurrences of a signature are told whole before the counting begins, by level's weight; others: 1.
Lifecycle events (one ``worker.started`` for each worker) are info and each has its own fields."""


def whole_occurrences(level: str) -> int:
    """How many occurrences at ``level`` are told whole before they are only counted."""
    return WHOLE_OCCURRENCES.get(LEVELS.get(level, LEVELS["error"]), 1)


class Reporter(Protocol):
    """Where every part of the program tells that something went wrong or has changed."""

    def report(
        self,
        signature: str,
        message: str,
        *,
        level: str = "error",
        exc: BaseException | None = None,
        **fields: Value,
    ) -> None:
        """Tell one occurrence. Never raises, never blocks, may be called at any rate.

        ``signature`` comes from a closed set ("accept.emfile"): never client text, never a number that varies.
        """


def open_channel() -> tuple[socket.socket, socket.socket]:
    """``(read end, write end)`` of the channel that all processes share, both non-blocking; made before the fork.

    Datagrams, so that records of several writers never mix, and a reader that restarts finds the next one whole.
    """
    read_end, write_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    read_end.setblocking(False)
    write_end.setblocking(False)
    return read_end, write_end


class _Tally:
    """One signature in this process."""

    __slots__ = ("active_at", "fields", "level", "message", "pending", "signature", "unsent_whole", "whole_left")

    def __init__(self, signature: str, level: str, now: float) -> None:
        self.signature = signature
        self.level = level
        self.message = ""
        self.fields: Mapping[str, Value] = {}
        self.pending = 0  # occurrences not handed over, those in unsent_whole apart
        self.unsent_whole: list[bytes] = []
        self.whole_left = whole_occurrences(level)
        self.active_at = now


class ChannelReporter:
    """The reporter of one process. Not for use by several threads."""

    def __init__(
        self,
        source: str,
        channel: socket.socket,
        cells: memoryview | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``source`` names the process in the log; ``channel`` is the write end; ``clock`` gives seconds."""
        self.source = source
        self._channel = channel
        self._cells = counters.private_cells() if cells is None else cells
        self._clock = clock
        self._tallies: dict[str, _Tally] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.on_report: Callable[[str, Mapping[str, Value]], None] | None = None
        """Is told each occurrence, whatever becomes of it here; must not raise."""

    def report(
        self,
        signature: str,
        message: str,
        *,
        level: str = "error",
        exc: BaseException | None = None,
        **fields: Value,
    ) -> None:
        """Tell one occurrence (see ``Reporter.report``)."""
        self._cells[counters.EVENTS_REPORTED] += 1
        if self.on_report is not None:
            self.on_report(signature, fields)
        tally = self._tallies.get(signature)
        if tally is None:
            tally = self._new_tally(signature, level)
            if tally is self._tallies.get(OVERFLOW):
                fields = {"latest": clip(signature, 2 * MAX_NAME_CHARS)}
                message = f"more than {MAX_SIGNATURES} kinds of events at once"
        if tally.whole_left:
            self._send_whole(tally, message, exc, fields)
            return
        tally.pending += 1
        tally.message = message
        tally.fields = fields

    @property
    def unsent(self) -> int:
        """Occurrences that are counted here and not yet handed over."""
        return sum(tally.pending + len(tally.unsent_whole) for tally in self._tallies.values())

    def flush(self) -> None:
        """Hand over what is counted, one datagram a signature; what the channel does not take stays. Never raises."""
        now = self._clock()
        unsent = 0
        open_way = True
        # A snapshot of the keys: the garbage collector may run here and report a task that was never awaited.
        for signature in tuple(self._tallies):
            tally = self._tallies[signature]
            if tally.pending or tally.unsent_whole:
                tally.active_at = now
                open_way = open_way and self._send_tally(tally)
                if open_way:
                    # To the end: where the channel takes only some, each signature has its turn.
                    self._tallies[signature] = self._tallies.pop(signature)
                unsent += tally.pending + len(tally.unsent_whole)
            elif now - tally.active_at >= QUIET_SECS:
                del self._tallies[signature]
        self._cells[counters.EVENTS_UNSENT] = unsent

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Flush each second on ``loop`` and report the exceptions that its callbacks and tasks let out."""
        self._loop = loop
        loop.set_exception_handler(self._on_loop_exception)
        self._timer = loop.call_later(FLUSH_INTERVAL_SECS, self._on_timer)

    def detach(self) -> None:
        """Stop the timer, give the loop its own exception handler back, flush a last time. May be called twice."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._loop is not None:
            self._loop.set_exception_handler(None)
            self._loop = None
        self.flush()

    def _on_timer(self) -> None:
        if self._loop is None:
            return
        try:
            self.flush()
        finally:
            behind = self._cells[counters.EVENTS_UNSENT] > 0
            interval_secs = RETRY_INTERVAL_SECS if behind else FLUSH_INTERVAL_SECS
            self._timer = self._loop.call_later(interval_secs, self._on_timer)

    def _new_tally(self, signature: str, level: str) -> _Tally:
        """The tally of a new signature, or the common one when there are too many."""
        if len(self._tallies) >= MAX_SIGNATURES:
            signature, level = OVERFLOW, "error"
        tally = self._tallies.get(signature)
        if tally is None:
            tally = self._tallies[signature] = _Tally(signature, level, self._clock())
        return tally

    def _send_whole(self, tally: _Tally, message: str, exc: BaseException | None, fields: Mapping[str, Value]) -> None:
        tally.whole_left -= 1
        tally.active_at = self._clock()
        tally.message = message
        tally.fields = fields
        data = self._encode(tally, 1, "" if exc is None else format_trace(exc))
        if not self._send(data):
            tally.unsent_whole.append(data)

    def _encode(self, tally: _Tally, occurrences: int, trace: str) -> bytes:
        record = Record(self.source, tally.signature, occurrences, tally.level, tally.message, tally.fields, trace)
        try:
            return encode(record)
        except Exception:  # noqa: BLE001 - a field whose __str__ raises: the occurrence still counts
            return encode(record._replace(message="(a report that cannot be told)", fields={}))

    def _send_tally(self, tally: _Tally) -> bool:
        """Hand over what one tally has. False when the channel is full."""
        while tally.unsent_whole:
            if not self._send(tally.unsent_whole[0]):
                return False
            del tally.unsent_whole[0]
        if not tally.pending:
            return True
        occurrences = tally.pending
        if not self._send(self._encode(tally, occurrences, "")):
            return False
        tally.pending -= occurrences
        return True

    def _send(self, data: bytes) -> bool:
        try:
            self._channel.send(data)
        except OSError:  # EAGAIN, ENOBUFS: the reader is slow or restarting
            return False
        return True

    def _on_loop_exception(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        exc = context.get("exception")
        kind = "none" if exc is None else type(exc).__name__
        where = _qualified_name(context, None if exc is None else exc.__traceback__)
        self.report(f"loop.{kind}.{where}", context.get("message") or "exception in the event loop", exc=exc)


_LOOP_FILES = ("uvloop/", "asyncio/")


def _qualified_name(context: Mapping[str, Any], trace: TracebackType | None) -> str:
    """The callback or coroutine that raised, by its code's name.

    uvloop's handles do not tell their callback, and their text has addresses in it, which would make each one a
    signature of its own; the outermost frame that is not the loop's own is the callback's.
    """
    while trace is not None:
        code = trace.tb_frame.f_code
        if not any(part in code.co_filename for part in _LOOP_FILES):
            return code.co_qualname
        trace = trace.tb_next
    future = context.get("task") or context.get("future")
    if isinstance(future, asyncio.Task):
        return getattr(future.get_coro(), "__qualname__", "task")
    return "unknown"
