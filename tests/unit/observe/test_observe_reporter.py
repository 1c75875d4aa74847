from __future__ import annotations

import asyncio
import functools
import gc
import socket
from collections.abc import Callable, Iterator

import pytest
import uvloop

from proxy.observe import counters
from proxy.observe.events import ChannelReporter, open_channel
from proxy.observe.record import Record, decode
from proxy.observe.reporter import MAX_SIGNATURES, OVERFLOW, QUIET_SECS

Channel = tuple[socket.socket, socket.socket]


@pytest.fixture
def channel() -> Iterator[Channel]:
    read_end, write_end = open_channel()
    yield read_end, write_end
    read_end.close()
    write_end.close()


def drain(read_end: socket.socket) -> list[Record]:
    records = []
    while True:
        try:
            records.append(decode(read_end.recv(65_536)))
        except BlockingIOError:
            return records


@pytest.fixture
def narrow_channel(channel: Channel) -> Channel:
    """One that takes a handful of datagrams."""
    channel[1].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    return channel


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_first_is_sent_at_once_and_whole_repeats_are_counted(channel: Channel) -> None:
    cells = counters.private_cells()
    reporter = ChannelReporter("worker-0", channel[1], cells)
    for n in range(1000):
        error = ValueError(f"the {n}th")
        reporter.report("accept.emfile", f"message {n}", exc=error, backoff_ms=n)
    [first] = drain(channel[0])
    assert (first.source, first.signature, first.occurrences) == ("worker-0", "accept.emfile", 1)
    assert (first.message, first.fields, first.trace) == ("message 0", {"backoff_ms": 0}, "ValueError: the 0th")
    reporter.flush()
    [rest] = drain(channel[0])
    assert (rest.occurrences, rest.message, rest.fields, rest.trace) == (999, "message 999", {"backoff_ms": 999}, "")
    reporter.flush()
    assert drain(channel[0]) == []
    assert cells[counters.EVENTS_REPORTED] == 1000


def test_what_the_channel_does_not_take_stays_counted(narrow_channel: Channel) -> None:
    cells = counters.private_cells()
    reporter = ChannelReporter("worker-0", narrow_channel[1], cells)
    wanted = {f"s{n}": 3 for n in range(100)}
    for _ in range(3):
        for signature in wanted:
            reporter.report(signature, "m")
    reporter.flush()
    assert cells[counters.EVENTS_UNSENT] > 200
    got: dict[str, int] = {}
    while records := drain(narrow_channel[0]):
        for record in records:
            got[record.signature] = got.get(record.signature, 0) + record.occurrences
        reporter.flush()
    assert got == wanted
    assert cells[counters.EVENTS_UNSENT] == 0


def test_where_the_channel_takes_only_some_every_signature_has_its_turn(narrow_channel: Channel) -> None:
    reporter = ChannelReporter("worker-0", narrow_channel[1], None)
    signatures = {f"s{n}" for n in range(60)}
    seen = set()
    for _ in range(len(signatures)):
        for signature in signatures:
            reporter.report(signature, "m")
        reporter.flush()
        seen |= {record.signature for record in drain(narrow_channel[0])}
    assert seen == signatures


def test_a_closed_channel_raises_nothing_and_loses_nothing(channel: Channel) -> None:
    cells = counters.private_cells()
    reporter = ChannelReporter("worker-0", channel[1], cells)
    channel[0].close()
    for _ in range(5):
        reporter.report("a.b", "m")
    reporter.flush()
    assert cells[counters.EVENTS_UNSENT] == 5


def test_signatures_are_bounded(channel: Channel) -> None:
    cells = counters.private_cells()
    reporter = ChannelReporter("worker-0", channel[1], cells)
    got: dict[str, int] = {}
    for n in range(MAX_SIGNATURES + 500):
        reporter.report(f"s{n}", "m")
        for record in drain(channel[0]):
            got[record.signature] = got.get(record.signature, 0) + record.occurrences
    reporter.flush()
    for record in drain(channel[0]):
        got[record.signature] += record.occurrences
        assert record.fields == {"latest": f"s{MAX_SIGNATURES + 499}"}
    assert len(got) == MAX_SIGNATURES + 1
    assert got[OVERFLOW] == 500
    assert cells[counters.EVENTS_REPORTED] == MAX_SIGNATURES + 500


