"""`reverse-proxy drill`: it passes on a good configuration, can fail, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import StartAppliance
from tests.harness import cli
from tests.harness.processes import title
from tests.harness.toml import to_toml

SECS = "12"
TIMEOUT_SECS = 110.0
LENIENT = {"min_good_percent": 90.0, "max_event_lines": 40, "max_recovery_secs": 20.0}
"""Ten times the stated bars, for a busy machine."""


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where drills make their folders; a process of a drill has it in its environment."""
    with tempfile.TemporaryDirectory(prefix="rp-drill-") as made:
        monkeypatch.setenv("TMPDIR", made)
        yield made


def leftovers(folder: str) -> list[str]:
    """Folders and processes of drills."""
    found = os.listdir(folder)
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if int(pid) != os.getpid() and folder.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(f"{pid} {title(int(pid))}")
    return found


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., str]:
    def write(**changed: object) -> str:
        path = tmp_path / "proxy.toml"
        site = {"hosts": ["git.example.org"], "upstreams": ["http://192.0.2.1:3000"], "deny": ["127.0.0.0/8"]}
        base: dict[str, object] = {"max_connections": 60, "sites": [site], "deny": ["127.0.0.0/8"]}
        path.write_text(to_toml(base | changed))
        return str(path)

    return write


def drill(*arguments: str) -> tuple[int, dict[str, Any], str]:
    done = cli("drill", *arguments, "--for", SECS, "--json", timeout_secs=TIMEOUT_SECS)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


def test_it_passes_and_leaves_nothing(config: Callable[..., str], folder: str) -> None:
    code, document, said = drill("--config", config(drill=LENIENT))
    assert code == 0, (document, said)
    assert document["passed"]
    assert [one["round"] for one in document["rounds"]] == ["caps per client", "one address, no caps"]
    for one in document["rounds"]:
        print(
            f"{one['round']}: good {one['good_percent']:.1f} %, p99 {one['p99_secs']:.2f} s, "
            f"{one['event_lines']} lines, recovery {one['recovery_secs']:.2f} s"
        )
        assert one["permits"] == 60
        assert one["attackers_arrived"] > 60
        assert one["attackers_closed"] > 0, "nobody was evicted or capped"
        assert one["good"] > 50
        assert (one["leaked_permits"], one["leaked_descriptors"]) == (0, 0)
        assert any("out of descriptors" in reason for reason in one["not_ready"]), one["not_ready"]
    assert leftovers(folder) == []


def test_a_bar_that_is_missed_is_exit_code_1(config: Callable[..., str], folder: str) -> None:
    """With so long a grace nobody is evicted, and good clients wait behind those that stall."""
    slow = {"eviction_grace_secs": 600.0, "tls_handshake_timeout_secs": 600.0, "max_handshakes": 60}
    code, document, said = drill("--config", config(drill={"max_recovery_secs": 0.5}, **slow))
    assert code == 1, (document, said)
    assert not document["passed"]
    assert any("drill.max_recovery_secs is 0.5" in fault for fault in document["missed"]), document["missed"]
    assert leftovers(folder) == []


def test_it_takes_the_configuration_of_the_instance_that_runs(appliance: StartAppliance) -> None:
    """The instance itself is not touched."""
    running = appliance({"max_connections": 50, "drill": LENIENT})
    code, document, said = drill("--socket", running.admin_socket)
    assert code == 0, (document, said)
    assert document["rounds"][0]["permits"] == 50
    status = json.loads(cli("status", "--socket", running.admin_socket, "--json").stdout)
    assert status["totals"]["connections_accepted"] == 0, "it was played with the instance itself"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--config", "/nonexistent/proxy.toml"), "/nonexistent/proxy.toml"),
        (("--config", "x", "--for", "2s"), "a drill shorter than 10 s proves nothing"),
        (("--config", "x", "--for", "soon"), "'soon'"),
    ],
)
def test_wrong_input(arguments: tuple[str, ...], said: str) -> None:
    done = cli("drill", *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_what_the_copy_cannot_have_is_told(config: Callable[..., str], tmp_path: Path, folder: str) -> None:
    missing = str(tmp_path / "none.pem")
    listener = {"address": "127.0.0.1:443", "certificates": [{"chain": missing, "key": missing}]}
    done = cli("drill", "--config", config(listeners=[listener]), "--for", SECS)
    assert done.returncode == 1, done
    assert "the copy did not start" in done.stderr
    assert missing in done.stderr
    assert leftovers(folder) == []
