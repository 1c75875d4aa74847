"""The proxies under test and what stands behind them: their configuration (``conf/``), start and ports."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench.processes import Job, wait_until

CONF = Path(__file__).parent / "conf"
REPOSITORY = Path(__file__).parents[2]
SMALL_BYTES, LARGE_BYTES, BULK_BYTES = 90, 10_240, 100_000_000
_START_TIMEOUT_SECS = 20.0
_ACCEPTS = re.compile(r"server accepts handled requests\n\s*(\d+)")


class NotRunnableError(Exception):
    """A proxy (or the upstream) could not be started; the message holds the tail of its output."""


@dataclass(frozen=True)
class Kind:
    """How one proxy is run; ``{config}`` is its filled-in template, ``{dir}`` a folder of its own."""

    template: str
    command: tuple[str, ...]
    version: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    log_is_stdout: bool = False


KINDS: dict[str, Kind] = {
    "nginx": Kind("nginx.conf", ("nginx", "-c", "{config}"), ("nginx", "-v")),
    "haproxy": Kind("haproxy.cfg", ("haproxy", "-db", "-f", "{config}"), ("haproxy", "-v"), log_is_stdout=True),
    "caddy": Kind(
        "Caddyfile",
        ("caddy", "run", "--adapter", "caddyfile", "--config", "{config}"),
        ("caddy", "version"),
        {"GOMAXPROCS": "1", "HOME": "{dir}", "XDG_CONFIG_HOME": "{dir}", "XDG_DATA_HOME": "{dir}"},
    ),
    "ours": Kind(
        "ours.toml",
        (sys.executable, "-m", "proxy", "run", "--config", "{config}"),
        ("git", "-C", str(REPOSITORY), "describe", "--always", "--dirty"),
        {"PYTHONPATH": str(REPOSITORY)},
    ),
}


def version_of(name: str) -> str:
    """The first line of what a proxy says of its version; for ours the commit."""
    try:
        run = subprocess.run(KINDS[name].version, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    lines = (run.stdout + run.stderr).strip().splitlines()
    return lines[0].strip() if lines else "unknown"


def free_port() -> int:
    """A loopback TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def fill(template: str, target: Path, values: Mapping[str, object]) -> None:
    """Write ``conf/<template>`` to ``target`` with each ``@NAME@`` replaced."""
    text = (CONF / template).read_text("utf-8")
    target.write_text(re.sub(r"@([A-Z_]+)@", lambda match: str(values[match[1]]), text), "utf-8")


