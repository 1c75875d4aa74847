"""The end: readiness first, a delay, the drain, tunnels last; and the command `stop`."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.conftest import StartAppliance
from tests.harness import Appliance, wait_until

GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
LONG_SECS = 600


def begin_to_stop(one: Appliance) -> None:
    # The master looks a moment later than a client: what comes before it is a stop in the middle of a start.
    wait_until(lambda: any(" started " in line for line in one.event_lines()), "the master knows that it is ready")
    os.kill(one.pid, signal.SIGTERM)
    wait_until(lambda: one.health("/readyz") == (503, b"draining\n"), "readiness is red")


def test_readiness_is_red_while_everybody_is_still_served(appliance: StartAppliance) -> None:
    one = appliance({"drain_delay_secs": LONG_SECS})
    with one.connect() as before:
        begin_to_stop(one)
        assert one.health("/healthz")[0] == 200
        assert before.request(GET).status == 502
        with one.connect() as after:
            answer = after.request(GET)
            assert answer.status == 502
            assert after.request(GET).status == 502, "nobody is told to go yet"
        assert not one.status()["ready"]
        os.kill(one.pid, signal.SIGTERM)
        assert one.process is not None
        assert one.process.wait(10) == 0, "one more signal does not wait for the delay"
    assert not any(" killed " in line for line in one.event_lines())


def test_the_drain_begins_after_the_delay(appliance: StartAppliance) -> None:
    one = appliance({"drain_delay_secs": 1})
    with one.connect() as idle:
        assert idle.request(GET).status == 502
        began = time.monotonic()
        begin_to_stop(one)
        assert idle.at_end()
        assert time.monotonic() - began >= 1
    assert one.process is not None
    assert one.process.wait(10) == 0


def test_a_worker_that_dies_in_the_delay_is_replaced(appliance: StartAppliance) -> None:
    one = appliance({"drain_delay_secs": LONG_SECS})
    begin_to_stop(one)
    (worker,) = one.workers
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: one.workers not in ((), (worker,)) and one.status()["workers"][0]["ready"], "it is replaced")
    with one.connect() as wire:
        assert wire.request(GET).status == 502
    os.kill(one.pid, signal.SIGTERM)
    assert one.process is not None
    assert one.process.wait(10) == 0


@pytest.mark.parametrize("secs", [0.0, 0.5])
def test_a_short_delay_ends_by_itself(appliance: StartAppliance, secs: float) -> None:
    one = appliance({"drain_delay_secs": secs})
    one.stop()
