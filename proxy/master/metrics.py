"""What `/metrics` says, from the shared counters: a pure function of its argument.

The values of labels come from closed sets: sites and backends as configured, known methods and status codes,
signatures of events (bounded by the event log), slots. Whatever else there is, is ``other``.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.master.exposition import Exposition, Labels, Sample
from proxy.master.status import backend_sums, cell_sums, refused
from proxy.observe import counters
from proxy.observe.counters import CounterBook
from proxy.observe.rows import (
    BACKEND_EJECTED,
    BACKEND_FAILURES,
    BACKEND_IDLE,
    BACKEND_OPEN,
    BOUNDS_SECS,
    BUCKETS,
    CODES,
    DURATION_CELLS,
    METHODS,
    OTHER,
    REQUEST_CELLS,
    SUM_AT,
    Rows,
)


@dataclass(frozen=True, slots=True)
class EventCounts:
    """What the event log has counted; ``occurrences`` and ``suppressed`` by signature."""

    written: int
    denied: int
    dropped: int
    occurrences: Mapping[str, int]
    suppressed: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything that is told. ``permits``: the slots' shares; ``facts``: see ``announce.status_facts``.

    ``processes``: pages of the processes that have no slot, by name. ``start_time``: seconds since the epoch.
    """

    book: CounterBook
    processes: Mapping[str, memoryview]
    permits: Sequence[int]
    facts: Mapping[str, Any]
    events: EventCounts
    start_time: float
    ready: bool


