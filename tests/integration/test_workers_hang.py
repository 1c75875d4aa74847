"""A worker that gives no sign of life is ended, tells where it hung, and is replaced."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from tests.conftest import StartAppliance
from tests.harness import Appliance, RawUpstream, alive, wait_until

REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
SOON = {"worker_heartbeat_timeout_secs": 1.5}

# SIGUSR2 makes a worker hang in Python code of its main thread.
HANGS = """
import signal, time
from proxy.worker import main as worker
serve = worker.run_worker
def stuck_in_the_mud(*_):
    while True:
        time.sleep(0.01)
def run_worker(context):
    signal.signal(signal.SIGUSR2, stuck_in_the_mud)
    return serve(context)
worker.run_worker = run_worker
"""
# The second worker process never becomes ready.
STARTS_NEVER = """
import mmap, time
from proxy.master import supervisor
from proxy.worker import main as worker
supervisor.READY_TIMEOUT_SECS = 2.0
starts = mmap.mmap(-1, 1)
serve = worker.run_worker
def run_worker(context):
    starts[0] += 1
    if starts[0] == 2:
        waiting_for_godot()
    return serve(context)
def waiting_for_godot():
    time.sleep(600)
worker.run_worker = run_worker
"""


def lines_of(one: Appliance, signature: str) -> list[str]:
    return [line for line in one.event_lines() if f" {signature} " in line]


def replaced(one: Appliance, pid: int) -> bool:
    return len(one.workers) == 2 and pid not in one.workers and one.ready()


def test_one_that_hangs_in_python_tells_where(appliance: StartAppliance, upstream: Callable[..., RawUpstream]) -> None:
    one = appliance({"workers": 2, **SOON}, upstream=upstream().url, prelude=HANGS)
    hung, sound = one.workers
    os.kill(hung, signal.SIGUSR2)
    wait_until(lambda: replaced(one, hung), "the worker is replaced", 20)
    assert sound in one.workers, "the other one goes on"
    wait_until(lambda: lines_of(one, "worker.died"), "its end is told")
    (told,) = lines_of(one, "worker.hung")
    assert 'process="worker 0"' in told
    assert f"pid={hung}" in told
    assert "has given no heartbeat for 1." in told or "has given no heartbeat for 2." in told
    (died,) = lines_of(one, "worker.died")
    assert "status=SIGABRT" in died
    assert "stuck_in_the_mud" in died, "where it hung"
    assert r"\nCurrent thread" in died, "escaped into one line"
    for _ in range(4):
        with one.connect() as client:
            assert client.request(REQUEST).status == 200


def test_one_that_is_stopped_is_killed(appliance: StartAppliance, upstream: Callable[..., RawUpstream]) -> None:
    one = appliance({"workers": 2, **SOON}, upstream=upstream().url)
    stopped, _ = one.workers
    os.kill(stopped, signal.SIGSTOP)
    wait_until(lambda: replaced(one, stopped), "the worker is replaced", 20)
    assert not alive(stopped)
    wait_until(lambda: lines_of(one, "worker.died"), "its end is told")
    (died,) = lines_of(one, "worker.died")
    assert "status=SIGKILL" in died
    assert "trace=" not in died, "it could not tell anything"
    for _ in range(4):
        with one.connect() as client:
            assert client.request(REQUEST).status == 200


def test_one_that_starts_gets_the_time_of_a_start(appliance: StartAppliance) -> None:
    one = appliance({"worker_heartbeat_timeout_secs": 0.7}, prelude=STARTS_NEVER)
    (first,) = one.workers
    wait_until(lambda: lines_of(one, "started"), "the master supervises")
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: lines_of(one, "worker.hung"), "the start takes too long", 20)
    (told,) = lines_of(one, "worker.hung")
    assert "was not ready for 2." in told or "was not ready for 3." in told
    wait_until(one.ready, "the third one is ready", 20)
    assert lines_of(one, "worker.died")


def test_a_fault_is_told_like_a_hang(appliance: StartAppliance) -> None:
    one = appliance({"workers": 2})
    victim, _ = one.workers
    wait_until(lambda: lines_of(one, "started"), "the master supervises")
    os.kill(victim, signal.SIGSEGV)
    wait_until(lambda: replaced(one, victim), "the worker is replaced", 20)
    wait_until(lambda: lines_of(one, "worker.died"), "its end is told")
    (died,) = lines_of(one, "worker.died")
    assert "status=SIGSEGV" in died
    assert "Segmentation fault" in died
    assert "worker/main.py:" in died
    assert not lines_of(one, "worker.hung")
