"""The journal: what the service says when nothing is wrong, and when a client makes noise."""

from __future__ import annotations

import re
from typing import Any

from tests.testinfra.service.conftest import UNIT, Service

BAD_HANDSHAKES = 200
MOST_LINES = 20


def lines(host: Any) -> list[str]:
    """What the service has said since the boot."""
    host.check_output("journalctl --sync")
    said: str = host.check_output(f"journalctl --no-pager --quiet --boot --output cat _SYSTEMD_UNIT={UNIT}")
    return said.splitlines()


def test_nothing_bad_is_said(host: Any) -> None:
    said = lines(host)
    assert any(" started " in line for line in said)
    assert [line for line in said if re.search(r"Traceback| (ERROR|CRITICAL) |Warning:", line)] == []


def test_clients_that_fail_the_handshake_do_not_flood_it(host: Any, service: Service) -> None:
    before = len(lines(host))
    ip, _, port = service.addresses("https")[0].rpartition(":")
    knock = f"echo nonsense >/dev/tcp/{ip.strip('[]')}/{port}"
    host.check_output(f"bash -c 'for i in $(seq {BAD_HANDSHAKES}); do {knock} || true; done'")
    said = lines(host)[before:]
    assert len(said) <= MOST_LINES, said
