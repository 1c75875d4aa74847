"""The control process: health, readiness, the admin socket and the event log, apart from all user traffic.

Its own process, so that it answers while every worker is at its limits, and so that the master, which forks, has no
event loop.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import uvloop

from proxy.config.schema import Settings
from proxy.master import exposition, status
from proxy.master.admin import Look, json_answer, looking_handler
from proxy.master.budget_live import budget_document
from proxy.master.commands import ControlEnd
from proxy.master.endpoint import Answer, Endpoint, get_only, text_answer
from proxy.master.memory import measured
from proxy.master.metrics import EventCounts, Observed, render
from proxy.observe import counters
from proxy.observe.counters import CounterBook
from proxy.observe.descriptors import publish_descriptors
from proxy.observe.events import ChannelReporter, EventLog
from proxy.observe.record import LEVEL_NAMES

SOURCE = "control"
MASTER_SECS = 60.0
"""For the master to answer: a reload waits for the workers."""
ADMIN_CONNECTION_SECS = 75.0
MAX_CONFIRM_SECS = 86_400
OPERATIONS = {f"/{name}": name for name in ("reload", "confirm", "drain", "upgrade")}
"""What the master does, by path."""
DRAINING = "draining"
"""Why /readyz is red from the first signal on, also while workers still accept (drain_delay_secs)."""
CLOSE_SECS = 3.0
"""At the end, for a slow log to take its last lines."""


@dataclass(frozen=True, slots=True)
class ControlContext:
    """What the master hands over.

    ``facts``: what does not change while it runs, for the status document. ``waits``: another control process serves on
    these sockets until the master tells news (an upgrade): a balancer shall not see this one's start.
    ``cells``: this process's own page; ``master_cells``: the master's.
    """

    settings: Settings
    book: CounterBook
    cells: memoryview
    master_cells: memoryview
    read_end: socket.socket
    channel: socket.socket
    health: socket.socket | None
    admin: socket.socket
    admin_uids: frozenset[int]
    commands: socket.socket
    permits: Sequence[int]
    facts: Mapping[str, Any]
    started_at: float
    waits: bool = False


def run_control(context: ControlContext) -> int:
    """Serve until SIGTERM. Returns the exit status."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(context))
    return 0


async def _serve(context: ControlContext) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    reporter = ChannelReporter(SOURCE, context.channel, context.cells)
    reporter.attach(loop)
    log = EventLog(context.read_end, context.settings.event_log)
    if (level := LEVEL_NAMES.get(context.cells[counters.LOG_LEVEL])) is not None:
        log.level = level  # set by hand in the life of a control process before this one
    log.attach(loop)
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGUSR1, _reopen, log, reporter)

    endpoints: list[Endpoint] = []

    def retire() -> None:
        # The successor's control process answers on the same sockets; what is left here is the log.
        for endpoint in endpoints:
            endpoint.retire()

    loop.add_signal_handler(signal.SIGUSR2, retire)
    admin = Admin(context, log, loop, retire)
    admin.looks = looking_handler(
        context.book,
        log,
        reporter,
        context.cells,
        {
            "/status": lambda: _status(context, log, admin.facts, admin.permits),
            "/budget": lambda: _budget(context, log, admin.facts, endpoints),
        },
    )
    endpoints += [
        Endpoint(
            loop,
            context.admin,
            label="admin",
            max_connections=context.settings.admin.max_connections,
            handler=admin.handle,
            reporter=reporter,
            connection_secs=ADMIN_CONNECTION_SECS,
            uids=context.admin_uids,
        )
    ]
    if context.health is not None:
        probes = {
            "/healthz": lambda: _probe(_unhealthy(context)),
            "/readyz": lambda: _probe(_unready(context)),
            "/metrics": lambda: _metrics(context, log, admin.facts, admin.permits),
        }
        endpoints.append(
            Endpoint(
                loop,
                context.health,
                label="health",
                max_connections=context.settings.health.max_connections,
                handler=get_only(probes),
                reporter=reporter,
            )
        )

    def serve() -> None:
        while waiting:
            waiting.pop().start()

    waiting = list(endpoints)
    if context.waits:
        admin.on_first_news = serve
    else:
        serve()
    context.cells[counters.READY] = 1
    await stop.wait()
    await asyncio.gather(*(endpoint.stop() for endpoint in endpoints))
    reporter.detach()
    log.close(CLOSE_SECS)


def _reopen(log: EventLog, reporter: ChannelReporter) -> None:
    log.reopen()
    # Said here and not by the master: the line belongs into the new file.
    reporter.report("logs.reopened", "the logs are opened again", level="info")


def _unhealthy(context: ControlContext) -> str:
    # Handed over: who still asks here, with a request that was on its way, is told of the appliance, which serves.
    return "" if context.cells[counters.HANDED_OVER] else status.unhealthy(context.book, _now_ms())


def _unready(context: ControlContext) -> str:
    if context.cells[counters.HANDED_OVER]:
        return ""
    return DRAINING if context.cells[counters.DRAINING] else status.unready(context.book, _now_ms())


