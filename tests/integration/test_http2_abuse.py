"""What a client of HTTP/2 may not do without bound: each attack for real, for a bounded time, beside a good client."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from tests.harness import wait_until
from tests.harness.http2 import (
    ACK,
    CONTINUATION,
    END_HEADERS,
    END_STREAM,
    GET,
    GOAWAY,
    HEADERS,
    PING,
    POST,
    PREFACE,
    PRIORITY,
    PRIORITY_UPDATE,
    Frame,
    block,
    data,
    frame,
    headers,
    rst_stream,
    settings,
    split_frames,
    window_update,
)
from tests.harness.http2_wire import Http2Wire, connect_http2
from tests.harness.stage import Stage, open_stage

ENHANCE_YOUR_CALM = 11
ATTACK_SECS = 5.0
MAX_ATTACK_BYTES = 60_000_000
HEAD = block((*GET[:2], (":authority", "www.example.org"), GET[3]))


@pytest.fixture(scope="module")
def theatre() -> Iterator[Stage]:
    def configure(urls: Sequence[str]) -> dict[str, Any]:
        site = {"hosts": ["*"], "upstreams": [urls[0]], "max_request_body_bytes": 1_000_000}
        return {"max_connections": 64, "sites": [site]}

    with open_stage(configure) as stage:
        yield stage


@pytest.fixture
def good(stage: Stage) -> Iterator[Http2Wire]:
    client = connect_http2(stage.appliance)
    yield client
    client.close()


def odd() -> Iterator[int]:
    return iter(range(1, 2**30, 2))


def rapid_reset() -> Iterator[bytes]:
    """CVE-2023-44487: requests that are taken back at once cost the client nothing."""
    for stream in odd():
        yield headers(stream, GET) + rst_stream(stream)


def made_you_reset_by_window() -> Iterator[bytes]:
    """CVE-2025-8671: the server is made to reset its streams itself, by an increment of 0."""
    for stream in odd():
        yield headers(stream, GET) + window_update(stream, 0)


def made_you_reset_by_data() -> Iterator[bytes]:
    """The same by DATA on a stream that has ended."""
    for stream in odd():
        yield headers(stream, POST, end_stream=False) + data(stream, b"", end_stream=True) + data(stream, b"x")


def made_you_reset_by_heads() -> Iterator[bytes]:
    """The same by heads that are malformed."""
    for stream in odd():
        yield headers(stream, (*GET, ("connection", "close")))


def too_many_streams() -> Iterator[bytes]:
    """Streams beyond SETTINGS_MAX_CONCURRENT_STREAMS that never end."""
    for stream in odd():
        yield headers(stream, POST, end_stream=False)


def continuation_flood() -> Iterator[bytes]:
    """CVE-2024-27316: a header block without an end."""
    yield frame(HEADERS, END_STREAM, 1, HEAD)
    while True:
        yield frame(CONTINUATION, 0, 1, block([("x-a", "b")]))


def empty_continuations() -> Iterator[bytes]:
    yield frame(HEADERS, END_STREAM, 1, HEAD)
    while True:
        yield frame(CONTINUATION, 0, 1)


def header_list_bomb() -> Iterator[bytes]:
    """One long field in the dynamic table, named by one byte each time: 4 KB of memory a byte."""
    entry = b"\x40" + b"\x01a" + b"\x7f" + b"\xa1\x1e" + b"v" * 4000
    for stream in odd():
        yield frame(HEADERS, END_STREAM | END_HEADERS, stream, HEAD + entry + b"\xbe" * 10_000)


def long_heads() -> Iterator[bytes]:
    """A head that takes far more than a header list may."""
    yield frame(HEADERS, END_STREAM, 1, HEAD)
    while True:
        yield frame(CONTINUATION, 0, 1, block([("x-long", "v" * 16_000)]))


def ping_flood() -> Iterator[bytes]:
    while True:
        yield frame(PING, 0, 0, bytes(8))


def settings_flood() -> Iterator[bytes]:
    while True:
        yield settings((0x4, 65_535))


def empty_settings() -> Iterator[bytes]:
    while True:
        yield settings()


def empty_data() -> Iterator[bytes]:
    yield headers(1, POST, end_stream=False)
    while True:
        yield data(1)


def priorities() -> Iterator[bytes]:
    while True:
        yield frame(PRIORITY, 0, 3, struct.pack(">LB", 1, 1))


def priority_updates() -> Iterator[bytes]:
    while True:
        yield frame(PRIORITY_UPDATE, 0, 0, struct.pack(">L", 1) + b"u=1")


def window_updates() -> Iterator[bytes]:
    while True:
        yield window_update(0, 1)


def unknown_frames() -> Iterator[bytes]:
    while True:
        yield frame(0xAB, 0, 0, b"what?")


def data_after_reset() -> Iterator[bytes]:
    """DATA without end on a stream that the server had to reset, for which it is not asked any more."""
    yield headers(1, POST, end_stream=False) + window_update(1, 0)
    while True:
        yield data(1, b"x" * 1_000)


def ends_after_reset() -> Iterator[bytes]:
    """The same with frames that no window bounds."""
    yield headers(1, POST, end_stream=False) + window_update(1, 0)
    while True:
        yield data(1, end_stream=True)


def heads_after_reset() -> Iterator[bytes]:
    """The same with header blocks, each of which must be decoded."""
    yield headers(1, POST, end_stream=False) + window_update(1, 0)
    while True:
        yield headers(1, [("x-late", "trailer")] * 20)


def data_after_an_early_answer() -> Iterator[bytes]:
    """The same where no fault of the client's came before: the server does not want its body (413)."""
    for stream in odd():
        yield headers(stream, [*POST, ("content-length", "1000000000")], end_stream=False)
        yield data(stream, b"x" * 1_000) * 100


