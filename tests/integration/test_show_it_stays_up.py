"""The show (`python -m tests.show`): nothing fails under load while it is reloaded, upgraded and loses workers."""

from __future__ import annotations

import pytest

from tests.show.play import RELOADS, UPGRADES, WORKERS, play


@pytest.mark.timeout(500)
def test_nothing_fails_while_it_is_reloaded_upgraded_and_loses_workers() -> None:
    report = play()
    assert not report.faults, report.text()
    assert [(phase.times, phase.failed) for phase in report.phases] == [(RELOADS, 0), (UPGRADES, 0), (WORKERS, 0)]
    assert all(phase.short > 0 for phase in report.phases), report.text()
