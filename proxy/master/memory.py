"""The memory that connections may take at worst, beside what they take: a formula over the bounds of the code.

Counted is the processes' own memory. The kernel's socket buffers come on top and are bounded by the kernel itself
(net.ipv4.tcp_mem, tcp_rmem, tcp_wmem).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from proxy.budget import Budget
from proxy.config.schema import Settings
from proxy.observe import counters
from proxy.protocol.http2 import DEFAULT_LIMITS
from proxy.protocol.http2.outbox import HIGH_WATER_BYTES as STREAM_HIGH_WATER_BYTES
from proxy.protocol.http2.outbox import LOW_WATER_BYTES, TOTAL_HIGH_WATER_BYTES
from proxy.protocol.http2.server import MEMO_BYTES
from proxy.session.client import PIPELINE_BYTES
from proxy.stream.stream import HIGH_WATER_BYTES, READ_BYTES, TLS_READS_A_WAKEUP, TLS_RECORD_BYTES

PROCESS_BYTES: Final = 64 * 1024 * 1024
"""A worker with no connection, its caches of heads filled; measured 35 to 50 MB."""
OBJECTS_BYTES: Final = 8 * 1024
"""Session, stream, codec and exchange, without what they buffer."""
TLS_BYTES: Final = 56 * 1024
"""OpenSSL's state of one connection with its buffers for a record in each direction in use; idle: 13.5 KB."""
HEAD_COPIES: Final = 3
"""A head as it came, its fields, and what is made of it for the other side."""

_UNLIMITED: Final = 1 << 60
_CGROUP_ROOT: Final = "/sys/fs/cgroup"


@dataclass(frozen=True, slots=True)
class Item:
    """``count`` things of at most ``each_bytes``."""

    label: str
    count: int
    each_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.count * self.each_bytes


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """All of it. ``available_bytes``: of ``source``, the cgroup or the machine; 0: not known."""

    items: tuple[Item, ...]
    available_bytes: int
    source: str

    @property
    def total_bytes(self) -> int:
        return sum(item.total_bytes for item in self.items)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What `check` says."""
        total, available = self.total_bytes, self.available_bytes
        if not available or total <= available:
            return ()
        return (
            (
                f"all connections at their worst need {mib(total)} MiB of memory, {self.source} has"
                f" {mib(available)} MiB: lower max_connections, max_upstream_connections or max_queued_requests,"
                " or give it more"
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        """For programs."""
        return {
            "items": [
                {"label": item.label, "count": item.count, "each_bytes": item.each_bytes, "bytes": item.total_bytes}
                for item in self.items
            ],
            "worst_case_bytes": self.total_bytes,
            "available_bytes": self.available_bytes or None,
            "available_of": self.source,
            "warnings": list(self.warnings),
        }

    def to_text(self) -> str:
        """An aligned table."""
        rows = [
            (item.label, str(item.count), f"{kib(item.each_bytes)} KiB", f"{mib(item.total_bytes)} MiB")
            for item in self.items
        ]
        rows.append(("total", "", "", f"{mib(self.total_bytes)} MiB"))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        available = f"{mib(self.available_bytes)} MiB of {self.source}" if self.available_bytes else "not known"
        lines = [f"memory at worst (available: {available})"]
        lines += [
            f"  {label:<{widths[0]}}  {count:>{widths[1]}} x {each:>{widths[2]}}  {total:>{widths[3]}}"
            if count
            else f"  {label:<{widths[0] + widths[1] + widths[2] + 5}}  {total:>{widths[3]}}"
            for label, count, each, total in rows
        ]
        return "\n".join(lines)


def memory_budget(settings: Settings, budget: Budget) -> MemoryBudget:
    """The worst case of ``settings``, as resolved in ``budget``, and what this host has."""
    available, source = available_memory()
    return MemoryBudget(tuple(_items(settings, budget)), available, source)


def _items(settings: Settings, budget: Budget) -> Iterator[Item]:
    requests = budget.max_upstream_connections + settings.max_queued_requests
    yield Item("workers and control", budget.inputs.workers + 1, PROCESS_BYTES)
    yield Item("client connections", budget.max_connections, client_bytes(settings))
    yield Item("requests under way or queued", requests, request_bytes(settings))
    yield Item("upstream connections", budget.max_upstream_connections, upstream_bytes(settings))
    yield Item("redirect connections", budget.inputs.redirect_cap, _plain_bytes(settings))


def client_bytes(settings: Settings) -> int:
    """A client connection of the costlier protocol, HTTP/2: what its codec may hold for it beside the requests."""
    streams = DEFAULT_LIMITS.max_concurrent_streams
    http1 = _plain_bytes(settings)
    # The last piece that is given to a stream goes over its mark, and the outbox over its own by what each may keep.
    waiting = TOTAL_HIGH_WATER_BYTES + streams * LOW_WATER_BYTES + READ_BYTES
    http2 = (
        HIGH_WATER_BYTES + TLS_RECORD_BYTES + waiting + DEFAULT_LIMITS.max_control_bytes + _input_bytes() + MEMO_BYTES
    )
    return TLS_BYTES + OBJECTS_BYTES + max(http1, http2)


def request_bytes(settings: Settings) -> int:
    """A request that has an upstream connection or waits for one: its head, and its body as far as a window goes."""
    head = max(settings.max_request_head_bytes, DEFAULT_LIMITS.max_header_list_bytes)
    response_head = settings.max_response_head_bytes
    window = DEFAULT_LIMITS.max_window_bytes
    return OBJECTS_BYTES + HEAD_COPIES * (head + response_head) + window + STREAM_HIGH_WATER_BYTES


def upstream_bytes(settings: Settings) -> int:
    """A connection to a backend: what it has not read of a request, and what came of its response in one wake-up."""
    return TLS_BYTES + OBJECTS_BYTES + HIGH_WATER_BYTES + _input_bytes() + settings.max_response_head_bytes + READ_BYTES


def _plain_bytes(settings: Settings) -> int:
    """HTTP/1.1 without TLS: a head, what is sent ahead of the answer, and the answer up to the water mark."""
    return (
        OBJECTS_BYTES
        + settings.max_request_head_bytes
        + PIPELINE_BYTES
        + _input_bytes()
        + HIGH_WATER_BYTES
        + READ_BYTES
    )


def _input_bytes() -> int:
    """One wake-up's."""
    return max(READ_BYTES, TLS_READS_A_WAKEUP * TLS_RECORD_BYTES)


