"""``workers = "auto"``: affinity, bounded by cgroup quotas."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from proxy.budget import Limits
from proxy.config.load import load_text
from proxy.errors import ConfigError
from proxy.master import plan
from proxy.master.processors import available_processors

SITE = '[[sites]]\nhosts = ["*"]\nupstreams = ["http://127.0.0.1:9"]\n'


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture(autouse=True)
def eight_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({}, 8),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "20000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "9900000 100000\n"}, 8),
        (
            {
                "proc/self/cgroup": "0::/system.slice/proxy.service\n",
                "sys/fs/cgroup/system.slice/cpu.max": "300000 100000\n",
                "sys/fs/cgroup/system.slice/proxy.service/cpu.max": "max 100000\n",
            },
            3,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/docker/abc\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "250000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            3,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/\n0::/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            8,
        ),
    ],
)
def test_quotas_bound_the_affinity(tmp_path: Path, files: dict[str, str], wanted: int) -> None:
    assert available_processors(tree(tmp_path, files)) == wanted


def test_auto_takes_the_budgets_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "available_processors", lambda: 4)
    settings = load_text('workers = "auto"\nmax_connections = 10\n' + SITE, file="t", base_dir=None)
    made = plan.make_plan(settings, Limits(4096, 4096))
    assert made.workers == 4
    assert made.budget.processes[0].items[0] == ("client connections (share of 10)", 3), "the largest share"
    assert plan.make_plan(load_text("workers = 2\n" + SITE, file="t", base_dir=None), Limits(4096, 4096)).workers == 2


def test_too_few_connections_for_the_processors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "available_processors", lambda: 4)
    settings = load_text('workers = "auto"\nmax_connections = 3\n' + SITE, file="t", base_dir=None)
    with pytest.raises(ConfigError, match="max_connections = 3 is below workers = 4"):
        plan.require_budget(plan.make_plan(settings, Limits(4096, 4096)).budget)


@pytest.mark.parametrize("text", ["0", "257", '"4"', '"all"', "true", "1.0"])
def test_other_values_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r'workers: found .*an integer from 1 to 256, or "auto"'):
        load_text(f"workers = {text}\n{SITE}", file="t", base_dir=None)
