"""A WebSocket client over TLS."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

from websockets.asyncio.client import ClientConnection, connect

TIMEOUT_SECS = 30.0
T = TypeVar("T")


class WebSocket:
    """Blocking calls, each with a time limit, in the caller's thread alone.

    The library's own blocking client reads in a thread of its own, while OpenSSL allows one call at a time to a
    connection: of 500 such connections one lost its request.
    Raises TimeoutError, OSError, or what the library raises.
    """

    def __init__(
        self, raw: socket.socket, context: ssl.SSLContext, path: str = "/ws", timeout_secs: float = TIMEOUT_SECS
    ) -> None:
        self._timeout_secs = timeout_secs
        self._runner = asyncio.Runner()
        try:
            self._peer = self._run(self._open(raw, context, path))
        except BaseException:
            self._runner.close()
            raw.close()
            raise

    async def _open(self, raw: socket.socket, context: ssl.SSLContext, path: str) -> ClientConnection:
        options: dict[str, Any] = {"proxy": None, "max_size": None, "ping_interval": None, "open_timeout": None}
        return await connect(f"wss://localhost{path}", sock=raw, ssl=context, server_hostname="localhost", **options)

    def _run(self, step: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(asyncio.wait_for(step, self._timeout_secs))

    def send(self, message: str | bytes) -> None:
        """Send one message."""
        self._run(self._peer.send(message))

    def recv(self) -> str | bytes:
        """The next message."""
        return self._run(self._peer.recv())

    def ping(self) -> None:
        """Returns when the peer has answered."""

        async def step() -> None:
            await (await self._peer.ping())

        self._run(step())

    @property
    def close_code(self) -> int | None:
        """The peer's, once it is closed."""
        return self._peer.close_code

    def close(self) -> None:
        """The closing handshake, and the end of the connection."""
        try:
            self._run(self._peer.close())
        finally:
            self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
