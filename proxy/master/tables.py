"""Answers of the admin socket for people: rich's tables, colours only on a terminal."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from proxy.budget import RESERVE
from proxy.master.memory import kib, mib

_WIDTH_WITHOUT_TERMINAL = 160
_UNBOUNDED = 10_000
MAX_ROWS = 40
"""Of ``why``: what one reads; ``--json`` has all."""


def console_for(stream: TextIO) -> Console:
    """Names of certificates and hosts come from files: nothing in them is markup."""
    width = None if stream.isatty() else _WIDTH_WITHOUT_TERMINAL
    return Console(file=stream, markup=False, emoji=False, highlight=False, width=width)


class Fitting:
    """A table where there is room for it; on a narrow terminal each row as a few lines of ``column value``."""

    def __init__(self, columns: Sequence[str], numbers_from: int, rows: Sequence[Sequence[str]]) -> None:
        self._columns = columns
        self._rows = rows
        self._table = Table(*columns)
        for column in self._table.columns[numbers_from:]:
            column.justify = "right"
        for row in rows:
            self._table.add_row(*row)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if Measurement.get(console, options.update(width=_UNBOUNDED), self._table).maximum <= options.max_width:
            yield self._table
            return
        for row in self._rows:
            pairs = [f"{column} {cell}" for column, cell in zip(self._columns, row, strict=True) if cell]
            yield Text(pairs[0] if pairs else "", style="bold")
            if pairs[1:]:
                yield Padding(Text(", ".join(pairs[1:])), (0, 0, 0, 2))


def table(columns: Sequence[str], numbers_from: int, rows: Sequence[Sequence[object]]) -> Fitting:
    """Columns from ``numbers_from`` on are set right; None is shown as ``-``."""
    return Fitting(columns, numbers_from, [["-" if cell is None else str(cell) for cell in row] for row in rows])


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
