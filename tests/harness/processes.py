"""Processes seen through /proc, and waiting for what they do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

POLL_SECS = 0.02


def wait_until(condition: Callable[[], object], what: str, timeout_secs: float = 30.0) -> None:
    """Returns once ``condition()`` is true; fails naming ``what`` after ``timeout_secs``."""
    deadline = time.monotonic() + timeout_secs
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_secs} s in vain: {what}")
        time.sleep(POLL_SECS)


def children(pid: int) -> tuple[int, ...]:
    """The direct children of a process, in the order they were made; none when it is gone."""
    found: list[int] = []
    try:
        for task in sorted(os.listdir(f"/proc/{pid}/task"), key=int):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    except (FileNotFoundError, ProcessLookupError):
        pass
    return tuple(found)


def descendants(pid: int) -> tuple[int, ...]:
    """Children, their children, and so on."""
    direct = children(pid)
    return direct + tuple(pid for child in direct for pid in descendants(child))


def title(pid: int) -> str:
    """The command line that the process shows, "" when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in ("Z", "X")


def descriptor_count(pid: int) -> int:
    """Descriptors that the process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def cpu_secs(pid: int) -> float:
    """User and system time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
