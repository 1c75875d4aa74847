"""A client that is gone gives its permit and its upstream connection back, whatever it waits for when it goes."""

from __future__ import annotations

import socket

import pytest

from tests.conftest import StartAppliance
from tests.harness import wait_until

REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
UPLOAD = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n" + 200_000 * b"x"


@pytest.mark.parametrize("request_bytes", [REQUEST, UPLOAD], ids=["request", "upload"])
@pytest.mark.parametrize("connections", [1, 2], ids=["upstream silent", "waiting in the queue"])
def test_a_reset_right_behind_the_request(appliance: StartAppliance, request_bytes: bytes, connections: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        one = appliance(
            {"max_upstream_connections": 1, "upstream_queue_timeout_secs": 600, "upstream_response_timeout_secs": 600},
            upstream=f"http://127.0.0.1:{silent.getsockname()[1]}",
        )
        wires = [one.connect() for _ in range(connections)]
        for wire in wires:
            wire.send(request_bytes)
            # Data and reset reach the proxy together, or nearly so: it may meet both in one wake-up.
            wire.reset()
        wait_until(lambda: one.status()["totals"]["connections_open"] == 0, "the permits are back")
        wait_until(lambda: one.status()["totals"]["upstream_open"] == 0, "the upstream connections are closed")
