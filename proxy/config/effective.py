"""Defaults that depend on what else the operator said."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Final

from proxy.config.address import Address, parse_address
from proxy.config.schema import Listener, Settings

DEFAULT_LISTENERS: Final = ("0.0.0.0:443", "[::]:443")


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


def _is_ipv6(address: Address) -> bool:
    return address.family == socket.AF_INET6
