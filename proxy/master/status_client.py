"""Asks the admin socket of a running instance; `reverse-proxy status` shows the answer."""

from __future__ import annotations

import datetime as dt
import http.client
import json
import os
import socket
import stat
from collections.abc import Sequence
from typing import Any, TextIO
from urllib.parse import urlencode

from proxy.config.paths import MAX_SOCKET_PATH_BYTES
from proxy.errors import ConfigError, StartError
from proxy.master.tables import Fitting, console_for, table

STATUS = "/status"
TIMEOUT_SECS = 5.0
ACTION_TIMEOUT_SECS = 75.0


def fetch_status(paths: Sequence[str]) -> dict[str, Any]:
    """The status document of the one instance that answers on one of ``paths``.

    Raises StartError when nobody does, with where it looked, and ConfigError when several do.
    """
    return _find(paths)[1]


def answering_pid(path: str, timeout_secs: float) -> int | None:
    """The pid that the instance on ``path`` gives as its own; None where it gives none within ``timeout_secs``."""
    try:
        _, body = _request(path, "GET", STATUS, timeout_secs)
        document = json.loads(body)
    except (OSError, ValueError, http.client.HTTPException):
        return None
    pid = document.get("pid") if isinstance(document, dict) else None
    return pid if isinstance(pid, int) else None


def look(paths: Sequence[str], target: str) -> dict[str, Any]:
    """What the one instance that answers on one of ``paths`` shows at ``target``. Raises as ``fetch_status``."""
    path, _ = _find(paths)
    try:
        document = json.loads(_get(path, target))
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise StartError(f"the instance on {path} does not show {target}: {error}") from error
    if not isinstance(document, dict):
        raise StartError(f"the instance on {path} does not show {target} as it should")
    return document


