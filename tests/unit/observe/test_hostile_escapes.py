"""What a client makes the access log escape costs no call for each byte."""

from __future__ import annotations

import sys
from types import FrameType

import pytest

from proxy.observe.accesslog import LoggedRequest


@pytest.mark.parametrize(
    "text", [b"\xff" * 30_000, b'a"' * 15_000, b"\x1b[31m" * 6_000], ids=["run", "turns", "terminal"]
)
def test_escaping_calls_no_function_for_each_byte(text: bytes) -> None:
    calls = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        logged = LoggedRequest(b"GET / HTTP/1.1", text, text, b"host")
    finally:
        sys.setprofile(None)
    assert calls < 100
    assert logged.after.isascii()
    assert logged.after.count(b'"') == 4


def test_every_byte_can_be_had_back() -> None:
    every = bytes(range(256))
    logged = LoggedRequest(every, b"", b"", every)
    unescaped = logged.before.decode("unicode_escape").encode("latin-1")
    assert unescaped == every
    assert b" " in logged.before
    host = logged.after.rpartition(b'" ')[2]
    assert host.decode("unicode_escape").encode("latin-1") == every
    assert b" " not in host
