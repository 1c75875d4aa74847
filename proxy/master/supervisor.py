"""The master: binds, forks, restarts, drains. No event loop and no thread, so that a fork is always safe.

All signals it cares for stay blocked and are taken one at a time with sigtimedwait(2): nothing is ever interrupted, and
nothing is lost between a look and a wait.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Sequence

import setproctitle

from proxy.budget import process_limits
from proxy.config.load import ConfigFile
from proxy.config.schema import Settings
from proxy.errors import EXIT_OK, StartError
from proxy.master.activation import NOTHING, Inherited
from proxy.master.announce import report_ready, report_start
from proxy.master.children import Child
from proxy.master.control import SOURCE as CONTROL
from proxy.master.crew import Crew, Helper, RunWorker
from proxy.master.daemonize import PidFile
from proxy.master.live import LiveLine
from proxy.master.logfiles import make_logs, require_logs
from proxy.master.notify import Notifier
from proxy.master.operations import Operations
from proxy.master.plan import load_tls, make_plan, require_budget
from proxy.master.port_owner import command_of
from proxy.master.privileges import forbid_cores, plan_privileges
from proxy.master.reload import Running
from proxy.master.sockets import BoundSockets
from proxy.master.stage import Stage
from proxy.master.upgrade import Handover
from proxy.master.watch import HangWatch
from proxy.observe import counters
from proxy.observe.descriptors import publish_descriptors

READY_TIMEOUT_SECS = 30.0
LOG_START_SECS = 3.0
READY_POLL_SECS = 0.02
TICK_SECS = 1.0
UPGRADE_LOOK_SECS = 0.1
HAND_OVER_SECS = 5.0
"""For a busy service manager to take the word of the new main process."""
DRAIN_GRACE_SECS = 5.0
"""A worker ends by itself after drain_timeout_secs; so much later it is killed."""
HELPER_STOP_SECS = 5.0
IMPATIENT_STOP_SECS = 3.0
"""After a second signal a worker cuts what is under way, logs it and ends; so much later it is killed."""
IMPATIENT_TICK_SECS = 0.1

_STOP = frozenset({signal.SIGTERM, signal.SIGINT})
_SIGNALS = _STOP | {signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGIO}


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
        plan = make_plan(settings, process_limits())
        require_budget(plan.budget)
        privileges = plan_privileges(settings)
        require_logs(settings, privileges)
        forbid_cores(settings)
        if plan.budget.raise_to is not None:
            _raise_soft_limit(plan.budget.raise_to)
        tls = load_tls(plan, store=True)
        self._bound = BoundSockets(plan, inherited, handover)
        self._privileges = privileges
        self._handover = handover
        self._stage = Stage()
        self._crew = Crew(
            Running(1, settings, plan, tls),
            self._bound,
            run_worker,
            stage=self._stage,
            privileges=privileges,
            helpers=helpers,
            handover=handover,
            config=None if load is None else load.path,
            while_waiting=self._notify,
        )
        self._reporter = self._crew.reporter
        self._watch = HangWatch(READY_TIMEOUT_SECS, self._reporter)
        self._notifier = Notifier(os.environ)
        self._operations = Operations(
            self._crew, self._stage, self._notifier, load=load, pid_file=pid_file, folder=folder
        )
        self._on_ready = on_ready
        self._make_live = live
        self._live: LiveLine | None = None
        self._flushed_at = 0.0
        self._impatient = False
        self._sender = 0

    def run(self) -> int:
        """Start, supervise until a signal, drain. Returns the exit status.

        Raises StartError when a child does not become ready; then none of them is left. The signals stay blocked for
        what is left of the process: a second SIGTERM at the last moment must not turn a clean exit into a death.
        """
        setproctitle.setproctitle("reverse-proxy: master")
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        self._crew.commands.signal_me()
        try:
            if self._start():
                self._stage.serving = True
                self._on_ready()
                self._notifier.ready()
                if self._handover is not None:
                    self._crew.tell_news()
                    self._handover.tell_ready(self._crew.running.settings.admin.socket)
                    self._bound.own_admin()
                if self._make_live is not None:
                    self._live = self._make_live(self._crew.running.plan.budget.max_connections)
                self._supervise()
                if self._stage.successor is None:
                    self._delay_drain()
                else:
                    self._retire(self._stage.successor)
        finally:
            self._stop()
        return EXIT_OK

    def _start(self) -> bool:
        """Start every child and wait until the workers are ready. False when a signal asked for the end meanwhile."""
        make_logs(self._crew.running.settings, self._privileges)
        report_start(self._reporter, self._crew.running.plan, self._crew.running.tls)
        for child in self._crew.all:
            try:
                self._crew.start_child(child)
            except OSError as error:
                raise StartError(f"cannot start {child.name}: {error.strerror}") from error
        deadline = time.monotonic() + READY_TIMEOUT_SECS
        pages = {CONTROL: self._crew.control_book.page(0)}
        pages |= {child.name: self._crew.book.page(slot) for slot, child in enumerate(self._crew.workers)}
        while waiting := [name for name, cells in pages.items() if not cells[counters.READY]]:
            if time.monotonic() >= deadline:
                raise StartError(f"{waiting[0]} was not ready in {READY_TIMEOUT_SECS:.0f} s: see the event log")
            # The others, such as a SIGHUP, stay pending for the supervision.
            number = self._next_signal(READY_POLL_SECS, _STOP | {signal.SIGCHLD})
            if number is not None and number in _STOP:
                self._report_stopping(number)
                return False
            for child, end in self._crew.reap():
                self._await_log(pages[CONTROL])
                raise StartError(f"{child.name} ended while starting ({end}): see the event log")
        report_ready(self._reporter, self._crew.running.plan, self._bound)
        self._reporter.flush()
        return True

    def _await_log(self, control: memoryview) -> None:
        """What a worker has said at its end is written by the control process, which may still be starting."""
        deadline = time.monotonic() + LOG_START_SECS
        while not control[counters.READY] and time.monotonic() < deadline:
            time.sleep(READY_POLL_SECS)

    # Supervision.

    def _supervise(self) -> None:
        while True:
            number = self._next_signal(self._timeout_secs())
            if number is not None and number in _STOP:
                self._report_stopping(number)
                return
            self._tend(number)
            if self._stage.successor is not None:
                return

    def _delay_drain(self) -> None:
        """Serve on with readiness red, for a balancer to notice. One more signal ends this and everything at once."""
        ends_at = time.monotonic() + self._crew.running.settings.drain_delay_secs
        while (left_secs := ends_at - time.monotonic()) > 0:
            number = self._next_signal(min(left_secs, self._timeout_secs()))
            if number is not None and number in _STOP:
                self._impatient = True
                return
            self._tend(number)

    def _tend(self, number: int | None) -> None:
        """What goes on while the workers serve, after a wait that ended with the signal ``number``."""
        self._operations.tend(number)
        if number == signal.SIGUSR1:
            make_logs(self._crew.running.settings, self._privileges)
            for child in (self._crew.control, *self._crew.workers):
                child.send(signal.SIGUSR1)
        self._crew.note_ended()
        self._look_for_hangs()
        self._crew.restart_due()

    def _retire(self, successor: int) -> None:
        """The successor serves. Whoever is connected here may stay for upgrade_drain_timeout_secs; a signal that asks
        for the end shortens that to an ordinary drain."""
        timeout_secs = self._crew.running.settings.upgrade_drain_timeout_secs
        self._operations.hand_over(successor, timeout_secs)
        now = time.monotonic()
        deadline, tell_until = now + timeout_secs + DRAIN_GRACE_SECS, now + HAND_OVER_SECS
        while now < deadline and (
            any(child.pid is not None for child in self._crew.workers) or (self._notifier.unsent and now < tell_until)
        ):
            number = self._next_signal(TICK_SECS)
            self._crew.reap()
            if number == signal.SIGIO:
                self._operations.obey()  # to say no
            if number is not None and number in _STOP:
                return
            now = time.monotonic()

    def _notify(self) -> None:
        self._notifier.tick(
            self._crew.book,
            self._crew.running.plan.budget.max_connections,
            time.monotonic(),
            stopping=self._stage.stopping,
        )

    def _look_for_hangs(self) -> None:
        now = time.monotonic()
        self._watch.begin(now, self._crew.running.settings.worker_heartbeat_timeout_secs)
        for slot, child in enumerate(self._crew.workers):
            self._watch.look(child, self._crew.book.page(slot), now)

    def _timeout_secs(self) -> float:
        now = time.monotonic()
        if self._stage.upgrade is not None:
            return UPGRADE_LOOK_SECS
        due = [child.restart_at - now for child in self._crew.all if child.restart_at is not None]
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
            publish_descriptors(self._crew.control_book.page(1))
            listening = sum(sock.fileno() >= 0 for sock in self._bound.all)
            self._crew.control_book.page(1)[counters.LISTENERS_OPEN] = listening
            if self._live is not None:
                self._live.draw(self._crew.book, now)
        if found is None:
            return None
        self._sender = found.si_pid
        return found.si_signo

    def _report_stopping(self, number: int) -> None:
        self._stage.stopping = True
        self._operations.abandon_upgrade()
        self._crew.control_book.page(0)[counters.DRAINING] = 1
        self._notifier.stopping()
        # A signal of the kernel, such as a terminal's, has no sender.
        sender = f"pid {self._sender} ({command_of(self._sender)})" if self._sender else "terminal"
        if self._sender == self._crew.pid:
            sender = "admin socket"
        self._reporter.report("stopping", "draining", level="info", signal=signal.Signals(number).name, sender=sender)
        self._reporter.flush()

    # Stop.

    def _stop(self) -> None:
        """Drain the workers, then end the rest, the control process last: it writes the others' final events."""
        if self._live is not None:
            self._live.clear()
            self._live = None
        self._bound.close_listeners()
        self._end(self._crew.workers, self._crew.running.settings.drain_timeout_secs + DRAIN_GRACE_SECS)
        self._end(self._crew.helpers, HELPER_STOP_SECS)
        self._reporter.report("stopped", "stopped", level="info")
        self._reporter.flush()
        self._end([self._crew.control], HELPER_STOP_SECS)
        self._bound.close()
        self._crew.close()

    def _end(self, children: Sequence[Child], timeout_secs: float) -> None:
        """SIGTERM; once more at another signal, which ends a drain; SIGKILL after ``timeout_secs``."""
        for child in children:
            child.restart_at = None
            child.send(signal.SIGTERM)
        deadline = time.monotonic() + (min(timeout_secs, IMPATIENT_STOP_SECS) if self._impatient else timeout_secs)
        self._crew.reap()
        killed = False
        while any(child.pid is not None for child in children):
            left_secs = deadline - time.monotonic()
            tick_secs = IMPATIENT_TICK_SECS if self._impatient else TICK_SECS
            number = self._next_signal(tick_secs if killed else min(tick_secs, max(0.0, left_secs)))
            self._crew.reap()
            if number == signal.SIGIO:
                self._operations.obey()  # to say no
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


def _raise_soft_limit(soft: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    except (OSError, ValueError) as error:
        raise StartError(f"cannot raise the soft descriptor limit to {soft}: {error}") from error
