"""The admin socket answers root and the master's own user, whatever the mode of its file has become."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.conftest import StartAppliance
from tests.harness import Appliance, cli, wait_until

STRANGER = 65_534
ASK = """
import os, socket, sys
os.setgid({uid})
os.setuid({uid})
with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
    sock.settimeout(10)
    sock.connect(sys.argv[1])
    try:
        sock.sendall(b"GET /status HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n\\r\\n")
        print(sock.recv(12).decode())
    except ConnectionError:
        print("")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_turned_away(appliance: StartAppliance) -> None:
    one = appliance()
    assert os.stat(one.admin_socket).st_mode & 0o777 == 0o600
    Path(one.admin_socket).parent.chmod(0o755)
    os.chmod(one.admin_socket, 0o666)

    def ask(uid: int) -> str:
        command = [sys.executable, "-c", ASK.format(uid=uid), one.admin_socket]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()

    assert ask(0) == "HTTP/1.1 200"
    assert ask(STRANGER) == ""
    assert ask(STRANGER) == ""
    wait_until(
        lambda: any(" admin.stranger " in line and f"uid={STRANGER}" in line for line in one.event_lines()),
        "it is reported",
    )
    wait_until(
        lambda: b'reverse_proxy_events_total{signature="admin.stranger"} 2' in one.health("/metrics")[1],
        "both are counted",
    )
    assert one.status()["ready"]


HIDE_PROCESSES = (
    'mount -t proc -o hidepid=invisible proc /proc && exec setpriv --reuid 65534 --regid 65534 --clear-groups "$@"'
)
"""What ProtectProc=invisible does in a unit with User=."""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_root_is_answered_where_its_processes_are_hidden_from_the_service() -> None:
    with tempfile.TemporaryDirectory(prefix="rp-service-") as name:
        os.chown(name, STRANGER, STRANGER)
        one = Appliance(Path(name), through=["unshare", "--mount", "sh", "-c", HIDE_PROCESSES, "sh"])
        os.chown(Path(one.admin_socket).parent, STRANGER, STRANGER)
        try:
            one.start()
            told = cli("status", "--socket", one.admin_socket)
            assert told.returncode == 0, told.stderr + one.evidence()
            one.stop()
        finally:
            one.kill()
            one.forget()
