"""A non-blocking connect, with the TLS handshake where there is one, under one deadline."""

from __future__ import annotations

import asyncio
import encodings.idna  # noqa: F401 - for server names; a worker that has given up its rights may not be able to load it
import errno
import os
import socket
import ssl
from collections.abc import Callable
from math import inf
from time import monotonic
from typing import NamedTuple

from proxy.stream.deadlines import Deadlines
from proxy.stream.stream import NOBODY, Stream, TlsStream


class Endpoint(NamedTuple):
    """One address to connect to: what socket(2) and connect(2) need, and TLS where it is spoken."""

    family: int
    address: tuple[str, int] | tuple[str, int, int, int] | str
    tls: ssl.SSLContext | None = None
    server_name: str | None = None


class ConnectTimeoutError(TimeoutError):
    """The connection was not ready in time."""


class Connector:
    """Connects to one endpoint; then calls ``on_connected`` with an open stream, or ``on_failed`` with the reason.

    Exactly one of the two is called, once, and never from inside ``__init__`` or ``start``. ``cancel`` calls neither.
    """

    __slots__ = (
        "_deadline",
        "_deadlines",
        "_fd",
        "_handler",
        "_loop",
        "_on_connected",
        "_on_failed",
        "_sock",
        "_stream",
        "_write_timeout_secs",
        "due",
        "endpoint",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        deadlines: Deadlines,
        endpoint: Endpoint,
        *,
        timeout_secs: float,
        write_timeout_secs: float,
        on_connected: Callable[[Stream], None],
        on_failed: Callable[[OSError], None],
    ) -> None:
        self._loop = loop
        self._deadlines = deadlines
        self.endpoint = endpoint
        self._deadline = monotonic() + timeout_secs
        self._write_timeout_secs = write_timeout_secs
        self._on_connected = on_connected
        self._on_failed = on_failed
        self._sock: socket.socket | None = None
        self._fd = -1
        self._stream: Stream | None = None
        self.due = inf

    def start(self) -> None:
        """Begin. What fails at once (no descriptor left, no route) is told by ``on_failed`` like everything else."""
        try:
            self._sock = sock = socket.socket(self.endpoint.family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            self._fd = sock.fileno()
            if self.endpoint.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            code = sock.connect_ex(self.endpoint.address)
        except OSError as error:
            self._loop.call_soon(self._fail, error)
            return
        if code not in (0, errno.EINPROGRESS):
            self._loop.call_soon(self._fail, OSError(code, os.strerror(code)))
            return
        self._loop.add_writer(self._fd, self._on_writable)
        if self._deadline < self.due:
            self._deadlines.watch(self, self._deadline)

    def cancel(self) -> None:
        """Give up; nothing is called any more (idempotent)."""
        self._deadline = inf
        self._deadlines.forget(self)
        if self._stream is not None:
            self._stream.abort()
            self._stream = None
        elif self._sock is not None:
            self._loop.remove_writer(self._fd)
            self._sock.close()
        self._sock = None

    def next_deadline(self) -> float:
        """See ``Deadlined``."""
        return self._deadline

    def on_deadline(self, now: float) -> None:
        """See ``Deadlined``."""
        self._fail(ConnectTimeoutError(errno.ETIMEDOUT, "no connection in time"))

    def _fail(self, error: OSError) -> None:
        if self._deadline == inf:
            return  # cancelled before the loop came round
        self.cancel()
        self._on_failed(error)

    def _on_writable(self) -> None:
        sock = self._sock
        assert sock is not None
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code != 0:
            self._fail(OSError(code, os.strerror(code)))
            return
        self._loop.remove_writer(self._fd)
        if self.endpoint.tls is None:
            self._stream = Stream(self._loop, sock, self._deadlines, NOBODY, self._write_timeout_secs)
            self._stream.start()
            self._succeed()
            return
        try:
            tls_sock = self.endpoint.tls.wrap_socket(
                sock,
                do_handshake_on_connect=False,
                server_hostname=self.endpoint.server_name,
            )
        except (OSError, ValueError) as error:
            self._fail(error if isinstance(error, OSError) else OSError(errno.EINVAL, str(error)))
            return
        self._sock = tls_sock
        shaker = _Handshake(self._succeed, self._fail)
        self._stream = TlsStream(self._loop, tls_sock, self._deadlines, shaker, self._write_timeout_secs)
        self._stream.start()

    def _succeed(self) -> None:
        stream = self._stream
        assert stream is not None
        self._stream = self._sock = None
        self._deadline = inf
        self._deadlines.forget(self)
        self._on_connected(stream)


class _Handshake:
    """Holds a stream while its handshake runs; whatever else comes before it is the end of the attempt."""

    __slots__ = ("_on_failed", "_on_open")

    def __init__(self, on_open: Callable[[], None], on_failed: Callable[[OSError], None]) -> None:
        self._on_open = on_open
        self._on_failed = on_failed

    def on_open(self) -> None:
        self._on_open()

    def on_lost(self, error: OSError) -> None:
        self._on_failed(error)

    def on_data(self, data: bytes) -> None:
        self._on_failed(OSError(errno.EPROTO, "data before its time"))

    def on_eof(self) -> None:
        self._on_failed(OSError(errno.ECONNRESET, "closed by the peer"))

    def on_write_failed(self, error: OSError) -> None:
        self._on_failed(error)

    def on_drained(self) -> None: ...

    def on_read_deadline(self) -> None: ...

    def on_write_deadline(self) -> None: ...
