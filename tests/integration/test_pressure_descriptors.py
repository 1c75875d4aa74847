"""What else needs a descriptor when there is none: a log that is opened anew, a reload, what `status` reads."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import StartAppliance
from tests.harness import Appliance, cli, connect_tls, descriptor_count, wait_until
from tests.harness.toml import to_toml

REQUEST = b"GET /%b HTTP/1.1\r\nHost: localhost\r\n\r\n"


@contextlib.contextmanager
def without_descriptors(*pids: int) -> Iterator[None]:
    """The soft limits of ``pids`` are what they have open, for a while."""
    before = {pid: resource.prlimit(pid, resource.RLIMIT_NOFILE) for pid in pids}
    for pid, (_, hard) in before.items():
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (descriptor_count(pid), hard))
    try:
        yield
    finally:
        for pid, limits in before.items():
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


@pytest.fixture
def served(appliance: StartAppliance) -> Appliance:
    one = appliance(
        {
            "sites": [
                {
                    "hosts": ["*"],
                    "upstreams": ["http://127.0.0.1:9"],
                    "redirects": [{"path": "/", "to": "https://www.example.org{uri}"}],
                }
            ]
        }
    )
    with connect_tls(one.port) as wire:
        assert wire.request(REQUEST % b"first").status == 308
    return one


def test_a_log_that_cannot_be_opened_anew_goes_on_in_the_old_file(served: Appliance) -> None:
    path = str(served.folder / "access.log")
    with connect_tls(served.port) as wire:
        assert wire.request(REQUEST % b"before").status == 308
        wait_until(lambda: "/before" in "".join(served.access_lines()), "the line is written")
        with without_descriptors(*served.workers):
            os.rename(path, path + ".1")
            os.kill(served.pid, signal.SIGUSR1)
            assert wire.request(REQUEST % b"during").status == 308

            def written() -> bool:
                files = [Path(name) for name in (path, path + ".1") if os.path.exists(name)]
                return any(b"/during" in file.read_bytes() for file in files)

            wait_until(written, "the line is in the old file, or in the new one that the master made")
        os.kill(served.pid, signal.SIGUSR1)
        wait_until(lambda: os.path.exists(path), "the new file is there")
        assert wire.request(REQUEST % b"after").status == 308
        wait_until(lambda: "/after" in "".join(served.access_lines()), "the line is in the new file")
    assert len(served.event_lines()) < 20


def test_a_reload_without_descriptors_is_refused_and_changes_nothing(served: Appliance) -> None:
    """The master opens the configuration, every certificate and what is to be handed to the workers."""
    served.path.write_text(to_toml({**served.config, "max_connections": 77}))
    with without_descriptors(served.pid):
        refused = cli("reload", "--socket", served.admin_socket)
    assert refused.returncode in (1, 2), refused
    assert "Traceback" not in refused.stderr + refused.stdout, refused
    assert "Too many open files" in refused.stderr or "descriptor" in refused.stderr, refused
    assert served.status()["generation"] == 1
    with connect_tls(served.port) as wire:
        assert wire.request(REQUEST % b"still").status == 308
    accepted = cli("reload", "--socket", served.admin_socket)
    assert accepted.returncode == 0, accepted
    assert served.status()["permits"] == 77


def test_what_is_read_from_proc_is_told_all_the_same(served: Appliance) -> None:
    """Workers count their descriptors without opening one more; readiness tells the cause."""
    pid = served.workers[0]
    with connect_tls(served.port) as wire, without_descriptors(pid):
        limit = resource.prlimit(pid, resource.RLIMIT_NOFILE)[0]
        wait_until(lambda: served.health("/readyz")[0] == 503, "readiness tells it", 20.0)
        status, text = served.health("/readyz")
        assert status == 503
        assert f"its soft limit is {limit}" in text.decode(), text
        shown = json.loads(cli("status", "--socket", served.admin_socket, "--json").stdout)["workers"][0]
        assert shown["descriptors_limit"] == limit, shown
        assert shown["descriptors_open"] >= limit - 2, shown
        assert served.health("/healthz")[0] == 200
        assert wire.request(REQUEST % b"kept").status == 308
    wait_until(lambda: served.health("/readyz")[0] == 200, "ready again", 20.0)
