"""The copy that a drill plays with: the configuration's limits and deadlines in an appliance of its own on loopback."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from proxy.budget import process_limits
from proxy.config.schema import Admin, Health, Listener, Redirect, Settings, Site
from proxy.demo.upstream import run_demo_upstream
from proxy.errors import EXIT_OK, OperatorError, StartError
from proxy.master.children import fork
from proxy.master.crew import Helper, RunWorker
from proxy.master.plan import make_plan
from proxy.master.status_client import fetch_status
from proxy.master.supervisor import Supervisor

LOOPBACK = "127.0.0.1"
READY_TIMEOUT_SECS = 45.0
STOP_TIMEOUT_SECS = 30.0
DRAIN_TIMEOUT_SECS = 5.0
OWN_DESCRIPTORS = 300
"""What the drill itself needs besides its attackers: good clients, probes, its own files."""

MAX_TEMP_CHARS = 60
EVENTS_SHOWN, EVENT_CHARS = 5, 400

NOT_PLAYED = ("access_lists", "allow", "deny", "drain_delay_secs", "rate_limits", "trusted_proxies", "user", "group")
"""Keys that the copy leaves at their defaults: they judge clients and users that a drill does not have."""


@dataclass(frozen=True, slots=True)
class Ports:
    """Where the copy listens on loopback."""

    https: int
    health: int


def free_ports(count: int) -> list[int]:
    """Ports of loopback that were free a moment ago, different from each other."""
    with contextlib.ExitStack() as stack:
        return [stack.enter_context(socket.create_server((LOOPBACK, 0))).getsockname()[1] for _ in range(count)]


def copy_of(settings: Settings, *, folder: str, ports: Ports, upstream_port: int, capped: bool) -> Settings:
    """``settings`` with other addresses, logs in ``folder`` and one site; caps per client only if ``capped``.

    What attackers and good clients meet stays: permits, workers, deadlines, water marks, log bounds, certificates.
    """
    first = settings.listeners[0] if settings.listeners else Listener(address=f"{LOOPBACK}:{ports.https}")
    changes: dict[str, Any] = {
        name: Settings.model_fields[name].default for name in NOT_PLAYED if name in Settings.model_fields
    }
    changes |= {
        "drain_timeout_secs": DRAIN_TIMEOUT_SECS,
        "state_dir": folder,
        "listeners": (first.model_copy(update={"address": f"{LOOPBACK}:{ports.https}"}),),
        "redirect": Redirect(enabled=False),
        "health": Health(address=f"{LOOPBACK}:{ports.health}"),
        "admin": Admin(socket=os.path.join(folder, "admin.sock")),
        "sites": (Site(hosts=("*",), upstreams=(f"http://{LOOPBACK}:{upstream_port}",)),),
        "access_log": settings.access_log.model_copy(update={"path": os.path.join(folder, "access.log")}),
        "event_log": settings.event_log.model_copy(update={"path": os.path.join(folder, "event.log"), "level": "info"}),
    }
    changes["client_cap_exempt"] = () if capped else ("127.0.0.0/8",)
    changes["max_connections"] = affordable_permits(settings)
    return settings.model_copy(update=changes)


def affordable_permits(settings: Settings) -> int:
    """The permits of the copy: as configured, or fewer where this process could not hold twice as many clients."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    permits = make_plan(settings, process_limits()).budget.max_connections
    if hard == resource.RLIM_INFINITY:
        return permits
    return max(1, min(permits, (hard - OWN_DESCRIPTORS) // 2))


class Copy:
    """A running copy. ``pids`` and the documents of its admin socket are what a drill reads."""

    def __init__(self, settings: Settings, folder: str, ports: Ports, pid: int) -> None:
        self.settings = settings
        self.folder = folder
        self.ports = ports
        self.pid = pid

    def status(self) -> dict[str, Any]:
        """The status document. Raises StartError when nobody answers."""
        return fetch_status([self.settings.admin.socket])

    def worker_pids(self) -> list[int]:
        """The processes that carry traffic now."""
        return [worker["pid"] for worker in self.status()["workers"] if worker["pid"]]

    def event_log(self) -> bytes:
        """All of the event log so far."""
        try:
            with open(self.settings.event_log.path, "rb") as file:
                return file.read()
        except FileNotFoundError:
            return b""

    def lower_descriptors(self, soft: int) -> dict[int, tuple[int, int]]:
        """Set the soft descriptor limit of each worker. Returns the limits before, for ``restore_descriptors``."""
        before = {}
        for pid in self.worker_pids():
            limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            before[pid] = limits
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, limits[1]))
        return before

    @staticmethod
    def restore_descriptors(before: dict[int, tuple[int, int]]) -> None:
        """Give back what ``lower_descriptors`` took."""
        for pid, limits in before.items():
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


