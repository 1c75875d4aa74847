"""All listening sockets: made by the master, kept open by it, handed to the children that serve them."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from proxy.config.address import Address
from proxy.master import admin_socket, listeners
from proxy.master.activation import NOTHING, Inherited
from proxy.master.listeners import ListenPlan
from proxy.master.plan import Plan, TlsMaterial
from proxy.master.upgrade import Handover
from proxy.worker.context import BoundListener

Row = tuple[socket.socket, ...]
"""The sockets of one address, one a slot."""


@dataclass(frozen=True, slots=True)
class Extension:
    """Sockets bound for a next configuration, not yet in service: ``BoundSockets.adopt`` or ``drop`` ends it."""

    rows: dict[Address, Row]


class BoundSockets:
    """Owner of the sockets; ``close`` ends all of them."""

    def __init__(self, plan: Plan, inherited: Inherited = NOTHING, handover: Handover | None = None) -> None:
        """Bind everything that is neither ``inherited`` nor handed over, after a probe that nobody else has any of it.

        Raises StartError, or ConfigError for what is inherited and not configured, leaving nothing open.
        """
        inherited.require_configured(plan.listen.addresses())
        given = inherited.sockets.keys() | (_addresses(handover) if handover is not None else set())
        listeners.probe([address for address in plan.listen.addresses() if address not in given], plan.listen.keys)
        self._slots = plan.workers
        self._inherited = inherited
        self._rows: dict[Address, Row] = {}
        self._admin_path = plan.settings.admin.socket
        self._admin_identity: tuple[int, int] | None = None
        self.health: socket.socket | None = None
        self.admin: socket.socket | None = None
        try:
            for address in _traffic(plan.listen):
                shared = inherited.sockets.get(address)
                row = handover.rows.get(address, ())[: self._slots] if handover is not None else ()
                if shared is not None:
                    row = (shared,) * self._slots  # one that comes from the service manager is shared by all slots
                elif len(row) < self._slots:
                    row = (*row, *listeners.bind(address, self._slots - len(row)))
                self._rows[address] = row
            if plan.listen.health is not None:
                self.health = inherited.sockets.get(plan.listen.health)
                if handover is not None and handover.health is not None and handover.health[0] == plan.listen.health:
                    self.health = handover.health[1]
                if self.health is None:
                    self.health = listeners.bind_exclusive(plan.listen.health)
            if handover is not None and handover.admin[0] == self._admin_path:
                self.admin = handover.admin[1]  # its file stays the other master's until that retires: ``own_admin``
            else:
                self.admin = admin_socket.bind_admin_socket(self._admin_path)
                self.own_admin()
            if handover is not None:
                handover.close_unused(self.all)
        except BaseException:
            self.close()
            raise

    @property
    def all(self) -> list[socket.socket]:
        """Every socket, of whatever role."""
        own = [sock for sock in (self.health, self.admin) if sock is not None]
        return [*(sock for row in self._rows.values() for sock in row), *own, *self._inherited.sockets.values()]

    def https(self, slot: int, listen: ListenPlan, tls: TlsMaterial) -> tuple[BoundListener, ...]:
        """The TLS listeners of a slot, in the plan's order."""
        return tuple(
            BoundListener(self._rows[one.address][slot], self.label(one.address), material)
            for one, material in zip(listen.https, tls.listeners, strict=True)
        )

    def redirect(self, slot: int, listen: ListenPlan) -> tuple[BoundListener, ...]:
        """The redirect listeners of a slot."""
        return tuple(BoundListener(self._rows[one][slot], self.label(one), None) for one in listen.redirect)

    def label(self, address: Address) -> str:
        """Where the socket of ``address`` is bound, as text."""
        return str(listeners.bound_address(self._rows[address][0]))

    # A reload.

    def extend(self, listen: ListenPlan) -> Extension:
        """Bind what ``listen`` has and this has not.

        Raises StartError, or ConfigError where it leaves out what is inherited: leaving everything as it was.
        """
        rows: dict[Address, Row] = {}
        try:
            for address in self._missing(listen):
                rows[address] = listeners.bind(address, self._slots)
        except BaseException:
            self.drop(Extension(rows))
            raise
        return Extension(rows)

    def examine(self, listen: ListenPlan) -> None:
        """Raise what ``extend`` would raise; no client can connect meanwhile."""
        self._missing(listen)

    def _missing(self, listen: ListenPlan) -> list[Address]:
        self._inherited.require_configured(listen.addresses())
        missing = [address for address in _traffic(listen) if address not in self._rows]
        listeners.probe(missing, listen.keys)
        return missing

    def drop(self, extension: Extension) -> None:
        """The next configuration is not wanted."""
        for row in extension.rows.values():
            _close(row)

    def adopt(self, extension: Extension, listen: ListenPlan) -> None:
        """Keep what ``listen`` has, close the rest."""
        self._rows |= extension.rows
        wanted = set(_traffic(listen))
        for address in [address for address in self._rows if address not in wanted]:
            _close(self._rows.pop(address))

    def new_socket(self, extension: Extension, slot: int, address: Address) -> socket.socket | None:
        """The socket of ``address`` and ``slot`` if it is one of the extension's."""
        row = extension.rows.get(address)
        return None if row is None else row[slot]

    def label_in(self, extension: Extension, address: Address) -> str:
        """``label``, for an address that may be the extension's."""
        row = extension.rows.get(address) or self._rows[address]
        return str(listeners.bound_address(row[0]))

    # An upgrade.

    @property
    def rows(self) -> Mapping[Address, Row]:
        """The sockets of the user's traffic, one a slot."""
        return self._rows

    @property
    def admin_path(self) -> str:
        """Where the admin socket's file is; a reload does not move it."""
        return self._admin_path

    @property
    def inherited(self) -> Inherited:
        """Those that are the service manager's."""
        return self._inherited

    def own_admin(self) -> None:
        """The admin socket's file is this process's from here on, to be removed at its end."""
        self._admin_identity = admin_socket.identity(self._admin_path)

    def release(self) -> None:
        """Close every socket here; whoever took them over has them still, and the admin socket's file."""
        self._admin_identity = None
        self.close()

    # The end.

    def close_listeners(self) -> None:
        """Close the sockets of the user's traffic: new connections are refused (a drain). Health and admin go on."""
        for row in self._rows.values():
            _close(row)

    def close(self) -> None:
        """Close every socket and remove the admin socket's file, if it is still the one made here (idempotent)."""
        _close(self.all)
        if self._admin_identity is not None and admin_socket.identity(self._admin_path) == self._admin_identity:
            with contextlib.suppress(OSError):
                os.unlink(self._admin_path)
        self._admin_identity = None


def _addresses(handover: Handover) -> set[Address]:
    return handover.rows.keys() | ({handover.health[0]} if handover.health is not None else set())


def _traffic(listen: ListenPlan) -> list[Address]:
    return [*(one.address for one in listen.https), *listen.redirect]


def _close(sockets: Iterable[socket.socket]) -> None:
    for sock in sockets:
        sock.close()
