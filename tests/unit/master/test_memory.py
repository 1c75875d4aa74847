"""The memory of the worst case: which limit counts, and when `check` warns."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from proxy.budget import Inputs, Limits, calculate
from proxy.config.load import load_text
from proxy.config.schema import Settings
from proxy.master.memory import MemoryBudget, available_memory, client_bytes, memory_budget, mib

MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
SITE = '[[sites]]\nhosts = ["*"]\nupstreams = ["http://127.0.0.1:1"]\n'


def settings(text: str = "") -> Settings:
    return load_text(text + SITE, file="test", base_dir=None)


def budget_of(found: Settings, connections: int) -> MemoryBudget:
    return memory_budget(found, calculate(Inputs(1, connections), Limits(None, None)))


def tree(tmp_path: Path, lines: str, limits: dict[str, str]) -> tuple[str, str]:
    own = tmp_path / "cgroup"
    own.write_text(lines)
    for name, text in limits.items():
        path = tmp_path / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(tmp_path / "fs"), str(own)


@pytest.mark.parametrize(
    ("lines", "limits", "wanted"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "1048576\n"}, 1048576),
        ("0::/a/b\n", {"a/b/memory.max": "4096\n", "a/memory.max": "1048576\n"}, 4096),
        ("0::/of/the/host\n", {"memory.max": "8192\n"}, 8192),  # as a container sees it
        ("5:cpu:/x\n4:memory:/x\n", {"memory/x/memory.limit_in_bytes": "16384\n"}, 16384),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, MACHINE),
        ("0::/\n", {}, MACHINE),
    ],
)
def test_the_smallest_limit_counts(tmp_path: Path, lines: str, limits: dict[str, str], wanted: int) -> None:
    found, source = available_memory(*tree(tmp_path, lines, limits))
    assert found == wanted
    assert source == ("the machine" if wanted == MACHINE else "the cgroup")


def test_check_warns_when_the_worst_is_too_much() -> None:
    found = settings()
    enough = budget_of(found, 1)
    assert enough.warnings == ()
    many = 2 * MACHINE // client_bytes(found)
    too_much = budget_of(found, many)
    (warning,) = too_much.warnings
    assert f"{mib(too_much.total_bytes)} MiB" in warning
    assert "max_connections" in warning


def test_each_bound_counts() -> None:
    worst = budget_of(settings(), 1000).total_bytes
    assert budget_of(settings(), 1001).total_bytes > worst
    assert budget_of(settings("max_queued_requests = 2000\n"), 1000).total_bytes > worst
    assert budget_of(settings("max_response_head_bytes = 1048576\n"), 1000).total_bytes > worst
    assert budget_of(settings("max_request_head_bytes = 1048576\n"), 1000).total_bytes > worst
