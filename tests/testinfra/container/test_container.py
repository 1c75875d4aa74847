"""A host on which the reverse proxy runs in a container (role compose), by what its .env says. Changes nothing."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest

FOLDER = "/opt/reverse-proxy"
CONFIG = "/etc/reverse-proxy/config.toml"
HEALTHY_SECS = 60
PIDS_LIMIT = 512
STOP_SECS = 90

Host = Any


@pytest.fixture
def env(host: Host) -> dict[str, str]:
    """What .env says."""
    lines = host.file(f"{FOLDER}/.env").content_string.splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@pytest.fixture
def engine(host: Host) -> str:
    return "docker" if host.exists("docker") else "podman"


@pytest.fixture
def container(host: Host, engine: str, env: dict[str, str]) -> str:
    """The id of the container."""
    label = f"label=com.docker.compose.project={env['COMPOSE_PROJECT_NAME']}"
    ids: list[str] = host.check_output(f"{engine} ps --quiet --no-trunc --filter {label}").split()
    assert len(ids) == 1, host.run(f"{engine} ps --all").stdout
    return ids[0]


@pytest.fixture
def inspected(host: Host, engine: str, container: str) -> dict[str, Any]:
    (found,) = json.loads(host.check_output(f"{engine} inspect {container}"))
    assert isinstance(found, dict)
    return found


def pids(host: Host, container: str) -> list[int]:
    """The host's numbers of the container's processes."""
    lines = host.check_output(f"docker top {container} -o pid").splitlines()
    return [int(line) for line in lines[1:]]


def test_the_limit_is_told_to_the_engine(inspected: dict[str, Any], env: dict[str, str]) -> None:
    limits = {one["Name"]: (one["Soft"], one["Hard"]) for one in inspected["HostConfig"]["Ulimits"]}
    assert limits == {"nofile": (int(env["REVERSE_PROXY_NOFILE"]),) * 2, "core": (0, 0)}


def test_each_process_has_the_limit(host: Host, container: str, env: dict[str, str]) -> None:
    numbers = pids(host, container)
    assert len(numbers) >= 3, "master, control and a worker"
    for pid in numbers:
        text = host.file(f"/proc/{pid}/limits").content_string
        found = re.search(r"Max open files +(\d+) +(\d+)", text)
        assert found is not None, text
        assert found.groups() == (env["REVERSE_PROXY_NOFILE"],) * 2


def test_the_budget_fits_inside(host: Host, engine: str, container: str, env: dict[str, str]) -> None:
    check = host.run(f"{engine} exec {container} reverse-proxy check --config {CONFIG}")
    assert check.rc == 0, check.stdout + check.stderr
    limit = env["REVERSE_PROXY_NOFILE"]
    assert f"file descriptors: limit {limit} (soft) / {limit} (hard)" in check.stdout
    budget = host.check_output(f"{engine} exec {container} reverse-proxy budget --config {CONFIG}")
    headrooms = [int(number) for number in re.findall(r"headroom (-?\d+)", budget)]
    assert len(headrooms) >= 3, budget
    assert min(headrooms) >= 0, budget


def test_it_is_healthy(host: Host, engine: str, container: str) -> None:
    deadline = time.monotonic() + HEALTHY_SECS
    while True:
        state = json.loads(host.check_output(f"{engine} inspect --format '{{{{json .State.Health}}}}' {container}"))
        if state["Status"] == "healthy":
            return
        assert time.monotonic() < deadline, state
        time.sleep(1)


def test_the_container_is_closed(host: Host, engine: str, container: str, inspected: dict[str, Any]) -> None:
    settings = inspected["HostConfig"]
    assert settings["ReadonlyRootfs"] is True
    assert settings["CapDrop"] == ["ALL"]
    assert [name.removeprefix("CAP_") for name in settings["CapAdd"]] == ["NET_BIND_SERVICE"]
    assert settings["SecurityOpt"] == ["no-new-privileges:true"]
    # Where the kernel offers no pids controller, Docker says so and drops the limit.
    limited = engine != "docker" or host.check_output("docker info --format '{{.PidsLimit}}'") == "true"
    assert settings["PidsLimit"] == (PIDS_LIMIT if limited else None)
    assert not settings["Privileged"]
    assert inspected["Config"]["User"] == "10001:10001"
    for pid in pids(host, container):
        status = dict(
            line.split(":\t", 1)
            for line in host.file(f"/proc/{pid}/status").content_string.splitlines()
            if ":\t" in line
        )
        assert status["Uid"].split() == ["10001"] * 4
        assert status["NoNewPrivs"] == "1"
        assert int(status["CapEff"], 16) & ~(1 << 10) == 0, "nothing but ports below 1024"


def test_nothing_can_be_written(host: Host, engine: str, container: str) -> None:
    for path in (CONFIG, "/etc/passwd", "/opt/reverse-proxy/bin/python"):
        command = f"import os; os.open('{path}', os.O_WRONLY)"
        done = host.run(f'{engine} exec {container} python3 -c "{command}"')
        assert done.rc != 0
        assert "Read-only file system" in done.stderr or "Permission denied" in done.stderr, done.stderr


def test_the_log_is_bounded(inspected: dict[str, Any], env: dict[str, str]) -> None:
    assert inspected["HostConfig"]["LogConfig"] == {
        "Type": "json-file",
        "Config": {"max-size": env["REVERSE_PROXY_LOG_MAX_SIZE"], "max-file": env["REVERSE_PROXY_LOG_MAX_FILES"]},
    }


def test_it_is_started_again_and_has_time_to_drain(inspected: dict[str, Any]) -> None:
    assert inspected["HostConfig"]["RestartPolicy"]["Name"] == "unless-stopped"
    assert inspected["Config"]["StopTimeout"] == STOP_SECS


def test_https_answers(host: Host, env: dict[str, str]) -> None:
    site = first_site(host)
    port = env["REVERSE_PROXY_HTTPS_PORT"].rpartition(":")[2]
    answer = host.check_output(
        f"curl --silent --insecure --max-time 20 --output /dev/null --write-out '%{{http_code}} %{{ssl_verify_result}}'"
        f" --resolve {site}:{port}:127.0.0.1 https://{site}:{port}/"
    )
    assert answer.split()[0] not in {"000", "421", "502", "503", "504"}, answer


def test_plain_http_is_sent_to_https(host: Host, env: dict[str, str]) -> None:
    site = first_site(host)
    port = env["REVERSE_PROXY_HTTP_PORT"].rpartition(":")[2]
    target = host.check_output(
        "curl --silent --max-time 20 --output /dev/null --write-out '%{redirect_url}'"
        f" --resolve {site}:{port}:127.0.0.1 http://{site}:{port}/x"
    )
    assert target.startswith(f"https://{site}"), target


def test_metrics_are_for_the_host_alone(host: Host, env: dict[str, str]) -> None:
    address = env["REVERSE_PROXY_HEALTH_ADDRESS"]
    body = host.check_output(f"curl --silent --fail --max-time 20 http://{address}/metrics")
    assert 'reverse_proxy_descriptors_headroom{kind="worker"}' in body
    listening, port = address.rsplit(":", 1)
    bound = {line.split()[3] for line in host.check_output("ss --tcp --listening --numeric --no-header").splitlines()}
    assert {one for one in bound if one.endswith(f":{port}")} == {f"{listening}:{port}"}


def test_an_upgrade_is_refused_with_the_way_out(host: Host, engine: str, container: str) -> None:
    done = host.run(f"{engine} exec {container} reverse-proxy upgrade --config {CONFIG}")
    assert done.rc == 1
    assert "this is process 1 of a container, which ends with it: replace the container instead" in done.stderr


def first_site(host: Host) -> str:
    found = re.search(r'(?m)^hosts = \["([^"]+)"', host.file(CONFIG).content_string)
    assert found is not None
    return found[1]
