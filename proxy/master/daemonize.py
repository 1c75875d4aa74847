"""`run --daemon`: in the background, with the start's outcome still told on the terminal.

The process that was started waits at a pipe until its descendant is ready or has failed. Everything that listens, forks
or threads is made after the detachment, since that closes descriptors and forks.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import daemon

from proxy.config.schema import Settings
from proxy.errors import EXIT_OK, EXIT_RUNTIME, ConfigError, OperatorError, StartError

UMASK = 0o027
_STREAMS = frozenset({"stdout", "stderr"})
_TERMINAL_SIGNALS = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)


def require_log_files(settings: Settings) -> None:
    """Raise ConfigError for a log that would go to a stream which a daemon does not have."""
    logs = (("access", settings.access_log.path), ("event", settings.event_log.path))
    problems = [
        f'with --daemon, {key}_log.path = "{path}" leads nowhere: set it to a file, such as'
        f' "/var/log/reverse-proxy/{key}.log"'
        for key, path in logs
        if path in _STREAMS
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def daemonize(
    run: Callable[[Callable[[], None], PidFile | None], int],
    *,
    pid_file: str | None,
    core_dumps: bool,
    keep: Sequence[int],
) -> int:
    """Call ``run(on_ready, its pid file)`` in a detached process.

    Returns, in the process that called, the exit status of the start:
    0 once ``on_ready`` has been called there, otherwise the failure's, which has been told on standard error.

    ``keep`` are the only descriptors that stay open. ``pid_file``, an absolute path, is locked as long as it runs.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        try:
            return _await_start(reader)
        finally:
            os.waitpid(child, 0)
    status = EXIT_RUNTIME
    try:
        status = _run_detached(run, _Outcome(writer), pid_file, core_dumps, keep)
    finally:
        os._exit(status)  # the caller's frames belong to the process that waits


def run_again(
    run: Callable[[Callable[[], None], PidFile | None], int], *, pid_file: str | None, lock: int | None
) -> int:
    """``daemonize`` for the new master of an upgrade, which a detached process started: there is nothing to detach.

    ``lock`` is the descriptor of the pid file that was handed over.
    """
    os.chdir("/")
    pid = None if pid_file is None or lock is None else PidFile(pid_file, lock)
    if pid is None:
        return run(lambda: None, None)
    os.register_at_fork(after_in_child=pid.forget)
    with pid:
        return run(pid.own, pid)


class PidFile:
    """A context manager: a file with this process's id, locked by it. The kernel's lock is never a stale one."""

    def __init__(self, path: str, handed_over: int | None = None) -> None:
        """``handed_over``: it is open already, and locked by the master before an upgrade: a lock of flock(2) belongs
        to the open file, whoever has a descriptor of it. ``own`` makes it this process's."""
        self._path = path
        self._descriptor = -1 if handed_over is None else handed_over
        self._owned = False

    def __enter__(self) -> Self:
        """Raises StartError, with the other's pid where it is held."""
        if self._descriptor >= 0:
            return self
        try:
            while not self._lock():
                pass
        except OSError as error:
            raise StartError(f"cannot write the pid file {self._path}: {error.strerror}") from error
        self.own()
        return self

    def own(self) -> None:
        """Write this process's id; the file is removed at its end."""
        self._owned = True
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, b"%d\n" % os.getpid(), 0)

    def fileno(self) -> int:
        """The locked descriptor."""
        return self._descriptor

    def give_up(self) -> None:
        """Another process has it now."""
        self._owned = False
        self.forget()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._owned:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        self.forget()

    def forget(self) -> None:
        """Close it. In a forked child this gives nothing up: the lock lives as long as the parent has it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _lock(self) -> bool:
        """False when the file was removed between opening and locking: then a lock on it keeps nobody out."""
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(self._descriptor, 32).decode("ascii", "replace").strip() or "unknown"
            self.forget()
            raise StartError(
                f"another instance (pid {owner}) holds the pid file {self._path}: stop it, or choose another --pid-file"
            ) from None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self._descriptor), os.stat(self._path)):
                return True
        self.forget()
        return False


class _Outcome:
    """The daemon's end of the pipe: one message, then it is closed."""

    def __init__(self, writer: int) -> None:
        self.writer = writer

    def tell(self, status: int, message: str = "") -> None:
        """Raises BrokenPipeError when nobody waits any more."""
        if self.writer < 0:
            return
        data = json.dumps({"status": status, "message": message}).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self.writer, data) :]
        finally:
            self.forget()

    def forget(self) -> None:
        """Close it (idempotent)."""
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1


def _await_start(reader: int) -> int:
    with os.fdopen(reader, encoding="utf-8") as pipe:
        line = pipe.readline()
    if not line:
        raise StartError("the daemon ended before it was ready: see the event log")
    outcome = json.loads(line)
    if outcome["message"]:
        print(f"reverse-proxy: {outcome['message']}", file=sys.stderr, flush=True)
    return int(outcome["status"])


def _run_detached(
    run: Callable[[Callable[[], None], PidFile | None], int],
    outcome: _Outcome,
    pid_file: str | None,
    core_dumps: bool,
    keep: Sequence[int],
) -> int:
    pid = None if pid_file is None else PidFile(pid_file)

    def on_ready() -> None:
        try:
            outcome.tell(EXIT_OK)
        except BrokenPipeError:
            raise StartError("whoever started the daemon has gone meanwhile") from None

    def in_child() -> None:
        outcome.forget()
        if pid is not None:
            pid.forget()

    status = EXIT_RUNTIME
    try:
        with daemon.DaemonContext(
            detach_process=True,
            working_directory="/",
            umask=UMASK,
            prevent_core=not core_dumps,
            files_preserve=[outcome.writer, *keep],
            pidfile=pid,
            signal_map=dict.fromkeys(_TERMINAL_SIGNALS),
        ):
            os.register_at_fork(after_in_child=in_child)
            status = run(on_ready, pid)
    except OperatorError as error:
        status = error.exit_code
        with contextlib.suppress(BrokenPipeError):
            outcome.tell(status, str(error))
    except BaseException:  # noqa: BLE001  the terminal is gone, so a fault of ours is told through the pipe or never
        with contextlib.suppress(BrokenPipeError):
            outcome.tell(status, traceback.format_exc())
    return status
