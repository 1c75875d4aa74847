"""The incident's emergency measure on a running service, with connections that must survive it."""

from __future__ import annotations

import pytest

from tests.testinfra.fleet import (
    CONFIG,
    SERVICE,
    host,
    main_pid,
    nofile,
    processes,
    program,
    report,
    run_playbook,
    set_soft_nofile,
    status,
    wait_until,
)

pytestmark = pytest.mark.timeout(2400)

PROXY = "web1"
CLIENT = "client1"
SITE = "www.example.org"
REPORT = "/run/held.json"
HURRY = "/run/hurry"
DROP_IN = "/etc/systemd/system/reverse-proxy.service.d/10-rollout.conf"
INCIDENT = (1024, 1024)
"""Connections and descriptors."""
MITIGATED = (800, 8192)
DOWNLOAD_BYTES = 8_000_000
DOWNLOAD_SECS = 290


def make_the_incidents_state() -> None:
    """One worker, 1024 connections, and 1024 descriptors for what runs and for what will."""
    connections, descriptors = INCIDENT
    proxy = host(PROXY)
    host(CLIENT).check_output(f"rm -f {REPORT}")
    proxy.check_output(f"rm -f {HURRY}")
    proxy.check_output(f"sed -i 's/^LimitNOFILE=.*/LimitNOFILE={descriptors}:8192/' {DROP_IN}; systemctl daemon-reload")
    for pid in processes(PROXY):
        set_soft_nofile(PROXY, pid, descriptors)
        assert nofile(PROXY, pid)[0] == descriptors
    assert proxy.check_output(f"systemctl show --property=LimitNOFILESoft --value {SERVICE}") == str(descriptors)
    seen = status(PROXY)
    assert (seen["permits"], len(seen["workers"])) == (connections, 1)


def test_live_from_the_incidents_state_to_the_mitigated_one() -> None:
    make_the_incidents_state()
    before, original = processes(PROXY), host(PROXY).file(CONFIG).content_string
    held = ("held_connections.py", REPORT, PROXY, SITE, DOWNLOAD_BYTES, DOWNLOAD_SECS, HURRY)
    with program(CLIENT, "held", *held) as stop:
        wait_until(lambda: host(CLIENT).file(REPORT).exists and host(CLIENT).file(REPORT).size > 0, "both are held")
        wait_until(lambda: status(PROXY)["workers"][0]["connections"] == 2, "both hold a permit")

        ran = run_playbook("mitigate.yml")
        assert ran.returncode == 0, ran.stdout
        print(ran.stdout)

        assert processes(PROXY) == before, "no process was started or ended"
        assert status(PROXY)["workers"][0]["connections"] == 2
        host(CLIENT).check_output("systemctl kill held")  # notes how far the download is
        wait_until(lambda: "bytes_before" in report(CLIENT, REPORT), "the second request is answered")
        host(PROXY).check_output(f"touch {HURRY}")
        stop()
    seen = report(CLIENT, REPORT)
    print(seen)
    assert seen["fault"] == ""
    assert seen["bytes"] == DOWNLOAD_BYTES
    assert 0 < seen["bytes_before"] < DOWNLOAD_BYTES, "the download lasted longer than the measure"
    assert seen["second_answer"] == PROXY

    connections, descriptors = MITIGATED
    assert {nofile(PROXY, pid) for pid in processes(PROXY)} == {(descriptors, descriptors)}
    assert status(PROXY)["permits"] == connections
    config = host(PROXY).file(CONFIG).content_string
    assert config == original.replace(f"max_connections = {INCIDENT[0]}\n", f"max_connections = {connections}\n", 1)
    (kept,) = host(PROXY).check_output(f"ls {CONFIG}.*~").splitlines()
    assert host(PROXY).file(kept).content_string == original
    for name in (config, original):
        assert f"{SITE}" in name


def test_a_second_time_it_changes_nothing() -> None:
    ran = run_playbook("mitigate.yml")
    assert ran.returncode == 0, ran.stdout
    assert " changed=0 " in ran.stdout, ran.stdout


def test_it_stands_for_later_starts() -> None:
    before = main_pid(PROXY)
    connections, descriptors = MITIGATED
    assert host(PROXY).check_output(f"systemctl show --property=LimitNOFILESoft --value {SERVICE}") == str(descriptors)
    host(PROXY).check_output(f"systemctl restart {SERVICE}")
    assert main_pid(PROXY) != before
    assert {nofile(PROXY, pid) for pid in processes(PROXY)} == {(descriptors, descriptors)}
    assert status(PROXY)["permits"] == connections


def test_what_does_not_fit_changes_nothing() -> None:
    config, limits = host(PROXY).file(CONFIG).content_string, {pid: nofile(PROXY, pid) for pid in processes(PROXY)}
    ran = run_playbook("mitigate.yml", mitigate_max_connections=700, mitigate_nofile=1024)
    assert ran.returncode != 0, ran.stdout
    assert "Nothing was changed" in ran.stdout
    assert "max_connections = 700 needs" in ran.stdout
    assert host(PROXY).file(CONFIG).content_string == config
    assert {pid: nofile(PROXY, pid) for pid in processes(PROXY)} == limits
    assert not host(PROXY).file("/etc/reverse-proxy/.mitigation.toml").exists
