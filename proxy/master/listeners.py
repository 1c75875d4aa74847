"""Listening sockets: the addresses, the probe that nobody else has them, one socket a slot and address."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from proxy.config.address import Address, parse_address
from proxy.config.effective import (
    EffectiveAddress,
    EffectiveListener,
    effective_listeners,
    effective_redirect_addresses,
)
from proxy.config.place import faults_at
from proxy.config.schema import Settings
from proxy.errors import StartError
from proxy.master.port_owner import describe_owner

BACKLOG = 4096
"""Asked for; the kernel bounds it by net.core.somaxconn."""
_PRIVILEGED_PORTS = "/proc/sys/net/ipv4/ip_unprivileged_port_start"


@dataclass(frozen=True, slots=True)
class ListenPlan:
    """The listeners that take effect, defaults filled in, and what was skipped (one sentence each)."""

    https: tuple[EffectiveListener, ...]
    redirect: tuple[Address, ...]
    health: Address | None
    skipped: tuple[str, ...]
    keys: Mapping[Address, tuple[str | int, ...]] = field(default_factory=dict)
    """Where in the configuration an address stands; the default ones stand nowhere."""

    def addresses(self) -> tuple[Address, ...]:
        health = () if self.health is None else (self.health,)
        return tuple(one.address for one in self.https) + self.redirect + health


def ipv6_available() -> bool:
    """Whether the kernel has IPv6 at all. Binds nothing."""
    try:
        socket.socket(socket.AF_INET6, socket.SOCK_STREAM).close()
    except OSError:
        return False
    return True


def plan_listeners(settings: Settings) -> ListenPlan:
    """The listeners to bind: ``[::]`` that nobody asked for is left out where the host has no IPv6.

    Raises ConfigError for an address that cannot be read.
    """
    https = effective_listeners(settings)
    redirect = effective_redirect_addresses(settings)
    skipped: tuple[str, ...] = ()
    if not ipv6_available():
        plain: list[EffectiveListener | EffectiveAddress] = [*https, *redirect]
        skipped = tuple(f"{one.address} is skipped: this host has no IPv6" for one in plain if one.optional)
        https = tuple(one for one in https if not one.optional)
        redirect = tuple(one for one in redirect if not one.optional)
    health = parse_address(settings.health.address) if settings.health.enabled else None
    return ListenPlan(https, tuple(one.address for one in redirect), health, skipped, _keys(settings))


def _keys(settings: Settings) -> dict[Address, tuple[str | int, ...]]:
    keys: dict[Address, tuple[str | int, ...]] = {}
    if settings.health.enabled and "address" in settings.health.model_fields_set:
        keys[parse_address(settings.health.address)] = ("health", "address")
    if settings.redirect.enabled and "addresses" in settings.redirect.model_fields_set:
        for index, text in enumerate(settings.redirect.addresses):
            keys[parse_address(text)] = ("redirect", "addresses", index)
    for index, listener in enumerate(settings.listeners):
        keys[parse_address(listener.address)] = ("listeners", index, "address")
    return keys


def probe(addresses: Sequence[Address], keys: Mapping[Address, tuple[str | int, ...]] | None = None) -> None:
    """Make sure that nobody listens on any of ``addresses``. Raises StartError naming the owner, with its key.

    Without SO_REUSEPORT: with it a second instance of the same user would share the traffic silently.
    """
    for address in addresses:
        with faults_at(*(keys or {}).get(address, ())), _socket(address) as sock:
            _bind(sock, address)


def bind(address: Address, slots: int) -> tuple[socket.socket, ...]:
    """One listening, non-blocking socket a slot, all on the same port (also where ``address.port`` is 0).

    Raises StartError.
    """
    sockets: list[socket.socket] = []
    for _ in range(slots):
        sock = _socket(address)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        _bind(sock, address)
        sock.listen(BACKLOG)
        sock.setblocking(False)
        sockets.append(sock)
        address = Address(address.host, sock.getsockname()[1], address.family)
    return tuple(sockets)


def bind_exclusive(address: Address) -> socket.socket:
    """One listening, non-blocking socket that shares its port with nobody. Raises StartError."""
    sock = _socket(address)
    _bind(sock, address)
    sock.listen(BACKLOG)
    sock.setblocking(False)
    return sock


def bound_address(sock: socket.socket) -> Address:
    """Where ``sock`` is bound."""
    name = sock.getsockname()
    return Address(name[0], name[1], socket.AddressFamily(sock.family))


def _socket(address: Address) -> socket.socket:
    try:
        sock = socket.socket(address.family, socket.SOCK_STREAM)
    except OSError as error:
        raise StartError(f"cannot listen on {address}: {os.strerror(error.errno or 0)}") from error
    # Connections in TIME_WAIT of the instance before must not block a restart; a listening owner still does.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if address.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    return sock


def _bind(sock: socket.socket, address: Address) -> None:
    try:
        sock.bind((address.host, address.port))
    except OSError as error:
        sock.close()
        raise StartError(f"cannot listen on {address}: {_explain(error, address)}") from error


def _explain(error: OSError, address: Address) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {address.port} is in use by {describe_owner(address.port)}: stop it, or choose another port"
    if error.errno == errno.EACCES:
        return (
            f"ports below {_first_unprivileged_port()} need a privilege: give the service CAP_NET_BIND_SERVICE"
            f" (systemd: AmbientCapabilities=), lower net.ipv4.ip_unprivileged_port_start, or choose a higher port"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return "this host does not have that address"
    return os.strerror(error.errno or 0)


def _first_unprivileged_port() -> int:
    try:
        with open(_PRIVILEGED_PORTS, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 1024
