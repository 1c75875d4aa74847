"""The same limits for the streams of an HTTP/2 connection: rates, networks, and a stream that is too slow alone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import pytest

from tests.conftest import StartAppliance
from tests.harness.appliance import Appliance
from tests.harness.http2_wire import Http2Wire, connect_http2
from tests.harness.processes import wait_until
from tests.harness.upstream import RawUpstream
from tests.harness.wire import Wire

SITE_HOST = "www.example.org"
BODY_BYTES = 300_000


def play(wire: Wire) -> None:
    with contextlib.suppress(OSError, EOFError):
        while True:
            head = wire.read_head()
            wire.read_body(head)
            size = BODY_BYTES if b" /big " in head else 2
            wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + bytes(size))


@pytest.fixture
def front(appliance: StartAppliance, upstream: Callable[..., RawUpstream]) -> Appliance:
    url = upstream(play).url
    config = {
        "sites": [
            {
                "hosts": [SITE_HOST, "*"],
                "upstreams": [url],
                "routes": [{"path": "/few", "rate_limits": [{"requests": 2, "per_secs": 3600}]}],
            },
            {"hosts": ["closed.example.org"], "upstreams": [url], "deny": ["127.0.0.0/8"]},
        ],
        "min_request_body_bytes_per_sec": 1000,
        "min_response_bytes_per_sec": 1000,
        "min_rate_grace_secs": 1,
        "request_body_timeout_secs": 60,
        "write_timeout_secs": 1,
        "upstream_idle_timeout_secs": 1,
    }
    return appliance(config)


def slow(front: Appliance) -> int:
    count: int = front.status()["totals"]["timeouts_slow"]
    return count


def test_each_stream_takes_a_token(front: Appliance) -> None:
    with contextlib.closing(connect_http2(front)) as client:
        streams = [client.open("/few") for _ in range(4)]
        answers = [client.finish(stream) for stream in streams]
        assert [answer.status for answer in answers] == [200, 200, 429, 429]
        refused = answers[-1]
        assert refused.get("ratelimit-policy") == '"client";q=2;w=3600'
        assert (refused.get("ratelimit") or "").startswith('"client";r=0;t=')
        assert 0 < int(refused.get("retry-after") or "0") <= 1800
        assert client.get("/").status == 200
        assert client.get("/", host="closed.example.org").status == 403


def test_a_body_that_drips_ends_its_stream_alone(front: Appliance) -> None:
    with contextlib.closing(connect_http2(front)) as client:
        dripping = client.open("/", method="POST", end_stream=False)
        pause = threading.Event()
        for _ in range(100):
            if client.streams[dripping].over:
                break
            client.write(dripping, b"a")
            assert client.get("/").status == 200  # the others go on
            pause.wait(0.05)
        assert client.finish(dripping).status == 408
        assert slow(front) == 1
        assert client.get("/").status == 200


def test_a_stream_that_is_taken_too_slowly_is_cut_alone(front: Appliance) -> None:
    with contextlib.closing(connect_http2(front, settings={0x4: 1000})) as client:
        client.wire.sock.settimeout(30)
        held = client.open("/big")
        client.held.add(held)
        wait_until(lambda: _over_after(client, held, 10), "the stream is reset", 60)
        assert client.streams[held].reset is not None
        assert len(client.streams[held].body) < BODY_BYTES // 10
        assert slow(front) == 1
        assert client.get("/").status == 200


def _over_after(client: Http2Wire, stream: int, size: int) -> bool:
    """Take a few bytes more of the stream, and look whether it has ended."""
    client.conn.increment_flow_control_window(size, stream)
    client.flush()
    threading.Event().wait(0.1)
    client.read()
    return client.streams[stream].over
