"""Every Molecule scenario, from nothing to nothing, as ``make molecule`` runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.scenarios.conftest import ROOT

BY_HAND = {"rollout"}
"""Takes as long as all others together, more than continuous integration has: ``make molecule SCENARIO=rollout``."""

SCENARIOS = sorted({path.parent.name for path in ROOT.glob("molecule/*/molecule.yml")} - BY_HAND)
SCENARIO_SECS = 1800  # what the longest takes on a machine that is busy otherwise; a quiet one needs a third
END_SECS = 120  # for the hosts to be removed
TAIL_LINES = 120

boots_hosts = pytest.mark.skipif(
    os.geteuid() != 0 and os.environ.get("LAB", "labhost") == "labhost",
    reason="hosts are booted in namespaces: run as root, or with LAB=podman or LAB=docker (molecule/shared/README.md)",
)


def run(*arguments: str, log: Path, timeout_secs: float) -> int:
    """The exit code of ``molecule/shared/run``; it is ended, and removes its hosts, whatever happens here."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            [str(ROOT / "molecule/shared/run"), *arguments], stdin=subprocess.DEVNULL, stdout=out, stderr=out
        )
        try:
            return process.wait(timeout_secs)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(END_SECS)


def tail(log: Path) -> str:
    """The last lines of what a run has said."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:])


@boots_hosts
@pytest.mark.timeout(SCENARIO_SECS + END_SECS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario(scenario: str, tmp_path: Path, wall_times: dict[str, float]) -> None:
    began = time.monotonic()
    try:
        code = run(scenario, log=tmp_path / "log", timeout_secs=SCENARIO_SECS)
    finally:
        wall_times[scenario] = time.monotonic() - began
    assert code == 0, f"molecule/shared/run {scenario} has ended with {code}:\n{tail(tmp_path / 'log')}"
