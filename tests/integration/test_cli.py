"""The command line and the master, as an operator meets them: real processes, real ports, real signals."""

from __future__ import annotations

import json
import os
import pty
import resource
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import StartAppliance
from tests.harness import FreePorts, RawUpstream, alive, children, cli, connect_tls, descriptor_count, wait_until
from tests.harness.processes import descendants, title
from tests.harness.toml import to_toml


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., str]:
    """``config(key=value)`` writes a file that `check` finds good on any host, changed by the arguments."""

    def write(**changed: object) -> str:
        base: dict[str, object] = {
            "state_dir": str(tmp_path / "state"),
            "listeners": [{"address": "127.0.0.1:8443"}],
            "redirect": {"enabled": False},
            "health": {"address": "127.0.0.1:9900"},
            "admin": {"socket": "/run/reverse-proxy-test/admin.sock"},
            "sites": [{"hosts": ["*"], "upstreams": ["http://127.0.0.1:9"]}],
        }
        path = tmp_path / "proxy.toml"
        path.write_text(to_toml(base | changed))
        return str(path)

    return write


@pytest.fixture
def ports() -> Iterator[FreePorts]:
    held = FreePorts()
    yield held
    held.release()


def refused(result: subprocess.CompletedProcess[str], exit_code: int, *parts: str) -> None:
    assert result.returncode == exit_code, result
    assert "Traceback" not in result.stderr
    assert "reverse-proxy" in result.stderr
    for part in parts:
        assert part in result.stderr


# -- usage


def test_version() -> None:
    result = cli("--version")
    assert (result.returncode, result.stdout) == (0, "reverse-proxy 0.1.0\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "COMMAND"),
        (("dance",), "unknown command 'dance': reverse-proxy COMMAND [OPTIONS], with one of run, check, "),
        (("chekc",), "unknown command 'chekc': did you mean check?"),
        (("start",), "unknown command 'start': did you mean run?\n"),
        (("check", "--cofig", "x"), "unknown option --cofig of check: did you mean --config?\nusage: "),
        (("check", "--config", "x", "--jsno"), "unknown option --jsno of check: did you mean --json?\nusage: "),
        (("check", "-config=x"), "unknown option -config of check: did you mean --config?\nusage: "),
        (("stop", "--at-once"), "unknown option --at-once of stop: stop has --config, --help, --socket, -h\nusage: "),
        (("demo", "--port", "-1"), "'-1' is not a port"),
        (("--config", "a.toml"), "found --config where the command belongs"),
        (
            ("--config", "my proxy.toml", "check", "--json"),
            "options stand after the command: reverse-proxy check --config 'my proxy.toml' --json\n",
        ),
        (("--config", "check", "run"), "options stand after the command: reverse-proxy run --config check\n"),
        (("check", "proxy.toml"), "did you mean --config proxy.toml? reverse-proxy check --config proxy.toml\n"),
        (("why", "proxy.toml"), "did you mean --config proxy.toml?"),
        (("serve", "127.0.0.1:1"), "did you mean --to 127.0.0.1:1?"),
        (("run",), "--config"),
        (("serve",), "--to"),
        (("check", "--config", "x", "--nofile", "many"), "'many' is not a number of descriptors"),
        (("check", "--config", "x", "--nofile", "2048:1024"), "above the hard limit"),
        (("demo", "--port", "70000"), "'70000' is not a port"),
        (("status", "--config", "a", "--socket", "b"), "not allowed with"),
        (("run", "--config", "/nonexistent/proxy.toml"), "/nonexistent/proxy.toml"),
        (("check", "--config", "/nonexistent/proxy.toml"), "/nonexistent/proxy.toml"),
        (("serve", "--to", "127.0.0.1:99999"), "99999"),
    ],
)
def test_a_wrong_command_line_is_exit_2(arguments: tuple[str, ...], said: str) -> None:
    refused(cli(*arguments), 2, said)


