"""Answers of the admin socket for people: rich's tables, colours only on a terminal."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from proxy.budget import RESERVE
from proxy.master.memory import kib, mib

_WIDTH_WITHOUT_TERMINAL = 160
MAX_ROWS = 40
"""Of ``why``: what one reads; ``--json`` has all."""


def console_for(stream: TextIO) -> Console:
    """Names of certificates and hosts come from files: nothing in them is markup."""
    width = None if stream.isatty() else _WIDTH_WITHOUT_TERMINAL
    return Console(file=stream, markup=False, emoji=False, highlight=False, width=width)


def table(columns: Sequence[str], numbers_from: int, rows: Sequence[Sequence[object]]) -> Table:
    """Columns from ``numbers_from`` on are set right; None is shown as ``-``."""
    made = Table(*columns)
    for column in made.columns[numbers_from:]:
        column.justify = "right"
    for row in rows:
        made.add_row(*("-" if cell is None else str(cell) for cell in row))
    return made


def show_budget(document: dict[str, Any], stream: TextIO) -> None:
    """Every consumer of descriptors, live and worst case."""
    console = console_for(stream)
    rows: list[Sequence[object]] = []
    for process in document["processes"]:
        name = process["name"]
        for item in process["items"]:
            rows.append((name, item["label"], item["live"], item["descriptors"]))
            name = ""
        limit = "unlimited" if process["limit"] is None else process["limit"]
        headroom = "" if process["headroom"] is None else f", headroom {process['headroom']}"
        rows.append(("", f"total; limit {limit}{headroom}", process["open"], process["total"]))
    console.print(table(("process", "descriptors of", "live", "worst case"), 2, rows))
    console.print(f"max_connections {document['max_connections']} needs {document['needed']} descriptors a process")
    largest = document["largest_max_connections"]
    if largest is not None:
        console.print(f"largest safe max_connections under the hard limit {document['limits']['hard']}: {largest}")
    _show_memory(document["memory"], console)
    console.print(f"live reserve: what no other class counts, of {RESERVE}; live -: not counted")


def _show_memory(memory: dict[str, Any], console: Console) -> None:
    rows = [
        (item["label"], item["count"], f"{kib(item['each_bytes'])} KiB", f"{mib(item['bytes'])} MiB")
        for item in memory["items"]
    ]
    available = memory["available_bytes"]
    of = "" if available is None else f"; {memory['available_of']} has {mib(available)} MiB"
    rows.append((f"total{of}", "", "", f"{mib(memory['worst_case_bytes'])} MiB"))
    console.print(table(("memory at worst of", "number", "each", "all"), 1, rows))
    now = memory["measured"]
    average = "-" if now["average_bytes"] is None else f"{kib(now['average_bytes'])} KiB"
    console.print(
        f"workers hold {mib(now['held_bytes'])} MiB now; {now['connections']} connections of either side,"
        f" {average} each on average"
    )


def show_why(document: dict[str, Any], stream: TextIO) -> None:
    """The last refusals."""
    console = console_for(stream)
    found = document["refusals"]
    if not found:
        console.print("nothing was refused or cut that is still remembered")
    else:
        rows = [
            (_time(one["time"]), one["worker"], one["address"], one["status"] or "cut", one["reason"], one["detail"])
            for one in found[:MAX_ROWS]
        ]
        console.print(table(("time", "worker", "client", "status", "reason", "detail"), 6, rows))
    if len(found) > MAX_ROWS:
        console.print(f"{len(found) - MAX_ROWS} more: --json")
    if document["only_counted"]:
        console.print(f"{document['only_counted']} came too fast to be remembered and were only counted")


def show_level(document: dict[str, Any], stream: TextIO) -> None:
    """The event log's level, and what it was before it was changed."""
    before = f" (was {document['before']})" if "before" in document else ""
    print(f"event log level: {document['level']}{before}", file=stream)


def _time(seconds: float) -> str:
    return dt.datetime.fromtimestamp(seconds, dt.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
