"""Logs that cannot be written, and a fault that repeats without end: traffic goes on, and the log stays small."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import StartAppliance
from tests.harness.appliance import Appliance
from tests.harness.processes import wait_until
from tests.harness.upstream import RawUpstream

GET = b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n"
STORM_SECS = 30.0

# A callback of the worker's event loop that raises on each turn of it, for so long, and counts.
RAISING = f"""
import asyncio, time
from proxy.worker.main import Worker

run = Worker.run
async def raising(self):
    loop, until, count = asyncio.get_running_loop(), time.monotonic() + {STORM_SECS}, 0
    def again():
        nonlocal count
        if time.monotonic() < until:
            count += 1
            loop.call_later(0.001, again)
            raise ValueError("on each wake-up")
        with open(self._context.settings.state_dir + "/raised", "w") as file:
            file.write(str(count))
    loop.call_soon(again)
    await run(self)
Worker.run = raising
"""


def served(one: Appliance, count: int = 20) -> None:
    with one.connect() as client:
        for number in range(count):
            assert client.request(GET % str(number).encode()).status == 200


def test_a_callback_that_raises_on_each_wake_up(
    appliance: StartAppliance, upstream: Callable[..., RawUpstream], tmp_path: Path
) -> None:
    state = tmp_path / "state"
    config = {"state_dir": str(state), "sites": [{"hosts": ["*"], "upstreams": [upstream().url]}]}
    one = appliance(config | {"upstream_idle_timeout_secs": 1}, prelude=RAISING)
    raised = state / "raised"
    while not raised.exists():
        served(one, 5)
        threading.Event().wait(1)
    total = int(raised.read_text())
    assert total > 100
    # The first whole, one each 10 s, one at the end: n windows are n + 2 lines.
    wait_until(lambda: any(" ended=true " in line for line in one.event_lines()), "the end is told", 60)
    mine = [line for line in one.event_lines() if " loop.ValueError." in line]
    assert 3 <= len(mine) <= 2 + STORM_SECS / 10 * 2
    assert "Traceback" in mine[0]
    assert int(re.findall(r" count=(\d+) ", mine[-1])[0]) == total
    summaries = sum(int(number) for line in mine for number in re.findall(r" suppressed=(\d+) ", line))
    assert 1 + summaries == total
    metrics = one.health("/metrics")[1].decode()
    (signature,) = {line.split(" ")[2] for line in mine}
    assert f'reverse_proxy_events_total{{signature="{signature}"}} {total}\n' in metrics
    assert f'reverse_proxy_events_suppressed_total{{signature="{signature}"}} {total - 1}\n' in metrics


@pytest.mark.parametrize("fault", ["full disk", "removed folder", "read-only file"])
def test_a_log_that_cannot_be_written_stops_nothing(
    appliance: StartAppliance, upstream: Callable[..., RawUpstream], tmp_path: Path, fault: str
) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    paths = {"full disk": "/dev/full"}
    path = paths.get(fault, str(logs / "access.log"))
    sites = [{"hosts": ["*"], "upstreams": [upstream().url], "routes": []}]
    one = appliance({"sites": sites, "access_log": {"path": path}, "upstream_idle_timeout_secs": 1})
    served(one)
    if fault == "removed folder":
        shutil.rmtree(logs)
    elif fault == "read-only file":
        wait_until(lambda: Path(path).read_bytes().count(b"\n") == 20, "the lines are there")
        subprocess.run(["chattr", "+i", path], check=True)
    try:

        def lost() -> int:
            served(one, 3)
            return int(one.status()["totals"]["access_lines_dropped"])

        wait_until(lost, "lines are counted as dropped", 60)
        wait_until(lambda: any(" access_log.dropped " in line for line in one.event_lines()), "the event log tells", 30)
    finally:
        if fault == "read-only file":
            subprocess.run(["chattr", "-i", path], check=True)
    assert one.ready()
    assert len(one.event_lines()) < 40
    if fault == "removed folder":
        logs.mkdir()
    if fault != "full disk":  # it is found again by itself

        def written() -> bool:
            served(one, 3)
            return os.path.exists(path) and b"GET /2 " in Path(path).read_bytes()

        before = Path(path).stat().st_size if os.path.exists(path) else 0
        wait_until(lambda: written() and Path(path).stat().st_size > before, "lines are written again", 60)


def test_a_reader_of_standard_output_that_stops_reading(
    appliance: StartAppliance, upstream: Callable[..., RawUpstream], tmp_path: Path
) -> None:
    fifo = tmp_path / "stdout"
    os.mkfifo(fifo)
    reading = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        config = {
            "sites": [{"hosts": ["*"], "upstreams": [upstream().url]}],
            "access_log": {"path": "stdout", "format": "json"},
            "event_log": {"path": "stdout"},
            "upstream_idle_timeout_secs": 1,
        }
        one = appliance(config, through=(sys.executable, "-c", ONTO % str(fifo)))
        for _ in range(10):  # much more than a pipe takes (64 KB), and nobody reads it
            served(one, 40)
        assert one.ready()
        one.stop()
        first = os.read(reading, 1 << 20).decode()
    finally:
        os.close(reading)
    lines = [line for line in first.splitlines() if line.startswith("{") and line.endswith("}")]
    assert 0 < len(lines) < 400
    assert {json.loads(line)["status"] for line in lines} == {200}


ONTO = "import os, sys; os.dup2(os.open(%r, os.O_WRONLY), 1); os.execvp(sys.argv[1], sys.argv[1:])"
