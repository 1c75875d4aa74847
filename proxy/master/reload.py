"""A reload is a transaction: everything is made and checked, in the master and in each worker, and only then switched.

    parse -> check every value -> budget -> certificates -> bind new listeners -> each worker prepares -> switch

Whatever fails on the way leaves the configuration in force as it was, and the answer says why.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from proxy.budget import process_limits, shares
from proxy.config.checks import nobody_is_served
from proxy.config.diff import Changes, diff, keep_what_is_not_live
from proxy.config.effective import effective_https_port
from proxy.config.load import ConfigFile
from proxy.config.place import told
from proxy.config.schema import Settings
from proxy.errors import OperatorError
from proxy.master.logfiles import make_logs, require_logs
from proxy.master.plan import Plan, TlsMaterial, load_tls, make_plan, require_budget
from proxy.master.privileges import Privileges
from proxy.master.sockets import BoundSockets, Extension
from proxy.worker import orders
from proxy.worker.orders import Message, NextGeneration, NextListener

PREPARE_SECS = 20.0
"""For a worker to make the next generation: it resolves names, which has a bound of its own."""
COMMIT_SECS = 10.0
_LOOK_SECS = 0.05


@dataclass(frozen=True, slots=True)
class Running:
    """The configuration in force."""

    number: int
    settings: Settings
    plan: Plan
    tls: TlsMaterial


@dataclass(frozen=True, slots=True)
class WorkerLine:
    """A worker that is to take part: where to send orders, and whether it is still there."""

    name: str
    slot: int
    channel: socket.socket
    alive: Callable[[], bool]


@dataclass(slots=True)
class Outcome:
    """What became of a reload. ``result``: accepted, refused, or (dry run) would-be-accepted."""

    result: str
    generation: int
    changes: Changes = field(default_factory=Changes)
    descriptors: Mapping[str, int] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    confirm_secs: float | None = None

    @property
    def accepted(self) -> bool:
        return self.result != "refused"

    def as_dict(self) -> dict[str, object]:
        """For the admin API."""
        return {
            "result": self.result,
            "generation": self.generation,
            "changes": self.changes.as_dict(),
            "descriptors": dict(self.descriptors),
            "connections_closed": 0,
            "errors": self.errors,
            "warnings": self.warnings,
            "confirm_secs": self.confirm_secs,
        }


class _RefusedError(Exception):
    """The transaction cannot go on; each argument is a line for the operator."""


class Reloader:
    """Runs the transaction. ``running`` is what is in force, replaced by a commit.

    ``before_switch`` is called with settings that have passed every check of the master's own, ``while_waiting`` again
    and again while workers are waited for.
    """

    def __init__(
        self,
        running: Running,
        bound: BoundSockets,
        lines: Callable[[], Sequence[WorkerLine]],
        privileges: Privileges,
        before_switch: Callable[[Settings], None],
        while_waiting: Callable[[], None] = lambda: None,
    ) -> None:
        self.running = running
        self._bound = bound
        self._lines = lines
        self._privileges = privileges
        self._before_switch = before_switch
        self._while_waiting = while_waiting
        self._last_number = running.number

    def reload(self, load: ConfigFile, *, dry_run: bool = False) -> Outcome:
        """Load the settings and switch to them; with ``dry_run`` everything but the switch. Raises nothing."""
        old = self.running
        changes = Changes()
        try:
            wanted = load()
            settings = keep_what_is_not_live(old.settings, wanted)
            plan = make_plan(settings, process_limits())
            require_budget(plan.budget)
            require_logs(settings, self._privileges)
            tls = load_tls(plan, store=not dry_run)
            changes = diff(old.settings, wanted, _certificates_changed(old, plan, tls))
            outcome = Outcome(
                "accepted",
                old.number,
                changes=changes,
                descriptors={"before": old.plan.budget.needed, "after": plan.budget.needed},
                warnings=[
                    *nobody_is_served(settings),
                    *(warning for one in tls.listeners for warning in one.warnings),
                    *plan.budget.warnings,
                ],
            )
            if dry_run:
                self._bound.examine(plan.listen)
                outcome.result = "would-be-accepted"
                return outcome
            make_logs(settings, self._privileges)
            self._before_switch(settings)
            _raise_own_limit(plan)
            outcome.warnings += self._switch(Running(self._next_number(), settings, plan, tls))
        except Exception as error:  # noqa: BLE001 - whatever it is, the configuration in force goes on
            return Outcome("refused", old.number, changes=changes, errors=_told(error, load.path))
        outcome.generation = self.running.number
        return outcome

    def restore(self, running: Running) -> Outcome:
        """Go back to a configuration that was in force, from memory: nothing is read again. Raises nothing."""
        changes = diff(self.running.settings, running.settings)
        try:
            warnings = self._switch(replace(running, number=self._next_number()))
        except Exception as error:  # noqa: BLE001 - as above
            return Outcome("refused", self.running.number, changes=changes, errors=_told(error))
        return Outcome("accepted", self.running.number, changes=changes, warnings=warnings)

    def _next_number(self) -> int:
        self._last_number += 1
        return self._last_number

    # The two phases.

    def _switch(self, running: Running) -> list[str]:
        """Bind, have every worker prepare, and switch; when this raises, nobody has switched. Returns warnings."""
        extension = self._bound.extend(running.plan.listen)
        lines = self._lines()
        try:
            for line in lines:
                self._send_prepare(line, running, extension)
            _require_none(self._await(lines, orders.PREPARED, running.number, PREPARE_SECS, all_or_nothing=True))
        except BaseException:
            for line in lines:
                with contextlib.suppress(OSError):
                    orders.send(line.channel, Message(orders.ABORT, running.number))
            self._bound.drop(extension)
            raise
        # From here on the new configuration is in force: a worker that dies now is replaced by one that has it.
        self._bound.adopt(extension, running.plan.listen)
        self.running = running
        for line in lines:
            with contextlib.suppress(OSError):
                orders.send(line.channel, Message(orders.COMMIT, running.number))
        return self._await(lines, orders.COMMITTED, running.number, COMMIT_SECS, all_or_nothing=False)

    def _send_prepare(self, line: WorkerLine, running: Running, extension: Extension) -> None:
        settings, plan, workers = running.settings, running.plan, running.plan.workers
        listeners: list[NextListener] = []
        sockets: list[socket.socket] = []
        certificates = [one.source for one in running.tls.listeners]
        addresses = [one.address for one in plan.listen.https]
        rows = [*zip(addresses, certificates, strict=True), *((address, None) for address in plan.listen.redirect)]
        for address, source in rows:
            sock = self._bound.new_socket(extension, line.slot, address)
            listeners.append(NextListener(self._bound.label_in(extension, address), sock is not None, source))
            if sock is not None:
                sockets.append(sock)
        payload = orders.pack(
            NextGeneration(
                number=running.number,
                settings=settings,
                listeners=tuple(listeners),
                permits=shares(plan.budget.max_connections, workers)[line.slot],
                upstream_permits=shares(plan.budget.max_upstream_connections, workers)[line.slot],
                redirect_permits=shares(settings.redirect.max_connections, workers)[line.slot],
                handshake_permits=shares(plan.max_handshakes, workers)[line.slot],
                client_cap=plan.client_cap,
                https_port=effective_https_port(settings),
                soft_limit=plan.budget.raise_to,
                cas={options: trust.ca for options, trust in running.tls.upstream.items()},
            )
        )
        try:
            orders.send(
                line.channel,
                Message(orders.PREPARE, running.number),
                (payload, *(sock.fileno() for sock in sockets)),
            )
        except OSError as error:
            raise _RefusedError(f"{line.name} cannot be reached: {error.strerror}") from error
        finally:
            os.close(payload)

    def _await(
        self, lines: Sequence[WorkerLine], word: str, number: int, timeout_secs: float, *, all_or_nothing: bool
    ) -> list[str]:
        """Wait until each worker has said ``word``; with ``all_or_nothing`` no longer than until one says no, dies or
        is silent. Returns what went wrong, a line a worker."""
        waiting = {line.channel.fileno(): line for line in lines}
        poll = select.poll()
        for descriptor in waiting:
            poll.register(descriptor, select.POLLIN)
        deadline = time.monotonic() + timeout_secs
        troubles: list[str] = []
        while waiting and not (all_or_nothing and troubles):
            self._while_waiting()
            readable = {descriptor for descriptor, _ in poll.poll(_LOOK_SECS * 1000)}
            is_late = time.monotonic() > deadline
            for descriptor, line in list(waiting.items()):
                verdict = _verdict(line, word, number) if descriptor in readable else None
                if verdict is None and not line.alive():
                    verdict = f"{line.name} ended meanwhile"
                if verdict is None and is_late:
                    verdict = f"{line.name} did not answer in {timeout_secs:.0f} s"
                if verdict is not None:
                    poll.unregister(descriptor)
                    del waiting[descriptor]
                    troubles += [verdict] if verdict else []
        return troubles


def _require_none(troubles: list[str]) -> None:
    if troubles:
        raise _RefusedError(*troubles)


def _told(error: Exception, path: str = "") -> list[str]:
    """The lines for the operator, with the place in the file ``path``. What is not theirs is told by its type too."""
    if isinstance(error, _RefusedError):
        return [str(line) for line in error.args]
    if isinstance(error, OperatorError):
        return "\n".join(told(error, path)).splitlines()
    return f"{type(error).__name__}: {error}".splitlines() or [type(error).__name__]


def _verdict(line: WorkerLine, word: str, number: int) -> str | None:
    """From a message that has come: "" for ``word``, a line for the operator when it means no, None when neither."""
    try:
        received = orders.receive(line.channel)
    except BlockingIOError:
        return None
    except OSError as error:
        return f"{line.name} cannot be reached: {error.strerror}"
    if received is None:
        return f"{line.name} ended meanwhile"
    message, _descriptors = received
    if message.number != number:
        return None  # an answer to a reload that was given up
    if message.word == orders.FAILED:
        return f"{line.name}: {message.text}"
    return "" if message.word == word else None


def _certificates_changed(old: Running, plan: Plan, tls: TlsMaterial) -> list[str]:
    before = {
        str(one.address): [certificate.pem for certificate in material.source.loaded]
        for one, material in zip(old.plan.listen.https, old.tls.listeners, strict=True)
    }
    return [
        str(one.address)
        for one, material in zip(plan.listen.https, tls.listeners, strict=True)
        if str(one.address) in before
        and before[str(one.address)] != [certificate.pem for certificate in material.source.loaded]
    ]


def _raise_own_limit(plan: Plan) -> None:
    if plan.budget.raise_to is not None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (plan.budget.raise_to, hard))
        except (OSError, ValueError) as error:
            raise _RefusedError(f"cannot raise the soft descriptor limit: {error}") from error
