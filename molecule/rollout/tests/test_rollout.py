"""The rollout of a fleet under a client that never stops. The tests build on each other, in this order."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.testinfra.fleet import Installed, host, installed, program, report, run_playbook, status, wheelhouse_of

pytestmark = pytest.mark.timeout(2400)

HOSTS = ("web1", "web2")
CLIENT = "client1"
REPORT = "/run/steady.json"
LEAST_ANSWERS = 20
"""Of a host and a kind of connection: that the client was there all the time."""
IN_NO_TIME_SECS = 1e-6
"""A bar that no proxy reaches."""
GOOD = "99.0.0"
NEVER_READY = "99.0.1"
HANG = ("proxy/worker/main.py", "uvloop.run(main())", "import time; time.sleep(3600)")
"""A worker that starts, and never says that it accepts."""

Traffic = Callable[[], dict[str, Any]]


@pytest.fixture
def traffic() -> Iterator[Traffic]:
    """A client that asks all hosts all the time; calling it ends it and returns what it saw."""
    with program(CLIENT, "steady", "steady_client.py", REPORT, *HOSTS) as stop:

        def seen() -> dict[str, Any]:
            stop()
            return report(CLIENT, REPORT)

        yield seen


def all_installed() -> dict[str, Installed]:
    """What the fleet has on disk and runs."""
    return {name: installed(name) for name in HOSTS}


def table(output: str) -> dict[str, list[str]]:
    """The rows of the summary by host: release, configuration, result, seconds."""
    summary = output.partition("PLAY RECAP")[0].rpartition("TASK [Print the table]")[2]
    print(summary)
    rows = [re.split(r" {2,}", row) for row in re.findall(r'^[\s"\'-]*(web\d  .*?)["\',]*$', summary, re.MULTILINE)]
    found = {row[0]: row[1:] for row in rows}
    assert set(found) == set(HOSTS), output
    return found


def assert_nothing_failed(seen: dict[str, Any]) -> None:
    """Every request was answered, and there were requests all the time."""
    print(seen)
    assert seen["failures"] == 0, seen["failed"]
    for name in HOSTS:
        assert seen["answered"][name]["new"] >= LEAST_ANSWERS
        assert seen["answered"][name]["kept"] >= LEAST_ANSWERS


def test_an_upgrade_fails_no_request(traffic: Traffic, tmp_path: Path) -> None:
    before = all_installed()
    ran = run_playbook("rollout.yml", proxy_wheelhouse=wheelhouse_of(tmp_path, GOOD))
    assert ran.returncode == 0, ran.stdout
    assert_nothing_failed(traffic())
    assert len(re.findall(r"caps per client: .*; one address, no caps: ", ran.stdout)) == len(HOSTS), "a drill on each"
    for name, row in table(ran.stdout).items():
        after = installed(name)
        assert after.release.startswith(f"{GOOD}-")
        assert after.main_pid != before[name].main_pid
        assert status(name)["version"] == GOOD
        assert row[0] == f"{before[name].release} -> {after.release}"
        assert row[1:3] == [after.config[:8], "rolled out"]
        assert int(row[3]) > 0


def test_a_release_that_never_becomes_ready_is_taken_back_and_stops_the_fleet(traffic: Traffic, tmp_path: Path) -> None:
    before = all_installed()
    ran = run_playbook("rollout.yml", proxy_wheelhouse=wheelhouse_of(tmp_path, NEVER_READY, *HANG))
    assert ran.returncode != 0, ran.stdout
    assert_nothing_failed(traffic())
    rows = table(ran.stdout)
    assert rows["web1"][:3] == [before["web1"].release, before["web1"].config[:8], "put back"]
    assert rows["web2"][2:] == ["not reached", "-"]
    after = all_installed()
    assert after["web2"] == before["web2"]
    assert (after["web1"].release, after["web1"].config) == (before["web1"].release, before["web1"].config)
    assert after["web1"].main_pid == before["web1"].main_pid, "the master before goes on"
    assert status("web1")["version"] == GOOD


def test_a_missed_bar_of_the_drill_is_told_taken_back_and_stops_the_fleet(traffic: Traffic) -> None:
    before = all_installed()
    config = {
        "max_connections": 200,
        "drill": {"min_good_percent": 0, "max_event_lines": 200, "max_recovery_secs": IN_NO_TIME_SECS},
        "listeners": [{"address": "0.0.0.0:443"}],
        "sites": [{"hosts": ["www.example.org"], "upstreams": ["http://127.0.0.1:3000"]}],
    }
    ran = run_playbook("rollout.yml", proxy_config=config)
    assert ran.returncode != 0, ran.stdout
    assert_nothing_failed(traffic())
    assert re.search(r"the drill failed .*drill\.max_recovery_secs is 1e-06", " ".join(ran.stdout.split())), ran.stdout
    rows = table(ran.stdout)
    assert (rows["web1"][2], rows["web2"][2]) == ("put back", "not reached")
    after = all_installed()
    assert after["web2"] == before["web2"]
    assert (after["web1"].release, after["web1"].config) == (before["web1"].release, before["web1"].config)


def test_what_preflight_rejects_touches_no_host(traffic: Traffic) -> None:
    before = all_installed()
    sites = [{"hosts": ["www.example.org"], "upstreams": ["http://127.0.0.1:3000"]}]
    ran = run_playbook("rollout.yml", proxy_config={"max_connections": 6000, "sites": sites})
    assert ran.returncode != 0, ran.stdout
    assert_nothing_failed(traffic())
    assert re.search(r"max_connections = 6000 needs \d+ descriptors", ran.stdout), "the arithmetic is told"
    assert {row[2] for row in table(ran.stdout).values()} == {"refused by preflight"}
    assert all_installed() == before


def test_what_the_daemon_rejects_touches_no_host(traffic: Traffic) -> None:
    """Preflight cannot see this one: the certificate is looked for on the host, by the release's own check.

    The release is another one than the one that serves: that of the beginning, which the host still has.
    """
    before = all_installed()
    config = {
        "listeners": [
            {"address": "0.0.0.0:443", "certificates": [{"chain": "tls/no-chain.pem", "key": "tls/no-key.pem"}]}
        ],
        "sites": [{"hosts": ["www.example.org"], "upstreams": ["http://127.0.0.1:3000"]}],
    }
    ran = run_playbook("rollout.yml", proxy_config=config)
    assert ran.returncode != 0, ran.stdout
    assert_nothing_failed(traffic())
    assert "no-chain.pem" in ran.stdout
    rows = table(ran.stdout)
    assert (rows["web1"][2], rows["web2"][2]) == ("put back", "not reached")
    assert all_installed() == before


def test_rollback_by_hand_fails_no_request(traffic: Traffic) -> None:
    before = all_installed()
    ran = run_playbook("rollback.yml")
    assert ran.returncode == 0, ran.stdout
    assert_nothing_failed(traffic())
    for name in HOSTS:
        after = installed(name)
        assert not after.release.startswith(f"{GOOD}-")
        assert after.config == before[name].config
        assert after.main_pid != before[name].main_pid
        assert status(name)["version"] == after.release.rpartition("-")[0]


def test_behind_a_balancer_a_host_is_drained_first() -> None:
    """It ends in order and is started, instead of handing over; where nothing has changed, too."""
    before = all_installed()
    ran = run_playbook("rollout.yml", rollout_drain=True)
    assert ran.returncode == 0, ran.stdout
    assert {row[2] for row in table(ran.stdout).values()} == {"unchanged"}
    for name in HOSTS:
        after = installed(name)
        assert (after.release, after.config) == (before[name].release, before[name].config)
        assert after.main_pid != before[name].main_pid
        journal = host(name).check_output("journalctl --unit=reverse-proxy --output=cat --no-pager --boot")
        assert " stopping " in journal.rpartition(" upgrade.handed_over ")[2], "it was drained, not replaced"
        assert status(name)["ready"]
