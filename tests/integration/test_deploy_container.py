"""deploy/'s Dockerfile and compose file, as far as no engine is needed; the scenario `compose` runs them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from tests.conftest import StartAppliance
from tests.harness import RawUpstream

PROJECT = Path(__file__).resolve().parents[2]
DEPLOY = PROJECT / "deploy"
COMPOSE = DEPLOY / "docker-compose.yml"
SCRIPTS = Path(sysconfig.get_path("scripts"))
LEFT_OUT = r"\$\{(\w+):-([^}]*)\}"
HEALTH_PORT = "9900"


def run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def service() -> dict[str, Any]:
    (found,) = yaml.safe_load(COMPOSE.read_text())["services"].values()
    assert isinstance(found, dict)
    return found


def instructions() -> list[str]:
    """The Dockerfile's, each on one line."""
    text = re.sub(r"(?m)^#.*\n", "", (DEPLOY / "Dockerfile").read_text()).replace("\\\n", "")
    return [re.sub(r"\s+", " ", line).strip() for line in text.splitlines() if line.strip()]


def health_command() -> list[str]:
    (line,) = [line for line in instructions() if line.startswith("HEALTHCHECK")]
    command = json.loads(line.partition(" CMD ")[2])
    assert isinstance(command, list)
    return command


def test_the_dockerfile_is_without_fault() -> None:
    assert run(SCRIPTS / "hadolint", "--failure-threshold", "style", DEPLOY / "Dockerfile") == ""


def test_the_compose_file_keeps_to_the_specification() -> None:
    run(SCRIPTS / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", COMPOSE)


def test_the_example_says_what_holds_without_it() -> None:
    example = dict(
        line.split("=", 1)
        for line in (DEPLOY / ".env.example").read_text().splitlines()
        if line and not line.startswith("#")
    )
    assert example.pop("COMPOSE_PROJECT_NAME") == "reverse-proxy"
    inside = dict(re.findall(LEFT_OUT, COMPOSE.read_text()))
    assert inside == example


def test_nothing_is_pulled_from_a_registry_by_name() -> None:
    names = [
        *re.findall(r"(?m)^ARG BASE_IMAGE=(\S+)", (DEPLOY / "Dockerfile").read_text()),
        *re.findall(r"image: \$\{\w+:-([^}]*)\}", COMPOSE.read_text()),
    ]
    assert len(names) == 2
    for name in names:
        host = name.partition("/")[0] if "/" in name else ""
        assert host in {"", "localhost"}, name


def test_the_limits_are_those_of_the_unit() -> None:
    unit = dict(re.findall(r"(?m)^(\w+)=(.*)$", (DEPLOY / "reverse-proxy.service").read_text()))
    settings = service()
    limit = f"${{REVERSE_PROXY_NOFILE:-{unit['LimitNOFILE']}}}"
    assert settings["ulimits"] == {"nofile": {"soft": limit, "hard": limit}, "core": int(unit["LimitCORE"])}
    assert settings["pids_limit"] == int(unit["TasksMax"])
    assert settings["stop_grace_period"] == f"{unit['TimeoutStopSec']}s"
    assert [f"CAP_{name}" for name in settings["cap_add"]] == [unit["CapabilityBoundingSet"]]


def test_the_container_is_closed() -> None:
    settings = service()
    assert settings["read_only"] is True
    assert settings["cap_drop"] == ["ALL"]
    assert settings["security_opt"] == ["no-new-privileges:true"]
    assert {"privileged", "network_mode", "pid", "devices"}.isdisjoint(settings)
    assert all(volume.endswith(":ro") for volume in settings["volumes"] if not volume.startswith("state:"))
    (user,) = [line for line in instructions() if line.startswith("USER")]
    assert user == "USER ${UID}:${UID}"
    assert "ARG UID=10001" in instructions()
    assert {"max-size", "max-file"} == settings["logging"]["options"].keys()


def test_the_program_is_process_1() -> None:
    """A shell or a helper in between would keep signals from it, and `upgrade` would not be refused."""
    assert 'ENTRYPOINT ["reverse-proxy"]' in instructions()
    assert 'CMD ["run", "--config", "/etc/reverse-proxy/config.toml"]' in instructions()
    assert {"init", "entrypoint", "command"}.isdisjoint(service())


def test_both_ask_for_health_in_the_same_way() -> None:
    (line,) = [line for line in instructions() if line.startswith("HEALTHCHECK")]
    asked = service()["healthcheck"]
    assert asked["test"] == ["CMD", *health_command()]
    options = dict(re.findall(r"--([a-z-]+)=(\S+)", line))
    assert options == {name.replace("_", "-"): str(value) for name, value in asked.items() if name != "test"}


def test_the_question_for_health(appliance: StartAppliance, upstream: Callable[..., RawUpstream]) -> None:
    one = appliance({"workers": 1, "worker_heartbeat_timeout_secs": 10}, upstream=upstream().url)
    program, options, script = health_command()
    assert program == "python3"
    here = script.replace(HEALTH_PORT, one.config["health"]["address"].rpartition(":")[2])
    assert here != script

    def ask() -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, options, here], capture_output=True, text=True)

    good = ask()
    assert (good.returncode, good.stdout) == (0, "ok\n")
    one.stop()
    gone = ask()
    assert gone.returncode != 0
    assert "ConnectionRefusedError" in gone.stderr


def test_an_ill_appliance_is_told_from_a_good_one(tmp_path: Path) -> None:
    """The command judges the status, not only that somebody answers."""
    server = tmp_path / "server.py"
    server.write_text(
        "import http.server, sys\n"
        "class Ill(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(503); self.end_headers(); self.wfile.write(b'worker 0 is not running')\n"
        "server = http.server.HTTPServer(('127.0.0.1', 0), Ill)\n"
        "print(server.server_port, flush=True)\n"
        "server.serve_forever()\n"
    )
    process = subprocess.Popen([sys.executable, server], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        _, options, script = health_command()
        done = subprocess.run(
            [sys.executable, options, script.replace(HEALTH_PORT, port)], capture_output=True, text=True
        )
        assert (done.returncode, done.stdout, done.stderr) == (1, "worker 0 is not running\n", "")
    finally:
        process.kill()
        process.communicate()