TOTALS: tuple[tuple[str, int, str], ...] = (
    ("accept_pauses_total", counters.ACCEPT_PAUSES, "Times a listener stopped accepting: no permit, or an error."),
    ("misdirected_requests_total", counters.MISDIRECTED, "Requests for a host that is not served (421)."),
    ("rate_limited_requests_total", counters.RATE_LIMITED, "Requests over a rate limit (429)."),
    ("denied_requests_total", counters.DENIED, "Requests of clients in a deny list (403)."),
    ("denied_connections_total", counters.CONNECTIONS_DENIED, "Connections of clients in the top deny list, closed."),
    ("unlocked_tokens_total", counters.BUCKETS_CONTENDED, "Tokens taken while another worker did not give the row."),
    ("forgotten_buckets_total", counters.BUCKETS_FORGOTTEN, "Buckets that gave way to others before they were full."),
    ("slow_clients_total", counters.TIMEOUTS_SLOW, "Clients below a least rate, cut or answered 408."),
    ("upstream_queue_full_total", counters.UPSTREAM_QUEUE_FULL, "Requests that found the queue full (503)."),
    ("black_boxes_total", counters.BLACK_BOXES, "Records of resource errors, see the command blackbox."),
    ("bad_requests_total", counters.BAD_REQUESTS, "Requests that were refused as malformed."),
    ("http2_connections_total", counters.HTTP2_CONNECTIONS, "Client connections that agreed on HTTP/2."),
    ("http2_streams_total", counters.HTTP2_STREAMS, "Requests that came on them."),
    ("http2_stream_errors_total", counters.HTTP2_STREAM_ERRORS, "Streams that were reset for the client's fault."),
    ("dropped_underscore_fields_total", counters.UNDERSCORE_FIELDS_DROPPED, "Request fields with an underscore."),
    (
        "refused_over_client_cap_total",
        counters.REFUSED_OVER_CLIENT_CAP,
        "Connections over max_connections_per_client, closed at once.",
    ),
    (
        "uncounted_clients_total",
        counters.CLIENTS_UNCOUNTED,
        "Connections that found no row in the table of clients, and were counted by their worker alone.",
    ),
    ("upstream_connects_total", counters.UPSTREAM_CONNECTS, "Connections to upstreams that were tried."),
    ("upstream_connect_failures_total", counters.UPSTREAM_CONNECT_FAILURES, "Of these, the ones that failed."),
    ("upstream_reused_total", counters.UPSTREAM_REUSED, "Requests sent on a pooled connection."),
    ("upstream_retries_total", counters.UPSTREAM_RETRIES, "Requests sent a second time."),
    ("upstream_queue_timeouts_total", counters.UPSTREAM_QUEUE_TIMEOUTS, "Requests that got no connection in time."),
    ("upstream_ejections_total", counters.UPSTREAM_EJECTED, "Times that a backend was left out for its failures."),
    ("client_received_bytes_total", counters.BYTES_FROM_CLIENTS, "Bytes from clients, of connections that ended."),
    ("client_sent_bytes_total", counters.BYTES_TO_CLIENTS, "Bytes to clients, of connections that ended."),
    ("access_log_lines_total", counters.ACCESS_LINES, "Lines handed to the access log."),
    ("access_log_lines_dropped_total", counters.ACCESS_LINES_DROPPED, "Of these, the ones that it did not take."),
)
GAUGES: tuple[tuple[str, int, str], ...] = (
    ("active_requests", counters.REQUESTS_ACTIVE, "Requests under way."),
    ("open_handshakes", counters.HANDSHAKES_OPEN, "Handshakes under way, of max_handshakes."),
    ("open_tunnels", counters.TUNNELS_OPEN, "WebSockets and the like."),
    ("http2_open_connections", counters.HTTP2_OPEN, "Of the client connections, those of HTTP/2."),
    ("http2_open_streams", counters.HTTP2_STREAMS_OPEN, "Their streams, answers that are not taken yet included."),
    ("upstream_open_connections", counters.UPSTREAM_OPEN, "Connections to upstreams, idle ones included."),
    ("upstream_idle_connections", counters.UPSTREAM_IDLE, "Pooled connections to upstreams."),
    ("upstream_queued_requests", counters.UPSTREAM_QUEUED, "Requests that wait for a connection."),
)
HANDSHAKES: tuple[tuple[str, int], ...] = (
    ("ok", counters.HANDSHAKES_OK),
    ("failed", counters.HANDSHAKES_FAILED),
    ("timed_out", counters.HANDSHAKES_TIMED_OUT),
)
EVICTIONS: tuple[tuple[str, int], ...] = (
    ("handshake", counters.EVICTED_HANDSHAKES),
    ("head", counters.EVICTED_HEADS),
    ("idle", counters.EVICTED_IDLE),
    ("descriptors", counters.EVICTED_FOR_DESCRIPTORS),
)
TIMEOUTS: tuple[tuple[str, int], ...] = (
    ("header", counters.TIMEOUTS_HEADER),
    ("idle", counters.TIMEOUTS_IDLE),
    ("body", counters.TIMEOUTS_BODY),
    ("write", counters.TIMEOUTS_WRITE),
    ("upstream", counters.TIMEOUTS_UPSTREAM),
    ("tunnel", counters.TIMEOUTS_TUNNEL),
)


def render(observed: Observed) -> bytes:
    """The body of `/metrics`."""
    out = Exposition()
    _appliance(out, observed)
    _limits(out, observed)
    _descriptors(out, observed)
    _traffic(out, observed.book)
    _backends(out, observed.book)
    _logs(out, observed.events)
    return out.encode()


