"""Rows by site and backend in a page that describes itself, and the tallies that fill them."""

from __future__ import annotations

import os

from proxy.observe.counters import CounterBook, private_cells
from proxy.observe.rows import (
    BACKEND_EJECTED,
    BACKEND_FAILURES,
    BACKEND_OPEN,
    BUCKETS,
    CODE_AT,
    CODES,
    METHODS,
    REQUEST_CELLS,
    SUM_AT,
    Rows,
)
from proxy.observe.tallies import CODE_CELL, Tallies


def test_names_keep_their_rows_and_new_ones_are_found_by_who_looked_before() -> None:
    book = CounterBook(2, ["a.test", "b.test"], ["http://192.0.2.1:80"])
    rows = Rows(book.page(1))
    assert rows.sites() == {"other": 0, "a.test": 1, "b.test": 2}
    assert rows.backends() == {"other": 0, "http://192.0.2.1:80": 1}
    before = rows.requests_at("b.test", 0)
    book.assign(["c.test", "b.test"], ["unix:/run/x.sock"])
    assert rows.sites() == {"other": 0, "a.test": 1, "b.test": 2, "c.test": 3}
    assert rows.requests_at("b.test", 0) == before
    assert rows.requests_at("c.test", 0) == before + REQUEST_CELLS
    assert rows.backend_at("unix:/run/x.sock") == rows.backend_at("http://192.0.2.1:80") + 8


def test_what_finds_no_room_is_other() -> None:
    names = [f"site{number}.test" for number in range(300)]
    book = CounterBook(1, names)
    rows = Rows(book.page(0))
    assert len(rows.sites()) == 257
    assert rows.requests_at(names[255], 0) != rows.requests_at("other", 0)
    assert rows.requests_at(names[256], 0) == rows.requests_at("other", 0) == rows.layout.requests


def test_a_name_longer_than_a_row_is_found_by_what_of_it_is_kept() -> None:
    book = CounterBook(1, ["a" * 600, "b.test"])
    rows = Rows(book.page(0))
    assert rows.durations_at("a" * 600) != rows.durations_at("other")
    assert rows.durations_at("b.test") not in (rows.durations_at("a" * 600), rows.durations_at("other"))


def test_the_parts_of_a_page_do_not_overlap() -> None:
    book = CounterBook(1, ["a.test"], ["http://192.0.2.1:80"])
    layout = Rows(book.page(0)).layout
    starts = [layout.backend_names, layout.requests, layout.durations, layout.backends, layout.refusals, layout.cells]
    assert starts == sorted(starts)
    assert len(book.page(0)) == layout.cells
    assert layout.durations - layout.requests == layout.site_rows * len(METHODS) * len(CODES)


def test_a_childs_tallies_reach_the_page_and_outlive_it() -> None:
    book = CounterBook(2, ["a.test"])
    pid = os.fork()
    if pid == 0:
        tallies = Tallies(book.page(1))
        tallies.count("a.test", b"GET", 200, 0.004)
        tallies.count("a.test", b"GET", 200, 70.0)
        tallies.count("a.test", b"BREW", 799, 0.0)
        tallies.publish()
        tallies.publish()
        tallies.count("a.test", b"GET", 502, 0.001)
        tallies.publish()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    cells, rows = book.page(1), Rows(book.page(1))
    gets = rows.requests_at("a.test", METHODS.index("GET"))
    assert [cells[gets + CODE_AT[code]] for code in (200, 502, 404)] == [2, 1, 0]
    assert cells[rows.requests_at("a.test", METHODS.index("other")) + CODE_AT[799]] == 1
    durations = rows.durations_at("a.test")
    found = cells[durations : durations + BUCKETS].tolist()
    assert (found[0], found[2], found[-1], sum(found)) == (2, 1, 1, 4)
    assert cells[durations + SUM_AT] == 70_005_000
    assert not any(book.page(0)[Rows(book.page(0)).layout.requests :])


def test_a_request_without_a_site_counts_as_other() -> None:
    cells = private_cells()
    tallies = Tallies(cells)
    tallies.count(None, b"", 400, 0.0)
    tallies.publish()
    assert cells[Rows(cells).requests_at("other", METHODS.index("other")) + CODE_AT[400]] == 1


def test_every_code_has_its_cell_and_unknown_ones_share_the_last() -> None:
    assert CODES[CODE_AT[499]] == 499
    assert {code: CODES[CODE_AT[code]] for code in CODES if code} == {code: code for code in CODES if code}
    assert CODES[CODE_AT[299]] == 0
    assert len(CODE_CELL) == 1000


def test_of_a_dead_worker_only_what_it_did_to_backends_stays() -> None:
    book = CounterBook(1, [], ["http://192.0.2.1:80"])
    cells = book.page(0)
    at = Rows(cells).backend_at("http://192.0.2.1:80")
    for cell in (BACKEND_OPEN, BACKEND_EJECTED, BACKEND_FAILURES):
        cells[at + cell] = 3
    book.clear_gauges(0)
    assert [cells[at + cell] for cell in (BACKEND_OPEN, BACKEND_EJECTED, BACKEND_FAILURES)] == [0, 0, 3]
