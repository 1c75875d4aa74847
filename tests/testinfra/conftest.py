"""What a host must look like after a rollout.

Molecule runs these tests on the hosts of a scenario. On other hosts, which are only looked at::

    pytest --hosts=ssh://root@proxy1.example.org,ssh://root@proxy2.example.org tests/testinfra/service
    pytest --hosts='ansible://proxies' --ansible-inventory=inventory tests/testinfra/service

Without ``--hosts`` nothing here is collected: the machine that runs a test suite is no such host.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

EVIDENCE = {
    "systemctl status": "systemctl --no-pager --full status reverse-proxy.service",
    "journal": "journalctl --no-pager --boot --lines 60 --unit reverse-proxy.service",
    "failed units": "systemctl --no-pager --plain --failed",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds what a scenario or an operator has chosen."""
    group = parser.getgroup("reverse-proxy")
    group.addoption("--nofile", type=int, default=8192, help="descriptor limit of the service (ulimits_nofile)")


def _hosts_are_named(config: pytest.Config) -> bool:
    return config.getoption("hosts") is not None or config.getoption("connection") is not None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Nothing, unless hosts are named."""
    return None if _hosts_are_named(config) else True


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Says why nothing is collected."""
    if _hosts_are_named(config):
        return []
    return ["tests/testinfra: no host is named, so nothing is looked at: --hosts=ssh://root@proxy1.example.org"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds the host's own words to a failure."""
    report = yield
    host = getattr(item, "funcargs", {}).get("host")
    if report.failed and host is not None:
        for title, command in EVIDENCE.items():
            ran = host.run(command)
            report.sections.append((f"{title} of {host.backend.get_pytest_id()}", ran.stdout + ran.stderr))
    return report


BOOTS = pytest.StashKey[dict[str, str]]()


@pytest.fixture(autouse=True)
def own_host(host: Any, request: pytest.FixtureRequest) -> None:
    """The test talks with the host that it names: a connection shared by mistake would prove one host many times."""
    name = host.backend.get_pytest_id()
    boot, _, hostname = host.check_output(
        "cat /etc/machine-id; systemctl show --property UserspaceTimestampMonotonic; hostname"
    ).rpartition("\n")
    owner = request.config.stash.setdefault(BOOTS, {}).setdefault(boot, name)
    assert owner == name, f"{name} is the machine, and in the boot, of {owner}: both connections lead to one host"
    if "MOLECULE_SCENARIO_NAME" in os.environ:
        assert hostname == host.backend.host
