"""What the appliance says about itself, from the shared counters: pure functions of their arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from proxy.observe import counters
from proxy.observe.counters import CounterBook
from proxy.observe.refusals import refusal_counts
from proxy.observe.rows import BACKEND_CELLS, OTHER, Rows

HEARTBEAT_LIMIT_MS = 5000
"""A worker beats twice a second; one that has not for so long does not count as alive."""

WORKER_KEYS: tuple[tuple[str, int], ...] = (
    ("connections", counters.CONNECTIONS_OPEN),
    ("permits_held", counters.CONNECTIONS_OPEN),
    ("handshakes", counters.HANDSHAKES_OPEN),
    ("redirect_connections", counters.REDIRECT_OPEN),
    ("upstream_open", counters.UPSTREAM_OPEN),
    ("upstream_idle", counters.UPSTREAM_IDLE),
    ("upstream_queued", counters.UPSTREAM_QUEUED),
    ("http2_connections", counters.HTTP2_OPEN),
    ("http2_streams", counters.HTTP2_STREAMS_OPEN),
    ("tunnels", counters.TUNNELS_OPEN),
    ("requests", counters.REQUESTS),
    ("requests_active", counters.REQUESTS_ACTIVE),
    ("generations", counters.GENERATIONS),
    ("descriptors_open", counters.DESCRIPTORS_OPEN),
    ("descriptors_limit", counters.DESCRIPTORS_LIMIT),
    ("restarts", counters.RESTARTS),
    ("loop_lag_us", counters.LOOP_LAG_US),
    ("loop_lag_max_us", counters.LOOP_LAG_MAX_US),
)

NOT_SUMMED = frozenset(
    {
        counters.PID,
        counters.READY,
        counters.HEARTBEAT_MS,
        counters.DESCRIPTORS_OPEN,
        counters.DESCRIPTORS_LIMIT,
        counters.DRAINING,
        counters.HANDED_OVER,
        counters.LOOP_LAG_US,
        counters.LOOP_LAG_MAX_US,
        counters.LOG_LEVEL,
    }
)
"""Cells whose sum over workers means nothing: descriptors are a limit of each process."""


def unhealthy(book: CounterBook, now_ms: int) -> str:
    """Why the appliance is not alive; empty when at least one worker beats."""
    reasons = [_silence(book.page(slot), slot, now_ms) for slot in range(book.slots)]
    return "" if "" in reasons else "\n".join(reasons)


def unready(book: CounterBook, now_ms: int) -> str:
    """Why the appliance is not ready, a line for each worker that is not; empty when all accept connections.

    Where some do accept, the first line says that it is degraded and how many are left.
    """
    reasons = []
    for slot in range(book.slots):
        cells = book.page(slot)
        reason = _silence(cells, slot, now_ms)
        if not reason and not cells[counters.READY]:
            reason = f"worker {slot} is starting or draining"
        reason = reason or _exhaustion(cells, slot)
        if reason:
            reasons.append(reason)
    accepting = book.slots - len(reasons)
    if reasons and accepting:
        reasons.insert(0, f"degraded: {accepting} of {book.slots} workers accept connections")
    return "\n".join(reasons)


def backends(book: CounterBook) -> list[dict[str, object]]:
    """The backends that have a row, with their state summed over the workers."""
    found: list[dict[str, object]] = []
    for label, cells in backend_sums(book).items():
        if label != OTHER or any(cells):
            state = dict(zip(("open", "idle", "ejected", "failures"), cells, strict=False))
            found.append({"backend": label, **state})
    return found


def refused(book: CounterBook) -> int:
    """Connections and requests that were refused or cut, since the start."""
    return sum(sum(refusal_counts(book.page(slot))) for slot in range(book.slots))


def workers(book: CounterBook, permits: Sequence[int], now_ms: int) -> list[dict[str, object]]:
    """One entry a slot; ``permits`` are the slots' shares."""
    return [
        {
            "slot": slot,
            "pid": book.page(slot)[counters.PID] or None,
            "ready": bool(book.page(slot)[counters.READY]),
            "heartbeat_age_ms": _age_ms(book.page(slot), now_ms),
            "permits": permits[slot],
            **{key: book.page(slot)[index] for key, index in WORKER_KEYS},
        }
        for slot in range(book.slots)
    ]


def totals(book: CounterBook) -> Mapping[str, int]:
    """Every counter by its name, summed over the workers."""
    return {name: book.total(index) for index, name in enumerate(counters.NAMES) if index not in NOT_SUMMED}


def cell_sums(book: CounterBook, at: int, size: int) -> list[int]:
    """The sums over all workers of ``size`` cells from ``at`` on."""
    parts = [book.page(slot)[at : at + size].tolist() for slot in range(book.slots)]
    return parts[0] if len(parts) == 1 else list(map(sum, zip(*parts, strict=True)))


def backend_sums(book: CounterBook) -> dict[str, list[int]]:
    """Each backend's row, summed over all workers."""
    rows = Rows(book.page(0))
    return {
        label: cell_sums(book, rows.layout.backends + row * BACKEND_CELLS, BACKEND_CELLS)
        for label, row in rows.backends().items()
    }


def _age_ms(cells: memoryview, now_ms: int) -> int | None:
    beat = cells[counters.HEARTBEAT_MS]
    return max(0, now_ms - beat) if beat else None


def _exhaustion(cells: memoryview, slot: int) -> str:
    """The budget rules it out, unless somebody lowered the limit of the running process."""
    held, limit = cells[counters.DESCRIPTORS_OPEN], cells[counters.DESCRIPTORS_LIMIT]
    if not 0 < limit <= held:
        return ""
    return f"worker {slot} is out of descriptors: it holds {held}, its soft limit is {limit}"


def _silence(cells: memoryview, slot: int, now_ms: int) -> str:
    age_ms = _age_ms(cells, now_ms)
    if age_ms is None:
        return f"worker {slot} is not running"
    if age_ms >= HEARTBEAT_LIMIT_MS:
        return f"worker {slot} has given no heartbeat for {age_ms / 1000:.1f} s"
    return ""