def test_a_reader_that_is_gone_is_no_traceback(config: Callable[..., str]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "proxy", "check", "--config", config()]
    with os.fdopen(write_end, "wb") as out:
        result = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, timeout=30)
    assert (result.returncode, result.stderr) == (1, b"")


def test_a_full_disk_is_no_traceback(config: Callable[..., str]) -> None:
    command = [sys.executable, "-m", "proxy", "check", "--config", config(max_connections=10)]
    with open("/dev/full", "wb") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=30)
    assert (result.returncode, result.stderr) == (
        1,
        "reverse-proxy: cannot write the output: No space left on device\n",
    )


def test_closed_standard_descriptors_are_no_sockets_of_ours(config: Callable[..., str]) -> None:
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-m", "proxy"]
    assert subprocess.run([*command, "check", "--config", config(max_connections=10)], timeout=30).returncode == 0
    assert subprocess.run([*command, "check", "--config", "/nonexistent"], timeout=30).returncode == 2


# -- check


def test_check_finds_a_good_file_good_and_shows_the_arithmetic(config: Callable[..., str]) -> None:
    result = cli("check", "--config", config(max_connections=100), "--nofile", "4096")
    assert result.returncode == 0, result
    # 100 clients + 100 upstreams + 1 refused + 1 listener + 2 logs + 2 channel + 64 reserve.
    assert "max_connections = 100 needs 270 descriptors: fits" in result.stdout
    assert "client connections (share of 100)" in result.stdout
    assert "self-signed" in result.stdout


def test_the_incidents_configuration_is_refused(config: Callable[..., str]) -> None:
    result = cli("check", "--config", config(), "--nofile", "1024")
    refused(
        result,
        2,
        # 2 x 1024 + 1 refused + 1 listener + 2 logs + 2 channel + 64 reserve.
        "max_connections = 1024 needs 2118 descriptors in a worker, the limit is 1024 (soft) / 1024 (hard)",
        "LimitNOFILE=3072",
        "max_connections to at most 477",
    )
    assert "upstream connections (share of 1024)" in result.stdout
    assert cli("check", "--config", config(max_connections=477), "--nofile", "1024").returncode == 0
    assert cli("check", "--config", config(max_connections=478), "--nofile", "1024").returncode == 2
    assert cli("check", "--config", config(), "--nofile", "3072").returncode == 0


def test_a_high_hard_limit_lets_the_soft_one_be_raised(config: Callable[..., str]) -> None:
    result = cli("check", "--config", config(), "--nofile", "1024:519288")
    assert result.returncode == 0
    assert "raising the soft limit from 1024 to 2118" in result.stdout


@pytest.mark.parametrize("limit", ["unlimited", "1024:unlimited"])
def test_unlimited_is_accepted(config: Callable[..., str], limit: str) -> None:
    assert cli("check", "--config", config(), "--nofile", limit).returncode == 0


def test_auto_takes_the_largest(config: Callable[..., str]) -> None:
    result = cli("check", "--config", config(max_connections="auto"), "--nofile", "1024", "--json")
    assert json.loads(result.stdout)["budget"]["max_connections"] == 477


def test_check_judges_for_programs(config: Callable[..., str]) -> None:
    result = cli("check", "--config", config(), "--nofile", "1024", "--json")
    shown = json.loads(result.stdout)
    assert (result.returncode, shown["ok"], shown["budget"]["verdict"]) == (2, False, "refused")
    assert len(shown["errors"]) == 1


def test_each_fault_is_one_element_for_programs(config: Callable[..., str]) -> None:
    path = config(max_connections=0, workers=0, drain_timeout_secs=-1)
    result = cli("check", "--config", path, "--json")
    told = json.loads(result.stdout)["errors"]
    assert [line.split(": ")[1] for line in told] == ["max_connections", "workers", "drain_timeout_secs"]
    assert result.stderr.splitlines() == [f"reverse-proxy: {line}" for line in told]


