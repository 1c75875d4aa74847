"""`reverse-proxy blackbox`: the records of resource errors, for people."""

from __future__ import annotations

import datetime as dt
from typing import Any, TextIO

from proxy.errors import StartError
from proxy.master.tables import console_for, table
from proxy.observe.blackbox import read_records

MAX_OLDEST = 10


def black_boxes(folder: str) -> dict[str, Any]:
    """What is recorded in ``folder``, the latest first. Raises StartError when it cannot be read."""
    try:
        return {"folder": folder, "records": read_records(folder)}
    except OSError as error:
        raise StartError(f"{folder} cannot be read: {error.strerror}: ask as its owner, or as root") from error


def show_black_boxes(document: dict[str, Any], stream: TextIO) -> None:
    """The latest record whole, the others by a line."""
    console = console_for(stream)
    records = document["records"]
    if not records:
        console.print(f"nothing has run out: no record in {document['folder']}")
        return
    first = records[0]
    limit = first.get("limit", {})
    console.print(_line(first), style="bold")
    console.print(f"soft limit {limit.get('soft')}, hard limit {limit.get('hard')} descriptors")
    rows = [*first.get("descriptors", {}).items(), *((f"all {kind}", n) for kind, n in first.get("kinds", {}).items())]
    console.print(table(("descriptors", "open"), 1, rows))
    console.print(table(("client", "connections"), 1, first.get("clients", ())))
    keys = ("client", "age_secs", "state", "bytes_read", "bytes_written", "buffered")
    oldest = [[one.get(key) for key in keys] for one in first.get("oldest", ())[:MAX_OLDEST]]
    console.print(table(("oldest connections", "seconds", "state", "read", "written", "buffered"), 3, oldest))
    reloads = ", ".join(map(_time, first.get("reloads", ()))) or "none"
    console.print(f"reloads of this worker: {reloads}")
    console.print("counters: " + ", ".join(f"{name} {value}" for name, value in first.get("counters", {}).items()))
    for record in records[1:]:
        console.print("before: " + _line(record))
    console.print(f"{len(records)} in {document['folder']}; whole with --json")


def _line(record: dict[str, Any]) -> str:
    where = f"worker {record.get('worker')} (pid {record.get('pid')})"
    return f"{_time(record['time'])} {where}: {record.get('cause')} {record.get('error', '')}"


def _time(seconds: float) -> str:
    return dt.datetime.fromtimestamp(seconds, dt.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