def test_after_a_quiet_time_the_next_is_whole_again(channel: Channel) -> None:
    clock = Clock()
    reporter = ChannelReporter("worker-0", channel[1], None, clock)
    reporter.report("a.b", "m", exc=ValueError("1"))
    clock.now += QUIET_SECS - 0.1
    reporter.flush()
    reporter.report("a.b", "m", exc=ValueError("2"))
    reporter.flush()
    clock.now += QUIET_SECS
    reporter.flush()
    reporter.report("a.b", "m", exc=ValueError("3"))
    assert [record.trace for record in drain(channel[0])] == ["ValueError: 1", "", "ValueError: 3"]


def test_lifecycle_events_are_each_whole(channel: Channel) -> None:
    reporter = ChannelReporter("master", channel[1], None)
    for slot in range(20):
        reporter.report("worker.started", "started", level="info", slot=slot)
        reporter.flush()
    whole = [record.fields["slot"] for record in drain(channel[0])]
    assert whole[:9] == list(range(9))


class Hostile:
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_a_value_without_text_still_counts(channel: Channel) -> None:
    reporter = ChannelReporter("worker-0", channel[1], None)
    for _ in range(3):
        reporter.report("a.b", "m", field=Hostile())  # type: ignore[arg-type]
    reporter.flush()
    assert [record.occurrences for record in drain(channel[0])] == [1, 2]


LOOPS = [pytest.param(uvloop.new_event_loop, id="uvloop"), pytest.param(asyncio.new_event_loop, id="asyncio")]
NewLoop = Callable[[], asyncio.AbstractEventLoop]


class Part:
    def on_readable(self) -> None:
        raise ValueError("in a callback")


async def fail() -> None:
    raise KeyError("in a task")


@pytest.mark.parametrize("new_loop", LOOPS)
def test_what_callbacks_and_tasks_let_out_is_reported_by_their_name(channel: Channel, new_loop: NewLoop) -> None:
    loop = new_loop()
    try:
        reporter = ChannelReporter("worker-0", channel[1], None)
        reporter.attach(loop)
        loop.call_soon(Part().on_readable)
        loop.call_soon(functools.partial(Part().on_readable))
        loop.call_soon(int, "not a number")
        task = loop.create_task(fail())
        loop.run_until_complete(asyncio.wait([task]))
        del task
        gc.collect()
        loop.call_exception_handler({"message": "no exception"})
        reporter.detach()
        got: dict[str, int] = {}
        for record in drain(channel[0]):
            got[record.signature] = got.get(record.signature, 0) + record.occurrences
    finally:
        loop.close()
    assert got == {
        "loop.ValueError.Part.on_readable": 2,
        "loop.ValueError.unknown": 1,
        "loop.KeyError.fail": 1,
        "loop.none.unknown": 1,
    }


@pytest.mark.parametrize("new_loop", LOOPS)
def test_a_callback_that_raises_on_each_wake_up_is_few_datagrams(channel: Channel, new_loop: NewLoop) -> None:
    loop = new_loop()
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    times = 0

    def broken() -> None:
        nonlocal times
        times += 1
        if times == 2000:
            loop.remove_reader(ours.fileno())
            loop.stop()
        raise OSError(24, "Too many open files")

    try:
        reporter = ChannelReporter("worker-0", channel[1], None)
        reporter.attach(loop)
        loop.add_reader(ours.fileno(), broken)
        theirs.send(b"x")
        loop.run_forever()
        reporter.detach()
        records = drain(channel[0])
    finally:
        loop.close()
        ours.close()
        theirs.close()
    assert len(records) < 10
    assert sum(record.occurrences for record in records) == 2000
    assert records[0].trace.endswith("OSError: [Errno 24] Too many open files")


@pytest.mark.parametrize("new_loop", LOOPS)
def test_the_timer_outlives_a_flush_that_raises(
    channel: Channel, new_loop: NewLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.observe.reporter.FLUSH_INTERVAL_SECS", 0.01)
    loop = new_loop()
    flushes = 0

    class Broken(ChannelReporter):
        def flush(self) -> None:
            nonlocal flushes
            flushes += 1
            if flushes == 3:
                loop.stop()
            elif flushes < 3:
                raise RuntimeError("broken")

    try:
        reporter = Broken("worker-0", channel[1], None)
        reporter.attach(loop)
        loop.run_forever()
        reporter.detach()
    finally:
        loop.close()
    assert flushes == 4
