"""What the show sees of the appliance from outside: processes, descriptors, memory, and whose connection is whose."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ADMIN_TIMEOUT_SECS = 60.0
_ESTABLISHED = "01"

Document = dict[str, Any]


class AdminClient:
    """A client of the admin socket that keeps its connection."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._connection: http.client.HTTPConnection | None = None

    def ask(self, method: str, target: str) -> Document:
        """The answer's document. Raises OSError and http.client.HTTPException when there is none."""
        if self._connection is None:
            self._connection = self._connect()
        try:
            self._connection.request(method, target)
            response = self._connection.getresponse()
            document: Document = json.loads(response.read())
        except (OSError, http.client.HTTPException):
            self.close()
            raise
        if response.getheader("Connection") == "close":
            self.close()
        return document

    def _connect(self) -> http.client.HTTPConnection:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(ADMIN_TIMEOUT_SECS)
        sock.connect(self._path)
        connection = http.client.HTTPConnection("localhost")
        connection.auto_open = 0
        connection.sock = sock
        return connection

    def close(self) -> None:
        """The next request gets a new connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


@dataclass(frozen=True, slots=True)
class Census:
    """The processes of the appliance at rest: descriptors, what they are, and resident memory, by name."""

    descriptors: Mapping[str, int]
    kinds: Mapping[str, Counter[str]]
    resident_bytes: Mapping[str, int]


def family(status: Document) -> dict[str, int]:
    """The processes of the instance that gave ``status``, by name."""
    workers = {f"worker {one['slot']}": one["pid"] for one in status["workers"]}
    return {"master": status["pid"], "control": status["control_pid"], **workers}


def census(status: Document) -> Census:
    """What each process holds now."""
    pids = family(status)
    kinds = {name: Counter(_kinds(pid)) for name, pid in pids.items()}
    return Census(
        {name: counts.total() for name, counts in kinds.items()},
        kinds,
        {name: _resident_bytes(pid) for name, pid in pids.items()},
    )


def gained(before: Census, after: Census, long: int = 0) -> str:
    """What processes have more or less than before, beside ``long`` exchanges in the workers; empty when nothing."""
    more = {name: Counter(kinds) for name, kinds in after.kinds.items()}
    for name, kinds in before.kinds.items():
        more[name].subtract(kinds)
    # A long exchange has two descriptors, its client's and its upstream's, whosever worker it is.
    in_workers = Counter[str]()
    for name, counts in more.items():
        if name.startswith("worker"):
            in_workers.update(counts)
    if long and in_workers == Counter({"socket": 2 * long}):
        more = {name: counts for name, counts in more.items() if not name.startswith("worker")}
    told = {name: {kind: count for kind, count in counts.items() if count} for name, counts in more.items()}
    return ", ".join(f"{name} {counts}" for name, counts in told.items() if counts)


def _kinds(pid: int) -> Iterator[str]:
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            yield os.readlink(f"/proc/{pid}/fd/{number}").partition(":[")[0]


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def unrest(status: Document, long: int = 0) -> str:
    """What an appliance still holds that serves nobody but ``long`` exchanges; empty when nothing.

    Their connections may have an older generation.
    """
    totals = status["totals"]
    held = {key: totals[key] - long for key in ("connections_open", "requests_active", "upstream_open")}
    reasons = [f"{key} {value}" for key, value in held.items() if value]
    reasons += [
        f"worker {one['slot']} has {one['generations']} generations"
        for one in status["workers"]
        if one["generations"] > 1 + min(1, one["connections"])
    ]
    return ", ".join([*reasons, *status["reasons"]])


def kill_worker(pid: int, port: int) -> set[int]:
    """SIGKILL; the client ports of the connections to ``port`` that it had accepted.

    It is stopped first, so that what is looked at is what is lost.
    """
    os.kill(pid, signal.SIGSTOP)
    try:
        _wait_for(lambda: _state(pid) == "T", "the worker is stopped")
        return _accepted_ports(pid, port)
    finally:
        os.kill(pid, signal.SIGKILL)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _accepted_ports(pid: int, port: int) -> set[int]:
    links = [os.readlink(f"/proc/{pid}/fd/{number}") for number in os.listdir(f"/proc/{pid}/fd")]
    inodes = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {
        int(remote.partition(":")[2], 16)
        for _, local, remote, state, *_, inode in (row[:10] for row in rows)
        if state == _ESTABLISHED and inode in inodes and int(local.partition(":")[2], 16) == port
    }


def _wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 5.0
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited in vain: {what}")
        time.sleep(0.001)