def test_check_names_every_fault_at_once(config: Callable[..., str], tmp_path: Path) -> None:
    missing = {"chain": str(tmp_path / "no-chain.pem"), "key": str(tmp_path / "no-key.pem")}
    path = config(
        listeners=[{"address": "127.0.0.1:8443", "certificates": [missing]}],
        access_log={"path": str(tmp_path / "nowhere" / "access.log")},
    )
    refused(cli("run", "--validate", "--config", path, nofile=1024), 2, "LimitNOFILE", "nowhere", "no-chain.pem")


def test_check_names_every_certificate_that_cannot_be_served(config: Callable[..., str], tmp_path: Path) -> None:
    pairs = [{"chain": str(tmp_path / f"{name}.pem"), "key": str(tmp_path / f"{name}.key")} for name in ("a", "b", "c")]
    path = config(
        listeners=[
            {"address": "127.0.0.1:8443", "certificates": pairs[:2]},
            {"address": "127.0.0.1:8444", "certificates": pairs[2:]},
        ]
    )
    for command in ("check", "run"):
        result = cli(command, "--config", path, nofile=4096)
        refused(result, 2, *(file for pair in pairs for file in pair.values()))
        for key in ("listeners[0].certificates[0]", "listeners[0].certificates[1]", "listeners[1].certificates[0]"):
            assert result.stderr.count(f"{path}:2: {key}: ") == 2, result.stderr  # the chain and the key


def test_a_file_in_place_of_the_admin_socket_is_refused_and_kept(config: Callable[..., str], tmp_path: Path) -> None:
    precious = tmp_path / "notes.txt"
    precious.write_text("precious")
    path = config(admin={"socket": str(precious)}, listeners=[{"address": "127.0.0.1:18443"}])
    for command in ("check", "run"):
        result = cli(command, "--config", path, nofile=4096)
        refused(result, 2, f"{path}:5: admin.socket: ", "another kind of file is there; choose another path")
        assert "remove" not in result.stderr
    assert precious.read_text() == "precious"


def test_a_fifo_that_nobody_writes_to_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pipe.toml"
    os.mkfifo(path)
    for command in ("check", "status"):
        refused(cli(command, "--config", str(path)), 2, f"{path}: found a FIFO that nobody writes to")


@pytest.mark.parametrize("source", ["FIFO", "<(sleep 2; cat FILE)", "<(cat FILE)", "/dev/stdin < FILE", "/dev/stdin"])
@pytest.mark.parametrize(("connections", "status"), [(10, 0), (90_000, 2)])
def test_a_configuration_may_come_through_a_pipe(
    config: Callable[..., str], tmp_path: Path, source: str, connections: int, status: int
) -> None:
    path = config(max_connections=connections)
    os.mkfifo(tmp_path / "pipe")
    command = f"cat FILE | {sys.executable} -m proxy check --nofile 4096 --config {source}"
    if source == "FIFO":
        command = f"cat FILE > FIFO & {command}"
    command = command.replace("FILE", path).replace("FIFO", str(tmp_path / "pipe"))
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30)
    assert result.returncode == status, result
    assert ("max_connections = 90000 needs" in result.stderr) == (status == 2), result


def test_a_failed_check_prints_no_empty_line(config: Callable[..., str]) -> None:
    result = cli("check", "--config", config(listeners="0.0.0.0:443"))
    assert result.stdout == ""
    refused(result, 2, 'write [[listeners]] with two brackets, below it address = "0.0.0.0:443"')


@pytest.mark.parametrize("folder", ["/proc/nix", "/dev/null/state"])
def test_check_refuses_a_state_folder_that_cannot_be_made(config: Callable[..., str], folder: str) -> None:
    path = config(state_dir=folder)
    refused(
        cli("check", "--config", path, "--nofile", "4096"), 2, f"{path}:1: state_dir = '{folder}' cannot be written"
    )


