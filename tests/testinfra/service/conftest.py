"""The service as its host knows it: unit, processes, configuration."""

from __future__ import annotations

import functools
import json
import shlex
import tomllib
from typing import Any

import pytest

UNIT = "reverse-proxy.service"


class Service:
    """The unit on a host, and the instance that it runs. A test looks once at what does not change under it."""

    def __init__(self, host: Any) -> None:
        self.host = host

    def unit(self, name: str) -> str:
        """A property as ``systemctl show`` tells it; for limits what the manager was told, not what the kernel did."""
        value: str = self.host.check_output(f"systemctl show --property {name} --value {UNIT}")
        return value

    @property
    def main_pid(self) -> int:
        """Of the master."""
        return int(self.unit("MainPID"))

    @property
    def pids(self) -> dict[str, int]:
        """Every process of the service by its title: ``reverse-proxy: master``, ``reverse-proxy: worker 0``, ..."""
        rows = self.host.check_output("ps -eww -o pid=,unit=,args=").splitlines()
        fields = [row.split(maxsplit=2) for row in rows]
        return {args: int(pid) for pid, unit, args in fields if unit == UNIT}

    @functools.cached_property
    def command(self) -> list[str]:
        """The program and the configuration file that the unit starts it with."""
        words = shlex.split(self.unit("ExecStart").partition("argv[]=")[2].partition(" ;")[0])
        return [words[0], words[words.index("--config") + 1]]

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """The configuration file, parsed."""
        return tomllib.loads(self.host.file(self.command[1]).content_string)

    def ask(self, subcommand: str, *options: str) -> Any:
        """What ``reverse-proxy SUBCOMMAND --json`` answers."""
        program, config = self.command
        return json.loads(
            self.host.check_output(shlex.join([program, subcommand, "--config", config, "--json", *options]))
        )

    def addresses(self, kind: str) -> list[str]:
        """HOST:PORT of each listener of that kind, such as a client on the host can ask."""
        found = [item["address"] for item in self.ask("status")["listeners"] if item["kind"] == kind]
        return [address.replace("0.0.0.0", "127.0.0.1").replace("[::]", "[::1]") for address in found]


@pytest.fixture
def service(host: Any) -> Service:
    return Service(host)


@pytest.fixture
def nofile(request: pytest.FixtureRequest) -> int:
    """The descriptor limit that the rollout was told."""
    limit: int = request.config.getoption("--nofile")
    return limit
