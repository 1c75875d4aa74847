"""Between the control process and the master: requests of the admin API one way, answers and news the other.

A SOCK_SEQPACKET pair of JSON messages. The master has no event loop: its end raises SIGIO, which it takes like every
other signal.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import json
import os
import socket
from collections.abc import Callable
from typing import Any

MAX_MESSAGE_BYTES = 131_072


class MasterEnd:
    """The master's end: ``pending`` after SIGIO, ``answer``, ``tell``."""

    def __init__(self) -> None:
        self._sock, self.control_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.setblocking(False)
        self.control_end.setblocking(False)

    @property
    def sockets(self) -> list[socket.socket]:
        """Both ends: the master keeps the other too, for the next control process."""
        return [self._sock, self.control_end]

    def signal_me(self) -> None:
        """Have SIGIO raised in this process whenever something comes."""
        fcntl.fcntl(self._sock.fileno(), fcntl.F_SETOWN, os.getpid())
        flags = fcntl.fcntl(self._sock.fileno(), fcntl.F_GETFL)
        fcntl.fcntl(self._sock.fileno(), fcntl.F_SETFL, flags | fcntl.FASYNC)

    def pending(self) -> list[dict[str, Any]]:
        """All requests that have come."""
        requests: list[dict[str, Any]] = []
        with contextlib.suppress(BlockingIOError, InterruptedError):
            while True:
                data = self._sock.recv(MAX_MESSAGE_BYTES)
                if not data:
                    break
                requests.append(json.loads(data))
        return requests

    def answer(self, request: dict[str, Any], document: dict[str, Any]) -> None:
        """Answer a request; what cannot be delivered is dropped: the control process has ended or is stuck."""
        self._send({"id": request["id"], "document": document})

    def tell(self, facts: dict[str, Any], permits: list[int]) -> None:
        """News for the status document."""
        self._send({"id": 0, "facts": facts, "permits": permits})

    def close(self) -> None:
        """Close both ends."""
        for sock in self.sockets:
            sock.close()

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._sock.send(json.dumps(message).encode())


class ControlEnd:
    """The control process's end, in its event loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        on_news: Callable[[dict[str, Any], list[int]], None],
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._on_news = on_news
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        # Numbers start anew in each control process: an answer meant for the one before must not be taken for ours.
        self._numbers = itertools.count(os.getpid() * 1_000_000 + 1)

    def start(self) -> None:
        """Listen to the master."""
        self._loop.add_reader(self._sock.fileno(), self._on_readable)

    async def ask(self, operation: str, timeout_secs: float, **arguments: object) -> dict[str, Any]:
        """Have the master do something. Raises TimeoutError, OSError."""
        number = next(self._numbers)
        future: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._waiting[number] = future
        try:
            self._sock.send(json.dumps({"id": number, "operation": operation, **arguments}).encode())
            async with asyncio.timeout(timeout_secs):
                return await future
        finally:
            del self._waiting[number]

    def _on_readable(self) -> None:
        try:
            data = self._sock.recv(MAX_MESSAGE_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        if not data:
            self._loop.remove_reader(self._sock.fileno())
            return
        message = json.loads(data)
        if "facts" in message:
            self._on_news(message["facts"], message["permits"])
            return
        future = self._waiting.get(message["id"])
        if future is not None and not future.done():
            future.set_result(message["document"])
