"""What the event log says of what it is told: pure, the time is handed in.

Theory of operation. All records of one signature, from whatever process, are one storm while they keep coming. Its
first occurrence is a line. From then on occurrences only count, and ``tick`` speaks: a summary at the end of each
window in which any was counted, a closing line at the end of the first window in which none came. So a storm of any
rate, over any number of processes, that lasts n windows is n + 2 lines; and nothing that is counted waits for a next
event to be told. Above that, LineBudget bounds the lines a minute over all signatures: a line that it denies keeps its
count, and the next summary of that signature tells it.
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

    def allow(self, signature: str, now: float) -> bool:
        """Whether one more line may be written now; a denied one is counted under ``signature``."""
        if self.has_room(now):
            self._recent.append(now)
            return True
        if not self._denied:
            self._denied_since = now
        self._denied[signature] = self._denied.get(signature, 0) + 1
        self.lines_denied += 1
        return False

    def has_room(self, now: float) -> bool:
        """Whether ``allow`` would allow."""
        recent = self._recent
        return len(recent) < (recent.maxlen or 1) or now - recent[0] >= MINUTE_SECS

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
        return Line("warning", SUPPRESSED, fields, "max_lines_per_minute was reached, these lines were not written")


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


class Merger:
    """Records in, lines out."""

    def __init__(self, max_lines_per_minute: int, level: str = "info") -> None:
        """``level``: records below it are counted but have no line."""
        self.budget = LineBudget(max_lines_per_minute)
        self.occurrences: dict[str, int] = {}
        """Every occurrence since the start, by signature."""
        self.suppressed: dict[str, int] = {}
        """Of those, the ones without a line of their own."""
        self._min_weight = LEVELS[level]
        self._storms: dict[str, _Storm] = {}

    def add(self, record: Record, now: float) -> Line | None:
        """Take a record at ``now`` (monotonic seconds); the line that it is worth at once, if any."""
        signature = record.signature
        if signature not in self.occurrences and len(self.occurrences) >= MAX_SIGNATURES:
            record = record._replace(signature=OVERFLOW, fields={"latest": signature}, trace="")
            signature = OVERFLOW
        self.occurrences[signature] = self.occurrences.get(signature, 0) + record.occurrences
        if LEVELS[record.level] < self._min_weight:
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
            if self.budget.allow(signature, now):
                line = Line(
                    record.level, signature, {"source": record.source, **record.fields}, record.message, record.trace
                )
        untold = record.occurrences - (line is not None)
        storm.window += untold
        storm.suppressed += untold
        self._suppress(signature, untold)
        return line

    def tick(self, now: float) -> list[Line]:
        """The lines that are due at ``now``. To be called about once a second, whether or not records come."""
        lines: list[Line] = []
        for signature, storm in list(self._storms.items()):
            if now < storm.window_ends_at:
                continue
            if storm.window and self.budget.allow(signature, now):
                lines.append(_summary(signature, storm))
                storm.window = 0
                storm.sources.clear()
            elif not storm.window and not storm.active:
                if storm.suppressed:
                    if not self.budget.has_room(now):
                        continue  # told as soon as there is room
                    self.budget.allow(signature, now)
                    lines.append(_closing(signature, storm))
                del self._storms[signature]
                continue
            storm.active = False
            storm.window_ends_at = max(storm.window_ends_at + WINDOW_SECS, now)
        return self._with_budget_summary(lines, now, final=False)

    def finish(self, now: float) -> list[Line]:
        """The last lines: how much every storm that goes on had, within the budget."""
        lines = [
            _closing(signature, storm)
            for signature, storm in self._storms.items()
            if storm.suppressed and self.budget.allow(signature, now)
        ]
        self._storms.clear()
        return self._with_budget_summary(lines, now, final=True)

    def _with_budget_summary(self, lines: list[Line], now: float, *, final: bool) -> list[Line]:
        denied = self.budget.summary(now, final=final)
        return lines if denied is None else [*lines, denied]

    def _suppress(self, signature: str, occurrences: int) -> None:
        if occurrences:
            self.suppressed[signature] = self.suppressed.get(signature, 0) + occurrences


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
