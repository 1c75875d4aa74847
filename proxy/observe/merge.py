"""What the event log says of what it is told: pure, the time is handed in.

Theory of operation. All records of one signature, from whatever process, are one storm while they keep coming. Its
first occurrence is a line. From then on occurrences only count, and ``tick`` speaks: a summary at the end of each
window in which any was counted, a closing line at the end of the first window in which none came. So a storm of any
rate, over any number of processes, that lasts n windows is n + 2 lines; and nothing that is counted waits for a next
event to be told. Above that, LineBudget bounds the lines a minute over all signatures: a first line that finds no room
is counted in its storm's next summary, and summaries and closing lines wait for room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from proxy.observe.record import LEVELS, Record, Value
from proxy.observe.reporter import FLUSH_INTERVAL_SECS, OVERFLOW, whole_occurrences

WINDOW_SECS = 10.0
FLUSH_LAG_SECS = 1.5 * FLUSH_INTERVAL_SECS
"""Counts reach the log up to one flush late. The first window is longer by this, so that the last counts of a storm
fall into its last window and not alone into one more."""
MINUTE_SECS = 60.0
MAX_SIGNATURES = 512
MAX_SIGNATURES_NAMED = 8
SUPPRESSED = "events.suppressed"


class Line(NamedTuple):
    """What becomes one line of the log."""

    level: str
    signature: str
    fields: Mapping[str, Value]
    message: str
    trace: str = ""


class LineBudget:
    """At most ``max_lines`` lines in any 60 seconds, one of them to tell what was suppressed."""

    def __init__(self, max_lines: int) -> None:
        """``max_lines`` is at least 1; at 1 the line that tells of the suppressed ones comes on top."""
        self.lines_denied = 0
        """Lines not written for want of budget, since the start."""
        self._recent: deque[float] = deque(maxlen=max(1, max_lines - 1))
        self._denied: dict[str, int] = {}
        self._denied_since = 0.0

    def resize(self, max_lines: int) -> None:
        """Another ``max_lines``; the lines of the last minute count on."""
        self._recent = deque(self._recent, maxlen=max(1, max_lines - 1))

    def take(self, now: float) -> bool:
        """Whether one more line may be written now; if so it counts."""
        recent = self._recent
        if len(recent) == recent.maxlen and now - recent[0] < MINUTE_SECS:
            return False
        recent.append(now)
        return True

    def deny(self, signature: str, now: float) -> None:
        """Count a line that is not written, now or later."""
        if not self._denied:
            self._denied_since = now
        self._denied[signature] = self._denied.get(signature, 0) + 1
        self.lines_denied += 1

    def summary(self, now: float, *, final: bool = False) -> Line | None:
        """The line that tells what was denied, once a minute; ``final``: at once."""
        if not self._denied or (now - self._denied_since < MINUTE_SECS and not final):
            return None
        ranked = sorted(self._denied.items(), key=lambda item: (-item[1], item[0]))
        named = ranked[:MAX_SIGNATURES_NAMED]
        fields: dict[str, Value] = {"lines": sum(self._denied.values())}
        fields["signatures"] = " ".join(f"{signature}:{lines}" for signature, lines in named)
        if len(ranked) > len(named):
            fields["others"] = sum(lines for _, lines in ranked[MAX_SIGNATURES_NAMED:])
        self._denied = {}
        return Line("warning", SUPPRESSED, fields, "max_lines_per_minute was reached, these lines were left out")


class _Storm:
    """One signature while its occurrences keep coming."""

    __slots__ = (
        "active",
        "last_at",
        "latest",
        "sources",
        "started_at",
        "suppressed",
        "total",
        "whole_left",
        "window",
        "window_ends_at",
    )

    def __init__(self, record: Record, now: float) -> None:
        self.latest = record
        self.started_at = now
        self.last_at = now
        self.total = 0
        self.suppressed = 0  # of total, those that had no line of their own
        self.window = 0  # of suppressed, those that no summary has told yet
        self.active = False  # whether any came in this window, the storm's first apart
        self.sources: set[str] = set()
        self.whole_left = whole_occurrences(record.level)
        self.window_ends_at = now + WINDOW_SECS + FLUSH_LAG_SECS

    def begin_window(self, now: float) -> None:
        """After a window has been told: the next begins where it ended, or now if it was told late."""
        self.window = 0
        self.active = False
        self.sources.clear()
        is_late = now >= self.window_ends_at + WINDOW_SECS
        self.window_ends_at = (now if is_late else self.window_ends_at) + WINDOW_SECS


class Merger:
    """Records in, lines out."""

    def __init__(self, max_lines_per_minute: int, level: str = "info") -> None:
        """``level``: records below it are counted but have no line; it may be changed at any time."""
        self.budget = LineBudget(max_lines_per_minute)
        self.occurrences: dict[str, int] = {}
        """Every occurrence since the start, by signature."""
        self.suppressed: dict[str, int] = {}
        """Of those, the ones without a line of their own."""
        self.level = level
        self._storms: dict[str, _Storm] = {}

    def add(self, record: Record, now: float) -> Line | None:
        """Take a record at ``now`` (monotonic seconds); the line that it is worth at once, if any."""
        signature = record.signature
        if signature not in self.occurrences and len(self.occurrences) >= MAX_SIGNATURES:
            record = record._replace(signature=OVERFLOW, fields={"latest": signature}, trace="")
            signature = OVERFLOW
        self.occurrences[signature] = self.occurrences.get(signature, 0) + record.occurrences
        if LEVELS[record.level] < LEVELS[self.level]:
            self._suppress(signature, record.occurrences)
            return None
        storm = self._storms.get(signature)
        if storm is None:
            storm = self._storms[signature] = _Storm(record, now)
        else:
            storm.active = True
            storm.latest = record
            storm.last_at = now
        storm.total += record.occurrences
        storm.sources.add(record.source)
        line = None
        if storm.whole_left:
            storm.whole_left -= 1
            if self.budget.take(now):
                line = _whole(record)
            else:
                self.budget.deny(signature, now)
        untold = record.occurrences - (line is not None)
        storm.window += untold
        storm.suppressed += untold
        self._suppress(signature, untold)
        return line

    def tick(self, now: float) -> list[Line]:
        """The lines that are due at ``now``. To be called about once a second, whether or not records come."""
        lines: list[Line] = []
        due = [item for item in self._storms.items() if item[1].window_ends_at <= now]
        due.sort(key=lambda item: item[1].window_ends_at)  # where the budget is short, who waits longest is first
        for signature, storm in due:
            over = not storm.window and not storm.active
            says = storm.suppressed if over else storm.window
            if says:
                if not self.budget.take(now):
                    continue  # told as soon as there is room
                lines.append(_closing(signature, storm) if over else _summary(signature, storm))
            if over:
                del self._storms[signature]
            else:
                storm.begin_window(now)
        return self._with_budget_summary(lines, now, final=False)

    def finish(self, now: float) -> list[Line]:
        """The last lines: how much every storm that goes on had, within the budget."""
        lines = [
            _closing(signature, storm)
            for signature, storm in self._storms.items()
            if storm.suppressed and self.budget.take(now)
        ]
        self._storms.clear()
        return self._with_budget_summary(lines, now, final=True)

    def _with_budget_summary(self, lines: list[Line], now: float, *, final: bool) -> list[Line]:
        denied = self.budget.summary(now, final=final)
        return lines if denied is None else [*lines, denied]

    def _suppress(self, signature: str, occurrences: int) -> None:
        if occurrences:
            self.suppressed[signature] = self.suppressed.get(signature, 0) + occurrences


def _whole(record: Record) -> Line:
    fields = {"source": record.source, **record.fields}
    return Line(record.level, record.signature, fields, record.message, record.trace)


def _summary(signature: str, storm: _Storm) -> Line:
    latest = storm.latest
    fields: dict[str, Value] = {
        "suppressed": storm.window,
        **latest.fields,
        "window_secs": int(WINDOW_SECS),
        "processes": len(storm.sources),
    }
    return Line(latest.level, signature, fields, latest.message)


def _closing(signature: str, storm: _Storm) -> Line:
    duration_secs = round(storm.last_at - storm.started_at, 1)
    fields: dict[str, Value] = {"ended": "true", "count": storm.total, "duration_secs": duration_secs}
    return Line(storm.latest.level, signature, fields, storm.latest.message)