def _probe(reason: str) -> Answer:
    return text_answer(503, reason) if reason else text_answer(200, "ok")


class Admin:
    """The admin API: status from what is here, everything else by asking the master."""

    def __init__(
        self, context: ControlContext, log: EventLog, loop: asyncio.AbstractEventLoop, retire: Callable[[], None]
    ) -> None:
        self._log = log
        self._cells = context.cells
        self._retire = retire
        self.facts = context.facts
        self.permits = context.permits
        """Of the configuration that is in force, as ``facts``."""
        self.on_first_news: Callable[[], None] | None = None
        self.looks: Look | None = None
        """What answers where nothing is asked of the master."""
        self._master = ControlEnd(loop, context.commands, self._on_news)
        self._master.start()

    def handle(self, method: str, path: str, query: Mapping[str, str]) -> Answer | Awaitable[Answer]:
        """See ``Handler``."""
        operation = OPERATIONS.get(path)
        if operation is None:
            return text_answer(404, "not found") if self.looks is None else self.looks(method, path, query)
        if method != "POST":
            return Answer(405, b"only POST\n", allow="POST")
        return self._ask(operation, query)

    async def _ask(self, operation: str, query: Mapping[str, str]) -> Answer:
        try:
            confirm_secs = float(query["confirm_secs"]) if "confirm_secs" in query else None
        except ValueError:
            confirm_secs = 0.0
        if confirm_secs is not None and not 1 <= confirm_secs <= MAX_CONFIRM_SECS:
            wanted = f"confirm_secs: wanted a number from 1 to {MAX_CONFIRM_SECS}"
            return json_answer(400, {"result": "refused", "errors": [wanted]})
        try:
            document = await self._master.ask(
                operation, MASTER_SECS, dry_run=query.get("dry_run") == "1", confirm_secs=confirm_secs
            )
        except (TimeoutError, OSError):
            return json_answer(503, {"result": "failed", "errors": ["the master did not answer"]})
        if document["result"] == "upgraded":
            self._retire()  # before the answer: whoever asks after it asks the successor
        return json_answer(409 if document["result"] == "refused" else 200, document)

    def _on_news(self, facts: Mapping[str, Any], permits: Sequence[int]) -> None:
        if self.on_first_news is not None:
            self.on_first_news()
            self.on_first_news = None
        before, self.facts, self.permits = self.facts, facts, permits
        # Only what a reload has changed: the level may have been set by hand meanwhile.
        wanted, known = facts["event_log"], before["event_log"]
        if wanted["level"] != known["level"]:
            self._log.level = wanted["level"]
            self._cells[counters.LOG_LEVEL] = 0
        if wanted["max_lines_per_minute"] != known["max_lines_per_minute"]:
            self._log.set_max_lines_per_minute(wanted["max_lines_per_minute"])


def _status(
    context: ControlContext, log: EventLog, facts: Mapping[str, Any], permits: Sequence[int]
) -> Mapping[str, object]:
    now_ms = _now_ms()
    return {
        **facts,
        "control_pid": os.getpid(),
        "uptime_secs": round(time.monotonic() - context.started_at, 3),
        "ready": not _unready(context),
        "reasons": _unready(context).splitlines(),
        "workers": status.workers(context.book, permits, now_ms),
        "totals": status.totals(context.book),
        "refused": status.refused(context.book),
        "backends": status.backends(context.book),
        "events": {"written": log.lines_written, "suppressed": log.lines_suppressed, "level": log.level},
    }


def _budget(
    context: ControlContext, log: EventLog, facts: Mapping[str, Any], endpoints: Sequence[Endpoint]
) -> Mapping[str, object]:
    publish_descriptors(context.cells)
    book, master = context.book, context.master_cells
    pages = {f"worker {slot}": book.page(slot) for slot in range(book.slots)}
    own = {f"{endpoint.label} connections": endpoint.connections for endpoint in endpoints}
    listening = len(endpoints)
    known = {
        SOURCE: {**own, "listening sockets": listening, "logs": log.descriptors},
        "master": {
            "listening sockets": max(0, master[counters.LISTENERS_OPEN] - listening),
            "control's listening sockets": listening,
        },
    }
    document = budget_document(facts["budget"], pages | {SOURCE: context.cells, "master": master}, known)
    return {**document, "memory": {**facts["memory"], "measured": measured(pages)}}


def _metrics(context: ControlContext, log: EventLog, facts: Mapping[str, Any], permits: Sequence[int]) -> Answer:
    publish_descriptors(context.cells)
    observed = Observed(
        book=context.book,
        processes={"control": context.cells, "master": context.master_cells},
        permits=permits,
        facts=facts,
        events=EventCounts(log.lines_written, log.lines_suppressed, log.lines_dropped, log.occurrences, log.suppressed),
        start_time=time.time() - (time.monotonic() - context.started_at),
        ready=not _unready(context),
    )
    return Answer(200, render(observed), exposition.CONTENT_TYPE)


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