def _find(paths: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The socket of the one instance that answers, and its status."""
    answers: dict[str, bytes] = {}
    failures = []
    for path in paths:
        try:
            answers[path] = _get(path, STATUS)
        except (OSError, http.client.HTTPException) as error:
            failures.append(f"{path} ({_reason(path, error)})")
    if len(answers) > 1:
        raise ConfigError("several instances answer: choose one with --socket " + " or --socket ".join(answers))
    for path, body in answers.items():
        try:
            document = json.loads(body)
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise StartError(f"what answers on {path} is not a reverse-proxy")
        return path, document
    raise StartError("no instance answers; looked at " + ", ".join(failures))


def _reason(path: str, error: Exception) -> str:
    try:
        kind = os.stat(path).st_mode
    except OSError:
        kind = stat.S_IFSOCK
    if not stat.S_ISSOCK(kind):
        return "it is no socket but another kind of file"
    if isinstance(error, PermissionError):
        return f"{error.strerror}: ask as its owner or as root"
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        return f"the path of a socket has at most {MAX_SOCKET_PATH_BYTES} bytes"
    return getattr(error, "strerror", None) or type(error).__name__


def ask(paths: Sequence[str], path: str, query: dict[str, str]) -> dict[str, Any]:
    """Have the one instance that answers on one of ``paths`` do something; its answer.

    Raises StartError when nobody answers, ConfigError when several would.
    """
    socket_path, _ = _find(paths)  # first, so that nothing is changed where several answer
    try:
        status_code, body = _request(socket_path, "POST", f"{path}?{urlencode(query)}", ACTION_TIMEOUT_SECS)
        document = json.loads(body)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise StartError(f"the instance on {socket_path} gave no answer ({error})") from error
    if not isinstance(document, dict) or status_code == http.client.SERVICE_UNAVAILABLE:
        raise StartError(f"the instance on {socket_path} could not do it: {body.decode('utf-8', 'replace').strip()}")
    return document


def show_reload(document: dict[str, Any], stream: TextIO) -> None:
    """For people: what became of a reload, one line a change."""
    lines = [f"{document['result']}: generation {document.get('generation', '-')}"]
    for kind, names in document.get("changes", {}).items():
        lines += [f"  {kind.replace('_', ' ')}: {name}" for name in names]
    descriptors = document.get("descriptors", {})
    if descriptors:
        lines.append(f"  descriptors needed: {descriptors['before']} before, {descriptors['after']} after")
    if "connections_closed" in document:
        lines.append(f"  connections closed: {document['connections_closed']}")
    lines += [f"  warning: {warning}" for warning in document.get("warnings", ())]
    if document.get("confirm_secs"):
        lines.append(f"  goes back in {document['confirm_secs']:g} s unless `reverse-proxy confirm` comes")
    print("\n".join(lines), file=stream)


def show_status(document: dict[str, Any], stream: TextIO) -> None:
    """For people: tables, with colours only on a terminal."""
    console = console_for(stream)
    state = "ready" if document["ready"] else "not ready"
    console.print(
        f"reverse-proxy {document['version']}, pid {document['pid']}, up {_duration(document['uptime_secs'])}, {state}",
        style="bold green" if document["ready"] else "bold red",
    )
    for reason in document["reasons"]:
        console.print(reason, style="red")
    totals, events = document["totals"], document["events"]
    console.print(
        f"permits held {totals['connections_open']} of {document['permits']}, requests {totals['requests']}"
        f" (2xx {totals['responses_2xx']}, 3xx {totals['responses_3xx']}, 4xx {totals['responses_4xx']},"
        f" 5xx {totals['responses_5xx']}), refused or cut {document['refused']},"
        f" events {events['written']} written, {events['suppressed']} suppressed (level {events['level']})"
    )
    console.print(_generation(document))
    console.print(_listeners(document["listeners"]))
    console.print(_workers(document["workers"]))
    for line in _ends(document):
        console.print(line)
    if document["backends"]:
        columns = ("backend", "open", "idle", "left out", "failures")
        keys = ("backend", "open", "idle", "ejected", "failures")
        console.print(table(columns, 1, [[one[key] for key in keys] for one in document["backends"]]))


def _ends(document: dict[str, Any]) -> list[str]:
    """A line for each child that has ended by itself: how, the last time, and when."""
    return [
        f"{name} ended last: {one['status']} at {dt.datetime.fromtimestamp(one['time'], dt.UTC):%Y-%m-%dT%H:%M:%SZ}"
        for name, one in document["ended"].items()
    ]


def _generation(document: dict[str, Any]) -> str:
    older = max((worker["generations"] for worker in document["workers"]), default=1) - 1
    text = f"configuration: generation {document['generation']}"
    if older > 0:
        text += f", connections of {older} older one{'s'[: older > 1]} are left"
    last = document["last_reload"]
    if last is not None:
        at = dt.datetime.fromtimestamp(last["time"], dt.UTC)
        text += f"; last reload: {last['result']} at {at:%Y-%m-%dT%H:%M:%SZ}"
        text += "".join(f"\n  {error}" for error in last["errors"])
        if last["confirm_secs"]:
            text += f"\n  it is taken back {last['confirm_secs']:g} s later, unless `reverse-proxy confirm` comes"
    return text


def _listeners(listeners: Sequence[dict[str, Any]]) -> Fitting:
    rows = []
    for one in listeners:
        names = ", ".join(name for certificate in one.get("certificates", ()) for name in certificate["names"])
        until = min((certificate["not_after"][:10] for certificate in one.get("certificates", ())), default="")
        shown = f"{names} until {until}" if names else ""
        rows.append((one["kind"], one["address"], f"self-signed: {shown}" if one.get("self_signed") else shown))
    return table(("listener", "address", "certificate"), 3, rows)


def _workers(workers: Sequence[dict[str, Any]]) -> Fitting:
    columns = (
        *("worker", "pid", "state", "connections", "permits", "streams", "upstream", "tunnels", "requests"),
        "descriptors",
    )
    rows = [
        (
            one["slot"],
            one["pid"],
            "ready" if one["ready"] else "not ready",
            one["connections"],
            f"{one['permits_held']} of {one['permits']}",
            one["http2_streams"],
            one["upstream_open"],
            one["tunnels"],
            one["requests"],
            f"{one['descriptors_open']} of {one['descriptors_limit']}",
            one["restarts"],
            f"{one['loop_lag_max_us'] / 1000:.1f} ms",
        )
        for one in workers
    ]
    return table((*columns, "restarts", "lag"), 3, rows)


def _duration(secs: float) -> str:
    minutes, rest = divmod(int(secs), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = ((days, "d"), (hours, "h"), (minutes, "min"), (rest, "s"))
    return " ".join(f"{value} {unit}" for value, unit in parts if value) or "0 s"


def _get(path: str, target: str) -> bytes:
    status_code, body = _request(path, "GET", target, TIMEOUT_SECS)
    if status_code != http.client.OK:
        raise http.client.HTTPException(f"status {status_code}")
    return body


def _request(path: str, method: str, target: str, timeout_secs: float) -> tuple[int, bytes]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(timeout_secs)
        sock.connect(path)
        connection = http.client.HTTPConnection("localhost", timeout=timeout_secs)
        connection.sock = sock
        connection.request(method, target, headers={"Connection": "close"})
        response = connection.getresponse()
        return response.status, response.read()