@contextlib.contextmanager
def running_copy(settings: Settings, run_worker: RunWorker, *, capped: bool) -> Iterator[Copy]:
    """Start a copy of ``settings`` and end it again. Must be entered without event loop and threads: it forks.

    Raises StartError, with its own words, when the copy does not become ready.
    """
    folder = _make_folder()
    pid = 0
    try:
        with socket.create_server((LOOPBACK, 0), backlog=4096) as upstream:
            https, health = free_ports(2)
            ports = Ports(https, health)
            copied = copy_of(
                settings, folder=folder, ports=ports, upstream_port=upstream.getsockname()[1], capped=capped
            )
            read_end, write_end = os.pipe()
            pid = fork(
                "reverse-proxy: drill copy", _entry(copied, run_worker, upstream, read_end, write_end), lambda _: None
            )
        os.close(write_end)
        with os.fdopen(read_end, "rb") as said:
            _await_ready(said.fileno(), pid, copied.event_log.path)
        yield Copy(copied, folder, ports, pid)
    finally:
        if pid:
            _end(pid)
        shutil.rmtree(folder, ignore_errors=True)


def _make_folder() -> str:
    """A folder whose admin socket has a path that a Unix socket may have."""
    wanted = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="reverse-proxy-drill-", dir=wanted if len(wanted) < MAX_TEMP_CHARS else "/tmp")  # noqa: S108


def _entry(
    settings: Settings, run_worker: RunWorker, upstream: socket.socket, read_end: int, write_end: int
) -> Callable[[], int]:
    def serve_upstream() -> int:
        run_demo_upstream(upstream)
        return EXIT_OK

    def entry() -> int:
        os.close(read_end)
        # Its own standard output and error are the drill's: only the event log speaks.
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)

        def tell(text: str) -> None:
            os.write(write_end, text.encode())
            os.close(write_end)

        try:
            return Supervisor(
                settings,
                run_worker,
                helpers=[Helper("drill upstream", serve_upstream, upstream)],
                on_ready=lambda: tell("ready"),
            ).run()
        except OperatorError as error:
            tell(str(error))
            return error.exit_code

    return entry


def _await_ready(descriptor: int, pid: int, event_log: str) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_SECS
    os.set_blocking(descriptor, False)
    while time.monotonic() < deadline:
        try:
            said = os.read(descriptor, 65_536).decode("utf-8", "replace")
        except BlockingIOError:
            time.sleep(0.02)
            continue
        if said == "ready":
            return
        told = f"the copy did not start: {said or f'process {pid} ended without a word'}"
        raise StartError("\n".join([told, *_tail(event_log)]))
    raise StartError(f"the copy was not ready in {READY_TIMEOUT_SECS:.0f} s")


def _tail(path: str) -> list[str]:
    """The last lines of a log that is about to be removed, the start of each."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return [f"  {line.rstrip()[:EVENT_CHARS]}" for line in file][-EVENTS_SHOWN:]
    except OSError:
        return []


def _end(pid: int) -> None:
    """Stop the copy, and kill it when it does not."""
    deadline = time.monotonic() + STOP_TIMEOUT_SECS
    os.kill(pid, signal.SIGTERM)
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return
        time.sleep(0.02)
