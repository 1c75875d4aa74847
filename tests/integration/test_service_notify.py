"""A start under a service manager: what it hears, over a real datagram socket."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import StartAppliance
from tests.harness import Appliance, wait_until
from tests.harness.processes import title

WATCHDOG_SECS = 0.6


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    name = "reverse-proxy-test-" + os.urandom(8).hex()
    sock.bind("\0" + name)
    sock.settimeout(20)
    monkeypatch.setenv("NOTIFY_SOCKET", "@" + name)
    monkeypatch.setenv("WATCHDOG_USEC", str(int(WATCHDOG_SECS * 1_000_000)))
    return sock


def hear(manager: socket.socket, message: bytes) -> None:
    """Returns when the message has come; TimeoutError when it does not come."""
    while manager.recv(4096) != message:
        pass


def test_a_run_under_a_manager(manager: socket.socket, appliance: StartAppliance) -> None:
    with manager:
        one = appliance({"workers": 2, "max_connections": 40})
        heard: list[str] = []
        while "READY=1" not in heard:
            heard.append(manager.recv(4096).decode())
        while (message := manager.recv(4096).decode()) == "WATCHDOG=1":
            heard.append(message)
        assert message == "STATUS=0 of 40 permits held, 2 of 2 workers ready"

        for _ in range(3):
            hear(manager, b"WATCHDOG=1")

        os.kill(one.pid, signal.SIGHUP)
        while (message := manager.recv(4096).decode()) == "WATCHDOG=1":
            pass
        assert message.startswith("RELOADING=1\nMONOTONIC_USEC=")
        assert manager.recv(4096) == b"READY=1"

        os.kill(one.pid, signal.SIGTERM)
        while (message := manager.recv(4096).decode()) == "WATCHDOG=1":
            pass
        assert message == "STOPPING=1\nSTATUS=draining"
        assert one.process is not None
        assert one.process.wait(20) == 0


def test_the_watchdog_bites_when_no_worker_beats(manager: socket.socket, appliance: StartAppliance) -> None:
    with manager:
        one = appliance()
        (worker,) = one.workers
        os.kill(worker, signal.SIGSTOP)
        try:
            wait_until(lambda: one.health("/healthz")[0] == 503, "its heartbeat is too old")
            manager.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while manager.recv(4096):
                    pass
            manager.settimeout(3 * WATCHDOG_SECS)
            with pytest.raises(TimeoutError):
                hear(manager, b"WATCHDOG=1")
        finally:
            os.kill(worker, signal.SIGCONT)
        manager.settimeout(20)
        hear(manager, b"WATCHDOG=1")


def test_processes_have_titles_whichever_variable_comes_first(tmp_path: Path) -> None:
    one = Appliance(tmp_path)
    one.start()
    one.stop()
    command = [sys.executable, "-m", "proxy", "run", "--config", str(one.path)]
    with subprocess.Popen(command, env={"NOTIFY_SOCKET": "/nonexistent", "LISTEN_FDS": "0", "LANG": "C"}) as process:
        try:
            wait_until(lambda: title(process.pid) == "reverse-proxy: master", "the title is set", 30)
        finally:
            process.terminate()
            assert process.wait(30) == 0
            one.forget()


def test_a_path_as_address(tmp_path: Path, appliance: StartAppliance, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        path = f"/tmp/rp-notify-{os.urandom(8).hex()}"
        manager.bind(path)
        try:
            manager.settimeout(20)
            monkeypatch.setenv("NOTIFY_SOCKET", path)
            appliance()
            hear(manager, b"READY=1")
        finally:
            os.unlink(path)
