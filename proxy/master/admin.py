"""What the admin socket answers to the commands that look: status, budget, why, log-level."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Callable, Mapping
from typing import Any

from proxy.master.endpoint import Answer, text_answer
from proxy.observe.counters import LOG_LEVEL, CounterBook
from proxy.observe.events import EventLog, Reporter
from proxy.observe.record import LEVELS
from proxy.observe.refusals import refusal_counts, refusals

MAX_REFUSALS = 1000
"""In one answer, over all workers, the latest first."""
_LOG_LEVEL = "/log-level"
_WHY = "/why"

Document = Callable[[], Mapping[str, Any]]


Look = Callable[[str, str, Mapping[str, str]], Answer]
"""A ``Handler`` that never waits."""


def json_answer(status_code: int, document: Mapping[str, object]) -> Answer:
    return Answer(status_code, json.dumps(document).encode() + b"\n", "application/json")


def looking_handler(
    book: CounterBook, log: EventLog, reporter: Reporter, cells: memoryview, documents: Mapping[str, Document]
) -> Look:
    """``documents``: what GET shows, by path; beside them ``/why?address=`` and
    ``/log-level`` (POST with ``?level=``), which ``cells``, the control process's page, keeps for its successor."""
    shown: dict[str, Document] = {**documents, _LOG_LEVEL: lambda: {"level": log.level}}

    def handle(method: str, path: str, query: Mapping[str, str]) -> Answer:
        if path == _LOG_LEVEL and method == "POST":
            return _set_level(query.get("level", ""), log, reporter, cells)
        if path not in shown and path != _WHY:
            return text_answer(404, "not found: " + " ".join((*shown, _WHY)))
        if method not in ("GET", "HEAD"):
            return Answer(405, b"only GET and HEAD\n", allow="GET, HEAD")
        return json_answer(200, why(book, query.get("address", "")) if path == _WHY else shown[path]())

    return handle


def why(book: CounterBook, address: str) -> dict[str, Any]:
    """The last refused or cut connections and requests, of one client address or (empty) of all."""
    wanted = canonical(address)
    found: list[dict[str, Any]] = [
        {**one._asdict(), "worker": slot}
        for slot in range(book.slots)
        for one in refusals(book.page(slot))
        if not wanted or canonical(one.address) == wanted
    ]
    found.sort(key=lambda one: -one["time"])
    counts = [refusal_counts(book.page(slot)) for slot in range(book.slots)]
    noted, only_counted = (sum(column) for column in zip(*counts, strict=True))
    return {"refusals": found[:MAX_REFUSALS], "noted": noted, "only_counted": only_counted}


def canonical(address: str) -> str:
    """The one spelling of an IP address; anything else as it is."""
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        return address


def _set_level(level: str, log: EventLog, reporter: Reporter, cells: memoryview) -> Answer:
    if level not in LEVELS:
        return text_answer(400, "no such level; there are: " + " ".join(LEVELS))
    before, log.level = log.level, level
    cells[LOG_LEVEL] = LEVELS[level]
    # A warning, so that the line is there whatever the new level is but error.
    reporter.report("event_log.level", "the event log's level was changed", level="warning", before=before, now=level)
    return json_answer(200, {"level": level, "before": before})
