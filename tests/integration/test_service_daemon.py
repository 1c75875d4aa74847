"""`run --daemon`: what the terminal sees, what stays behind, and that it is one instance only."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import alive, cli, connect_tls, descriptor_count, wait_until
from tests.harness.appliance import handed_over
from tests.harness.ports import FreePorts
from tests.harness.processes import descendants
from tests.harness.toml import to_toml

HUGE_LIMIT = 1_048_576
GENEROUS_SECS = 10.0
"""A loop over a million descriptors in Python takes longer on any machine of today than this start as a whole."""

_WITH_A_HUGE_LIMIT = f"""
import resource, sys
resource.getrlimit = lambda _: ({HUGE_LIMIT}, {HUGE_LIMIT})
from proxy.cli import main
sys.exit(main(sys.argv[1:]))
"""


class Daemon:
    """A configuration, and the daemon that was started with it."""

    def __init__(self, folder: Path, short: Path) -> None:
        self.folder = folder
        self.path = folder / "proxy.toml"
        self.pid_file = folder / "run.pid"
        self.admin = str(short / "admin.sock")
        self.write()

    def write(self, **changes: Any) -> None:
        ports = FreePorts()
        self.port, self.redirect, self.health = (ports.take() for _ in range(3))
        config = {
            "state_dir": str(self.folder / "state"),
            "max_connections": 20,
            "listeners": [{"address": f"127.0.0.1:{self.port}"}],
            "redirect": {"addresses": [f"127.0.0.1:{self.redirect}"]},
            "health": {"address": f"127.0.0.1:{self.health}"},
            "admin": {"socket": self.admin},
            "sites": [{"hosts": ["*"], "upstreams": ["http://127.0.0.1:9"]}],
            "access_log": {"path": str(self.folder / "access.log")},
            "event_log": {"path": str(self.folder / "events.log")},
        }
        self.path.write_text(to_toml(config | changes))
        ports.release()

    def arguments(self) -> tuple[str, ...]:
        return ("run", "--config", str(self.path), "--daemon", "--pid-file", str(self.pid_file))

    @property
    def pid(self) -> int:
        return int(self.pid_file.read_text())

    def serves(self) -> bool:
        with connect_tls(self.port) as wire:
            return wire.request(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").status == 502

    def end(self) -> None:
        if self.pid_file.exists():
            pid = self.pid
            family = (pid, *descendants(pid))
            for one in family:
                if alive(one):
                    os.kill(one, signal.SIGKILL)
            wait_until(lambda: not any(alive(one) for one in family), "the daemon ends")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    short = Path(f"/tmp/rp-{os.urandom(6).hex()}")
    short.mkdir()
    one = Daemon(tmp_path, short)
    try:
        yield one
    finally:
        one.end()
        for file in short.iterdir():
            file.unlink()
        short.rmdir()


def test_it_is_ready_when_the_command_returns(daemon: Daemon) -> None:
    started = cli(*daemon.arguments())
    assert (started.returncode, started.stdout, started.stderr) == (0, "", "")
    assert daemon.serves()
    pid = daemon.pid
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    session, terminal = int(stat[3]), int(stat[4])
    assert session not in (pid, os.getsid(0)), "a session of its own, which it does not lead: no terminal can come back"
    assert terminal == 0
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    assert "Umask:\t0027" in Path(f"/proc/{pid}/status").read_text()
    for process in (pid, *descendants(pid)):
        assert [os.readlink(f"/proc/{process}/fd/{number}") for number in range(3)] == ["/dev/null"] * 3
        held = {os.readlink(f"/proc/{process}/fd/{number}") for number in os.listdir(f"/proc/{process}/fd")}
        assert (str(daemon.pid_file) in held) == (process == pid), "the lock is the master's alone"
    assert descriptor_count(pid) < 20

    stopped = cli("stop", "--socket", daemon.admin)
    assert stopped.returncode == 0
    assert not alive(pid)
    assert not daemon.pid_file.exists()


def test_a_second_one_is_refused_by_the_pid_file(daemon: Daemon) -> None:
    assert cli(*daemon.arguments()).returncode == 0
    pid = daemon.pid
    second = cli(*daemon.arguments())
    assert second.returncode == 1
    assert f"another instance (pid {pid}) holds the pid file {daemon.pid_file}" in second.stderr
    assert daemon.pid == pid
    assert daemon.serves()


def test_a_pid_file_that_was_left_behind_is_no_obstacle(daemon: Daemon) -> None:
    assert cli(*daemon.arguments()).returncode == 0
    killed = daemon.pid
    daemon.end()
    assert daemon.pid == killed, "left behind"
    assert cli(*daemon.arguments()).returncode == 0
    assert daemon.pid != killed
    assert daemon.serves()


def test_a_taken_port_is_told_on_the_terminal(daemon: Daemon) -> None:
    with socket.create_server(("127.0.0.1", daemon.port)):
        started = cli(*daemon.arguments())
    assert started.returncode == 1
    assert f"cannot listen on 127.0.0.1:{daemon.port}" in started.stderr
    assert "Traceback" not in started.stderr
    assert not daemon.pid_file.exists()


def test_a_bad_certificate_is_told_with_its_exit_code(daemon: Daemon) -> None:
    missing = {"chain": "/nonexistent/chain.pem", "key": "/nonexistent/key.pem"}
    daemon.write(listeners=[{"address": f"127.0.0.1:{daemon.port}", "certificates": [missing]}])
    started = cli(*daemon.arguments())
    assert started.returncode == 2
    assert "/nonexistent/chain.pem" in started.stderr


def test_an_unwritable_pid_file_is_told(daemon: Daemon) -> None:
    started = cli("run", "--config", str(daemon.path), "--daemon", "--pid-file", "/nonexistent/run.pid")
    assert started.returncode == 1
    assert "cannot write the pid file /nonexistent/run.pid: No such file or directory" in started.stderr


@pytest.mark.parametrize(("key", "stream"), [("event_log", "stderr"), ("access_log", "stdout")])
def test_a_log_on_a_closed_stream_is_refused(daemon: Daemon, key: str, stream: str) -> None:
    daemon.write(**{key: {"path": stream}})
    started = cli(*daemon.arguments())
    assert started.returncode == 2
    assert f'{key}.path = "{stream}" leads nowhere: set it to a file' in started.stderr


def test_a_reload_cannot_bring_a_log_on_a_closed_stream(daemon: Daemon) -> None:
    assert cli(*daemon.arguments()).returncode == 0
    daemon.path.write_text(daemon.path.read_text().replace(str(daemon.folder / "events.log"), "stderr"))
    reload = cli("reload", "--socket", daemon.admin)
    assert reload.returncode == 2
    assert 'event_log.path = "stderr" leads nowhere' in reload.stderr


def test_a_pid_file_needs_a_daemon(daemon: Daemon) -> None:
    started = cli("run", "--config", str(daemon.path), "--pid-file", str(daemon.pid_file))
    assert (started.returncode, daemon.pid_file.exists()) == (2, False)


def test_a_huge_descriptor_limit_costs_no_seconds(daemon: Daemon) -> None:
    began = time.monotonic()
    started = subprocess.run(
        [sys.executable, "-c", _WITH_A_HUGE_LIMIT, *daemon.arguments()], capture_output=True, text=True, timeout=60
    )
    assert (started.returncode, started.stderr) == (0, "")
    assert time.monotonic() - began < GENEROUS_SECS
    assert daemon.serves()


_WAITS_FOR_A_FILE = """
import sys, time
from pathlib import Path
from proxy.errors import StartError
from proxy.master.daemonize import daemonize

