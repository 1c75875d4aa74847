"""All listening sockets: made by the master, kept open by it, handed to the children that serve them."""

from __future__ import annotations

import contextlib
import os
import socket

from proxy.config.address import Address
from proxy.master import admin_socket, listeners
from proxy.master.activation import NOTHING, Inherited
from proxy.master.plan import Plan, TlsMaterial
from proxy.tls.contexts import ListenerTls
from proxy.worker.context import BoundListener

Slots = tuple[tuple[BoundListener, ...], ...]
"""The listeners of each slot."""


class BoundSockets:
    """Owner of the sockets; ``close`` ends all of them. ``https`` and ``redirect`` are indexed by slot."""

    def __init__(self, plan: Plan, tls: TlsMaterial, inherited: Inherited = NOTHING) -> None:
        """Bind everything that is not ``inherited``, after a probe that nobody else has any of it.

        Raises StartError, or ConfigError for what is inherited and not configured, leaving nothing open.
        """
        inherited.require_configured(plan.listen.addresses())
        listeners.probe([address for address in plan.listen.addresses() if address not in inherited.sockets])
        self._inherited = inherited
        self.all: list[socket.socket] = [*inherited.sockets.values()]
        self._admin_path = plan.settings.admin.socket
        self._admin_identity: tuple[int, int] | None = None
        try:
            slots = plan.workers
            https = [
                self._bind(one.address, slots, material)
                for one, material in zip(plan.listen.https, tls.listeners, strict=True)
            ]
            redirect = [self._bind(address, slots, None) for address in plan.listen.redirect]
            self.https: Slots = tuple(tuple(row[slot] for row in https) for slot in range(slots))
            self.redirect: Slots = tuple(tuple(row[slot] for row in redirect) for slot in range(slots))
            self.health: socket.socket | None = None
            if plan.listen.health is not None:
                self.health = inherited.sockets.get(plan.listen.health)
                if self.health is None:
                    self.health = listeners.bind_exclusive(plan.listen.health)
                    self.all.append(self.health)
            self.admin = admin_socket.bind_admin_socket(self._admin_path)
            self._admin_identity = admin_socket.identity(self._admin_path)
            self.all.append(self.admin)
        except BaseException:
            self.close()
            raise

    def close_listeners(self) -> None:
        """Close the sockets of the user's traffic: new connections are refused (a drain). Health and admin go on."""
        for row in (*self.https, *self.redirect):
            for listener in row:
                listener.sock.close()

    def close(self) -> None:
        """Close every socket and remove the admin socket's file, if it is still the one made here (idempotent)."""
        for sock in self.all:
            sock.close()
        if self._admin_identity is not None and admin_socket.identity(self._admin_path) == self._admin_identity:
            with contextlib.suppress(OSError):
                os.unlink(self._admin_path)
        self._admin_identity = None

    def _bind(self, address: Address, slots: int, tls: ListenerTls | None) -> list[BoundListener]:
        shared = self._inherited.sockets.get(address)
        if shared is not None:
            return [BoundListener(shared, str(address), tls)] * slots
        sockets = listeners.bind(address, slots)
        self.all += sockets
        return [BoundListener(sock, str(listeners.bound_address(sock)), tls) for sock in sockets]
