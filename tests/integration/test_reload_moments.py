"""Reloads at odd moments (a start, a drain)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from tests.conftest import StartAppliance
from tests.harness import RawUpstream, wait_until
from tests.harness.reloading import post

# The worker's loop begins late, so that a signal comes while the master waits for it.
SLOW_START = """
import time
from proxy.worker.main import Worker
init = Worker.__init__
def late(self, *args):
    time.sleep(2)
    init(self, *args)
Worker.__init__ = late
"""


def test_one_that_comes_during_the_start_is_done_after_it(appliance: StartAppliance) -> None:
    # The program hangs up on itself: as soon as a worker exists, which is before it is ready.
    hang_up = (
        "import os, signal\n"
        "from proxy.master.children import Child\n"
        "start = Child.start\n"
        "def started(self, now):\n"
        "    start(self, now)\n"
        "    if self.slot == 0 and not self.restarts:\n"
        "        os.kill(os.getpid(), signal.SIGHUP)\n"
        "Child.start = started\n"
    )
    one = appliance({"workers": 2}, prelude=SLOW_START + hang_up)
    wait_until(lambda: one.status()["generation"] == 2, "the reload is done")
    assert one.ready()


def test_none_while_it_drains(appliance: StartAppliance, upstream: Callable[..., RawUpstream]) -> None:
    one = appliance({"workers": 2, "drain_delay_secs": 3}, upstream=upstream().url)
    wait_until(lambda: any(" started " in line for line in one.event_lines()), "it supervises")
    os.kill(one.pid, signal.SIGTERM)
    wait_until(lambda: any(" stopping " in line for line in one.event_lines()), "it is about to stop")
    document = post(one, "/reload")
    assert (document["result"], document["errors"]) == ("refused", ["it is about to stop"])
    assert one.process is not None
    assert one.process.wait(20) == 0