def window_updates_after_reset() -> Iterator[bytes]:
    yield headers(1, POST, end_stream=False) + window_update(1, 0)
    while True:
        yield window_update(1, 1)


def resets_after_reset() -> Iterator[bytes]:
    yield headers(1, POST, end_stream=False) + window_update(1, 0)
    while True:
        yield rst_stream(1)


def small_data() -> Iterator[bytes]:
    yield headers(1, POST, end_stream=False)
    while True:
        yield data(1, b"x")


ATTACKS: dict[Callable[[], Iterator[bytes]], set[str]] = {
    rapid_reset: {"reset-flood"},
    made_you_reset_by_window: {"reset-flood"},
    made_you_reset_by_data: {"reset-flood"},
    made_you_reset_by_heads: {"reset-flood"},
    too_many_streams: {"reset-flood"},
    continuation_flood: {"continuation-flood"},
    empty_continuations: {"continuation-flood", "empty-frame-flood"},
    header_list_bomb: {"header-list-size"},
    long_heads: {"header-block-size", "continuation-flood"},
    ping_flood: {"ping-flood"},
    settings_flood: {"settings-flood"},
    empty_settings: {"settings-flood"},
    empty_data: {"empty-frame-flood"},
    small_data: {"small-frame-flood"},
    priorities: {"priority-flood"},
    priority_updates: {"priority-flood"},
    window_updates: {"window-update-flood"},
    unknown_frames: {"unknown-frame-flood"},
    data_after_reset: {"late-frame-flood"},
    ends_after_reset: {"late-frame-flood"},
    heads_after_reset: {"late-frame-flood"},
    data_after_an_early_answer: {"late-frame-flood"},
    window_updates_after_reset: {"window-update-flood"},
    resets_after_reset: {"reset-flood"},
}


