"""One backend address: where it is, its idle connections, and whether it is fit to be asked (passive health)."""

from __future__ import annotations

import ipaddress
import socket
import ssl
from typing import TYPE_CHECKING

from proxy.config.upstream_address import UpstreamAddress
from proxy.stream.connect import Endpoint

if TYPE_CHECKING:
    from proxy.upstream.connection import UpstreamConnection
    from proxy.upstream.http2 import Http2Upstream
    from proxy.upstream.pool import Pending, UpstreamGroup


class Backend:
    """One backend of an upstream group.

    Passive health as in nginx: ``max_fails`` failures in a row, none older than ``fail_timeout_secs``, eject the
    backend for ``fail_timeout_secs``; after that one failure ejects it again, one success clears it.
    """

    __slots__ = (
        "_failed_at",
        "_failures",
        "_next_endpoint",
        "active",
        "address",
        "cells_at",
        "ejected_until",
        "endpoints",
        "fail_timeout_secs",
        "followers",
        "group",
        "host_header",
        "idle",
        "label",
        "leader",
        "max_fails",
        "retired",
        "server_name",
        "sessions",
        "tls",
    )

    def __init__(
        self,
        address: UpstreamAddress,
        *,
        max_fails: int,
        fail_timeout_secs: float,
        tls: ssl.SSLContext | None,
        server_name: str | None,
    ) -> None:
        self.address = address
        self.label = str(address)
        self.max_fails = max_fails
        self.fail_timeout_secs = fail_timeout_secs
        self.tls = tls if address.scheme == "https" else None
        self.server_name = server_name or address.host
        self.endpoints: tuple[Endpoint, ...] = ()
        self.idle: list[UpstreamConnection] = []
        self.sessions: list[Http2Upstream] = []
        """Connections of HTTP/2, in use or not."""
        self.leader: Pending | Http2Upstream | None = None
        """Who connects, so that others need not, since one connection of HTTP/2 is for many; then the connection itself
        until the backend has said how many it takes."""
        self.followers: dict[Pending, None] = {}
        """Those others."""
        self.group: UpstreamGroup | None = None
        self.active = 0
        self.retired = False
        self.cells_at = 0  # its row in the counters, once the pool has looked it up
        self.ejected_until = 0.0
        self._failures = 0
        self._failed_at = 0.0
        self._next_endpoint = 0
        # What goes into Host where the client's is not preserved (RFC 9110 section 7.2).
        default_port = {"http": 80, "https": 443}.get(address.scheme)
        host = f"[{address.host}]" if ":" in address.host else address.host or "localhost"
        self.host_header = (host if address.port in (default_port, 0) else f"{host}:{address.port}").encode()
        if address.scheme == "unix":
            self.endpoints = (Endpoint(socket.AF_UNIX, address.path),)
        elif not self.needs_resolving:
            self.set_addresses([address.host])

    @property
    def needs_resolving(self) -> bool:
        """Whether the address is a name."""
        if self.address.scheme == "unix":
            return False
        try:
            ipaddress.ip_address(self.address.host)
        except ValueError:
            return True
        return False

    def set_addresses(self, hosts: list[str]) -> None:
        """Take over the IP addresses that the name stands for now. Open connections live on."""
        port = self.address.port
        self.endpoints = tuple(
            Endpoint(
                socket.AF_INET6 if ":" in host else socket.AF_INET,
                (host, port, 0, 0) if ":" in host else (host, port),
                self.tls,
                self.server_name if self.tls is not None else None,
            )
            for host in hosts
        )

    def step_down(self, leader: Pending | Http2Upstream) -> list[Pending]:
        """``leader`` leads no more, whatever came of it: those that have waited for it, to be regrouped."""
        if self.leader is not leader:
            return []
        self.leader = None
        followers = list(self.followers)
        self.followers.clear()
        for follower in followers:
            follower.following = False
        return followers

    def free_session(self) -> Http2Upstream | None:
        """A connection of HTTP/2 that takes one more request."""
        for session in self.sessions:
            if session.free:
                return session
        return None

    def count_open(self) -> int:
        """Its connections."""
        return len(self.sessions) or self.active + len(self.idle)

    def count_idle(self) -> int:
        """Those that nobody uses."""
        return len(self.idle) + sum(session.idle for session in self.sessions)

    def next_endpoint(self) -> Endpoint | None:
        """The addresses of the name in turn; None while it has none."""
        if not self.endpoints:
            return None
        self._next_endpoint = (self._next_endpoint + 1) % len(self.endpoints)
        return self.endpoints[self._next_endpoint]

    def succeeded(self) -> None:
        """A response came: whatever failed before is forgotten."""
        if self._failures:
            self._failures = 0
            self.ejected_until = 0.0

    def failed(self, now: float) -> bool:
        """One more failure; True when it ejects the backend."""
        if self._failures and self._failures < self.max_fails and now - self._failed_at > self.fail_timeout_secs:
            self._failures = 0
        self._failures += 1
        self._failed_at = now
        if self._failures < self.max_fails:
            return False
        self.ejected_until = now + self.fail_timeout_secs
        return True
