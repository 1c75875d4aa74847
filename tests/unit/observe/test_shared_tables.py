"""Tables of numbers by client: one writer each, everybody reads, nobody waits."""

from __future__ import annotations

import os
import signal

import hypothesis.strategies as st
from hypothesis import given

from proxy.observe.shared_tables import NO_ROW, ROWS_A_SET, SharedTables


def test_a_total_is_the_sum_over_all_slots() -> None:
    tables = SharedTables(3, 64)
    key = tables.key_of(b"client")
    for slot, count in enumerate((1, 10, 100)):
        view = tables.view(slot)
        at = view.claim(key)
        view.cells[at] = count
        assert view.claim(key) == view.find(key) == at
    assert [tables.view(slot).total(key) for slot in range(3)] == [111] * 3
    assert tables.view(0).elsewhere(key) == 110
    tables.clear(2)
    assert tables.view(0).total(key) == 11


def test_processes_see_each_others_numbers_and_a_killed_ones_are_cleared() -> None:
    tables = SharedTables(2, 64)
    key = tables.key_of(b"client")
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        view = tables.view(1)
        view.cells[view.claim(key)] += 5
        os.write(tell, b"x")
        signal.pause()
    os.read(ready, 1)
    assert tables.view(0).total(key) == 5
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert tables.view(0).total(key) == 5, "what it held is held until the master knows"
    tables.clear(1)
    assert tables.view(0).total(key) == 0
    os.close(ready)
    os.close(tell)


def test_keys_are_secret_and_never_0() -> None:
    one, other = SharedTables(1, 8), SharedTables(1, 8)
    assert one.key_of(b"a") != other.key_of(b"a")
    assert one.key_of(b"a") == one.key_of(b"a") != one.key_of(b"b")
    assert 0 < one.key_of(b"") < 1 << 64


def test_a_full_set_has_no_row_or_gives_up_its_oldest() -> None:
    view = SharedTables(1, ROWS_A_SET, width=2).view(0)
    for key in range(1, ROWS_A_SET + 1):
        at = view.claim(key)
        view.cells[at] = 100 - key
        view.cells[at + 1] = key
    assert view.claim(99) == NO_ROW
    assert view.find(99) == NO_ROW
    at = view.claim(99, oldest=True)
    assert [view.cells[at], view.cells[at + 1]] == [0, 0]
    assert view.find(ROWS_A_SET) == NO_ROW, "the one with the smallest first cell has gone"
    assert view.total(1, cell=1) == 1


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=200))
def test_against_a_dictionary(steps: list[tuple[int, bool]]) -> None:
    view = SharedTables(1, 64, width=3).view(0)
    model: dict[int, int] = {}
    for key, forget in steps:
        if forget and key in model:
            view.release(view.find(key))
            del model[key]
            continue
        at = view.claim(key)
        if at == NO_ROW:
            assert sum(other % 8 == key % 8 for other in model) == ROWS_A_SET
            continue
        view.cells[at + 2] += key
        model[key] = model.get(key, 0) + key
    assert {key: view.total(key, 2) for key in range(1, 41) if view.find(key) != NO_ROW} == model
