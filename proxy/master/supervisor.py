"""The master: binds, forks, restarts, drains. No event loop and no thread, so that a fork is always safe.

All signals it cares for stay blocked and are taken one at a time with sigtimedwait(2): nothing is ever interrupted, and
nothing is lost between a look and a wait.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import setproctitle

from proxy.budget import process_limits, shares
from proxy.config.effective import effective_https_port
from proxy.config.load import ConfigFile
from proxy.config.schema import Settings
from proxy.errors import EXIT_OK, StartError
from proxy.master.activation import NOTHING, Inherited
from proxy.master.announce import report_ready, report_start, status_facts
from proxy.master.children import Child, Upbringing, describe_end
from proxy.master.commands import MasterEnd
from proxy.master.control import SOURCE as CONTROL
from proxy.master.control import ControlContext, run_control
from proxy.master.daemonize import PidFile
from proxy.master.listeners import bound_address
from proxy.master.live import LiveLine
from proxy.master.logfiles import make_logs, require_logs
from proxy.master.notify import Notifier
from proxy.master.plan import Plan, TlsMaterial, load_tls, make_plan, require_budget
from proxy.master.port_owner import command_of
from proxy.master.privileges import forbid_cores, plan_privileges
from proxy.master.reload import Outcome, Reloader, Running, WorkerLine
from proxy.master.row_names import row_names
from proxy.master.sockets import BoundSockets
from proxy.master.traces import RemoteTraceback, Traces
from proxy.master.upgrade import Handover, Upgrade
from proxy.master.watch import HangWatch
from proxy.observe import counters
from proxy.observe.counters import CounterBook
from proxy.observe.descriptors import publish_descriptors
from proxy.observe.events import ChannelReporter, open_channel
from proxy.worker import orders
from proxy.worker.context import WorkerContext

READY_TIMEOUT_SECS = 30.0
READY_POLL_SECS = 0.02
TICK_SECS = 1.0
CONFIRM_RETRY_SECS = 5.0
UPGRADE_LOOK_SECS = 0.1
HAND_OVER_SECS = 5.0
"""For a busy service manager to take the word of the new main process."""
STOPPING = "it is about to stop"
DRAIN_GRACE_SECS = 5.0
"""A worker ends by itself after drain_timeout_secs; so much later it is killed."""
HELPER_STOP_SECS = 5.0
IMPATIENT_STOP_SECS = 3.0
"""After a second signal a worker cuts what is under way, logs it and ends; so much later it is killed."""
IMPATIENT_TICK_SECS = 0.1

_STOP = frozenset({signal.SIGTERM, signal.SIGINT})
_SIGNALS = _STOP | {signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGIO}

RunWorker = Callable[[WorkerContext], int]


@dataclass(frozen=True, slots=True)
class Helper:
    """A further child beside the workers (the demo's upstream), ended after them.

    ``entry`` runs in the child; ``sock`` is its listening socket, which no other child keeps.
    """

    name: str
    entry: Callable[[], int]
    sock: socket.socket


class Supervisor:
    """One run of the appliance, from the settings to the exit status.

    Constructing it does all that can fail for the operator's reasons: it raises ConfigError or StartError, and leaves
    nothing open then.
    """

    def __init__(
        self,
        settings: Settings,
        run_worker: RunWorker,
        *,
        load: ConfigFile | None = None,
        helpers: Sequence[Helper] = (),
        on_ready: Callable[[], None] = lambda: None,
        live: Callable[[int], LiveLine] | None = None,
        inherited: Inherited = NOTHING,
        handover: Handover | None = None,
        pid_file: PidFile | None = None,
        folder: str = ".",
    ) -> None:
        """``on_ready`` is called once, when all workers accept; ``live`` makes the live line from the permits.

        ``inherited`` are listening sockets of the service manager, which stay open there. ``load`` reads the
        configuration anew for a reload; without it there is nothing to reload. ``folder`` is where an upgrade is to
        start the new master, ``pid_file`` what it is to have then.
        """
        self._run_worker = run_worker
        self._on_ready = on_ready
        self._load = load
        plan = make_plan(settings, process_limits())
        require_budget(plan.budget)
        privileges = plan_privileges(settings)
        require_logs(settings, privileges)
        forbid_cores(settings)
        if plan.budget.raise_to is not None:
            _raise_soft_limit(plan.budget.raise_to)
        tls = load_tls(plan, store=True)
        self._bound = BoundSockets(plan, inherited, handover)
        self._handover = handover
        self._pid_file = pid_file
        self._folder = folder
        self._upgrade: Upgrade | None = None
        self._successor: int | None = None
        self._reloader = Reloader(
            Running(1, settings, plan, tls), self._bound, self._worker_lines, privileges, self._give_rows, self._notify
        )
        self._confirmation: tuple[float, Running] | None = None
        self._last_reload: dict[str, object] | None = None
        self._commands = MasterEnd()
        self._orders: dict[int, tuple[socket.socket, socket.socket]] = {}
        self._book = CounterBook(plan.workers, *row_names(settings))
        self._control_book = CounterBook(2)  # the control process's page, and the master's
        self._read_end, self._channel = open_channel()
        self._reporter = ChannelReporter("master", self._channel, None)
        self._upbringing = Upbringing(privileges, Traces())
        self._watch = HangWatch(READY_TIMEOUT_SECS, self._reporter)
        self._helper_sockets = [helper.sock for helper in helpers]
        self._pid = os.getpid()
        self._uid = os.geteuid()
        self._serving = False
        self._started_at = time.monotonic()
        self._flushed_at = 0.0
        self._notifier = Notifier(os.environ)
        self._stopping = False
        self._impatient = False
        self._sender = 0
        self._make_live = live
        self._live: LiveLine | None = None
        self._control = self._control_child()
        self._helpers = tuple(self._helper_child(helper) for helper in helpers)
        self._workers = tuple(self._worker_child(slot) for slot in range(plan.workers))
        self._all = (self._control, *self._helpers, *self._workers)

    def run(self) -> int:
        """Start, supervise until a signal, drain. Returns the exit status.

        Raises StartError when a child does not become ready; then none of them is left. The signals stay blocked for
        what is left of the process: a second SIGTERM at the last moment must not turn a clean exit into a death.
        """
        setproctitle.setproctitle("reverse-proxy: master")
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        self._commands.signal_me()
        try:
            if self._start():
                self._serving = True
                self._on_ready()
                self._notifier.ready()
                if self._handover is not None:
                    self._tell_news()
                    self._handover.tell_ready(self._settings.admin.socket)
                    self._bound.own_admin()
                if self._make_live is not None:
                    self._live = self._make_live(self._plan.budget.max_connections)
                self._supervise()
                if self._successor is None:
                    self._delay_drain()
                else:
                    self._retire(self._successor)
        finally:
            self._stop()
        return EXIT_OK

    def _start(self) -> bool:
        """Start every child and wait until the workers are ready. False when a signal asked for the end meanwhile."""
        make_logs(self._settings, self._upbringing.privileges)
        report_start(self._reporter, self._plan, self._tls)
        for child in self._all:
            try:
                self._start_child(child)
            except OSError as error:
                raise StartError(f"cannot start {child.name}: {error.strerror}") from error
        deadline = time.monotonic() + READY_TIMEOUT_SECS
        pages = {CONTROL: self._control_book.page(0)}
        pages |= {child.name: self._book.page(slot) for slot, child in enumerate(self._workers)}
        while waiting := [name for name, cells in pages.items() if not cells[counters.READY]]:
            if time.monotonic() >= deadline:
                raise StartError(f"{waiting[0]} was not ready in {READY_TIMEOUT_SECS:.0f} s: see the event log")
            # The others, such as a SIGHUP, stay pending for the supervision.
            number = self._next_signal(READY_POLL_SECS, _STOP | {signal.SIGCHLD})
            if number is not None and number in _STOP:
                self._report_stopping(number)
                return False
            for child, end in self._reap():
                raise StartError(f"{child.name} ended while starting ({end}): see the event log")
        report_ready(self._reporter, self._plan, self._bound)
        self._reporter.flush()
        return True

    @property
    def _plan(self) -> Plan:
        return self._reloader.running.plan

    @property
    def _settings(self) -> Settings:
        return self._reloader.running.settings

    @property
    def _tls(self) -> TlsMaterial:
        return self._reloader.running.tls

    # The children.

    def _start_child(self, child: Child) -> None:
        """Fork it. Raises OSError."""
        if child.slot is not None:
            # A pair of its own for each process: an answer of the one before must not be taken for the new one's.
            for sock in self._orders.pop(child.slot, ()):
                sock.close()
            self._orders[child.slot] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._orders[child.slot][0].setblocking(False)
        child.start(time.monotonic())

    def _worker_child(self, slot: int) -> Child:
        name = f"worker {slot}"

        def run() -> int:
            # Made in the child: the configuration in force when it is started, not when the master was.
            context = self._worker_context(slot)
            self._close_others([*(one.sock for one in (*context.https, *context.redirect)), context.orders])
            return self._run_worker(context)

        return Child(name, run, self._crash_reporter(name), self._upbringing, slot)

    def _worker_lines(self) -> list[WorkerLine]:
        """The workers that take part in a reload."""
        return [
            WorkerLine(child.name, slot, self._orders[slot][0], functools.partial(_alive, child.pid))
            for slot, child in enumerate(self._workers)
            if child.pid is not None and self._book.page(slot)[counters.READY]
        ]

    def _worker_context(self, slot: int) -> WorkerContext:
        settings, budget, workers = self._settings, self._plan.budget, self._plan.workers
        return WorkerContext(
            slot=slot,
            settings=settings,
            https=self._bound.https(slot, self._plan.listen, self._tls),
            redirect=self._bound.redirect(slot, self._plan.listen),
            permits=shares(budget.max_connections, workers)[slot],
            upstream_permits=shares(budget.max_upstream_connections, workers)[slot],
            redirect_permits=shares(settings.redirect.max_connections, workers)[slot],
            https_port=effective_https_port(settings),
            cells=self._book.page(slot),
            channel=self._channel,
            orders=self._orders[slot][1],
            upstream_trust=self._tls.upstream,
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
        assert self._bound.admin is not None
        return ControlContext(
            settings=self._settings,
            book=self._book,
            cells=self._control_book.page(0),
            master_cells=self._control_book.page(1),
            read_end=self._read_end,
            channel=self._channel,
            health=self._bound.health,
            admin=self._bound.admin,
            # Not the workers' where that is another: who takes one of them over must not command the master.
            admin_uids=frozenset({0, self._uid}),
            waits=self._handover is not None and not self._serving,
            commands=self._commands.control_end,
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
        others += [one.line for one in (self._handover, self._upgrade) if one is not None]
        for sock in [*self._bound.all, self._read_end, *self._commands.sockets, *others, *self._helper_sockets]:
            if sock not in own:
                sock.close()

    def _permit_shares(self) -> list[int]:
        return list(shares(self._plan.budget.max_connections, self._plan.workers))

    def _facts(self) -> dict[str, object]:
        facts = status_facts(self._plan, self._tls, self._bound)
        # Also where a child asks: the process that operators signal is the master.
        log = self._settings.event_log
        return {
            **facts,
            "pid": self._pid,
            "config": None if self._load is None else self._load.path,
            "generation": self._reloader.running.number,
            "last_reload": self._last_reload,
            "event_log": {"level": log.level, "max_lines_per_minute": log.max_lines_per_minute},
        }

    def _crash_reporter(self, name: str) -> Callable[[BaseException], None]:
        def report(error: BaseException) -> None:
            reporter = ChannelReporter(name, self._channel, None)
            reporter.report(f"{_kind(name)}.failed", f"{name} failed: {type(error).__name__}", exc=error)
            reporter.flush()

        return report

    # Supervision.

    def _supervise(self) -> None:
        while True:
            number = self._next_signal(self._timeout_secs())
            if number is not None and number in _STOP:
                self._report_stopping(number)
                return
            self._tend(number)
            if self._successor is not None:
                return

    def _delay_drain(self) -> None:
        """Serve on with readiness red, for a balancer to notice. One more signal ends this and everything at once."""
        ends_at = time.monotonic() + self._settings.drain_delay_secs
        while (left_secs := ends_at - time.monotonic()) > 0:
            number = self._next_signal(min(left_secs, self._timeout_secs()))
            if number is not None and number in _STOP:
                self._impatient = True
                return
            self._tend(number)

    def _tend(self, number: int | None) -> None:
        """What goes on while the workers serve, after a wait that ended with the signal ``number``."""
        if number == signal.SIGIO:
            self._obey()
        if number == signal.SIGHUP:
            self._reload()
        if number == signal.SIGUSR2:
            self._begin_upgrade(None)
        if self._upgrade is not None:
            self._watch_upgrade(self._upgrade)
        if self._confirmation is not None and time.monotonic() >= self._confirmation[0]:
            self._go_back()
        if number == signal.SIGUSR1:
            make_logs(self._settings, self._upbringing.privileges)
            for child in (self._control, *self._workers):
                child.send(signal.SIGUSR1)
        for child, end in self._reap():
            pause_secs = child.ended(time.monotonic())
            self._report_death(child, f"{child.name} ended ({end})", end, pause_secs)
        self._look_for_hangs()
        self._restart_due()

    # Upgrade.

    def _begin_upgrade(self, request: dict[str, Any] | None) -> None:
        """Start a new master beside this one. ``request`` is answered when it is ready or has failed."""
        reason = ""
        if os.getpid() == 1:
            reason = "this is process 1 of a container, which ends with it: replace the container instead"
        elif self._load is None:
            reason = "this instance has no configuration file: start it with `run --config`"
        elif self._upgrade is not None:
            reason = "an upgrade is under way"
        elif self._confirmation is not None:
            reason = "a reload waits to be confirmed: confirm it first"
        elif self._stopping:
            reason = STOPPING
        elif self._successor is not None:
            reason = f"this instance has handed over to pid {self._successor}"
        if not reason:
            assert self._bound.admin is not None
            health = self._bound.health
            try:
                self._upgrade = Upgrade(
                    rows=self._bound.rows,
                    health=None if health is None else (bound_address(health), health),
                    admin=(self._bound.admin_path, self._bound.admin),
                    inherited=self._bound.inherited,
                    pid_file=None if self._pid_file is None else self._pid_file.fileno(),
                    folder=self._folder,
                    environ={**os.environ, **self._notifier.environ},
                    request=request,
                )
            except OSError as error:
                reason = f"a new master cannot be started: {error.strerror}"
            else:
                self._reporter.report(
                    "upgrade.started", "a new master is starting", level="info", pid=self._upgrade.pid
                )
                return
        self._upgrade_failed(request, reason)

    def _watch_upgrade(self, upgrade: Upgrade) -> None:
        outcome = upgrade.outcome()
        if outcome is None:
            return
        self._upgrade = None
        if outcome:
            self._upgrade_failed(upgrade.request, outcome)
            return
        self._successor = upgrade.pid
        if upgrade.request is not None:
            self._commands.answer(upgrade.request, {"result": "upgraded", "pid": upgrade.pid, "errors": []})

    def _upgrade_failed(self, request: dict[str, Any] | None, reason: str) -> None:
        self._reporter.report("upgrade.failed", "the upgrade failed: this instance goes on", error=reason)
        self._reporter.flush()
        if request is not None:
            self._commands.answer(request, {"result": "refused", "errors": [reason]})

    def _retire(self, successor: int) -> None:
        """The successor serves. Whoever is connected here may stay for upgrade_drain_timeout_secs; a signal that asks
        for the end shortens that to an ordinary drain."""
        timeout_secs = self._settings.upgrade_drain_timeout_secs
        self._reporter.report(
            "upgrade.handed_over",
            "a new master serves; this one ends with its connections",
            level="info",
            pid=successor,
        )
        if self._pid_file is not None:
            self._pid_file.give_up()
        self._notifier.hand_over(successor)
        self._control_book.page(0)[counters.HANDED_OVER] = 1
        self._control.send(signal.SIGUSR2)
        for slot, child in enumerate(self._workers):
            child.restart_at = None
            with contextlib.suppress(OSError):
                orders.send(self._orders[slot][0], orders.Message(orders.RETIRE, int(timeout_secs)))
        self._bound.release()
        now = time.monotonic()
        deadline, tell_until = now + timeout_secs + DRAIN_GRACE_SECS, now + HAND_OVER_SECS
        while now < deadline and (
            any(child.pid is not None for child in self._workers) or (self._notifier.unsent and now < tell_until)
        ):
            number = self._next_signal(TICK_SECS)
            self._reap()
            if number == signal.SIGIO:
                self._obey()  # to say no
            if number is not None and number in _STOP:
                return
            now = time.monotonic()

    # Reload.

    def _obey(self) -> None:
        """Do what the admin API asks for."""
        for request in self._commands.pending():
            operation = request.get("operation")
            if operation == "reload":
                document = self._reload(
                    dry_run=bool(request.get("dry_run")), confirm_secs=request.get("confirm_secs")
                ).as_dict()
            elif operation == "confirm":
                document = self._confirm()
            elif operation == "drain":
                document = self._begin_drain()
            elif operation == "upgrade":
                self._begin_upgrade(request)
                continue
            else:
                document = {"result": "refused", "errors": [f"unknown operation {operation!r}"]}
            self._commands.answer(request, document)

    def _begin_drain(self) -> dict[str, object]:
        if self._successor is not None:
            return {"result": "refused", "errors": [f"this instance has handed over to pid {self._successor}"]}
        if not self._stopping:  # a second signal would end the drain at once
            os.kill(self._pid, signal.SIGTERM)
        return {"result": "draining", "pid": self._pid, "errors": []}

    def _reload(self, *, dry_run: bool = False, confirm_secs: float | None = None) -> Outcome:
        running = self._reloader.running
        if not dry_run:
            self._notifier.reloading()
        obstacle = self._obstacle()
        if obstacle or self._load is None:
            outcome = Outcome("refused", running.number, errors=[obstacle])
        else:
            outcome = self._reloader.reload(self._load, dry_run=dry_run)
        if dry_run:
            return outcome
        self._notifier.ready()
        if outcome.accepted and confirm_secs is not None:
            outcome.confirm_secs = confirm_secs
            self._confirmation = (time.monotonic() + confirm_secs, running)
        self._report_reload(outcome)
        return outcome

    def _obstacle(self) -> str:
        """Why no configuration can be loaded now, whatever is in it."""
        if self._load is None:
            return "this instance has no configuration file to reload"
        if self._confirmation is not None:
            return "a reload waits to be confirmed: `reverse-proxy confirm` keeps it, or wait until it is taken back"
        if self._upgrade is not None:
            return "an upgrade is under way, whose new master reads the configuration anyway"
        if self._successor is not None:
            return f"this instance has handed over to pid {self._successor}"
        return STOPPING if self._stopping else ""

    def _confirm(self) -> dict[str, object]:
        if self._confirmation is None:
            return {"result": "refused", "errors": ["no reload waits to be confirmed"]}
        self._confirmation = None
        self._last_reload = {**(self._last_reload or {}), "confirm_secs": None}
        self._tell_news()
        self._reporter.report("reload.confirmed", "the configuration stays", level="info")
        return {"result": "confirmed", "generation": self._reloader.running.number, "errors": []}

    def _go_back(self) -> None:
        """Nobody confirmed in time."""
        assert self._confirmation is not None
        before = self._confirmation[1]
        outcome = self._reloader.restore(before)
        retry_at = None if outcome.accepted else time.monotonic() + CONFIRM_RETRY_SECS
        self._confirmation = None if retry_at is None else (retry_at, before)
        self._last_reload = {**(self._last_reload or {}), "result": "taken back", "confirm_secs": None}
        self._reporter.report(
            "reload.not_confirmed",
            "nobody confirmed the reload in time: the configuration before it is in force again"
            if outcome.accepted
            else "nobody confirmed the reload in time, but going back failed: it is tried again",
            level="warning" if outcome.accepted else "error",
            generation=outcome.generation,
            errors="; ".join(outcome.errors),
        )
        self._tell_news()

    def _report_reload(self, outcome: Outcome) -> None:
        counter = counters.RELOADS_ACCEPTED if outcome.accepted else counters.RELOADS_REFUSED
        self._control_book.page(1)[counter] += 1
        self._last_reload = {
            "result": outcome.result,
            "generation": outcome.generation,
            "time": time.time(),
            "confirm_secs": outcome.confirm_secs,
            "errors": outcome.errors,
        }
        self._tell_news()
        if outcome.accepted:
            changes = "; ".join(f"{key}: {', '.join(values)}" for key, values in outcome.changes.as_dict().items())
            self._reporter.report(
                "reload.accepted",
                "the configuration was reloaded",
                level="info",
                generation=outcome.generation,
                changes=changes or "none",
                warnings="; ".join(outcome.warnings),
            )
        else:
            self._reporter.report(
                "reload.refused",
                "the reload was refused: the configuration before it stays in force",
                generation=outcome.generation,
                errors="; ".join(outcome.errors),
            )
        self._reporter.flush()

    def _notify(self) -> None:
        self._notifier.tick(self._book, self._plan.budget.max_connections, time.monotonic(), stopping=self._stopping)

    def _give_rows(self, settings: Settings) -> None:
        self._book.assign(*row_names(settings))

    def _tell_news(self) -> None:
        self._commands.tell(self._facts(), self._permit_shares())

    def _look_for_hangs(self) -> None:
        now = time.monotonic()
        self._watch.begin(now, self._settings.worker_heartbeat_timeout_secs)
        for slot, child in enumerate(self._workers):
            self._watch.look(child, self._book.page(slot), now)

    def _timeout_secs(self) -> float:
        now = time.monotonic()
        if self._upgrade is not None:
            return UPGRADE_LOOK_SECS
        due = [child.restart_at - now for child in self._all if child.restart_at is not None]
        return max(0.0, min([TICK_SECS, *due]))

    def _next_signal(self, timeout_secs: float, wanted: frozenset[signal.Signals] = _SIGNALS) -> int | None:
        """Wait for a signal; None when there was none in time. The once-a-second work is done here."""
        timeout_secs = min(timeout_secs, self._notifier.wait_secs(time.monotonic()))
        found = signal.sigtimedwait(wanted, timeout_secs)
        now = time.monotonic()
        self._notify()
        if now - self._flushed_at >= TICK_SECS:
            self._flushed_at = now
            self._reporter.flush()
            publish_descriptors(self._control_book.page(1))
            listening = sum(sock.fileno() >= 0 for sock in self._bound.all)
            self._control_book.page(1)[counters.LISTENERS_OPEN] = listening
            if self._live is not None:
                self._live.draw(self._book, now)
        if found is None:
            return None
        self._sender = found.si_pid
        return found.si_signo

    def _reap(self) -> list[tuple[Child, str]]:
        """The children that have ended, with how. Orphans, which PID 1 of a container inherits, are reaped too."""
        ended: list[tuple[Child, str]] = []
        while True:
            try:
                pid, wait_status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return ended
            if pid == 0:
                return ended
            for child in self._all:
                if child.pid == pid:
                    child.pid = None
                    if child.slot is not None:
                        self._book.clear_gauges(child.slot)
                    ended.append((child, describe_end(wait_status)))

    def _restart_due(self) -> None:
        now = time.monotonic()
        for child in self._all:
            if child.restart_at is None or child.restart_at > now:
                continue
            try:
                self._start_child(child)
            except OSError as error:
                pause_secs = child.postpone(now)
                self._report_death(child, f"{child.name} cannot be started", str(error.strerror), pause_secs)
            else:
                self._count_restart(child)

    def _count_restart(self, child: Child) -> None:
        if child.slot is not None:
            self._book.page(child.slot)[counters.RESTARTS] += 1
        elif child is self._control:
            self._control_book.page(0)[counters.RESTARTS] += 1

    def _report_stopping(self, number: int) -> None:
        self._stopping = True
        if self._upgrade is not None:
            upgrade, self._upgrade = self._upgrade, None
            self._upgrade_failed(upgrade.request, upgrade.abandon(STOPPING))
        self._control_book.page(0)[counters.DRAINING] = 1
        self._notifier.stopping()
        # A signal of the kernel, such as a terminal's, has no sender.
        sender = f"pid {self._sender} ({command_of(self._sender)})" if self._sender else "terminal"
        if self._sender == self._pid:
            sender = "admin socket"
        self._reporter.report("stopping", "draining", level="info", signal=signal.Signals(number).name, sender=sender)
        self._reporter.flush()

    def _report_death(self, child: Child, message: str, end: str, pause_secs: float) -> None:
        trace = child.traceback()
        self._reporter.report(
            f"{_kind(child.name)}.died",
            message,
            exc=RemoteTraceback(trace) if trace else None,
            process=child.name,
            status=end,
            restart_in_secs=pause_secs,
            restarts=child.restarts,
        )

    # Stop.

    def _stop(self) -> None:
        """Drain the workers, then end the rest, the control process last: it writes the others' final events."""
        if self._live is not None:
            self._live.clear()
            self._live = None
        self._bound.close_listeners()
        self._end(self._workers, self._settings.drain_timeout_secs + DRAIN_GRACE_SECS)
        self._end(self._helpers, HELPER_STOP_SECS)
        self._reporter.report("stopped", "stopped", level="info")
        self._reporter.flush()
        self._end([self._control], HELPER_STOP_SECS)
        self._bound.close()
        self._commands.close()
        for sock in (self._read_end, self._channel, *(sock for pair in self._orders.values() for sock in pair)):
            sock.close()
        if self._upbringing.traces is not None:
            self._upbringing.traces.close()

    def _end(self, children: Sequence[Child], timeout_secs: float) -> None:
        """SIGTERM; once more at another signal, which ends a drain; SIGKILL after ``timeout_secs``."""
        for child in children:
            child.restart_at = None
            child.send(signal.SIGTERM)
        deadline = time.monotonic() + (min(timeout_secs, IMPATIENT_STOP_SECS) if self._impatient else timeout_secs)
        self._reap()
        killed = False
        while any(child.pid is not None for child in children):
            left_secs = deadline - time.monotonic()
            tick_secs = IMPATIENT_TICK_SECS if self._impatient else TICK_SECS
            number = self._next_signal(tick_secs if killed else min(tick_secs, max(0.0, left_secs)))
            self._reap()
            if number == signal.SIGIO:
                self._obey()  # to say no
            if number in _STOP:
                self._impatient = True
                deadline = min(deadline, time.monotonic() + IMPATIENT_STOP_SECS)
            if self._impatient and not killed:
                # More than once: two that come together count as one with the kernel.
                for child in children:
                    child.send(signal.SIGTERM)
            if killed or left_secs > 0:
                continue
            killed = True
            for child in children:
                if child.pid is not None:
                    self._reporter.report(
                        "killed", f"{child.name} had not ended yet", level="warning", process=child.name
                    )
                    child.send(signal.SIGKILL)


def _alive(pid: int) -> bool:
    """Whether our child still runs; it is not reaped here."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def _kind(name: str) -> str:
    """``worker`` of ``worker 3``: signatures come from a closed set."""
    return name.partition(" ")[0]


def _raise_soft_limit(soft: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    except (OSError, ValueError) as error:
        raise StartError(f"cannot raise the soft descriptor limit to {soft}: {error}") from error