def _appliance(out: Exposition, observed: Observed) -> None:
    book, processes = observed.book, observed.processes
    out.gauge("build_info", "The version that runs.", [({"version": observed.facts["version"]}, 1)])
    out.gauge("start_time_seconds", "When it was started, in seconds since the epoch.", round(observed.start_time, 3))
    out.gauge("ready", "1 while /readyz answers 200.", int(observed.ready))
    out.gauge("worker_ready", "1 while the worker accepts connections.", _by_worker(book, counters.READY))
    out.counter("worker_restarts_total", "Workers that replaced one that ended.", _by_worker(book, counters.RESTARTS))
    control = processes.get("control")
    if control is not None:
        out.counter("control_restarts_total", "As of workers, of the control process.", control[counters.RESTARTS])
    master = processes.get("master")
    if master is not None:
        results = (("accepted", counters.RELOADS_ACCEPTED), ("refused", counters.RELOADS_REFUSED))
        out.counter("reloads_total", "Reloads.", [({"result": result}, master[cell]) for result, cell in results])
    out.gauge("generation", "The number of the configuration in force.", observed.facts.get("generation", 1))
    out.gauge(
        "event_loop_lag_seconds",
        "How late the worker's last heartbeat was.",
        _by_worker(book, counters.LOOP_LAG_US, 1e-6),
    )
    out.gauge(
        "event_loop_lag_max_seconds",
        "The latest heartbeat of the last half minute.",
        _by_worker(book, counters.LOOP_LAG_MAX_US, 1e-6),
    )
    out.gauge(
        "certificate_expiry_timestamp_seconds",
        "When a certificate ends, in seconds since the epoch, by its first name.",
        _certificates(observed.facts.get("listeners", ())),
    )


def _limits(out: Exposition, observed: Observed) -> None:
    book = observed.book
    out.counter(
        "connections_accepted_total", "Accepted, redirects included.", book.total(counters.CONNECTIONS_ACCEPTED)
    )
    out.gauge(
        "open_connections",
        "Client connections.",
        [
            ({"listener": "https"}, book.total(counters.CONNECTIONS_OPEN)),
            ({"listener": "redirect"}, book.total(counters.REDIRECT_OPEN)),
        ],
    )
    out.gauge("permits_held", "Permits held, by worker.", _by_worker(book, counters.CONNECTIONS_OPEN))
    out.gauge(
        "permits_limit",
        "The worker's share of max_connections.",
        [({"worker": slot}, permits) for slot, permits in enumerate(observed.permits)],
    )
    errors = [
        sum(book.page(slot)[counters.ACCEPT_ERRNO_BASE + at] for slot in range(book.slots))
        for at in range(len(counters.ACCEPT_ERRNOS))
    ]
    out.counter(
        "accept_errors_total",
        "Failures of accept(2).",
        [({"errno": name}, count) for name, count in zip(counters.ACCEPT_ERRNOS, errors, strict=True)],
    )
    out.counter("refusals_total", "Connections and requests that were refused or cut.", refused(book))


def _descriptors(out: Exposition, observed: Observed) -> None:
    book = observed.book
    pages = {f"worker {slot}": book.page(slot) for slot in range(book.slots)} | dict(observed.processes)
    for name, cell, text in (
        ("descriptors_open", counters.DESCRIPTORS_OPEN, "File descriptors that the process has open."),
        ("descriptors_limit", counters.DESCRIPTORS_LIMIT, "Its soft limit; 0: unlimited."),
    ):
        out.gauge(name, text, [({"process": process}, cells[cell]) for process, cells in pages.items()])
    needed: dict[str, int] = {}
    for process in observed.facts["budget"]["processes"]:
        kind = process["name"].partition(" ")[0]
        needed[kind] = max(needed.get(kind, 0), process["total"])
    limits = {name.partition(" ")[0]: cells[counters.DESCRIPTORS_LIMIT] for name, cells in pages.items()}
    out.gauge(
        "descriptors_needed",
        "The worst case of a process of this kind, by the budget.",
        [({"kind": kind}, count) for kind, count in needed.items()],
    )
    out.gauge(
        "descriptors_headroom",
        "What the limit leaves over the worst case; absent while the limit is unlimited or unknown.",
        [({"kind": kind}, limits[kind] - count) for kind, count in needed.items() if limits.get(kind)],
    )


