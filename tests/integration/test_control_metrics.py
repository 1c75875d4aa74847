"""`/metrics`: what is counted, under which labels, and that it answers whatever the workers are at."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable

import pytest

from tests.conftest import StartAppliance
from tests.harness import Appliance, RawUpstream, cli, connect_tls, wait_until
from tests.harness.toml import to_toml

Series = dict[str, float]

METRIC_LIMIT_SECS = 0.1
"""Within this it must answer; ten times so many are allowed, for a busy machine."""


def metrics(one: Appliance) -> tuple[Series, str]:
    status, body = one.health("/metrics")
    assert status == 200, body
    lines = [line for line in body.decode().splitlines() if not line.startswith("#")]
    series = {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}
    assert len(series) == len(lines), "no series is there twice"
    return series, body.decode()


def value(one: Appliance, name: str) -> float:
    return metrics(one)[0].get(f"reverse_proxy_{name}", 0.0)


def counts(one: Appliance, name: str, count: float) -> bool:
    return value(one, name) == count


def ask(one: Appliance, request: bytes) -> int:
    with one.connect() as wire:
        return wire.request(request).status


def sites(url: str) -> dict[str, object]:
    return {
        "workers": 4,
        "max_connections": 40,
        "sites": [
            {"hosts": ["localhost"], "upstreams": [url]},
            {"hosts": ["127.0.0.1"], "upstreams": ["http://127.0.0.1:9"]},
        ],
    }


def test_requests_by_site_method_and_code_over_four_workers(
    appliance: StartAppliance, upstream: Callable[..., RawUpstream]
) -> None:
    url = upstream().url
    one = appliance(sites(url))
    for _ in range(8):
        assert ask(one, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n") == 200
    assert ask(one, b"BREW / HTTP/1.1\r\nHost: localhost\r\n\r\n") == 200
    assert ask(one, b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n") == 502
    assert ask(one, b"GET / HTTP/1.1\r\nHost: elsewhere.example.org\r\n\r\n") == 421
    assert ask(one, b"GET / HTTP/1.1\nHost: localhost\n\n") == 400
    expected = {
        'requests_total{site="localhost",method="GET",code="200"}': 8,
        'requests_total{site="localhost",method="other",code="200"}': 1,
        'requests_total{site="127.0.0.1",method="GET",code="502"}': 1,
        'requests_total{site="other",method="GET",code="421"}': 1,
        'requests_total{site="other",method="other",code="400"}': 1,
        'request_duration_seconds_count{site="localhost"}': 9,
        'request_duration_seconds_bucket{site="localhost",le="+Inf"}': 9,
        'upstream_backend_failures_total{backend="http://127.0.0.1:9"}': 1,
        'tls_handshakes_total{result="ok"}': 12,
        "refusals_total": 3,
    }
    for name, count in expected.items():
        wait_until(functools.partial(counts, one, name, count), f"{name} is {count}")
    series, text = metrics(one)
    assert sum(number for name, number in series.items() if "permits_limit" in name) == 40
    assert "elsewhere" not in text
    assert "BREW" not in text
    assert any(name.startswith("reverse_proxy_certificate_expiry_timestamp_seconds{") for name in series)
    ends = [number for name, number in series.items() if "certificate_expiry" in name]
    assert all(number > time.time() for number in ends)
    for kind in ("worker", "control", "master"):
        assert series[f'reverse_proxy_descriptors_needed{{kind="{kind}"}}'] > 64
        assert series[f'reverse_proxy_descriptors_headroom{{kind="{kind}"}}'] > 0


def test_counts_outlive_a_killed_worker(appliance: StartAppliance, upstream: Callable[..., RawUpstream]) -> None:
    one = appliance({"workers": 1}, upstream=upstream().url)
    counted = 'requests_total{site="*",method="GET",code="200"}'
    for _ in range(3):
        assert ask(one, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n") == 200
    wait_until(lambda: value(one, counted) == 3, "they are counted")
    (worker,) = one.workers
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: one.workers not in ((), (worker,)) and one.ready(), "a new worker is ready")
    assert ask(one, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n") == 200
    wait_until(lambda: value(one, counted) == 4, "the new one counts on")
    assert value(one, 'worker_restarts_total{worker="0"}') == 1
    assert value(one, 'events_total{signature="worker.died"}') == 1


def test_a_site_that_comes_with_a_reload_is_counted_under_its_name(
    appliance: StartAppliance, upstream: Callable[..., RawUpstream]
) -> None:
    url = upstream().url
    one = appliance({"workers": 2, "sites": [{"hosts": ["localhost"], "upstreams": [url]}]})
    assert ask(one, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n") == 200
    before = one.path.read_text()
    one.path.write_text(to_toml(one.config | {"sites": [{"hosts": ["127.0.0.1"], "upstreams": [url]}]}))
    assert cli("reload", "--socket", one.admin_socket).returncode == 0
    one.path.write_text(before + "\nnonsense = 1\n")
    assert cli("reload", "--socket", one.admin_socket).returncode == 2
    with connect_tls(one.port) as wire:
        assert wire.request(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n").status == 200
    for name in ("127.0.0.1", "localhost"):
        counted = f'requests_total{{site="{name}",method="GET",code="200"}}'
        wait_until(functools.partial(counts, one, counted, 1), f"{counted} is 1")
    assert value(one, 'reloads_total{result="accepted"}') == 1
    assert value(one, 'reloads_total{result="refused"}') == 1
    assert value(one, "generation") == 2


def test_promtool_finds_nothing_to_say(appliance: StartAppliance, upstream: Callable[..., RawUpstream]) -> None:
    promtool = shutil.which("promtool")
    assert promtool is not None, "Debian's package prometheus has it"
    one = appliance(sites(upstream().url))
    ask(one, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    ask(one, b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    wait_until(lambda: value(one, 'request_duration_seconds_count{site="localhost"}'), "a request is counted")
    result = subprocess.run([promtool, "check", "metrics"], input=metrics(one)[1], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", ""), result


@pytest.mark.timeout(200)
def test_it_answers_while_every_worker_is_at_its_limits(appliance: StartAppliance) -> None:
    one = appliance({"workers": 4, "max_connections": 8, "redirect": {"max_connections": 4}})
    with contextlib.ExitStack() as stack:
        for _ in range(60):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", one.port)))
            client.setblocking(False)
        wait_until(lambda: value(one, 'open_connections{listener="https"}') == 8, "all permits are held")
        for pid in one.workers:
            hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{pid}/fd")), hard))
        took = []
        series: Series = {}
        for _ in range(10):
            asked = time.monotonic()
            series, _text = metrics(one)
            took.append(time.monotonic() - asked)
        assert max(took) < 10 * METRIC_LIMIT_SECS, took
        held = [number for name, number in series.items() if name.startswith("reverse_proxy_permits_held{")]
        assert sum(held) == 8
        assert len(held) == 4


def test_accept_errors_by_errno(appliance: StartAppliance) -> None:
    one = appliance({"workers": 1})
    (worker,) = one.workers
    soft, hard = resource.prlimit(worker, resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir(f"/proc/{worker}/fd")}
    lowest = next(number for number in range(soft) if number not in used)
    resource.prlimit(worker, resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        with contextlib.suppress(OSError), connect_tls(one.port, timeout_secs=0.2):
            pass
        wait_until(lambda: value(one, 'accept_errors_total{errno="EMFILE"}') >= 1, "it is counted")
    finally:
        resource.prlimit(worker, resource.RLIMIT_NOFILE, (soft, hard))
    assert re.search(r'events_total\{signature="accept.emfile"\} [1-9]', metrics(one)[1])
