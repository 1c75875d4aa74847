"""The rig of the stream tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.stream.rig import Rig


@pytest.fixture
def rig() -> Iterator[Rig]:
    one = Rig()
    yield one
    one.close()
