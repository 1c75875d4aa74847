"""Who counts as one client: an address or a network, of which the whole appliance knows how many connections it has."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from ipaddress import IPv4Network, IPv6Network, ip_network

from proxy.observe.counters import CLIENTS_UNCOUNTED
from proxy.observe.shared_tables import NO_ROW, SharedTables

IPV4_BYTES = 4
IPV4_BITS = 32
IPV6_BITS = 128


MIN_ROWS = 65_536
ROWS_A_CONNECTION = 4
"""So that a set of eight rows overflows about once in four thousand clients, each with one connection."""


def client_rows(max_connections: int, workers: int) -> int:
    """The rows of a worker's table of clients, for its share of the connections."""
    return max(MIN_ROWS, ROWS_A_CONNECTION * -(-max_connections // workers))


class Prefixes:
    """From an address to the client that it counts as."""

    __slots__ = ("_exempt", "_ipv4_mask", "_ipv6_mask")

    def __init__(self, ipv4_bits: int, ipv6_bits: int, exempt: Iterable[str]) -> None:
        """``ipv4_bits``, ``ipv6_bits``: leading bits that make a client. ``exempt``: addresses or networks."""
        self._ipv4_mask = _mask(ipv4_bits, IPV4_BITS)
        self._ipv6_mask = _mask(ipv6_bits, IPV6_BITS)
        self._exempt: dict[int, list[tuple[int, int]]] = {IPV4_BITS: [], IPV6_BITS: []}
        for text in exempt:
            network: IPv4Network | IPv6Network = ip_network(text)
            self._exempt[network.max_prefixlen].append((int(network.network_address), int(network.netmask)))

    def client_of(self, peer: object) -> bytes | None:
        """The client of what accept(2) says of its peer; None for one that is not counted."""
        if not isinstance(peer, tuple) or not peer:
            return None
        host = str(peer[0])
        family, bits, mask = (
            (socket.AF_INET6, IPV6_BITS, self._ipv6_mask)
            if ":" in host
            else (socket.AF_INET, IPV4_BITS, self._ipv4_mask)
        )
        address = int.from_bytes(socket.inet_pton(family, host.partition("%")[0]), "big")
        for network, netmask in self._exempt[bits]:
            if address & netmask == network:
                return None
        return (address & mask).to_bytes(bits // 8, "big")


def _mask(prefix: int, bits: int) -> int:
    return ((1 << prefix) - 1) << (bits - prefix)


def client_text(client: bytes) -> str:
    """The client's (first) address, for people."""
    return socket.inet_ntop(socket.AF_INET if len(client) == IPV4_BYTES else socket.AF_INET6, client)


class ClientCounts:
    """A worker's part of the shared counts (``policy.Counts``).

    A client that finds no row in the worker's table is counted by this worker alone: for it the cap holds here, with
    what other workers have in their tables, until one of its rows is free.
    """

    __slots__ = ("_cells", "_outside", "_view", "key_of")

    def __init__(self, tables: SharedTables, slot: int, cells: memoryview) -> None:
        self.key_of = tables.key_of
        self._view = tables.view(slot)
        self._outside: dict[int, int] = {}
        self._cells = cells

    def add(self, client: int) -> int:
        """See ``policy.Counts``; ``client`` is a key of ``key_of``."""
        view = self._view
        at = NO_ROW if client in self._outside else view.claim(client)
        if at == NO_ROW:
            self._cells[CLIENTS_UNCOUNTED] += 1
            own = self._outside[client] = self._outside.get(client, 0) + 1
        else:
            own = view.cells[at] + 1
            view.cells[at] = own
        return own + view.elsewhere(client)

    def remove(self, client: int) -> None:
        """See ``policy.Counts``."""
        view = self._view
        if client in self._outside:
            left = self._outside[client] = self._outside[client] - 1
            if not left:
                del self._outside[client]
            return
        at = view.find(client)
        left = view.cells[at] = view.cells[at] - 1
        if not left:
            view.release(at)
