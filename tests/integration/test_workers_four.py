"""With four workers every limit is still one of the whole appliance, and to clients and in the log they are one."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import StartAppliance
from tests.harness import Appliance, RawUpstream, Wire, cli, connect_tcp, wait_until

REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
LAST_REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
WORKERS = 4


def workers(one: Appliance) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = one.status()["workers"]
    return found


def held(one: Appliance, key: str = "permits_held") -> list[int]:
    return [worker[key] for worker in workers(one)]


# -- limits


def test_eight_connections_are_eight_whatever_the_number_of_workers(
    appliance: StartAppliance, upstream: Callable[..., RawUpstream]
) -> None:
    one = appliance({"workers": WORKERS, "max_connections": 8}, upstream=upstream().url)
    assert [worker["permits"] for worker in workers(one)] == [2, 2, 2, 2]
    clients = [connect_tcp(one.port) for _ in range(60)]
    wait_until(lambda: held(one) == [2, 2, 2, 2], "all permits are held")
    for _ in range(20):
        assert max(held(one)) <= 2
    assert one.status()["totals"]["connections_accepted"] == 8, "the others wait in the kernel's queues"
    for client in clients:
        client.close()
    wait_until(lambda: held(one) == [0, 0, 0, 0], "all permits are back")
    for _ in range(8):
        with one.connect() as client:
            assert client.request(REQUEST).status == 200


def test_shares_add_up_where_they_do_not_divide(appliance: StartAppliance) -> None:
    one = appliance({"workers": WORKERS, "max_connections": 10, "redirect": {"max_connections": 5}})
    assert sorted(worker["permits"] for worker in workers(one)) == [2, 2, 3, 3]
    clients = [one.connect_redirect() for _ in range(60)]
    wait_until(lambda: sum(held(one, "redirect_connections")) == 5, "the redirect's permits are held")
    for _ in range(20):
        assert sum(held(one, "redirect_connections")) <= 5
    for client in clients:
        client.close()


def test_upstream_connections_are_bounded_over_all_workers(
    appliance: StartAppliance, upstream: Callable[..., RawUpstream]
) -> None:
    go_on = threading.Event()
    lock = threading.Lock()
    inside = most = 0

    def count(wire: Wire) -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        try:
            while True:
                wire.read_head()
                go_on.wait(20)
                wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        except (EOFError, OSError):
            pass
        finally:
            with lock:
                inside -= 1

    one = appliance(
        {"workers": WORKERS, "max_upstream_connections": 4, "upstream_queue_timeout_secs": 30},
        upstream=upstream(count).url,
    )
    clients = [one.connect() for _ in range(40)]
    for client in clients:
        client.send(REQUEST)
    wait_until(lambda: held(one, "upstream_open") == [1, 1, 1, 1], "each worker has its one")
    wait_until(lambda: sum(held(one, "upstream_queued")) == 36, "the others wait")
    go_on.set()
    assert {client.read_response().status for client in clients} == {200}
    assert most == 4
    for client in clients:
        client.close()


# -- a worker's death


def test_a_killed_workers_queue_is_served_by_its_successor(
    appliance: StartAppliance, upstream: Callable[..., RawUpstream]
) -> None:
    one = appliance({"workers": 2, "max_connections": 2}, upstream=upstream().url)
    one.supervised()
    context = ssl._create_unverified_context()

    def ask(raw: socket.socket) -> int:
        with Wire(context.wrap_socket(raw, server_hostname="localhost"), 30) as client:
            return client.request(LAST_REQUEST).status

    holders: list[Wire] = []
    while held(one) != [1, 1]:
        holders.append(connect_tcp(one.port))
        assert len(holders) < 100
    accepted = one.status()["totals"]["connections_accepted"]
    victim = workers(one)[0]["pid"]
    queued = [socket.create_connection(("127.0.0.1", one.port), 30) for _ in range(24)]
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: held(one)[0] == 0 or workers(one)[0]["pid"] != victim, "its share is back")
    for holder in holders:
        holder.close()
    with ThreadPoolExecutor(len(queued)) as pool:
        assert list(pool.map(ask, queued)) == [200] * 24, "nobody was refused or reset"
    assert one.status()["totals"]["connections_accepted"] >= accepted + 24
    assert workers(one)[0]["pid"] not in (None, victim)
    wait_until(lambda: held(one) == [0, 0], "all permits are back")


# -- TLS sessions


class Returning:
    """A client that offers, on each connection, the session of the one before."""

    def __init__(self, one: Appliance, version: ssl.TLSVersion) -> None:
        self._one = one
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._context.check_hostname = False
        self._context.verify_mode = ssl.CERT_NONE
        self._context.minimum_version = self._context.maximum_version = version
        self._session: ssl.SSLSession | None = None

    def comes(self) -> bool:
        """Whether its session was resumed."""
        raw = socket.create_connection(("127.0.0.1", self._one.port), 10)
        sock = self._context.wrap_socket(raw, server_hostname="localhost", session=self._session)
        with Wire(sock) as client:
            assert client.request(REQUEST).status == 200  # in 1.3 the ticket comes with it
            self._session = sock.session
            return bool(sock.session_reused)

    def part_resumed(self, connections: int) -> float:
        """Of so many connections."""
        return sum(self.comes() for _ in range(connections)) / connections


BOTH = pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])


@BOTH
def test_sessions_resume_across_workers(
    appliance: StartAppliance, upstream: Callable[..., RawUpstream], version: ssl.TLSVersion
) -> None:
    one = appliance({"workers": WORKERS}, upstream=upstream().url)
    client = Returning(one, version)
    assert not client.comes(), "it has none yet"
    assert client.part_resumed(60) >= 0.95
    assert sum(requests > 0 for requests in held(one, "requests")) >= 3, "they landed on different workers"
    one.supervised()
    before = set(one.workers)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not before & set(one.workers) and one.ready(), "new workers are ready")
    assert client.part_resumed(20) >= 0.95


@BOTH
def test_sessions_outlive_a_certificate(
    appliance: StartAppliance, upstream: Callable[..., RawUpstream], version: ssl.TLSVersion
) -> None:
    one = appliance({"workers": WORKERS}, upstream=upstream().url)
    one.supervised()
    client = Returning(one, version)
    client.comes()
    old = ssl.get_server_certificate(("127.0.0.1", one.port))
    shutil.rmtree(one.folder / "state" / "selfsigned")
    ended = cli("reload", "--socket", one.admin_socket)
    assert ended.returncode == 0, ended.stderr
    assert ssl.get_server_certificate(("127.0.0.1", one.port)) != old, "another certificate is served"
    assert client.part_resumed(40) >= 0.95


def s_client(one: Appliance, *options: str) -> str:
    ended = subprocess.run(
        ["openssl", "s_client", "-connect", f"127.0.0.1:{one.port}", "-servername", "localhost", *options],
        input=LAST_REQUEST.decode(),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return ended.stdout


def test_openssl_resumes_too(appliance: StartAppliance, upstream: Callable[..., RawUpstream], tmp_path: Path) -> None:
    one = appliance({"workers": WORKERS}, upstream=upstream().url)
    shown = s_client(one, "-tls1_2", "-reconnect")
    assert shown.count("\nReused, TLSv1.2") == 5
    ticket = str(tmp_path / "ticket")
    assert "\nNew, TLSv1.3" in s_client(one, "-tls1_3", "-ign_eof", "-sess_out", ticket)
    for _ in range(8):
        assert "\nReused, TLSv1.3" in s_client(one, "-tls1_3", "-ign_eof", "-sess_in", ticket, "-sess_out", ticket)


# -- the event log


def test_one_storm_in_four_workers_is_one_storm_in_the_log(appliance: StartAppliance) -> None:
    one = appliance({"workers": WORKERS, "max_connections": 400})
    storm = "upstream.connect_failed:http://127.0.0.1:9"

    def lines() -> list[str]:
        return [line for line in one.event_lines() if f" {storm} " in line]

    began = time.monotonic()
    for _ in range(80):
        with one.connect() as client:
            assert client.request(REQUEST).status == 502
    took_secs = time.monotonic() - began
    assert all(requests > 0 for requests in held(one, "requests")), "each worker had its part"
    wait_until(lambda: any("suppressed=" in line for line in lines()), "the window's line", 30)
    # One whole line, then one a window of 10 s, whatever the number of workers.
    assert len(lines()) <= 2 + took_secs / 10
    assert "suppressed=" not in lines()[0]
    wait_until(lambda: counted(lines()) == one.status()["totals"]["upstream_connect_failures"], "all are counted", 30)


def counted(lines: list[str]) -> int:
    """The occurrences that a storm's lines stand for."""
    return 1 + sum(int(found[1]) for line in lines if (found := re.search(r"suppressed=(\d+)", line)))
