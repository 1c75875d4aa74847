"""What the scenarios' own tests have in common: a failure shows what the proxies' hosts say."""

from __future__ import annotations

import faulthandler
from collections.abc import Generator

import pytest
import testinfra

from tests.testinfra.conftest import EVIDENCE
from tests.testinfra.fleet import INVENTORY


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds status and journal of every proxy."""
    report = yield
    if report.failed:
        for host in testinfra.get_hosts(["ansible://proxies"], ansible_inventory=INVENTORY):
            for title, command in EVIDENCE.items():
                ran = host.run(command)
                report.sections.append((f"{title} of {host.backend.host}", ran.stdout + ran.stderr))
    return report


@pytest.fixture(autouse=True)
def minutes_are_no_hang() -> None:
    """No dump of every stack after a time that a playbook may take."""
    faulthandler.cancel_dump_traceback_later()
