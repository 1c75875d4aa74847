"""The descriptor budget: proven by the program, and kept by its processes."""

from __future__ import annotations

import shlex
from typing import Any

from tests.testinfra.service.conftest import Service


def test_budget_is_of_the_limit_and_fits(service: Service, nofile: int) -> None:
    budget = service.ask("budget")
    assert budget["limits"] == {"soft": nofile, "hard": nofile}
    assert len(budget["processes"]) >= service.config.get("workers", 1) + 2
    for process in budget["processes"]:
        assert process["total"] <= process["limit"] == nofile, process["name"]
        assert process["open"] <= process["total"], process["name"]
        assert process["headroom"] == nofile - process["total"], process["name"]


def test_open_descriptors_are_those_that_the_kernel_counts(host: Any, service: Service) -> None:
    told = {process["name"]: process["open"] for process in service.ask("budget")["processes"]}
    for title, pid in service.pids.items():
        name = next(name for name in told if title.endswith(name))
        # Not counted at one moment: the program's own question is a connection.
        assert abs(int(host.check_output(f"ls /proc/{pid}/fd | wc -l")) - told[name]) <= 3, title


def test_configuration_passes_its_own_check_as_the_services_user(host: Any, service: Service, nofile: int) -> None:
    program, config = service.command
    check = shlex.join([program, "check", "--nofile", str(nofile), "--config", config])
    ran = host.run(f"runuser -u {service.unit('User')} -- {check}")
    assert ran.rc == 0, ran.stdout + ran.stderr
    assert ": fits" in ran.stdout