def test_run_refuses_a_file_in_place_of_the_state_folder_as_check_does(
    config: Callable[..., str], tmp_path: Path, ports: FreePorts
) -> None:
    (tmp_path / "state").write_text("a file")
    path = config(listeners=[{"address": f"127.0.0.1:{ports.take()}"}], health={"enabled": False})
    ports.release()
    told = [cli(command, "--config", path, nofile=4096) for command in ("check", "run")]
    for result in told:
        refused(result, 2, f"{path}:1: state_dir = '{tmp_path}/state' cannot be written")
    assert told[0].stderr == told[1].stderr


def test_check_binds_no_port_and_writes_nothing(config: Callable[..., str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        path = config(listeners=[{"address": f"127.0.0.1:{taken.getsockname()[1]}"}])
        assert cli("check", "--config", path, "--nofile", "4096").returncode == 0
    assert sorted(item.name for item in tmp_path.iterdir()) == ["proxy.toml"]


# -- start


def test_run_refuses_a_budget_that_does_not_fit(config: Callable[..., str]) -> None:
    refused(cli("run", "--config", config(), nofile=1024), 2, "needs 2118 descriptors in a worker", "reserve")


def test_run_raises_the_soft_limit_and_says_so(appliance: StartAppliance) -> None:
    one = appliance(nofile=(1024, 8192))
    (worker,) = one.workers
    # As above, and 64 redirect connections with their listener.
    assert resource.prlimit(worker, resource.RLIMIT_NOFILE) == (2183, 8192)
    wait_until(lambda: any("limit.raised" in line for line in one.event_lines()), "it is said")
    (line,) = (line for line in one.event_lines() if "limit.raised" in line)
    assert "from 1024 to 2183" in line


def test_the_owner_of_a_port_is_named(config: Callable[..., str]) -> None:
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as owner:
        path = config(listeners=[{"address": f"127.0.0.1:{owner.getsockname()[1]}"}])
        refused(cli("run", "--config", path), 1, f"in use by pid {os.getpid()} (")


def test_a_second_instance_is_refused_and_the_first_goes_on(appliance: StartAppliance) -> None:
    first = appliance()
    refused(cli("run", "--config", str(first.path)), 1, f"pid {first.pid} (reverse-proxy: master)")
    assert first.ready()
    assert first.status()["pid"] == first.pid


def test_a_second_instance_on_other_ports_does_not_take_the_admin_socket(
    appliance: StartAppliance, config: Callable[..., str]
) -> None:
    first = appliance()
    ports = FreePorts()
    path = config(
        listeners=[{"address": f"127.0.0.1:{ports.take()}"}],
        health={"enabled": False},
        admin={"socket": first.admin_socket},
    )
    ports.release()
    refused(cli("run", "--config", path), 1, f"another instance (pid {first.pid}) answers")
    assert first.status()["pid"] == first.pid


def test_a_stale_admin_socket_is_replaced_and_the_file_goes_at_the_end(appliance: StartAppliance) -> None:
    first = appliance()
    first.kill()
    assert os.path.exists(first.admin_socket)
    second = appliance({"admin": {"socket": first.admin_socket}})
    assert stat.S_IMODE(os.lstat(first.admin_socket).st_mode) == 0o600
    second.stop()
    assert not os.path.exists(first.admin_socket)


def test_an_event_log_that_cannot_be_opened_fails_the_start_with_the_reason(
    config: Callable[..., str], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")  # nobody reads it, which only opening it shows
    ports = FreePorts()
    path = config(
        listeners=[{"address": f"127.0.0.1:{ports.take()}"}],
        health={"enabled": False},
        admin={"socket": f"/tmp/rp-{os.getpid()}.sock"},
        event_log={"path": str(tmp_path / "pipe")},
    )
    ports.release()
    refused(cli("run", "--config", path), 1, "event_log.path", "control ended while starting (exit status 1)")


BROKEN_WORKER = """
import sys
from proxy.config.load import load_settings
from proxy.errors import StartError
from proxy.master.supervisor import Supervisor

def run_worker(context):
    raise RuntimeError("two\\nlines")

try:
    Supervisor(load_settings(sys.argv[1]), run_worker).run()
except StartError as error:
    print(error)
"""


def test_a_worker_that_cannot_start_is_one_line_and_ends_the_start(
    config: Callable[..., str], tmp_path: Path, ports: FreePorts
) -> None:
    path = config(
        listeners=[{"address": f"127.0.0.1:{ports.take()}"}],
        health={"enabled": False},
        admin={"socket": f"/tmp/rp-{os.getpid()}.sock"},
        event_log={"path": str(tmp_path / "events.log")},
    )
    ports.release()
    result = subprocess.run([sys.executable, "-c", BROKEN_WORKER, path], capture_output=True, text=True, timeout=60)
    assert "worker 0 ended while starting (exit status 1): see the event log" in result.stdout, result
    assert result.stderr == ""
    (line,) = (line for line in (tmp_path / "events.log").read_text().splitlines() if "worker.failed" in line)
    assert "RuntimeError: two" in line
    assert not os.path.exists(f"/tmp/rp-{os.getpid()}.sock")


# -- running


def test_what_runs_is_said(appliance: StartAppliance) -> None:
    one = appliance({"workers": 2})
    assert title(one.pid) == "reverse-proxy: master"
    assert sorted(title(pid) for pid in children(one.pid)) == [
        "reverse-proxy: control",
        "reverse-proxy: worker 0",
        "reverse-proxy: worker 1",
    ]
    wait_until(lambda: any(" started " in line for line in one.event_lines()), "the start line")
    (line,) = (line for line in one.event_lines() if " started " in line)
    assert f"listeners=127.0.0.1:{one.port}" in line
    assert "permits=1024" in line
    assert any("certificate.self_signed" in line for line in one.event_lines())


def test_status_for_programs_and_for_people(appliance: StartAppliance) -> None:
    one = appliance({"max_connections": 101, "workers": 2})
    shown = json.loads(cli("status", "--config", str(one.path), "--json").stdout)
    assert shown["ready"] is True
    assert [worker["permits"] for worker in shown["workers"]] == [51, 50]
    assert [worker["pid"] for worker in shown["workers"]] == list(one.workers)
    assert shown["listeners"][0]["self_signed"] is True
    assert shown["budget"]["verdict"] == "fits"
    assert shown["totals"]["requests"] == 0
    text = cli("status", "--socket", one.admin_socket).stdout
    assert "self-signed: localhost" in text
    assert "0 of 51" in text
    assert "\x1b" not in text


def test_status_without_an_instance_says_where_it_looked(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    refused(cli("status", "--socket", str(path)), 1, "no instance answers", str(path))
    path.write_text("a file")
    refused(cli("status", "--socket", str(path)), 1, f"{path} (it is no socket but another kind of file)")
    long = str(tmp_path / ("s" * 200))
    refused(cli("status", "--socket", long), 1, f"{long} (the path of a socket has at most 107 bytes)")


def test_the_health_listener(appliance: StartAppliance) -> None:
    one = appliance()
    assert one.health("/healthz") == (200, b"ok\n")
    assert one.health("/readyz") == (200, b"ok\n")
    assert one.health("/other")[0] == 404


def test_readiness_goes_red_when_a_worker_hangs(appliance: StartAppliance) -> None:
    one = appliance()
    (worker,) = one.workers
    os.kill(worker, signal.SIGSTOP)
    try:
        wait_until(lambda: one.health("/healthz")[0] == 503, "the heartbeat is missed", timeout_secs=15)
        assert b"worker 0 has given no heartbeat" in one.health("/readyz")[1]
    finally:
        os.kill(worker, signal.SIGCONT)
    wait_until(one.ready, "it beats again")


def test_a_killed_worker_is_replaced_and_it_is_said(appliance: StartAppliance) -> None:
    one = appliance()
    one.supervised()
    (worker,) = one.workers
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: one.workers not in ((), (worker,)) and one.ready(), "a new worker is ready")
    wait_until(lambda: any("worker.died" in line for line in one.event_lines()), "its end is told")
    (line,) = (line for line in one.event_lines() if "worker.died" in line)
    assert "status=SIGKILL" in line
    assert "restart_in_secs=0.5" in line
    wait_until(lambda: one.status()["ended"].get("worker 0", {}).get("status") == "SIGKILL", "status tells it")
    assert "worker 0 ended last: SIGKILL at 20" in cli("status", "--socket", one.admin_socket).stdout


def test_a_killed_control_process_is_replaced_and_loses_no_port(appliance: StartAppliance) -> None:
    one = appliance()
    one.supervised()
    control = one.control
    os.kill(control, signal.SIGKILL)
    wait_until(lambda: not alive(control) and one.ready(), "a new control process answers")
    assert one.control != control
    wait_until(lambda: any("control.died" in line for line in one.event_lines()), "the new one tells its end")


def test_no_child_outlives_a_killed_master(appliance: StartAppliance) -> None:
    one = appliance({"workers": 2})
    family = descendants(one.pid)
    assert len(family) == 3
    os.kill(one.pid, signal.SIGKILL)
    wait_until(lambda: not any(alive(pid) for pid in family), "the children end")


def test_children_hold_only_their_own_sockets(appliance: StartAppliance) -> None:
    one = appliance({"workers": 4})
    counts = {descriptor_count(pid) for pid in one.workers}
    assert max(counts) - min(counts) <= 1
    assert max(counts) < 30


def test_sigusr1_opens_the_logs_again(appliance: StartAppliance) -> None:
    one = appliance()
    wait_until(lambda: any(" started " in line for line in one.event_lines()), "the first file is written")
    events, access = one.folder / "events.log", one.folder / "access.log"
    events.rename(one.folder / "events.log.1")
    with one.connect() as wire:
        assert wire.request(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").status == 502
    wait_until(lambda: access.exists() and access.stat().st_size, "the access log is written")
    access.rename(one.folder / "access.log.1")
    os.kill(one.pid, signal.SIGUSR1)
    wait_until(lambda: any("logs.reopened" in line for line in one.event_lines()), "the new event log is written")
    with one.connect() as wire:
        assert wire.request(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").status == 502
    wait_until(lambda: len(one.access_lines()) == 1, "the new access log is written")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_ends_well(appliance: StartAppliance, number: signal.Signals) -> None:
    one = appliance()
    family = descendants(one.pid)
    os.kill(one.pid, number)
    assert one.process is not None
    assert one.process.wait(20) == 0
    assert not any(alive(pid) for pid in family)
    lines = one.event_lines()
    (stopping,) = (line for line in lines if " stopping " in line)
    assert f"signal={number.name}" in stopping
    assert f"pid {os.getpid()} (" in stopping
    assert " stopped " in lines[-1]


def test_a_second_signal_ends_a_drain_at_once(appliance: StartAppliance) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        one = appliance(upstream=f"http://127.0.0.1:{silent.getsockname()[1]}")
        with one.connect() as wire:
            wire.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            exchange, _ = silent.accept()
            with exchange:
                os.kill(one.pid, signal.SIGTERM)
                wait_until(lambda: any(" stopping " in line for line in one.event_lines()), "it drains")
                wait_until(lambda: one.health("/readyz")[0] == 503, "the worker drains")
                assert one.process is not None
                assert one.process.poll() is None
                os.kill(one.pid, signal.SIGTERM)
                assert one.process.wait(10) == 0
    # The worker cut the exchange itself, so that it is in the log, and did not have to be killed.
    assert [line.split('"')[2].split()[0] for line in one.access_lines()] == ["499"]
    assert not any(" killed " in line for line in one.event_lines())


# -- without a file


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "XDG_STATE_HOME": str(tmp_path), "STATE_DIRECTORY": "", "COLUMNS": "120"}


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()


def test_serve_is_a_proxy_in_one_line(
    environ: dict[str, str], ports: FreePorts, upstream: Callable[..., RawUpstream], tmp_path: Path
) -> None:
    origin = upstream()
    port, plain = ports.take(), ports.take()
    ports.release()
    command = [sys.executable, "-m", "proxy", "serve", "--to", origin.url.removeprefix("http://")]
    command += ["--listen", f"127.0.0.1:{port}", "--host", "git.example.org", "--redirect", f"127.0.0.1:{plain}"]
    process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stderr is not None
        assert any(b" started " in line for line in process.stderr)
        with connect_tls(port, "git.example.org") as wire:
            assert wire.request(b"GET / HTTP/1.1\r\nHost: git.example.org\r\n\r\n").status == 200
        process.terminate()
        out, _ = process.communicate(timeout=20)
        assert process.returncode == 0
        assert b'"GET / HTTP/1.1" 200' in out
    finally:
        end(process)
    key = next((tmp_path / "reverse-proxy" / "selfsigned").glob("*key*"))
    assert stat.S_IMODE(key.stat().st_mode) == 0o600


def demo_command(ports: FreePorts) -> tuple[list[str], int]:
    port, plain, health = ports.take(), ports.take(), ports.take()
    ports.release()
    options = ["--port", str(port), "--redirect-port", str(plain), "--health-port", str(health)]
    return [sys.executable, "-m", "proxy", "demo", *options], port


def test_the_demo_prints_what_to_try_and_no_live_line_without_a_terminal(
    environ: dict[str, str], ports: FreePorts
) -> None:
    command, port = demo_command(ports)
    process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        shown = b""
        while b"Access log:" not in shown:
            line = process.stdout.readline()
            assert line, process.communicate()
            shown += line
        assert f"https://localhost:{port}/".encode() in shown
        with connect_tls(port, "localhost") as wire:
            request = b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhello"
            answer = wire.request(request)
            assert answer.status == 200
            assert b"hello" in answer.body
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=20)
        assert process.returncode == 0
        assert b"permits held" not in rest
    finally:
        end(process)


def test_the_demo_names_the_option_of_a_port_that_is_taken(environ: dict[str, str], ports: FreePorts) -> None:
    for option in ("--port", "--redirect-port", "--health-port"):
        command, _ = demo_command(ports)
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            command[command.index(option) + 1] = str(port)
            result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30)
        refused(
            result, 1, f"reverse-proxy: demo: {option}: cannot listen on 127.0.0.1:{port}: port {port} is in use by "
        )


def test_on_a_terminal_the_demo_draws_a_live_line_and_ctrl_c_ends_it(environ: dict[str, str], ports: FreePorts) -> None:
    command, _ = demo_command(ports)
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(command[0], command, environ)
    try:
        shown = read_until(terminal, b"", b"permits held 0 of")
        assert b"https://localhost:" in shown
        os.write(terminal, b"\x03")
        shown = read_until(terminal, shown, b" stopped ")
        assert b"Traceback" not in shown
        _, wait_status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(wait_status) == 0, shown
        pid = 0
    finally:
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(terminal)


def read_until(terminal: int, shown: bytes, wanted: bytes) -> bytes:
    """Reads on until ``wanted`` is there; the suite's timeout bounds it."""
    while wanted not in shown:
        try:
            more = os.read(terminal, 4096)
        except OSError:  # EIO: the other side is closed
            more = b""
        assert more, shown.decode(errors="replace")
        shown += more
    return shown
