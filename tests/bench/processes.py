"""Starting, measuring and surely ending the bench's processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

_STOP_TIMEOUT_SECS = 5.0
_TICKS_PER_SEC = os.sysconf("SC_CLK_TCK")
# places in /proc/PID/stat after the command's closing parenthesis (proc(5) counts from 1 and from the pid)
_PPID, _UTIME, _STIME, _CUTIME, _CSTIME = 1, 11, 12, 13, 14


class CpuTime(NamedTuple):
    """CPU time in seconds."""

    user: float
    system: float

    def since(self, earlier: CpuTime) -> CpuTime:
        """What was used after ``earlier``."""
        return CpuTime(self.user - earlier.user, self.system - earlier.system)


class Memory(NamedTuple):
    """Resident memory in KB (1,024 bytes), summed over processes.

    ``pss`` counts a page shared by n processes as 1/n in each, so unrelated processes that use the same libraries
    change it; ``anonymous`` is the part of it that is no file's, which they cannot change.
    """

    rss: int
    pss: int
    anonymous: int


class Job:
    """A command in a session of its own, so that all it starts can be ended with it. Use as a context manager.

    Standard output and error go to ``<directory>/<name>.out`` unless ``stdout`` says where the former goes.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        directory: Path,
        *,
        environment: Mapping[str, str] | None = None,
        stdout: Path | None = None,
    ) -> None:
        self.name = name
        self._output = directory / f"{name}.out"
        with contextlib.ExitStack() as files:
            errors = files.enter_context(self._output.open("wb"))
            output = files.enter_context(stdout.open("wb")) if stdout else errors
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    @property
    def running(self) -> bool:
        """Whether the started process itself still runs."""
        return self._process.poll() is None

    def tail(self, lines: int = 12) -> str:
        """The last lines of its output."""
        with contextlib.suppress(OSError):
            return "\n".join(self._output.read_text("utf-8", "replace").splitlines()[-lines:])
        return ""

    def stop(self) -> None:
        """End the process and all it has started: SIGTERM to the first, SIGKILL to whoever is left. Idempotent."""
        members = self._members()
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_TIMEOUT_SECS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for pid, started in members:
            if _start_time(pid) == started:  # not a stranger that got the number since
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def cpu(self) -> CpuTime:
        """CPU time so far of the whole process tree, with that of ended children that were waited for."""
        user = system = 0
        for pid in _tree(self._process.pid):
            stat = _stat(pid)
            if stat:
                user += int(stat[_UTIME]) + int(stat[_CUTIME])
                system += int(stat[_STIME]) + int(stat[_CSTIME])
        return CpuTime(user / _TICKS_PER_SEC, system / _TICKS_PER_SEC)

    def pids(self) -> list[int]:
        """The whole process tree."""
        return _tree(self._process.pid)

    def memory(self) -> Memory:
        """Resident memory of the whole process tree."""
        sums = {"Rss:": 0, "Pss:": 0, "Pss_Anon:": 0}
        for pid in _tree(self._process.pid):
            with contextlib.suppress(OSError):  # it may have ended since
                for line in Path(f"/proc/{pid}/smaps_rollup").read_text("ascii").splitlines():
                    key, _, rest = line.partition(" ")
                    if key in sums:
                        sums[key] += int(rest.split()[0])
        return Memory(sums["Rss:"], sums["Pss:"], sums["Pss_Anon:"])

    def _members(self) -> list[tuple[int, str]]:
        return [(pid, _start_time(pid)) for pid in _tree(self._process.pid)]


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; empty when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return []


def _start_time(pid: int) -> str:
    stat = _stat(pid)
    return stat[19] if stat else ""


def _tree(root: int) -> list[int]:
    """``root`` and its descendants."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (stat := _stat(int(entry))):
            children.setdefault(int(stat[_PPID]), []).append(int(entry))
    found = [root]
    for pid in found:
        found.extend(children.get(pid, ()))
    return found


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit, so that every ``with`` block ends its processes."""

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    previous = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def wait_until(condition: Callable[[], bool], timeout_secs: float, interval_secs: float = 0.05) -> bool:
    """Poll ``condition`` until it is true; False when the time is over."""
    deadline = time.monotonic() + timeout_secs
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(interval_secs)
    return True
