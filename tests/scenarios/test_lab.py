"""The lab itself: hosts that do not meet, and of which nothing is left whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.harness import wait_until
from tests.scenarios.conftest import ROOT
from tests.scenarios.test_molecule import END_SECS, boots_hosts

LABHOST = str(ROOT / "molecule/shared/lab/labhost")
# A root file system is made where there is none yet; on a busy machine that takes minutes.
IMAGE_SECS = 900
BOOT_SECS = 120

pytestmark = [boots_hosts, pytest.mark.timeout(IMAGE_SECS + BOOT_SECS)]


class Lab:
    """Hosts of one LABHOST_HOME."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def run(self, *arguments: str, timeout_secs: float = BOOT_SECS) -> str:
        """What ``labhost`` prints; fails with what it says when it does."""
        ran = subprocess.run(
            [LABHOST, *arguments],
            env=os.environ | {"LABHOST_HOME": str(self.home)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_secs,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout.strip()


def traces_of(home: Path) -> list[str]:
    """Whatever of the machine still names hosts of a lab: mounts, processes, cgroups and network namespaces."""
    prefix = subprocess.check_output(["sh", "-c", f"printf %s {home} | sha256sum | cut -c1-6"], text=True).strip()
    found = [line for line in Path("/proc/mounts").read_text().splitlines() if str(home) in line]
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if str(home) in command:
            found.append(command)
    found += [str(path) for path in Path("/run/netns").glob(f"lab{prefix}*")]
    found += [str(path) for path in Path("/sys/fs/cgroup").glob(f"**/lab{prefix}*")]
    return found


@pytest.fixture
def labs(tmp_path: Path) -> Iterator[tuple[Lab, Lab]]:
    """Two, each with a host of the same name and address."""
    with ExitStack() as stack:
        both = Lab(tmp_path / "one"), Lab(tmp_path / "two")
        both[0].run("image", timeout_secs=IMAGE_SECS)
        for lab in both:
            stack.callback(lab.run, "gc")
            lab.run("up", "web1", "--address", "198.18.9.11/24")
        yield both


def test_two_labs_side_by_side_do_not_meet(labs: tuple[Lab, Lab]) -> None:
    one, two = labs
    one.run("exec", "web1", "touch", "/root/mine")
    assert two.run("exec", "web1", "ls", "/root") == ""
    assert one.run("exec", "web1", "cat", "/proc/1/comm") == "systemd"
    one.run("gc")
    assert two.run("exec", "web1", "systemctl", "is-system-running") == "running"
    assert traces_of(one.home) == []
    assert traces_of(two.home) != []
    two.run("gc")
    assert traces_of(two.home) == []


def test_host_reboots_and_keeps_its_files(labs: tuple[Lab, Lab]) -> None:
    lab = labs[0]
    boot_id = ("exec", "web1", "cat", "/proc/sys/kernel/random/boot_id")
    before = lab.run(*boot_id)
    lab.run("exec", "web1", "touch", "/root/kept")
    lab.run("exec", "web1", "systemctl", "--no-block", "reboot")

    def rebooted() -> bool:
        try:
            return lab.run(*boot_id) != before
        except AssertionError:
            return False

    wait_until(rebooted, "another boot id", BOOT_SECS)
    assert lab.run("exec", "web1", "ls", "/root") == "kept"


def test_killed_host_can_be_removed_and_booted_again(labs: tuple[Lab, Lab]) -> None:
    lab = labs[0]
    os.kill(int((lab.home / "hosts/web1/pid").read_text()), signal.SIGKILL)
    lab.run("up", "web1")
    lab.run("gc")
    lab.run("gc")
    assert traces_of(lab.home) == []


def test_terminated_run_removes_its_hosts(tmp_path: Path, labs: tuple[Lab, Lab]) -> None:
    folder = tmp_path / "lab"
    images = Path(labs[0].run("image")).parent
    process = subprocess.Popen(
        [str(ROOT / "molecule/shared/run"), "default"],
        env=os.environ | {"LAB_FOLDER": str(folder), "LABHOST_IMAGES": str(images)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: list(folder.glob("run.*/lab/hosts/*/pid")), "a host that boots", IMAGE_SECS)
        home = next(folder.glob("run.*")) / "lab"
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_SECS) == 128 + signal.SIGTERM
    assert list(folder.glob("run.*")) == []
    assert traces_of(home) == []
