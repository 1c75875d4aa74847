"""A reload by each of its triggers, what it answers, and the file that is refused."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import StartAppliance
from tests.harness import Appliance, FreePorts, RawUpstream, cli, descriptor_count, wait_until
from tests.harness.reloading import TRIGGERS, post, refused, reload, rewrite
from tests.harness.upstream import answering

REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
WORKERS = 4
CONFIRM_SECS = 10
"""Time enough, on a busy machine too, for what a test does before nobody has confirmed."""


def reply(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def sites(url: str, **options: Any) -> list[dict[str, Any]]:
    return [{"hosts": ["*"], "upstreams": [url], **options}]


def ask(one: Appliance) -> bytes:
    with one.connect() as client:
        return client.request(REQUEST).body


def everywhere(one: Appliance) -> set[bytes]:
    """What the workers answer; enough connections that each of four takes part."""
    return {ask(one) for _ in range(24)}


def descriptors(one: Appliance) -> list[int]:
    return [descriptor_count(pid) for pid in (one.pid, one.control, *one.workers)]


def settled(one: Appliance) -> list[int]:
    """The descriptors once nothing of the start (a probe of readiness, a log being opened) comes or goes any more."""
    seen: list[list[int]] = []

    def same_thrice() -> bool:
        seen.append(descriptors(one))
        return len(seen) > 2 and seen[-1] == seen[-2] == seen[-3]

    wait_until(same_thrice, "the descriptors settle")
    return seen[-1]


@pytest.mark.parametrize("trigger", TRIGGERS)
def test_each_trigger_does_the_same(
    appliance: StartAppliance, upstream: Callable[..., RawUpstream], trigger: Callable[[Appliance], None]
) -> None:
    old, new = upstream(answering(reply(b"old"))), upstream(answering(reply(b"new")))
    one = appliance({"workers": WORKERS, "sites": sites(old.url)})
    workers = one.workers
    assert everywhere(one) == {b"old"}
    rewrite(one, sites=sites(new.url))
    trigger(one)
    assert everywhere(one) == {b"new"}
    assert one.workers == workers, "no process was replaced"
    assert one.status()["generation"] == 2
    (line,) = (line for line in one.event_lines() if " reload.accepted " in line)
    assert "generation=2" in line
    assert "sites_changed: *: upstreams" in line
    rewrite(one, nonsense=1)
    trigger(one)
    assert everywhere(one) == {b"new"}
    assert one.status()["generation"] == 2
    wait_until(lambda: any(" reload.refused " in line for line in one.event_lines()), "it is told")
    last = one.status()["last_reload"]
    assert (last["result"], last["generation"]) == ("refused", 2)
    assert "nonsense" in last["errors"][0]
    rewrite(one, nonsense=None)


def test_the_answer(appliance: StartAppliance, upstream: Callable[..., RawUpstream]) -> None:
    ports = FreePorts()
    added = f"127.0.0.1:{ports.take()}"
    ports.release()
    one = appliance({"workers": WORKERS, "max_connections": 100}, upstream=upstream().url)
    first = one.config["listeners"][0]
    rewrite(one, max_connections=200, listeners=[first, {"address": added}], workers=2)
    document = post(one, "/reload?dry_run=1")
    assert (document["result"], document["generation"], document["http"]) == ("would-be-accepted", 1, 200)
    assert one.status()["permits"] == 100
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(added.rpartition(":")[2])), 5)

    document = post(one, "/reload")
    needed = document.pop("descriptors")
    assert needed["before"] < needed["after"]
    assert document.pop("warnings") is not None
    assert document == {
        "http": 200,
        "result": "accepted",
        "generation": 2,
        "changes": {
            "listeners_added": [added],
            "limits_changed": ["max_connections: 100 -> 200"],
            "needs_restart": ["workers"],
        },
        "connections_closed": 0,
        "errors": [],
        "confirm_secs": None,
    }
    status = one.status()
    assert (status["permits"], len(status["workers"])) == (200, WORKERS)
    assert [worker["permits"] for worker in status["workers"]] == [50] * WORKERS


def test_the_command(appliance: StartAppliance) -> None:
    one = appliance({"workers": 2})
    rewrite(one, max_connections=300)
    ended = cli("reload", "--config", str(one.path), "--dry-run")
    assert (ended.returncode, ended.stdout.splitlines()[0]) == (0, "would-be-accepted: generation 1")
    assert one.status()["generation"] == 1
    ended = cli("reload", "--socket", one.admin_socket)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("accepted: generation 2\n  limits changed: max_connections: 1024 -> 300\n")
    ended = cli("reload", "--config", str(one.path), "--json")
    assert json.loads(ended.stdout)["generation"] == 3
    rewrite(one, max_connections="many")
    for where in (("--config", str(one.path)), ("--socket", one.admin_socket)):
        ended = cli("reload", *where)
        assert ended.returncode == 2
        assert 'max_connections: found "many"' in ended.stderr
        assert ended.stdout.startswith("refused: generation 3")
    wait_until(lambda: any(" reload.refused " in line for line in one.event_lines()), "it is told")
    assert cli("status", "--config", str(one.path)).returncode == 0, "a faulty file still says where to ask"


def test_nobody_to_reload(tmp_path: Any) -> None:
    ended = cli("reload", "--socket", str(tmp_path / "none.sock"))
    assert ended.returncode == 1
    assert "none.sock" in ended.stderr


# -- refusals


def fault_syntax(one: Appliance) -> str:
    one.path.write_text("max_connections = = 3\n")
    return "proxy.toml:1"


def fault_unknown_key(one: Appliance) -> str:
    rewrite(one, max_conections=3)
    return "max_conections"


def fault_budget(one: Appliance) -> str:
    rewrite(one, max_connections=900_000)
    return "max_connections = 900000 needs"


def fault_certificate(one: Appliance) -> str:
    certificates = [{"chain": str(one.folder / "none.pem"), "key": str(one.folder / "none.key")}]
    rewrite(one, listeners=[{**one.config["listeners"][0], "certificates": certificates}])
    return "none.pem"


def fault_log(one: Appliance) -> str:
    rewrite(one, access_log={"path": str(one.folder / "nowhere" / "access.log")})
    return "access_log.path"


def fault_file_gone(one: Appliance) -> str:
    one.path.unlink()
    return "there is no such file"


FAULTS = (fault_syntax, fault_unknown_key, fault_budget, fault_certificate, fault_log, fault_file_gone)


def test_a_refused_one_changes_nothing(appliance: StartAppliance, upstream: Callable[..., RawUpstream]) -> None:
    old, new = upstream(answering(reply(b"old"))), upstream(answering(reply(b"new")))
    # On a busy machine the faults take longer than the default leaves the held connection idle.
    patient = {"connection_idle_timeout_secs": 600}
    one = appliance({"workers": WORKERS, "sites": sites(old.url), **patient}, nofile=4096)
    good = dict(one.config)
    assert everywhere(one) == {b"old"}
    held = one.connect()
    assert held.request(REQUEST.replace(b"Connection: close\r\n", b"")).body == b"old"
    wait_until(lambda: one.status()["totals"]["connections_open"] == 1, "the others have gone")
    before = descriptors(one)
    for fault in FAULTS:
        one.config = {**good, "sites": sites(new.url)}
        reason = fault(one)
        ended = cli("reload", "--socket", one.admin_socket)
        assert ended.returncode == 2, fault
        assert reason in ended.stderr, fault
        assert everywhere(one) == {b"old"}, fault
    one.config = good
    assert held.request(REQUEST).body == b"old"
    held.close()
    wait_until(lambda: one.status()["totals"]["connections_open"] == 0, "all have gone")
    wait_until(lambda: sum(descriptors(one)) <= sum(before), f"no descriptor is left over: {before}")
    assert one.status()["generation"] == 1
    lines = [line for line in one.event_lines() if " reload.refused " in line]
    assert lines
    assert "proxy.toml:1" in lines[0]
    reload(one, sites=sites(new.url))
    assert everywhere(one) == {b"new"}


def test_a_strangers_port_is_refused_and_the_good_one_beside_it_let_go(
    appliance: StartAppliance, upstream: Callable[..., RawUpstream]
) -> None:
    one = appliance({"workers": WORKERS}, upstream=upstream().url)
    ports = FreePorts()
    free = ports.take()
    ports.release()
    before = settled(one)
    listeners = one.config["listeners"]
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        taken = stranger.getsockname()[1]
        wanted = [*listeners, {"address": f"127.0.0.1:{free}"}, {"address": f"127.0.0.1:{taken}"}]
        (reason,) = refused(one, listeners=wanted)
        assert f"port {taken} is in use by" in reason
        assert str(os.getpid()) in reason
        document = post(one, "/reload?dry_run=1")
        assert document["errors"] == [reason]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", free), 5)
    wait_until(lambda: descriptors(one) == before, "no descriptor is left over")
    assert reload(one)["changes"] == {"listeners_added": [one_["address"] for one_ in wanted[1:]]}
    for port in (free, taken):
        socket.create_connection(("127.0.0.1", port), 5).close()


def test_what_cannot_change_live_is_said_and_kept(appliance: StartAppliance) -> None:
    one = appliance({"workers": 2})
    health, events = one.config["health"], one.config["event_log"]
    document = reload(
        one,
        workers=3,
        state_dir=str(one.folder / "elsewhere"),
        health={**health, "max_connections": 7},
        event_log={**events, "path": str(one.folder / "other.log")},
    )
    assert document["changes"] == {"needs_restart": ["workers", "state_dir", "health", "event_log.path"]}
    assert len(one.workers) == 2
    assert not (one.folder / "other.log").exists()
    assert not (one.folder / "elsewhere").exists()
    one.config["event_log"] = events


# -- confirm


def test_without_a_word_it_goes_back(appliance: StartAppliance, upstream: Callable[..., RawUpstream]) -> None:
    old, new = upstream(answering(reply(b"old"))), upstream(answering(reply(b"new")))
    one = appliance({"workers": WORKERS, "sites": sites(old.url)})
    listeners, ports = one.config["listeners"], FreePorts()
    port = ports.take()
    ports.release()
    rewrite(one, sites=sites(new.url), listeners=[*listeners, {"address": f"127.0.0.1:{port}"}])
    document = post(one, f"/reload?confirm_secs={CONFIRM_SECS}")
    assert (document["result"], document["confirm_secs"]) == ("accepted", CONFIRM_SECS)
    assert everywhere(one) == {b"new"}
    socket.create_connection(("127.0.0.1", port), 5).close()
    again = post(one, "/reload")
    assert again["result"] == "refused"
    assert "confirm" in again["errors"][0]
    wait_until(
        lambda: any(" reload.not_confirmed " in line for line in one.event_lines()),
        "it has gone back",
        3 * CONFIRM_SECS,
    )
    assert everywhere(one) == {b"old"}
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5)
    assert one.status()["generation"] == 3
    assert post(one, "/confirm")["result"] == "refused"


def test_confirm_keeps(appliance: StartAppliance) -> None:
    one = appliance({"workers": 2, "max_connections": 100})
    rewrite(one, max_connections=120)
    ended = cli("reload", "--config", str(one.path), "--confirm", f"{CONFIRM_SECS}s")
    assert ended.returncode == 0
    assert f"goes back in {CONFIRM_SECS} s unless" in ended.stdout
    passed_secs = one.status()["uptime_secs"] + CONFIRM_SECS + 1
    assert post(one, "/confirm")["result"] == "confirmed"
    assert cli("confirm", "--config", str(one.path)).returncode == 1, "once is enough"
    wait_until(lambda: one.status()["uptime_secs"] > passed_secs, "its time has passed", 3 * CONFIRM_SECS)
    assert one.status()["permits"] == 120
    assert not any(" reload.not_confirmed " in line for line in one.event_lines())


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf", "1e9"])
def test_a_time_to_confirm_that_is_none(appliance: StartAppliance, text: str) -> None:
    one = appliance()
    assert post(one, f"/reload?confirm_secs={text}")["http"] == 400
    assert cli("reload", "--config", str(one.path), "--confirm", text).returncode == 2
    assert one.status()["generation"] == 1
