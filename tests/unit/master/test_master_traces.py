"""Tracebacks of dead children, and the watch that makes hanging ones leave them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from proxy.master.children import Child, Upbringing
from proxy.master.privileges import Privileges
from proxy.master.traces import Traces, shorten
from proxy.master.watch import KILL_AFTER_SECS, HangWatch
from proxy.observe import counters

TEXT = """\
Fatal Python error: Aborted

Thread 0x00007fb0d915e6c0 (most recent call first):
  File "/usr/lib/python3/threading.py", line 982 in run

Current thread 0x00007fb0dc9c1b80 (most recent call first):
  File "/opt/app/proxy/worker/main.py", line 12 in serve
  File "<frozen runpy>", line 88 in _run_code
"""


def test_the_thread_at_fault_comes_first() -> None:
    assert shorten(TEXT).splitlines() == [
        "Fatal Python error: Aborted",
        "Current thread 0x00007fb0dc9c1b80 (most recent call first):",
        "worker/main.py:12 serve",
        "<frozen runpy>:88 _run_code",
        "Thread 0x00007fb0d915e6c0 (most recent call first):",
        "python3/threading.py:982 run",
    ]
    assert shorten("") == ""


def test_a_deep_stack_is_cut() -> None:
    frames = "".join(f'  File "a.py", line {number} in f\n' for number in range(100))
    assert len(shorten("Current thread 0x1 (most recent call first):\n" + frames).splitlines()) < 30


@pytest.fixture
def traces() -> Iterator[Traces]:
    made = Traces()
    yield made
    made.close()


def crash() -> int:
    os.kill(os.getpid(), signal.SIGABRT)
    return 0


def test_each_child_has_a_region_and_each_death_its_own_text(traces: Traces) -> None:
    upbringing = Upbringing(Privileges(), traces)
    first, second = (Child(name, crash, lambda _error: None, upbringing) for name in ("worker 0", "worker 1"))
    for child in (first, second, first):
        child.start(0.0)
        assert child.pid is not None
        os.waitpid(child.pid, 0)
    for child in (first, second):
        text = child.traceback()
        assert text.startswith("Fatal Python error: Aborted")
        assert " crash" in text
        assert text.count("Fatal") == 1
        assert child.traceback() == "", "told once"


class Reports:
    """A reporter that remembers."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def report(self, signature: str, message: str, **_fields: Any) -> None:
        self.lines.append((signature, message))


class Fake(Child):
    """A child that is only told, and never there."""

    def send(self, number: signal.Signals) -> None:
        SENT.append(number)


SENT: list[signal.Signals] = []


class Scene:
    """One worker under watch, with a clock that the test moves."""

    def __init__(self) -> None:
        SENT.clear()
        self.reports = Reports()
        self.watch = HangWatch(60, self.reports)
        self.cells = counters.private_cells()
        self.child = Fake("worker 0", lambda: 0, lambda _error: None, pid=4711, started_at=1000.0)
        self.now = 1000.0

    def beat(self) -> None:
        self.cells[counters.READY] = 1
        self.cells[counters.HEARTBEAT_MS] = int(self.now * 1000)

    def until(self, now: float) -> list[signal.Signals]:
        while self.now < now:
            self.now += 1
            self.look()
        return SENT

    def look(self) -> None:
        self.watch.begin(self.now, 30)
        self.watch.look(self.child, self.cells, self.now)


def test_abort_then_kill() -> None:
    scene = Scene()
    scene.beat()
    assert scene.until(1029.0) == []
    assert scene.until(1030.0) == [signal.SIGABRT]
    assert scene.reports.lines == [
        ("worker.hung", "worker 0 has given no heartbeat for 30.0 s: it is ended and replaced")
    ]
    assert scene.until(1030.0 + KILL_AFTER_SECS) == [signal.SIGABRT, signal.SIGKILL]
    assert len(scene.reports.lines) == 1


def test_one_that_beats_lives() -> None:
    scene = Scene()
    for now in range(1000, 1300, 20):
        assert scene.until(now) == []
        scene.beat()


def test_a_draining_worker_beats_too() -> None:
    scene = Scene()
    scene.beat()
    scene.until(1010.0)
    scene.beat()
    scene.cells[counters.READY] = 0
    assert scene.until(1039.0) == []
    assert scene.until(1040.0) == [signal.SIGABRT]


def test_a_starting_worker_has_the_time_of_a_start() -> None:
    scene = Scene()
    scene.cells[counters.HEARTBEAT_MS] = 1_000_000
    assert scene.until(1059.0) == []
    assert scene.until(1060.0) == [signal.SIGABRT]
    assert "was not ready for 60.0 s" in scene.reports.lines[0][1]


def test_a_successor_is_judged_anew() -> None:
    scene = Scene()
    scene.beat()
    scene.until(1030.0)
    scene.child.pid, scene.child.started_at = 4712, 1030.0
    scene.cells[counters.READY] = scene.cells[counters.HEARTBEAT_MS] = 0
    assert scene.until(1089.0) == [signal.SIGABRT]
    assert scene.until(1090.0) == [signal.SIGABRT, signal.SIGABRT]


def test_nobody_is_judged_by_a_time_in_which_all_stood_still() -> None:
    scene = Scene()
    scene.beat()
    scene.until(1005.0)
    scene.now = 2000.0
    scene.look()
    assert SENT == []
    assert scene.until(2029.0) == []
    assert scene.until(2030.0) == [signal.SIGABRT]


def test_a_dead_worker_is_left_to_its_restart() -> None:
    scene = Scene()
    scene.child.pid = None
    assert scene.until(1100.0) == []
