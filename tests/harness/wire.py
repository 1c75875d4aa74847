"""One side of a connection, spoken byte for byte: blocking, with a time limit on every step."""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import ssl
import struct
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import ClassVar, Self, TypeVar

TIMEOUT_SECS = 30.0
IDLE_TIMEOUT_SECS = 600.0  # beyond any test's own limit
READ_BYTES = 65_536
RECORD_BYTES = 16_384  # RFC 8446 section 5.1
LOOK_MS = 100  # between looks whether another thread has closed what is waited for
NO_CONTENT = (204, 304)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Response:
    """A response as read from a wire."""

    status: int
    head: bytes
    fields: tuple[tuple[str, str], ...]
    body: bytes
    trailers: tuple[tuple[str, str], ...] = ()

    def get(self, name: str) -> str | None:
        """The first value of a field, None without it."""
        return next((value for key, value in self.fields if key.lower() == name.lower()), None)

    def get_all(self, name: str) -> list[str]:
        """Every value of a field, in order."""
        return [value for key, value in self.fields if key.lower() == name.lower()]


class Wire:
    """A connected socket (TLS or not). Everything read is also kept in ``received``.

    One thread may send while another one reads.
    """

    open: ClassVar[weakref.WeakSet[Wire]] = weakref.WeakSet()
    """Those that nobody has closed or dropped."""

    def __init__(self, sock: socket.socket, timeout_secs: float = TIMEOUT_SECS) -> None:
        sock.settimeout(timeout_secs)
        self.open.add(self)
        self.sock = sock
        self.received = bytearray()
        self._unread = bytearray()
        self._step = threading.Lock()

    def send(self, data: bytes) -> None:
        """Sends everything."""
        if not isinstance(self.sock, ssl.SSLSocket):
            self.sock.sendall(data)
            return
        left = memoryview(data)
        while left:
            left = left[self._in_turn(partial(self.sock.send, left[:RECORD_BYTES])) :]

    def _in_turn(self, step: Callable[[], T]) -> T:
        """``step`` on a TLS socket, of which OpenSSL allows one at a time: what cannot go on waits without the turn.

        Raises TimeoutError after the socket's timeout.
        """
        deadline = time.monotonic() + (self.sock.gettimeout() or TIMEOUT_SECS)
        while True:
            with self._step:
                timeout_secs = self.sock.gettimeout()
                self.sock.settimeout(0)
                try:
                    return step()
                except ssl.SSLWantReadError:
                    wanted = select.POLLIN
                except ssl.SSLWantWriteError:
                    wanted = select.POLLOUT
                finally:
                    if self.sock.fileno() >= 0:
                        self.sock.settimeout(timeout_secs)
            waiting = select.poll()
            waiting.register(self.sock, wanted)
            while not waiting.poll(LOOK_MS):
                if self.sock.fileno() < 0:
                    raise OSError(errno.EBADF, "closed by another thread")
                if time.monotonic() > deadline:
                    raise TimeoutError("timed out")

    @property
    def unread_bytes(self) -> int:
        """How much has come from the socket that no call has taken yet."""
        return len(self._unread)

    def _fill(self) -> bool:
        try:
            tls = isinstance(self.sock, ssl.SSLSocket)
            data = self._in_turn(partial(self.sock.recv, READ_BYTES)) if tls else self.sock.recv(READ_BYTES)
        except ssl.SSLZeroReturnError:
            data = b""  # Python's word for the peer's end where this side has ended too
        self.received += data
        self._unread += data
        return bool(data)

    def _take(self, count: int) -> bytes:
        taken = bytes(self._unread[:count])
        del self._unread[:count]
        return taken

    def read_until(self, marker: bytes) -> bytes:
        """Reads up to and including ``marker``. Raises EOFError when the peer ends before it."""
        searched = 0
        while (found := self._unread.find(marker, searched)) < 0:
            searched = max(0, len(self._unread) - len(marker) + 1)
            if not self._fill():
                raise EOFError(f"the peer ended before {marker!r}; unread: {bytes(self._unread)!r}")
        return self._take(found + len(marker))

    def read_exactly(self, count: int) -> bytes:
        """Reads ``count`` bytes. Raises EOFError when the peer ends before them."""
        while len(self._unread) < count:
            if not self._fill():
                raise EOFError(f"the peer ended after {len(self._unread)} of {count} bytes")
        return self._take(count)

    def read_to_end(self) -> bytes:
        """Reads until the peer has ended its side."""
        while self._fill():
            pass
        return self._take(len(self._unread))

    def wait_for_more(self) -> None:
        """Waits until something is there to be read or the peer has ended: an idle connection may be kept long."""
        timeout_secs = self.sock.gettimeout()
        self.sock.settimeout(IDLE_TIMEOUT_SECS)
        try:
            if not self._unread:
                self._fill()
        finally:
            if self.sock.fileno() >= 0:
                self.sock.settimeout(timeout_secs)

    def at_end(self) -> bool:
        """Whether the peer ended (or reset) the connection with nothing unread; waits for the one or the other."""
        try:
            return not self._unread and not self._fill()
        except (ConnectionError, ssl.SSLEOFError):
            return True

    def read_head(self) -> bytes:
        """One head, the empty line included."""
        return self.read_until(b"\r\n\r\n")

    def read_body(self, head: bytes) -> bytes:
        """The body that ``head`` (of a request or response) announces by length or as chunked; b"" without one."""
        fields = dict(_fields(head.lower()))
        if fields.get("transfer-encoding") == "chunked":
            return self._read_chunks()[0]
        return self.read_exactly(int(fields.get("content-length", "0")))

    def _read_chunks(self) -> tuple[bytes, tuple[tuple[str, str], ...]]:
        body = bytearray()
        while size := int(self.read_until(b"\r\n").partition(b";")[0], 16):
            body += self.read_exactly(size)
            assert self.read_exactly(2) == b"\r\n"
        lines = bytearray(b"\r\n")
        while (line := self.read_until(b"\r\n")) != b"\r\n":
            lines += line
        return bytes(body), _fields(bytes(lines))

    def request(self, data: bytes, method: str | None = None) -> Response:
        """Sends a whole request and reads its response."""
        self.send(data)
        return self.read_response(method or data.partition(b" ")[0].decode("latin-1"))

    def read_response(self, method: str = "GET") -> Response:
        """One response (an interim one counts), its body framed as RFC 9112 section 6.3 says."""
        head = self.read_head()
        fields = _fields(head)
        lower = {name.lower(): value for name, value in fields}
        status = int(head.split(b" ", 2)[1])
        body: bytes = b""
        trailers: tuple[tuple[str, str], ...] = ()
        if method == "HEAD" or status < 200 or status in NO_CONTENT:
            pass
        elif "transfer-encoding" in lower:
            body, trailers = self._read_chunks()
        elif "content-length" in lower:
            body = self.read_exactly(int(lower["content-length"]))
        else:
            body = self.read_to_end()
        return Response(status, head, fields, body, trailers)

    def end(self) -> None:
        """Ends the sending side only. Over TLS there is no such half: everything closes."""
        self.sock.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """Closes so that the peer sees a reset (RST)."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self) -> None:
        """Closes; a second time does nothing."""
        self.open.discard(self)
        self.sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _fields(head: bytes) -> tuple[tuple[str, str], ...]:
    lines = head.decode("latin-1").split("\r\n")[1:]
    pairs = (line.partition(":") for line in lines if line)
    return tuple((name, value.strip(" \t")) for name, _, value in pairs)


def connect_tcp(port: int, host: str = "127.0.0.1", timeout_secs: float = TIMEOUT_SECS) -> Wire:
    """A plain connection: the redirect and health listeners, or a TLS listener that is to see no TLS."""
    return Wire(socket.create_connection((host, port), timeout_secs), timeout_secs)


def connect_tls(
    port: int,
    server_name: str | None = "localhost",
    *,
    host: str = "127.0.0.1",
    alpn: tuple[str, ...] = ("http/1.1",),
    cafile: str | None = None,
    source: str | None = None,
    timeout_secs: float = TIMEOUT_SECS,
) -> Wire:
    """A TLS connection after its handshake; certificates are verified only where ``cafile`` is given.

    ``source`` is the address to connect from. An end without close_notify is an error (``ssl.SSLEOFError``), as a
    reset is to some versions of ``ssl``.
    """
    context = ssl.create_default_context(cafile=cafile)
    if cafile is None:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if alpn:
        context.set_alpn_protocols(list(alpn))
    raw = socket.create_connection((host, port), timeout_secs, source_address=(source, 0) if source else None)
    try:
        return Wire(context.wrap_socket(raw, server_hostname=server_name, suppress_ragged_eofs=False), timeout_secs)
    except BaseException:
        with contextlib.suppress(OSError):
            raw.close()
        raise
