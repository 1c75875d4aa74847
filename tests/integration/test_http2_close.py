"""The end of an HTTP/2 connection whose last answer is whole in the kernel, but not yet with a client that reads on."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable

import pytest

from tests.conftest import StartAppliance
from tests.harness import Appliance, RawUpstream, answering, wait_until
from tests.harness.http2 import WINDOW_UPDATE, frame, goaway
from tests.harness.http2_wire import Http2Wire, connect_http2

INITIAL_WINDOW_SIZE = 4
SIZE = 700_000
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % SIZE + bytes(SIZE)
PAUSE_SECS = 0.1  # between two reads, of a TLS record at most: some seconds in all


def time_out(front: Appliance, client: Http2Wire) -> Callable[[], object]:
    """The connection is idle from now on."""
    return lambda: client.wait(lambda: client.goaways, "GOAWAY")


def stop(front: Appliance, client: Http2Wire) -> Callable[[], object]:
    """SIGTERM to the master."""
    assert front.process is not None
    front.process.send_signal(signal.SIGTERM)
    return lambda: front.process is not None and front.process.wait(20)


def leave(front: Appliance, client: Http2Wire) -> Callable[[], object]:
    """The client's GOAWAY: there is nothing left that it would ask."""
    client.send(goaway())
    return lambda: None


def press(front: Appliance, client: Http2Wire) -> Callable[[], object]:
    """Another client for which there is no room."""
    served: list[int] = []

    def other() -> None:
        late = connect_http2(front)
        served.append(late.get("/other").status)
        late.close()

    thread = threading.Thread(target=other)
    thread.start()

    def end() -> None:
        thread.join(20)
        assert served == [200]
        assert front.status()["totals"]["evicted_idle"] == 1

    return end


@pytest.mark.parametrize("why", [time_out, stop, leave, press])
def test_an_answer_that_the_client_still_reads_is_not_cut(
    appliance: StartAppliance,
    upstream: Callable[..., RawUpstream],
    why: Callable[[Appliance, Http2Wire], Callable[[], object]],
) -> None:
    front = appliance(
        {
            "max_connections": 1 if why is press else 100,
            "connection_idle_timeout_secs": 1 if why is time_out else 60,
            "eviction_grace_secs": 0.1,
        },
        upstream=upstream(answering(ANSWER)).url,
    )
    client = connect_http2(front, settings={INITIAL_WINDOW_SIZE: 2 * SIZE})
    client.conn.increment_flow_control_window(2 * SIZE)
    client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
    try:
        stream = client.open()
        wait_until(
            lambda: (totals := front.status()["totals"])["http2_streams"] == 1 and totals["http2_streams_open"] == 0,
            "the kernel to have the answer",
        )
        end = why(front, client)
        while not client.ended and not client.streams[stream].over:
            client.read()
            with contextlib.suppress(OSError):
                client.send(frame(WINDOW_UPDATE, payload=b"\0\0\0\1"))  # as most clients do for each piece
            threading.Event().wait(PAUSE_SECS)
        answer = client.streams[stream]
        assert (len(answer.body), answer.ended) == (SIZE, True)
        if why is not time_out:
            client.close()
        end()
    finally:
        client.close()
    if why is not stop:
        wait_until(lambda: front.status()["totals"]["http2_open"] == 0, "the descriptor to be given back")
