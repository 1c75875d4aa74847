"""An upgrade under traffic: nobody is refused, what is under way ends intact, the old generation then goes."""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import StartAppliance
from tests.harness import Appliance, FreePorts, RawUpstream, Wire, alive, cli, connect_tls, wait_until
from tests.harness.generations import Generations
from tests.harness.http2_wire import connect_http2
from tests.harness.toml import to_toml

GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
LAST_GET = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
UPGRADE = (
    b"GET /socket HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\n\r\n"
)
HALF_BYTES = 300_000
END_SECS = 20.0
MAX_ROUNDS = 5000

StartGenerations = Callable[..., Generations]


@pytest.fixture
def generations(appliance: StartAppliance) -> Iterator[StartGenerations]:
    started: list[Generations] = []

    def start(config: dict[str, Any] | None = None, **options: Any) -> Generations:
        one = appliance({"workers": 2, "max_connections": 64, **(config or {})}, **options)
        # The master looks a moment later than a client.
        wait_until(lambda: any(" started " in line for line in one.event_lines()), "the master knows that it is ready")
        started.append(Generations(one))
        return started[-1]

    try:
        yield start
    finally:
        for line in started:
            line.kill()


class Peer:
    """/down: half of the body, the rest once ``release`` is set. /up: the body's length. /socket: an echo. Else ok."""

    def __init__(self) -> None:
        self.release = threading.Event()

    def __call__(self, wire: Wire) -> None:
        while True:
            try:
                head = wire.read_head()
            except EOFError:
                return
            path = head.split(b" ", 2)[1]
            if path == b"/socket":
                wire.send(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
                while data := wire.sock.recv(65_536):
                    wire.sock.sendall(data)
                return
            if path == b"/down":
                wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (2 * HALF_BYTES) + b"1" * HALF_BYTES)
                assert self.release.wait(60)
                wire.send(b"2" * HALF_BYTES)
                continue
            wire.sock.settimeout(60)
            length = b"%d" % len(wire.read_body(head)) if path == b"/up" else b"ok"
            wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(length), length))


class Asker:
    """A thread that asks again and again; ``answers`` are what it got, an error included."""

    def __init__(self, ask: Callable[[], object]) -> None:
        self.answers: list[object] = []
        self._ask = ask
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._done.wait(0.01) and len(self.answers) < MAX_ROUNDS:
            try:
                self.answers.append(self._ask())
            except (OSError, EOFError, http.client.HTTPException) as error:
                self.answers.append(repr(error))

    def served_anew(self) -> None:
        wanted = len(self.answers) + 5
        wait_until(lambda: len(self.answers) > wanted, "it is answered", 30)

    def end(self) -> set[object]:
        self._done.set()
        self._thread.join()
        return set(self.answers)


def new_connection(one: Appliance) -> int:
    with one.connect() as wire:
        return wire.request(LAST_GET).status


def open_tunnel(one: Appliance) -> Wire:
    wire = one.connect()
    assert wire.request(UPGRADE).status == 101
    return wire


def echoes(wire: Wire) -> bool:
    wire.send(b"ping")
    return wire.sock.recv(4) == b"ping"


def ended_well(line: Generations, pid: int | None = None) -> None:
    """The first master (or ``pid``) has drained and ended."""
    if pid is None:
        assert line.one.process is not None
        assert line.one.process.wait(END_SECS) == 0, line.one.evidence()
    else:
        wait_until(lambda: not alive(pid), "the old master has ended", END_SECS)


# -- nobody notices


