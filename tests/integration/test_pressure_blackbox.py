"""The black box on a running appliance: descriptors are taken from a worker, and a record of it stays."""

from __future__ import annotations

import contextlib
import json
import resource
from collections.abc import Callable
from pathlib import Path

from tests.conftest import StartAppliance
from tests.harness.appliance import cli
from tests.harness.processes import wait_until
from tests.harness.reloading import reload
from tests.harness.upstream import RawUpstream
from tests.harness.wire import connect_tcp

GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


def test_a_record_of_the_first_resource_error_stays(
    appliance: StartAppliance, upstream: Callable[..., RawUpstream]
) -> None:
    one = appliance({"sites": [{"hosts": ["*"], "upstreams": [upstream().url]}], "upstream_idle_timeout_secs": 1})
    reload(one)
    empty = cli("blackbox", "--config", str(one.path))
    assert (empty.returncode, empty.stdout.splitlines()[0].startswith("nothing has run out")) == (0, True)
    (worker,) = one.workers
    _, hard = resource.prlimit(worker, resource.RLIMIT_NOFILE)
    with one.connect() as good, contextlib.ExitStack() as stack:
        assert good.request(GET).status == 200
        for _ in range(3):  # they say nothing
            stack.enter_context(connect_tcp(one.port))
        wait_until(lambda: one.status()["totals"]["connections_open"] == 4, "all are accepted")
        resource.prlimit(worker, resource.RLIMIT_NOFILE, (8, hard))
        stack.enter_context(connect_tcp(one.port))
        wait_until(lambda: one.status()["totals"]["black_boxes"] == 1, "the record is written")
        resource.prlimit(worker, resource.RLIMIT_NOFILE, (hard, hard))
        assert good.request(GET).status == 200
    assert b"reverse_proxy_black_boxes_total 1" in one.health("/metrics")[1]
    (record,) = json.loads(cli("blackbox", "--json", "--socket", one.admin_socket).stdout)["records"]
    assert record["cause"] == "accept.emfile"
    assert (record["worker"], record["pid"], record["limit"]["soft"]) == (0, worker, 8)
    assert record["descriptors"]["client connections"] == 4
    assert record["counters"]["connections_accepted"] >= 4
    assert record["clients"] == [["127.0.0.1/32", 4]]
    assert len(record["reloads"]) == 1
    states = [found["state"] for found in record["oldest"]]
    assert sorted(states) == ["handshake"] * 3 + ["idle"]
    ages = [found["age_secs"] for found in record["oldest"]]
    assert ages == sorted(ages, reverse=True)
    one.stop()
    shown = cli("blackbox", "--config", str(one.path))  # nobody has to answer
    assert shown.returncode == 0
    assert "accept.emfile" in shown.stdout
    assert "127.0.0.1/32" in shown.stdout


def test_without_its_folder_it_serves_without(
    appliance: StartAppliance, upstream: Callable[..., RawUpstream], tmp_path: Path
) -> None:
    state = tmp_path / "state"
    state.mkdir()
    (state / "blackbox").write_text("no folder")
    one = appliance({"sites": [{"hosts": ["*"], "upstreams": [upstream().url]}], "state_dir": str(state)})
    with one.connect() as client:
        assert client.request(GET).status == 200
    assert any(" black_box.unavailable " in line for line in one.event_lines())