def _traffic(out: Exposition, book: CounterBook) -> None:
    out.counter("tls_handshakes_total", "Handshakes with clients.", _by_label(book, "result", HANDSHAKES))
    out.counter("timeouts_total", "Deadlines that were not kept.", _by_label(book, "phase", TIMEOUTS))
    out.counter("evictions_total", "Connections that gave way to others.", _by_label(book, "reason", EVICTIONS))
    out.counter(
        "http2_connection_errors_total",
        "Connections of HTTP/2 that were ended for the client's fault, the floods for going past a bound.",
        [({"reason": reason}, book.total(counters.http2_reason_cell(reason))) for reason in counters.HTTP2_REASONS],
    )
    for name, cell, text in TOTALS:
        out.counter(name, text, book.total(cell))
    for name, cell, text in GAUGES:
        out.gauge(name, text, book.total(cell))
    out.counter("requests_total", "Requests that were answered; code 499: the client left.", _requests(book))
    out.histogram(
        "request_duration_seconds",
        "From a request's head to the end of its answer, tunnels left out.",
        BOUNDS_SECS,
        _durations(book),
    )


def _backends(out: Exposition, book: CounterBook) -> None:
    sums = backend_sums(book)
    shown = {label: cells for label, cells in sums.items() if label != OTHER or any(cells)}
    out.gauge(
        "upstream_backend_connections",
        "Connections to a backend, made and not closed; idle: in the pool.",
        [
            ({"backend": label, "state": state}, cells[cell])
            for label, cells in shown.items()
            for state, cell in (("open", BACKEND_OPEN), ("idle", BACKEND_IDLE))
        ],
    )
    out.gauge(
        "upstream_backend_ejected",
        "In how many routes and workers it is left out now.",
        [({"backend": label}, cells[BACKEND_EJECTED]) for label, cells in shown.items()],
    )
    out.counter(
        "upstream_backend_failures_total",
        "What counted against a backend.",
        [({"backend": label}, cells[BACKEND_FAILURES]) for label, cells in shown.items()],
    )


def _logs(out: Exposition, events: EventCounts) -> None:
    out.counter("event_log_lines_total", "Lines of the event log.", events.written)
    out.counter("event_log_lines_suppressed_total", "Left out for want of max_lines_per_minute.", events.denied)
    out.counter("event_log_lines_dropped_total", "Lines that the log's target did not take.", events.dropped)
    for name, text, counts in (
        ("events_total", "What was reported, by signature.", events.occurrences),
        ("events_suppressed_total", "Of these, the ones without a line of their own.", events.suppressed),
    ):
        out.counter(name, text, [({"signature": signature}, count) for signature, count in sorted(counts.items())])


def _by_worker(book: CounterBook, cell: int, unit: float = 1) -> list[Sample]:
    return [({"worker": slot}, round(book.page(slot)[cell] * unit, 6)) for slot in range(book.slots)]


def _by_label(book: CounterBook, label: str, cells: tuple[tuple[str, int], ...]) -> list[Sample]:
    return [({label: value}, book.total(cell)) for value, cell in cells]


def _requests(book: CounterBook) -> Iterator[Sample]:
    rows = Rows(book.page(0))
    for site, row in rows.sites().items():
        cells = cell_sums(book, rows.layout.requests + row * REQUEST_CELLS, REQUEST_CELLS)
        for at, count in enumerate(cells):
            if count:
                method, code = divmod(at, len(CODES))
                yield {"site": site, "method": METHODS[method], "code": CODES[code] or OTHER}, count


def _durations(book: CounterBook) -> Iterator[tuple[Labels, list[int], float]]:
    rows = Rows(book.page(0))
    for site, row in rows.sites().items():
        cells = cell_sums(book, rows.layout.durations + row * DURATION_CELLS, DURATION_CELLS)
        if site != OTHER or any(cells):
            yield {"site": site}, cells[:BUCKETS], cells[SUM_AT] / 1_000_000


def _certificates(listeners: Sequence[Mapping[str, Any]]) -> list[Sample]:
    ends: dict[tuple[str, str], float] = {}
    for listener in listeners:
        for certificate in listener.get("certificates", ()):
            key = listener["address"], next(iter(certificate["names"]), OTHER)
            end = dt.datetime.fromisoformat(certificate["not_after"]).timestamp()
            ends[key] = min(end, ends.get(key, end))
    return [({"listener": address, "name": name}, end) for (address, name), end in ends.items()]
