"""Addresses of upstreams: a URL with nothing but scheme, host and port, or the path of a Unix socket."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Final, Literal

from proxy.config.address import parse_port
from proxy.config.names import normalize_dns_name
from proxy.config.paths import check_socket_path
from proxy.config.refusal import RefusedError, shown

_WANTED: Final = '"http://host:port", "https://host:port" or "unix:/path/of/socket"'
_DEFAULT_PORTS: Final[dict[str, int]] = {"http": 80, "https": 443}
_SCHEME_HINTS: Final = {
    "ws": "write http://: WebSocket upgrades pass through it",
    "wss": "write https://: WebSocket upgrades pass through it",
    "h2c": 'write http:// and, beside upstreams, upstream_protocol = "h2"',
    "tcp": "upstreams speak HTTP: write http:// or https://",
}


@dataclass(frozen=True, slots=True)
class UpstreamAddress:
    """Where one backend is. ``str()`` gives the normal spelling, which ``parse_upstream`` reads back."""

    scheme: Literal["http", "https", "unix"]
    host: str
    """A DNS name in lower-case ASCII, or an IP address without brackets; empty for a Unix socket."""
    port: int
    """1 to 65535; 0 for a Unix socket."""
    path: str
    """The absolute path of the Unix socket; otherwise empty."""

    def __str__(self) -> str:
        if self.scheme == "unix":
            return f"unix:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


def parse_upstream(text: str) -> UpstreamAddress:
    """Read ``"http://host[:port]"``, ``"https://host[:port]"`` or ``"unix:/path"``; the port is 80 or 443 if left out.

    Raises ``RefusedError`` (a ``ConfigError`` and ``ValueError``).
    """
    scheme, colon, rest = text.partition(":")
    scheme = scheme.lower()
    if colon and scheme == "unix":
        return UpstreamAddress("unix", "", 0, _socket_path(rest, text))
    if not (scheme == "http" or scheme == "https") or not rest.startswith("//"):
        hint = _SCHEME_HINTS.get(scheme, "")
        if not hint and text.startswith("/"):
            hint = f"for a Unix socket write {shown('unix:' + text)}"
        elif not hint and "://" not in text:
            hint = f"the scheme is missing: write {shown('http://' + text)}"
        raise RefusedError(shown(text), _WANTED, hint)
    authority = re.split(r"[/?#\\]", rest[2:], maxsplit=1)[0]
    if len(authority) != len(rest) - 2:
        raise RefusedError(
            shown(text),
            _WANTED,
            f"an upstream has no path, the client's is forwarded unchanged: write {shown(f'{scheme}://{authority}')}",
        )
    if "@" in authority:
        # What stands before the @ may be a password, so the text is not shown.
        raise RefusedError(
            "a URL with user information",
            _WANTED,
            'leave out what stands before the "@"; an Authorization field can be set with request_headers',
        )
    host, port_text = _split_authority(authority, text)
    port = _DEFAULT_PORTS[scheme] if port_text is None else parse_port(port_text, text, _WANTED)
    return UpstreamAddress("https" if scheme == "https" else "http", host, port, "")


def _socket_path(path: str, text: str) -> str:
    if path.startswith("//"):
        raise RefusedError(shown(text), _WANTED, f"write {shown('unix:/' + path.lstrip('/'))}")
    return check_socket_path(path)


def _split_authority(authority: str, text: str) -> tuple[str, str | None]:
    if authority.startswith("["):
        host, bracket, rest = authority[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise RefusedError(shown(text), _WANTED, "an IPv6 address stands in brackets, the port after them")
        try:
            address = str(ipaddress.IPv6Address(host))
        except ValueError:
            raise RefusedError(shown(text), _WANTED, f"{shown(host)} is not an IPv6 address") from None
        return address, rest[1:] if rest else None
    if authority.count(":") > 1:
        raise RefusedError(shown(text), _WANTED, "an IPv6 address stands in brackets, the port after them")
    host, colon, port_text = authority.partition(":")
    if not host:
        raise RefusedError(shown(text), _WANTED, "the host is missing")
    return normalize_dns_name(host, text), port_text if colon else None
