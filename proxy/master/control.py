"""The control process: health, readiness, the admin socket and the event log, apart from all user traffic.

Its own process, so that it answers while every worker is at its limits, and so that the master, which forks, has no
event loop.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import uvloop

from proxy.config.schema import Settings
from proxy.master import exposition, status
from proxy.master.endpoint import Answer, Endpoint, get_only, text_answer
from proxy.master.metrics import EventCounts, Observed, render
from proxy.observe import counters
from proxy.observe.counters import CounterBook
from proxy.observe.descriptors import publish_descriptors
from proxy.observe.events import ChannelReporter, EventLog

SOURCE = "control"
DRAINING = "draining"
"""Why /readyz is red from the first signal on, also while workers still accept (drain_delay_secs)."""
CLOSE_SECS = 3.0
"""At the end, for a slow log to take its last lines."""


@dataclass(frozen=True, slots=True)
class ControlContext:
    """What the master hands over.

    ``facts``: what does not change while it runs, for the status document. ``cells``: this process's own page;
    ``master_cells``: the master's.
    """

    settings: Settings
    book: CounterBook
    cells: memoryview
    master_cells: memoryview
    read_end: socket.socket
    channel: socket.socket
    health: socket.socket | None
    admin: socket.socket
    permits: Sequence[int]
    facts: Mapping[str, object]
    started_at: float


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
    log.attach(loop)
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGUSR1, _reopen, log, reporter)

    endpoints = [
        Endpoint(
            loop,
            context.admin,
            label="admin",
            max_connections=context.settings.admin.max_connections,
            handler=get_only({"/status": lambda: _status(context, log)}),
            reporter=reporter,
        )
    ]
    if context.health is not None:
        probes = {
            "/healthz": lambda: _probe(status.unhealthy(context.book, _now_ms())),
            "/readyz": lambda: _probe(_unready(context)),
            "/metrics": lambda: _metrics(context, log),
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
    for endpoint in endpoints:
        endpoint.start()
    context.cells[counters.READY] = 1
    await stop.wait()
    for endpoint in endpoints:
        await endpoint.stop()
    reporter.detach()
    log.close(CLOSE_SECS)


def _reopen(log: EventLog, reporter: ChannelReporter) -> None:
    log.reopen()
    # Said here and not by the master: the line belongs into the new file.
    reporter.report("logs.reopened", "the logs are opened again", level="info")


def _unready(context: ControlContext) -> str:
    return DRAINING if context.cells[counters.DRAINING] else status.unready(context.book, _now_ms())


def _probe(reason: str) -> Answer:
    return text_answer(503, reason) if reason else text_answer(200, "ok")


def _status(context: ControlContext, log: EventLog) -> Answer:
    now_ms = _now_ms()
    document = {
        **context.facts,
        "control_pid": os.getpid(),
        "uptime_secs": round(time.monotonic() - context.started_at, 3),
        "ready": not _unready(context),
        "workers": status.workers(context.book, context.permits, now_ms),
        "totals": status.totals(context.book),
        "events": {"written": log.lines_written, "suppressed": log.lines_suppressed},
    }
    return Answer(200, json.dumps(document).encode() + b"\n", "application/json")


def _metrics(context: ControlContext, log: EventLog) -> Answer:
    publish_descriptors(context.cells)
    observed = Observed(
        book=context.book,
        processes={"control": context.cells, "master": context.master_cells},
        permits=context.permits,
        facts=context.facts,
        events=EventCounts(log.lines_written, log.lines_suppressed, log.lines_dropped, log.occurrences, log.suppressed),
        start_time=time.time() - (time.monotonic() - context.started_at),
        ready=not _unready(context),
    )
    return Answer(200, render(observed), exposition.CONTENT_TYPE)


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
