"""Health and readiness from the shared counters, and the live line."""

from __future__ import annotations

import io

from proxy.master import status
from proxy.master.live import LiveLine
from proxy.observe import counters
from proxy.observe.counters import CounterBook

NOW_MS = 1_000_000


def book(*workers: tuple[int, int]) -> CounterBook:
    """Of (age of the heartbeat in ms, ready) a worker."""
    made = CounterBook(len(workers))
    for slot, (age_ms, ready) in enumerate(workers):
        made.page(slot)[counters.HEARTBEAT_MS] = NOW_MS - age_ms
        made.page(slot)[counters.READY] = ready
    return made


def test_one_beating_worker_is_enough_to_be_alive_but_not_to_be_ready() -> None:
    half = book((10, 1), (status.HEARTBEAT_LIMIT_MS, 1))
    assert status.unhealthy(half, NOW_MS) == ""
    assert status.unready(half, NOW_MS).splitlines() == [
        "degraded: 1 of 2 workers accept connections",
        "worker 1 has given no heartbeat for 5.0 s",
    ]


def test_without_a_beating_worker_each_reason_is_told() -> None:
    none = CounterBook(2)
    none.page(1)[counters.HEARTBEAT_MS] = NOW_MS - 9000
    expected = "worker 0 is not running\nworker 1 has given no heartbeat for 9.0 s"
    assert status.unhealthy(none, NOW_MS) == expected
    assert status.unready(none, NOW_MS) == expected


def test_a_worker_that_drains_is_alive_and_not_ready() -> None:
    draining = book((10, 0))
    assert status.unhealthy(draining, NOW_MS) == ""
    assert status.unready(draining, NOW_MS) == "worker 0 is starting or draining"


def test_a_worker_out_of_descriptors_is_alive_and_not_ready() -> None:
    out = book((0, 1), (0, 1))
    for slot, (held, limit) in enumerate(((31, 32), (33, 32))):
        out.page(slot)[counters.DESCRIPTORS_OPEN] = held
        out.page(slot)[counters.DESCRIPTORS_LIMIT] = limit
    assert status.unhealthy(out, NOW_MS) == ""
    assert status.unready(out, NOW_MS).splitlines() == [
        "degraded: 1 of 2 workers accept connections",
        "worker 1 is out of descriptors: it holds 33, its soft limit is 32",
    ]
    out.page(1)[counters.DESCRIPTORS_LIMIT] = 0  # unlimited
    assert status.unready(out, NOW_MS) == ""


def test_a_ready_appliance_has_no_reasons() -> None:
    assert status.unready(book((0, 1), (4999, 1)), NOW_MS) == ""


def test_totals_sum_what_can_be_summed() -> None:
    made = book((0, 1), (0, 1))
    for slot in range(2):
        made.page(slot)[counters.REQUESTS] = 5
    totals = status.totals(made)
    assert totals["requests"] == 10
    assert not {"pid", "ready", "heartbeat_ms", "descriptors_limit"} & set(totals)


def test_workers_show_their_share() -> None:
    made = book((7, 1), (0, 0))
    made.page(0)[counters.PID] = 42
    first, second = status.workers(made, (3, 2), NOW_MS)
    assert (first["pid"], first["ready"], first["permits"], first["heartbeat_age_ms"]) == (42, True, 3, 7)
    assert (second["pid"], second["permits"]) == (None, 2)


def test_the_live_line_shows_rates_since_the_last_one_and_clears_itself() -> None:
    made = book((0, 1))
    cells = made.page(0)
    stream = io.StringIO()
    line = LiveLine(stream, 100)
    line.clear()
    assert stream.getvalue() == ""
    line.draw(made, 10.0)
    cells[counters.REQUESTS] = 50
    cells[counters.CONNECTIONS_OPEN] = 4
    cells[counters.DESCRIPTORS_OPEN] = 20
    cells[counters.DESCRIPTORS_LIMIT] = 1024
    line.draw(made, 12.0)
    line.clear()
    first, second, cleared = (part.rstrip("\r") for part in stream.getvalue().split("\r\x1b[K")[1:])
    assert "requests/s 0" in first
    assert second == "connections 4 | permits held 4 of 100 | requests/s 25 | descriptors 20 of 1024"
    assert cleared == ""


def test_a_terminal_that_is_gone_does_not_end_the_master() -> None:
    class Gone(io.StringIO):
        def write(self, _text: str) -> int:
            raise OSError(5, "Input/output error")

    line = LiveLine(Gone(), 1)
    line.draw(book((0, 1)), 1.0)
    line.clear()
