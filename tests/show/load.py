"""The clients of the show: short requests over new and kept connections, and one long exchange of each kind."""

from __future__ import annotations

import hashlib
import select
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from websockets.exceptions import ConnectionClosed

from tests.harness.websocket import WebSocket
from tests.harness.wire import Wire
from tests.show.upstream import DOWNLOAD_BYTES, UPLOAD_BYTES, pattern

CLIENT_TIMEOUT_SECS = 10.0
NEW_CLIENTS = 3
KEPT_CLIENTS = 3
NEW_PAUSE_SECS = 0.02
KEPT_PAUSE_SECS = 0.01
WEBSOCKET_PAUSE_SECS = 0.05
PIECE_BYTES = 32_768
MAX_FAILURES_KEPT = 200
_SHORT = b"GET /short HTTP/1.1\r\nHost: localhost\r\n%b\r\n"


@dataclass(frozen=True, slots=True)
class Failure:
    """``kind``: refused, reset, cut, timeout, tls, status NNN or content. ``port`` is the client's, 0 without one."""

    kind: str
    at: float
    port: int
    phase: str
    doing: str

    def __str__(self) -> str:
        return f"{self.at:6.2f} s  {self.kind:10} {self.phase}: {self.doing} (client port {self.port})"


class ContentError(Exception):
    """A whole answer that is not the right one; the text is the failure's kind."""


_KINDS: tuple[tuple[type[BaseException], str], ...] = (
    (ConnectionRefusedError, "refused"),
    (ConnectionError, "reset"),
    (ssl.SSLEOFError, "cut"),
    (ssl.SSLZeroReturnError, "cut"),
    (EOFError, "cut"),
    (ConnectionClosed, "cut"),
    (TimeoutError, "timeout"),
    (ssl.SSLError, "tls"),
)
FAULTS = (OSError, EOFError, ConnectionClosed, ContentError)
"""What a client may meet."""


def kind_of(error: BaseException) -> str:
    """The class of a failure."""
    return next((kind for of, kind in _KINDS if isinstance(error, of)), str(error) or type(error).__name__)


