"""Child processes: forked by a master without threads and without an event loop, restarted with a growing pause."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import setproctitle

from proxy.master.privileges import Privileges, drop
from proxy.master.traces import Traces

FIRST_BACKOFF_SECS = 0.5
MAX_BACKOFF_SECS = 30.0
STABLE_AFTER_SECS = 60.0
"""A child that lived so long is healthy: its next end begins with the first pause again."""

# Out of the terminal's foreground group, a child must not be stopped for writing to it (stty tostop). SIGUSR1 would end
# a process that has not installed its handler yet.
_IGNORED = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTTOU)


@dataclass(frozen=True, slots=True)
class Upbringing:
    """What all children have in common. Without ``traces`` a fault's traceback goes to standard error."""

    privileges: Privileges = field(default_factory=Privileges)
    traces: Traces | None = None


@dataclass(slots=True)
class Child:
    """One supervised process and its history.

    ``entry`` runs in the child and returns its exit status; ``on_crash`` is told there what it raised.
    """

    name: str
    entry: Callable[[], int]
    on_crash: Callable[[BaseException], None]
    upbringing: Upbringing = field(default_factory=Upbringing)
    slot: int | None = None
    pid: int | None = None
    started_at: float = 0.0
    restart_at: float | None = None
    backoff_secs: float = FIRST_BACKOFF_SECS
    restarts: int = 0
    trace_region: int | None = None

    def start(self, now: float) -> None:
        """Fork it. Raises OSError (EAGAIN: process limit; ENOMEM)."""
        traces = self.upbringing.traces
        if traces is not None and self.trace_region is None:
            self.trace_region = traces.take()
        title = f"reverse-proxy: {self.name}"
        self.pid = fork(title, self.entry, self.on_crash, self.upbringing, self.trace_region)
        self.started_at = now
        self.restart_at = None

    def ended(self, now: float) -> float:
        """Note that it is gone. Returns the pause in seconds before it may be started again."""
        if now - self.started_at >= STABLE_AFTER_SECS:
            self.backoff_secs = FIRST_BACKOFF_SECS
        return self.postpone(now)

    def postpone(self, now: float) -> float:
        """Plan the next start. Returns the pause in seconds."""
        pause_secs = self.backoff_secs
        self.pid = None
        self.restart_at = now + pause_secs
        self.backoff_secs = min(MAX_BACKOFF_SECS, 2 * pause_secs)
        self.restarts += 1
        return pause_secs

    def traceback(self) -> str:
        """Where it was when a fault (SIGSEGV, SIGABRT) ended it; "" without one. For a child that has been reaped."""
        if self.upbringing.traces is None or self.trace_region is None:
            return ""
        return self.upbringing.traces.collect(self.trace_region)

    def send(self, number: signal.Signals) -> None:
        """Signal it where it lives. It is our own unreaped child, so the pid cannot be somebody else's."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def fork(
    title: str,
    entry: Callable[[], int],
    on_crash: Callable[[BaseException], None],
    upbringing: Upbringing | None = None,
    trace_region: int | None = None,
) -> int:
    """Run ``entry`` in a child process that ends with this one. Returns the child's pid."""
    master = os.getpid()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    gc.freeze()  # a collection in the child would write to, and so copy, every page that it shares with the master
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        _become_child(title, master, upbringing or Upbringing(), trace_region)
        status = entry()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException as error:  # noqa: BLE001  the process ends here, and its stack must never reach the master's code
        with contextlib.suppress(Exception):
            on_crash(error)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(status)


def describe_end(wait_status: int) -> str:
    """``exit status 3`` or ``SIGKILL``, from what waitpid(2) gave."""
    code = os.waitstatus_to_exitcode(wait_status)
    if code >= 0:
        return f"exit status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _become_child(title: str, master: int, upbringing: Upbringing, trace_region: int | None) -> None:
    traces = upbringing.traces
    faulthandler.enable(2 if traces is None or trace_region is None else traces.open(trace_region))
    drop(upbringing.privileges)
    if os.getppid() != master:
        os._exit(1)  # it ended before the death signal was set, so nobody would tell
    # A terminal sends SIGINT and SIGHUP to its whole foreground group: the master alone decides what they mean.
    os.setpgid(0, 0)
    setproctitle.setproctitle(title)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
