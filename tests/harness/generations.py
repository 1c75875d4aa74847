"""An appliance over its upgrades: each makes a new master, which is no child of the test."""

from __future__ import annotations

import contextlib
import os
import re
import signal

from tests.harness.appliance import Appliance, cli
from tests.harness.processes import alive, descendants, wait_until

END_TIMEOUT_SECS = 20.0


class Generations:
    """The masters of ``one`` so far."""

    def __init__(self, one: Appliance) -> None:
        self.one = one
        self.pid = one.pid

    def upgrade(self) -> int:
        """``reverse-proxy upgrade``; the pid of the new master."""
        done = cli("upgrade", "--socket", self.one.admin_socket, timeout_secs=60)
        assert (done.returncode, done.stderr) == (0, ""), done
        return self._next()

    def upgrade_by_signal(self) -> int:
        """SIGUSR2; the pid of the new master once that answers."""
        os.kill(self.pid, signal.SIGUSR2)
        return self._next()

    def _next(self) -> int:
        answered: list[int] = []

        def another_answers() -> bool:
            # For a moment after a signal both answer, so the answer that counts is the one that is looked at.
            answered.append(int(self.one.status()["pid"]))
            return answered[-1] != self.pid

        wait_until(another_answers, "a new master answers", 60)
        self.pid = answered[-1]
        return self.pid

    def events(self, name: str) -> list[str]:
        """The lines of the event log about ``name``, of all generations."""
        return [line for line in self.one.event_lines() if f" {name} " in line]

    def stop(self) -> None:
        """SIGTERM to the newest; returns when it and its children are gone."""
        family = (self.pid, *descendants(self.pid))
        os.kill(self.pid, signal.SIGTERM)
        wait_until(lambda: not any(map(alive, family)), "the newest generation has ended", END_TIMEOUT_SECS)

    def kill(self) -> None:
        """Ends every master that the event log tells of but the first, and their children."""
        started = [int(pid) for line in self.events("upgrade.started") for pid in re.findall(r" pid=(\d+)", line)]
        for master in {self.pid, *started} - {self.one.pid}:
            for pid in (master, *descendants(master)):
                if alive(pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
