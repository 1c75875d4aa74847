"""Counters in memory that every process sees: one page a slot, one 8-byte cell a number.

The memory is an anonymous shared mapping made before the fork. A cell has one writer, the process that holds the slot
(``cells[REQUESTS] += 1``), and any number of readers; an aligned 8-byte store is never seen half done, so there is no
lock. The numbers live as long as the master: a worker that dies takes nothing with it, and the next one in its slot
counts on from there.

After the cells named here comes what depends on the configuration, see ``rows``, and the ring of ``refusals``.
"""

from __future__ import annotations

import errno
import mmap
from collections.abc import Iterable
from typing import Final

from proxy.observe.rows import (
    CELL_BYTES,
    FIXED_CELLS,
    MAX_BACKEND_ROWS,
    MAX_SITE_ROWS,
    MIN_BACKEND_ROWS,
    MIN_SITE_ROWS,
    OTHER,
    Layout,
    Rows,
    room,
)

Cells = memoryview
"""A slot's page: ``memoryview`` with format ``Q``, writable, indexed by the constants below."""

# One name a cell, in index order. Totals only grow; gauges (GAUGES below) say what holds now.
NAMES: tuple[str, ...] = (
    "pid",
    "ready",
    "heartbeat_ms",
    "descriptors_open",
    "descriptors_limit",
    "connections_accepted",
    "connections_open",
    "permits",
    "redirect_open",
    "handshakes_ok",
    "handshakes_failed",
    "handshakes_timed_out",
    "requests",
    "requests_active",
    "responses_1xx",
    "responses_2xx",
    "responses_3xx",
    "responses_4xx",
    "responses_5xx",
    "bad_requests",
    "misdirected",
    "underscore_fields_dropped",
    "timeouts_header",
    "timeouts_idle",
    "timeouts_body",
    "timeouts_write",
    "timeouts_upstream",
    "timeouts_tunnel",
    "upstream_open",
    "upstream_idle",
    "upstream_connects",
    "upstream_connect_failures",
    "upstream_reused",
    "upstream_retries",
    "upstream_queued",
    "upstream_queue_timeouts",
    "upstream_ejected",
    "accept_errors",
    "accept_pauses",
    "tunnels_open",
    "bytes_from_clients",
    "bytes_to_clients",
    "access_lines",
    "access_lines_dropped",
    "events_reported",
    "events_unsent",
    "restarts",
    "loop_lag_us",
    "loop_lag_max_us",
    "listeners_open",
    "logs_open",
    "draining",
    "reloads_accepted",
    "reloads_refused",
    "generations",
    "handed_over",
    "evicted_handshakes",
    "evicted_heads",
    "evicted_idle",
    "evicted_for_descriptors",
    "refused_over_client_cap",
    "handshakes_open",
    "clients_uncounted",
    "rate_limited",
    "denied",
    "connections_denied",
    "timeouts_slow",
    "upstream_queue_full",
    "black_boxes",
    "memory_bytes",
    "memory_base_bytes",
    "buckets_contended",
    "buckets_forgotten",
    "log_level",
    "http2_open",
    "http2_streams_open",
    "http2_connections",
    "http2_streams",
    "http2_stream_errors",
    "http2_connection_errors",
)

