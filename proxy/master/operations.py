"""Operations: what the admin API and signals ask of a running master: reload, confirm, drain, upgrade."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from proxy.config.load import ConfigFile
from proxy.master.crew import Crew
from proxy.master.daemonize import PidFile
from proxy.master.listeners import bound_address
from proxy.master.notify import Notifier
from proxy.master.reload import Outcome, Running
from proxy.master.stage import STOPPING, Stage
from proxy.master.upgrade import Upgrade
from proxy.observe import counters

CONFIRM_RETRY_SECS = 5.0


class Operations:
    """``tend`` does what a signal asks for and what is due by itself, ``obey`` what the admin API asks for."""

    def __init__(
        self,
        crew: Crew,
        stage: Stage,
        notifier: Notifier,
        *,
        load: ConfigFile | None,
        pid_file: PidFile | None,
        folder: str,
    ) -> None:
        """``load`` reads the configuration anew; ``folder`` and ``pid_file`` are for the master of an upgrade."""
        self._crew = crew
        self._stage = stage
        self._notifier = notifier
        self._load = load
        self._pid_file = pid_file
        self._folder = folder
        self._confirmation: tuple[float, Running] | None = None

    def tend(self, number: int | None) -> None:
        """After a wait of the supervision that ended with the signal ``number``: what it asks for, and what is due."""
        if number == signal.SIGIO:
            self.obey()
        if number == signal.SIGHUP:
            self._reload()
        if number == signal.SIGUSR2:
            self._begin_upgrade(None)
        if self._stage.upgrade is not None:
            self._watch_upgrade(self._stage.upgrade)
        if self._confirmation is not None and time.monotonic() >= self._confirmation[0]:
            self._go_back()

    def obey(self) -> None:
        """Do what the admin API asks for."""
        for request in self._crew.commands.pending():
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
            self._crew.commands.answer(request, document)

    def _begin_drain(self) -> dict[str, object]:
        if self._stage.successor is not None:
            return {"result": "refused", "errors": [f"this instance has handed over to pid {self._stage.successor}"]}
        if not self._stage.stopping:  # a second signal would end the drain at once
            os.kill(self._crew.pid, signal.SIGTERM)
        return {"result": "draining", "pid": self._crew.pid, "errors": []}

    # Reload.

    def _reload(self, *, dry_run: bool = False, confirm_secs: float | None = None) -> Outcome:
        running = self._crew.running
        if not dry_run:
            self._notifier.reloading()
        obstacle = self._obstacle()
        if obstacle or self._load is None:
            outcome = Outcome("refused", running.number, errors=[obstacle])
        else:
            outcome = self._crew.reloader.reload(self._load, dry_run=dry_run)
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
        if self._stage.upgrade is not None:
            return "an upgrade is under way, whose new master reads the configuration anyway"
        if self._stage.successor is not None:
            return f"this instance has handed over to pid {self._stage.successor}"
        return STOPPING if self._stage.stopping else ""

    def _confirm(self) -> dict[str, object]:
        if self._confirmation is None:
            return {"result": "refused", "errors": ["no reload waits to be confirmed"]}
        self._confirmation = None
        self._stage.last_reload = {**(self._stage.last_reload or {}), "confirm_secs": None}
        self._crew.tell_news()
        self._crew.reporter.report("reload.confirmed", "the configuration stays", level="info")
        return {"result": "confirmed", "generation": self._crew.running.number, "errors": []}

    def _go_back(self) -> None:
        """Nobody confirmed in time."""
        assert self._confirmation is not None
        before = self._confirmation[1]
        outcome = self._crew.reloader.restore(before)
        retry_at = None if outcome.accepted else time.monotonic() + CONFIRM_RETRY_SECS
        self._confirmation = None if retry_at is None else (retry_at, before)
        self._stage.last_reload = {**(self._stage.last_reload or {}), "result": "taken back", "confirm_secs": None}
        self._crew.reporter.report(
            "reload.not_confirmed",
            "nobody confirmed the reload in time: the configuration before it is in force again"
            if outcome.accepted
            else "nobody confirmed the reload in time, but going back failed: it is tried again",
            level="warning" if outcome.accepted else "error",
            generation=outcome.generation,
            errors="; ".join(outcome.errors),
        )
        self._crew.tell_news()

    def _report_reload(self, outcome: Outcome) -> None:
        counter = counters.RELOADS_ACCEPTED if outcome.accepted else counters.RELOADS_REFUSED
        self._crew.control_book.page(1)[counter] += 1
        self._stage.last_reload = {
            "result": outcome.result,
            "generation": outcome.generation,
            "time": time.time(),
            "confirm_secs": outcome.confirm_secs,
            "errors": outcome.errors,
        }
        self._crew.tell_news()
        if outcome.accepted:
            changes = "; ".join(f"{key}: {', '.join(values)}" for key, values in outcome.changes.as_dict().items())
            self._crew.reporter.report(
                "reload.accepted",
                "the configuration was reloaded",
                level="info",
                generation=outcome.generation,
                changes=changes or "none",
                warnings="; ".join(outcome.warnings),
            )
        else:
            self._crew.reporter.report(
                "reload.refused",
                "the reload was refused: the configuration before it stays in force",
                generation=outcome.generation,
                errors="; ".join(outcome.errors),
            )
        self._crew.reporter.flush()

    # Upgrade.

    def _begin_upgrade(self, request: dict[str, Any] | None) -> None:
        """Start a new master beside this one. ``request`` is answered when it is ready or has failed."""
        reason = ""
        if os.getpid() == 1:
            reason = "this is process 1 of a container, which ends with it: replace the container instead"
        elif self._load is None:
            reason = "this instance has no configuration file: start it with `run --config`"
        elif self._stage.upgrade is not None:
            reason = "an upgrade is under way"
        elif self._confirmation is not None:
            reason = "a reload waits to be confirmed: confirm it first"
        elif self._stage.stopping:
            reason = STOPPING
        elif self._stage.successor is not None:
            reason = f"this instance has handed over to pid {self._stage.successor}"
        if not reason:
            assert self._crew.bound.admin is not None
            health = self._crew.bound.health
            try:
                self._stage.upgrade = Upgrade(
                    rows=self._crew.bound.rows,
                    health=None if health is None else (bound_address(health), health),
                    admin=(self._crew.bound.admin_path, self._crew.bound.admin),
                    inherited=self._crew.bound.inherited,
                    pid_file=None if self._pid_file is None else self._pid_file.fileno(),
                    folder=self._folder,
                    environ={**os.environ, **self._notifier.environ},
                    request=request,
                )
            except OSError as error:
                reason = f"a new master cannot be started: {error.strerror}"
            else:
                self._crew.reporter.report(
                    "upgrade.started", "a new master is starting", level="info", pid=self._stage.upgrade.pid
                )
                return
        self._upgrade_failed(request, reason)

    def _watch_upgrade(self, upgrade: Upgrade) -> None:
        outcome = upgrade.outcome()
        if outcome is None:
            return
        self._stage.upgrade = None
        if outcome:
            self._upgrade_failed(upgrade.request, outcome)
            return
        self._stage.successor = upgrade.pid
        if upgrade.request is not None:
            self._crew.commands.answer(upgrade.request, {"result": "upgraded", "pid": upgrade.pid, "errors": []})

    def _upgrade_failed(self, request: dict[str, Any] | None, reason: str) -> None:
        self._crew.reporter.report("upgrade.failed", "the upgrade failed: this instance goes on", error=reason)
        self._crew.reporter.flush()
        if request is not None:
            self._crew.commands.answer(request, {"result": "refused", "errors": [reason]})

    def abandon_upgrade(self) -> None:
        """This instance is about to stop: end the new master that is starting, if there is one."""
        if self._stage.upgrade is not None:
            upgrade, self._stage.upgrade = self._stage.upgrade, None
            self._upgrade_failed(upgrade.request, upgrade.abandon(STOPPING))

    def hand_over(self, successor: int, timeout_secs: float) -> None:
        """The successor serves. The workers may take ``timeout_secs`` to end with their connections."""
        self._crew.reporter.report(
            "upgrade.handed_over",
            "a new master serves; this one ends with its connections",
            level="info",
            pid=successor,
        )
        if self._pid_file is not None:
            self._pid_file.give_up()
        self._notifier.hand_over(successor)
        self._crew.control_book.page(0)[counters.HANDED_OVER] = 1
        self._crew.control.send(signal.SIGUSR2)
        self._crew.retire_workers(int(timeout_secs))
        self._crew.bound.release()
