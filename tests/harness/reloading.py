"""Reloads of an appliance: its file written anew, and the ways to have it read."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

from tests.harness.appliance import Appliance, cli
from tests.harness.processes import wait_until
from tests.harness.toml import to_toml
from tests.harness.wire import Wire

ANSWER_TIMEOUT_SECS = 60.0
Document = dict[str, Any]


def rewrite(one: Appliance, **changes: Any) -> None:
    """Writes the configuration file with other top-level keys; None takes a key out."""
    one.config |= changes
    one.path.write_text(to_toml(one.config))


def post(one: Appliance, target: str) -> Document:
    """The admin API's answer to a POST, with the HTTP status as ``http``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(ANSWER_TIMEOUT_SECS)
        sock.connect(one.admin_socket)
        head = f"POST {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        response = Wire(sock, ANSWER_TIMEOUT_SECS).request(head.encode())
    document: Document = json.loads(response.body)
    return document | {"http": response.status}


def reload(one: Appliance, **changes: Any) -> Document:
    """Rewrites the file and reloads it over the admin API; it must be accepted."""
    rewrite(one, **changes)
    document = post(one, "/reload")
    assert document["result"] == "accepted", document
    return document


def refused(one: Appliance, **changes: Any) -> list[str]:
    """As ``reload``, but it must be refused; the reasons."""
    rewrite(one, **changes)
    document = post(one, "/reload")
    assert (document["result"], document["http"]) == ("refused", 409), document
    assert document["errors"]
    errors: list[str] = document["errors"]
    return errors


def by_signal(one: Appliance) -> None:
    """SIGHUP; returns when the master has judged."""

    def judged() -> int:
        return sum(
            f" {event} " in line for line in one.event_lines() for event in ("reload.accepted", "reload.refused")
        )

    before = judged()
    os.kill(one.pid, signal.SIGHUP)
    wait_until(lambda: judged() > before, "the reload is in the event log", 40)


def by_command(one: Appliance) -> None:
    """``reverse-proxy reload``, whatever becomes of it."""
    cli("reload", "--config", str(one.path))


def by_admin_api(one: Appliance) -> None:
    """POST /reload."""
    post(one, "/reload")


TRIGGERS: tuple[Callable[[Appliance], None], ...] = (by_signal, by_command, by_admin_api)