def test_three_upgrades_refuse_and_reset_nobody(
    generations: StartGenerations, upstream: Callable[..., RawUpstream]
) -> None:
    line = generations(upstream=upstream().url)
    one = line.one
    health = http.client.HTTPConnection("127.0.0.1", one.health_port, timeout=10)

    def ready() -> int:
        health.request("GET", "/readyz")  # connects anew only where the answer before said Connection: close
        response = health.getresponse()
        response.read()
        return response.status

    askers = [Asker(lambda: new_connection(one)), Asker(ready), Asker(lambda: one.status()["ready"])]
    masters = [line.pid]
    try:
        for upgrade in (line.upgrade, line.upgrade_by_signal, line.upgrade):
            for asker in askers:
                asker.served_anew()
            masters.append(upgrade())
        for asker in askers:
            asker.served_anew()
    finally:
        answers = [asker.end() for asker in askers]
        health.close()
    assert answers == [{200}, {200}, {True}]
    assert len(set(masters)) == 4
    ended_well(line)
    for pid in masters[1:3]:
        ended_well(line, pid)
    assert Path(one.admin_socket).exists(), "it outlives those that end before the last"
    line.stop()
    assert not Path(one.admin_socket).exists()
    assert [len(line.events(name)) for name in ("upgrade.started", "upgrade.handed_over", "stopped")] == [3, 3, 4]
    assert not line.events("upgrade.failed")


def test_the_new_master_is_the_one_that_holds_the_admin_socket(generations: StartGenerations) -> None:
    line = generations()
    pid = line.upgrade()
    ports = FreePorts()
    off = {"enabled": False}
    here = {"listeners": [{"address": f"127.0.0.1:{ports.take()}"}], "health": off, "redirect": off}
    again = line.one.folder / "again.toml"
    again.write_text(to_toml(line.one.config | here))
    ports.release()
    refused = cli("run", "--config", str(again))
    assert refused.returncode == 1
    assert f"another instance (pid {pid}) answers on the admin socket" in refused.stderr


