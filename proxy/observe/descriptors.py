"""A process tells its own descriptors: nobody else may look into /proc/PID/fd of one that is not dumpable."""

from __future__ import annotations

import errno
import os
import resource

from proxy.observe.counters import DESCRIPTORS_LIMIT, DESCRIPTORS_OPEN


def publish_descriptors(cells: memoryview) -> None:
    """Write how many descriptors this process has open, and its soft limit (0: unlimited), into its page."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    cells[DESCRIPTORS_LIMIT] = 0 if soft == resource.RLIM_INFINITY else soft
    try:
        # The folder's own descriptor is among them.
        cells[DESCRIPTORS_OPEN] = len(os.listdir("/proc/self/fd")) - 1
    except OSError as error:
        # Of another error the last number stands. EMFILE means that every number below the limit is taken.
        if error.errno == errno.EMFILE:
            cells[DESCRIPTORS_OPEN] = max(cells[DESCRIPTORS_OPEN], soft)
