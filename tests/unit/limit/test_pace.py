"""The least rate: who keeps it is never too slow, who does not is, whatever the spacing of the bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.limit.pace import Pace

RATE = 100.0
GRACE_SECS = 5.0
IDLE_SECS = 30.0


def pace() -> Pace:
    return Pace(RATE, grace_secs=GRACE_SECS, longest_secs=IDLE_SECS)


def test_a_silent_peer_has_the_grace() -> None:
    assert pace().wait(10.0) == 15.0


def test_a_wait_goes_on_until_something_moves() -> None:
    one = pace()
    assert one.wait(10.0) == one.wait(12.0) == 15.0


@given(st.lists(st.floats(min_value=0.01, max_value=5.0), min_size=1, max_size=200))
def test_who_keeps_the_rate_is_never_too_slow(gaps: list[float]) -> None:
    one, now = pace(), 0.0
    for gap in gaps:
        too_slow_at = one.wait(now)
        now += gap
        assert now <= too_slow_at + 1e-9
        one.moved(int(gap * RATE) + 1, now)


@given(st.floats(min_value=0.1, max_value=29.0), st.integers(min_value=0, max_value=100_000))
def test_who_sends_a_byte_now_and_then_is_too_slow_in_the_end(gap: float, burst: int) -> None:
    one, now = pace(), 0.0
    one.moved(burst, now)  # a burst at first earns no more than the idle timeout
    drip = min(burst, int(gap * RATE * 0.5))  # half the rate
    while (too_slow_at := one.wait(now)) >= now + gap:
        now += gap
        assert now < 3 * IDLE_SECS
        one.moved(drip, now)
    assert too_slow_at <= now + gap


def test_time_in_which_nobody_waits_costs_nothing() -> None:
    one = pace()
    one.wait(0.0)
    one.rest(1.0)
    one.rest(2.0)
    assert one.wait(1000.0) == 1000.0 + GRACE_SECS - 1.0


def test_a_burst_earns_no_more_than_the_longest() -> None:
    one = pace()
    one.moved(10**9, 0.0)
    assert one.wait(0.0) == IDLE_SECS
