"""C2: what does not fit is refused with the arithmetic, and what the budget says is what running processes use."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import StartAppliance
from tests.harness import Appliance, FreePorts, RawUpstream, Wire, cli, connect_tcp, descriptor_count, wait_until
from tests.harness.toml import to_toml

REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
Write = Callable[..., str]


@pytest.fixture
def config(tmp_path: Path) -> Write:
    """``config(key=value)`` writes a configuration of which everything but the budget is good, and which can run."""

    def write(**changed: object) -> str:
        ports = FreePorts()
        base: dict[str, object] = {
            "state_dir": str(tmp_path / "state"),
            "listeners": [{"address": f"127.0.0.1:{ports.take()}"}],
            "redirect": {"enabled": False},
            "health": {"address": f"127.0.0.1:{ports.take()}"},
            "admin": {"socket": "/tmp/rp-budget-test.sock"},
            "sites": [{"hosts": ["*"], "upstreams": ["http://127.0.0.1:9"]}],
        }
        ports.release()
        path = tmp_path / "proxy.toml"
        path.write_text(to_toml(base | changed))
        return str(path)

    return write


@pytest.mark.parametrize("command", ["check", "check under the limit", "run"])
def test_the_incidents_shape_is_refused_with_the_arithmetic(config: Write, command: str) -> None:
    """One worker, 1024 connections, 1024 descriptors soft and hard: equality was exactly the incident."""
    path = config(workers=1, max_connections=1024)
    if command == "check":
        result = cli("check", "--config", path, "--nofile", "1024:1024")
    elif command == "run":
        result = cli("run", "--config", path, nofile=(1024, 1024))
    else:
        result = cli("check", "--config", path, nofile=(1024, 1024))
    assert result.returncode == 2, result
    # 1024 clients, 1024 upstreams, 1 refused, 1 listener, 2 logs, 2 channel ends, a reserve of 64.
    assert "max_connections = 1024 needs 2118 descriptors in a worker" in result.stderr
    assert "the limit is 1024 (soft) / 1024 (hard)" in result.stderr
    assert "set LimitNOFILE=3072, or max_connections to at most 477" in result.stderr
    assert "Traceback" not in result.stderr
    assert (
        "worker 0 = 1024 client connections (share of 1024) + 1024 upstream connections (share of 1024) + 1 connection"
        " being refused or handed over + 1 listening sockets + 2 logs + 2 event channel + 64 reserve = 2118"
    ) in result.stderr


def test_what_it_advises_is_true(config: Write) -> None:
    assert cli("check", "--config", config(max_connections=477), "--nofile", "1024:1024").returncode == 0
    assert cli("check", "--config", config(max_connections=478), "--nofile", "1024:1024").returncode == 2
    assert cli("check", "--config", config(max_connections=1024), "--nofile", "3072").returncode == 0


def test_the_incidents_container_starts_raised_and_says_so(appliance: StartAppliance) -> None:
    one = appliance({"max_connections": 1024}, nofile=(1024, 19_000))
    needed = 2 * 1024 + 1 + 2 + 2 + 2 + 64 + 64
    for pid in (one.pid, one.control, *one.workers):
        limits = Path(f"/proc/{pid}/limits").read_text()
        assert f"Max open files            {needed}" in limits, limits
    wait_until(lambda: any(f"from 1024 to {needed}" in line for line in one.event_lines()), "it is said")


@pytest.mark.parametrize("key", ["max_connections", "max_upstream_connections"])
def test_fewer_connections_than_workers_are_refused(config: Write, key: str) -> None:
    result = cli("check", "--config", config(**{"workers": 4, "max_connections": 100, key: 3}), "--nofile", "8192")
    assert result.returncode == 2
    assert f"{key}: found 3; wanted at least 4, the number of workers" in result.stderr
    good = cli("check", "--config", config(**{"workers": 4, "max_connections": 100, key: 4}), "--nofile", "8192")
    assert good.returncode == 0


def test_a_low_limit_is_warned_about_and_a_chosen_one_is_not(config: Write) -> None:
    path = config(max_connections=100)
    for limit, warned in (("1024", True), ("300", True), ("1025", False), ("unlimited", False)):
        result = cli("check", "--config", path, "--nofile", limit)
        assert (result.returncode, "warning: the descriptor limit is" in result.stdout) == (0, warned), result


def test_unlimited_skips_the_check(config: Write) -> None:
    result = cli("check", "--config", config(max_connections=500_000), "--nofile", "unlimited", "--json")
    assert (result.returncode, json.loads(result.stdout)["budget"]["verdict"]) == (0, "skipped")


def test_a_second_instance_is_refused_while_the_first_goes_on_serving(
    appliance: StartAppliance, upstream: Callable[..., RawUpstream], config: Write
) -> None:
    """The first one's sockets have SO_REUSEPORT, so without the probe the kernel would let the second one share."""
    first = appliance(upstream=upstream().url)
    listener = {"address": f"127.0.0.1:{first.port}"}
    stop = threading.Event()
    failures: list[object] = []
    answers = 0

    def visit() -> None:
        nonlocal answers
        while not stop.is_set():
            try:
                with first.connect() as wire:
                    response = wire.request(REQUEST)
                    if response.body != b"ok":
                        failures.append(response)
                    answers += 1
            except OSError as error:
                failures.append(error)

    thread = threading.Thread(target=visit)
    thread.start()
    try:
        for path in (str(first.path), config(listeners=[listener])):
            result = cli("run", "--config", path)
            assert result.returncode == 1, result
            assert f"port {first.port} is in use by pid {first.pid}" in result.stderr
            assert "Traceback" not in result.stderr
    finally:
        stop.set()
        thread.join()
    assert failures == []
    assert answers > 0
    assert first.ready()


