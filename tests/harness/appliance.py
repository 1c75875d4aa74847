"""The program under test as an operator starts it: a configuration file and ``reverse-proxy run``."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.harness import processes
from tests.harness.ports import FreePorts
from tests.harness.toml import to_toml
from tests.harness.wire import TIMEOUT_SECS, Wire, connect_tcp, connect_tls

START_TIMEOUT_SECS = 30.0
STOP_TIMEOUT_SECS = 20.0
START_ATTEMPTS = 3
SETTLE_SECS = 1.0
"""For the event log to say that it has started; some tests' event logs say less."""
LOOK_TIMEOUT_SECS = 3.0
"""Of one look whether it is ready: a socket that was handed over may have a queue that nobody takes from."""
EVIDENCE_LINES = 40

# Runs the rest of its arguments with the descriptors of the first one at 3, 4, ... and LISTEN_* set for it.
_HAND_OVER = """
import fcntl, os, sys
numbers = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 100) for number in sys.argv[1].split(",")]
for index, number in enumerate(numbers):
    os.dup2(number, 3 + index)
    os.close(number)
names = ":".join(f"s{index}" for index in range(len(numbers)))
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(numbers)), "LISTEN_FDNAMES": names}
os.execvp(sys.argv[2], sys.argv[2:])
"""

Config = dict[str, Any]
Nofile = int | tuple[int, int]
"""A soft and hard RLIMIT_NOFILE, one number for both."""


def _command(arguments: tuple[str, ...], nofile: Nofile | None, prelude: str = "") -> list[str]:
    program = [sys.executable, "-m", "proxy", *arguments]
    if prelude:
        main = f"{prelude}\nimport sys\nfrom proxy.cli import main\nsys.exit(main())"
        program = [sys.executable, "-c", main, *arguments]
    if nofile is None:
        return program
    soft, hard = (nofile, nofile) if isinstance(nofile, int) else nofile
    return ["prlimit", f"--nofile={soft}:{hard}", "--", *program]


def handed_over(sockets: Sequence[socket.socket], command: list[str]) -> list[str]:
    """``command`` as a service manager runs it that hands ``sockets`` over; to be started with them as ``pass_fds``."""
    return [sys.executable, "-c", _HAND_OVER, ",".join(str(sock.fileno()) for sock in sockets), *command]


def cli(*arguments: str, nofile: Nofile | None = None, timeout_secs: float = 30.0) -> subprocess.CompletedProcess[str]:
    """Runs ``reverse-proxy`` with ``arguments`` to its end; the caller judges how it ended and what it printed."""
    command = _command(arguments, nofile)
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_secs, check=False
    )


