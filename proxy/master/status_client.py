"""`reverse-proxy status`: asks the admin socket and shows the answer."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from proxy.errors import ConfigError, StartError

TIMEOUT_SECS = 5.0
_WIDTH_WITHOUT_TERMINAL = 160


def fetch_status(paths: Sequence[str]) -> dict[str, Any]:
    """The status document of the one instance that answers on one of ``paths``.

    Raises StartError when nobody does, with where it looked, and ConfigError when several do.
    """
    answers: dict[str, bytes] = {}
    failures = []
    for path in paths:
        try:
            answers[path] = _get(path)
        except (OSError, http.client.HTTPException) as error:
            failures.append(f"{path} ({getattr(error, 'strerror', None) or type(error).__name__})")
    if len(answers) > 1:
        raise ConfigError("several instances answer: choose one with --socket " + " or --socket ".join(answers))
    for path, body in answers.items():
        try:
            document = json.loads(body)
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise StartError(f"what answers on {path} is not a reverse-proxy")
        return document
    raise StartError("no instance answers; looked at " + ", ".join(failures))


def show_status(document: dict[str, Any], stream: TextIO) -> None:
    """For people: tables, with colours only on a terminal."""
    terminal = stream.isatty()
    # Names of certificates and hosts come from files: nothing in them is markup.
    console = Console(
        file=stream, markup=False, emoji=False, highlight=False, width=None if terminal else _WIDTH_WITHOUT_TERMINAL
    )
    state = "ready" if document["ready"] else "not ready"
    console.print(
        f"reverse-proxy {document['version']}, pid {document['pid']}, up {_duration(document['uptime_secs'])}, {state}",
        style="bold green" if document["ready"] else "bold red",
    )
    totals, events = document["totals"], document["events"]
    console.print(
        f"permits held {totals['connections_open']} of {document['permits']}, requests {totals['requests']}"
        f" (2xx {totals['responses_2xx']}, 3xx {totals['responses_3xx']}, 4xx {totals['responses_4xx']},"
        f" 5xx {totals['responses_5xx']}), events {events['written']} written, {events['suppressed']} suppressed"
    )
    console.print(_listeners(document["listeners"]))
    console.print(_workers(document["workers"]))


def _listeners(listeners: Sequence[dict[str, Any]]) -> Table:
    table = Table("listener", "address", "certificate")
    for one in listeners:
        names = ", ".join(name for certificate in one.get("certificates", ()) for name in certificate["names"])
        until = min((certificate["not_after"][:10] for certificate in one.get("certificates", ())), default="")
        shown = f"{names} until {until}" if names else ""
        table.add_row(one["kind"], one["address"], f"self-signed: {shown}" if one.get("self_signed") else shown)
    return table


def _workers(workers: Sequence[dict[str, Any]]) -> Table:
    columns = ("worker", "pid", "state", "connections", "permits", "upstream", "tunnels", "requests", "descriptors")
    table = Table(*columns)
    for column in table.columns[3:]:
        column.justify = "right"
    for one in workers:
        table.add_row(
            str(one["slot"]),
            str(one["pid"] or "-"),
            "ready" if one["ready"] else "not ready",
            str(one["connections"]),
            f"{one['permits_held']} of {one['permits']}",
            str(one["upstream_open"]),
            str(one["tunnels"]),
            str(one["requests"]),
            f"{one['descriptors_open']} of {one['descriptors_limit']}",
        )
    return table


def _duration(secs: float) -> str:
    minutes, rest = divmod(int(secs), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = ((days, "d"), (hours, "h"), (minutes, "min"), (rest, "s"))
    return " ".join(f"{value} {unit}" for value, unit in parts if value) or "0 s"


def _get(path: str) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(TIMEOUT_SECS)
        sock.connect(path)
        connection = http.client.HTTPConnection("localhost", timeout=TIMEOUT_SECS)
        connection.sock = sock
        connection.request("GET", "/status", headers={"Connection": "close"})
        response = connection.getresponse()
        body = response.read()
        if response.status != http.client.OK:
            raise http.client.HTTPException(f"status {response.status}")
        return body
