"""Socket activation: the test is the service manager, which binds, keeps the sockets and hands them over."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.conftest import StartAppliance
from tests.harness import Appliance, cli, connect_tls, wait_until

GET = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


class Manager:
    """Three listening sockets: https, redirect, health."""

    def __init__(self, stack: ExitStack) -> None:
        self.sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        self.https, self.redirect, self.health = (sock.getsockname()[1] for sock in self.sockets)

    def config(self, workers: int = 1) -> dict[str, object]:
        return {
            "workers": workers,
            "max_connections": 64,
            "listeners": [{"address": f"127.0.0.1:{self.https}"}],
            "redirect": {"addresses": [f"127.0.0.1:{self.redirect}"]},
            "health": {"address": f"127.0.0.1:{self.health}"},
        }


@pytest.fixture
def manager() -> Iterator[Manager]:
    with ExitStack() as stack:
        yield Manager(stack)


def status_of(port: int) -> int:
    """Of a GET over a new TLS connection; raises OSError when it is refused or reset."""
    with connect_tls(port, "localhost", timeout_secs=30) as wire:
        return wire.request(GET).status


def test_who_connects_before_the_start_is_served_after_it(manager: Manager, appliance: StartAppliance) -> None:
    with socket.create_connection(("127.0.0.1", manager.redirect), timeout=30) as early:
        early.sendall(b"GET /x HTTP/1.1\r\nHost: localhost\r\n\r\n")
        one = appliance(manager.config(), inherit=manager.sockets)
        assert early.recv(4096).startswith(b"HTTP/1.1 308 ")
    assert status_of(manager.https) == 502
    assert [item["address"] for item in one.status()["listeners"]][:3] == [
        f"127.0.0.1:{port}" for port in (manager.https, manager.redirect, manager.health)
    ]
    # Its own socket is the only one more: nothing was bound beside those that it was given.
    assert _listening_inodes(one.pid) == {os.fstat(sock.fileno()).st_ino for sock in manager.sockets}
    assert not any(os.get_blocking(sock.fileno()) for sock in manager.sockets)


def test_all_workers_share_the_socket(manager: Manager, appliance: StartAppliance) -> None:
    one = appliance(manager.config(workers=2), inherit=manager.sockets)
    first, second = one.workers
    for stopped in (first, second):
        os.kill(stopped, signal.SIGSTOP)
        try:
            assert [status_of(manager.https) for _ in range(5)] == [502] * 5, "the other one serves"
        finally:
            os.kill(stopped, signal.SIGCONT)


def test_a_restart_refuses_nobody(manager: Manager, appliance: StartAppliance) -> None:
    one = appliance(manager.config(), inherit=manager.sockets)
    answers: list[int | str] = []
    done = threading.Event()

    def keep_asking() -> None:
        while not done.is_set():
            try:
                answers.append(status_of(manager.https))
            except OSError as error:
                answers.append(repr(error))
            time.sleep(0.02)

    def served() -> None:
        wanted = len(answers) + 3
        wait_until(lambda: len(answers) > wanted, "clients are served", 30)

    client = threading.Thread(target=keep_asking)
    client.start()
    try:
        for _ in range(2):
            served()
            one.stop()
            one.start()
        served()
    finally:
        done.set()
        client.join()
    assert set(answers) == {502}


def test_a_socket_that_the_configuration_does_not_have_is_refused(manager: Manager, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stray:
        message = _refusal(tmp_path, manager, [*manager.sockets, stray])
        assert f"a socket (descriptor 6, s3) on 127.0.0.1:{stray.getsockname()[1]}, where no listener" in message
        assert f"127.0.0.1:{manager.https}" in message


def test_a_reload_cannot_leave_a_socket_of_the_manager_out(manager: Manager, appliance: StartAppliance) -> None:
    one = appliance(manager.config(), inherit=manager.sockets)
    with socket.create_server(("127.0.0.1", 0)) as other:
        free = other.getsockname()[1]
    one.path.write_text(one.path.read_text().replace(f"127.0.0.1:{manager.https}", f"127.0.0.1:{free}"))
    reload = cli("reload", "--socket", one.admin_socket)
    assert reload.returncode == 2
    assert f"hands over a socket (descriptor 3, s0) on 127.0.0.1:{manager.https}" in reload.stderr
    assert status_of(manager.https) == 502


def test_what_is_no_listening_socket_is_refused(manager: Manager, tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as deaf:
        assert "no listening TCP socket (descriptor 3, s0)" in _refusal(tmp_path, manager, [deaf])
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        assert "no listening TCP socket (descriptor 3, s0)" in _refusal(tmp_path, manager, [other])


def test_a_socket_for_both_families_is_refused(manager: Manager, tmp_path: Path) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("needs IPv6")
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as both:
        assert "BindIPv6Only=ipv6-only" in _refusal(tmp_path, manager, [both])


def test_variables_of_another_process_are_ignored(appliance: StartAppliance, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LISTEN_PID", "1")
    monkeypatch.setenv("LISTEN_FDS", "3")
    one = appliance()
    assert one.health("/readyz")[0] == 200


def _refusal(folder: Path, manager: Manager, sockets: list[socket.socket]) -> str:
    one = Appliance(folder, manager.config(), inherit=sockets)
    try:
        with pytest.raises(AssertionError) as raised:
            one.start()
        assert one.process is not None
        assert one.process.returncode in (1, 2)
        text = (folder / "stderr.log").read_text()
        assert "Traceback" not in text
        assert str(raised.value)
        return text
    finally:
        one.kill()
        one.forget()


def _listening_inodes(pid: int) -> set[int]:
    """Of the TCP sockets that listen, as the process holds them."""
    lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    listening = {int(line.split()[9]) for line in lines if line.split()[3] == "0A"}
    links = [os.readlink(f"/proc/{pid}/fd/{number}") for number in os.listdir(f"/proc/{pid}/fd")]
    return listening & {int(link[8:-1]) for link in links if link.startswith("socket:[")}
