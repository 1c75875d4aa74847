"""``python -m tests.show.soak``: minutes of mixed load (`make soak`); memory and descriptors must stay flat.

Short requests over new and kept connections, downloads, uploads and WebSockets one after another, HTTP/2 by h2load,
clients that stall in the handshake, clients that go away in the middle, and a reload every few seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from proxy.drill.clients import Attackers
from tests.harness.appliance import Appliance
from tests.harness.programs import program
from tests.harness.toml import to_toml
from tests.show.load import FAULTS, Clients, Pace
from tests.show.sight import AdminClient, Census, Document, census, gained, unrest

_H2LOAD = re.compile(r"^requests: .* (\d+) succeeded", re.MULTILINE)
_STREAMS = re.compile(r"^reverse_proxy_http2_streams_total (\d+)$", re.MULTILINE)
WORKERS = 2
STALLED = 100
SAMPLE_SECS = 10.0
RELOAD_EVERY_SAMPLES = 2
WARM_SHARE = 0.3
"""Caches fill and pools grow so long; what comes after is judged."""

MAX_GROWTH_PERCENT = 5.0
REST_SECS = 60.0
LONG_TIMEOUT_SECS = 60.0


@dataclass
class Soak:
    """What was seen."""

    minutes: float
    samples: list[Census] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    long: int = 0
    gone: int = 0
    reloads: int = 0
    http2: int = 0

    def table(self, clients: Clients, before: Census, after: Census) -> str:
        """For people, and for the documentation."""
        warm = self._warm()
        rows = ["| process | MB at the start | MB, first and last third under load | growth | descriptors at rest |"]
        rows.append("| --- | --- | --- | --- | --- |")
        for name in before.resident_bytes:
            first, last = self._thirds(name, warm)
            rows.append(
                f"| {name} | {before.resident_bytes[name] / 1e6:.1f} | {first / 1e6:.1f}, {last / 1e6:.1f} "
                f"| {100 * (last / first - 1):+.1f} % | {before.descriptors[name]}, then {after.descriptors[name]} |"
            )
        counts = clients.counts
        told = (
            f"{self.minutes:g} minutes: {counts['new']:,} requests on new connections, {counts['kept']:,} on kept "
            f"ones, {self.http2:,} over HTTP/2, {self.long} long exchanges, {self.gone:,} clients that went away in "
            f"the middle, {STALLED} that stall, {self.reloads} reloads; {counts['failed']} failed."
        )
        return "\n".join([told, "", *rows])

    def judge(self, clients: Clients, before: Census, after: Census) -> None:
        """Note what is not as it should be."""
        self.faults += map(str, clients.failures[:20])
        for name in before.resident_bytes:
            first, last = self._thirds(name, self._warm())
            if last > first * (1 + MAX_GROWTH_PERCENT / 100):
                self.faults.append(f"{name} grew from {first / 1e6:.1f} to {last / 1e6:.1f} MB under constant load")
        if more := gained(before, after):
            self.faults.append(f"descriptors are not as at the start: {more}")

    def judge_http2(self, metrics: str) -> None:
        """A reload ends connections by GOAWAY, after which h2load fails what it has not sent, and makes no new
        connection: so what counts is that each request that has come was answered."""
        come = _STREAMS.search(metrics)
        if come is None or int(come[1]) != self.http2:
            self.faults.append(f"{self.http2} answers over HTTP/2 to {come and come[1]} requests")

    def _warm(self) -> list[Census]:
        return self.samples[int(len(self.samples) * WARM_SHARE) :]

    @staticmethod
    def _thirds(name: str, warm: list[Census]) -> tuple[float, float]:
        sizes = [one.resident_bytes[name] for one in warm]
        third = max(1, len(sizes) // 3)
        return statistics.mean(sizes[:third]), statistics.mean(sizes[-third:])


def _go_away(clients: Clients, stop: threading.Event, soak: Soak) -> None:
    """Half a request, or a whole one whose answer nobody reads; then a reset."""
    number = 0
    while not stop.wait(0.05):
        number += 1
        with contextlib.suppress(*FAULTS), clients.tls(clients.tcp()) as wire:
            wire.send(b"GET /download HTTP/1.1\r\nHost: localhost\r\n" + (b"\r\n" if number % 2 else b""))
            wire.reset()
            soak.gone += 1


def _long_exchanges(clients: Clients, stop: threading.Event, soak: Soak) -> None:
    while not stop.is_set():
        pace = Pace()
        exchanges = clients.long(pace)
        stop.wait(2.0)
        pace.allow(1.0)
        for one in exchanges:
            if not one.ended.wait(LONG_TIMEOUT_SECS) or not one.intact:
                soak.faults.append(f"{one.kind}: {one.fault or 'never ended'} after {one.done_bytes} bytes")
            soak.long += 1


def _stall(port: int, stop: threading.Event) -> None:
    async def run() -> None:
        attackers = asyncio.create_task(Attackers(port, STALLED, ("127.0.1.1", "127.0.1.2")).run())
        await asyncio.to_thread(stop.wait)
        attackers.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await attackers

    asyncio.run(run())


def _http2(port: int, stop: threading.Event, soak: Soak) -> None:
    requests = 300
    command = ["h2load", "-n", str(requests), "-c", "4", "-m", "10", f"https://127.0.0.1:{port}/short"]
    while not stop.wait(1.0):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        counts = _H2LOAD.search(done.stdout)
        if counts is None or "Application protocol: h2\n" not in done.stdout:
            soak.faults.append(f"h2load: {done.stdout}{done.stderr[-200:]}")
            return
        soak.http2 += int(counts[1])


@contextlib.contextmanager
def _load(appliance: Appliance, soak: Soak) -> Iterator[Clients]:
    clients = Clients(appliance.port)
    stop = threading.Event()
    works = [
        threading.Thread(target=_go_away, args=(clients, stop, soak)),
        threading.Thread(target=_long_exchanges, args=(clients, stop, soak)),
        threading.Thread(target=_stall, args=(appliance.port, stop)),
        threading.Thread(target=_http2, args=(appliance.port, stop, soak)),
    ]
    clients.start()
    for work in works:
        work.start()
    try:
        yield clients
    finally:
        stop.set()
        clients.stop()
        for work in works:
            work.join()


def _at_rest(admin: AdminClient) -> Census:
    deadline = time.monotonic() + REST_SECS
    while True:
        status: Document = admin.ask("GET", "/status")
        if not unrest(status) or time.monotonic() > deadline:
            return census(status)
        time.sleep(0.5)


def soak(minutes: float) -> tuple[Soak, str]:
    """Run it; what was seen, and the table."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rp-soak-")))
        with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
            port: int = listener.getsockname()[1]
            command = [sys.executable, "-m", "tests.show.upstream", str(listener.fileno())]
            stack.enter_context(program(command, folder / "upstream.log", pass_fds=[listener.fileno()]))
        site = {
            "hosts": ["*"],
            "upstreams": [f"http://127.0.0.1:{port}"],
            "response_headers": {"set": {"X-Configuration": "a"}},
        }
        config = {
            "workers": WORKERS,
            "max_connections": 400,
            "upstream_idle_timeout_secs": 1,
            "drain_timeout_secs": 2 * LONG_TIMEOUT_SECS,  # a long exchange is not to be cut after a reload
            "sites": [site],
        }
        appliance = Appliance(folder, config)
        stack.callback(appliance.forget)
        stack.callback(appliance.kill)
        appliance.start()
        admin = AdminClient(appliance.admin_socket)
        seen = Soak(minutes)
        before = _at_rest(admin)
        ends_at = time.monotonic() + 60 * minutes
        with _load(appliance, seen) as clients:
            while time.monotonic() < ends_at:
                time.sleep(SAMPLE_SECS)
                seen.samples.append(census(admin.ask("GET", "/status")))
                if len(seen.samples) % RELOAD_EVERY_SAMPLES == 0:
                    appliance.path.write_text(to_toml({**appliance.config, "max_connections": 400 + seen.reloads % 2}))
                    document = admin.ask("POST", "/reload")
                    seen.reloads += 1
                    if document["result"] != "accepted":
                        seen.faults.append(f"reload {seen.reloads}: {document}")
        after = _at_rest(admin)
        seen.judge_http2(appliance.health("/metrics")[1].decode())
        seen.judge(clients, before, after)
        admin.close()
        appliance.stop()
        return seen, seen.table(clients, before, after)


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.show.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (10)")
    options = parser.parse_args()
    if shutil.which("h2load") is None:
        parser.error("h2load is missing: apt-get install nghttp2-client")
    seen, table = soak(options.minutes)
    print(table)
    for fault in seen.faults:
        print(f"fault: {fault}")
    print("failed" if seen.faults else "flat: no fault")
    return 1 if seen.faults else 0


if __name__ == "__main__":
    sys.exit(main())
