"""Free TCP ports, held by a bound socket until just before a process under test takes them."""

from __future__ import annotations

import random
import socket
from pathlib import Path

LOWEST = 10_240


def _below_ephemeral() -> range:
    # Ports that the kernel hands to outgoing connections could be taken between release and use.
    lowest_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    return range(LOWEST, lowest_ephemeral) if lowest_ephemeral > LOWEST + 1000 else range(61_000, 65_536)


class FreePorts:
    """Ports that are this object's until ``release``."""

    def __init__(self) -> None:
        self._held: list[socket.socket] = []

    def take(self, host: str = "127.0.0.1") -> int:
        """A port that nobody listens on at ``host``, an IPv4 or IPv6 address."""
        candidates = _below_ephemeral()
        while True:
            sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
            port = random.choice(candidates)
            try:
                sock.bind((host, port))
            except OSError:
                sock.close()
                continue
            self._held.append(sock)
            return port

    def release(self) -> None:
        """Gives up all ports, for the process under test to bind."""
        for sock in self._held:
            sock.close()
        self._held.clear()
