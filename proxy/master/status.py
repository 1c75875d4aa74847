"""What the appliance says about itself, from the shared counters: pure functions of their arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from proxy.observe import counters
from proxy.observe.counters import CounterBook

HEARTBEAT_LIMIT_MS = 5000
"""A worker beats twice a second; one that has not for so long does not count as alive."""

WORKER_KEYS: tuple[tuple[str, int], ...] = (
    ("connections", counters.CONNECTIONS_OPEN),
    ("permits_held", counters.CONNECTIONS_OPEN),
    ("redirect_connections", counters.REDIRECT_OPEN),
    ("upstream_open", counters.UPSTREAM_OPEN),
    ("upstream_idle", counters.UPSTREAM_IDLE),
    ("upstream_queued", counters.UPSTREAM_QUEUED),
    ("tunnels", counters.TUNNELS_OPEN),
    ("requests", counters.REQUESTS),
    ("requests_active", counters.REQUESTS_ACTIVE),
    ("descriptors_open", counters.DESCRIPTORS_OPEN),
    ("descriptors_limit", counters.DESCRIPTORS_LIMIT),
)

NOT_SUMMED = frozenset(
    {
        counters.PID,
        counters.READY,
        counters.HEARTBEAT_MS,
        counters.DESCRIPTORS_OPEN,
        counters.DESCRIPTORS_LIMIT,
        counters.DRAINING,
    }
)
"""Cells whose sum over workers means nothing: descriptors are a limit of each process."""


def unhealthy(book: CounterBook, now_ms: int) -> str:
    """Why the appliance is not alive; empty when at least one worker beats."""
    reasons = [_silence(book.page(slot), slot, now_ms) for slot in range(book.slots)]
    return "" if "" in reasons else "\n".join(reasons)


def unready(book: CounterBook, now_ms: int) -> str:
    """Why the appliance is not ready, a line for each worker that is not; empty when all accept connections."""
    reasons = []
    for slot in range(book.slots):
        cells = book.page(slot)
        reason = _silence(cells, slot, now_ms)
        if not reason and not cells[counters.READY]:
            reason = f"worker {slot} is starting or draining"
        if reason:
            reasons.append(reason)
    return "\n".join(reasons)


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


def _age_ms(cells: memoryview, now_ms: int) -> int | None:
    beat = cells[counters.HEARTBEAT_MS]
    return max(0, now_ms - beat) if beat else None


def _silence(cells: memoryview, slot: int, now_ms: int) -> str:
    age_ms = _age_ms(cells, now_ms)
    if age_ms is None:
        return f"worker {slot} is not running"
    if age_ms >= HEARTBEAT_LIMIT_MS:
        return f"worker {slot} has given no heartbeat for {age_ms / 1000:.1f} s"
    return ""
