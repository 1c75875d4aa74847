"""The ring of the last refusals: newest first, bounded in size and in rate."""

from __future__ import annotations

from proxy.observe.counters import private_cells
from proxy.observe.refusals import MAX_A_SECOND, Refusal, RefusalRing, refusal_counts, refusals
from proxy.observe.rows import REFUSALS_AT_ONCE


class Clock:
    def __init__(self) -> None:
        self.now = 1000.5

    def __call__(self) -> float:
        return self.now


def test_the_latest_comes_first_with_all_that_was_noted() -> None:
    cells = private_cells()
    clock = Clock()
    ring = RefusalRing(cells, clock)
    assert refusals(cells) == []
    ring.note(b"192.0.2.1", "bad-request", status=400, detail="bare-lf")
    clock.now += 1
    ring.note(b"2001:db8::1", "header-timeout")
    assert refusals(cells) == [
        Refusal(1001.5, "2001:db8::1", 0, "header-timeout", ""),
        Refusal(1000.5, "192.0.2.1", 400, "bad-request", "bare-lf"),
    ]


def test_a_full_ring_forgets_the_oldest() -> None:
    cells = private_cells()
    clock = Clock()
    ring = RefusalRing(cells, clock)
    for number in range(REFUSALS_AT_ONCE + 3):
        clock.now += 1
        ring.note(b"%d" % number, "drain")
    found = refusals(cells)
    assert [one.address for one in found] == [str(n) for n in range(REFUSALS_AT_ONCE + 2, 2, -1)]


def test_an_attack_is_counted_and_not_written() -> None:
    cells = private_cells()
    clock = Clock()
    ring = RefusalRing(cells, clock)
    for _ in range(1000):
        ring.note(b"192.0.2.1", "handshake-failed")
    assert (len(refusals(cells)), refusal_counts(cells)) == (MAX_A_SECOND, (MAX_A_SECOND, 1000 - MAX_A_SECOND))
    clock.now += 1
    ring.note(b"192.0.2.2", "handshake-failed")
    assert refusals(cells)[0].address == "192.0.2.2"


def test_what_is_too_long_or_not_ascii_is_cut() -> None:
    cells = private_cells()
    ring = RefusalRing(cells, Clock())
    ring.note(b"9" * 99, "r" * 99, detail="\N{SNOWMAN}" * 99)
    (one,) = refusals(cells)
    assert (one.address, one.reason, one.detail) == ("9" * 46, "r" * 32, "?" * 40)
