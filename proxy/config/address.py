"""Addresses to listen on: an IP literal and a port, never a name."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass
from typing import Final

from proxy.config.refusal import RefusedError, shown

_WANTED: Final = 'an IP address and a port from 1 to 65535, such as "0.0.0.0:443" or "[::]:443"'
_PORT: Final = re.compile(r"[0-9]{1,5}")
_MAX_PORT: Final = 65_535


@dataclass(frozen=True, slots=True)
class Address:
    """An IP address and a port to bind. ``str()`` gives the normal spelling, which ``parse_address`` reads back."""

    host: str
    """The IP address in its shortest spelling, without brackets."""
    port: int
    """1 to 65535."""
    family: socket.AddressFamily
    """``AF_INET`` or ``AF_INET6``."""

    @property
    def is_wildcard(self) -> bool:
        """True for ``0.0.0.0`` and ``::``."""
        return ipaddress.ip_address(self.host).is_unspecified

    def __str__(self) -> str:
        host = f"[{self.host}]" if self.family == socket.AF_INET6 else self.host
        return f"{host}:{self.port}"


def parse_address(text: str) -> Address:
    """Read ``"0.0.0.0:443"`` or ``"[::]:443"`` (brackets: RFC 3986 section 3.2.2).

    Raises ``RefusedError`` (a ``ConfigError`` and ``ValueError``).
    """
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket:
            raise RefusedError(shown(text), _WANTED, "the bracket is not closed")
        if rest and not rest.startswith(":"):
            raise RefusedError(shown(text), _WANTED, "a colon and the port come after the bracket")
        port_text = rest[1:]
        colon = rest[:1]
    else:
        host, colon, port_text = text.rpartition(":")
        if not colon:
            host, port_text = text, ""
    if not colon:
        raise RefusedError(shown(text), _WANTED, _colon_hint(host))
    if not host or host == "*":
        port_text = port_text if is_port(port_text) else "443"
        raise RefusedError(
            shown(text),
            _WANTED,
            f'the address is missing: write "0.0.0.0:{port_text}" for all IPv4 addresses, '
            f'"[::]:{port_text}" for all IPv6 ones',
        )
    bracketed = text.startswith("[")
    address = _parse_ip(host, text, bracketed=bracketed)
    port = parse_port(port_text, text, _WANTED)
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    return Address(str(address), port, family)


def is_port(text: str) -> bool:
    """Whether ``text`` is a number from 1 to 65535."""
    return _PORT.fullmatch(text) is not None and 0 < int(text) <= _MAX_PORT


def parse_port(text: str, whole: str, wanted: str) -> int:
    """Read a port, 1 to 65535. Raises ``RefusedError`` that shows ``whole`` and ``wanted``."""
    if not is_port(text):
        hint = f"the port {shown(text)} is not a number from 1 to 65535" if text else "the port is missing"
        raise RefusedError(shown(whole), wanted, hint)
    return int(text)


def _colon_hint(text: str) -> str:
    """What to do about a text without a colon and a port."""
    if is_port(text):
        return f'the address is missing: write "0.0.0.0:{text}" or "[::]:{text}"'
    if text.isdigit():
        return f"the address is missing, and the port {shown(text)} is not a number from 1 to 65535"
    if text[:1].isdigit() and not re.fullmatch(r"[0-9.]+", text):
        return f"{shown(text)} is neither an address nor a port"
    return "the port is missing"


def _parse_ip(host: str, text: str, *, bracketed: bool) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    if "%" in host:
        raise RefusedError(shown(text), _WANTED, 'an address with a zone ("%...") cannot be listened on: use "[::]"')
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        if host == "localhost":
            hint = "write the address itself: 127.0.0.1 or [::1]"
        elif ":" in host or re.fullmatch(r"[0-9.]+", host):
            hint = f"{shown(host)} is not an IP address"
        else:
            hint = (
                f"{shown(host)} is a name, and names are not resolved here: write an IP address of this host, "
                'or "0.0.0.0" for all of them'
            )
        raise RefusedError(shown(text), _WANTED, hint) from None
    if address.version == 6:
        if not bracketed:
            raise RefusedError(shown(text), _WANTED, "an IPv6 address stands in brackets")
        if address.ipv4_mapped is not None:
            raise RefusedError(shown(text), _WANTED, f"IPv6 listeners take IPv6 only: write {address.ipv4_mapped}")
    elif bracketed:
        raise RefusedError(shown(text), _WANTED, "only an IPv6 address stands in brackets")
    return address
