"""What running workers may do: nothing that they do not need. Read from /proc."""

from __future__ import annotations

import grp
import os
import pwd
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import StartAppliance
from tests.harness import Appliance, RawUpstream, alive, cli, wait_until
from tests.harness.appliance import Config
from tests.harness.toml import to_toml

REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
SETS = ("CapInh", "CapPrm", "CapEff", "CapAmb")
NOBODY = pwd.getpwnam("nobody")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def proc_status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


@pytest.fixture
def logs() -> Iterator[Config]:
    """Where the logs go: a folder that any user may search, unlike pytest's own, and only root may write to."""
    with tempfile.TemporaryDirectory(prefix="rp-logs-") as name:
        Path(name).chmod(0o755)
        yield {"access_log": {"path": f"{name}/access.log"}, "event_log": {"path": f"{name}/events.log"}}


def log_files(one: Appliance) -> list[Path]:
    return [Path(one.config[key]["path"]) for key in ("access_log", "event_log")]


def served(one: Appliance) -> None:
    with one.connect() as client:
        assert client.request(REQUEST).status == 200


def test_children_have_no_capability_and_get_none(
    appliance: StartAppliance, upstream: Callable[..., RawUpstream]
) -> None:
    one = appliance({"workers": 2}, upstream=upstream().url)
    for pid in (*one.workers, one.control):
        found = proc_status(pid)
        assert {name: int(found[name], 16) for name in SETS} == dict.fromkeys(SETS, 0)
        assert found["NoNewPrivs"] == "1"
        if os.geteuid() == 0:
            assert int(found["CapBnd"], 16) == 0
    served(one)


@as_root
def test_they_become_the_user_and_the_master_stays(
    appliance: StartAppliance, upstream: Callable[..., RawUpstream], logs: Config
) -> None:
    one = appliance({"workers": 2, "user": "nobody", **logs}, upstream=upstream().url)
    groups = sorted(os.getgrouplist("nobody", NOBODY.pw_gid))
    for pid in (*one.workers, one.control):
        found = proc_status(pid)
        assert found["Uid"].split() == [str(NOBODY.pw_uid)] * 4
        assert found["Gid"].split() == [str(NOBODY.pw_gid)] * 4
        assert sorted(map(int, found["Groups"].split())) == groups
        assert int(found["CapEff"], 16) == int(found["CapBnd"], 16) == 0
        # Not dumpable: its files in /proc are root's, though it runs as nobody.
        assert Path(f"/proc/{pid}/environ").stat().st_uid == 0
    assert proc_status(one.pid)["Uid"].split()[1] == "0"
    served(one)
    assert one.status()["ready"], "root's admin socket answers"
    admin = Path(one.admin_socket).stat()
    assert (admin.st_uid, admin.st_mode & 0o777) == (0, 0o600)
    wait_until(one.access_lines, "the access log is written")
    assert any(" started " in line for line in one.event_lines())
    for log in log_files(one):
        found_log = log.stat()
        assert (found_log.st_uid, found_log.st_mode & 0o777) == (NOBODY.pw_uid, 0o640)


@as_root
def test_core_dumps_when_asked_for(appliance: StartAppliance, logs: Config) -> None:
    one = appliance({"user": "nobody", **logs, "core_dumps": True})
    (worker,) = one.workers
    assert Path(f"/proc/{worker}/environ").stat().st_uid == NOBODY.pw_uid
    own = Path("/proc/self/limits").read_text().splitlines()
    assert next(line for line in own if line.startswith("Max core")) in Path(f"/proc/{worker}/limits").read_text()


def test_no_core_file_of_anyone_unless_asked_for(appliance: StartAppliance) -> None:
    one = appliance({"core_dumps": False})
    for pid in (one.pid, one.control, *one.workers):
        assert "Max core file size        0 " in Path(f"/proc/{pid}/limits").read_text()


@as_root
def test_they_end_with_the_master_although_the_uid_was_changed(appliance: StartAppliance, logs: Config) -> None:
    one = appliance({"workers": 2, "user": "nobody", **logs})
    family = (*one.workers, one.control)
    os.kill(one.pid, signal.SIGKILL)
    wait_until(lambda: not any(map(alive, family)), "all children are gone")


@as_root
def test_logs_are_opened_again_in_a_folder_of_root(
    appliance: StartAppliance, upstream: Callable[..., RawUpstream], logs: Config
) -> None:
    one = appliance({"user": "nobody", **logs}, upstream=upstream().url)
    served(one)
    wait_until(one.access_lines, "the access log is written")
    for log in log_files(one):
        log.rename(f"{log}.1")
    os.kill(one.pid, signal.SIGUSR1)
    wait_until(lambda: any(" logs.reopened " in line for line in one.event_lines()), "the event log is a new file")
    served(one)
    wait_until(one.access_lines, "the access log is a new file")
    assert log_files(one)[0].stat().st_uid == NOBODY.pw_uid


@as_root
def test_a_killed_worker_comes_back_as_the_same_user(appliance: StartAppliance, logs: Config) -> None:
    one = appliance({"user": NOBODY.pw_uid, "group": grp.getgrgid(NOBODY.pw_gid).gr_name, **logs})
    (worker,) = one.workers
    wait_until(lambda: any(" started " in line for line in one.event_lines()), "the master supervises")
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: one.workers not in ((), (worker,)) and one.ready(), "a new worker is ready")
    assert proc_status(one.workers[0])["Uid"].split() == [str(NOBODY.pw_uid)] * 4


