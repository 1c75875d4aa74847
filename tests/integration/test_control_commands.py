"""The commands that look at a running instance: budget, why, log-level, status."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from proxy.master.status_client import look
from tests.conftest import StartAppliance
from tests.harness import Appliance, RawUpstream, cli, descriptor_count, wait_until
from tests.harness.reloading import reload


def command(one: Appliance, *arguments: str) -> Any:
    result = cli(*arguments, "--socket", one.admin_socket, "--json")
    assert result.returncode == 0, result
    return json.loads(result.stdout)


def shown(one: Appliance, *arguments: str) -> str:
    result = cli(*arguments, "--socket", one.admin_socket)
    assert (result.returncode, result.stderr) == (0, ""), result
    assert "\x1b" not in result.stdout, "no colours but on a terminal"
    return result.stdout


@pytest.mark.parametrize("name", ["budget", "why", "log-level", "status"])
def test_without_an_instance_they_say_where_they_looked(name: str) -> None:
    result = cli(name, "--socket", "/tmp/rp-nobody.sock")
    assert (result.returncode, result.stdout) == (1, "")
    assert "no instance answers; looked at /tmp/rp-nobody.sock (No such file or directory)" in result.stderr


def test_budget_shows_each_consumer_live_and_at_worst(
    appliance: StartAppliance, upstream: Callable[..., RawUpstream]
) -> None:
    one = appliance({"workers": 4, "max_connections": 40}, upstream=upstream().url)
    with contextlib.ExitStack() as stack:
        for _ in range(6):
            wire = stack.enter_context(one.connect())
            assert wire.request(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").status == 200

        def sums() -> dict[str, int]:
            found: dict[str, int] = {}
            for process in look([one.admin_socket], "/budget")["processes"]:
                if process["name"].startswith("worker"):
                    for item in process["items"]:
                        label = item["label"].partition(" (")[0]
                        found[label] = found.get(label, 0) + (item["live"] or 0)
            return found

        wait_until(lambda: sums()["client connections"] == 6, "the clients are counted")
        wait_until(lambda: sums()["upstream connections"] >= 1, "upstream connections are counted")
        wait_until(lambda: sums()["listening sockets"] == 8, "each of four workers has two")

        def is_true() -> bool:
            workers = look([one.admin_socket], "/budget")["processes"][:4]
            sums = [sum(item["live"] or 0 for item in process["items"]) for process in workers]
            opened = [process["open"] for process in workers]
            return sums == opened and sorted(opened) == sorted(map(descriptor_count, one.workers))

        wait_until(is_true, "what is told is what is open")
        document = command(one, "budget")
        for process in document["processes"]:
            assert process["total"] == sum(item["descriptors"] for item in process["items"])
            assert process["headroom"] == process["limit"] - process["total"]
        master = next(process for process in document["processes"] if process["name"] == "master")
        listening = next(item for item in master["items"] if item["label"].startswith("listening sockets"))
        assert listening["live"] == 8
        text = shown(one, "budget")
        assert "client connections (share of 40)" in text
        assert f"largest safe max_connections under the hard limit {document['limits']['hard']}: " in text


def test_why_tells_reasons_by_client(appliance: StartAppliance) -> None:
    one = appliance({"workers": 4, "max_connections": 40, "header_timeout_secs": 0.3})
    assert "nothing was refused" in shown(one, "why")
    with one.connect() as wire:
        assert wire.request(b"GET / HTTP/1.1\nHost: localhost\n\n").status == 400
    with one.connect() as wire:
        assert wire.request(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").status == 502
    with one.connect() as wire:
        assert wire.request(b"GET / HT").status == 408
    document = command(one, "why")
    found = [(one["address"], one["status"], one["reason"], one["detail"]) for one in document["refusals"]]
    assert found == [
        ("127.0.0.1", 408, "header-timeout", ""),
        ("127.0.0.1", 502, "upstream-unreachable", ""),
        ("127.0.0.1", 400, "bad-request", "bare-lf"),
    ]
    assert all(abs(entry["time"] - time.time()) < 60 for entry in document["refusals"])
    assert command(one, "why", "127.0.0.1")["refusals"] == document["refusals"]
    assert command(one, "why", "2001:db8::1")["refusals"] == []
    text = shown(one, "why", "127.0.0.1")
    assert "header-timeout" in text
    assert "bare-lf" in text
    refused = cli("why", "nobody", "--socket", one.admin_socket)
    assert refused.returncode == 2
    assert "'nobody' is not an IP address" in refused.stderr


def test_a_silent_client_is_told_with_its_reason(appliance: StartAppliance) -> None:
    one = appliance({"workers": 1, "tls_handshake_timeout_secs": 0.3})
    with socket.create_connection(("127.0.0.1", one.port)):
        wait_until(lambda: look([one.admin_socket], "/why")["refusals"], "the silent client is told")
    (entry,) = command(one, "why")["refusals"]
    assert (entry["reason"], entry["status"]) == ("handshake-timeout", 0)


def test_the_log_level_is_changed_live(appliance: StartAppliance) -> None:
    one = appliance({"workers": 1})
    assert shown(one, "log-level") == "event log level: info\n"
    assert shown(one, "log-level", "error") == "event log level: error (was info)\n"
    assert command(one, "log-level") == {"level": "error"}
    before = len(one.event_lines())
    os.kill(one.pid, signal.SIGUSR1)  # told at info
    assert command(one, "log-level", "info") == {"level": "info", "before": "error"}
    wait_until(lambda: any(" event_log.level " in line for line in one.event_lines()[before:]), "the change is told")
    assert not any(" logs.reopened " in line for line in one.event_lines()[before:])
    refused = cli("log-level", "loud", "--socket", one.admin_socket)
    assert refused.returncode == 2


def test_a_log_level_outlives_the_control_process(appliance: StartAppliance) -> None:
    one = appliance({"workers": 1})
    assert command(one, "log-level", "warning")["level"] == "warning"
    before = one.control
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: one.ready() and one.control != before, "the next control process answers", 30)
    assert command(one, "log-level") == {"level": "warning"}
    assert one.config["event_log"].get("level") is None
    reload(one, event_log=one.config["event_log"] | {"level": "error"})
    wait_until(lambda: command(one, "log-level") == {"level": "error"}, "the file's new level is in force")


def test_status_and_readyz_tell_a_shortage(appliance: StartAppliance) -> None:
    one = appliance({"workers": 2, "max_connections": 10})
    assert command(one, "status")["reasons"] == []
    first = one.workers[0]
    os.kill(first, signal.SIGSTOP)
    try:
        wait_until(lambda: one.health("/readyz")[0] == 503, "a worker that does not beat is missed", 15)
        lines = one.health("/readyz")[1].decode().splitlines()
        assert lines[0] == "degraded: 1 of 2 workers accept connections"
        assert "has given no heartbeat for" in lines[1]
        assert one.health("/healthz") == (200, b"ok\n")
        text = shown(one, "status")
        assert "degraded: 1 of 2 workers accept connections" in text
    finally:
        os.kill(first, signal.SIGCONT)
    wait_until(one.ready, "it is ready again")
    document = command(one, "status")
    assert {"backends", "refused", "reasons"} <= set(document)
    assert document["workers"][0]["restarts"] == 0
