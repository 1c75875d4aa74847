"""`python3 proxy/budget.py`: a deployment tool's question about another host, and its answer."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from proxy import budget
from proxy.config.load import load_text
from proxy.master import listeners, plan
from proxy.master.listeners import plan_listeners
from tests.harness.toml import to_toml

SITE = '[[sites]]\nhosts = ["example.org"]\nupstreams = ["http://127.0.0.1:3000"]\n'

CONFIGURATIONS = {
    "defaults": "",
    "every count": (
        'workers = 3\nmax_connections = 500\nmax_upstream_connections = 90\n[redirect]\naddresses = ["127.0.0.1:80"]\n'
        "max_connections = 7\n[health]\nmax_connections = 5\n[admin]\nmax_connections = 3\n"
    ),
    "auto": 'workers = "auto"\nmax_connections = "auto"\n',
    "all off": "[redirect]\nenabled = false\nmax_connections = 9\n[health]\nenabled = false\n",
    "listeners": (
        '[[listeners]]\naddress = "127.0.0.1:443"\n[[listeners]]\naddress = "[::1]:443"\n'
        '[[listeners]]\naddress = "127.0.0.1:8443"\n'
    ),
}


def ask(question: Any) -> tuple[int, str, str]:
    answered, complaints = io.StringIO(), io.StringIO()
    code = budget.main(io.StringIO(json.dumps(question)), answered, complaints)
    return code, answered.getvalue(), complaints.getvalue()


def question(configuration: str = "", **changes: object) -> dict[str, object]:
    return {"configuration": configuration, "limits": "8192", "processors": 2, "ipv6": True} | changes


@pytest.mark.parametrize("ipv6", [True, False])
@pytest.mark.parametrize("text", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_it_counts_as_the_daemon_does(text: str, ipv6: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "ipv6_available", lambda: ipv6)
    monkeypatch.setattr(plan, "available_processors", lambda: 5)
    settings = load_text(text + SITE, file="test", base_dir=None)
    told = json.loads(ask(question(text + SITE, processors=5, ipv6=ipv6))[1])
    own = budget.calculate(plan.budget_inputs(settings, plan_listeners(settings)), budget.parse_limits("8192"))
    assert {key: told[key] for key in budget.to_dict(own)} == json.loads(json.dumps(budget.to_dict(own)))
    assert told["workers"] == own.inputs.workers


def test_the_incident_is_refused_by_the_file_alone(tmp_path: Path) -> None:
    alone = tmp_path / "budget.py"
    alone.write_bytes(Path(budget.__file__).read_bytes())
    incident = question(to_toml({"workers": 1, "max_connections": 1024}), limits="1024:1024")
    done = subprocess.run(
        [sys.executable, "-I", str(alone)], input=json.dumps(incident), capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (2, "")
    told = json.loads(done.stdout)
    assert told["verdict"] == "refused"
    (refusal,) = told["refusals"]
    assert refusal == (
        "max_connections = 1024 needs 2185 descriptors in a worker, the limit is 1024 (soft) / 1024 (hard):"
        " set LimitNOFILE=3072, or max_connections to at most 443"
    )
    assert "1024 client connections" in told["arithmetic"]
    assert "refused" in told["text"]


def test_what_fits_exits_with_0() -> None:
    code, answered, complaints = ask(question(SITE))
    assert (code, complaints) == (0, "")
    assert json.loads(answered)["verdict"] == "fits"


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({}, "lacks the key 'configuration'"),
        ([], "list"),
        (question("workers = "), "Invalid value"),
        (question("workers = 0"), "workers: found 0; wanted a positive whole number"),
        (question("workers = true"), "workers: found True"),
        (question('max_connections = "many"'), "max_connections: found 'many'"),
        (question("redirect = 1"), "redirect: found 1; wanted a table"),
        (question("[redirect]\nenabled = 1"), "redirect.enabled: found 1; wanted true or false"),
        (question("listeners = 1"), "listeners: found 1; wanted an array"),
        (question(limits="0"), "'0' is not a number of descriptors"),
        (question(processors=0), "processors: found 0"),
    ],
)
def test_a_question_that_is_none_is_told_so(asked: Any, reason: str) -> None:
    code, answered, complaints = ask(asked)
    assert (code, answered) == (2, "")
    assert complaints.startswith("budget: the question cannot be answered: ")
    assert reason in complaints
