"""The bounded event log: what the other packages import, and the control process's side.

Every process has a ``ChannelReporter``; one process has the ``EventLog`` that merges what they tell (``merge``) and
writes it (``writer``). So the bound on lines is a bound over all processes.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from proxy.observe.merge import Line, Merger
from proxy.observe.record import MAX_DATAGRAM_BYTES, MalformedRecordError, Record, Value, decode
from proxy.observe.render import as_json, as_text
from proxy.observe.reporter import ChannelReporter, Reporter, open_channel
from proxy.observe.timestamps import rfc3339_ms
from proxy.observe.writer import LineWriter

__all__ = ["ChannelReporter", "EventLog", "EventLogSettings", "Reporter", "open_channel"]

TICK_SECS = 1.0
DATAGRAMS_PER_WAKEUP = 64
"""So that a flood of records cannot keep the control process from its other work."""
LAST_BATCHES = 64
"""At most so many batches are still taken at the end: whoever goes on writing then cannot hold it up."""
_RENDERERS: Mapping[str, Callable[[Line, str], bytes]] = {"text": as_text, "json": as_json}


class EventLogSettings(Protocol):
    """What of the configuration's ``[event_log]`` is read here."""

    @property
    def path(self) -> str: ...
    @property
    def format(self) -> str: ...
    @property
    def level(self) -> str: ...
    @property
    def max_lines_per_minute(self) -> int: ...


class EventLog:
    """Reads the channel, merges, writes. One in the whole appliance, in the control process."""

    def __init__(
        self,
        read_end: socket.socket,
        settings: EventLogSettings,
        *,
        source: str = "control",
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Open the log. ``source`` is said of what the log itself has to tell.

        Raises ConfigError and StartError for a path that cannot be opened, see ``LineWriter``.
        """
        self._read_end = read_end
        self._source = source
        self._clock = clock
        self._wall_clock = wall_clock
        self._render = _RENDERERS[settings.format]
        self._merger = Merger(settings.max_lines_per_minute, settings.level)
        self._writer = LineWriter(settings.path, key="event_log.path")
        self._seen_faults = 0
        self._seen_dropped = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def descriptors(self) -> int:
        """Descriptors that the log has for itself, the channel apart."""
        return self._writer.descriptors

    @property
    def level(self) -> str:
        """The lowest level that is written."""
        return self._merger.level

    @level.setter
    def level(self, level: str) -> None:
        self._merger.level = level

    def set_max_lines_per_minute(self, lines: int) -> None:
        """Another bound from now on."""
        self._merger.budget.resize(lines)

    @property
    def lines_written(self) -> int:
        """Lines that reached the target."""
        return self._writer.lines_written

    @property
    def lines_dropped(self) -> int:
        """Lines that the target did not take (full disk, blocked pipe)."""
        return self._writer.lines_dropped

    @property
    def lines_suppressed(self) -> int:
        """Lines not written for want of ``max_lines_per_minute``."""
        return self._merger.budget.lines_denied

    @property
    def occurrences(self) -> Mapping[str, int]:
        """All that was reported, by signature."""
        return self._merger.occurrences

    @property
    def suppressed(self) -> Mapping[str, int]:
        """Of ``occurrences``, those that had no line of their own, by signature."""
        return self._merger.suppressed

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the writer's thread, reading and the timer. After the fork, once."""
        self._loop = loop
        self._writer.start()
        loop.add_reader(self._read_end.fileno(), self._on_readable)
        self._timer = loop.call_later(TICK_SECS, self._on_timer)

    def reopen(self) -> None:
        """Open the file again (log rotation)."""
        self._writer.reopen()

    def close(self, timeout_secs: float) -> bool:
        """Take what is still in the channel, write the last lines and end, within ``timeout_secs`` of waiting.

        Whether all of it was written. The channel stays open: its owner is who made it.
        """
        if self._loop is not None:
            self._loop.remove_reader(self._read_end.fileno())
            self._loop = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for _ in range(LAST_BATCHES):
            if not self._take():
                break
        self._write(self._merger.finish(self._clock()))
        return self._writer.close(timeout_secs)

    def _on_readable(self) -> None:
        self._take()

    def _on_timer(self) -> None:
        try:
            self._take()
            self._watch_writer()
            self._write(self._merger.tick(self._clock()))
        finally:
            if self._loop is not None:
                self._timer = self._loop.call_later(TICK_SECS, self._on_timer)

    def _take(self) -> bool:
        """Merge one bounded batch of datagrams. Whether there may be more."""
        lines: list[Line] = []
        more = True
        for _ in range(DATAGRAMS_PER_WAKEUP):
            try:
                data = self._read_end.recv(MAX_DATAGRAM_BYTES + 1)
            except BlockingIOError:
                more = False
                break
            except OSError as error:
                more = False
                self._give_up_reading()
                self._add(lines, "events.channel_failed", "error", "cannot read the event channel", error=str(error))
                break
            try:
                record = decode(data)
            except MalformedRecordError as error:
                message = "a datagram on the event channel is not a record"
                self._add(lines, "events.malformed", "warning", message, reason=str(error), size_bytes=len(data))
                continue
            line = self._merger.add(record, self._clock())
            if line is not None:
                lines.append(line)
        self._write(lines)
        return more

    def _give_up_reading(self) -> None:
        """A descriptor in error is readable without end; the timer tries it again each second."""
        if self._loop is not None:
            self._loop.remove_reader(self._read_end.fileno())

    def _watch_writer(self) -> None:
        dropped, faults = self._writer.lines_dropped, self._writer.faults
        if dropped == self._seen_dropped and faults == self._seen_faults:
            return
        reason = self._writer.fault if faults != self._seen_faults else "the target does not take lines fast enough"
        lines: list[Line] = []
        self._add(lines, "event_log.dropped", "error", "event lines are lost", lines_total=dropped, error=reason)
        self._seen_dropped, self._seen_faults = dropped, faults
        self._write(lines)

    def _add(self, lines: list[Line], signature: str, level: str, message: str, **fields: Value) -> None:
        line = self._merger.add(Record(self._source, signature, 1, level, message, fields, ""), self._clock())
        if line is not None:
            lines.append(line)

    def _write(self, lines: list[Line]) -> None:
        if lines:
            now = rfc3339_ms(self._wall_clock())
            self._writer.write(b"".join(self._render(line, now) for line in lines), len(lines))
