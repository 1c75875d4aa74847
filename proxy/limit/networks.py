"""Networks: which of them an address is in, the most specific first; and what a client's address counts as."""

from __future__ import annotations

import functools
import ipaddress
import socket
from collections.abc import Iterable
from typing import Final

_MAPPED: Final = bytes(10) + b"\xff\xff"
"""RFC 4291 section 2.5.5.2: an IPv4 address as IPv6 writes it."""


@functools.lru_cache(maxsize=4096)
def packed(address: bytes) -> bytes:
    """The address's 4 or 16 bytes; an IPv4-mapped one's 4. Empty for what is no address (a Unix socket's peer)."""
    text = address.decode("ascii", "replace")
    try:
        if ":" not in text:
            return socket.inet_aton(text) if text.count(".") == 3 else b""
        data = socket.inet_pton(socket.AF_INET6, text)
    except OSError:
        return b""
    return data[12:] if data.startswith(_MAPPED) else data


@functools.lru_cache(maxsize=4096)
def prefix_of(address: bytes, ipv4_bits: int, ipv6_bits: int) -> bytes:
    """What stands for ``address`` where its first bits count; the address itself where it is none."""
    data = packed(address)
    if not data:
        return address
    bits = ipv4_bits if len(data) == 4 else ipv6_bits
    drop = 8 * len(data) - bits
    return (int.from_bytes(data) >> drop << drop).to_bytes(len(data))


class Networks:
    """A set of networks: as many look-ups as there are different lengths of prefixes."""

    __slots__ = ("_by_length",)

    def __init__(self, networks: Iterable[str]) -> None:
        """``networks`` in the spelling of the configuration."""
        by_size: dict[int, dict[int, set[int]]] = {4: {}, 16: {}}
        for text in networks:
            network = ipaddress.ip_network(text)
            size = network.max_prefixlen // 8
            drop = network.max_prefixlen - network.prefixlen
            by_size[size].setdefault(network.prefixlen, set()).add(int(network.network_address) >> drop)
        self._by_length: Final = {
            size: tuple((length, 8 * size - length, lengths[length]) for length in sorted(lengths, reverse=True))
            for size, lengths in by_size.items()
        }

    def longest(self, data: bytes) -> int:
        """The length of the longest prefix among the networks that ``data`` (see ``packed``) is in; -1: in none."""
        lengths = self._by_length.get(len(data), ())
        if lengths:
            number = int.from_bytes(data)
            for length, drop, values in lengths:
                if number >> drop in values:
                    return length
        return -1


class Access:
    """``deny`` and ``allow`` together: the most specific network decides, ``allow`` where both are as specific."""

    __slots__ = ("_allow", "_deny")

    def __init__(self, deny: Iterable[str], allow: Iterable[str]) -> None:
        self._deny: Final = Networks(deny)
        self._allow: Final = Networks(allow)

    def denies(self, address: bytes) -> bool:
        """Whether a client of this address (text) is refused. What is no address is not."""
        data = packed(address)
        denied = self._deny.longest(data)
        return denied >= 0 and denied > self._allow.longest(data)
