"""The crew: every child of the master with what it is given, from its first start over each restart to its end."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from proxy.budget import shares
from proxy.config.effective import effective_https_port
from proxy.config.schema import Settings
from proxy.limit.buckets import Buckets
from proxy.master.announce import status_facts
from proxy.master.children import Child, Upbringing, describe_end
from proxy.master.commands import MasterEnd
from proxy.master.control import SOURCE as CONTROL
from proxy.master.control import ControlContext, run_control
from proxy.master.memory import memory_budget
from proxy.master.privileges import Privileges
from proxy.master.reload import Reloader, Running, WorkerLine
from proxy.master.row_names import row_names
from proxy.master.sockets import BoundSockets
from proxy.master.stage import Stage
from proxy.master.traces import RemoteTraceback, Traces
from proxy.master.upgrade import Handover
from proxy.net.clients import client_rows
from proxy.observe import counters
from proxy.observe.blackbox import folder_of, open_file
from proxy.observe.counters import CounterBook
from proxy.observe.events import ChannelReporter, open_channel
from proxy.observe.shared_tables import SharedTables
from proxy.worker import orders
from proxy.worker.context import WorkerContext

RunWorker = Callable[[WorkerContext], int]


@dataclass(frozen=True, slots=True)
class Helper:
    """A further child beside the workers (the demo's upstream), ended after them.

    ``entry`` runs in the child; ``sock`` is its listening socket, which no other child keeps.
    """

    name: str
    entry: Callable[[], int]
    sock: socket.socket


class Crew:
    """The control process, the helpers and the workers of one run, and what the master shares with them.

    ``book`` holds the workers' counters, ``control_book`` the control process's page and the master's; ``commands`` is
    the way of the admin API, ``reporter`` the master's own way to the event log. ``reloader`` gives all of them another
    configuration.
    """

    def __init__(
        self,
        first: Running,
        bound: BoundSockets,
        run_worker: RunWorker,
        *,
        stage: Stage,
        privileges: Privileges,
        helpers: Sequence[Helper],
        handover: Handover | None,
        config: str | None,
        while_waiting: Callable[[], None],
    ) -> None:
        """Nothing is started yet. ``first`` is the configuration to begin with, ``config`` the path of its file.

        ``while_waiting`` is called again and again while a reload waits for workers.
        """
        plan = first.plan
        self.bound = bound
        self.reloader = Reloader(first, bound, self._worker_lines, privileges, self._give_rows, while_waiting)
        self._run_worker = run_worker
        self._stage = stage
        self._handover = handover
        self._config = config
        self.commands = MasterEnd()
        self._orders: dict[int, tuple[socket.socket, socket.socket]] = {}
        self.book = CounterBook(plan.workers, *row_names(first.settings))
        self.control_book = CounterBook(2)  # the control process's page, and the master's
        self._clients = SharedTables(plan.workers, client_rows(plan.budget.max_connections, plan.workers))
        self._buckets = Buckets()
        self._black_box: int | None = None
        self._read_end, self._channel = open_channel()
        self.reporter = ChannelReporter("master", self._channel, None)
        self._traces = Traces()
        self._upbringing = Upbringing(privileges, self._traces)
        self._ended: dict[str, dict[str, object]] = {}
        """How each child that did not last has ended the last time, for status."""
        self._helper_sockets = [helper.sock for helper in helpers]
        self.pid = os.getpid()
        self._uid = os.geteuid()
        self._started_at = time.monotonic()
        self.control = self._control_child()
        self.helpers = tuple(self._helper_child(helper) for helper in helpers)
        self.workers = tuple(self._worker_child(slot) for slot in range(plan.workers))
        self.all = (self.control, *self.helpers, *self.workers)

    @property
    def running(self) -> Running:
        """The configuration in force."""
        return self.reloader.running

    def start_child(self, child: Child) -> None:
        """Fork it. Raises OSError."""
        if child.slot is not None:
            # A pair of its own for each process: an answer of the one before must not be taken for the new one's.
            for sock in self._orders.pop(child.slot, ()):
                sock.close()
            self._orders[child.slot] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._orders[child.slot][0].setblocking(False)
            self._black_box = self._open_black_box(child.slot)
        try:
            child.start(time.monotonic())
        finally:
            if self._black_box is not None:
                os.close(self._black_box)
                self._black_box = None

    def _open_black_box(self, slot: int) -> int | None:
        """By the master, so that the worker needs no right to the folder; by each start anew, so that no other process
        has it. None, and told, where it cannot be."""
        folder = folder_of(self.running.settings.state_dir)
        try:
            return open_file(folder, slot)
        except OSError as error:
            self.reporter.report(
                "black_box.unavailable",
                "no black box: a resource error will leave no record",
                level="info",
                folder=folder,
                error=str(error.strerror),
            )
            return None

    def reap(self) -> list[tuple[Child, str]]:
        """The children that have ended, with how. Orphans, which PID 1 of a container inherits, are reaped too."""
        ended: list[tuple[Child, str]] = []
        while True:
            try:
                pid, wait_status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return ended
            if pid == 0:
                return ended
            for child in self.all:
                if child.pid == pid:
                    child.pid = None
                    if child.slot is not None:
                        self.book.clear_gauges(child.slot)
                        self._clients.clear(child.slot)
                    ended.append((child, describe_end(wait_status)))

    def note_ended(self) -> None:
        """Note and report those that have ended; each is started again after its pause."""
        for child, end in self.reap():
            pause_secs = child.ended(time.monotonic())
            self._report_death(child, f"{child.name} ended ({end})", end, pause_secs)

    def restart_due(self) -> None:
        """Start those again whose pause is over."""
        now = time.monotonic()
        for child in self.all:
            if child.restart_at is None or child.restart_at > now:
                continue
            try:
                self.start_child(child)
            except OSError as error:
                pause_secs = child.postpone(now)
                self._report_death(child, f"{child.name} cannot be started", str(error.strerror), pause_secs)
            else:
                self._count_restart(child)

    def tell_news(self) -> None:
        """To the control process, for the status document."""
        self.commands.tell(self._facts(), self._permit_shares())

    def retire_workers(self, timeout_secs: int) -> None:
        """Have them end with their connections, in ``timeout_secs`` at most. None is started again."""
        for slot, child in enumerate(self.workers):
            child.restart_at = None
            with contextlib.suppress(OSError):
                orders.send(self._orders[slot][0], orders.Message(orders.RETIRE, timeout_secs))

    def close(self) -> None:
        """Close what the master shares with them, once all have ended."""
        self.commands.close()
        for sock in (self._read_end, self._channel, *(sock for pair in self._orders.values() for sock in pair)):
            sock.close()
        self._traces.close()
        self._buckets.close()

    # What each is given.

    def _worker_child(self, slot: int) -> Child:
        name = f"worker {slot}"

        def run() -> int:
            # Made in the child: the configuration in force when it is started, not when the master was.
            context = self._worker_context(slot)
            self._close_others([*(one.sock for one in (*context.https, *context.redirect)), context.orders])
            return self._run_worker(context)

        return Child(name, run, self._crash_reporter(name), self._upbringing, slot)

    def _worker_context(self, slot: int) -> WorkerContext:
        settings, budget, workers = self.running.settings, self.running.plan.budget, self.running.plan.workers
        return WorkerContext(
            slot=slot,
            workers=workers,
            settings=settings,
            https=self.bound.https(slot, self.running.plan.listen, self.running.tls),
            redirect=self.bound.redirect(slot, self.running.plan.listen),
            permits=shares(budget.max_connections, workers)[slot],
            upstream_permits=shares(budget.max_upstream_connections, workers)[slot],
            redirect_permits=shares(settings.redirect.max_connections, workers)[slot],
            handshake_permits=shares(self.running.plan.max_handshakes, workers)[slot],
            client_cap=self.running.plan.client_cap,
            clients=self._clients,
            https_port=effective_https_port(settings),
            cells=self.book.page(slot),
            channel=self._channel,
            orders=self._orders[slot][1],
            buckets=self._buckets,
            black_box=self._black_box,
            upstream_trust=self.running.tls.upstream,
        )

    def _control_child(self) -> Child:
        def run() -> int:
            context = self._control_context()
            own = [self._read_end, context.admin, context.commands]
            self._close_others([*own, context.health] if context.health is not None else own)
            return run_control(context)

        def on_crash(error: BaseException) -> None:
            # It writes the event log, so its own end cannot be told there.
            print(f"reverse-proxy: {CONTROL} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)

        return Child(CONTROL, run, on_crash, self._upbringing)

    def _control_context(self) -> ControlContext:
        assert self.bound.admin is not None
        return ControlContext(
            settings=self.running.settings,
            book=self.book,
            cells=self.control_book.page(0),
            master_cells=self.control_book.page(1),
            read_end=self._read_end,
            channel=self._channel,
            health=self.bound.health,
            admin=self.bound.admin,
            # Not the workers' where that is another: who takes one of them over must not command the master.
            admin_uids=frozenset({0, self._uid}),
            waits=self._handover is not None and not self._stage.serving,
            commands=self.commands.control_end,
            permits=self._permit_shares(),
            facts=self._facts(),
            started_at=self._started_at,
        )

    def _helper_child(self, helper: Helper) -> Child:
        def run() -> int:
            self._close_others([helper.sock])
            return helper.entry()

        return Child(helper.name, run, self._crash_reporter(helper.name), self._upbringing)

    def _close_others(self, own: Sequence[socket.socket]) -> None:
        """In a child: hold no socket of another process, else a port would outlive its owner."""
        others = [sock for pair in self._orders.values() for sock in pair]
        others += [one.line for one in (self._handover, self._stage.upgrade) if one is not None]
        for sock in [*self.bound.all, self._read_end, *self.commands.sockets, *others, *self._helper_sockets]:
            if sock not in own:
                sock.close()

    def _permit_shares(self) -> list[int]:
        return list(shares(self.running.plan.budget.max_connections, self.running.plan.workers))

    def _facts(self) -> dict[str, object]:
        facts = status_facts(self.running.plan, self.running.tls, self.bound)
        # Also where a child asks: the process that operators signal is the master.
        log = self.running.settings.event_log
        return {
            **facts,
            "pid": self.pid,
            "config": self._config,
            "black_box": folder_of(self.running.settings.state_dir),
            "generation": self.running.number,
            "memory": memory_budget(self.running.settings, self.running.plan.budget).to_dict(),
            "last_reload": self._stage.last_reload,
            "ended": self._ended,
            "event_log": {"level": log.level, "max_lines_per_minute": log.max_lines_per_minute},
        }

    def _worker_lines(self) -> list[WorkerLine]:
        """The workers that take part in a reload."""
        return [
            WorkerLine(child.name, slot, self._orders[slot][0], functools.partial(_alive, child.pid))
            for slot, child in enumerate(self.workers)
            if child.pid is not None and self.book.page(slot)[counters.READY]
        ]

    def _give_rows(self, settings: Settings) -> None:
        self.book.assign(*row_names(settings))

    # What is told of them.

    def _crash_reporter(self, name: str) -> Callable[[BaseException], None]:
        def report(error: BaseException) -> None:
            reporter = ChannelReporter(name, self._channel, None)
            reporter.report(f"{_kind(name)}.failed", f"{name} failed: {type(error).__name__}", exc=error)
            reporter.flush()

        return report

    def _report_death(self, child: Child, message: str, end: str, pause_secs: float) -> None:
        trace = child.traceback()
        self.reporter.report(
            f"{_kind(child.name)}.died",
            message,
            exc=RemoteTraceback(trace) if trace else None,
            process=child.name,
            status=end,
            restart_in_secs=pause_secs,
            restarts=child.restarts,
        )
        self._ended[child.name] = {"status": end, "time": time.time()}
        self.tell_news()

    def _count_restart(self, child: Child) -> None:
        if child.slot is not None:
            self.book.page(child.slot)[counters.RESTARTS] += 1
        elif child is self.control:
            self.control_book.page(0)[counters.RESTARTS] += 1


def _alive(pid: int) -> bool:
    """Whether our child still runs; it is not reaped here."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def _kind(name: str) -> str:
    """``worker`` of ``worker 3``: signatures come from a closed set."""
    return name.partition(" ")[0]
