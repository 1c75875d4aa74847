"""How many processors this process may use, for ``workers = "auto"``."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path

from proxy.config.schema import MAX_WORKERS

_ROOT = Path("/")


@functools.cache  # a running instance keeps its number of workers, also where a reload plans anew
def available_processors(root: Path = _ROOT) -> int:
    """Processors by affinity, bounded by the CPU quotas of this process's cgroups, rounded up; 1 to MAX_WORKERS.

    ``root`` is where proc and sys are looked for. A quota of half a processor still needs one worker; what cannot be
    read bounds nothing.
    """
    bounds = [len(os.sched_getaffinity(0)), MAX_WORKERS]
    bounds += [max(1, -(-quota // period)) for quota, period in _quotas(root) if quota > 0 and period > 0]
    return min(bounds)


def _quotas(root: Path) -> Iterator[tuple[int, int]]:
    """(quota, period) in microseconds of each cgroup above this process that has a quota, of version 1 and 2.

    A container sees its own group as the root of the mounted hierarchy, while /proc/self/cgroup may still name the
    host's path: so every folder from that path up to the mount is looked at, and those that are not there are skipped.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            for folder in _upwards(root / "sys/fs/cgroup", path):
                words = _text(folder / "cpu.max").split()
                if len(words) == 2 and words[0] != "max":
                    yield int(words[0]), int(words[1])
        elif "cpu" in controllers.split(","):
            for mount in {"cpu", controllers}:
                for folder in _upwards(root / "sys/fs/cgroup" / mount, path):
                    quota = _text(folder / "cpu.cfs_quota_us")
                    period = _text(folder / "cpu.cfs_period_us")
                    if quota and period:
                        yield int(quota), int(period)


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    folder = mount / path.strip("/")
    yield folder
    while folder != mount and mount in folder.parents:
        folder = folder.parent
        yield folder


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeError):
        return ""
