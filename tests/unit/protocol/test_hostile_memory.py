"""What is remembered of heads stays small whatever they say."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest

from proxy.protocol.http1 import HeadCache, Limits, RequestDecoder, ResponseDecoder

LIMITS = Limits(32_768, 128)
NAMES = [b"%x" % number for number in range(4096, 4096 + 9000)]
ROUNDS = 30


def options(count: int, turn: int) -> bytes:
    return b"Connection: " + b",".join(NAMES[turn : turn + count]) + b"\r\n"


def requests(count: int) -> Callable[[], None]:
    cache = HeadCache()

    def play() -> None:
        for turn in range(ROUNDS):
            decoder = RequestDecoder(LIMITS, cache)
            decoder.feed(b"GET / HTTP/1.1\r\nHost: a\r\n" + options(count, turn) + b"\r\n")
            assert decoder.next_event()

    return play


def responses(count: int) -> Callable[[], None]:
    cache = HeadCache()

    def play() -> None:
        for turn in range(ROUNDS):
            decoder = ResponseDecoder(LIMITS, cache)
            decoder.start(b"GET")
            decoder.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n" + options(count, turn) + b"\r\n")
            assert decoder.next_event()

    return play


@pytest.mark.parametrize("make", [requests, responses])
@pytest.mark.parametrize("count", [780, 6400])
def test_connection_options_are_not_hoarded(make: Callable[[int], Callable[[], None]], count: int) -> None:
    play = make(count)
    tracemalloc.start()
    try:
        play()
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept_bytes < ROUNDS * 8192
