"""The kinds of work, each measured on a freshly started proxy: what the client does, and what is read."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.bench.peers import BULK_BYTES, CONF, LARGE_BYTES, REPOSITORY, SMALL_BYTES, Peer, Stage
from tests.bench.processes import wait_until

_CLIENT_TIMEOUT_SECS = 300.0
_LOG_TIMEOUT_SECS = 3.0
_SETTLE_SECS = 1.0
_WRK_CONNECTIONS = 64
_HANDSHAKES_AT_A_TIME = 8
_H2_CONNECTIONS, _H2_STREAMS, _H2_MANY_STREAMS = 16, 8, 100
_H2LOAD_DONE = re.compile(r"^requests: \d+ total, \d+ started, \d+ done, (\d+) succeeded", re.MULTILINE)
_H2LOAD_SECS = re.compile(r"^finished in ([0-9.]+)(us|ms|s|min)", re.MULTILINE)
_UNITS_SECS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_CLIENT_ENVIRONMENT = {"OPENSSL_CONF": str(CONF / "client-openssl.cnf"), "PYTHONPATH": str(REPOSITORY)}


class FailedError(Exception):
    """The work was not done as it must be for its figures to count."""


@dataclass(frozen=True)
class Scale:
    """How much work is done; every figure is bounded."""

    wrk_secs: int
    warm_up_secs: int
    handshakes: int
    transfers: int
    idle_connections: int
    http2_requests: int
    idle_base: int = 100


FULL = Scale(wrk_secs=6, warm_up_secs=1, handshakes=2_000, transfers=10, idle_connections=1_500, http2_requests=60_000)
QUICK = Scale(wrk_secs=2, warm_up_secs=1, handshakes=400, transfers=2, idle_connections=300, http2_requests=8_000)


@dataclass(frozen=True)
class Measured:
    """What one proxy needed for one piece of work. Figures that a kind of work does not have are 0."""

    unit: float = 0.0
    """CPU: microseconds a request, or seconds a GB (10^9 bytes)."""
    user: float = 0.0
    system: float = 0.0
    per_second: float = 0.0
    """Requests, or MB (10^6 bytes), a second of wall-clock time."""
    p99_ms: float = 0.0
    rss_mb: float = 0.0
    pss_mb: float = 0.0
    anonymous_kb_each: float = 0.0
    rss_kb_each: float = 0.0
    notes: dict[str, int] = field(default_factory=dict)
    """Counts that should be 0: access-log lines missing, upstream connections made anew beyond two a client."""


def probe(peer: Peer, path: str = "/small") -> dict[str, object]:
    """One request by the pinned client: protocol version, cipher suite and body bytes."""
    return _client("probe", peer, path)


def keep_alive(peer: Peer, stage: Stage, scale: Scale, path: str) -> Measured:
    """wrk with 64 connections and one thread; the first seconds are not counted."""
    _wrk(peer, path, scale.warm_up_secs)
    lines, connections = peer.log_lines(), stage.upstream_connections()
    before = peer.job.cpu()
    result = _wrk(peer, path, scale.wrk_secs)
    used = peer.job.cpu().since(before)
    memory = peer.job.memory()
    count = result["requests"]
    more = stage.upstream_connections() - connections - 1
    notes = {
        "upstream connections beyond two a client": max(0, more - 2 * _WRK_CONNECTIONS),
        "access-log lines missing": _log_lines_missing(peer, lines + int(count)),
    }
    scaled = 1e6 / count
    return Measured(
        (used.user + used.system) * scaled,
        used.user * scaled,
        used.system * scaled,
        count / result["duration_us"] * 1e6,
        result["p99_us"] / 1e3,
        memory.rss / 1024,
        memory.pss / 1024,
        notes=notes,
    )


def http2(peer: Peer, stage: Stage, scale: Scale, connections: int, streams: int) -> Measured:
    """h2load with so many connections, each with so many requests at a time; a twentieth before it is not counted."""
    _h2load(peer, "/small", scale.http2_requests // 20, connections, streams)
    lines = peer.log_lines()
    before = peer.job.cpu()
    duration_secs, p99_ms = _h2load(peer, "/small", scale.http2_requests, connections, streams)
    used = peer.job.cpu().since(before)
    memory = peer.job.memory()
    scaled = 1e6 / scale.http2_requests
    return Measured(
        (used.user + used.system) * scaled,
        used.user * scaled,
        used.system * scaled,
        scale.http2_requests / duration_secs,
        p99_ms,
        memory.rss / 1024,
        memory.pss / 1024,
        notes={"access-log lines missing": _log_lines_missing(peer, lines + scale.http2_requests)},
    )


def http2_download(peer: Peer, stage: Stage, scale: Scale) -> Measured:
    """100 MB bodies, one after the other, each on a stream of one connection."""
    _h2load(peer, "/bulk", 1, 1, 1)
    before = peer.job.cpu()
    duration_secs, slowest_ms = _h2load(peer, "/bulk", scale.transfers, 1, 1)
    used = peer.job.cpu().since(before)
    memory = peer.job.memory()
    total = scale.transfers * BULK_BYTES
    scaled = 1e9 / total
    return Measured(
        (used.user + used.system) * scaled,
        used.user * scaled,
        used.system * scaled,
        total / duration_secs / 1e6,
        slowest_ms,
        memory.rss / 1024,
        memory.pss / 1024,
    )


def handshakes(peer: Peer, stage: Stage, scale: Scale) -> Measured:
    """Full handshakes, one request each, eight at a time."""
    size = ("--threads", str(_HANDSHAKES_AT_A_TIME), "--count")
    _client("handshakes", peer, "/small", *size, str(max(50, scale.handshakes // 10)))
    lines = peer.log_lines()
    before = peer.job.cpu()
    result = _client("handshakes", peer, "/small", *size, str(scale.handshakes))
    used = peer.job.cpu().since(before)
    memory = peer.job.memory()
    count = _number(result, "requests")
    scaled = 1e6 / count
    return Measured(
        (used.user + used.system) * scaled,
        used.user * scaled,
        used.system * scaled,
        count / _number(result, "duration_us") * 1e6,
        _number(result, "p99_us") / 1e3,
        memory.rss / 1024,
        memory.pss / 1024,
        notes={"access-log lines missing": _log_lines_missing(peer, lines + int(count))},
    )


def transfers(peer: Peer, stage: Stage, scale: Scale, command: str, path: str) -> Measured:
    """100 MB bodies, one after the other on one connection."""
    size = ("--size", str(BULK_BYTES), "--count")
    _client(command, peer, path, *size, "1")
    before = peer.job.cpu()
    result = _client(command, peer, path, *size, str(scale.transfers))
    used = peer.job.cpu().since(before)
    memory = peer.job.memory()
    total = _number(result, "bytes")
    if total != scale.transfers * BULK_BYTES:
        raise FailedError(f"{total:.0f} bytes were moved, not {scale.transfers * BULK_BYTES}")
    scaled = 1e9 / total
    return Measured(
        (used.user + used.system) * scaled,
        used.user * scaled,
        used.system * scaled,
        total / _number(result, "duration_us"),
        _number(result, "p99_us") / 1e3,
        memory.rss / 1024,
        memory.pss / 1024,
    )


def idle(peer: Peer, stage: Stage, scale: Scale) -> Measured:
    """Growth of resident memory by idle connections, counted from a base of some already open."""
    command = [sys.executable, "-m", "tests.bench.client", "idle", "--port", str(peer.port), "--path", "/small"]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **_CLIENT_ENVIRONMENT},
    ) as client:
        assert client.stdin
        assert client.stdout
        assert client.stderr
        try:
            readings = []
            for more in (scale.idle_base, scale.idle_connections):
                client.stdin.write(f"{more}\n")
                client.stdin.flush()
                if not client.stdout.readline():
                    raise FailedError(client.stderr.read().strip() or "the idle client ended early")
                time.sleep(_SETTLE_SECS)
                readings.append(peer.job.memory())
        finally:
            client.kill()
    base, full = readings
    return Measured(
        rss_mb=full.rss / 1024,
        pss_mb=full.pss / 1024,
        anonymous_kb_each=(full.anonymous - base.anonymous) / scale.idle_connections,
        rss_kb_each=(full.rss - base.rss) / scale.idle_connections,
    )


@dataclass(frozen=True)
class Work:
    """A kind of work: its heading, the unit of its CPU figure and of its rate, and how it is measured."""

    title: str
    unit: str
    rate: str
    measure: Callable[[Peer, Stage, Scale], Measured]
    goals: dict[str, float]
    """The ratio to reach, by peer."""


WORKS: dict[str, Work] = {
    "small": Work(
        f"{SMALL_BYTES}-byte responses, keep-alive, {_WRK_CONNECTIONS} connections",
        "us/request",
        "requests/s",
        lambda peer, stage, scale: keep_alive(peer, stage, scale, "/small"),
        {"nginx": 1.8, "caddy": 0.4},
    ),
    "large": Work(
        f"{LARGE_BYTES:,}-byte responses, keep-alive, {_WRK_CONNECTIONS} connections",
        "us/request",
        "requests/s",
        lambda peer, stage, scale: keep_alive(peer, stage, scale, "/large"),
        {},
    ),
    "handshake": Work(
        "Full TLS handshake and one request a connection",
        "us/request",
        "requests/s",
        handshakes,
        {"nginx": 1.3},
    ),
    "download": Work(
        "100 MB downloads",
        "s/GB",
        "MB/s",
        lambda peer, stage, scale: transfers(peer, stage, scale, "downloads", "/bulk"),
        {"nginx": 1.3},
    ),
    "upload": Work(
        "100 MB uploads",
        "s/GB",
        "MB/s",
        lambda peer, stage, scale: transfers(peer, stage, scale, "uploads", "/upload"),
        {"nginx": 1.3},
    ),
    "h2-small": Work(
        f"HTTP/2: {SMALL_BYTES}-byte responses, {_H2_CONNECTIONS} connections with {_H2_STREAMS} streams each",
        "us/request",
        "requests/s",
        lambda peer, stage, scale: http2(peer, stage, scale, _H2_CONNECTIONS, _H2_STREAMS),
        {"nginx": 1.6, "caddy": 0.35},
    ),
    "h2-streams": Work(
        f"HTTP/2: {SMALL_BYTES}-byte responses, one connection with {_H2_MANY_STREAMS} streams",
        "us/request",
        "requests/s",
        lambda peer, stage, scale: http2(peer, stage, scale, 1, _H2_MANY_STREAMS),
        {"nginx": 1.6, "caddy": 0.35},
    ),
    "h2-download": Work(
        "HTTP/2: 100 MB downloads, one stream at a time",
        "s/GB",
        "MB/s",
        http2_download,
        {"nginx": 1.3},
    ),
    "idle": Work("Idle TLS connections after one request each", "KB each", "", idle, {"nginx": 1.3}),
}


def _number(result: dict[str, object], key: str) -> float:
    value = result[key]
    if not isinstance(value, (int, float)):
        raise FailedError(f"the client's {key} is {value!r}")
    return float(value)


def _log_lines_missing(peer: Peer, wanted: int) -> int:
    """How many access-log lines are still missing when the log has had its time to be flushed."""
    wait_until(lambda: peer.log_lines() >= wanted, _LOG_TIMEOUT_SECS, 0.2)
    return max(0, wanted - peer.log_lines())


def _run(command: Sequence[str]) -> str:
    environment = {**os.environ, **_CLIENT_ENVIRONMENT}
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=_CLIENT_TIMEOUT_SECS, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        raise FailedError(f"{command[0]} did not end in {_CLIENT_TIMEOUT_SECS:.0f} s") from None
    if run.returncode:
        raise FailedError((run.stderr or run.stdout).strip()[-500:])
    return run.stdout


def _client(command: str, peer: Peer, path: str, *options: str) -> dict[str, object]:
    base = [sys.executable, "-m", "tests.bench.client", command, "--port", str(peer.port), "--path", path]
    result: dict[str, object] = json.loads(_run([*base, *options]))
    return result


def _wrk(peer: Peer, path: str, secs: int) -> dict[str, float]:
    url = f"https://127.0.0.1:{peer.port}{path}"
    script = str(CONF / "wrk.lua")
    output = _run(["wrk", "-t", "1", "-c", str(_WRK_CONNECTIONS), "-d", f"{secs}s", "--latency", "-s", script, url])
    for line in output.splitlines():
        if line.startswith("BENCH "):
            result: dict[str, float] = json.loads(line.removeprefix("BENCH "))
            if result["errors"] or not result["requests"]:
                raise FailedError(f"wrk counted errors:\n{output[-800:]}")
            return result
    raise FailedError(f"wrk reported nothing:\n{output[-800:]}")


def _h2load(peer: Peer, path: str, count: int, connections: int, streams: int) -> tuple[float, float]:
    """``count`` requests: how long they took in seconds, and the 99th percentile of each one's time in ms."""
    url = f"https://127.0.0.1:{peer.port}{path}"
    size = ("-n", str(count), "-c", str(connections), "-m", str(streams))
    with tempfile.NamedTemporaryFile("r", prefix="h2load-") as log:
        output = _run(
            [
                "h2load",
                *size,
                "--tls13-ciphers=TLS_AES_128_GCM_SHA256",
                "--groups=X25519",
                f"--log-file={log.name}",
                url,
            ]
        )
        durations_us = sorted(int(line.split("\t")[2]) for line in log)
    done, secs = _H2LOAD_DONE.search(output), _H2LOAD_SECS.search(output)
    if done is None or secs is None or int(done[1]) != count or "Application protocol: h2" not in output:
        raise FailedError(f"h2load did not succeed with each of {count} requests over h2:\n{output[-800:]}")
    p99_us = durations_us[min(len(durations_us) - 1, len(durations_us) * 99 // 100)]
    return float(secs[1]) * _UNITS_SECS[secs[2]], p99_us / 1e3
