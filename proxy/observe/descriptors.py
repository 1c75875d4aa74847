"""A process tells its own descriptors: nobody else may look into /proc/PID/fd of one that is not dumpable."""

from __future__ import annotations

import contextlib
import os
import resource

from proxy.observe.counters import DESCRIPTORS_LIMIT, DESCRIPTORS_OPEN


def publish_descriptors(cells: memoryview) -> None:
    """Write how many descriptors this process has open, and its soft limit (0: unlimited), into its page."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    cells[DESCRIPTORS_LIMIT] = 0 if soft == resource.RLIM_INFINITY else soft
    # Without a descriptor to look with, the last number stands. The folder's own descriptor is among them.
    with contextlib.suppress(OSError):
        cells[DESCRIPTORS_OPEN] = len(os.listdir("/proc/self/fd")) - 1
