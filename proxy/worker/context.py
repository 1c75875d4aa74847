"""What the master hands to a worker."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

from proxy.config.schema import Settings, UpstreamTls
from proxy.limit.buckets import Buckets
from proxy.observe.shared_tables import SharedTables
from proxy.tls.contexts import ListenerTls, UpstreamTrust


@dataclass(frozen=True, slots=True)
class BoundListener:
    """A listening socket of the worker's slot; ``tls`` is None for the redirect listener."""

    sock: socket.socket
    label: str
    tls: ListenerTls | None


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """A worker's slot: its share of the permits, its sockets, its page of counters, and the way to the event log."""

    slot: int
    workers: int
    settings: Settings
    https: tuple[BoundListener, ...]
    redirect: tuple[BoundListener, ...]
    permits: int
    upstream_permits: int
    redirect_permits: int
    handshake_permits: int
    client_cap: int
    """Connections that one client may have, over all workers."""
    clients: SharedTables
    https_port: int
    cells: memoryview
    channel: socket.socket
    orders: socket.socket
    buckets: Buckets
    black_box: int | None
    """The descriptor of the slot's black box, if it could be opened."""
    upstream_trust: Mapping[UpstreamTls, UpstreamTrust]
