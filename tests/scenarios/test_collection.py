"""The checkout as a collection: installed into an empty place, without a network, and run by its full name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scenarios.conftest import ROOT

NAME = "reverse_proxy.appliance"
BIN = Path(sys.executable).parent
PLAYBOOKS = sorted(path.stem for path in ROOT.glob("playbooks/*.yml"))

# Each leads to what the roles take from outside of their own folder.
NEEDED = (
    "deploy/reverse-proxy.service",
    "deploy/logrotate",
    "meta/runtime.yml",
    "playbooks/check_target.yml",
    "playbooks/site.yml",
    "playbooks/rollout.yml",
    "proxy/budget.py",
    "roles/preflight/tasks/main.yml",
    "roles/proxy/tasks/main.yml",
    "roles/ulimits/tasks/main.yml",
)
NOT_NEEDED = (".git", ".venv", "build", "molecule", "tests", "requirements")


def ansible(program: str, *arguments: str, place: Path, first: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs one of Ansible's programs, which finds collections in ``place`` only, and programs in ``first`` first."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")} | {
        "PATH": ":".join([*([str(first)] if first else []), str(BIN), os.environ["PATH"]]),
        "HOME": str(place),
        "ANSIBLE_HOME": str(place / "home"),
        "ANSIBLE_COLLECTIONS_PATH": str(place / "collections"),
        "ANSIBLE_NOCOLOR": "1",
    }
    return subprocess.run(
        [program, *arguments], cwd=place, env=environment, text=True, capture_output=True, stdin=subprocess.DEVNULL
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder with nothing but the collection installed."""
    folder = tmp_path_factory.mktemp("collection")
    built = ansible("ansible-galaxy", "collection", "build", "--output-path", str(folder), str(ROOT), place=folder)
    assert built.returncode == 0, built.stdout + built.stderr
    (archive,) = folder.glob("*.tar.gz")
    installed = ansible(
        "ansible-galaxy", "collection", "install", "--offline", "-p", "collections", str(archive), place=folder
    )
    assert installed.returncode == 0, installed.stdout + installed.stderr
    return folder


def test_what_a_play_needs_is_in_it(place: Path) -> None:
    root = place / "collections/ansible_collections" / NAME.replace(".", "/")
    assert [name for name in NEEDED if not (root / name).is_file()] == []
    assert [name for name in NOT_NEEDED if (root / name).exists()] == []
    assert [path for path in root.rglob("*") if path.name == "__pycache__" or path.suffix == ".pyc"] == []


def test_every_playbook_is_found_by_its_full_name(place: Path) -> None:
    (place / "hosts.yml").write_text("proxies: {hosts: {proxy1.example.org: {}}}\n")
    for playbook in PLAYBOOKS:
        ran = ansible("ansible-playbook", "-i", "hosts.yml", "--syntax-check", f"{NAME}.{playbook}", place=place)
        assert ran.returncode == 0, f"{playbook}: {ran.stdout}{ran.stderr}"


@pytest.mark.parametrize("playbook", PLAYBOOKS)
@pytest.mark.parametrize("more", [(), ("--limit", "proxy1.example.org")], ids=["all", "limited"])
def test_a_target_that_is_nowhere_is_no_success(place: Path, playbook: str, more: tuple[str, ...]) -> None:
    (place / "hosts.yml").write_text("proxies: {hosts: {proxy1.example.org: {}}}\n")
    arguments = ("-i", "hosts.yml", "-e", "target=typo", *more)
    for ran in (
        ansible("ansible-playbook", *arguments, f"{NAME}.{playbook}", place=place),
        ansible("ansible-playbook", *arguments, str(ROOT / "playbooks" / f"{playbook}.yml"), place=place),
    ):
        said = ran.stdout + ran.stderr
        assert ran.returncode != 0, said
        assert "target = 'typo' matches no host of the inventory; name a host, a group" in said, said
        assert "TASK" not in said, said


def test_an_inventory_without_the_group_of_the_default_is_no_success(place: Path) -> None:
    (place / "others.yml").write_text("web: {hosts: {proxy1.example.org: {}}}\n")
    ran = ansible("ansible-playbook", "-i", "others.yml", f"{NAME}.site", place=place)
    assert ran.returncode != 0, ran.stdout
    assert "target = 'proxies' matches no host of the inventory" in ran.stderr
    assert "(its groups: web)" in ran.stderr


@pytest.mark.parametrize("target", ["proxies", "proxy1.example.org", "proxy*:!proxy2.example.org", "~proxy[12]"])
def test_a_target_that_is_there_is_found(place: Path, target: str) -> None:
    (place / "two.yml").write_text("proxies: {hosts: {proxy1.example.org: {}, proxy2.example.org: {}}}\n")
    ran = ansible("ansible-playbook", "-i", "two.yml", "-e", f"target={target}", f"{NAME}.check_target", place=place)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "no hosts matched" not in ran.stdout, ran.stdout


@pytest.mark.parametrize("playbook", ["rollback", "verify"])
def test_a_host_without_systemd_is_told_so_in_plain_words(place: Path, playbook: str) -> None:
    """Whatever this machine runs: what is found of systemctl is one that answers as where systemd is not process 1."""
    complaint = "System has not been booted with systemd as init system (PID 1). Can't operate."
    programs = place / "without"
    programs.mkdir(exist_ok=True)
    (programs / "systemctl").write_text(f'#!/bin/sh\necho "{complaint}" >&2\nexit 1\n')
    (programs / "systemctl").chmod(0o755)
    (place / "without.yml").write_text(
        "proxies:\n"
        "  hosts: {localhost: {ansible_connection: local}}\n"
        "  vars:\n"
        "    ansible_become: false\n"
        f"    ansible_python_interpreter: {sys.executable}\n"
        f"    proxy_python: {sys.executable}\n"
        f"    proxy_install_dir: {place}/nothing\n"
        f"    proxy_config_dir: {place}/nothing\n"
    )
    ran = ansible("ansible-playbook", "-i", "without.yml", f"{NAME}.{playbook}", place=place, first=programs)
    said = ran.stdout + ran.stderr
    assert ran.returncode == 2, said
    assert "it needs systemd as process 1" in said, said
    assert complaint in said, said
    assert "Traceback" not in said, said
    assert "non-zero return code" not in said, said


def test_incidents_values_are_refused_by_the_playbook_of_that_name(place: Path) -> None:
    """On this machine, which is only looked at: preflight comes first, and refuses."""
    (place / "incident.yml").write_text(
        "proxies:\n"
        "  hosts: {localhost: {ansible_connection: local}}\n"
        "  vars:\n"
        "    ansible_become: false\n"
        f"    ansible_python_interpreter: {sys.executable}\n"
        f"    proxy_wheelhouse: {place}/wheelhouse\n"
        "    ulimits_nofile: 1024\n"
        "    proxy_config:\n"
        "      workers: 1\n"
        "      max_connections: 1024\n"
        "      sites: [{hosts: [example.org], upstreams: ['http://127.0.0.1:3000']}]\n"
    )
    ran = ansible("ansible-playbook", "-i", "incident.yml", "--check", f"{NAME}.site", place=place)
    said = ran.stdout + ran.stderr
    assert ran.returncode == 2, said
    assert "max_connections = 1024 needs" in said, said