def write(folder: Path, **config: object) -> str:
    path = folder / "proxy.toml"
    base = {
        "sites": [{"hosts": ["*"], "upstreams": ["http://127.0.0.1:9"]}],
        "state_dir": str(folder / "state"),
        "admin": {"socket": "/tmp/never-bound.sock"},
    }
    path.write_text(to_toml({**base, **config}))
    return str(path)


@pytest.mark.parametrize("command", ["check", "run"])
@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"user": "no-such-user"}, "user: this host knows no user 'no-such-user'"),
        ({"user": "nobody", "group": "no-such-group"}, "group: this host knows no group 'no-such-group'"),
        ({"user": 4_000_001}, "user: this host knows no user 4000001: make it, or name another, or name a group too"),
        ({"group": "nogroup"}, 'group: found "nogroup"; wanted `user` beside it'),
        ({"user": ""}, 'user: found ""; wanted a name, or an id from 0 to 4294967294'),
        ({"user": -1}, "user: found -1; wanted a name, or an id"),
    ],
)
def test_an_unknown_user_is_a_configuration_error(
    tmp_path: Path, command: str, config: dict[str, object], reason: str
) -> None:
    ended = cli(command, "--config", write(tmp_path, **config))
    assert ended.returncode == 2
    assert reason in ended.stderr
    assert "Traceback" not in ended.stderr


@as_root
def test_root_without_capabilities_is_held_to_file_modes(tmp_path: Path, logs: Config) -> None:
    log = Path(logs["access_log"]["path"])
    log.touch(0o600)
    os.chown(log, NOBODY.pw_uid, NOBODY.pw_gid)
    ended = cli("check", "--config", write(tmp_path, **logs))
    assert ended.returncode == 2
    assert f'access_log.path = "{log}" is not writable by root without capabilities' in ended.stderr


@as_root
@pytest.mark.parametrize("command", ["check", "run"])
def test_a_log_that_the_user_cannot_write_is_a_configuration_error(tmp_path: Path, command: str, logs: Config) -> None:
    log = Path(logs["access_log"]["path"])
    log.touch(0o600)
    ended = cli(command, "--config", write(tmp_path, user="nobody", **logs))
    assert ended.returncode == 2
    assert f'access_log.path = "{log}" is not writable by user nobody' in ended.stderr


@as_root
def test_commands_reach_the_master_through_a_control_process_of_another_user(
    appliance: StartAppliance, upstream: Callable[..., RawUpstream], logs: Config
) -> None:
    one = appliance({"workers": 2, "user": "nobody", **logs}, upstream=upstream().url)
    wait_until(lambda: any(" started " in line for line in one.event_lines()), "the master supervises")
    for socket_of in ("status", "reload"):
        ended = cli(socket_of, "--socket", one.admin_socket)
        assert ended.returncode == 0, ended.stderr
    served(one)
    changed = {**one.config, "user": "daemon", "max_connections": 77}
    one.path.write_text(to_toml(changed))
    ended = cli("reload", "--socket", one.admin_socket)
    assert ended.returncode == 0, ended.stderr
    assert "user" in ended.stdout, "that it needs a restart is said"
    assert one.status()["generation"] == 3
    assert {proc_status(pid)["Uid"].split()[0] for pid in one.workers} == {str(NOBODY.pw_uid)}
    ended = cli("stop", "--socket", one.admin_socket)
    assert ended.returncode == 0, ended.stderr
    wait_until(lambda: not one.running, "it has ended")


@as_root
def test_the_one_capability_of_a_service_is_dropped(upstream: Callable[..., RawUpstream]) -> None:
    one_capability = "net_bind_service"
    through = ["setpriv", f"--reuid={NOBODY.pw_uid}", f"--regid={NOBODY.pw_gid}", "--clear-groups"]
    through += [f"--inh-caps=+{one_capability}", f"--ambient-caps=+{one_capability}"]
    with tempfile.TemporaryDirectory(prefix="rp-service-") as name:
        os.chown(name, NOBODY.pw_uid, NOBODY.pw_gid)
        # Whoever is not root gets core dumps from the harness; here they are refused as by default.
        config = {"workers": 2, "user": "daemon", "core_dumps": False}
        one = Appliance(Path(name), config, upstream=upstream().url, through=through)
        os.chown(Path(one.admin_socket).parent, NOBODY.pw_uid, NOBODY.pw_gid)
        try:
            one.start()
            assert int(proc_status(one.pid)["CapEff"], 16) == int(proc_status(one.pid)["CapAmb"], 16) == 1 << 10
            for pid in (*one.workers, one.control):
                found = proc_status(pid)
                assert found["Uid"].split() == [str(NOBODY.pw_uid)] * 4
                assert {key: int(found[key], 16) for key in SETS} == dict.fromkeys(SETS, 0)
                assert found["NoNewPrivs"] == "1"
                assert Path(f"/proc/{pid}/environ").stat().st_uid == 0, "not dumpable"
            served(one)
            wait_until(lambda: any(" user.ignored " in line for line in one.event_lines()), "user is ignored")
            status = {worker["pid"]: worker["descriptors_open"] for worker in one.status()["workers"]}
            assert set(status) == set(one.workers)
            assert all(status.values()), "each reports its own descriptors"
            one.stop()
        finally:
            one.kill()
            one.forget()
