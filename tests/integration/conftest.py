"""The ``stage`` of a test: its module's ``theatre`` (an ``open_stage``), struck when the test is over."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import APPLIANCES
from tests.harness.stage import Stage


@pytest.fixture
def stage(theatre: Stage, request: pytest.FixtureRequest) -> Iterator[Stage]:
    request.node.stash[APPLIANCES] = [theatre.appliance]
    yield theatre
    theatre.strike()


def fields_of(message: bytes) -> list[tuple[str, str]]:
    """The header fields of a message, in order."""
    lines = message.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")[1:]
    return [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]
