from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import uvloop

from proxy.errors import StartError
from proxy.observe import events as events_module
from proxy.observe import merge
from proxy.observe.events import ChannelReporter, EventLog, open_channel
from proxy.observe.record import MAX_DATAGRAM_BYTES

WAIT_SECS = 20.0


@dataclass
class Settings:
    path: str
    format: str = "json"
    level: str = "info"
    max_lines_per_minute: int = 120


class Rig:
    """An event log in a loop, as the control process has it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "events.log"
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self.read_end, self.write_end = open_channel()
        self.logs: list[EventLog] = []

    def open(self, path: str | None = None, **options: str | int) -> EventLog:
        log = EventLog(self.read_end, Settings(path or str(self.path), **options))  # type: ignore[arg-type]
        log.attach(self.loop)
        self.logs.append(log)
        return log

    def run_until(self, holds: Callable[[], bool], what: str) -> None:
        async def wait() -> None:
            deadline = time.monotonic() + WAIT_SECS
            while not holds():
                assert time.monotonic() < deadline, f"not within {WAIT_SECS} s: {what}; log: {self.text()}"
                await asyncio.sleep(0.005)

        self.loop.run_until_complete(wait())

    def text(self) -> str:
        return self.path.read_text() if self.path.exists() else ""

    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.text().splitlines()]

    def close(self) -> None:
        for log in self.logs:
            log.close(WAIT_SECS)
        self.loop.close()
        self.read_end.close()
        self.write_end.close()


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(events_module, "TICK_SECS", 0.02)
    one = Rig(tmp_path)
    yield one
    one.close()


@pytest.fixture
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "WINDOW_SECS", 1.0)
    monkeypatch.setattr(merge, "FLUSH_LAG_SECS", 0.1)


def flood(channel: socket.socket, source: str, occurrences: int) -> None:
    reporter = ChannelReporter(source, channel, None)
    for n in range(occurrences):
        reporter.report("accept.emfile", "no descriptor", backoff_ms=1000, listener="0.0.0.0:443")
        if n % 100 == 0:
            reporter.flush()
    while reporter.unsent:
        reporter.flush()


def test_several_processes_with_one_signature_are_one_storm(rig: Rig, short_windows: None) -> None:
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=flood, args=(rig.write_end, f"worker-{n}", 5000)) for n in range(4)]
    for process in processes:
        process.start()
    log = rig.open()
    try:
        rig.run_until(lambda: "ended" in rig.text(), "the closing line")
    finally:
        for process in processes:
            process.kill()
            process.join()
    first, *summaries, end = rig.lines()
    assert first["level"] == "error"
    assert first["listener"] == "0.0.0.0:443"
    assert str(first["source"]).startswith("worker-")
    assert 1 <= len(summaries) <= 20
    assert sum(int(str(line["suppressed"])) for line in summaries) == 19_999
    assert {line["backoff_ms"] for line in summaries} == {1000}
    assert (end["ended"], end["count"]) == ("true", 20_000)
    assert log.occurrences == {"accept.emfile": 20_000}
    assert log.suppressed == {"accept.emfile": 19_999}
    assert log.lines_written == len(rig.lines())


def test_a_restart_of_the_log_loses_nothing_that_is_in_the_channel(rig: Rig) -> None:
    reporter = ChannelReporter("worker-0", rig.write_end, None)
    log = rig.open()
    reporter.report("a.b", "first log")
    rig.run_until(lambda: "first log" in rig.text(), "the first line")
    assert log.close(WAIT_SECS)
    rig.logs.clear()
    reporter.report("a.c", "between")
    for _ in range(6):
        reporter.report("a.b", "between too")
    reporter.flush()
    again = rig.open()
    rig.run_until(lambda: "between too" in rig.text(), "the lines that waited")
    assert again.occurrences == {"a.c": 1, "a.b": 6}


def test_the_end_takes_what_is_in_the_channel_and_tells_what_is_counted(rig: Rig) -> None:
    log = rig.open()
    reporter = ChannelReporter("master", rig.write_end, None)
    for _ in range(50):
        reporter.report("a.b", "m")
    reporter.report("master.stopping", "stopping", level="info")
    reporter.flush()
    assert log.close(WAIT_SECS)
    assert [(line["event"], line.get("count")) for line in rig.lines()] == [
        ("a.b", None),
        ("master.stopping", None),
        ("a.b", 50),
    ]


def test_a_malformed_datagram_is_an_event(rig: Rig) -> None:
    log = rig.open()
    for datagram in (b"not a record", b"", b"x" * (MAX_DATAGRAM_BYTES + 9)):
        rig.write_end.send(datagram)
    rig.run_until(lambda: log.occurrences == {"events.malformed": 3}, "all three are counted")
    rig.run_until(lambda: bool(rig.lines()), "its line")
    [line] = rig.lines()
    assert (line["level"], line["reason"], line["size_bytes"]) == ("warning", "not JSON", 12)


def test_the_text_form_and_the_level(rig: Rig) -> None:
    log = rig.open(format="text", level="warning")
    reporter = ChannelReporter("worker-0", rig.write_end, None)
    reporter.report("worker.ready", "ready", level="info")
    reporter.report("tls.handshake_failed", 'a "bad\nline', level="warning", listener="[::]:443")
    rig.run_until(lambda: "tls" in rig.text(), "the line")
    [line] = rig.text().splitlines()
    assert line.split(" ", 1)[1] == (
        'WARNING tls.handshake_failed source=worker-0 listener=[::]:443 msg="a \\"bad\\nline"'
    )
    assert log.occurrences["worker.ready"] == 1


def test_the_bound_over_all_signatures(rig: Rig) -> None:
    log = rig.open(max_lines_per_minute=10)
    reporter = ChannelReporter("worker-0", rig.write_end, None)
    for n in range(40):
        reporter.report(f"kind.{n}", "m")
    rig.run_until(lambda: log.lines_suppressed == 31, "the bound")
    assert log.close(WAIT_SECS)
    *lines, last = rig.lines()
    assert len(lines) == 9
    assert (last["event"], last["lines"]) == ("events.suppressed", 31)
    assert sum(log.suppressed.values()) == 31


def test_a_full_disk_is_counted_and_the_loop_goes_on(rig: Rig) -> None:
    log = rig.open("/dev/full")
    ChannelReporter("worker-0", rig.write_end, None).report("a.b", "m")
    rig.run_until(lambda: log.lines_dropped >= 2, "the line and the line about it")
    assert log.occurrences["event_log.dropped"] >= 1
    assert log.lines_written == 0


def test_a_blocked_pipe_does_not_block_the_loop(rig: Rig, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        log = rig.open(str(fifo), max_lines_per_minute=100_000)
        reporter = ChannelReporter("worker-0", rig.write_end, None)
        for n in range(200):
            reporter.report(f"kind.{n}", "m" * 1000)
            rig.run_until(lambda n=n: len(log.occurrences) == n + 1, "the loop takes the next")  # type: ignore[misc]
        assert not log.close(0)
    finally:
        os.close(reader)


def test_a_path_that_cannot_be_opened_is_told_at_once(rig: Rig, tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"event_log\.path"):
        rig.open(str(tmp_path / "no" / "events.log"))


def test_a_channel_in_error_is_not_a_spin(rig: Rig) -> None:
    with socket.socket() as broken:  # no peer: it is readable for ever, and reading it is ENOTCONN
        broken.setblocking(False)
        log = EventLog(broken, Settings(str(rig.path)))
        log.attach(rig.loop)
        rig.run_until(lambda: log.occurrences.get("events.channel_failed", 0) >= 3, "the timer tries again")
        assert not rig.loop.remove_reader(broken.fileno())
        assert log.close(WAIT_SECS)


def test_the_timer_outlives_an_exception(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    log = rig.open()
    seen: list[dict[str, object]] = []
    rig.loop.set_exception_handler(lambda _loop, context: seen.append(context))

    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(log, "_watch_writer", broken)
        rig.run_until(lambda: len(seen) >= 3, "the timer goes on")
    reporter = ChannelReporter("worker-0", rig.write_end, None)
    reporter.report("a.b", "m")
    rig.run_until(lambda: "a.b" in rig.text(), "and so does the log")
