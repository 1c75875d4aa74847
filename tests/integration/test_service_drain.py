"""The end: readiness first, a delay, the drain, tunnels last; and the command `stop`."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from proxy.worker.main import TUNNEL_CLOSE_SECS
from tests.conftest import StartAppliance
from tests.harness import Appliance, RawUpstream, Wire, cli, wait_until

GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
LONG_SECS = 600
UPGRADE = (
    b"GET /socket HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\n\r\n"
)


def begin_to_stop(one: Appliance) -> None:
    # The master looks a moment later than a client: what comes before it is a stop in the middle of a start.
    wait_until(lambda: any(" started " in line for line in one.event_lines()), "the master knows that it is ready")
    os.kill(one.pid, signal.SIGTERM)
    wait_until(lambda: one.health("/readyz") == (503, b"draining\n"), "readiness is red")


def test_readiness_is_red_while_everybody_is_still_served(appliance: StartAppliance) -> None:
    one = appliance({"drain_delay_secs": LONG_SECS})
    with one.connect() as before:
        begin_to_stop(one)
        assert one.health("/healthz")[0] == 200
        assert before.request(GET).status == 502
        with one.connect() as after:
            answer = after.request(GET)
            assert answer.status == 502
            assert after.request(GET).status == 502, "nobody is told to go yet"
        assert not one.status()["ready"]
        os.kill(one.pid, signal.SIGTERM)
        assert one.process is not None
        assert one.process.wait(10) == 0, "one more signal does not wait for the delay"
    assert not any(" killed " in line for line in one.event_lines())


def test_the_drain_begins_after_the_delay(appliance: StartAppliance) -> None:
    one = appliance({"drain_delay_secs": 1})
    with one.connect() as idle:
        assert idle.request(GET).status == 502
        began = time.monotonic()
        begin_to_stop(one)
        assert idle.at_end()
        assert time.monotonic() - began >= 1
    assert one.process is not None
    assert one.process.wait(10) == 0


def test_a_worker_that_dies_in_the_delay_is_replaced(appliance: StartAppliance) -> None:
    one = appliance({"drain_delay_secs": LONG_SECS})
    begin_to_stop(one)
    (worker,) = one.workers
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: one.workers not in ((), (worker,)) and one.status()["workers"][0]["ready"], "it is replaced")
    with one.connect() as wire:
        assert wire.request(GET).status == 502
    os.kill(one.pid, signal.SIGTERM)
    assert one.process is not None
    assert one.process.wait(10) == 0


@pytest.mark.parametrize("secs", [0.0, 0.5])
def test_a_short_delay_ends_by_itself(appliance: StartAppliance, secs: float) -> None:
    one = appliance({"drain_delay_secs": secs})
    one.stop()


# -- tunnels


class Peer:
    """Switches protocols and echoes; holds back the answer to everything else until ``release`` is set."""

    def __init__(self) -> None:
        self.asked, self.release = threading.Event(), threading.Event()

    def __call__(self, wire: Wire) -> None:
        head = wire.read_head()
        if b"upgrade: websocket" in head.lower():
            wire.send(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
            while data := wire.sock.recv(65_536):
                wire.sock.sendall(data)
        else:
            self.asked.set()
            assert self.release.wait(60)
            wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")


def open_tunnel(one: Appliance) -> Wire:
    wire = one.connect()
    assert wire.request(UPGRADE).status == 101
    return wire


def echoes(wire: Wire) -> bool:
    wire.send(b"ping")
    return wire.sock.recv(4) == b"ping"


def test_tunnels_are_closed_after_everything_else(
    appliance: StartAppliance, upstream: Callable[..., RawUpstream]
) -> None:
    peer = Peer()
    one = appliance(upstream=upstream(peer).url)
    with open_tunnel(one) as tunnel, one.connect() as client:
        client.send(GET)
        assert peer.asked.wait(20)
        begin_to_stop(one)
        wait_until(lambda: not one.status()["workers"][0]["ready"], "the worker drains")
        assert echoes(tunnel)
        peer.release.set()
        answer = client.read_response()
        assert (answer.status, answer.get("Connection")) == (200, "close")
        assert tunnel.at_end(), "closed in order, not reset"
    assert one.process is not None
    assert one.process.wait(10) == 0


def test_tunnels_are_closed_in_order_when_the_time_is_nearly_over(
    appliance: StartAppliance, upstream: Callable[..., RawUpstream]
) -> None:
    peer = Peer()
    one = appliance({"drain_timeout_secs": 2 * TUNNEL_CLOSE_SECS}, upstream=upstream(peer).url)
    try:
        with open_tunnel(one) as tunnel, one.connect() as client:
            client.send(GET)
            assert peer.asked.wait(20)
            begin_to_stop(one)
            assert tunnel.at_end(), "closed in order, not reset"
            assert one.running, "the exchange has some time left"
            assert one.process is not None
            assert one.process.wait(10) == 0
    finally:
        peer.release.set()


# -- the command


def test_stop_waits_for_the_end(appliance: StartAppliance) -> None:
    one = appliance({"drain_delay_secs": 0.5})
    pid = one.pid
    ended = cli("stop", "--socket", one.admin_socket)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == f"reverse-proxy (pid {pid}) drains\nended\n"
    assert one.process is not None
    assert one.process.wait(0) == 0, "it had ended when the command did"
    again = cli("stop", "--config", str(one.path))
    assert again.returncode == 1
    assert f"no instance answers; looked at {one.admin_socket} (" in again.stderr


def test_drain_returns_at_once_and_a_second_one_cuts_nothing(
    appliance: StartAppliance, upstream: Callable[..., RawUpstream]
) -> None:
    peer = Peer()
    one = appliance(upstream=upstream(peer).url)
    pid = one.pid
    with one.connect() as client:
        client.send(GET)
        assert peer.asked.wait(20)
        for _ in range(3):
            drained = cli("drain", "--config", str(one.path))
            assert (drained.returncode, drained.stdout, drained.stderr) == (
                0,
                f"reverse-proxy (pid {pid}) drains\n",
                "",
            )
        wait_until(lambda: one.health("/readyz") == (503, b"draining\n"), "readiness is red")
        peer.release.set()
        assert client.read_response().status == 200
    assert one.process is not None
    assert one.process.wait(10) == 0
    assert any(" stopping " in line and 'sender="admin socket"' in line for line in one.event_lines())
    assert cli("drain", "--socket", one.admin_socket).returncode == 1
