"""Lines to a file, a pipe or a terminal, from a thread of its own: whoever logs never waits for a disk or a reader.

Two threads share a queue and a few numbers, each of which has one writer, so there is no lock to wait for. The owner's
thread puts batches of whole lines in; what exceeds the bound is refused and counted. The writer's thread writes; what
fails is dropped and counted, and tried again a second later with what comes then.
"""

from __future__ import annotations

import errno
import os
import queue
import select
import signal
import stat
import threading
import time
from typing import NamedTuple

from proxy.errors import ConfigError, StartError

MAX_QUEUED_BYTES = 4 * 1024 * 1024
RETRY_SECS = 1.0
"""After a failure no write is tried for so long: a full disk costs one system call a second."""
CHECK_SECS = 1.0
GONE_SECS = 2.0
"""A file that is no longer at its path is opened anew only after so long: log rotation renames it, then makes the next
one itself, and must not find one there."""
POLL_MS = 200
FILE_MODE = 0o640

_OPEN_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
"""O_NONBLOCK matters for a FIFO only: opening one that nobody reads fails at once, and its writes can be given up."""
_WHAT_TO_DO = ": mend that for the user that the proxy runs as, or name another path"
_STANDARD = {"stdout": 1, "stderr": 2}


class _Batch(NamedTuple):
    data: bytes
    lines: int


class _Command:
    """What the owner asks of the thread, in order with the batches."""


_STOP = _Command()
_REOPEN = _Command()


def check_path(path: str, *, key: str) -> None:
    """Judge a log's path without opening or making anything. ConfigError names ``key`` and what to do."""
    if path in _STANDARD:
        return
    _check_form(path, key)
    folder = os.path.dirname(path)
    if os.path.isdir(path):
        reason = "is a folder"
    elif os.path.exists(path):
        reason = "" if os.access(path, os.W_OK) else "is not writable"
    elif not os.path.isdir(folder):
        reason = f"needs the folder {folder}, which does not exist"
    else:
        reason = "" if os.access(folder, os.W_OK | os.X_OK) else f"needs the folder {folder} to be writable"
    if reason:
        raise ConfigError(f'{key} = "{path}" {reason}{_WHAT_TO_DO}')


def _check_form(path: str, key: str) -> None:
    if not path.startswith("/") or "\0" in path:
        raise ConfigError(f'{key} = "{path}" is not a log target: wanted "stdout", "stderr" or an absolute path')


