"""What is another here than by default has arrived where it counts."""

from __future__ import annotations

import json
import shlex
from typing import Any

UNIT = "reverse-proxy.service"


def unit(host: Any, name: str) -> str:
    value: str = host.check_output(f"systemctl show --property {name} --value {UNIT}")
    return value


def get(host: Any, name: str, path: str, *options: str) -> str:
    """Head and body of an answer of the first listener."""
    command = ["curl", "--silent", "--show-error", "--insecure", "--include", "--max-time", "30", *options]
    answer: str = host.check_output(
        shlex.join([*command, "--resolve", f"{name}:8443:127.0.0.1", f"https://{name}:8443{path}"])
    )
    return answer


def test_it_runs_from_its_own_folder_as_its_own_user(host: Any) -> None:
    assert (unit(host, "User"), unit(host, "Group")) == ("edge", "edge-tls")
    assert "/srv/edge/current/bin/reverse-proxy run --config /etc/edge/config.toml" in unit(host, "ExecStart")
    assert not host.file("/opt/reverse-proxy").exists
    assert not host.file("/etc/reverse-proxy").exists


def test_more_for_the_unit_counts(host: Any) -> None:
    assert unit(host, "Description") == "The edge"
    assert unit(host, "TimeoutStopUSec") == "2min"
    assert "EDGE=one" in unit(host, "Environment")
    assert host.check_output(f"ps -o ni= -p {unit(host, 'MainPID')}").strip() == "5"


def test_access_log_is_a_file_of_json_lines(host: Any) -> None:
    get(host, "www.example.org", "/logged")
    lines = host.check_output("sleep 1.5; cat /var/log/edge/access.log").splitlines()
    assert any("/logged" in json.dumps(json.loads(line)) for line in lines)
    assert host.file("/var/log/edge/access.log").mode == 0o640


def test_log_rotation_is_of_that_folder_and_user(host: Any) -> None:
    host.check_output("logrotate --force --state /tmp/logrotate-state /etc/logrotate.d/reverse-proxy")
    assert host.file("/var/log/edge/access.log.1").exists
    get(host, "www.example.org", "/after-rotation")
    assert "/after-rotation" in host.check_output("sleep 1.5; cat /var/log/edge/access.log")


def test_certificate_is_the_installed_one(host: Any) -> None:
    served = host.check_output(
        "openssl s_client -connect 127.0.0.1:8443 -servername www.example.org </dev/null 2>/dev/null"
        " | openssl x509 -noout -fingerprint -sha256"
    )
    assert served == host.check_output("openssl x509 -noout -fingerprint -sha256 -in /etc/edge/tls/chain.pem")
    key = host.file("/etc/edge/tls/key.pem")
    assert (key.user, key.group, key.mode) == ("root", "edge-tls", 0o640)


def test_sites_have_what_they_say(host: Any) -> None:
    assert 'x-edge: quoted "yes"' in get(host, "www.example.org", "/", "--http1.1").lower()
    assert " 308" in get(host, "example.org", "/a?b").splitlines()[0]
    assert "413" in get(host, "www.example.org", "/upload", "--http1.1", "--data-binary", "@/usr/bin/openssl")
    assert "200" in get(host, "one.apps.example.org", "/").splitlines()[0]


def test_journal_has_its_bounds(host: Any) -> None:
    said = host.check_output("systemd-analyze --no-pager cat-config systemd/journald.conf")
    for line in ("RateLimitIntervalSec=10", "RateLimitBurst=500", "SystemMaxUse=256M", "SystemMaxFileSize=16M"):
        assert line in said.splitlines(), line


def test_login_sessions_of_the_named_users_have_the_limit(host: Any) -> None:
    assert host.check_output("runuser --login --command 'ulimit -Sn' root") == "6144"
    assert "@adm soft nofile 6144" in host.file("/etc/security/limits.d/90-reverse-proxy.conf").content_string
