"""``python -m tests.bench.overload``: the proxy's own drill, played against nginx, HAProxy and Caddy too.

Everyone gets the same descriptors and as many clients; each is configured for overload as well as its manual allows
(``conf/overload-*``).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import shlex
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from proxy.drill.clients import Attackers, GoodClients
from proxy.drill.copy import LOOPBACK
from proxy.drill.play import (
    ATTACKER_ADDRESSES,
    GOOD_ADDRESSES,
    TAKEN_BELOW,
    Hooks,
    good_percent,
    percentile,
    recovery_secs,
    timeline,
)
from tests.bench import packages, report
from tests.bench.peers import KINDS, REPOSITORY, NotRunnableError, Peer, Stage, running, version_of
from tests.bench.processes import ended_by_signals

NOFILE = 1024
STALLED = 2 * NOFILE
RETURN_SECS = 5.0
"""Stalled clients that are closed come back after it."""

PER_CLIENT = 100
_NO_CAP = 60_000
MANY_ADDRESSES = tuple(f"127.0.1.{number}" for number in range(1, 65))
_DOCUMENT = REPOSITORY / "docs" / "performance.md"


@dataclass(frozen=True)
class Round:
    """One kind of round: where clients come from, and the cap per client."""

    title: str
    attackers: tuple[str, ...]
    good: tuple[str, ...]
    per_client: int


ROUNDS = (
    Round("Six addresses stall, others are good", ATTACKER_ADDRESSES, GOOD_ADDRESSES, PER_CLIENT),
    Round("64 addresses stall, others are good", MANY_ADDRESSES, GOOD_ADDRESSES, PER_CLIENT),
    Round("All from one address, no cap", (LOOPBACK,), (LOOPBACK,), _NO_CAP),
)


class _Descriptors:
    """The descriptors of a peer's busiest process, taken and given back."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._before: dict[int, tuple[int, int]] = {}

    async def take(self) -> None:
        held = {pid: _open(pid) for pid in self._peer.job.pids()}
        pid = max(held, key=lambda pid: held[pid])
        self._before = {pid: resource.prlimit(pid, resource.RLIMIT_NOFILE)}
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (max(1, held[pid] - TAKEN_BELOW), self._before[pid][1]))

    async def give_back(self) -> None:
        for pid, limits in self._before.items():
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


def _open(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


async def _play(peer: Peer, kind: Round, secs: float) -> list[str]:
    """One row of the table: good served, median and 99th percentile, recovery, lines and bytes in its log, CPU."""
    attackers = Attackers(peer.port, STALLED, kind.attackers, RETURN_SECS)
    good = GoodClients(peer.port, kind.good)
    descriptors = _Descriptors(peer)
    cpu = peer.job.cpu()
    log_began = peer.log.stat().st_size if peer.log.exists() else 0
    given_back_at = await timeline(
        secs=secs,
        good=good,
        attackers=attackers,
        hooks=Hooks(descriptors.take, descriptors.give_back),
    )
    used = peer.job.cpu().since(cpu)
    log = peer.log.read_bytes()[log_began:] if peer.log.exists() else b""
    recovery = recovery_secs(good.answers, given_back_at)
    return [
        f"{good_percent(good.answers):.1f} % of {len(good.answers)}",
        f"{percentile(good.answers, 0.5):.2f} s, {percentile(good.answers, 0.99):.2f} s",
        "never" if recovery == float("inf") else f"{recovery:.2f} s",
        f"{log.count(bytes([10])):,}, {len(log):,}",
        f"{used.user + used.system:.2f} s",
    ]


def _run(stage: Stage, names: Sequence[str], secs: float) -> tuple[dict[str, list[list[str]]], list[str]]:
    rows: dict[str, list[list[str]]] = {}
    failures = []
    for kind in ROUNDS:
        for name in names:
            values = {"NOFILE": NOFILE, "CONNECTIONS": NOFILE - 24, "PER_CLIENT": kind.per_client}
            limit = ["prlimit", f"--nofile={NOFILE}:{NOFILE}"]
            try:
                with running(name, stage, variant="overload-", values=values, through=limit) as peer:
                    row = asyncio.run(_play(peer, kind, secs))
            except NotRunnableError as error:
                failures.append(f"{name}, {kind.title}: {error}")
                continue
            rows.setdefault(kind.title, []).append([name, *row])
            print(f"{kind.title}: {name}: {'; '.join(row)}", file=sys.stderr, flush=True)
    return rows, failures


def _text(rows: dict[str, list[list[str]]], failures: Sequence[str], names: Sequence[str], secs: float) -> str:
    columns = ("proxy", "good clients served", "median, 99th percentile", "recovery", "log lines, bytes", "CPU")
    command = shlex.join(["python", "-m", "tests.bench.overload", *sys.argv[1:]])
    parts = [
        (
            f"Command: `{command}`; {secs:g} s a round. Good clients, 20 a second, come all along, wait at most 10 s. "
            f"{STALLED} stalled ones come from {secs * 0.1:g} s on, and closed ones again after {RETURN_SECS:g} s. "
            f"From {secs * 0.6:g} s to {secs * 0.8:g} s the process that serves has no descriptors to take; otherwise "
            f"each may hold {NOFILE}. Recovery: from their return to the first good client that is served."
        ),
        "\n".join(f"- {name}: {version_of(name)}" for name in names),
    ]
    for title, lines in rows.items():
        table = [f"| {' | '.join(columns)} |", f"| {' | '.join('---' for _ in columns)} |"]
        table += [f"| {' | '.join(line)} |" for line in lines]
        parts.append(f"**{title}**\n\n" + "\n".join(table))
    parts += [f"Not measured: {failure}" for failure in failures]
    return "\n\n".join(parts)


def main() -> int:
    """0 when everything was played, 1 when something was not, 2 when it cannot run at all."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.overload", description=__doc__)
    parser.add_argument("--secs", type=float, default=30.0, help="of each round (30)")
    parser.add_argument("--peers", default=",".join(KINDS), help=",".join(KINDS))
    parser.add_argument("--write", action="store_true", help="put the tables into docs/performance.md too")
    options = parser.parse_args()
    names = options.peers.split(",")
    if strangers := [name for name in names if name not in KINDS]:
        parser.error(f"{', '.join(strangers)}: choose from {', '.join(KINDS)}")
    if os.geteuid():
        parser.error("it changes limits of other processes: run it as root")
    if not packages.install(packages.missing(("nginx", "openssl", *names))):
        return 2
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with (
            ended_by_signals(),
            tempfile.TemporaryDirectory(prefix="proxy-overload-") as directory,
            Stage.set_up(Path(directory), nginx_log_options="") as stage,
        ):
            rows, failures = _run(stage, names, options.secs)
    except NotRunnableError as error:
        print(f"the upstream: {error}", file=sys.stderr)
        return 2
    body = _text(rows, failures, names, options.secs)
    print(body)
    if options.write:
        report.write(_DOCUMENT, body, marks="overload")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
