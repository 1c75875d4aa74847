"""Reloads at odd moments (a start, a drain), and what the workers must not need to read."""

from __future__ import annotations

import os
import pwd
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import StartAppliance
from tests.harness import RawUpstream, Wire, wait_until
from tests.harness.reloading import post, reload
from tests.harness.upstream import answering
from tests.unit.tls.pki import Authority

REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
WORKERS = 4

# The worker's loop begins late, so that a signal comes while the master waits for it.
SLOW_START = """
import time
from proxy.worker.main import Worker
init = Worker.__init__
def late(self, *args):
    time.sleep(2)
    init(self, *args)
Worker.__init__ = late
"""


def test_one_that_comes_during_the_start_is_done_after_it(appliance: StartAppliance, tmp_path: Path) -> None:
    # The program hangs up on itself: as soon as a worker exists, which is before it is ready.
    hang_up = (
        "import os, signal\n"
        "from proxy.master.children import Child\n"
        "start = Child.start\n"
        "def started(self, now):\n"
        "    start(self, now)\n"
        "    if self.slot == 0 and not self.restarts:\n"
        "        os.kill(os.getpid(), signal.SIGHUP)\n"
        "Child.start = started\n"
    )
    one = appliance({"workers": 2}, prelude=SLOW_START + hang_up)
    wait_until(lambda: one.status()["generation"] == 2, "the reload is done")
    assert one.ready()


def test_none_while_it_drains(appliance: StartAppliance, upstream: Callable[..., RawUpstream]) -> None:
    one = appliance({"workers": 2, "drain_delay_secs": 3}, upstream=upstream().url)
    wait_until(lambda: any(" started " in line for line in one.event_lines()), "it supervises")
    os.kill(one.pid, signal.SIGTERM)
    wait_until(lambda: any(" stopping " in line for line in one.event_lines()), "it is about to stop")
    document = post(one, "/reload")
    assert (document["result"], document["errors"]) == ("refused", ["it is about to stop"])
    assert one.process is not None
    assert one.process.wait(20) == 0


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[tuple[int, Authority]]:
    """An https upstream, and who signed its certificate."""
    authority = Authority(tmp_path)
    leaf, key = authority.leaf("origin.example.org")
    files = authority.write(leaf, authority.issuer, key=key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files["chain"], files["key"])

    def serve(raw: socket.socket) -> None:
        try:
            with Wire(context.wrap_socket(raw, server_side=True), 60) as wire:
                answering()(wire)
        except OSError:
            raw.close()  # whoever does not trust it says so

    def accept() -> None:
        while True:
            try:
                raw, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(raw,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield listener.getsockname()[1], authority
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(20)


def test_another_bundle_in_the_same_file(
    appliance: StartAppliance, secured: tuple[int, Authority], tmp_path: Path
) -> None:
    port, authority = secured
    (tmp_path / "stranger").mkdir()
    stranger = Authority(tmp_path / "stranger")
    bundle = tmp_path / "bundle.pem"
    bundle.write_bytes(Path(stranger.ca_file).read_bytes())
    bundle.chmod(0o600)
    site = {
        "hosts": ["*"],
        "upstreams": [f"https://127.0.0.1:{port}"],
        "upstream_tls": {"ca": str(bundle), "server_name": "origin.example.org"},
    }
    config: dict[str, object] = {"workers": WORKERS, "sites": [site], "core_dumps": True}
    if os.geteuid() == 0:
        config["user"] = pwd.getpwnam("nobody").pw_name  # workers that cannot read it
        for folder in (tmp_path, *tmp_path.parents):
            if folder.stat().st_uid == 0 and folder.name.startswith(("pytest", "test")):
                folder.chmod(0o711)
        one = appliance({**config, "access_log": {"path": "off"}, "event_log": {"path": "stderr"}})
    else:
        one = appliance(config)

    def statuses() -> set[int]:
        found = set()
        for _ in range(24):
            with one.connect() as client:
                found.add(client.request(REQUEST).status)
        return found

    assert statuses() == {502}
    bundle.write_bytes(Path(authority.ca_file).read_bytes())
    reload(one)
    assert statuses() == {200}
    reload(one)
    assert statuses() == {200}
    bundle.write_bytes(b"nothing")
    document = post(one, "/reload")
    assert document["result"] == "refused"
    assert "found no certificate" in document["errors"][0]
    assert statuses() == {200}
