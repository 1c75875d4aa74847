"""What only a host of the scenario may be put through: connections drop, processes are killed, logs fill up."""

from __future__ import annotations

import json
import time
import uuid
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[3]
FOLDER = "/opt/reverse-proxy"
CONFIG = "/etc/reverse-proxy/config.toml"
ASK = "curl --silent --insecure --max-time 10 --resolve www.example.org:443:127.0.0.1"
WAIT_SECS = 90
EXCHANGES = 2000
LOG_BYTES = 2 * 100_000
SLACK_BYTES = 20_000

Host = Any


def the_container(host: Host) -> str:
    found: str = host.check_output("docker ps --all --quiet --no-trunc --filter name=reverse-proxy")
    assert len(found.split()) == 1
    return found


def state(host: Host, container: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(host.check_output(f"docker inspect --format '{{{{json .State}}}}' {container}"))
    return found


def wait_until_served(host: Host) -> None:
    deadline = time.monotonic() + WAIT_SECS
    while host.run(f"{ASK} --fail https://www.example.org/").stdout != host.check_output("hostname"):
        assert time.monotonic() < deadline, host.run("docker logs $(docker ps --all --quiet) 2>&1 | tail -30").stdout
        time.sleep(0.5)


def note(host: Host, name: str) -> str:
    text: str = host.file(f"/run/{name}").content_string.strip()
    assert text
    return text


def test_the_host_is_itself(host: Host) -> None:
    marker = f"/run/{uuid.uuid4()}"
    host.check_output(f"touch {marker}")
    assert host.check_output(f"hostname; ls {marker}").split() == ["engine", marker]


def test_the_files_are_those_of_deploy(host: Host) -> None:
    deploy = PROJECT / "deploy"
    assert host.file(f"{FOLDER}/docker-compose.yml").content_string == (deploy / "docker-compose.yml").read_text()
    assert host.file("/etc/prometheus/reverse-proxy/alerts.yml").content_string == (deploy / "alerts.yml").read_text()
    dashboard = host.file("/var/lib/grafana/dashboards/reverse-proxy.json").content_string
    assert json.loads(dashboard) == json.loads((deploy / "dashboard.json").read_text())
    keys = {
        line.partition("=")[0]
        for line in (deploy / ".env.example").read_text().splitlines()
        if line[:1] not in ("", "#")
    }
    written = host.file(f"{FOLDER}/.env").content_string.splitlines()
    assert {line.partition("=")[0] for line in written if line[:1] not in ("", "#")} == keys
    assert not host.file(f"{FOLDER}/image").exists


def test_mitigated(host: Host) -> None:
    assert "REVERSE_PROXY_NOFILE=8192\n" in host.file(f"{FOLDER}/.env").content_string
    assert host.file(CONFIG).content_string.count("max_connections = 800\n") == 1
    assert host.file(CONFIG).mode == 0o640
    container = the_container(host)
    status = json.loads(host.check_output(f"docker exec {container} reverse-proxy status --json --config {CONFIG}"))
    assert (status["ready"], status["permits"]) == (True, 800)
    assert note(host, "container-before") != note(host, "container-after"), "the limit made it anew"
    assert container == note(host, "container-after"), "the second time it went on"
    originals = host.check_output(f"ls -A {FOLDER} /etc/reverse-proxy").split()
    assert len([name for name in originals if name.startswith((".env.", "config.toml."))]) == 2


def test_the_certificate_outlives_the_container(host: Host) -> None:
    asked = "openssl s_client -connect 127.0.0.1:443 -servername www.example.org </dev/null 2>/dev/null | openssl x509"
    assert host.check_output(asked).strip() == note(host, "certificate-before")


def test_prometheus_watches(host: Host) -> None:
    deadline = time.monotonic() + WAIT_SECS
    while True:
        targets = json.loads(host.check_output("curl --silent --fail http://127.0.0.1:9090/api/v1/targets"))
        health = [(one["labels"]["job"], one["health"]) for one in targets["data"]["activeTargets"]]
        if health == [("reverse-proxy", "up")]:
            break
        assert time.monotonic() < deadline, targets
        time.sleep(0.5)
    rules = json.loads(host.check_output("curl --silent --fail http://127.0.0.1:9090/api/v1/rules"))
    names = {rule["name"] for group in rules["data"]["groups"] for rule in group["rules"]}
    assert {"ReverseProxyDescriptorHeadroomLow", "ReverseProxyCertificateExpires"} <= names


def test_the_log_stays_small(host: Host) -> None:
    wait_until_served(host)
    container = the_container(host)
    host.check_output(f"{ASK} --output /dev/null 'https://www.example.org/[1-{EXCHANGES}]'")
    status = json.loads(host.check_output(f"docker exec {container} reverse-proxy status --json --config {CONFIG}"))
    assert status["totals"]["requests"] >= EXCHANGES
    files = host.check_output(f"ls -ln /var/lib/docker/containers/{container}/ | grep json.log").splitlines()
    sizes = [int(line.split()[4]) for line in files]
    assert len(sizes) == 2, files
    assert LOG_BYTES / 4 < sum(sizes) <= LOG_BYTES + SLACK_BYTES, files


def test_a_killed_master_is_started_again(host: Host) -> None:
    container = the_container(host)
    before = state(host, container)
    host.check_output(f"kill -KILL {before['Pid']}")
    deadline = time.monotonic() + WAIT_SECS
    while state(host, container)["StartedAt"] == before["StartedAt"]:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    wait_until_served(host)
    assert the_container(host) == container


def test_a_stop_drains_and_the_daemon_brings_it_back(host: Host) -> None:
    container = the_container(host)
    host.check_output(f"cd {FOLDER} && docker-compose stop")
    stopped = state(host, container)
    assert (stopped["Status"], stopped["ExitCode"]) == ("exited", 0)
    assert '"stopped source=master' in host.run(f"docker logs --tail 20 {container} 2>&1 | sed 's/.* INFO /\"/'").stdout
    host.check_output(f"cd {FOLDER} && docker-compose start")
    wait_until_served(host)
    host.check_output("systemctl restart docker.service")
    wait_until_served(host)
    assert the_container(host) == container


def test_a_refused_configuration_is_not_served(host: Host) -> None:
    """What the role leaves to the container itself: a file that was edited by hand is refused by a reload."""
    container = the_container(host)
    host.check_output(
        f"cp -p {CONFIG} /run/config.toml && sed -i 's/^max_connections = .*/max_connections = 9000/' {CONFIG}"
    )
    done = host.run(f"docker exec {container} reverse-proxy reload --config {CONFIG}")
    host.check_output(f"cp -p /run/config.toml {CONFIG}")
    assert done.rc == 2
    assert "the limit is 8192 (soft) / 8192 (hard)" in done.stderr, done.stderr
    wait_until_served(host)