folder = Path(sys.argv[1])

def run(on_ready, pid_file):
    (folder / "started").touch()
    while not (folder / "go").exists():
        time.sleep(0.01)
    try:
        on_ready()
    except StartError as error:
        (folder / "refused").write_text(str(error))
        raise

sys.exit(daemonize(run, pid_file=None, core_dumps=False, keep=[]))
"""


def test_an_interrupted_command_takes_the_start_back(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", _WAITS_FOR_A_FILE, str(tmp_path)], stderr=subprocess.DEVNULL) as one:
        try:
            wait_until((tmp_path / "started").exists, "the daemon starts")
        finally:
            one.kill()
    (tmp_path / "go").touch()
    wait_until((tmp_path / "refused").exists, "it notices that nobody waits")


def test_a_fault_of_ours_is_told_too(tmp_path: Path) -> None:
    script = _WAITS_FOR_A_FILE.replace("    try:", "    raise RuntimeError('a fault')\n    try:")
    (tmp_path / "go").touch()
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert "RuntimeError: a fault" in done.stderr


def test_sockets_of_a_manager_are_kept(daemon: Daemon) -> None:
    with socket.create_server(("127.0.0.1", 0)) as https:
        port = https.getsockname()[1]
        daemon.write(listeners=[{"address": f"127.0.0.1:{port}"}])
        command = handed_over([https], [sys.executable, "-m", "proxy", *daemon.arguments()])
        started = subprocess.run(command, capture_output=True, text=True, timeout=30, pass_fds=[https.fileno()])
    assert (started.returncode, started.stderr) == (0, "")
    daemon.port = port
    assert daemon.serves()


def test_an_upgrade_hands_the_pid_file_over(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.chdir(daemon.folder)
    assert cli("run", "--config", "proxy.toml", "--daemon", "--pid-file", "run.pid").returncode == 0
    pid = first = daemon.pid
    for _ in range(2):
        before, inode = daemon.pid, daemon.pid_file.stat().st_ino
        upgraded = cli("upgrade", "--socket", daemon.admin, timeout_secs=60)
        assert (upgraded.returncode, upgraded.stderr) == (0, "")
        wait_until(lambda before=before: not alive(before), "the old master ends")  # type: ignore[misc]
        assert daemon.pid != before
        assert daemon.pid_file.stat().st_ino == inode, "the same file, which stayed locked"
        assert daemon.serves()
        second = cli(*daemon.arguments())
        assert f"another instance (pid {daemon.pid}) holds the pid file" in second.stderr
        pid = daemon.pid
        assert os.readlink(f"/proc/{pid}/cwd") == "/"
        for process in (pid, *descendants(pid)):
            held = {os.readlink(f"/proc/{process}/fd/{number}") for number in os.listdir(f"/proc/{process}/fd")}
            assert (str(daemon.pid_file) in held) == (process == pid), "the lock is the master's alone"
    assert daemon.pid != first

    daemon.path.write_text("max_connections = 0")
    refused = cli("upgrade", "--socket", daemon.admin, timeout_secs=60)
    assert (refused.returncode, "max_connections" in refused.stderr) == (1, True)
    assert daemon.pid == pid
    assert cli("stop", "--socket", daemon.admin).returncode == 0
    assert not daemon.pid_file.exists()
