"""What a drill is judged by, and how its result is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TextIO

from proxy.config.schema import Drill
from proxy.drill.play import Figures
from proxy.master.tables import console_for, table

_ROWS: tuple[tuple[str, Callable[[Figures], str]], ...] = (
    ("permits; attackers, at most at once", lambda one: f"{one.permits}; {one.attackers_arrived}, {one.attackers}"),
    ("attackers closed", lambda one: f"{one.attackers_closed}"),
    ("good clients served", lambda one: f"{one.good_percent:.1f} % of {one.good}"),
    ("their time, median and p99", lambda one: f"{1000 * one.p50_secs:.0f} ms, {1000 * one.p99_secs:.0f} ms"),
    ("event lines, bytes", lambda one: f"{one.event_lines}, {one.event_bytes}"),
    ("CPU, and without descriptors", lambda one: f"{one.cpu_percent:.0f} %, {one.cpu_percent_while_taken:.0f} %"),
    ("recovery", lambda one: f"{one.recovery_secs:.2f} s"),
    ("health: slowest, failed", lambda one: f"{1000 * one.health_slowest_secs:.0f} ms, {one.health_failed}"),
    ("leaked permits, descriptors", lambda one: f"{one.leaked_permits}, {one.leaked_descriptors}"),
)


def missed(figures: Figures, bars: Drill) -> list[str]:
    """Each bar that ``figures`` miss, with what was found and what was needed."""
    good_percent, recovery_secs = f"{figures.good_percent:.2f} %", f"{figures.recovery_secs:.2f} s"
    judged = (
        (
            figures.attackers_arrived > figures.permits,
            (
                f"only {figures.attackers_arrived} attackers came through in time, and there are {figures.permits} "
                "permits: this drill proves nothing; give it more seconds"
            ),
        ),
        (
            figures.good_percent >= bars.min_good_percent,
            f"{good_percent} of the good clients were served; drill.min_good_percent is {bars.min_good_percent:g}",
        ),
        (
            figures.event_lines <= bars.max_event_lines,
            f"{figures.event_lines} event lines; drill.max_event_lines is {bars.max_event_lines}",
        ),
        (
            figures.recovery_secs <= bars.max_recovery_secs,
            (
                f"{recovery_secs} from the return of the descriptors to the first good client that was served; "
                f"drill.max_recovery_secs is {bars.max_recovery_secs:g}"
            ),
        ),
        (figures.health_failed == 0, f"/healthz was not 200 {figures.health_failed} times"),
        (figures.leaked_permits == 0, f"{figures.leaked_permits} permits are still held without a client"),
        (figures.leaked_descriptors == 0, f"{figures.leaked_descriptors} descriptors more are open than before"),
    )
    return [f"{figures.round}: {text}" for reached, text in judged if not reached]


def to_dict(rounds: Sequence[Figures], faults: Sequence[str]) -> dict[str, Any]:
    """For programs."""
    return {"passed": not faults, "missed": list(faults), "rounds": [asdict(one) for one in rounds]}


def show(rounds: Sequence[Figures], faults: Sequence[str], stream: TextIO) -> None:
    """For people."""
    console = console_for(stream)
    rows = [(name, *(shown(one) for one in rounds)) for name, shown in _ROWS]
    console.print(table(("", *(one.round for one in rounds)), 1, rows))
    for one in rounds:
        for fault, count in one.faults.items():
            console.print(f"{one.round}: {count} good clients were not served: {fault}")
        for reason in one.not_ready:
            console.print(f"{one.round}: not ready meanwhile: {reason}")
    for fault in faults:
        console.print(f"missed: {fault}")
    console.print("failed" if faults else "passed: every bar was reached")
