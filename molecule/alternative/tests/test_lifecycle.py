"""The host's life with other folders, user and numbers: looked at, upgraded, restarted, and gone. In this order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.testinfra.fleet import SERVICE, main_pid, run_playbook, wheelhouse_of

pytestmark = pytest.mark.timeout(1200)

HOST = "other1"
RELEASES = "/srv/edge/releases"
OLDEST, NEXT, NEWEST = "0.1.0", "99.1.0", "99.1.1"
ITS_PORTS = (8080, 8443, 9443, 9901)


def releases(host: Any) -> list[str]:
    """The versions that are kept."""
    return sorted(name.rpartition("-")[0] for name in host.file(RELEASES).listdir())


def started_at(host: Any) -> str:
    """When the service manager last started the unit."""
    at: str = host.check_output(f"systemctl show --property ActiveEnterTimestampMonotonic --value {SERVICE}")
    return at


def test_a_converged_host_does_not_differ() -> None:
    ran = run_playbook("verify.yml")
    assert ran.returncode == 0, ran.stdout
    assert "nothing differs" in ran.stdout


def test_what_differs_is_told(host: Any) -> None:
    host.check_output("chmod 0644 /etc/edge/config.toml")
    try:
        ran = run_playbook("verify.yml")
    finally:
        host.check_output("chmod 0640 /etc/edge/config.toml")
    assert ran.returncode != 0, ran.stdout
    assert re.search(r"other1 +configuration file +0640 root:edge-tls \w+ +0644 root:edge-tls \w+", ran.stdout), (
        ran.stdout
    )
    assert "1 difference(s)" in ran.stdout


def test_a_new_release_comes_by_an_upgrade_and_a_drill(host: Any, tmp_path: Path) -> None:
    before, began = main_pid(HOST), started_at(host)
    ran = run_playbook("rollout.yml", proxy_wheelhouse=wheelhouse_of(tmp_path, NEXT), proxy_version=NEXT)
    assert ran.returncode == 0, ran.stdout
    assert re.search(r"caps per client: .*one address, no caps: ", " ".join(ran.stdout.split())), ran.stdout
    assert releases(host) == [OLDEST, NEXT]
    assert main_pid(HOST) != before
    assert started_at(host) == began, "a master took over, the unit was not restarted"


def test_a_changed_unit_restarts_and_no_release_is_kept_beyond_the_newest(host: Any, tmp_path: Path) -> None:
    began = started_at(host)
    ran = run_playbook(
        "site.yml",
        proxy_wheelhouse=wheelhouse_of(tmp_path, NEWEST),
        proxy_version=NEWEST,
        proxy_unit_overrides={"Service": {"Nice": 6}},
    )
    assert ran.returncode == 0, ran.stdout
    assert started_at(host) != began
    assert host.check_output(f"ps -o ni= -p {main_pid(HOST)}").strip() == "6"
    assert releases(host) == [NEXT, NEWEST]
    command = "/srv/edge/current/bin/reverse-proxy status --json --config /etc/edge/config.toml"
    assert f'"version": "{NEWEST}"' in host.check_output(command)


def test_nothing_is_left_after_an_uninstallation_with_purge(host: Any) -> None:
    ran = run_playbook("uninstall.yml", uninstall_purge=True)
    assert ran.returncode == 0, ran.stdout
    for folder in ("/srv/edge", "/etc/edge", "/srv/edge-state", "/var/log/edge"):
        assert not host.file(folder).exists, folder
    assert host.check_output("find /etc /srv /opt /usr/local /var/lib /var/log -xdev -name '*reverse?proxy*'") == ""
    assert not host.user("edge").exists
    assert not host.group("edge-tls").exists
    assert host.check_output(f"systemctl show --property LoadState --value {SERVICE}") == "not-found"
    listening = host.check_output("ss -Hltn")
    assert [port for port in ITS_PORTS if re.search(rf":{port}\s", listening)] == []
