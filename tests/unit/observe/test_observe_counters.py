from __future__ import annotations

import os

import pytest

from proxy.observe import counters
from proxy.observe.counters import CounterBook
from proxy.observe.rows import FIXED_CELLS


def test_every_name_is_the_constant_of_its_index() -> None:
    assert {name: getattr(counters, name.upper()) for name in counters.NAMES} == {
        name: index for index, name in enumerate(counters.NAMES)
    }


def test_a_page_has_room_for_every_cell() -> None:
    assert len(counters.NAMES) <= counters.ACCEPT_ERRNO_BASE
    assert counters.ACCEPT_ERRNO_BASE + len(counters.ACCEPT_ERRNOS) < FIXED_CELLS - 2


def test_a_child_counts_in_the_parents_memory_and_only_in_its_slot() -> None:
    book = CounterBook(3)
    pid = os.fork()
    if pid == 0:
        book.page(1)[counters.REQUESTS] += 7
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert [book.page(slot)[counters.REQUESTS] for slot in range(3)] == [0, 7, 0]
    book.page(2)[counters.REQUESTS] += 5
    assert book.total(counters.REQUESTS) == 12


def test_what_a_dead_process_held_is_cleared_and_what_it_did_stays() -> None:
    book = CounterBook(2)
    for slot in range(2):
        for index in range(len(counters.NAMES)):
            book.page(slot)[index] = 9
    book.clear_gauges(0)
    left = {counters.NAMES[index] for index in range(len(counters.NAMES)) if book.page(0)[index]}
    gauges = {counters.NAMES[index] for index in counters.GAUGES}
    assert left == set(counters.NAMES) - gauges
    assert gauges >= {"pid", "ready", "heartbeat_ms", "permits", "connections_open", "requests_active"}
    assert set(book.page(1).tolist()[: len(counters.NAMES)]) == {9}


def test_private_cells_have_every_index() -> None:
    cells = counters.private_cells()
    cells[len(counters.NAMES) - 1] += 1
    assert cells[counters.accept_error_cell(None)] == 0
    with pytest.raises(IndexError):
        cells[len(cells)] += 1
