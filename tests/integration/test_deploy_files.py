"""The files of deploy/ that run without Ansible, judged by the programs that will read them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import StartAppliance
from tests.harness import wait_until

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
UNIT = DEPLOY / "reverse-proxy.service"
MAX_EXPOSURE = 2.0


def program(name: str) -> str:
    found = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")
    if found is None:
        pytest.skip(f"needs {name}")
    return found


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit with a program that exists everywhere in the place of ours, which is not installed here."""
    text, count = re.subn(r"(?m)^(ExecStart|ExecReload)=\S+", r"\1=/bin/true", UNIT.read_text())
    assert count
    path = tmp_path / UNIT.name
    path.write_text(text)
    return path


def test_the_unit_is_without_fault(unit: Path) -> None:
    done = subprocess.run([program("systemd-analyze"), "verify", str(unit)], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_unit_is_a_sandbox(unit: Path) -> None:
    command = [program("systemd-analyze"), "security", "--offline=true", "--no-pager", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C.UTF-8"})
    exposure = re.search(r"Overall exposure level for \S+: ([0-9.]+)", done.stdout)
    assert exposure, done.stdout + done.stderr
    assert float(exposure[1]) <= MAX_EXPOSURE, done.stdout


def test_log_rotation(appliance: StartAppliance, tmp_path: Path) -> None:
    logrotate = program("logrotate")
    (tmp_path / "logs").mkdir()
    one = appliance({"access_log": {"path": "off"}, "event_log": {"path": str(tmp_path / "logs" / "events.log")}})
    wait_until(lambda: any(" started " in line for line in one.event_lines()), "the first file is written")
    text = (DEPLOY / "logrotate").read_text()
    for pattern, here in (
        ("/var/log/reverse-proxy/", f"{tmp_path}/logs/"),
        ("    su reverse-proxy reverse-proxy\n", ""),
        ("systemctl kill --kill-who=main --signal=USR1 reverse-proxy.service", f"kill -USR1 {one.pid}"),
    ):
        assert text.count(pattern) == 1
        text = text.replace(pattern, here)
    configuration = tmp_path / "logrotate.conf"
    configuration.write_text(text)
    configuration.chmod(0o644)
    done = subprocess.run(
        [logrotate, "--force", "--state", str(tmp_path / "state"), str(configuration)], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    wait_until(lambda: any("logs.reopened" in line for line in one.event_lines()), "the new file is written")
    assert " started " in (tmp_path / "logs" / "events.log.1").read_text()
