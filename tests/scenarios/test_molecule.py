"""Every Molecule scenario and variant, from nothing to nothing, as ``make molecule`` runs it, but several at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.harness import wait_until
from tests.scenarios.conftest import ROOT

LONGEST_FIRST = ("rollout", "alternative", "default", "compose", "compose@trixie")
"""So that no long one is alone at the end."""

SCENARIOS = sorted(
    [
        *(path.parent.name for path in ROOT.glob("molecule/*/molecule.yml")),
        *(f"{path.parent.name}@{path.name.partition('.')[0]}" for path in ROOT.glob("molecule/*/*.env.yml")),
    ],
    key=lambda name: (LONGEST_FIRST.index(name) if name in LONGEST_FIRST else len(LONGEST_FIRST), name),
)
AT_ONCE = (os.cpu_count() or 1) + 1
"""A scenario keeps about one processor busy, but where it waits for a clock: one more than processors has the rest."""

RUN = ROOT / "molecule/shared/run"
SCENARIO_SECS = 1800  # what the longest takes on a machine that is busy otherwise; a quiet one needs a third
END_SECS = 120  # for the hosts to be removed
LOOK_SECS = 0.2
TAIL_LINES = 120

boots_hosts = pytest.mark.skipif(
    os.geteuid() != 0 and os.environ.get("LAB", "labhost") == "labhost",
    reason="hosts are booted in namespaces: run as root, or with LAB=podman or LAB=docker (molecule/shared/README.md)",
)


class Pool:
    """Runs scenarios with ``program``, ``at_once`` at a time, each with a log of its own in ``folder``."""

    def __init__(self, folder: Path, scenarios: Iterable[str], program: Path = RUN, at_once: int = AT_ONCE) -> None:
        self.folder = folder
        self.program = program
        self.at_once = at_once
        self.waiting = list(scenarios)
        self.running: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
        self.ended: dict[str, tuple[int, float]] = {}

    def log(self, scenario: str) -> Path:
        """Where a run writes what it says."""
        return self.folder / f"{scenario}.log"

    def result(self, scenario: str) -> tuple[int, float]:
        """The exit code of a scenario and the seconds it took, as soon as it has ended; others go on meanwhile."""
        while scenario not in self.ended:
            self.step()
            time.sleep(LOOK_SECS)
        return self.ended[scenario]

    def end(self) -> None:
        """End what runs. It removes its hosts."""
        self.waiting.clear()
        for process, _ in self.running.values():
            process.send_signal(signal.SIGTERM)
        for process, _ in self.running.values():
            process.wait(END_SECS)

    def step(self) -> None:
        """Note what has ended, and begin what there is room for."""
        for scenario, (process, began) in list(self.running.items()):
            secs = time.monotonic() - began
            if process.poll() is None and secs > SCENARIO_SECS:
                process.send_signal(signal.SIGTERM)
                process.wait(END_SECS)
            if process.returncode is not None:
                del self.running[scenario]
                self.ended[scenario] = (process.returncode, secs)
        while self.waiting and len(self.running) < self.at_once:
            scenario = self.waiting.pop(0)
            with self.log(scenario).open("wb") as out:
                process = subprocess.Popen(
                    [str(self.program), scenario], stdin=subprocess.DEVNULL, stdout=out, stderr=out
                )
            self.running[scenario] = (process, time.monotonic())


@pytest.fixture(scope="module")
def pool(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Of the scenarios whose tests are to run. What still runs at the end, since a test was interrupted, is ended."""
    chosen = [
        str(item.callspec.params["scenario"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == test_scenario.__name__
    ]
    pool = Pool(tmp_path_factory.mktemp("scenarios"), chosen)
    try:
        yield pool
    finally:
        pool.end()


def tail(log: Path) -> str:
    """The last lines of what a run has said."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:])


STAND_IN = """#!/bin/bash
# Runs until there is a file of its name, with its exit code; a signal is told.
cd {folder}
trap 'touch $1.ended; exit 143' TERM
touch $1.began
while [ ! -e $1 ]; do sleep 0.05; done
exit $(cat $1)
"""


@pytest.fixture
def stand_ins(tmp_path: Path) -> Iterator[Pool]:
    """A pool of three programs that do nothing."""
    program = tmp_path / "run"
    program.write_text(STAND_IN.format(folder=tmp_path))
    program.chmod(0o755)
    pool = Pool(tmp_path, ("one", "two", "three"), program, at_once=2)
    try:
        yield pool
    finally:
        pool.end()


def test_pool_tells_each_its_own_result_and_runs_two_at_once(stand_ins: Pool) -> None:
    folder = stand_ins.folder
    (folder / "one").write_text("0")
    assert stand_ins.result("one")[0] == 0
    (folder / "two").write_text("1")
    assert stand_ins.result("two")[0] == 1
    wait_until((folder / "three.began").exists, "the third to begin")
    (folder / "three").write_text("2")
    assert [stand_ins.result(name)[0] for name in ("three", "two", "one")] == [2, 1, 0]


def test_pool_that_is_interrupted_ends_what_runs_and_begins_no_more(stand_ins: Pool) -> None:
    folder = stand_ins.folder
    stand_ins.step()
    wait_until(lambda: {"one", "two"} <= {path.stem for path in folder.glob("*.began")}, "two to begin")
    stand_ins.step()
    assert list(stand_ins.running) == ["one", "two"]
    stand_ins.end()
    stand_ins.step()
    assert {path.name for path in folder.glob("*.ended")} == {"one.ended", "two.ended"}
    assert not (folder / "three.began").exists()
    assert {name: code for name, (code, _) in stand_ins.ended.items()} == {"one": 143, "two": 143}


@boots_hosts
@pytest.mark.timeout(len(SCENARIOS) * (SCENARIO_SECS + END_SECS))
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario(scenario: str, pool: Pool, wall_times: dict[str, float]) -> None:
    code, wall_times[scenario] = pool.result(scenario)
    assert code == 0, f"molecule/shared/run {scenario} has ended with {code}:\n{tail(pool.log(scenario))}"
