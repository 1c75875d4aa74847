"""Role ``ulimits`` on a kernel whose bounds are too low: what it would write, in check mode on this machine.

The bounds of the kernel are the machine's own and are not changed by a test; so the wanted number is put around them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scenarios.conftest import ROOT

pytestmark = pytest.mark.timeout(600)

PLAY = """
- name: Bounds
  hosts: localhost
  connection: local
  gather_facts: false
  tasks:
    - name: Look at them
      ansible.builtin.include_role: {name: ulimits, tasks_from: look}
    - name: Raise them
      ansible.builtin.include_role: {name: ulimits, tasks_from: kernel}
"""
SYSTEMCTL = "#!/bin/sh\necho 524288\n"
"""Where the tests run there may be no service manager to ask."""


def bound(name: str) -> int:
    """What the kernel has now."""
    return int(Path("/proc/sys", *name.split(".")).read_text())


def play(folder: Path, **variables: int) -> str:
    """What the role's task file says it would do, with differences. Nothing is done."""
    (folder / "play.yml").write_text(PLAY)
    (folder / "bin").mkdir()
    (folder / "bin/systemctl").write_text(SYSTEMCTL)
    (folder / "bin/systemctl").chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")} | {
        "ANSIBLE_HOME": str(folder / "home"),
        "ANSIBLE_ROLES_PATH": str(ROOT / "roles"),
        "ANSIBLE_NOCOLOR": "1",
        "PATH": f"{folder}/bin:{os.environ['PATH']}",
    }
    program = str(Path(sys.executable).parent / "ansible-playbook")
    variables_of_it = {"ansible_python_interpreter": sys.executable, **variables}
    ran = subprocess.run(
        [program, "--check", "--diff", "-i", "localhost,", "play.yml", "-e", json.dumps(variables_of_it)],
        cwd=folder,
        env=environment,
        text=True,
        capture_output=True,
        stdin=subprocess.DEVNULL,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_only_a_bound_that_is_too_low_is_raised(tmp_path: Path) -> None:
    wanted = bound("fs.nr_open") + 8
    said = play(tmp_path, ulimits_nofile=wanted, ulimits_file_max=1)
    assert f"+fs.nr_open = {wanted}" in said
    assert "fs.file-max =" not in said
    assert "changed: [localhost] => (item=fs.nr_open)" in said
    assert "skipping: [localhost] => (item=fs.file-max)" in said
    assert "RUNNING HANDLER [ulimits : Raise the kernel's bounds]" in said


def test_bounds_that_are_enough_stay(tmp_path: Path) -> None:
    said = play(tmp_path, ulimits_nofile=bound("fs.nr_open"), ulimits_file_max=1)
    assert "changed: [localhost]" not in said
    assert "RUNNING HANDLER" not in said
