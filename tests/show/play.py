"""The show's phases: reloads, upgrades, killed workers, all under the same load; then what is left at rest."""

from __future__ import annotations

import contextlib
import functools
import http.client
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.harness import processes
from tests.harness.appliance import Appliance
from tests.harness.ports import FreePorts
from tests.harness.programs import program
from tests.harness.toml import to_toml
from tests.show.load import Clients, Failure, Long, Pace
from tests.show.sight import AdminClient, Census, Document, census, family, gained, kill_worker, unrest

WORKERS = 4
RELOADS = 500
UPGRADES = 5
RELOADS_SHARE = 0.6
"""Of the long exchanges' bodies; the rest is for the upgrades."""
LOOK_EVERY = 25
STEP_SECS = 30.0
"""For one reload, upgrade or restart to be over."""
BREATH_SECS = 0.4
"""Of load between two upgrades or kills."""
LONG_SECS = 60.0
REST_SECS = 20.0
LIMIT_SECS = 420.0
"""For everything."""
MAX_EVENT_LINES = 400
MAX_TOLD = 20
MAX_GROWTH_BYTES = 32 * 1024 * 1024

Config = dict[str, Any]


@dataclass(slots=True)
class Phase:
    """One line of the table."""

    name: str
    times: int = 0
    secs: float = 0.0
    short: int = 0
    slowest_secs: float = 0.0
    failed: int = 0
    lost_with_worker: int = 0
    long: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Report:
    """What was seen; ``faults`` is empty when the appliance stayed up."""

    phases: list[Phase] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def table(self) -> str:
        """For people, and for the documentation."""
        lines = [
            "| phase | times | seconds | short requests | slowest | failed | lost with their worker | long exchanges |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        for one in self.phases:
            long = ", ".join(f"{count} {name}" for name, count in one.long.items()) or "go on"
            lines.append(
                f"| {one.name} | {one.times} | {one.secs:.1f} | {one.short} | {one.slowest_secs * 1000:.0f} ms "
                f"| {one.failed} | {one.lost_with_worker} | {long} |"
            )
        return "\n".join(lines)

    def text(self) -> str:
        """The table, the notes, and the faults."""
        verdict = ["faults:", *self.faults] if self.faults else ["no fault"]
        return "\n".join([self.table(), "", *self.notes, *verdict])


class Play:
    """One run, from the start of the appliance to its end."""

    def __init__(self, appliance: Appliance) -> None:
        self.report = Report()
        self._appliance = appliance
        self._admin = AdminClient(appliance.admin_socket)
        self._masters = [appliance.pid]
        self._ends_at = time.monotonic() + LIMIT_SECS
        self._clients = Clients(appliance.port)
        self._pace = Pace()
        self._upgrades = 0
        ports = FreePorts()
        self._second_port = ports.take()
        ports.release()
        self._configs = [to_toml(self._config("a")), to_toml(self._config("b"))]

    def _config(self, name: str) -> Config:
        """``b`` has one more listener, other limits and another answer's header than ``a``."""
        config = dict(self._appliance.config)
        config["sites"] = [{**config["sites"][0], "response_headers": {"set": {"X-Configuration": name}}}]
        if name == "b":
            config["listeners"] = [*config["listeners"], {"address": f"127.0.0.1:{self._second_port}"}]
            config["max_connections"] = config["max_connections"] // 2
        return config

    def run(self) -> Report:
        """All phases. What goes wrong is in the report; raises AssertionError where it cannot go on."""
        before = self._census()
        clients = self._clients
        clients.start()
        pace = self._pace
        long = clients.long(pace)
        try:
            with self._phase("reload", RELOADS):
                self._reload(pace)
            self._judge_reloads(before, long)
            with self._phase("upgrade", UPGRADES) as phase:
                self._upgrade(pace)
                pace.allow(1.0)
                self._finish(phase, long)
            if clients.counts["closed idle"]:
                self.report.faults.append(
                    f"{clients.counts['closed idle']} idle connections ended without a last answer"
                )
            with self._phase("kill each worker", WORKERS) as phase:
                self._kill(phase)
        finally:
            self._pace.allow(1.0)
            clients.stop()
        self.report.faults += map(str, clients.failures[:MAX_TOLD])
        self._judge_rest(before)
        self._judge_events()
        self._end()
        return self.report

    @contextlib.contextmanager
    def _phase(self, name: str, times: int) -> Iterator[Phase]:
        counts = self._clients.counts
        short, failed, began = self._short, counts["failed"], time.monotonic()
        self._clients.phase = name
        self._clients.slowest_secs = 0.0
        phase = Phase(name, times)
        yield phase
        phase.secs = time.monotonic() - began
        phase.short = self._short - short
        phase.slowest_secs = self._clients.slowest_secs
        phase.failed += counts["failed"] - failed
        self.report.phases.append(phase)

    @property
    def _short(self) -> int:
        return self._clients.counts["new"] + self._clients.counts["kept"]

    def _status(self) -> Document:
        return self._admin.ask("GET", "/status")

    # -- the phases

    def _reload(self, pace: Pace) -> None:
        for number in range(1, RELOADS + 1):
            assert time.monotonic() < self._ends_at, f"reload {number} was not reached in {LIMIT_SECS:.0f} s"
            self._clients.phase = f"reload {number}"
            pace.allow(RELOADS_SHARE * number / RELOADS)
            self._appliance.path.write_text(self._configs[number % 2])
            document = self._admin.ask("POST", "/reload")
            assert document["result"] == "accepted", document
            assert document["connections_closed"] == 0, document
            if number % LOOK_EVERY == 0:
                wanted = "ab"[number % 2]
                found = self._clients.configuration()
                assert found == wanted, f"after reload {number} a new connection is served by {found!r}"

    def _upgrade(self, pace: Pace) -> None:
        for number in range(1, UPGRADES + 1):
            self._upgrades = number
            self._clients.phase = f"upgrade {number}"
            pace.allow(RELOADS_SHARE + (1 - RELOADS_SHARE) * (number - 0.5) / UPGRADES)
            if number % 2:
                document = self._admin.ask("POST", "/upgrade")
                assert document["result"] == "upgraded", document
                self._masters.append(document["pid"])
                self._admin.close()
                if self._status()["pid"] != document["pid"]:
                    self.report.faults.append(f"after upgrade {number} the admin socket answers for the old master")
            else:
                os.kill(self._masters[-1], signal.SIGUSR2)
            self._wait(self._has_successor, "a new master answers")
            time.sleep(BREATH_SECS)

    def _has_successor(self) -> bool:
        self._admin.close()
        status = self._status()
        if status["pid"] not in self._masters:
            self._masters.append(status["pid"])
        return bool(len(self._masters) == self._upgrades + 1 and status["pid"] == self._masters[-1] and status["ready"])

    def _kill(self, phase: Phase) -> None:
        pace = self._pace = Pace()
        long = self._clients.long(pace)
        lost_long: list[Long] = []
        for slot in range(WORKERS):
            self._clients.phase = f"kill of worker {slot}"
            pace.allow((slot + 0.9) / (WORKERS + 1))
            time.sleep(BREATH_SECS)
            pid = family(self._status())[f"worker {slot}"]
            began = len(self._clients.failures)
            ports = kill_worker(pid, self._appliance.port)
            self._wait(functools.partial(self._is_replaced, slot, pid), "the worker is replaced")
            lost = self._clients.take_failures(began, ports)
            phase.lost_with_worker += lost
            for one in [one for one in long if one.port in ports]:
                lost_long.append(one)
                long.remove(one)
                long.append(self._clients.begin(one.kind, pace))
        pace.allow(1.0)
        self._finish(phase, long)
        for one in lost_long:
            if not one.ended.wait(STEP_SECS) or one.intact:
                self.report.faults.append(f"{one.kind}: its worker was killed, and it did not notice")
            phase.long["lost with their worker"] += 1

    def _is_replaced(self, slot: int, pid: int) -> bool:
        worker = self._status()["workers"][slot]
        return bool(worker["ready"] and worker["pid"] not in (None, pid))

    def _finish(self, phase: Phase, long: list[Long]) -> None:
        for one in long:
            if not one.ended.wait(LONG_SECS):
                one.fault = "never ended"
            if not one.intact:
                self.report.faults.append(f"{one.kind} of port {one.port}: {one.fault} after {one.done_bytes} bytes")
            phase.long["intact" if one.intact else "failed"] += 1

    # -- what is left

    def _census(self, before: Census | None = None, long: int = 0) -> Census:
        """With nothing else to do than ``long`` exchanges; waits a while for the descriptors to be as before."""
        status: Document = {}
        found: Census | None = None

        def at_rest() -> bool:
            nonlocal status, found
            status = self._status()
            found = census(status)
            return not unrest(status, long) and (before is None or not gained(before, found, long))

        # What is not at rest in time is told below and by whoever asked.
        with contextlib.suppress(AssertionError):
            self._wait(at_rest, "nothing is held", REST_SECS)
        assert found is not None
        if reason := unrest(status, long):
            self.report.faults.append(f"still held at rest: {reason}")
        return found

    def _judge_reloads(self, before: Census, long: list[Long]) -> None:
        self._clients.resting.set()
        after = self._census(before, len(long))
        self._clients.resting.clear()
        growth = {name: after.resident_bytes[name] - size for name, size in before.resident_bytes.items()}
        self.report.notes.append(
            "memory after the reloads: " + ", ".join(f"{name} {size / 1e6:+.1f} MB" for name, size in growth.items())
        )
        if max(growth.values()) > MAX_GROWTH_BYTES:
            self.report.faults.append("memory grew with the reloads")
        if more := gained(before, after, len(long)):
            self.report.faults.append(f"descriptors after the reloads, with {len(long)} connections left: {more}")

    def _judge_rest(self, before: Census) -> None:
        after = self._census(before)
        same = after.descriptors == before.descriptors
        self.report.notes.append(
            f"descriptors before and after: {_listed(before.descriptors)}; "
            + ("the same" if same else _listed(after.descriptors))
        )
        if not same:
            self.report.faults.append(f"descriptors are not as at the start: {gained(before, after)}")
        try:
            self._wait(
                lambda: not any(map(processes.alive, self._masters[:-1])), "the old masters have ended", REST_SECS
            )
        except AssertionError as error:
            self.report.faults.append(str(error))
        first = self._appliance.process
        if first is None or first.poll() != 0:
            self.report.faults.append("the first master did not end with exit code 0")

    def _judge_events(self) -> None:
        lines = self._appliance.event_lines()
        signatures = Counter(line.split()[2].partition(":")[0] for line in lines if len(line.split()) > 2)
        told = ", ".join(f"{name} {count}" for name, count in sorted(signatures.items()))
        self.report.notes.append(f"event log: {len(lines)} lines ({told})")
        if any(re.match(r"loop\.|python\.", name) for name in signatures):
            self.report.faults.append("an event loop or the interpreter reported an exception")
        if len(lines) > MAX_EVENT_LINES:
            self.report.faults.append("the event log is not bounded")

    def _end(self) -> None:
        self._admin.close()
        os.kill(self._masters[-1], signal.SIGTERM)
        self._wait(lambda: not processes.alive(self._masters[-1]), "SIGTERM ends it")

    def failures(self) -> list[Failure]:
        """Those of short requests, so far."""
        return self._clients.failures

    def kill(self) -> None:
        """End whatever still runs, by pid; safe at any time."""
        for master in self._masters:
            for pid in (master, *processes.descendants(master)):
                if processes.title(pid).startswith("reverse-proxy") and processes.alive(pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    def _wait(self, condition: Callable[[], object], what: str, timeout_secs: float = STEP_SECS) -> None:
        left_secs = self._ends_at - time.monotonic()
        processes.wait_until(condition, what, max(0.0, min(timeout_secs, left_secs)))


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def play() -> Report:
    """Everything the show needs, started, run and ended."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rp-show-")))
        with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
            port: int = listener.getsockname()[1]
            command = [sys.executable, "-m", "tests.show.upstream", str(listener.fileno())]
            stack.enter_context(program(command, folder / "upstream.log", pass_fds=[listener.fileno()]))
        config: Config = {
            "workers": WORKERS,
            "max_connections": 400,
            "upstream_idle_timeout_secs": 1,
            "sites": [
                {
                    "hosts": ["*"],
                    "upstreams": [f"http://127.0.0.1:{port}"],
                    "response_headers": {"set": {"X-Configuration": "a"}},
                }
            ],
        }
        appliance = Appliance(folder, config)
        stack.callback(appliance.forget)
        stack.callback(appliance.kill)
        appliance.start()
        one = Play(appliance)
        stack.callback(one.kill)
        try:
            return one.run()
        except (AssertionError, OSError, http.client.HTTPException) as error:
            failures = "\n".join(map(str, one.failures()[:MAX_TOLD]))
            raise AssertionError(f"{error}\n{failures}\n{appliance.evidence()}") from error
