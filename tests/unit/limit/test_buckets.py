"""Token buckets in shared memory: the decisions of a token bucket, and a lock that nobody can keep."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.limit.buckets import ROWS, WAYS, Buckets
from proxy.observe.counters import BUCKETS_CONTENDED, BUCKETS_FORGOTTEN, CounterBook

SECOND_NS = 1_000_000_000
KEY = 7 * ROWS + 5
ROW = 5

HOLDER = f"""
import fcntl, sys, time
fcntl.lockf(int(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, {ROW})
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def buckets() -> Iterator[Buckets]:
    table = Buckets()
    yield table
    table.close()


@pytest.fixture
def holder(buckets: Buckets) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that has the lock of one row."""
    descriptor = buckets._fd
    command = [sys.executable, "-c", HOLDER, str(descriptor)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[descriptor]) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"held\n"
            yield process
        finally:
            process.kill()


@given(
    st.integers(1, 20),
    st.integers(1, 10),
    st.lists(st.integers(0, 3 * SECOND_NS), max_size=60),
)
def test_the_decisions_are_a_token_buckets(burst: int, per_second: int, gaps: list[int]) -> None:
    table = Buckets()
    try:
        interval = SECOND_NS // per_second
        now, tokens = 1, float(burst)
        for gap in gaps:
            now += gap
            tokens = min(burst, tokens + gap / interval)
            spare = table.take(KEY, interval, (burst - 1) * interval, now)
            if abs(tokens - 1) > 1e-6:
                assert (spare >= 0) == (tokens >= 1)
            if spare >= 0:
                tokens -= 1
            else:
                assert abs(-spare - (1 - tokens) * interval) < 1000
    finally:
        table.close()


def test_what_is_given_back_was_never_taken(buckets: Buckets) -> None:
    for _ in range(5):
        assert buckets.take(KEY, SECOND_NS, 0) >= 0
        assert buckets.take(KEY, SECOND_NS, 0) < 0
        buckets.give_back(KEY, SECOND_NS)


def test_keys_have_buckets_of_their_own(buckets: Buckets) -> None:
    keys = [*range(-3, 0), *range(1, 1000)]
    assert all(buckets.take(key, SECOND_NS, 0, 1) >= 0 for key in keys)
    assert all(buckets.take(key, SECOND_NS, 0, 1) < 0 for key in keys)
    assert buckets.forgotten == 0


def test_a_full_row_forgets_who_owes_least(buckets: Buckets) -> None:
    keys = [ROW + ROWS * number for number in range(1, WAYS + 1)]
    for owes, key in enumerate(keys, 1):
        for _ in range(owes):
            assert buckets.take(key, SECOND_NS, 100 * SECOND_NS, 1) >= 0
    assert buckets.forgotten == 0
    buckets.take(ROW + ROWS * 100, SECOND_NS, 0, 1)
    assert buckets.forgotten == 1
    most = keys[-1]
    assert buckets.take(most, SECOND_NS, (WAYS - 1) * SECOND_NS, 1) < 0, "who owes most is not forgotten"


def test_who_is_stopped_with_the_lock_holds_up_nobody(buckets: Buckets, holder: subprocess.Popen[bytes]) -> None:
    os.kill(holder.pid, signal.SIGSTOP)
    assert [buckets.take(KEY, SECOND_NS, SECOND_NS, 1) >= 0 for _ in range(3)] == [True, True, False]
    assert buckets.contended == 3
    assert buckets.take(KEY + 1, SECOND_NS, 0) >= 0  # other rows are locked as ever
    assert buckets.contended == 3


def test_the_kernel_takes_the_lock_from_who_is_killed(buckets: Buckets, holder: subprocess.Popen[bytes]) -> None:
    holder.kill()
    holder.wait()
    assert buckets.take(KEY, SECOND_NS, 0) >= 0
    assert buckets.contended == 0


def test_what_is_counted_is_told_once(buckets: Buckets, holder: subprocess.Popen[bytes]) -> None:
    book = CounterBook(1)
    os.kill(holder.pid, signal.SIGSTOP)
    assert buckets.take(KEY, SECOND_NS, SECOND_NS, 1) >= 0
    for _ in range(2):
        buckets.publish(book.page(0))
    assert book.total(BUCKETS_CONTENDED) == 1
    assert book.total(BUCKETS_FORGOTTEN) == 0
