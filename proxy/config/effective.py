"""Defaults that depend on what else the operator said."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Final

from proxy.config.address import Address, parse_address
from proxy.config.schema import AUTO, Listener, Settings

DEFAULT_LISTENERS: Final = ("0.0.0.0:443", "[::]:443")

CLIENT_PART: Final = 4
LEAST_CLIENT_CAP: Final = 16
"""A browser opens half a dozen connections, and several share an address."""
HANDSHAKE_PART: Final = 2
LEAST_HANDSHAKES: Final = 64


@dataclass(frozen=True, slots=True)
class EffectiveListener:
    """A listener to bind."""

    listener: Listener
    address: Address
    optional: bool
    """True for a default IPv6 address: skipped with a warning where IPv6 is absent."""


@dataclass(frozen=True, slots=True)
class EffectiveAddress:
    """An address to bind for plain HTTP."""

    address: Address
    optional: bool
    """True for a default IPv6 address: skipped with a warning where IPv6 is absent."""


def effective_listeners(settings: Settings) -> tuple[EffectiveListener, ...]:
    """Return the HTTPS listeners: those configured, all required, or else the default ones."""
    if settings.listeners:
        return tuple(
            EffectiveListener(listener, parse_address(listener.address), optional=False)
            for listener in settings.listeners
        )
    defaults = ((Listener(address=text), parse_address(text)) for text in DEFAULT_LISTENERS)
    return tuple(EffectiveListener(listener, address, _is_ipv6(address)) for listener, address in defaults)


def effective_redirect_addresses(settings: Settings) -> tuple[EffectiveAddress, ...]:
    """Return where plain HTTP is redirected: nowhere if disabled; configured addresses are required."""
    redirect = settings.redirect
    if not redirect.enabled:
        return ()
    is_default = "addresses" not in redirect.model_fields_set
    addresses = map(parse_address, redirect.addresses)
    return tuple(EffectiveAddress(address, is_default and _is_ipv6(address)) for address in addresses)


def effective_https_port(settings: Settings) -> int:
    """Return the port that redirects send clients to."""
    own = settings.redirect.https_port
    return effective_listeners(settings)[0].address.port if own is None else own


def effective_client_cap(settings: Settings, max_connections: int) -> int:
    """Return how many connections a client may have, of ``max_connections`` of all clients."""
    own = settings.max_connections_per_client
    return max(LEAST_CLIENT_CAP, max_connections // CLIENT_PART) if own == AUTO else own


def effective_max_handshakes(settings: Settings, max_connections: int, workers: int) -> int:
    """Return how many handshakes may be under way, of ``max_connections`` connections: at least one a worker."""
    own = settings.max_handshakes
    wanted = max(LEAST_HANDSHAKES, max_connections // HANDSHAKE_PART) if own == AUTO else own
    return max(min(wanted, max_connections), workers)


def _is_ipv6(address: Address) -> bool:
    return address.family == socket.AF_INET6
