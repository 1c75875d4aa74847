"""`python3 proxy/budget.py`: a deployment tool's question about another host, and its answer."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from proxy import budget
from proxy.config.load import load_text
from proxy.errors import ConfigError
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
        (question(limits="0"), "'0' is not a number of descriptors"),
        (question(processors=0), "processors: found 0; wanted a positive whole number"),
        (question(processors=True), "processors: found true"),
    ],
)
def test_a_question_that_is_none_is_told_so(asked: Any, reason: str) -> None:
    code, answered, complaints = ask(asked)
    assert (code, answered) == (2, "")
    assert complaints.startswith("budget: the question cannot be answered: ")
    assert reason in complaints


FAULTY = {
    "zero everywhere": (
        "workers = 0\nmax_connections = 0\nmax_upstream_connections = 0\n[redirect]\nmax_connections = 0\n"
        "[health]\nmax_connections = 0\n[admin]\nmax_connections = 0\n"
    ),
    "too many": (
        "workers = 257\nmax_connections = 1000001\nmax_upstream_connections = 1000001\n"
        "[redirect]\nmax_connections = 1000001\n"
    ),
    "text": (
        'workers = "2"\nmax_connections = "many"\nmax_upstream_connections = "10"\nlisteners = "[::]:443"\n'
        '[redirect]\nenabled = "yes"\naddresses = "[::]:80"\nmax_connections = "1k"\n[health]\nenabled = "no"\n'
    ),
    "truth": (
        "workers = true\nmax_connections = false\nmax_upstream_connections = true\nlisteners = true\n"
        "redirect = true\nhealth = false\nadmin = false\n"
    ),
    "floats": (
        "workers = 2.0\nmax_connections = 10.5\nmax_upstream_connections = 10.0\n[admin]\nmax_connections = 0.0\n"
    ),
    "arrays": (
        "workers = [1]\nmax_connections = []\n[[redirect]]\nenabled = false\n[[health]]\n[[admin]]\n"
        "max_connections = 1\n"
    ),
    "tables": 'listeners = { address = "[::]:443" }\n[workers]\n[max_connections]\n[health.enabled]\n',
    "empty and odd": (
        f"workers = 2026-11-29\nmax_connections = {'9' * 100}\nmax_upstream_connections = nan\n"
        "[redirect]\naddresses = []\nenabled = 12:00:00\n"
    ),
    "what a terminal could obey": 'workers = "\\u001b[2J\\u007f\\n"\nmax_connections = "' + "x" * 100 + '"\n',
    "listeners that are no tables": 'listeners = ["192.0.2.1:443", 3, {}, [1], {address = 443}, {address = ["a"]}]\n',
    "addresses of other shapes": (
        '[redirect]\naddresses = [80, "0.0.0.0:81", [1], {a = 1}, true, 1.5]\n[health]\naddress = 9900\n'
        "[[listeners]]\naddress = { a = 1 }\n"
    ),
    "addresses that are tables": "[redirect]\naddresses = { a = 1 }\n[health]\naddress = 2026-11-29\n",
    "numbers and arrays in place of tables": 'health = 5\nredirect = ["0.0.0.0:80"]\nadmin = "x"\n',
    "of what is off": (
        "[redirect]\nenabled = false\nmax_connections = 0\naddresses = [80]\n"
        "[health]\nenabled = false\nmax_connections = 0\naddress = 9900\n"
    ),
}


@pytest.mark.parametrize("text", FAULTY.values(), ids=FAULTY)
def test_every_bad_key_is_told_at_once_and_in_the_words_of_the_daemon(text: str) -> None:
    assert_told_as_the_daemon_does(text + SITE)


@pytest.mark.parametrize("value", ['"x"', "5", "true", '{ hosts = ["a"] }', '["x"]', "[[1]]"])
def test_sites_of_another_shape_are_told_in_the_words_of_the_daemon(value: str) -> None:
    assert_told_as_the_daemon_does(f"sites = {value}\n")


def assert_told_as_the_daemon_does(text: str) -> None:
    code, answered, complaints = ask(question(text, file="proxy.toml"))
    assert (code, complaints) == (2, "")
    with pytest.raises(ConfigError) as caught:
        load_text(text, file="proxy.toml", base_dir=None)
    without_lines = [re.sub("^proxy.toml:[0-9]+", "proxy.toml", line) for line in str(caught.value).splitlines()]
    assert sorted(json.loads(answered)["faults"]) == sorted(without_lines)


def test_a_bad_key_alone_has_nothing_beside_it() -> None:
    _, answered, _ = ask(question("workers = true\nmax_connections = 10\n" + SITE))
    assert json.loads(answered) == {
        "faults": ['configuration: workers: found true; wanted an integer from 1 to 256, or "auto"']
    }