def test_what_is_under_way_ends_intact(generations: StartGenerations, upstream: Callable[..., RawUpstream]) -> None:
    peer = Peer()
    line = generations(upstream=upstream(peer).url)
    one = line.one
    with one.connect() as down, one.connect() as up, one.connect() as idle, open_tunnel(one) as tunnel:
        down.send(GET.replace(b"/", b"/down", 1))
        assert down.read_head().startswith(b"HTTP/1.1 200 ")
        up.send(b"POST /up HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (2 * HALF_BYTES))
        up.send(b"a" * HALF_BYTES)
        assert idle.request(GET).get("Connection") is None

        line.upgrade()
        assert one.running
        last = idle.request(GET)
        assert (last.status, last.body, last.get("Connection")) == (200, b"ok", "close")
        assert idle.at_end()
        up.send(b"b" * HALF_BYTES)
        assert up.read_response().body == b"%d" % (2 * HALF_BYTES)
        peer.release.set()
        assert down.read_exactly(2 * HALF_BYTES) == b"1" * HALF_BYTES + b"2" * HALF_BYTES
        assert echoes(tunnel)
        assert one.running, "for the tunnel"
        assert new_connection(one) == 200
    ended_well(line)
    assert one.status()["pid"] == line.pid


@pytest.mark.parametrize("how", ["upgrade", "SIGUSR2"])
def test_http2_is_told_in_two_steps_and_goes_on_with_the_new_one(
    generations: StartGenerations, upstream: Callable[..., RawUpstream], how: str
) -> None:
    """RFC 9113 section 6.8: what is under way ends intact, no request is lost, the next connection is the new one's."""
    peer = Peer()
    line = generations(upstream=upstream(peer).url)
    one = line.one
    with contextlib.ExitStack() as stack:
        busy, idle = connect_http2(one), connect_http2(one)
        for client in (busy, idle):
            stack.callback(client.close)
        assert idle.get(host="localhost").status == 200
        down = busy.open("/down", host="localhost")
        busy.wait(lambda: len(busy.streams[down].body) == HALF_BYTES, "half of the body")
        up = busy.open("/up", host="localhost", method="POST", end_stream=False)
        busy.write(up, b"a" * HALF_BYTES)

        if how == "upgrade":
            line.upgrade()
        else:
            line.upgrade_by_signal()
        busy.wait(lambda: busy.goaways, "GOAWAY")
        # It crosses the second GOAWAY: taken, or said not to be.
        late = busy.open(host="localhost")
        busy.wait(lambda: len(busy.goaways) == 2, "the second GOAWAY")
        assert [one.code for one in busy.goaways] == [0, 0]
        last_ids = [int.from_bytes(one.payload[:4], "big") for one in busy.goaways]
        assert last_ids[0] == 2**31 - 1
        idle.read_to_end()
        assert [one.code for one in idle.goaways] == [0, 0]

        assert new_connection(one) == 200
        fresh = connect_http2(one)
        stack.callback(fresh.close)
        assert fresh.get(host="localhost").status == 200
        assert one.running, "for the streams"

        if last_ids[1] >= late:
            assert busy.finish(late).status == 200
        else:
            assert busy.finish(late).reset == 7  # REFUSED_STREAM: to be asked again elsewhere
        busy.write(up, b"b" * HALF_BYTES, end_stream=True)
        assert bytes(busy.finish(up).body) == b"%d" % (2 * HALF_BYTES)
        peer.release.set()
        answer = busy.finish(down)
        assert (answer.ended, bytes(answer.body)) == (True, b"1" * HALF_BYTES + b"2" * HALF_BYTES)
        busy.read_to_end()
        for client in (busy, idle):
            client.close()
        ended_well(line)
        assert fresh.get(host="localhost").status == 200
        assert not fresh.goaways
    assert one.status()["pid"] == line.pid


def test_an_answer_that_did_not_tell_of_the_end_is_followed_by_one_that_does(
    generations: StartGenerations, upstream: Callable[..., RawUpstream]
) -> None:
    """Its head was on its way before the upgrade: the next request may be on its way before the end is known."""
    peer = Peer()
    line = generations(upstream=upstream(peer).url)
    with line.one.connect() as wire:
        wire.send(b"GET /down HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"connection: close" not in wire.read_head().lower()
        line.upgrade()
        peer.release.set()
        wire.read_exactly(2 * HALF_BYTES)
        last = wire.request(GET)
        assert (last.status, last.get("Connection")) == (200, "close")
        assert wire.at_end()


def test_permits_of_the_generations_are_separate(
    generations: StartGenerations, upstream: Callable[..., RawUpstream]
) -> None:
    line = generations({"workers": 1, "max_connections": 1}, upstream=upstream(Peer()).url)
    with open_tunnel(line.one) as tunnel:
        line.upgrade()
        assert new_connection(line.one) == 200, "the one permit of the old generation is held"
        assert echoes(tunnel)


def test_another_release(generations: StartGenerations, tmp_path: Path) -> None:
    current = tmp_path / "current"

    def install(version: str) -> None:
        release = tmp_path / f"release-{version}"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--symlinks", release], check=True, timeout=60)
        packages = next(release.glob("lib/python*/site-packages"))
        (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
        shutil.copytree(Path(__file__).parents[2] / "proxy", packages / "proxy")
        (packages / "proxy" / "__init__.py").write_text(f'__version__ = "{version}"\n')
        program = release / "bin" / "reverse-proxy"
        program.write_text(f"#!{release}/bin/python\nimport sys\nfrom proxy.cli import main\nsys.exit(main())\n")
        program.chmod(0o755)
        current.unlink(missing_ok=True)
        current.symlink_to(release)

    install("7.0.1")
    # Instead of `python -m proxy`, which the harness would run.
    program = ["sh", "-c", 'shift 3; exec "$0" "$@"', str(current / "bin" / "reverse-proxy")]
    line = generations(through=program)
    assert line.one.status()["version"] == "7.0.1"
    install("7.0.2")
    line.upgrade()
    assert line.one.status()["version"] == "7.0.2"
    ended_well(line)


# -- what goes wrong


def assert_nothing_changed(line: Generations, before: tuple[object, ...]) -> None:
    one = line.one
    assert (one.workers, one.control, sorted(os.listdir(f"/proc/{one.pid}/fd"))) == before
    assert one.status()["pid"] == line.pid
    assert new_connection(one) == 502
    assert one.ready()
    assert len(line.events("upgrade.failed")) == 1
    assert Path(one.admin_socket).exists()


def picture(line: Generations) -> tuple[object, ...]:
    return line.one.workers, line.one.control, sorted(os.listdir(f"/proc/{line.pid}/fd"))


def refused(line: Generations) -> str:
    done = cli("upgrade", "--socket", line.one.admin_socket, timeout_secs=60)
    assert done.returncode == 1, done
    assert "Traceback" not in done.stderr
    return done.stderr


def test_a_broken_configuration(generations: StartGenerations) -> None:
    line = generations()
    before = picture(line)
    line.one.path.write_text("max_connections = 'many'\n")
    message = refused(line)
    assert "ended while starting" in message
    assert "max_connections" in message
    assert_nothing_changed(line, before)


IN_THE_NEXT = """
import os, sys, time
import proxy.master.upgrade as upgrade
upgrade.READY_SECS = {secs}
if upgrade.VARIABLE in os.environ:
    {fault}
"""


@pytest.mark.parametrize(
    ("fault", "secs", "reason"),
    [
        ("time.sleep(600)", 2, "was not ready in 2 s"),
        ("sys.exit(3)", 30, "ended while starting: see its messages on standard error"),
        (
            "import proxy.cli; proxy.cli.run_worker = lambda context: 9",
            30,
            " ended while starting (exit status 9): see the event log",
        ),
        ("import proxy.cli; proxy.cli.run_worker = lambda context: time.sleep(600)", 2, "was not ready in 2 s"),
    ],
    ids=["sleeps", "exits", "worker-ends", "worker-sleeps"],
)
def test_a_code_that_does_not_become_ready(generations: StartGenerations, fault: str, secs: int, reason: str) -> None:
    line = generations(prelude=IN_THE_NEXT.format(fault=fault, secs=secs))
    before = picture(line)
    assert reason in refused(line)
    assert_nothing_changed(line, before)


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    return tmp_path / "gate"


def waiting_at(gate: Path) -> str:
    return f"""
import os, time
if "REVERSE_PROXY_TAKEOVER" in os.environ:
    deadline = time.monotonic() + 40
    while not os.path.exists({str(gate)!r}) and time.monotonic() < deadline:
        time.sleep(0.02)
"""


def test_one_upgrade_at_a_time(generations: StartGenerations, gate: Path) -> None:
    line = generations(prelude=waiting_at(gate))
    os.kill(line.pid, signal.SIGUSR2)
    wait_until(lambda: line.events("upgrade.started"), "the upgrade begins")
    assert "an upgrade is under way" in refused(line)
    reload = cli("reload", "--socket", line.one.admin_socket)
    assert (reload.returncode, "an upgrade is under way" in reload.stderr) == (2, True)
    gate.touch()
    wait_until(lambda: line.one.status()["pid"] != line.pid, "the first one succeeds", 40)
    line.pid = line.one.status()["pid"]
    ended_well(line)


def test_a_stop_takes_the_upgrade_back(generations: StartGenerations, gate: Path) -> None:
    line = generations(prelude=waiting_at(gate))
    os.kill(line.pid, signal.SIGUSR2)
    wait_until(lambda: line.events("upgrade.started"), "the upgrade begins")
    line.one.stop()
    assert not Path(line.one.admin_socket).exists()


def test_process_1_is_refused(generations: StartGenerations) -> None:
    namespace = ["unshare", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*namespace, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("may not make a namespace of processes")
    line = generations(through=namespace)
    assert line.one.status()["pid"] == 1
    assert "this is process 1 of a container" in refused(line)
    drain = cli("drain", "--socket", line.one.admin_socket)
    assert (drain.returncode, drain.stdout) == (0, "reverse-proxy (pid 1) drains\n")
    assert line.one.process is not None
    assert line.one.process.wait(END_SECS) == 0


# -- the end of the old generation


def test_what_stays_is_cut_after_its_time(generations: StartGenerations, upstream: Callable[..., RawUpstream]) -> None:
    line = generations({"upgrade_drain_timeout_secs": 2}, upstream=upstream(Peer()).url)
    with open_tunnel(line.one) as tunnel, line.one.connect() as silent:
        assert silent.request(GET).status == 200
        line.upgrade()
        began = time.monotonic()
        assert echoes(tunnel)
        assert tunnel.at_end()
        assert silent.at_end()
        assert time.monotonic() - began > 0.5
        ended_well(line)
    assert new_connection(line.one) == 200


def test_sigterm_to_the_retiring_one_drains_it_at_once(
    generations: StartGenerations, upstream: Callable[..., RawUpstream]
) -> None:
    line = generations(upstream=upstream(Peer()).url)
    with open_tunnel(line.one) as tunnel, line.one.connect() as idle:
        assert idle.request(GET).status == 200
        line.upgrade()
        os.kill(line.one.pid, signal.SIGTERM)
        assert tunnel.at_end()
        assert idle.at_end()
        ended_well(line)
    assert new_connection(line.one) == 200
    assert line.one.ready()


def test_sigterm_to_the_new_one_leaves_the_old_to_its_connections(
    generations: StartGenerations, upstream: Callable[..., RawUpstream]
) -> None:
    line = generations(upstream=upstream(Peer()).url)
    one = line.one
    with open_tunnel(one) as tunnel:
        line.upgrade()
        line.stop()
        assert echoes(tunnel)
        for port in (one.port, one.redirect_port, one.health_port):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), 5)
        assert not Path(one.admin_socket).exists()
    ended_well(line)


# -- with a service manager


def test_the_manager_is_told_the_main_process(generations: StartGenerations, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        name = "reverse-proxy-test-" + os.urandom(8).hex()
        manager.bind("\0" + name)
        manager.settimeout(END_SECS)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name)
        monkeypatch.setenv("WATCHDOG_USEC", "600000")

        def hear(message: bytes) -> None:
            assert any(manager.recv(4096) == message for _ in range(200)), message

        line = generations()
        hear(b"READY=1")
        line.upgrade()
        hear(b"MAINPID=%d\nREADY=1" % line.pid)
        ended_well(line)
        hear(b"WATCHDOG=1")  # of the new one: the old one is gone
        hear(b"WATCHDOG=1")
        os.kill(line.pid, signal.SIGTERM)
        hear(b"STOPPING=1\nSTATUS=draining")


def test_sockets_of_the_manager_stay_shared(generations: StartGenerations) -> None:
    with socket.create_server(("127.0.0.1", 0)) as https, socket.create_server(("127.0.0.1", 0)) as health:
        config = {
            "workers": 1,
            "listeners": [{"address": f"127.0.0.1:{https.getsockname()[1]}"}],
            "health": {"address": f"127.0.0.1:{health.getsockname()[1]}"},
        }
        line = generations(config, inherit=[https, health])
        one = line.one
        one.path.write_text(one.path.read_text().replace("workers = 1", "workers = 2"))
        asker = Asker(lambda: new_connection(one))
        try:
            asker.served_anew()
            line.upgrade()
            asker.served_anew()
            assert len(one.status()["workers"]) == 2
            line.upgrade()
            asker.served_anew()
        finally:
            answers = asker.end()
        assert answers == {502}
        assert one.ready()
        with socket.create_server(("127.0.0.1", 0)) as other:
            free = other.getsockname()[1]
        one.path.write_text(one.path.read_text().replace(str(https.getsockname()[1]), str(free)))
        assert "hands over a socket (descriptor 3, s0)" in refused(line)
        line.stop()
        with socket.create_connection(("127.0.0.1", https.getsockname()[1]), 5):
            pass  # the manager's own still listens


# -- the configuration may change with it


def test_more_workers_another_listener_another_admin_socket(generations: StartGenerations) -> None:
    line = generations()
    one = line.one
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    moved = one.admin_socket + "2"
    text = one.path.read_text().replace("workers = 2", "workers = 3").replace(one.admin_socket, moved)
    one.path.write_text(text.replace(f"127.0.0.1:{one.port}", f"127.0.0.1:{port}"))
    done = cli("upgrade", "--socket", one.admin_socket, timeout_secs=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert not Path(one.admin_socket).exists(), "nobody answers there any more"
    removed, one.admin_socket = one.port, moved
    line.pid = one.status()["pid"]
    assert len(one.status()["workers"]) == 3
    with connect_tls(port) as wire:
        assert wire.request(GET).status == 502
    ended_well(line)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", removed), 5)
