"""The unit: what the manager knows of it, and what the kernel knows of its processes."""

from __future__ import annotations

import re
from typing import Any

from tests.testinfra.service.conftest import UNIT, Service

MOST_EXPOSURE = 2.0


def limits(host: Any, pid: int) -> tuple[int, int]:
    """Soft and hard limit of descriptors, as the kernel has them."""
    row = re.search(r"^Max open files +(\d+) +(\d+)", host.file(f"/proc/{pid}/limits").content_string, re.MULTILINE)
    assert row is not None
    return int(row[1]), int(row[2])


def test_systemd_is_pid_1_and_content(host: Any) -> None:
    assert host.check_output("cat /proc/1/comm") == "systemd"
    assert host.check_output("systemctl is-system-running") == "running"


def test_service_runs_and_starts_with_the_host(service: Service) -> None:
    assert service.unit("ActiveState") == "active"
    assert service.unit("UnitFileState") == "enabled"
    assert service.unit("Type") == "notify"
    assert service.unit("NRestarts") == "0"
    assert service.unit("NeedDaemonReload") == "no"


def test_every_process_is_there(service: Service) -> None:
    titles = sorted(service.pids)
    workers = service.config.get("workers", 1)
    assert sum("worker" in title for title in titles) == workers, titles
    assert sum("master" in title for title in titles) == 1, titles
    assert sum("control" in title for title in titles) == 1, titles
    assert service.pids[next(title for title in titles if "master" in title)] == service.main_pid


def test_manager_knows_the_descriptor_limit(service: Service, nofile: int) -> None:
    assert service.unit("LimitNOFILE") == str(nofile)
    assert service.unit("LimitNOFILESoft") == str(nofile)


def test_kernel_enforces_the_descriptor_limit_on_every_process(host: Any, service: Service, nofile: int) -> None:
    assert {title: limits(host, pid) for title, pid in service.pids.items()} == dict.fromkeys(
        service.pids, (nofile, nofile)
    )


def test_processes_are_the_users_and_hold_no_more_than_the_port_capability(host: Any, service: Service) -> None:
    user = service.unit("User")
    assert user not in ("", "root")
    uid = host.check_output(f"id -u {user}")
    for title, pid in service.pids.items():
        status = dict(
            line.split(":", 1) for line in host.file(f"/proc/{pid}/status").content_string.splitlines() if ":" in line
        )
        assert status["Uid"].split() == [uid] * 4, title
        assert status["NoNewPrivs"].strip() == "1", title
        assert status["Seccomp"].strip() == "2", title
        net_bind_service = 1 << 10
        assert int(status["CapEff"], 16) in ((net_bind_service, 0) if "master" in title else (0,)), title


def test_sandbox_is_tight(host: Any) -> None:
    verdict = host.check_output(f"systemd-analyze --no-pager security {UNIT}").splitlines()[-1]
    exposure = re.search(r"([0-9.]+) [A-Z]+", verdict)
    assert exposure is not None, verdict
    assert float(exposure[1]) <= MOST_EXPOSURE, verdict


def test_login_sessions_have_the_limit_too(host: Any, nofile: int) -> None:
    soft, hard = host.check_output("runuser --login --command 'ulimit -Sn; ulimit -Hn' root").split()
    assert int(soft) == nofile
    assert hard == "unlimited" or int(hard) >= nofile
