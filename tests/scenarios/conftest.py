"""What the scenarios' tests share: the checkout, and wall times in the summary."""

from __future__ import annotations

import faulthandler
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WALL_TIMES = pytest.StashKey[dict[str, float]]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Minutes are no sign of a hang here: no stacks are printed before a test's own timeout."""
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def wall_times(request: pytest.FixtureRequest) -> dict[str, float]:
    """Seconds by the name of what took them; told after the last test."""
    return request.config.stash.setdefault(WALL_TIMES, {})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Tells the wall times."""
    times = config.stash.get(WALL_TIMES, {})
    if times:
        terminalreporter.section("wall time of scenarios")
        for name, secs in times.items():
            terminalreporter.line(f"{name:<20} {secs:6.1f} s")
