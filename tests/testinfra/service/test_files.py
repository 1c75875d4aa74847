"""Owners and modes: the service can read what it needs, and change only what is its own."""

from __future__ import annotations

import os
from typing import Any

from tests.testinfra.service.conftest import UNIT, Service


def owner_and_mode(host: Any, path: str) -> tuple[str, str, int]:
    """User, group and permission bits of what is there."""
    file = host.file(path)
    assert file.exists, path
    return file.user, file.group, file.mode


def test_configuration_is_roots_and_readable_for_the_service_only(host: Any, service: Service) -> None:
    assert owner_and_mode(host, service.command[1]) == ("root", service.unit("Group"), 0o640)


def test_unit_is_roots(host: Any, service: Service) -> None:
    fragments = [service.unit("FragmentPath"), *service.unit("DropInPaths").split()]
    assert fragments[0] == f"/etc/systemd/system/{UNIT}"
    for path in fragments:
        assert owner_and_mode(host, path) == ("root", "root", 0o644), path


def test_folders_of_state_logs_and_runtime(host: Any, service: Service) -> None:
    owner = (service.unit("User"), service.unit("Group"))
    state = service.config.get("state_dir", "/var/lib/reverse-proxy")
    assert owner_and_mode(host, state) == (*owner, 0o700)
    assert owner_and_mode(host, "/run/reverse-proxy") == (*owner, 0o750)
    socket = next(item["address"] for item in service.ask("status")["listeners"] if item["kind"] == "admin")
    assert owner_and_mode(host, socket.removeprefix("unix:")) == (*owner, 0o600)


def test_keys_are_nobody_elses(host: Any, service: Service) -> None:
    for listener in service.ask("status")["listeners"]:
        for certificate in listener.get("certificates", []):
            if certificate["path"].endswith("key-and-certificate.pem"):
                assert owner_and_mode(host, certificate["path"])[2] == 0o600
    keys = [
        pair["key"] for listener in service.config.get("listeners", []) for pair in listener.get("certificates", [])
    ]
    for key in keys:
        # A relative path is meant from the configuration's folder.
        user, group, mode = owner_and_mode(host, os.path.join(os.path.dirname(service.command[1]), key))
        assert (user, group) == ("root", service.unit("Group")), key
        assert mode & 0o137 == 0, key


def test_service_cannot_change_its_program(host: Any, service: Service) -> None:
    release = host.check_output(f"dirname $(dirname $(readlink -f {service.command[0]}))")
    assert "/releases/" in release
    foreign = host.check_output(rf"find {release} ! -type l \( ! -user root -o -perm /022 \) | head")
    assert foreign == ""


def test_program_is_what_the_service_runs(host: Any, service: Service) -> None:
    version = host.check_output(f"{service.command[0]} --version").split()[-1]
    assert service.ask("status")["version"] == version