def attack(stage: Stage, frames: Iterator[bytes], good: Http2Wire) -> list[Frame]:
    """Send until the proxy ends it; returns its frames. The good client asks all the while."""
    seen = bytearray()
    sent, until = 0, time.monotonic() + ATTACK_SECS
    with stage.appliance.connect(alpn=("h2",)) as wire:
        wire.send(PREFACE + settings() + settings(flags=ACK))
        try:
            for turn in range(1_000_000):
                piece = b"".join(one for one, _ in zip(frames, range(50), strict=False))
                wire.send(piece)
                sent += len(piece)
                assert sent < MAX_ATTACK_BYTES, "the attack is not noticed"
                if turn % 20 == 0:
                    assert good.get("/good").status == 200
                    assert time.monotonic() < until or good.streams, "the attack is not noticed in time"
                wire.sock.settimeout(0.01)
                with contextlib.suppress(TimeoutError):
                    if not (more := wire.sock.recv(65_536)):
                        break
                    seen += more
                wire.sock.settimeout(10)
        except OSError:
            pass  # the proxy has closed on what is still on its way
        wire.sock.settimeout(10)
        with contextlib.suppress(OSError):
            while more := wire.sock.recv(65_536):
                seen += more
    return split_frames(bytes(seen))


@pytest.mark.parametrize("kind", ATTACKS, ids=lambda kind: kind.__name__)
def test_an_attack_ends_in_calm_while_a_good_client_is_served(
    stage: Stage, good: Http2Wire, kind: Callable[[], Iterator[bytes]]
) -> None:
    before = stage.counter("http2_connection_errors")
    frames = attack(stage, kind(), good)
    assert [one.code for one in frames if one.kind == GOAWAY] == [ENHANCE_YOUR_CALM]
    assert stage.counter("http2_connection_errors") == before + 1
    reasons = ATTACKS[kind]
    metrics = stage.appliance.health("/metrics")[1].decode()
    counted = [line for line in metrics.splitlines() if line.startswith("reverse_proxy_http2_connection_errors_total{")]
    assert any(f'reason="{reason}"' in line and not line.endswith(" 0") for line in counted for reason in reasons)
    wait_until(
        lambda: any(f"http2.abuse.{reason}" in line for line in stage.appliance.event_lines() for reason in reasons),
        "the reporter to tell",
    )
    assert good.get("/after").status == 200
    wait_until(lambda: stage.counter("requests_active") == 0, "nothing of the attack to be left under way", 20)


def test_why_tells_of_it(stage: Stage, good: Http2Wire) -> None:
    attack(stage, ping_flood(), good)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(stage.appliance.admin_socket)
        sock.sendall(b"GET /why HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = b"".join(iter(lambda: sock.recv(65_536), b""))
    told = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert any(one["reason"] == "http2-abuse" and one["detail"] == "ping-flood" for one in told["refusals"])


def test_answers_that_are_not_read_are_bounded(stage: Stage, good: Http2Wire) -> None:
    """PINGs whose answers stay unread: bounded by the rate, or by what waits for the client."""
    with stage.appliance.connect(alpn=("h2",)) as wire:
        wire.send(PREFACE + settings())
        with contextlib.suppress(OSError):
            for _ in range(200):
                wire.send(frame(PING, 0, 0, bytes(8)) * 1000)
        assert good.get().status == 200
    wait_until(lambda: stage.counter("http2_open") <= 1, "the connection to be gone", 20)


def test_a_good_client_with_many_requests_is_no_attacker(stage: Stage, good: Http2Wire) -> None:
    """What is bounded is abuse: a thousand requests, a hundred at a time, pass; so do a few resets among them."""
    for turn in range(10):
        streams = [good.open(f"/{turn}/{number}") for number in range(100)]
        for stream in streams[::25]:
            if not good.streams[stream].over:
                good.conn.reset_stream(stream, 8)
        good.flush()
        for number, stream in enumerate(streams):
            if number % 25:
                assert good.finish(stream, 30).status == 200
    assert not good.goaways
