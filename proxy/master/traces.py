"""Where a child that dies of a fault leaves its traceback: memory that the master reads when it has reaped it.

One memfd for all children, each with a region of its own, so that the master holds one descriptor whatever the number
of workers. A child opens it anew through /proc, which gives it a file offset of its own; that comes before it gives up
its privileges. faulthandler writes there from a signal handler, so it works where Python code can no longer run.
"""

from __future__ import annotations

import itertools
import os
import re

_REGION_BYTES = 1024 * 1024
"""Of addresses, not of memory: only what was written takes room."""
_READ_BYTES = 64 * 1024
_MAX_FRAMES = 24
_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (.+)')


class RemoteTraceback(Exception):  # noqa: N818 - not an error of this process
    """Carries the text of another process's traceback to the reporter."""


class Traces:
    """The memory; made by the master before it forks."""

    def __init__(self) -> None:
        """Raises OSError when there is no memory or descriptor."""
        self._fd = os.memfd_create("tracebacks")
        self._regions = itertools.count()

    def take(self) -> int:
        """A region for one more child and its successors."""
        return next(self._regions)

    def open(self, region: int) -> int:
        """In the child: a descriptor that writes to ``region`` from its start. Raises OSError."""
        fd = os.open(f"/proc/self/fd/{self._fd}", os.O_WRONLY | os.O_CLOEXEC)
        os.lseek(fd, region * _REGION_BYTES, os.SEEK_SET)
        os.close(self._fd)
        return fd

    def collect(self, region: int) -> str:
        """What the ended child left there, "" without a fault, in few lines; the region is empty afterwards."""
        start = region * _REGION_BYTES
        data = os.pread(self._fd, _READ_BYTES, start).rstrip(b"\0")
        if data:
            os.pwrite(self._fd, bytes(len(data)), start)
        return shorten(data.decode("utf-8", "replace"))

    def close(self) -> None:
        """Give the memory up."""
        os.close(self._fd)


def shorten(text: str) -> str:
    """faulthandler's text with the thread that got the signal first, and each frame as ``package/file.py:12 name``."""
    parts: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.startswith(("Thread ", "Current thread ")):
            parts.append([])
        frame = _FRAME.search(line)
        short = f"{'/'.join(frame[1].split('/')[-2:])}:{frame[2]} {frame[3]}" if frame else line.strip()
        if short and len(parts[-1]) <= _MAX_FRAMES:
            parts[-1].append(short)
    head, *threads = parts
    threads.sort(key=lambda thread: not thread[0].startswith("Current"))
    return "\n".join(line for part in (head, *threads) for line in part)