def available_memory(root: str = _CGROUP_ROOT, own: str = "/proc/self/cgroup") -> tuple[int, str]:
    """The smallest limit of this process's cgroups, or the machine's memory, in bytes, and whose it is."""
    found = [(limit, "the cgroup") for limit in _cgroup_limits(root, own)]
    with_machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([*found, (with_machine, "the machine")])


def _cgroup_limits(root: str, own: str) -> Iterator[int]:
    """memory.max of version 2 and memory.limit_in_bytes of version 1, of the own cgroup and those above it."""
    try:
        with open(own, encoding="ascii", errors="replace") as file:
            lines = [line.strip().split(":", 2) for line in file]
    except OSError:
        return
    for _, controllers, path in (line for line in lines if len(line) == 3):
        kinds = {"": ("", "memory.max"), "memory": ("memory", "memory.limit_in_bytes")}
        kind = kinds.get("memory" if "memory" in controllers.split(",") else controllers)
        if kind is None:
            continue
        folder, name = kind
        parts = [part for part in path.split("/") if part]
        for length in range(len(parts), -1, -1):
            limit = _number(os.path.join(root, folder, *parts[:length], name))
            if limit is not None and limit < _UNLIMITED:
                yield limit


def _number(path: str) -> int | None:
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):  # "max"
        return None


def measured(pages: Mapping[str, memoryview]) -> dict[str, int | None]:
    """What the workers hold now, and what a connection of either side costs on average; None: there is none."""
    held = sum(cells[counters.MEMORY_BYTES] for cells in pages.values())
    base = sum(cells[counters.MEMORY_BASE_BYTES] for cells in pages.values())
    connections = sum(cells[counters.CONNECTIONS_OPEN] + cells[counters.UPSTREAM_OPEN] for cells in pages.values())
    return {
        "held_bytes": held,
        "connections": connections,
        "average_bytes": max(0, held - base) // connections if connections else None,
    }


def kib(size: int) -> int:
    """Rounded up."""
    return -(-size // 1024)


def mib(size: int) -> int:
    """Rounded up."""
    return -(-size // 1048576)
