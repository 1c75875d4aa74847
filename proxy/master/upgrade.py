"""An upgrade: a new master, from the code and the configuration now on disk, takes over the listening sockets.

The new process gets every socket by number and says ``ready`` on a line of its own once its workers accept; from the
first moment both generations accept on the same sockets, so that no connection is refused or reset. Only then does the
old one retire. Whatever goes wrong before that ends the new process and changes nothing.
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
from proxy.master.activation import Inherited

VARIABLE = "REVERSE_PROXY_TAKEOVER"
READY_SECS = 45.0
"""For the new master to become ready: more than it allows its own workers."""
END_SECS = 2.0
"""For one that has failed to end by itself; then it is killed."""
MAX_REASON_BYTES = 8192
_READY = b"ready"


@dataclass(frozen=True, slots=True)
class Handover:
    """What the master before hands over: ``rows`` by address, one socket a slot of then.

    ``inherited`` are those of its sockets that are the service manager's. ``pid_file`` is a daemon's, open and locked.
    """

    rows: dict[Address, tuple[socket.socket, ...]]
    health: tuple[Address, socket.socket] | None
    admin: tuple[str, socket.socket]
    inherited: Inherited
    pid_file: int | None
    line: socket.socket
    """Where the master before waits for one message: ready, or why not."""

    def tell_ready(self, admin_path: str) -> None:
        """The workers accept: the master before may retire. ``admin_path`` is where this one answers."""
        self._tell(_READY)
        if admin_path != self.admin[0]:
            with contextlib.suppress(OSError):
                os.unlink(self.admin[0])  # nobody answers there any more

    def tell_failed(self, reason: str) -> None:
        """Why this one ends before it was ready; nothing is told once it was."""
        self._tell(reason.encode()[:MAX_REASON_BYTES])

    def _tell(self, message: bytes) -> None:
        with contextlib.suppress(OSError):
            self.line.send(message)
        self.line.close()

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

        line = socket.socket(fileno=document["line"])
        line.set_inheritable(False)
        if document["pid_file"] is not None:
            os.set_inheritable(document["pid_file"], False)
        rows = {parse_address(name): tuple(map(adopt, row)) for name, row in document["rows"].items()}
        health = None if document["health"] is None else parse_address(document["health"][0])
        names = {parse_address(name): str(label) for name, label in document["inherited"].items()}
        handed = None if health is None else (health, adopt(document["health"][1]))
        everything = {address: row[0] for address, row in rows.items()} | dict([handed] if handed else [])
        return Handover(
            rows=rows,
            health=handed,
            admin=(document["admin"][0], adopt(document["admin"][1])),
            inherited=Inherited({address: everything[address] for address in names}, names),
            pid_file=document["pid_file"],
            line=line,
        )
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise StartError(f"{VARIABLE} is not what the master before an upgrade hands over ({error})") from error


def program_again() -> list[str]:
    """The command that started this process, to be run again for what is on disk by then.

    A script is run by its own path and not by the interpreter of this process: where that leads through a link
    (``current/bin/reverse-proxy``), the release that the link then points to has an interpreter of its own.
    """
    script = sys.argv[0]
    if script in sys.orig_argv[1:] and os.access(script, os.X_OK) and os.path.isfile(script):
        return [script, *sys.orig_argv[sys.orig_argv.index(script, 1) + 1 :]]
    return [sys.executable, *sys.orig_argv[1:]]


class Upgrade:
    """The old master's side: the new process, from its start until it is ready or has failed."""

    def __init__(
        self,
        *,
        rows: Mapping[Address, tuple[socket.socket, ...]],
        health: tuple[Address, socket.socket] | None,
        admin: tuple[str, socket.socket],
        inherited: Inherited,
        pid_file: int | None,
        environ: Mapping[str, str],
        folder: str,
        request: dict[str, object] | None,
    ) -> None:
        """Start it in ``folder``. ``request`` is whom to answer. Raises OSError when it cannot be started."""
        self.request = request
        self._deadline = time.monotonic() + READY_SECS
        self.line, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        document = {
            "rows": {str(address): [sock.fileno() for sock in row] for address, row in rows.items()},
            "health": None if health is None else [str(health[0]), health[1].fileno()],
            "admin": [admin[0], admin[1].fileno()],
            "inherited": {str(address): name for address, name in inherited.names.items()},
            "pid_file": pid_file,
            "line": other.fileno(),
        }
        sockets = [sock for row in rows.values() for sock in row] + [admin[1], other]
        if health is not None:
            sockets.append(health[1])
        numbers = {sock.fileno() for sock in sockets} | ({pid_file} if pid_file is not None else set())
        try:
            self._process = subprocess.Popen(
                program_again(),
                env={**environ, VARIABLE: json.dumps(document)},
                cwd=folder,
                pass_fds=tuple(numbers),
            )
        except OSError:
            self.line.close()
            raise
        finally:
            other.close()

    @property
    def pid(self) -> int:
        """Of the new master."""
        return self._process.pid

    def outcome(self) -> str | None:
        """None while it is starting; empty when it is ready; otherwise why it failed."""
        readable, _, _ = select.select([self.line], [], [], 0)
        if readable:
            try:
                message = self.line.recv(MAX_REASON_BYTES)
            except OSError:
                message = b""
            if message == _READY:
                self.line.close()
                return ""
            reason = message.decode("utf-8", "replace") or "see its messages on standard error"
            return self.abandon(f"the new master (pid {self.pid}) ended while starting: {reason}")
        if time.monotonic() > self._deadline:
            return self.abandon(f"the new master (pid {self.pid}) was not ready in {READY_SECS:.0f} s")
        return None

    def abandon(self, reason: str) -> str:
        """End the new process. Returns ``reason``."""
        self.line.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(END_SECS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        return reason
