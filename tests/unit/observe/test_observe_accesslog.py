from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from proxy.observe import accesslog as accesslog_module
from proxy.observe import counters
from proxy.observe.accesslog import AccessLog, LoggedRequest

WAIT_SECS = 20.0
NOW = 1_796_000_400.25


@dataclass
class Settings:
    path: str
    format: str = "combined"


class Reports:
    """A reporter that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, dict[str, str | int | float]]] = []

    def report(
        self,
        signature: str,
        message: str,
        *,
        level: str = "error",
        exc: BaseException | None = None,
        **fields: str | float,
    ) -> None:
        self.told.append((signature, {"level": level, **fields}))


Open = Callable[..., AccessLog]


class Rig:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "access.log"
        self.cells = counters.private_cells()
        self.reports = Reports()
        self.loop = uvloop.new_event_loop()
        self.log: AccessLog | None = None

    def open(self, path: str | None = None, form: str = "combined") -> AccessLog:
        self.log = AccessLog(Settings(path or str(self.path), form), self.cells, self.reports, clock=lambda: NOW)
        self.log.attach(self.loop)
        return self.log

    def run_until(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_SECS

        def look() -> None:
            if holds() or time.monotonic() > deadline:
                self.loop.stop()
            else:
                self.loop.call_later(0.005, look)

        look()
        self.loop.run_forever()
        assert holds(), f"not within {WAIT_SECS} s: {what}"


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(accesslog_module, "FLUSH_INTERVAL_SECS", 0.02)
    one = Rig(tmp_path)
    yield one
    if one.log is not None:
        one.log.close(WAIT_SECS)
    one.loop.close()


def ask(log: AccessLog, **other: bytes | float) -> None:
    values: dict[str, bytes | int | float] = {
        "remote": b"192.0.2.1",
        "request_line": b"GET /a?b=c HTTP/1.1",
        "status": 200,
        "body_bytes": 90,
        "referer": b"https://example.org/",
        "user_agent": b"curl/8.0 (x)",
        "host": b"git.example.org",
        "duration": 0.0126,
        "upstream_secs": 0.0119,
        "request_id": b"0123abcd",
        "tls": b"TLSv1.3",
    }
    values |= other
    text = {name: values.pop(name) for name in ("request_line", "referer", "user_agent", "host")}
    log.request(logged=LoggedRequest(**text), **values)  # type: ignore[arg-type]


def test_the_combined_form(rig: Rig) -> None:
    log = rig.open()
    ask(log)
    ask(log, referer=b"", user_agent=b"", host=b"", request_id=b"", tls=b"", upstream_secs=-1, duration=3725.5)
    assert log.close(WAIT_SECS)
    start = '192.0.2.1 - - [30/Nov/2026:01:00:00 +0000] "GET /a?b=c HTTP/1.1" 200 90 '
    assert rig.path.read_text().splitlines() == [
        start + '"https://example.org/" "curl/8.0 (x)" git.example.org 0.012 0.011 0123abcd TLSv1.3',
        start + '"-" "-" - 3725.500 - - -',
    ]
    assert rig.cells[counters.ACCESS_LINES] == 2


def test_the_json_form(rig: Rig) -> None:
    log = rig.open(form="json")
    ask(log)
    ask(log, upstream_secs=-1.0, stream_id=7)
    assert log.close(WAIT_SECS)
    first, second = (json.loads(line) for line in rig.path.read_text().splitlines())
    assert first == {
        "time": "2026-11-30T01:00:00.250Z",
        "remote": "192.0.2.1",
        "host": "git.example.org",
        "request": "GET /a?b=c HTTP/1.1",
        "status": 200,
        "bytes": 90,
        "referer": "https://example.org/",
        "user_agent": "curl/8.0 (x)",
        "duration_secs": 0.0126,
        "upstream_secs": 0.0119,
        "request_id": "0123abcd",
        "tls": "TLSv1.3",
        "stream": None,
    }
    assert list(second) == list(first)
    assert second["upstream_secs"] is None
    assert second["stream"] == 7


COMBINED = re.compile(
    rb'(?P<remote>\S+) - - \[30/Nov/2026:01:00:00 \+0000\] "(?P<request_line>[^"]*)" (?P<status>\d{3}) '
    rb'(?P<body_bytes>\d+) "(?P<referer>[^"]*)" "(?P<user_agent>[^"]*)" (?P<host>\S+) (?P<duration>[\d.]+) '
    rb"(?P<upstream_secs>-|[\d.]+) (?P<request_id>\S+) (?P<tls>\S+)\n"
)
texts = st.dictionaries(
    st.sampled_from(["remote", "request_line", "referer", "user_agent", "host", "request_id", "tls"]),
    st.binary(max_size=30)
    | st.sampled_from([b'"', b"\\x22", b"\r\n192.0.2.9 - -", b"\x1b[2J", b"a b", "caf\u00e9".encode(), b"x" * 600]),
)


def built(form: str, values: dict[str, bytes]) -> bytes:
    log = AccessLog(Settings("/dev/null", form), counters.private_cells(), Reports(), clock=lambda: NOW)
    try:
        for _ in range(2):  # the second time from what is remembered
            ask(log, **values)
        first, second = log._lines
        assert first == second
        return first
    finally:
        log.close(0)


def unescaped(value: bytes) -> bytes:
    return re.sub(rb"\\x([0-9A-F]{2})", lambda match: bytes([int(match[1], 16)]), value)


@given(texts)
def test_any_bytes_make_one_combined_line_from_which_they_come_back(values: dict[str, bytes]) -> None:
    line = built("combined", values)
    assert re.fullmatch(rb"[ -~]+\n", line)
    match = COMBINED.fullmatch(line)
    assert match is not None, line
    assert {name: unescaped(match[name]) for name in values} == {name: value or b"-" for name, value in values.items()}


@given(texts)
def test_any_bytes_make_one_json_line_from_which_they_come_back(values: dict[str, bytes]) -> None:
    line = built("json", values)
    assert re.fullmatch(rb"[ -~]+\n", line)
    got = json.loads(line)
    names = {"request_line": "request"}
    assert {name: got[names.get(name, name)].encode("latin-1") for name in values} == values


def test_what_is_remembered_is_bounded() -> None:
    log = AccessLog(Settings("/dev/null"), counters.private_cells(), Reports())
    for n in range(5000):
        ask(log, remote=b"192.0.2.%d" % n)
    ask(log, remote=b"r" * 100_000)
    held = list(log._bare)
    assert 0 < len(held) <= 2048
    assert max(map(len, held)) <= 512
    log.close(0)


def test_lines_reach_the_file_within_the_flush_interval(rig: Rig) -> None:
    log = rig.open()
    ask(log)
    rig.run_until(lambda: rig.path.read_bytes().count(b"\n") == 1, "the timer flushes")


def test_a_full_batch_does_not_wait_for_the_timer(rig: Rig) -> None:
    log = rig.open()
    for _ in range(2000):
        ask(log)
    assert rig.cells[counters.ACCESS_LINES] > 1000
    assert log.close(WAIT_SECS)
    assert rig.path.read_bytes().count(b"\n") == 2000


def test_a_full_disk_is_counted_and_reported(rig: Rig) -> None:
    log = rig.open("/dev/full")
    ask(log)
    ask(log)
    rig.run_until(lambda: bool(rig.reports.told), "the report")
    signature, fields = rig.reports.told[0]
    assert signature == "access_log.dropped"
    assert (fields["lines"], fields["lines_total"]) == (2, 2)
    assert str(fields["error"]).startswith("ENOSPC")
    assert rig.cells[counters.ACCESS_LINES_DROPPED] == 2


def test_a_pipe_that_nobody_reads_is_counted_and_reported(rig: Rig, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        log = rig.open(str(fifo))
        for _ in range(30_000):  # 4 MB and what the pipe holds
            ask(log, request_line=b"GET /" + b"x" * 120)
        rig.run_until(lambda: bool(rig.reports.told), "the report")
        assert rig.reports.told[0][1]["error"] == "the target does not take lines fast enough"
        assert not log.close(0)
        in_the_pipe = os.read(reader, 1_000_000).count(b"\n")
        assert rig.cells[counters.ACCESS_LINES] == 30_000
        assert 30_000 - in_the_pipe <= rig.cells[counters.ACCESS_LINES_DROPPED] <= 30_000
    finally:
        os.close(reader)


def test_rotation(rig: Rig, tmp_path: Path) -> None:
    log = rig.open()
    ask(log, host=b"before")
    rig.path.rename(tmp_path / "access.log.1")
    log.reopen()
    ask(log, host=b"after")
    assert log.close(WAIT_SECS)
    assert b" after " in rig.path.read_bytes()
    assert b" before " in (tmp_path / "access.log.1").read_bytes()


def test_off_is_off(rig: Rig) -> None:
    log = rig.open("off")
    ask(log)
    log.flush()
    log.reopen()
    assert log.close(0)
    assert rig.cells[counters.ACCESS_LINES] == 0


def test_the_timer_outlives_an_exception(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    log = rig.open()
    seen: list[dict[str, object]] = []
    rig.loop.set_exception_handler(lambda _loop, context: seen.append(context))

    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(log, "_watch_writer", broken)
        rig.run_until(lambda: len(seen) >= 3, "the timer goes on")
    ask(log)
    rig.run_until(lambda: rig.path.stat().st_size > 0, "and so does the log")
