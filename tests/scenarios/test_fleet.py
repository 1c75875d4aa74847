"""``rollout.yml`` where a host goes away in its midst.

The hosts are folders of this machine, behind an ssh that can be cut; the roles only write a file. In the scenario
``rollout`` they are real.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.scenarios.conftest import ROOT

HOSTS = ("web1", "web2", "web3")
LEAVES = "web2"
WAIT_SECS = 5
"""How long the playbook waits for a host that is gone."""

pytestmark = pytest.mark.timeout(900)

SSH = """#!/bin/bash
# ssh to a host that is a folder: HOST is the last but one argument, the last one is the command.
folder={folder}/${{@: -2:1}}
[ ! -e "$folder/gone" ] || exit 255
export PATH={folder}/bin:$PATH
exec /bin/sh -c "${{@: -1}}"
"""
SYSTEMCTL = "#!/bin/sh\necho active\n"
UPDATE = """
- name: Update
  ansible.builtin.copy:
    content: "new"
    dest: "{{ proxy_config_dir }}/config.toml"
    mode: "0644"
- name: Go away
  ansible.builtin.file:
    path: "{{ proxy_config_dir }}/gone"
    state: touch
    mode: "0644"
  when: inventory_hostname == leaves
- name: Ask a host that may be gone
  ansible.builtin.command: {argv: ["true"]}
  changed_when: false
"""
NOTHING = """
- name: Do nothing
  ansible.builtin.meta: noop
"""


@dataclass(frozen=True)
class Fleet:
    """Three hosts, and the playbook beside roles that only write a file."""

    folder: Path

    def run(self, leaves: str) -> subprocess.CompletedProcess[str]:
        """Roll out; a host goes away after its configuration was changed."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")} | {
            "ANSIBLE_HOME": str(self.folder / "home"),
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_GATHERING": "explicit",
            "ANSIBLE_PIPELINING": "1",
            "ANSIBLE_SSH_TRANSFER_METHOD": "piped",
        }
        command = [str(Path(sys.executable).parent / "ansible-playbook"), "-i", "hosts.yml", "playbooks/rollout.yml"]
        return subprocess.run(
            [*command, "-e", f"leaves={leaves}", "-e", f"rollout_wait_secs={WAIT_SECS}"],
            cwd=self.folder,
            env=environment,
            text=True,
            capture_output=True,
            stdin=subprocess.DEVNULL,
        )

    def config(self, name: str) -> str:
        """What a host is configured with."""
        return (self.folder / name / "config.toml").read_text()


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    for name in ("rollout.yml", "check_target.yml", "tasks"):
        source, copy = ROOT / "playbooks" / name, tmp_path / "playbooks" / name
        copy.parent.mkdir(exist_ok=True)
        shutil.copytree(source, copy) if source.is_dir() else shutil.copy(source, copy)
    roles = {"preflight": ("main",), "proxy": ("main", "drain", "rollback", "wait_ready", "smoke")}
    for role, files in roles.items():
        folder = tmp_path / "playbooks/roles" / role / "tasks"
        folder.mkdir(parents=True)
        for name in files:
            (folder / f"{name}.yml").write_text(f"---{UPDATE if (role, name) == ('proxy', 'main') else NOTHING}")
    (tmp_path / "bin").mkdir()
    for path, text in ((tmp_path / "ssh", SSH.format(folder=tmp_path)), (tmp_path / "bin/systemctl", SYSTEMCTL)):
        path.write_text(text)
        path.chmod(0o755)
    for name in HOSTS:
        (tmp_path / name / "releases").mkdir(parents=True)
        (tmp_path / name / "current").symlink_to("releases/1.0")
        (tmp_path / name / "config.toml").write_text("old")
    (tmp_path / "hosts.yml").write_text(
        "proxies:\n"
        f"  hosts: {{{', '.join(f'{name}: {{}}' for name in HOSTS)}}}\n"
        "  vars:\n"
        f"    ansible_ssh_executable: {tmp_path}/ssh\n"
        f"    ansible_python_interpreter: {sys.executable}\n"
        "    ansible_become: false\n"
        f'    proxy_install_dir: "{tmp_path}/{{{{ inventory_hostname }}}}"\n'
        f'    proxy_config_dir: "{tmp_path}/{{{{ inventory_hostname }}}}"\n'
    )
    return Fleet(tmp_path)


def test_a_host_that_goes_away_stops_the_fleet(fleet: Fleet) -> None:
    ran = fleet.run(LEAVES)
    said = ran.stdout + ran.stderr
    assert ran.returncode != 0, said
    table = ran.stdout.rpartition("TASK [Print the table]")[2].partition("TASK [Tell")[0]
    results = dict(re.findall(r'"(web\d)  .*  (\S.*?) +[\d-]+"', table))
    assert results == {"web1": "rolled out", "web2": "FAILED, NOT PUT BACK", "web3": "not reached"}, said
    assert [fleet.config(name) for name in HOSTS] == ["new", "new", "old"]
    reason = ran.stdout.rpartition("TASK [Tell what failed]")[2].partition("PLAY RECAP")[0]
    assert re.search(r"web2: the host went away: .*; then, when going back: timed out", reason), said


def test_where_none_goes_away_all_are_rolled_out(fleet: Fleet) -> None:
    ran = fleet.run("none")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert [fleet.config(name) for name in HOSTS] == ["new"] * len(HOSTS)
