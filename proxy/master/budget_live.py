"""The budget beside what is open now: every consumer of descriptors by process and class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.observe import counters

LIVE_CELLS: Mapping[str, int] = {
    "client connections": counters.CONNECTIONS_OPEN,
    "upstream connections": counters.UPSTREAM_OPEN,
    "redirect connections": counters.REDIRECT_OPEN,
    "listening sockets": counters.LISTENERS_OPEN,
    "logs": counters.LOGS_OPEN,
}
"""A process's own cell by the budget's label (without what stands in brackets)."""
RESERVE = "reserve"
"""What is open and of no other class: standard streams, the event loop's, the channel, DNS, files for a moment."""


def budget_document(
    budget: Mapping[str, Any], pages: Mapping[str, memoryview], known: Mapping[str, Mapping[str, int]]
) -> dict[str, Any]:
    """``budget`` (see ``proxy.budget.to_dict``) with ``live``, ``open``, ``limit`` and ``headroom`` a process.

    ``pages``: by the budget's process names; ``known``: live counts by process and label that stand in no page.
    ``live`` is None where a class is not counted; ``headroom``: limit less worst case, None without a limit.
    """
    return {**budget, "processes": [_process(one, pages, known) for one in budget["processes"]]}


def _process(
    process: Mapping[str, Any], pages: Mapping[str, memoryview], known: Mapping[str, Mapping[str, int]]
) -> dict[str, Any]:
    name = process["name"]
    cells = pages.get(name)
    items = [dict(item) for item in process["items"]]
    descriptors = limit = 0
    if cells is not None:
        descriptors, limit = cells[counters.DESCRIPTORS_OPEN], cells[counters.DESCRIPTORS_LIMIT]
    for item in items:
        item["live"] = _live(item["label"].partition(" (")[0], cells, known.get(name, {}))
    counted = sum(item["live"] or 0 for item in items)
    for item in items:
        if item["label"] == RESERVE and cells is not None:
            item["live"] = max(0, descriptors - counted)
    return {
        **process,
        "items": items,
        "open": descriptors,
        "limit": limit or None,
        "headroom": limit - process["total"] if limit else None,
    }


def _live(label: str, cells: memoryview | None, known: Mapping[str, int]) -> int | None:
    if label in known:
        return known[label]
    cell = LIVE_CELLS.get(label)
    return None if cell is None or cells is None else cells[cell]