PID = 0
READY = 1
HEARTBEAT_MS = 2
DESCRIPTORS_OPEN = 3
DESCRIPTORS_LIMIT = 4
CONNECTIONS_ACCEPTED = 5
CONNECTIONS_OPEN = 6
PERMITS = 7
REDIRECT_OPEN = 8
HANDSHAKES_OK = 9
HANDSHAKES_FAILED = 10
HANDSHAKES_TIMED_OUT = 11
REQUESTS = 12
REQUESTS_ACTIVE = 13
RESPONSES_1XX = 14
RESPONSES_2XX = 15
RESPONSES_3XX = 16
RESPONSES_4XX = 17
RESPONSES_5XX = 18
BAD_REQUESTS = 19
MISDIRECTED = 20
UNDERSCORE_FIELDS_DROPPED = 21
TIMEOUTS_HEADER = 22
TIMEOUTS_IDLE = 23
TIMEOUTS_BODY = 24
TIMEOUTS_WRITE = 25
TIMEOUTS_UPSTREAM = 26
TIMEOUTS_TUNNEL = 27
UPSTREAM_OPEN = 28
UPSTREAM_IDLE = 29
UPSTREAM_CONNECTS = 30
UPSTREAM_CONNECT_FAILURES = 31
UPSTREAM_REUSED = 32
UPSTREAM_RETRIES = 33
UPSTREAM_QUEUED = 34
UPSTREAM_QUEUE_TIMEOUTS = 35
UPSTREAM_EJECTED = 36
ACCEPT_ERRORS = 37
ACCEPT_PAUSES = 38
TUNNELS_OPEN = 39
BYTES_FROM_CLIENTS = 40
BYTES_TO_CLIENTS = 41
ACCESS_LINES = 42
ACCESS_LINES_DROPPED = 43
EVENTS_REPORTED = 44
EVENTS_UNSENT = 45
RESTARTS = 46
"""Written by the master, which starts them."""
LOOP_LAG_US = 47
LOOP_LAG_MAX_US = 48
LISTENERS_OPEN = 49
LOGS_OPEN = 50
DRAINING = 51
"""Of the control process's page alone, written by the master: the end, or the delay before it, has begun."""
RELOADS_ACCEPTED = 52
RELOADS_REFUSED = 53
"""Both of the master's page alone."""
GENERATIONS = 54
"""Configurations that a worker still has connections of, the one in force included."""
HANDED_OVER = 55
"""As DRAINING: another master serves, and this process's generation ends with its connections."""
EVICTED_HANDSHAKES = 56
EVICTED_HEADS = 57
EVICTED_IDLE = 58
"""Connections that gave way to others, by what they were waiting for."""
EVICTED_FOR_DESCRIPTORS = 59
"""Idle ones that gave way when accept(2) found no free descriptor."""
REFUSED_OVER_CLIENT_CAP = 60
HANDSHAKES_OPEN = 61
CLIENTS_UNCOUNTED = 62
"""Connections that were counted by their worker alone, for want of room in the table of clients."""
RATE_LIMITED = 63
DENIED = 64
CONNECTIONS_DENIED = 65
"""By ``deny``: requests that were answered 403, and connections that were closed."""
TIMEOUTS_SLOW = 66
"""Heads, bodies and responses that a client was too slow with (``min_..._bytes_per_sec``)."""
UPSTREAM_QUEUE_FULL = 67
BLACK_BOXES = 68
MEMORY_BYTES = 69
MEMORY_BASE_BYTES = 70
"""The process's own memory (resident, not shared), now and when it began to serve."""
BUCKETS_CONTENDED = 71
BUCKETS_FORGOTTEN = 72
"""Tokens that were taken without the lock; buckets that gave way to others before they were full."""
LOG_LEVEL = 73
"""Of the control process's page alone: the event log's level as it was set by hand, see ``record.LEVELS``; 0: not."""
HTTP2_OPEN = 74
HTTP2_STREAMS_OPEN = 75
"""Of client connections; brought up to date by the heartbeat."""
HTTP2_CONNECTIONS = 76
HTTP2_STREAMS = 77
HTTP2_STREAM_ERRORS = 78
"""Streams that were reset for a fault of the client's."""
HTTP2_CONNECTION_ERRORS = 79
"""Connections that were ended for one, or past a bound: HTTP2_REASONS tells by reason."""

ACCEPT_ERRNOS: Final = (
    *("EMFILE", "ENFILE", "ENOBUFS", "ENOMEM", "ECONNABORTED", "EPROTO", "ENETDOWN", "ENOPROTOOPT", "EHOSTDOWN"),
    *("ENONET", "EHOSTUNREACH", "EOPNOTSUPP", "ENETUNREACH", "EPERM", "EINVAL", "EBADF", "ENOTSOCK", OTHER),
)
"""One cell each, in this order, from ACCEPT_ERRNO_BASE on: ACCEPT_ERRORS by errno."""
ACCEPT_ERRNO_BASE: Final = 128
_ERRNO_CELLS: Final = {
    getattr(errno, name): ACCEPT_ERRNO_BASE + at for at, name in enumerate(ACCEPT_ERRNOS) if name != OTHER
}
_OTHER_ERRNO_CELL: Final = ACCEPT_ERRNO_BASE + len(ACCEPT_ERRNOS) - 1


def accept_error_cell(number: int | None) -> int:
    """The cell that counts accept errors with this errno."""
    return _ERRNO_CELLS.get(number or 0, _OTHER_ERRNO_CELL)


