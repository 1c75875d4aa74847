"""A process tells its own descriptors: nobody else may look into /proc/PID/fd of one that is not dumpable."""

from __future__ import annotations

import contextlib
import errno
import os
import resource

from proxy.observe.counters import DESCRIPTORS_LIMIT, DESCRIPTORS_OPEN, MEMORY_BASE_BYTES, MEMORY_BYTES


def publish_memory(cells: memoryview, *, is_base: bool = False) -> None:
    """Write how much memory this process has for itself (resident, not shared with a file or another process), in
    bytes, into its page; ``is_base``: also as what it has without connections."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/self/statm", "rb") as file:
        _, resident, shared, *_ = map(int, file.read().split())
        cells[MEMORY_BYTES] = max(0, resident - shared) * resource.getpagesize()
        if is_base:
            cells[MEMORY_BASE_BYTES] = cells[MEMORY_BYTES]


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
