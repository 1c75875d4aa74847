"""An upgrade: a new master, from the code and the configuration now on disk, takes over the listening sockets.

The new process gets every socket by number and says ``ready`` on a pipe once its workers accept; from the first moment
both generations accept on the same sockets, so that no connection is refused or reset. Only then does the old one
retire. Whatever goes wrong before that ends the new process and changes nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from proxy.config.address import Address, parse_address
from proxy.errors import StartError

VARIABLE = "REVERSE_PROXY_TAKEOVER"
READY_SECS = 45.0
"""For the new master to become ready: more than it allows its own workers."""
_READY = b"ready"


@dataclass(frozen=True, slots=True)
class Handover:
    """The sockets that the master before hands over: ``rows`` by address, one socket a slot of then."""

    rows: dict[Address, tuple[socket.socket, ...]]
    health: tuple[Address, socket.socket] | None
    admin: tuple[str, socket.socket]
    ready: int
    """The pipe that the master before waits at."""

    def tell_ready(self) -> None:
        """The workers accept: the master before may retire."""
        with contextlib.suppress(OSError):
            os.write(self.ready, _READY)
        os.close(self.ready)

    def close_unused(self, used: list[socket.socket]) -> None:
        """Close what the configuration has no use for any more."""
        rows = [sock for row in self.rows.values() for sock in row]
        for sock in [*rows, *(self.health or ())[1:], self.admin[1]]:
            if sock not in used and isinstance(sock, socket.socket):
                sock.close()


def take_over(environ: MutableMapping[str, str]) -> Handover | None:
    """What is handed over to this process, taken out of ``environ``; None when it was started by nobody's upgrade.

    Raises StartError for what cannot be read.
    """
    text = environ.pop(VARIABLE, None)
    if text is None:
        return None
    try:
        document = json.loads(text)
        known: dict[int, socket.socket] = {}

        def adopt(number: int) -> socket.socket:
            if number not in known:
                known[number] = sock = socket.socket(fileno=number)
                sock.set_inheritable(False)
                sock.setblocking(False)
            return known[number]

        os.set_inheritable(document["ready"], False)
        health = document["health"]
        return Handover(
            rows={parse_address(name): tuple(map(adopt, row)) for name, row in document["rows"].items()},
            health=None if health is None else (parse_address(health[0]), adopt(health[1])),
            admin=(document["admin"][0], adopt(document["admin"][1])),
            ready=document["ready"],
        )
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise StartError(f"{VARIABLE} is not what the master before an upgrade hands over ({error})") from error


class Upgrade:
    """The old master's side: the new process, from its start until it is ready or has failed."""

    def __init__(
        self,
        *,
        rows: Mapping[Address, tuple[socket.socket, ...]],
        health: tuple[Address, socket.socket] | None,
        admin: tuple[str, socket.socket],
        environ: Mapping[str, str],
        request: dict[str, object] | None,
    ) -> None:
        """Start it. ``request`` is whom to answer. Raises OSError when it cannot be started."""
        self.request = request
        self._deadline = time.monotonic() + READY_SECS
        self._pipe, write_end = os.pipe()
        document = {
            "rows": {str(address): [sock.fileno() for sock in row] for address, row in rows.items()},
            "health": None if health is None else [str(health[0]), health[1].fileno()],
            "admin": [admin[0], admin[1].fileno()],
            "ready": write_end,
        }
        sockets = [sock for row in rows.values() for sock in row] + [admin[1]]
        if health is not None:
            sockets.append(health[1])
        try:
            # The interpreter's path is taken as it was given: where it leads through a link, to the release that the
            # link points to now.
            self._process = subprocess.Popen(
                [sys.executable, *sys.orig_argv[1:]],
                env={**environ, VARIABLE: json.dumps(document)},
                pass_fds=[write_end, *{sock.fileno() for sock in sockets}],
            )
        except OSError:
            os.close(self._pipe)
            raise
        finally:
            os.close(write_end)

    @property
    def pid(self) -> int:
        """Of the new master."""
        return self._process.pid

    def outcome(self) -> str | None:
        """None while it is starting; empty when it is ready; otherwise why it failed."""
        readable, _, _ = select.select([self._pipe], [], [], 0)
        if readable:
            if os.read(self._pipe, len(_READY)) == _READY:
                os.close(self._pipe)
                return ""
            return self._failed(f"the new master (pid {self.pid}) ended while starting: see its messages")
        if time.monotonic() > self._deadline:
            return self._failed(f"the new master (pid {self.pid}) was not ready in {READY_SECS:.0f} s")
        return None

    def _failed(self, reason: str) -> str:
        os.close(self._pipe)
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        return reason
