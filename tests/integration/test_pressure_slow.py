"""Least rates of heads, bodies and responses: whom they cut, and whom they must not cut; slowhttptest's four modes."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from tests.conftest import StartAppliance
from tests.harness.appliance import cli
from tests.harness.processes import wait_until
from tests.harness.stage import Stage, open_stage
from tests.harness.upstream import RawUpstream
from tests.harness.wire import Wire, connect_tls

GET = b"GET / HTTP/1.1\r\nHost: a.test\r\n\r\n"
RATE = 1000
STEP_SECS = 0.05


@pytest.fixture(scope="module")
def theatre() -> Iterator[Stage]:
    def configure(urls: Sequence[str]) -> dict[str, Any]:
        return {
            "min_request_head_bytes_per_sec": RATE,
            "min_request_body_bytes_per_sec": RATE,
            "min_response_bytes_per_sec": RATE,
            "min_rate_grace_secs": 1,
            "header_timeout_secs": 30,
            "header_total_timeout_secs": 60,
            "request_body_timeout_secs": 30,
            "write_timeout_secs": 1,
            "sites": [
                {"hosts": ["*"], "upstreams": [urls[0]]},
                {"hosts": ["patient.test"], "upstreams": [urls[0]], "min_request_body_bytes_per_sec": 0},
            ],
        }

    with open_stage(configure) as stage:
        yield stage


def pause(secs: float = STEP_SECS) -> None:
    threading.Event().wait(secs)


def drip(client: Wire, data: bytes, size: int, secs: float) -> None:
    """Sends ``data`` piece by piece, as long as the other side takes it."""
    with contextlib.suppress(OSError):
        for at in range(0, len(data), size):
            client.send(data[at : at + size])
            pause(secs)


def why(stage: Stage) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(cli("why", "--json", "--socket", stage.appliance.admin_socket).stdout)
    first: dict[str, Any] = found["refusals"][0]
    return first


def test_a_head_that_drips_is_answered_408(stage: Stage) -> None:
    before = stage.counter("timeouts_slow")
    client = stage.client()
    started = time.monotonic()
    drip(client, GET[:-2] + b"X-A: " + b"a" * 40, 1, STEP_SECS)
    assert client.read_response().status == 408
    assert time.monotonic() - started < 30  # nothing but the rate could have ended it by then
    assert stage.counter("timeouts_slow") == before + 1


def test_a_body_that_drips_is_answered_408(stage: Stage) -> None:
    before = stage.counter("timeouts_slow")
    client = stage.client()
    client.send(b"POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 100000\r\n\r\n")
    drip(client, bytes(60), 1, STEP_SECS)
    assert client.read_response().status == 408
    assert stage.counter("timeouts_slow") == before + 1
    assert why(stage)["reason"] == "body-timeout"


def test_a_body_that_keeps_the_rate_with_pauses_goes_through(stage: Stage) -> None:
    client = stage.client()
    client.send(b"POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 12000\r\n\r\n")
    for _ in range(3):  # four seconds' worth at once, then a pause that is longer than the grace
        client.send(bytes(4000))
        pause(1.3)
    assert client.read_response().status == 200


def test_a_site_may_take_any_rate(stage: Stage) -> None:
    client = stage.client()
    client.send(b"POST / HTTP/1.1\r\nHost: patient.test\r\nContent-Length: 30\r\n\r\n")
    drip(client, bytes(30), 1, 2 * STEP_SECS)
    assert client.read_response().status == 200


def test_who_waits_for_the_upstream_is_not_slow(stage: Stage) -> None:
    def play(wire: Wire) -> None:
        wire.read_body(wire.read_head())
        wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n")
        for _ in range(10):
            pause(0.3)
            wire.send(b"x")

    stage.play(play)
    assert stage.ask(GET).body == b"x" * 10


def test_a_response_that_is_taken_too_slowly_is_cut(stage: Stage) -> None:
    size = 32 * 1024 * 1024

    def play(wire: Wire) -> None:
        with contextlib.suppress(OSError, EOFError):
            wire.read_head()
            wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + bytes(size))

    stage.play(play)
    before = stage.counter("timeouts_slow")
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.connect(("127.0.0.1", stage.appliance.port))
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with context.wrap_socket(raw, server_hostname="localhost") as client:
        client.sendall(GET)
        got = 0
        with contextlib.suppress(OSError):  # a reset, in the end
            while stage.counter("timeouts_slow") == before and got < size:
                got += len(client.recv(64))
                pause(4 * STEP_SECS)
    assert got < size // 4
    wait_until(lambda: stage.counter("timeouts_slow") == before + 1, "it is counted")
    assert why(stage)["reason"] == "write-timeout"


MODES: dict[str, list[str]] = {
    "slow headers": ["-H", "-i", "1", "-x", "8"],
    "slow body": ["-B", "-i", "1", "-s", "8192", "-x", "8"],
    "ranges": ["-R", "-a", "5", "-b", "3000"],
    "slow read": ["-X", "-w", "512", "-y", "1024", "-n", "1", "-z", "32", "-k", "3"],
}


@pytest.mark.peers
@pytest.mark.parametrize("mode", MODES)
def test_slowhttptest_leaves_the_proxy_available(
    appliance: StartAppliance, upstream: Callable[..., RawUpstream], mode: str
) -> None:
    program = shutil.which("slowhttptest")
    assert program is not None, "slowhttptest is not installed (Debian package slowhttptest)"
    body = bytes(300_000)
    url = upstream(lambda wire: _answer_all(wire, body)).url
    # More attackers than permits: what they hold must come free, or be taken from them.
    one = appliance({"sites": [{"hosts": ["*"], "upstreams": [url]}], "max_connections": 100, "min_rate_grace_secs": 2})
    command = [
        program,
        *MODES[mode],
        "-c",
        "150",
        "-r",
        "75",
        "-l",
        "8",
        "-p",
        "5",
        "-u",
        f"https://127.0.0.1:{one.port}/",
    ]
    attack = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert attack.stdout is not None
    reader = threading.Thread(target=attack.stdout.read)  # it prints all the time
    reader.start()
    served = 0
    try:
        while attack.poll() is None:
            with connect_tls(one.port, source="127.0.0.2", timeout_secs=20) as client:
                assert client.request(GET).status == 200
            served += 1
            pause()
    finally:
        if attack.poll() is None:
            attack.kill()
        attack.wait()
        reader.join()
        attack.stdout.close()
    assert served > 0
    accepted = one.status()["totals"]["connections_accepted"]
    assert accepted > 100, f"the attack did not come: {accepted} connections"
    assert one.ready()
    assert len(one.event_lines()) < 200


def _answer_all(wire: Wire, body: bytes) -> None:
    with contextlib.suppress(OSError, EOFError):
        while True:
            wire.read_body(wire.read_head())
            wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
