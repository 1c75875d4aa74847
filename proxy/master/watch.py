"""Finds workers that hang, and ends them: SIGABRT first, since it makes them write where they are; then SIGKILL."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from proxy.master.children import Child
from proxy.observe import counters
from proxy.observe.events import Reporter

KILL_AFTER_SECS = 2.0
"""What does not even end by SIGABRT, such as a stopped process, is killed so much later."""
PAUSE_SECS = 5.0
"""The master looks each second. If it did not for so long, then it stood still itself, and perhaps all of them did."""


@dataclass(slots=True)
class _Watched:
    """What is known of one worker process."""

    pid: int
    was_ready: bool = False
    aborted_at: float | None = None


class HangWatch:
    """Judges workers by the heartbeat that each writes to its page twice a second. ``look`` is called each second."""

    def __init__(self, start_timeout_secs: float, reporter: Reporter) -> None:
        """``start_timeout_secs``: how long a worker may take until it is ready for the first time."""
        self._timeout_secs = 0.0
        self._start_timeout_secs = start_timeout_secs
        self._reporter = reporter
        self._watched: dict[str, _Watched] = {}
        self._looked_at: float | None = None
        self._judged_from = 0.0

    def begin(self, now: float, timeout_secs: float) -> None:
        """A round of looks begins at ``now`` (monotonic seconds); ``timeout_secs``: how old a heartbeat may be."""
        self._timeout_secs = timeout_secs
        if self._looked_at is not None and now - self._looked_at >= PAUSE_SECS:
            self._judged_from = now
        self._looked_at = now

    def look(self, child: Child, cells: memoryview, now: float) -> None:
        """Judge one worker by its page."""
        if child.pid is None:
            return
        watched = self._watched.get(child.name)
        if watched is None or watched.pid != child.pid:
            watched = self._watched[child.name] = _Watched(child.pid)
        if watched.aborted_at is not None:
            if now - watched.aborted_at >= KILL_AFTER_SECS:
                child.send(signal.SIGKILL)
            return
        watched.was_ready = watched.was_ready or bool(cells[counters.READY])
        beat_at = cells[counters.HEARTBEAT_MS] / 1000 if watched.was_ready else child.started_at
        limit_secs = self._timeout_secs if watched.was_ready else self._start_timeout_secs
        if now - max(beat_at, self._judged_from) >= limit_secs:
            watched.aborted_at = now
            what = "has given no heartbeat" if watched.was_ready else "was not ready"
            self._reporter.report(
                "worker.hung",
                f"{child.name} {what} for {now - beat_at:.1f} s: it is ended and replaced",
                process=child.name,
                pid=child.pid,
            )
            child.send(signal.SIGABRT)
