"""deploy/'s alerts, dashboard and scrape configuration, with a real Prometheus that watches a running appliance."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.conftest import StartAppliance
from tests.harness import Appliance, FreePorts, RawUpstream, processes, wait_until

PROJECT = Path(__file__).resolve().parents[2]
DEPLOY = PROJECT / "deploy"
ALERTS = DEPLOY / "alerts.yml"
HISTORIES = Path(__file__).with_name("alerts.test.yml")
GET = b"GET / HTTP/1.1\r\nHost: www.example.org\r\n\r\n"
QUERY_SECS = 10.0
VARIABLES = {"$job": "reverse-proxy", "$instance": ".+", "$__rate_interval": "1m"}
MAY_BE_EMPTY = ("> 0", "changes(")
"""What shows only while something happens, and what Prometheus cannot say of one sample."""


def program(name: str) -> str:
    found = shutil.which(name)
    assert found is not None, "Debian's package prometheus has it"
    return found


def promtool(*arguments: str) -> None:
    done = subprocess.run([program("promtool"), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((DEPLOY / "dashboard.json").read_text())["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def dashboard_queries() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


@pytest.fixture
def watched(appliance: StartAppliance, upstream: Callable[..., RawUpstream]) -> Appliance:
    """An appliance with something in each of its metrics that only show with traffic."""
    one = appliance({"sites": [{"hosts": ["www.example.org"], "upstreams": [upstream().url]}]})
    with one.connect() as wire:
        assert wire.request(GET).status == 200
    wait_until(lambda: b"reverse_proxy_requests_total{" in one.health("/metrics")[1], "the request is on the page")
    return one


@pytest.fixture
def prometheus(watched: Appliance, tmp_path: Path) -> Iterator[str]:
    """The URL of a Prometheus with deploy/prometheus.yml, that asks ``watched`` each second."""
    settings = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    (job,) = settings["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["127.0.0.1:9900"]}]
    job |= {"scrape_interval": "1s", "scrape_timeout": "1s"}
    job["static_configs"] = [{"targets": [watched.config["health"]["address"]]}]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(settings))
    shutil.copy(ALERTS, tmp_path)
    ports = FreePorts()
    address = f"127.0.0.1:{ports.take()}"
    ports.release()
    log = tmp_path / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                program("prometheus"),
                f"--config.file={tmp_path}/prometheus.yml",
                f"--storage.tsdb.path={tmp_path}/data",
                f"--web.listen-address={address}",
            ],
            stdout=output,
            stderr=output,
        )
    try:
        url = f"http://{address}"
        wait_until(lambda: has_scraped_twice(url), f"Prometheus has scraped twice:\n{log.read_text()}", 30)
        yield url
    finally:
        process.kill()
        process.wait(processes.POLL_SECS + 10)


def ask(url: str, path: str, **parameters: str) -> Any:
    with urllib.request.urlopen(f"{url}{path}?{urllib.parse.urlencode(parameters)}", timeout=QUERY_SECS) as answer:
        body = json.load(answer)
    assert body["status"] == "success", body
    return body["data"]


def query(url: str, expression: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ask(url, "/api/v1/query", query=expression)["result"]
    return found


def has_scraped_twice(url: str) -> bool:
    try:
        counted = query(url, 'count_over_time(up{job="reverse-proxy"}[1m])')
    except OSError:
        return False
    return bool(counted) and float(counted[0]["value"][1]) >= 2


def test_the_rules_and_the_scrape_configuration_are_good() -> None:
    promtool("check", "rules", str(ALERTS))
    promtool("check", "config", str(DEPLOY / "prometheus.yml"))


def test_each_alert_on_its_histories() -> None:
    promtool("test", "rules", str(HISTORIES))


def test_each_alert_has_a_history_that_wakes_and_one_that_does_not() -> None:
    tried: dict[str, set[bool]] = {}
    for history in yaml.safe_load(HISTORIES.read_text())["tests"]:
        for case in history["alert_rule_test"]:
            tried.setdefault(case["alertname"], set()).add(bool(case["exp_alerts"]))
    assert tried == {rule["alert"]: {True, False} for rule in rules()}


def test_the_operator_is_told_what_to_do_for_each_alert() -> None:
    text = (PROJECT / "docs" / "operations.md").read_text()
    described = set(re.findall(r"(?m)^\| `(ReverseProxy\w+)`", text))
    assert described == {rule["alert"] for rule in rules()}


def test_every_metric_and_label_is_there(watched: Appliance) -> None:
    status, body = watched.health("/metrics")
    assert status == 200
    there: dict[str, set[str]] = {}
    for name, labels in re.findall(r"(?m)^([a-z_]+)(?:\{(.*)\})? \S+$", body.decode()):
        there.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    lazy = {"reverse_proxy_events_suppressed_total"}  # no series before the first event that is left out
    assert all(f"# TYPE {name} " in body.decode() for name in lazy)
    expressions = [rule["expr"] for rule in rules()] + dashboard_queries()
    assert len(expressions) > 50
    for expression in expressions:
        names = set(re.findall(r"\breverse_proxy_\w+", expression))
        assert names or expression.startswith("up{"), expression
        assert names - lazy <= there.keys(), expression
        for name, matchers in re.findall(r"\b(reverse_proxy_\w+)\{([^}]*)\}", expression):
            wanted = set(re.findall(r"(\w+)=", matchers)) - {"job", "instance"}
            assert wanted <= there.get(name, set()), expression
    for rule in rules():
        shown = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])) - {"instance"}
        known = set().union(*(there.get(name, set()) for name in re.findall(r"\breverse_proxy_\w+", rule["expr"])))
        assert shown <= known | {"signature"}, rule["alert"]


def test_the_dashboard_shows_the_appliance(prometheus: str) -> None:
    empty = []
    for expression in dashboard_queries():
        text = expression
        for name, substitute in VARIABLES.items():
            text = text.replace(name, substitute)
        assert "$" not in text, expression
        if not query(prometheus, text) and not any(sign in expression for sign in MAY_BE_EMPTY):
            empty.append(expression)
    # The two that wait for a first repeat of an event.
    assert [text for text in empty if "events_suppressed_total" not in text] == []
    (ready,) = query(prometheus, "reverse_proxy_ready")
    assert ready["value"][1] == "1"


def test_a_good_appliance_wakes_nobody(prometheus: str) -> None:
    loaded = ask(prometheus, "/api/v1/rules")["groups"][0]["rules"]
    assert [rule["name"] for rule in loaded] == [rule["alert"] for rule in rules()]
    for rule in rules():
        assert query(prometheus, rule["expr"]) == [], rule["alert"]


def test_the_dashboard_is_laid_out() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        assert panel["title"]
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24, panel["title"]
        assert not cells & own, panel["title"]
        cells |= own
    every = json.loads((DEPLOY / "dashboard.json").read_text())["panels"]
    assert len({panel["id"] for panel in every}) == len(every)
