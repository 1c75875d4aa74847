"""A fault that only shows beyond the file is told with file, line and key too, and with nothing twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import StartAppliance
from tests.harness import cli

HEAD = """\
max_connections = 100
state_dir = "{folder}/state"
redirect = {{ enabled = false }}
health = {{ enabled = false }}
admin = {{ socket = "{folder}/admin.sock" }}
"""
SITE = """
[[sites]]
hosts = ["git.example.org"]
upstreams = ["http://127.0.0.1:9"]
"""
LISTENER = """
[[listeners]]
address = "127.0.0.1:1"
"""
TRUSTING_SITE = """
[[sites]]
hosts = ["wiki.example.org"]
upstreams = ["https://127.0.0.1:9"]
upstream_tls = {{ ca = "nosuch.pem" }}
"""
TRUSTING_ROUTE = """
routes = [
  {{ path = "/api", upstreams = ["https://127.0.0.1:9"], upstream_tls = {{ ca = "nosuch.pem" }} }},
]
"""
CERTIFICATE = 'certificates = [{{ chain = "nope.pem", key = "nope.key" }}]\n'

FAULTS = {
    "certificate": (HEAD + LISTENER + CERTIFICATE + SITE, ":9: listeners[0].certificates[0]: ", "nope.pem"),
    "log": (HEAD + LISTENER + SITE + '[access_log]\npath = "/proc/none/a.log"\n', ":14: access_log.path", "/proc/none"),
    "user": ('user = "nobody-at-all"\n' + HEAD + LISTENER + SITE, ":1: user: ", "nobody-at-all"),
    "upstream CA": (
        HEAD + LISTENER + SITE + TRUSTING_SITE,
        ":17: sites[1].upstream_tls.ca: found ",
        "nosuch.pem', which user ",
    ),
    "upstream CA of a route": (
        HEAD + LISTENER + SITE + TRUSTING_ROUTE,
        ":15: sites[0].routes[0].upstream_tls.ca: found ",
        "wanted a readable bundle of CAs in PEM",
    ),
    "budget": (HEAD.replace("100", "90000") + LISTENER + SITE, ":1: max_connections = 90000 needs ", "LimitNOFILE="),
}


@pytest.mark.parametrize("command", ["check", "run"])
@pytest.mark.parametrize("fault", list(FAULTS))
def test_the_place_is_told(tmp_path: Path, command: str, fault: str) -> None:
    text, place, said = FAULTS[fault]
    file = tmp_path / "proxy.toml"
    file.write_text(text.format(folder=tmp_path))
    result = cli(command, "--config", str(file))
    assert result.returncode == 2, result.stderr
    first = result.stderr.splitlines()[0]
    assert first.startswith(f"reverse-proxy: {file}{place}"), result.stderr
    assert said in first
    assert first.count(f"{file}:") == 1


@pytest.mark.parametrize(("lists", "warned"), [('["all"]', True), ('["0.0.0.0/0"]', False)])
def test_check_warns_where_nobody_is_served(tmp_path: Path, lists: str, warned: bool) -> None:
    file = tmp_path / "proxy.toml"
    file.write_text((f"deny = {lists}\n" + HEAD + LISTENER + SITE + f"deny = {lists}\n").format(folder=tmp_path))
    result = cli("check", "--config", str(file))
    assert result.returncode == 0, result
    told = [line for line in result.stdout.splitlines() if "nobody is served" in line]
    keys = ["deny", "sites[0].deny"] if warned else []
    assert [line.split(" ")[1] for line in told] == keys, result.stdout


def test_a_refused_budget_says_its_arithmetic_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "proxy.toml"
    file.write_text((HEAD.replace("100", "90000") + LISTENER + SITE).format(folder=tmp_path))
    lines = cli("run", "--config", str(file)).stderr.splitlines()
    assert len(lines) == 2
    assert "90000 client connections (share of 90000) + 90000 upstream connections" in lines[1]


def test_reload_names_the_place_and_takes_no_other_file(appliance: StartAppliance, tmp_path: Path) -> None:
    one = appliance()
    other = tmp_path / "other.toml"
    other.write_text(one.path.read_text())
    refused = cli("reload", "--config", str(other))
    assert refused.returncode == 2
    assert f"was started with {one.path} and reloads that file, not {other}" in refused.stderr
    assert one.status()["generation"] == 1

    one.path.write_text(one.path.read_text() + "\nmax_connections = 90000\n")
    text = one.path.read_text()
    line = text.splitlines().index("max_connections = 90000") + 1
    refused = cli("reload", "--config", str(one.path))
    assert refused.returncode == 2
    assert f"{one.path}:{line}: max_connections = 90000 needs" in refused.stderr