class Appliance:
    """A running reverse proxy with everything of its own in ``folder``; made by the ``appliance`` fixture.

    ``config`` is TOML or a dictionary. What it does not say gets values for a test: one listener on a free loopback
    port, a redirect and a health listener on others, state, logs and the admin socket below ``folder``, and
    (with ``upstream``) one site for any host. An address that ends in ``:0`` gets a free port. ``inherit`` are
    listening sockets that are handed over as a service manager would (LISTEN_FDS), named s0, s1 and so on.
    ``prelude`` is Python that the program runs before anything else, to plant a fault; ``through`` is a command that
    runs it (setpriv).
    """

    def __init__(
        self,
        folder: Path,
        config: str | Config | None = None,
        *,
        upstream: str | None = None,
        nofile: Nofile | None = None,
        inherit: Sequence[socket.socket] = (),
        prelude: str = "",
        through: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self._inherit = inherit
        self._prelude = prelude
        self._through = through
        self.path = folder / "proxy.toml"
        self.config: Config = {}
        self.nofile = nofile
        self.process: subprocess.Popen[bytes] | None = None
        self._wanted: Config = tomllib.loads(config) if isinstance(config, str) else dict(config or {})
        if upstream is not None:
            self._wanted.setdefault("sites", [{"hosts": ["*"], "upstreams": [upstream]}])
        # A Unix socket's path is at most 107 bytes, which pytest's folders may exceed.
        self._short_folder = Path(tempfile.mkdtemp(prefix="rp-"))
        self.admin_socket = str(self._short_folder / "admin.sock")
        self._stderr = folder / "stderr.log"
        self._stdout = folder / "stdout.log"

    # -- starting and ending

    def start(self) -> None:
        """Writes the configuration, starts the program and returns when it says that it is ready."""
        for attempt in range(1, START_ATTEMPTS + 1):
            ports = FreePorts()
            self.config = self._complete(ports)
            self.admin_socket = self.config["admin"]["socket"]
            self.path.write_text(to_toml(self.config))
            ports.release()
            self._spawn()
            if self._becomes_ready():
                # Until then the end of a process that a test kills would end the start.
                with contextlib.suppress(AssertionError):
                    self.supervised(SETTLE_SECS)
                return
            returncode = self.process.wait(STOP_TIMEOUT_SECS) if self.process else None
            if not ("in use" in self._stderr.read_text() and attempt < START_ATTEMPTS):
                raise AssertionError(f"the appliance ended at start with {returncode}:\n{self.evidence()}")

    def _spawn(self) -> None:
        with self._stdout.open("ab") as out, self._stderr.open("ab") as err:
            command = _command(("run", "--config", str(self.path)), self.nofile, self._prelude)
            command = [*self._through, *command]
            numbers = [sock.fileno() for sock in self._inherit]
            if numbers:
                command = handed_over(self._inherit, command)
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, pass_fds=numbers)

    def _becomes_ready(self) -> bool:
        """True when ready, False when the process ended before."""
        assert self.process is not None
        deadline = time.monotonic() + START_TIMEOUT_SECS
        while self.process.poll() is None:
            if self.ready() and self._answers_itself():
                return True
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"not ready within {START_TIMEOUT_SECS} s:\n{self.evidence()}")
            time.sleep(processes.POLL_SECS)
        return False

    def _answers_itself(self) -> bool:
        """Whether the program on these ports is this one: another run of the tests may have chosen one of them too."""
        try:
            return bool(self.status()["pid"])  # at a socket of its own
        except (OSError, EOFError):
            return False

    def stop(self) -> None:
        """Ends it as a service manager would, and asserts a clean end: exit code 0, no process left behind."""
        assert self.process is not None, "the appliance was never started"
        family = processes.descendants(self.process.pid)
        self.process.send_signal(signal.SIGTERM)
        try:
            returncode = self.process.wait(STOP_TIMEOUT_SECS)
        except subprocess.TimeoutExpired:
            evidence = self.evidence()
            self.kill()
            raise AssertionError(f"SIGTERM did not end it within {STOP_TIMEOUT_SECS} s:\n{evidence}") from None
        left = [f"{pid} {processes.title(pid)}" for pid in family if processes.alive(pid)]
        self.kill(family)
        assert returncode == 0, f"exit code {returncode} after SIGTERM:\n{self.evidence()}"
        assert not left, f"processes left behind: {left}"

    def kill(self, family: tuple[int, ...] = ()) -> None:
        """Ends every process of it at once, by pid. Nothing is asserted; safe at any time."""
        if self.process is None:
            return
        if self.process.poll() is None:
            family += processes.descendants(self.process.pid)
            self.process.kill()
            self.process.wait()
        for pid in family:
            if processes.alive(pid):
                os.kill(pid, signal.SIGKILL)

    def forget(self) -> None:
        """Removes what lies outside ``folder``."""
        shutil.rmtree(self._short_folder, ignore_errors=True)

    @property
    def running(self) -> bool:
        """Whether the master runs."""
        return self.process is not None and self.process.poll() is None

    # -- the configuration

    def _complete(self, ports: FreePorts) -> Config:
        config = dict(self._wanted)
        config.setdefault("listeners", [{"address": "127.0.0.1:0"}])
        config.setdefault("sites", [{"hosts": ["*"], "upstreams": ["http://127.0.0.1:9"]}])
        config.setdefault("state_dir", str(self.folder / "state"))
        if os.geteuid() != 0:
            # The tests look at descriptors, which a process without core dumps hides from its own user.
            config.setdefault("core_dumps", True)
        tables: dict[str, Config] = {
            "redirect": {"addresses": ["127.0.0.1:0"]},
            "health": {"address": "127.0.0.1:0"},
            "admin": {"socket": self.admin_socket},
            "access_log": {"path": str(self.folder / "access.log")},
            "event_log": {"path": str(self.folder / "events.log")},
        }
        for key, table in tables.items():
            config[key] = table | dict(config.get(key, {}))

        def chosen(address: str) -> str:
            host, _, port = address.rpartition(":")
            return f"{host}:{ports.take(host.strip('[]'))}" if port == "0" else address

        config["listeners"] = [{**item, "address": chosen(item["address"])} for item in config["listeners"]]
        config["redirect"] = {**config["redirect"], "addresses": [*map(chosen, config["redirect"]["addresses"])]}
        config["health"] = {**config["health"], "address": chosen(config["health"]["address"])}
        return config

    @property
    def port(self) -> int:
        """The first HTTPS listener's port."""
        return _port(self.config["listeners"][0]["address"])

    @property
    def redirect_port(self) -> int:
        """The first redirect listener's port."""
        return _port(self.config["redirect"]["addresses"][0])

    @property
    def health_port(self) -> int:
        """The health listener's port."""
        return _port(self.config["health"]["address"])

    # -- talking to it

    def connect(self, server_name: str | None = "localhost", **options: Any) -> Wire:
        """A TLS connection to the first listener; options as for ``connect_tls``."""
        return connect_tls(self.port, server_name, **options)

    def connect_redirect(self) -> Wire:
        """A plain connection to the redirect listener."""
        return connect_tcp(self.redirect_port)

    def health(self, path: str = "/healthz", timeout_secs: float = TIMEOUT_SECS) -> tuple[int, bytes]:
        """Status and body of a GET on the health listener. Raises OSError when nobody listens."""
        connection = http.client.HTTPConnection("127.0.0.1", self.health_port, timeout=timeout_secs)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def ready(self) -> bool:
        """Whether /readyz answers 200."""
        try:
            return self.health("/readyz", LOOK_TIMEOUT_SECS)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def supervised(self, timeout_secs: float = START_TIMEOUT_SECS) -> None:
        """Returns when the master replaces what dies, which it says in the event log a moment after all are ready."""
        said = "the master supervises"
        processes.wait_until(lambda: any("started" in line for line in self.event_lines()), said, timeout_secs)

    def status(self) -> Config:
        """The status that the admin socket gives."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(TIMEOUT_SECS)
            sock.connect(self.admin_socket)
            response = Wire(sock).request(b"GET /status HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert response.status == 200, response
        found: Config = json.loads(response.body)
        return found

    # -- looking at it

    @property
    def pid(self) -> int:
        """The master's process id."""
        assert self.process is not None, "the appliance was never started"
        return self.process.pid

    def _children_named(self, role: str) -> tuple[int, ...]:
        return tuple(
            pid for pid in processes.children(self.pid) if processes.title(pid).startswith(f"reverse-proxy: {role}")
        )

    @property
    def workers(self) -> tuple[int, ...]:
        """The workers' process ids."""
        return self._children_named("worker")

    @property
    def control(self) -> int:
        """The control process's id."""
        (pid,) = self._children_named("control")
        return pid

    def event_lines(self) -> list[str]:
        """The event log so far, wherever the configuration sends it."""
        return self._lines(self.config.get("event_log", {}).get("path"))

    def access_lines(self) -> list[str]:
        """The access log so far, wherever the configuration sends it."""
        return self._lines(self.config.get("access_log", {}).get("path"))

    def _lines(self, path: str | None) -> list[str]:
        file = {"stderr": self._stderr, "stdout": self._stdout}.get(path or "") or Path(path or os.devnull)
        return file.read_text(errors="replace").splitlines() if file.exists() else []

    def evidence(self) -> str:
        """What one wants to see when a test fails."""
        parts: Mapping[str, list[str]] = {
            "configuration": self.path.read_text().splitlines() if self.path.exists() else [],
            "standard error": self._lines("stderr"),
            "event log": self.event_lines(),
            "access log": self.access_lines(),
            "processes": [
                f"{pid} {processes.title(pid)}: {processes.descriptor_count(pid)} descriptors"
                for pid in ((self.pid, *processes.descendants(self.pid)) if self.running else ())
            ],
        }
        return "\n".join(f"--- {name}\n" + "\n".join(lines[-EVIDENCE_LINES:]) for name, lines in parts.items())


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])
