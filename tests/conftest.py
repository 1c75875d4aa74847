"""Fixtures of the whole suite. What a test did not end itself is ended here, by pid, also when it fails."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import hypothesis
import pytest

from tests.harness import Appliance, RawUpstream, Script, Wire

# No test judges a speed, so a busy machine is no failure. CI tries the same examples each time.
hypothesis.settings.register_profile(
    "suite",
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("suite")

APPLIANCES = pytest.StashKey[list[Appliance]]()
FAILED = pytest.StashKey[bool]()
THREAD_SECS = 10
"""For a thread of a test that has failed to see that its connections are closed."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[FAILED] = True
        for appliance in item.stash.get(APPLIANCES, []):
            report.sections.append((f"appliance in {appliance.folder}", appliance.evidence()))
    return report


class StartAppliance(Protocol):
    """Starts an appliance, ready when this returns; arguments as for ``Appliance``."""

    def __call__(self, config: str | dict[str, Any] | None = None, **options: Any) -> Appliance: ...


@pytest.fixture(autouse=True)
def nothing_left_of_a_failure(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test that failed did not close is closed here, lest the next tests are blamed for it.

    A test that passes closes what it opens, and fails by a ResourceWarning where it does not.
    """
    threads, wires = set(threading.enumerate()), weakref.WeakSet(Wire.open)
    yield
    if request.node.stash.get(FAILED, False):
        for wire in set(Wire.open) - set(wires):
            wire.close()
        for thread in set(threading.enumerate()) - threads:
            thread.join(THREAD_SECS)
        gc.collect()


@pytest.fixture
def appliance(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[StartAppliance]:
    """``appliance(config, upstream=url, nofile=(soft, hard))`` starts one; each is stopped and judged at the end."""
    started: list[Appliance] = []
    request.node.stash[APPLIANCES] = started

    def start(config: str | dict[str, Any] | None = None, **options: Any) -> Appliance:
        folder = tmp_path / f"appliance{len(started)}"
        folder.mkdir()
        one = Appliance(folder, config, **options)
        started.append(one)
        one.start()
        return one

    try:
        yield start
        if not request.node.stash.get(FAILED, False):
            for one in started:
                if one.running:
                    one.stop()
    finally:
        for one in started:
            one.kill()
            one.forget()


@pytest.fixture
def upstream() -> Iterator[Callable[..., RawUpstream]]:
    """``upstream(script)`` plays ``script`` on each connection; without one it always answers 200 ``ok``."""
    with ExitStack() as stack:

        def start(script: Script | None = None, **options: Any) -> RawUpstream:
            return stack.enter_context(RawUpstream(script, **options))

        yield start