class LineWriter:
    """One target and its thread. Made and used by one process; the thread exists from ``start`` on (after the fork)."""

    def __init__(self, path: str, *, key: str, max_queued_bytes: int = MAX_QUEUED_BYTES) -> None:
        """Open ``path`` ("stdout", "stderr" or absolute); ``key`` names the setting in errors.

        Raises ConfigError for a path of the wrong form and StartError when it cannot be opened now.
        """
        self.path = path
        self.faults = 0
        """How many times opening or writing has failed."""
        self.fault = ""
        """The latest failure: "ENOSPC: No space left on device"."""
        self.lines_written = 0
        self._is_file = path not in _STANDARD
        self._max_queued_bytes = max_queued_bytes
        self._queue: queue.SimpleQueue[_Batch | _Command] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._accepted_bytes = 0  # owner's thread
        self._accepted_lines = 0  # owner's thread
        self._refused_lines = 0  # owner's thread
        self._finished_bytes = 0  # writer's thread, as all below
        self._lost_lines = 0
        self._abandoned = False
        self._rest = b""  # of a line whose beginning is written
        self._retry_at = 0.0
        self._check_at = 0.0
        self._gone_since: float | None = None
        self._fd = self._open_first(key)
        self._is_pipe = stat.S_ISFIFO(os.fstat(self._fd).st_mode)

    @property
    def descriptors(self) -> int:
        """How many descriptors of this process it has for itself: none for stdout and stderr."""
        return int(self._is_file and self._fd >= 0)

    @property
    def lines_dropped(self) -> int:
        """Lines that were refused by a full queue or lost to a failure, since the start."""
        return self._refused_lines + self._lost_lines

    @property
    def lines_unwritten(self) -> int:
        """Lines that did not reach the target, those still queued included: after ``close``, what it never will."""
        return self._refused_lines + self._accepted_lines - self.lines_written

    @property
    def queued_bytes(self) -> int:
        """Bytes that the thread has yet to write."""
        return self._accepted_bytes - self._finished_bytes

    def start(self) -> None:
        """Start the thread. It is a daemon: one that a blocked pipe holds does not keep the process alive."""
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    def write(self, data: bytes, lines: int) -> bool:
        """Queue ``lines`` whole lines, each with its line feed. False, and counted, when the queue is full."""
        if self.queued_bytes + len(data) > self._max_queued_bytes:
            self._refused_lines += lines
            return False
        self._accepted_bytes += len(data)
        self._accepted_lines += lines
        self._queue.put(_Batch(data, lines))
        return True

    def reopen(self) -> None:
        """Open the path again once what is queued is written (log rotation). Nothing to do for stdout and stderr."""
        if self._is_file:
            self._queue.put(_REOPEN)

    def finish(self) -> None:
        """Have the thread end once what is queued is written; ``close`` is still to come."""
        self._queue.put(_STOP)

    def close(self, timeout_secs: float) -> bool:
        """Write what is queued, for at most ``timeout_secs``, and end the thread. Whether all of that was done."""
        if self._thread is None:
            self._close_file()
            return self.queued_bytes == 0
        self._queue.put(_STOP)
        self._thread.join(timeout_secs)
        self._abandoned = True
        ended = not self._thread.is_alive()
        if ended:
            self._thread = None
        return ended

    # The rest runs in the writer's thread.

    def _run(self) -> None:
        # Signals are for the main thread, whose event loop they must wake.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            item = self._queue.get()
            if isinstance(item, _Batch):
                try:
                    self._deliver(item)
                except Exception as failure:  # noqa: BLE001 - a thread that ends would silence the log for ever
                    self._lost_lines += item.lines
                    self.fault = f"{type(failure).__name__}: {failure}"
                    self.faults += 1
                self._finished_bytes += len(item.data)
            elif item is _REOPEN:
                self._switch()
            else:
                break
        self._close_file()

    def _deliver(self, batch: _Batch) -> None:
        now = time.monotonic()
        if self._abandoned or now < self._retry_at or not self._at_its_path(now):
            self._lost_lines += batch.lines
            return
        data = self._rest + batch.data
        owed = bool(self._rest)
        written, error = self._write_all(data)
        self._rest = b""
        if error is None:
            self.lines_written += batch.lines + owed
            return
        line_starts_at = data.rfind(b"\n", 0, written) + 1
        is_torn = written > line_starts_at or (owed and line_starts_at == 0)
        if is_torn:
            self._rest = data[written : data.index(b"\n", written) + 1]
        self.lines_written += data.count(b"\n", 0, written)
        self._lost_lines += data.count(b"\n", written) - is_torn
        self._fail(error)

    def _write_all(self, data: bytes) -> tuple[int, OSError | None]:
        """How many bytes went, and what stopped it."""
        view = memoryview(data)
        written = 0
        while written < len(data):
            try:
                written += os.write(self._fd, view[written : self._piece_end(data, written)])
            except BlockingIOError as error:
                if not self._wait_writable():
                    return written, error
            except OSError as error:
                return written, error
        return written, None

    def _piece_end(self, data: bytes, start: int) -> int:
        """Up to where one write goes: all, but on a pipe whole lines of at most PIPE_BUF.

        POSIX keeps only such writes of several processes (the workers' standard output) from mixing.
        """
        if not self._is_pipe or len(data) - start <= select.PIPE_BUF:
            return len(data)
        end = data.rfind(b"\n", start, start + select.PIPE_BUF) + 1
        return end or data.index(b"\n", start) + 1

    def _wait_writable(self) -> bool:
        poller = select.poll()
        poller.register(self._fd, select.POLLOUT)
        while not self._abandoned:
            if poller.poll(POLL_MS):
                return True
        return False

    def _at_its_path(self, now: float) -> bool:
        """Whether what is open is what the path names, if need be after opening it again."""
        if not self._is_file or now < self._check_at:
            return True
        self._check_at = now + CHECK_SECS
        if self._is_same_file():
            self._gone_since = None
            return True
        if self._gone_since is None:
            self._gone_since = now
        return now - self._gone_since < GONE_SECS or self._switch()

    def _is_same_file(self) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        except OSError:
            return False

    def _switch(self) -> bool:
        """Open the path again. On failure the old file goes on taking lines, as long as it has a name somewhere."""
        try:
            fd = os.open(self.path, _OPEN_FLAGS, FILE_MODE)
        except OSError as error:
            self._fail(error)
            if not os.fstat(self._fd).st_nlink:
                return False
            self._retry_at = 0.0
            return True
        if self._rest:  # the new file must not begin with half a line
            _, failure = self._write_all(self._rest)
            self._lost_lines += failure is not None
            self.lines_written += failure is None
            self._rest = b""
        self._close_file()
        self._fd = fd
        self._is_pipe = stat.S_ISFIFO(os.fstat(fd).st_mode)
        self._gone_since = None
        self._retry_at = 0.0
        return True

    def _fail(self, error: OSError) -> None:
        self._retry_at = self._check_at = time.monotonic() + RETRY_SECS
        self.fault = describe(error)
        self.faults += 1

    def _open_first(self, key: str) -> int:
        if not self._is_file:
            fd = _STANDARD[self.path]
            try:
                os.fstat(fd)
            except OSError:
                raise StartError(f'{key} = "{self.path}": it is closed; name a file or open it') from None
            return fd
        _check_form(self.path, key)
        try:
            return os.open(self.path, _OPEN_FLAGS, FILE_MODE)
        except OSError as error:
            raise _cannot_open(key, self.path, error) from None

    def _close_file(self) -> None:
        if self._is_file and self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def describe(error: OSError) -> str:
    """ "ENOSPC: No space left on device"."""
    return f"{errno.errorcode.get(error.errno or 0, 'OSError')}: {error.strerror}"


def _cannot_open(key: str, path: str, error: OSError) -> StartError:
    return StartError(f'{key} = "{path}" cannot be opened ({describe(error)}){_WHAT_TO_DO}')