# -- the arithmetic against reality


def test_a_full_appliance_uses_what_the_budget_says(
    appliance: StartAppliance, upstream: Callable[..., RawUpstream]
) -> None:
    """Every permit with an exchange in flight, and every small listener full, under the very limit that it needs."""
    permits, redirects, healths = 20, 5, 6
    answer = threading.Event()

    def wait_and_answer(wire: Wire) -> None:
        with contextlib.suppress(EOFError):
            while True:
                wire.read_head()
                answer.wait(60)
                wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    needed = 2 * permits + redirects + 1 + 2 + 2 + 2 + 64
    one = appliance(
        {
            "max_connections": permits,
            "redirect": {"max_connections": redirects},
            "health": {"max_connections": healths},
        },
        upstream=upstream(wait_and_answer).url,
        nofile=needed,
    )
    budget = json.loads(cli("check", "--config", str(one.path), "--nofile", str(needed), "--json").stdout)["budget"]
    totals = {process["name"]: process["total"] for process in budget["processes"]}
    assert totals["worker 0"] == needed
    (worker,) = one.workers
    idle = {"worker 0": descriptor_count(worker), "control": descriptor_count(one.control)}

    held = [one.connect() for _ in range(permits)]
    for wire in held:
        wire.send(REQUEST)
    held_redirects = [one.connect_redirect() for _ in range(redirects)]
    # More than there are permits: they wait in the kernel and cost nothing.
    waiting = [socket.create_connection(("127.0.0.1", one.port), 10) for _ in range(10)]
    waiting += [socket.create_connection(("127.0.0.1", one.redirect_port), 10) for _ in range(10)]

    def status() -> dict[str, int]:
        found: dict[str, int] = one.status()["workers"][0]
        return found

    wait_until(lambda: status()["upstream_open"] == permits, "every exchange has its upstream connection")
    wait_until(lambda: status()["redirect_connections"] == redirects, "every redirect permit is held")
    assert status()["permits_held"] == permits
    full = descriptor_count(worker)
    print(f"worker: {idle['worker 0']} idle, {full} full, budget {needed}; control {idle['control']} idle")
    # Counted once a connection, with one for a look at /proc of the worker's own.
    assert 0 <= full - idle["worker 0"] - (2 * permits + redirects) <= 1
    assert full <= needed - 32, "half of the reserve is untouched"

    try:
        healthy = [connect_tcp(one.health_port) for _ in range(healths)]
        wait_until(lambda: descriptor_count(one.control) >= idle["control"] + healths, "they are accepted")
        assert descriptor_count(one.control) <= totals["control"] - 32
        for wire in healthy:
            wire.close()
        assert descriptor_count(one.pid) <= totals["master"] - 32
        assert one.health()[0] == 200
    finally:
        answer.set()
    for wire in held:
        assert wire.read_response().body == b"ok"
    for wire in (*held, *held_redirects):
        wire.close()
    for sock in waiting:
        sock.close()
    wait_until(lambda: status()["permits_held"] == 0, "all is given back", 20)
    assert not any("emfile" in line for line in one.event_lines())


def test_auto_is_the_most_and_it_can_be_filled(appliance: StartAppliance, upstream: Callable[..., RawUpstream]) -> None:
    one: Appliance = appliance(
        {"max_connections": "auto", "redirect": {"enabled": False}}, upstream=upstream().url, nofile=160
    )
    permits: int = one.status()["workers"][0]["permits"]
    assert permits == (160 - 64 - 2 - 2 - 1 - 1) // 2
    held = [one.connect() for _ in range(permits)]
    start = time.monotonic()
    for wire in held:
        assert wire.request(REQUEST).status == 200
    print(f"{permits} clients served in {time.monotonic() - start:.2f} s")
    assert not any("emfile" in line for line in one.event_lines())
    for wire in held:
        wire.close()