HTTP2_REASONS: Final = (
    *("preface", "frame-too-large", "frame-size", "hpack", "no-continuation", "continuation", "idle-stream"),
    *("stream-id", "closed-stream", "padding", "no-stream", "not-on-stream-0", "push-promise", "settings-value"),
    *("settings-window", "window-increment", "window-overflow", "window-exceeded", "goaway-id", "priority-update"),
    *("header-list-size", "header-block-size", "continuation-flood", "settings-flood", "ping-flood", "reset-flood"),
    *("empty-frame-flood", "priority-flood", "window-update-flood", "unknown-frame-flood", "late-frame-flood"),
    *("small-frame-flood", "unread-answers", OTHER),
)
"""One cell each, in this order, from HTTP2_REASON_BASE on: HTTP2_CONNECTION_ERRORS by reason."""
HTTP2_REASON_BASE: Final = 192
_REASON_CELLS: Final = {reason: HTTP2_REASON_BASE + at for at, reason in enumerate(HTTP2_REASONS)}


def http2_reason_cell(reason: str) -> int:
    """The cell that counts connections that were ended for ``reason``."""
    return _REASON_CELLS.get(reason, _REASON_CELLS[OTHER])


GAUGES: tuple[int, ...] = (
    PID,
    READY,
    HEARTBEAT_MS,
    DESCRIPTORS_OPEN,
    DESCRIPTORS_LIMIT,
    CONNECTIONS_OPEN,
    PERMITS,
    REDIRECT_OPEN,
    REQUESTS_ACTIVE,
    UPSTREAM_OPEN,
    UPSTREAM_IDLE,
    UPSTREAM_QUEUED,
    TUNNELS_OPEN,
    EVENTS_UNSENT,
    LOOP_LAG_US,
    LOOP_LAG_MAX_US,
    LISTENERS_OPEN,
    LOGS_OPEN,
    GENERATIONS,
    HANDSHAKES_OPEN,
    HTTP2_OPEN,
    HTTP2_STREAMS_OPEN,
    MEMORY_BYTES,
    MEMORY_BASE_BYTES,
)
"""What a dead process no longer has: open things, its pid, its heartbeat."""

PAGE_BYTES = FIXED_CELLS * CELL_BYTES
"""Pages of its own for each slot: two workers never write to one cache line."""


def private_cells() -> Cells:
    """A page that no other process sees, for a process without a slot. All cells 0, but for the layout."""
    layout = Layout(1, 1)
    cells = memoryview(bytearray(layout.cells * CELL_BYTES)).cast("Q")
    layout.describe(cells)
    return cells


class CounterBook:
    """The shared memory: made by the master before it forks, inherited by every child."""

    def __init__(self, slots: int, sites: Iterable[str] = (), backends: Iterable[str] = ()) -> None:
        """Map a page for each of ``slots`` (at least 1), all numbers 0, with rows for these names and for as many more.

        OSError when the memory is not to be had.
        """
        sites, backends = dict.fromkeys(sites), dict.fromkeys(backends)
        self.slots = slots
        self._layout = layout = Layout(
            room(len(sites), MIN_SITE_ROWS, MAX_SITE_ROWS), room(len(backends), MIN_BACKEND_ROWS, MAX_BACKEND_ROWS)
        )
        size = layout.cells * CELL_BYTES
        self._pages = tuple(mmap.mmap(-1, size, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS) for _ in range(slots))
        self._cells: tuple[Cells, ...] = tuple(memoryview(page).cast("Q") for page in self._pages)
        for cells in self._cells:
            layout.describe(cells)
        self.assign(sites, backends)

    def page(self, slot: int) -> Cells:
        """The cells of ``slot`` (0 .. slots-1): writable, the same memory in every process."""
        return self._cells[slot]

    def total(self, index: int) -> int:
        """The sum of one cell over all slots."""
        return sum(cells[index] for cells in self._cells)

    def assign(self, sites: Iterable[str], backends: Iterable[str]) -> None:
        """Give these names rows, beside those that there are: at the start and, by the master, before a reload's new
        configuration is handed out. What finds no room counts as ``other``."""
        sites, backends = tuple(sites), tuple(backends)
        for cells in self._cells:
            Rows(cells).assign(sites, backends)

    def clear_gauges(self, slot: int) -> None:
        """Set what a dead process held to 0; the totals stay. Only for a slot whose process has been reaped."""
        cells = self._cells[slot]
        for index in GAUGES:
            cells[index] = 0
        Rows(cells).clear_gauges()
