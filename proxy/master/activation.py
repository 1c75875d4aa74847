"""Socket activation (sd_listen_fds(3)): listening sockets that the service manager made and hands over.

The manager keeps them open, so that clients that connect during a restart wait instead of being refused.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass

from proxy.config.address import Address
from proxy.errors import ConfigError, StartError

FIRST_DESCRIPTOR = 3
_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")


@dataclass(frozen=True, slots=True)
class Inherited:
    """The sockets by where they listen; ``names`` are what the manager calls them."""

    sockets: dict[Address, socket.socket]
    names: dict[Address, str]

    def require_configured(self, addresses: Iterable[Address]) -> None:
        """Raise ConfigError for a socket whose address is none of ``addresses``: its clients would wait for ever."""
        configured = tuple(addresses)
        for address in self.sockets:
            if address not in configured:
                known = ", ".join(map(str, configured))
                raise ConfigError(
                    f"the service manager hands over a socket ({self.names[address]}) on {address}, where no listener"
                    f" of the configuration is ({known}): take it out of the socket unit, or add a listener for it"
                )


NOTHING = Inherited({}, {})
"""Without a manager that hands over sockets."""


def take_inherited(environ: MutableMapping[str, str]) -> Inherited:
    """The sockets meant for this process, non-blocking and closed at exec; the variables are taken out of ``environ``.

    Raises StartError for what is no listening TCP socket, and ConfigError for two on one address.
    """
    pid, count, names = (environ.pop(name, "") for name in _VARIABLES)
    if pid != str(os.getpid()) or not count.isdecimal():
        return NOTHING  # they were another process's, and only the variables came down to this one
    found = Inherited({}, {})
    labels = names.split(":")
    for index in range(int(count)):
        number = FIRST_DESCRIPTOR + index
        name = labels[index] if index < len(labels) and labels[index] else "unknown"
        sock = _listening_socket(number, f"descriptor {number}, {name}")
        host, port = sock.getsockname()[:2]
        address = Address(host, port, socket.AddressFamily(sock.family))
        if address in found.sockets:
            raise ConfigError(
                f"the service manager hands over two sockets on {address}: one serves all workers, so take ReusePort="
                " and the second out of the socket unit"
            )
        found.sockets[address] = sock
        found.names[address] = f"descriptor {number}, {name}"
    return found


def _listening_socket(number: int, what: str) -> socket.socket:
    try:
        sock = socket.socket(fileno=number)
        tcp = sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM
        listening = tcp and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise StartError(
            f"LISTEN_FDS promises a socket that is none ({what}): {os.strerror(error.errno or 0)}"
        ) from error
    if not listening:
        raise StartError(
            f"the service manager hands over what is no listening TCP socket ({what}): the socket unit needs"
            " ListenStream= with an IP address and port, and Accept=no"
        )
    any_address = sock.family == socket.AF_INET6 and sock.getsockname()[0] == "::"
    if any_address and not sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY):
        raise StartError(
            f"the socket that the service manager hands over ({what}) takes IPv4 too, so that addresses of clients"
            " would be in IPv6 notation: set BindIPv6Only=ipv6-only in the socket unit, and one ListenStream= for IPv4"
        )
    sock.set_inheritable(False)
    sock.setblocking(False)
    return sock