def accepts(port: int) -> bool:
    """Whether something listens on a loopback port."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


class Stage:
    """The upstreams, the certificate and the files that every proxy of a run shares. Use ``Stage.set_up``."""

    def __init__(self, directory: Path, *, nginx_log_options: str) -> None:
        self.directory = directory
        self.backend_port = free_port()
        self.sink_port = free_port()
        self.values: dict[str, object] = {
            "BACKEND_PORT": self.backend_port,
            "SINK_PORT": self.sink_port,
            "CERT": directory / "certificate.pem",
            "KEY": directory / "key.pem",
            "PEM": directory / "both.pem",
            "NGINX_LOG_OPTIONS": nginx_log_options,
            "USER": f"{pwd.getpwuid(os.geteuid()).pw_name} {grp.getgrgid(os.getegid()).gr_name}",
        }

    @classmethod
    @contextlib.contextmanager
    def set_up(cls, directory: Path, *, nginx_log_options: str) -> Iterator[Stage]:
        """Make the files, start the upstreams, and end them when the block is left.

        :raises NotRunnableError: when an upstream does not listen in time
        """
        stage = cls(directory, nginx_log_options=nginx_log_options)
        stage._make_certificate()
        stage._make_files()
        config = directory / "backend.conf"
        fill("backend.conf", config, {**stage.values, "DIR": directory})
        sink = [sys.executable, "-m", "tests.bench.sink", str(stage.sink_port)]
        with (
            Job("backend", ["nginx", "-c", str(config)], directory) as backend,
            Job("sink", sink, directory, environment={"PYTHONPATH": str(REPOSITORY)}) as sink_job,
        ):
            for job, port in ((backend, stage.backend_port), (sink_job, stage.sink_port)):
                _wait_for(job, port)
            yield stage

    def upstream_connections(self) -> int:
        """How many connections the file upstream has accepted so far (the question itself is one of them)."""
        with socket.create_connection(("127.0.0.1", self.backend_port), timeout=5) as connection:
            connection.sendall(b"GET /status HTTP/1.0\r\n\r\n")
            with connection.makefile("r", encoding="ascii", errors="replace", newline="") as answer:
                found = _ACCEPTS.search(answer.read())
        return int(found[1]) if found else 0

    def _make_certificate(self) -> None:
        key, chain = self.directory / "key.pem", self.directory / "certificate.pem"
        # fmt: off
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "30",
             "-subj", "/CN=bench.example.org",
             "-addext", "subjectAltName=DNS:bench.example.org,DNS:localhost,IP:127.0.0.1",
             "-keyout", str(key), "-out", str(chain)],
            check=True, capture_output=True, timeout=30,
        )
        # fmt: on
        (self.directory / "both.pem").write_bytes(chain.read_bytes() + key.read_bytes())

    def _make_files(self) -> None:
        files = self.directory / "files"
        files.mkdir()
        for name, size in (("small", SMALL_BYTES), ("large", LARGE_BYTES)):
            (files / name).write_bytes(b"x" * size)
        (files / "index.html").write_text("<html></html>\n")
        piece = os.urandom(1_000_000)
        with (files / "bulk").open("wb") as bulk:
            for _ in range(BULK_BYTES // len(piece)):
                bulk.write(piece)


@dataclass(frozen=True)
class Peer:
    """One running proxy under test."""

    name: str
    port: int
    job: Job
    log: Path

    def log_lines(self) -> int:
        """Lines in its access log now."""
        try:
            with self.log.open("rb") as log:
                return sum(chunk.count(b"\n") for chunk in iter(lambda: log.read(1 << 20), b""))
        except OSError:
            return 0


@contextlib.contextmanager
def running(
    name: str,
    stage: Stage,
    *,
    variant: str = "",
    values: Mapping[str, object] | None = None,
    through: Sequence[str] = (),
) -> Iterator[Peer]:
    """Start one proxy in a folder of its own; end it and remove the folder when the block is left.

    ``variant`` goes before the template's name, ``values`` are further ones of its own, ``through`` is a command that
    starts it (``prlimit``).

    :raises NotRunnableError: when it does not listen in time
    """
    kind = KINDS[name]
    directory = stage.directory / name
    directory.mkdir()
    try:
        template = f"{variant}{kind.template}"
        port, log, config = free_port(), directory / "access.log", directory / template
        own = {"DIR": directory, "PORT": port, "LOG": log, "REDIRECT_PORT": free_port(), "HEALTH_PORT": free_port()}
        fill(template, config, {**stage.values, **own, **(values or {})})
        command = [*through, *(word.replace("{config}", str(config)) for word in kind.command)]
        environment = {key: value.replace("{dir}", str(directory)) for key, value in kind.environment.items()}
        stdout = log if kind.log_is_stdout else None
        try:
            job = Job(name, command, directory, environment=environment, stdout=stdout)
        except OSError as exc:
            raise NotRunnableError(f"{name}: {exc}") from None
        with job:
            _wait_for(job, port)
            yield Peer(name, port, job, log)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _wait_for(job: Job, port: int) -> None:
    wait_until(lambda: accepts(port) or not job.running, _START_TIMEOUT_SECS)
    if not (job.running and accepts(port)):
        state = f"does not listen after {_START_TIMEOUT_SECS:.0f} s" if job.running else "ended at start"
        raise NotRunnableError(f"{job.name} {state}:\n{job.tail()}")