class Pace:
    """How far the long exchanges may be: they last as long as the phases do, however fast the machine is."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._share = 0.0

    def allow(self, share: float) -> None:
        """Up to this share of the whole; 1 is no limit."""
        with self._changed:
            self._share = max(self._share, share)
            self._changed.notify_all()

    def wait(self, share: float) -> None:
        """Returns once ``share`` is allowed."""
        with self._changed:
            self._changed.wait_for(lambda: self._share >= min(share, 1.0))

    @property
    def is_over(self) -> bool:
        """Whether nothing is held back any more."""
        return self._share >= 1.0


class Clients:
    """Everybody who talks to the appliance. ``phase`` is what is being done to it now, for the failures."""

    def __init__(self, port: int) -> None:
        self.phase = "start"
        self.failures: list[Failure] = []
        self.counts: Counter[str] = Counter()
        self.slowest_secs = 0.0
        """From the connect, or from the request where the connection was there."""
        self.started_at = time.monotonic()
        self._port = port
        self.resting = threading.Event()
        """While set, nobody begins a short request, and no connection for them is kept."""
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._context = ssl.create_default_context()
        self._context.check_hostname = False
        self._context.verify_mode = ssl.CERT_NONE

    # -- short requests

    def start(self) -> None:
        """Begin with the short requests."""
        for work in [self._new_connections] * NEW_CLIENTS + [self._kept_connection] * KEPT_CLIENTS:
            self._spawn(work)

    def stop(self) -> None:
        """End the short requests; each one under way is finished."""
        self._stop.set()
        ends_at = time.monotonic() + 2 * CLIENT_TIMEOUT_SECS
        for thread in self._threads:
            thread.join(max(0.0, ends_at - time.monotonic()))

    def _spawn(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _count(self, name: str) -> None:
        with self._lock:
            self.counts[name] += 1

    def _answered(self, name: str, began: float) -> None:
        with self._lock:
            self.counts[name] += 1
            self.slowest_secs = max(self.slowest_secs, time.monotonic() - began)

    def _failed(self, error: BaseException, port: int, doing: str) -> None:
        with self._lock:
            self.counts["failed"] += 1
            if len(self.failures) < MAX_FAILURES_KEPT:
                at = time.monotonic() - self.started_at
                self.failures.append(Failure(kind_of(error), at, port, self.phase, f"{doing}: {error}"))

    def take_failures(self, since: int, ports: set[int]) -> int:
        """Forgive the failures from number ``since`` on that hit connections from ``ports``; how many these were."""
        with self._lock:
            forgiven = [one for one in self.failures[since:] if one.port in ports and one.kind in ("reset", "cut")]
            self.failures[since:] = [one for one in self.failures[since:] if one not in forgiven]
            self.counts["failed"] -= len(forgiven)
        return len(forgiven)

    def configuration(self) -> str | None:
        """Which configuration serves a new connection."""
        with self.tls(self.tcp()) as wire:
            return wire.request(_SHORT % b"").get("X-Configuration")

    def tcp(self) -> socket.socket:
        """A connection without TLS yet."""
        return socket.create_connection(("127.0.0.1", self._port), CLIENT_TIMEOUT_SECS)

    def tls(self, raw: socket.socket) -> Wire:
        """The handshake; closes ``raw`` when it fails."""
        try:
            sock = self._context.wrap_socket(raw, server_hostname="localhost", suppress_ragged_eofs=False)
        except BaseException:
            raw.close()
            raise
        return Wire(sock, CLIENT_TIMEOUT_SECS)

    def _new_connections(self) -> None:
        while not self._stop.wait(NEW_PAUSE_SECS):
            if self.resting.is_set():
                continue
            port, doing, began = 0, "connect", time.monotonic()
            try:
                raw = self.tcp()
                port, doing = raw.getsockname()[1], "handshake"
                with self.tls(raw) as wire:
                    doing = "request on a new connection"
                    _exchange(wire, close=True)
            except FAULTS as error:
                self._failed(error, port, doing)
            else:
                self._answered("new", began)

    def _kept_connection(self) -> None:
        wire: Wire | None = None
        turn = 0
        while not self._stop.wait(KEPT_PAUSE_SECS):
            if self.resting.is_set():
                if wire is not None:
                    wire.close()
                    wire = None
                continue
            if wire is not None and _has_ended(wire):
                # Closed while it was idle: no request is lost.
                wire.close()
                wire = None
                self._count("closed idle")
            port, doing, began = 0, "connect", time.monotonic()
            try:
                if wire is None:
                    raw = self.tcp()
                    turn = 0
                    port, doing = raw.getsockname()[1], "handshake"
                    wire = self.tls(raw)
                port = wire.sock.getsockname()[1]
                turn += 1
                doing = f"request {turn} on a kept connection"
                if not _exchange(wire, close=False):
                    wire.close()
                    wire = None
                    self._count("told to close")
            except FAULTS as error:
                self._failed(error, port, doing)
                if wire is not None:
                    wire.close()
                wire = None
            else:
                self._answered("kept", began)
        if wire is not None:
            wire.close()

    # -- long exchanges

    def long(self, pace: Pace) -> list[Long]:
        """Begin one exchange of each kind; returns when their requests are on their way."""
        return [self.begin(kind, pace) for kind in LONG]

    def begin(self, kind: str, pace: Pace) -> Long:
        """Begin one long exchange. Raises OSError when it cannot even connect."""
        raw = self.tcp()
        one = Long(kind, raw.getsockname()[1])

        def run() -> None:
            try:
                LONG[kind](self, raw, one, pace)
            except FAULTS as error:
                one.fault = kind_of(error)
            else:
                one.intact = True
            finally:
                one.ended.set()

        self._spawn(run)
        return one

    def _download(self, raw: socket.socket, one: Long, pace: Pace) -> None:
        with self.tls(raw) as wire:
            wire.send(b"GET /download HTTP/1.1\r\nHost: localhost\r\n\r\n")
            if b" 200 " not in wire.read_head():
                raise ContentError("status")
            early = wire.read_exactly(wire.unread_bytes)
            while True:
                data = early or wire.sock.recv(PIECE_BYTES)
                early = b""
                if not data:
                    raise EOFError
                for start in range(0, len(data), PIECE_BYTES):
                    piece = data[start : start + PIECE_BYTES]
                    _must(pattern(one.done_bytes + start, len(piece)) == piece)
                one.done_bytes += len(data)
                if one.done_bytes >= DOWNLOAD_BYTES:
                    break
                pace.wait(one.done_bytes / DOWNLOAD_BYTES)
            _must(one.done_bytes == DOWNLOAD_BYTES)

    def _upload(self, raw: socket.socket, one: Long, pace: Pace) -> None:
        digest = hashlib.sha256()
        with self.tls(raw) as wire:
            wire.send(b"PUT /upload HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % UPLOAD_BYTES)
            while one.done_bytes < UPLOAD_BYTES:
                pace.wait(one.done_bytes / UPLOAD_BYTES)
                piece = pattern(one.done_bytes, min(PIECE_BYTES, UPLOAD_BYTES - one.done_bytes))
                digest.update(piece)
                wire.send(piece)
                one.done_bytes += len(piece)
            pace.wait(1.0)
            _must(wire.read_response("PUT").body == digest.hexdigest().encode())

    def _websocket(self, raw: socket.socket, one: Long, pace: Pace) -> None:
        with WebSocket(raw, self._context, timeout_secs=CLIENT_TIMEOUT_SECS) as peer:
            while not pace.is_over:
                text = f"message {one.done_bytes}"
                peer.send(text)
                _must(peer.recv() == text)
                one.done_bytes += len(text)
                time.sleep(WEBSOCKET_PAUSE_SECS)


@dataclass(slots=True)
class Long:
    """A long exchange: whole and right (``intact``), or why not (``fault``), once it has ``ended``."""

    kind: str
    port: int
    done_bytes: int = 0
    intact: bool = False
    fault: str = ""
    ended: threading.Event = field(default_factory=threading.Event)


LONG: dict[str, Callable[[Clients, socket.socket, Long, Pace], None]] = {
    "download": Clients._download,
    "upload": Clients._upload,
    "websocket": Clients._websocket,
}


def _must(good: bool) -> None:
    if not good:
        raise ContentError("content")


def _has_ended(wire: Wire) -> bool:
    """Whether the peer has ended an idle connection; a session ticket that has come is no end."""
    if not select.select([wire.sock], [], [], 0)[0]:
        return False
    wire.sock.settimeout(0)
    try:
        return not wire.sock.recv(1)
    except ssl.SSLWantReadError:
        return False
    except (OSError, EOFError):
        return True
    finally:
        wire.sock.settimeout(CLIENT_TIMEOUT_SECS)


def _exchange(wire: Wire, *, close: bool) -> bool:
    """One short request; whether the connection stays open."""
    response = wire.request(_SHORT % (b"Connection: close\r\n" if close else b""))
    wire.received.clear()
    if response.status != 200:
        raise ContentError(f"status {response.status}")
    if response.body != b"/short" or response.get("X-Configuration") not in ("a", "b"):
        raise ContentError("content")
    return response.get("Connection") != "close"
