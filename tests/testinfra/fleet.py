"""What the scenarios' tests do on hosts of the inventory: run playbooks, start programs and read what they saw."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import testinfra
from testinfra.host import Host

PROJECT = Path(__file__).parents[2]
WHEELHOUSE = os.environ.get("LAB_WHEELHOUSE", str(PROJECT / "build" / "wheelhouse"))
INVENTORY = os.environ.get("MOLECULE_INVENTORY_FILE", "")
PROGRAMS = "/opt/load"
SERVICE = "reverse-proxy.service"
PROGRAM = "/opt/reverse-proxy/current/bin/reverse-proxy"
CONFIG = "/etc/reverse-proxy/config.toml"
PLAYBOOK_TIMEOUT_SECS = 1800
"""A guard against a hang; on a quiet machine each takes less than a minute a host."""
WAIT_SECS = 30.0


@functools.cache
def host(name: str) -> Host:
    """A host of the inventory."""
    return testinfra.get_host(f"ansible://{name}?ansible_inventory={INVENTORY}")


def run_playbook(name: str, **variables: object) -> subprocess.CompletedProcess[str]:
    """Run one of ``playbooks/`` to its end, standard error after standard output. The caller judges how it ended."""
    command = ["ansible-playbook", "-i", INVENTORY, str(PROJECT / "playbooks" / name), "-e", json.dumps(variables)]
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PLAYBOOK_TIMEOUT_SECS,
        check=False,
    )


def wheelhouse_of(folder: Path, version: str, *change: str) -> str:
    """Make a wheelhouse, in ``folder``, of a release that says ``version``, with one change of its code."""
    made = folder / version
    made.mkdir()
    variant = PROJECT / "molecule" / "rollout" / "release_variant.py"
    subprocess.run([sys.executable, str(variant), WHEELHOUSE, str(made), version, *change], check=True)
    return str(made)


@contextlib.contextmanager
def program(on: str, unit: str, script: str, *arguments: object) -> Iterator[Callable[[], None]]:
    """Run a program of the scenario on a host, as a transient unit. Call what is yielded to have it end (SIGTERM)."""
    command = ["systemd-run", "--quiet", "--collect", f"--unit={unit}", "python3", f"{PROGRAMS}/{script}"]
    host(on).check_output(" ".join([*command, *map(str, arguments)]))

    def stop() -> None:
        host(on).run(f"systemctl stop {unit}")

    try:
        yield stop
    finally:
        stop()


def report(on: str, path: str) -> dict[str, Any]:
    """What a program has written as JSON."""
    found: dict[str, Any] = json.loads(host(on).file(path).content_string)
    return found


def status(on: str) -> dict[str, Any]:
    """``reverse-proxy status`` of the service."""
    found: dict[str, Any] = json.loads(host(on).check_output(f"{PROGRAM} status --config {CONFIG} --json"))
    return found


@dataclass(frozen=True, slots=True)
class Installed:
    """What a host has on disk and runs; equal where nothing was touched."""

    release: str
    config: str
    config_written_at: str
    main_pid: int


def installed(on: str) -> Installed:
    """Look at a host."""
    config, written_at = host(on).check_output(f"sha256sum {CONFIG}; stat -c %y {CONFIG}").splitlines()
    return Installed(
        release=os.path.basename(host(on).check_output("readlink /opt/reverse-proxy/current")),
        config=config.split()[0],
        config_written_at=written_at,
        main_pid=main_pid(on),
    )


def main_pid(on: str) -> int:
    """The master's process id."""
    return int(host(on).check_output(f"systemctl show --property=MainPID --value {SERVICE}"))


def processes(on: str) -> dict[int, str]:
    """The service's processes with their titles."""
    lines = host(on).check_output("ps -e -o pid= -o args=").splitlines()
    pairs = (line.split(None, 1) for line in lines)
    return {int(pid): title for pid, title in pairs if title.startswith("reverse-proxy: ")}


def nofile(on: str, pid: int) -> tuple[int, int]:
    """The soft and hard descriptor limit of a running process."""
    (line,) = (
        line for line in host(on).file(f"/proc/{pid}/limits").content_string.splitlines() if "open files" in line
    )
    return int(line.split()[3]), int(line.split()[4])


def set_soft_nofile(on: str, pid: int, soft: int) -> None:
    """Change the soft limit of a running process; the hard one stays, since it could not come back."""
    # As the process's own user: on a host without CAP_SYS_RESOURCE root may not.
    user = host(on).check_output(f"stat -c '%u %g' /proc/{pid}").split()
    host(on).check_output(
        f"setpriv --reuid={user[0]} --regid={user[1]} --clear-groups prlimit --pid={pid} --nofile={soft}:"
    )


def wait_until(is_so: Callable[[], bool], what: str, timeout_secs: float = WAIT_SECS) -> float:
    """Wait for something to become so. Returns the seconds it took; raises AssertionError when it does not."""
    began = time.monotonic()
    while not is_so():
        assert time.monotonic() - began < timeout_secs, f"not within {timeout_secs} s: {what}"
        time.sleep(0.2)
    return time.monotonic() - began
