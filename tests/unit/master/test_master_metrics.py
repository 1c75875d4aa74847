"""The Prometheus text format, and what of the counters goes into it."""

from __future__ import annotations

import re
from pathlib import Path

from proxy.master.exposition import Exposition
from proxy.master.metrics import EventCounts, Observed, render
from proxy.observe import counters
from proxy.observe.counters import CounterBook
from proxy.observe.tallies import Tallies


def test_labels_are_escaped_and_numbers_plain() -> None:
    out = Exposition()
    out.gauge("things", "Some.", [({"name": 'a"b\\c\nd'}, 0.5), ({"name": "e"}, 3.0)])
    assert out.encode().decode() == (
        "# HELP reverse_proxy_things Some.\n"
        "# TYPE reverse_proxy_things gauge\n"
        'reverse_proxy_things{name="a\\"b\\\\c\\nd"} 0.5\n'
        'reverse_proxy_things{name="e"} 3\n'
    )


def test_every_counter_that_is_shown_is_counted_somewhere() -> None:
    """A metric that nobody moves says that nothing happens."""
    proxy = Path(__file__).parents[3] / "proxy"
    shown = re.findall(r"counters\.([A-Z0-9_]+)", (proxy / "master" / "metrics.py").read_text())
    showing = {"metrics.py", "status.py", "counters.py"}
    source = "\n".join(path.read_text() for path in proxy.rglob("*.py") if path.name not in showing)
    by_index = {"ACCEPT_ERRNOS", "ACCEPT_ERRNO_BASE", "HTTP2_REASONS"}  # tables: counters.py finds the cell
    uncounted = [name for name in {*shown} - by_index if not re.search(rf"\b{name}\b", source)]
    assert not uncounted


def test_a_histogram_is_cumulative() -> None:
    out = Exposition()
    out.histogram("secs", "Some.", (0.5, 1.0), [({}, [1, 2, 3], 7.25), ({"site": "a"}, [0, 0, 0], 0.0)])
    assert out.encode().decode().splitlines()[2:] == [
        'reverse_proxy_secs_bucket{le="0.5"} 1',
        'reverse_proxy_secs_bucket{le="1"} 3',
        'reverse_proxy_secs_bucket{le="+Inf"} 6',
        "reverse_proxy_secs_sum 7.25",
        "reverse_proxy_secs_count 6",
        'reverse_proxy_secs_bucket{site="a",le="0.5"} 0',
        'reverse_proxy_secs_bucket{site="a",le="1"} 0',
        'reverse_proxy_secs_bucket{site="a",le="+Inf"} 0',
        'reverse_proxy_secs_sum{site="a"} 0',
        'reverse_proxy_secs_count{site="a"} 0',
    ]


def test_workers_are_summed_and_the_soonest_end_of_a_name_is_told() -> None:
    book = CounterBook(2, ["a.test"])
    for slot in range(2):
        tallies = Tallies(book.page(slot))
        tallies.count("a.test", b"GET", 299, 0.2)
        tallies.publish()
        book.page(slot)[counters.accept_error_cell(None)] = 4
        book.page(slot)[counters.DESCRIPTORS_LIMIT] = 100
    certificates = [{"names": ["a.test"], "not_after": f"2030-01-0{day}T00:00:00+00:00"} for day in (2, 1)]
    facts = {
        "version": "1",
        "listeners": [{"address": "192.0.2.1:443", "certificates": certificates}, {"address": "192.0.2.1:80"}],
        "budget": {"processes": [{"name": "worker 0", "total": 90}, {"name": "worker 1", "total": 80}]},
    }
    events = EventCounts(1, 2, 3, {"accept.emfile": 5}, {"accept.emfile": 4})
    lines = render(Observed(book, {}, (1, 1), facts, events, 12.5, ready=True)).decode().splitlines()
    for expected in (
        'reverse_proxy_requests_total{site="a.test",method="GET",code="other"} 2',
        'reverse_proxy_request_duration_seconds_sum{site="a.test"} 0.4',
        'reverse_proxy_accept_errors_total{errno="other"} 8',
        'reverse_proxy_certificate_expiry_timestamp_seconds{listener="192.0.2.1:443",name="a.test"} 1893456000',
        'reverse_proxy_descriptors_headroom{kind="worker"} 10',
        'reverse_proxy_events_suppressed_total{signature="accept.emfile"} 4',
    ):
        assert lines.count(expected) == 1, expected
