"""Child processes: real forks, their ends, their pauses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from proxy.master.children import (
    FIRST_BACKOFF_SECS,
    MAX_BACKOFF_SECS,
    STABLE_AFTER_SECS,
    Child,
    describe_end,
    fork,
)
from tests.harness.processes import alive, title, wait_until


def end_of(entry: Callable[[], int], on_crash: Callable[[BaseException], None] = lambda _error: None) -> str:
    pid = fork("reverse-proxy: test", entry, on_crash)
    return describe_end(os.waitpid(pid, 0)[1])


def test_the_entrys_result_is_the_exit_status() -> None:
    assert end_of(lambda: 3) == "exit status 3"


def test_sys_exit_is_an_end_like_any_other() -> None:
    assert end_of(lambda: sys.exit(4)) == "exit status 4"


def test_an_exception_is_told_once_and_ends_the_child() -> None:
    read_end, write_end = os.pipe()

    def crash() -> int:
        raise RuntimeError("no good")

    def tell(error: BaseException) -> None:
        os.write(write_end, str(error).encode())

    end = end_of(crash, tell)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as told:
        assert told.read() == b"no good"
    assert end == "exit status 1"


def test_a_signal_is_named() -> None:
    def entry() -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    assert end_of(entry) == "SIGKILL"


def test_blocked_signals_reach_the_child_and_the_terminals_do_not() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:

        def entry() -> int:
            for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
                os.kill(os.getpid(), number)
            os.kill(os.getpid(), signal.SIGTERM)
            return 0

        assert end_of(entry) == "SIGTERM"
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_the_child_carries_its_title() -> None:
    read_end, write_end = os.pipe()
    pid = fork("reverse-proxy: worker 7", lambda: len(os.read(read_end, 1)), lambda _error: None)
    try:
        wait_until(lambda: title(pid) == "reverse-proxy: worker 7", "the title is set")
    finally:
        os.close(write_end)
        os.close(read_end)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


PARENT = """
import os, time
from proxy.master.children import fork
ready, tell = os.pipe()
def entry():
    os.write(tell, b"x")
    time.sleep(60)
    return 0
pid = fork("reverse-proxy: orphan", entry, lambda error: None)
os.read(ready, 1)
print(pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_a_child_ends_with_its_master() -> None:
    parent = subprocess.run([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, timeout=30)
    pid = int(parent.stdout)
    try:
        wait_until(lambda: not alive(pid), "the orphan ends")
    finally:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


def test_the_pause_doubles_to_its_bound_and_begins_anew_after_a_long_life() -> None:
    child = Child("worker 0", lambda: 0, lambda _error: None)
    now = 1000.0
    pauses = []
    for _ in range(9):
        child.started_at = now
        now += 1.0
        pauses.append(child.ended(now))
        assert child.restart_at == now + pauses[-1]
    assert pauses[:3] == [FIRST_BACKOFF_SECS, 2 * FIRST_BACKOFF_SECS, 4 * FIRST_BACKOFF_SECS]
    assert pauses[-1] == MAX_BACKOFF_SECS
    child.started_at = now
    assert child.ended(now + STABLE_AFTER_SECS) == FIRST_BACKOFF_SECS
    assert child.restarts == 10


@pytest.mark.parametrize(("wait_status", "text"), [(0, "exit status 0"), (256, "exit status 1"), (9, "SIGKILL")])
def test_ends_are_described(wait_status: int, text: str) -> None:
    assert describe_end(wait_status) == text
