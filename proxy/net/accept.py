"""The accept loop: a bounded batch a wake-up, admission before accept, one back-off timer, no errno that ends it."""

from __future__ import annotations

import asyncio
import enum
import errno
import socket
from collections.abc import Callable

from proxy.net.admission import Admission, Permit
from proxy.observe.counters import ACCEPT_ERRORS, ACCEPT_PAUSES, CONNECTIONS_ACCEPTED, accept_error_cell
from proxy.observe.events import Reporter

OnAccept = Callable[[socket.socket, object, Permit], None]

ACCEPT_BATCH = 32
"""Accepts a wake-up: enough to empty a burst, few enough that connections being served get their turn."""

LAST_BATCHES = 128
"""What a full queue (4096) takes."""

RESOURCE_BACKOFF_SECS = 1.0
UNKNOWN_BACKOFF_SECS = 0.1
CONNECTION_ERRORS_IN_A_ROW = 16
"""So many aborted connections without one success are treated as a resource error: a guard against a spin."""


class ErrorClass(enum.Enum):
    """What an errno of accept(2) means for the loop."""

    DRAINED = "drained"
    TRANSIENT = "transient"
    CONNECTION = "connection"
    RESOURCE = "resource"
    UNKNOWN = "unknown"


ERROR_CLASSES: dict[int, ErrorClass] = {
    errno.EAGAIN: ErrorClass.DRAINED,
    errno.EWOULDBLOCK: ErrorClass.DRAINED,
    errno.EINTR: ErrorClass.TRANSIENT,
    # accept(2): "already-pending network errors on the new socket ... treat them like EAGAIN by retrying".
    errno.ECONNABORTED: ErrorClass.CONNECTION,
    errno.EPROTO: ErrorClass.CONNECTION,
    errno.ENETDOWN: ErrorClass.CONNECTION,
    errno.ENOPROTOOPT: ErrorClass.CONNECTION,
    errno.EHOSTDOWN: ErrorClass.CONNECTION,
    errno.ENONET: ErrorClass.CONNECTION,
    errno.EHOSTUNREACH: ErrorClass.CONNECTION,
    errno.EOPNOTSUPP: ErrorClass.CONNECTION,
    errno.ENETUNREACH: ErrorClass.CONNECTION,
    errno.EMFILE: ErrorClass.RESOURCE,
    errno.ENFILE: ErrorClass.RESOURCE,
    errno.ENOBUFS: ErrorClass.RESOURCE,
    errno.ENOMEM: ErrorClass.RESOURCE,
}

BACKOFF_SECS: dict[ErrorClass, float] = {
    ErrorClass.DRAINED: 0.0,
    ErrorClass.TRANSIENT: 0.0,
    ErrorClass.CONNECTION: 0.0,
    ErrorClass.RESOURCE: RESOURCE_BACKOFF_SECS,
    ErrorClass.UNKNOWN: UNKNOWN_BACKOFF_SECS,
}


def classify(error: BaseException) -> ErrorClass:
    """The class of what accept(2) raised; whatever is not in the table is unknown."""
    number = error.errno if isinstance(error, OSError) else None
    return ERROR_CLASSES.get(number or 0, ErrorClass.UNKNOWN)


class AcceptLoop:
    """Accepts on one listening socket and hands each connection, with its permit, to ``on_accept``.

    ``on_accept`` becomes the owner of the socket and of the permit. If it raises, the loop closes both and reports.
    The listening socket itself belongs to whoever made it: ``stop`` does not close it.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listener: socket.socket,
        *,
        label: str,
        permits: Admission,
        on_accept: OnAccept,
        reporter: Reporter,
        cells: memoryview | None = None,
    ) -> None:
        self._loop = loop
        self._listener = listener
        self._label = label
        self._permits = permits
        self._on_accept = on_accept
        self._reporter = reporter
        self._cells = cells
        self._timer: asyncio.TimerHandle | None = None
        self._waiting = False
        self._running = False
        self._connection_errors = 0

    def start(self) -> None:
        """Begin to accept. The listening socket must be non-blocking."""
        self._running = True
        self._loop.add_reader(self._listener.fileno(), self._on_readable)

    def stop(self) -> None:
        """Accept nothing more (idempotent)."""
        self._running = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._loop.remove_reader(self._listener.fileno())

    def finish(self) -> None:
        """Take what is in the queue, as far as there are permits, and stop: the socket is about to be closed."""
        for _ in range(LAST_BATCHES):
            if not self._running or self._timer is not None or not self._accept_batch():
                break
        self.stop()

    def _on_readable(self) -> None:
        self._accept_batch()

    def _accept_batch(self) -> bool:
        """Whether the whole batch was used, so that there may be more."""
        for _ in range(ACCEPT_BATCH):
            if not self._permits.may_enter():
                self._pause_for_permit()
                return False
            try:
                sock, peer = self._listener.accept()
            except Exception as error:  # noqa: BLE001 - the listener survives whatever accept raises
                if not self._on_error(error):
                    return False
                continue
            self._connection_errors = 0
            if self._cells is not None:
                self._cells[CONNECTIONS_ACCEPTED] += 1
            permit = self._permits.enter(peer)
            if permit is None:
                sock.close()
                continue
            try:
                sock.setblocking(False)
                self._on_accept(sock, peer, permit)
            except Exception as error:  # noqa: BLE001 - one connection's fault is not the listener's
                sock.close()
                permit.release()
                self._reporter.report(
                    "accept.setup_failed", "a connection could not be set up", exc=error, listener=self._label
                )
        return True

    def _on_error(self, error: Exception) -> bool:
        """Apply the table to what accept raised; True when the next accept may follow at once."""
        error_class = classify(error)
        if error_class is ErrorClass.DRAINED:
            return False
        if error_class is ErrorClass.TRANSIENT:
            return True
        if error_class is ErrorClass.CONNECTION:
            self._connection_errors += 1
            if self._connection_errors >= CONNECTION_ERRORS_IN_A_ROW:
                error_class = ErrorClass.RESOURCE
        backoff_secs = BACKOFF_SECS[error_class]
        if self._cells is not None:
            self._cells[ACCEPT_ERRORS] += 1
            self._cells[accept_error_cell(getattr(error, "errno", None))] += 1
        number = getattr(error, "errno", None)
        name = errno.errorcode.get(number, "unknown") if isinstance(number, int) else type(error).__name__
        self._reporter.report(
            f"accept.{name.lower()}",
            "failed to accept a connection",
            exc=None if isinstance(error, OSError) else error,
            listener=self._label,
            error=str(error),
            error_class=error_class.value,
            backoff_ms=round(backoff_secs * 1000),
            permits_held=self._permits.held,
            permits=self._permits.limit,
        )
        if number == errno.EMFILE:
            self._permits.descriptors_gone()
        if backoff_secs == 0:
            return True
        self._back_off(backoff_secs)
        return False

    def _back_off(self, secs: float) -> None:
        if self._cells is not None:
            self._cells[ACCEPT_PAUSES] += 1
        self._loop.remove_reader(self._listener.fileno())
        if self._timer is None:
            self._timer = self._loop.call_later(secs, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._resume()

    def _pause_for_permit(self) -> None:
        if self._cells is not None:
            self._cells[ACCEPT_PAUSES] += 1
        self._loop.remove_reader(self._listener.fileno())
        if not self._waiting:
            self._waiting = True
            self._permits.wait(self._on_permit)

    def _on_permit(self) -> None:
        self._waiting = False
        self._resume()

    def _resume(self) -> None:
        if self._running and self._timer is None and not self._waiting:
            self._loop.add_reader(self._listener.fileno(), self._on_readable)
