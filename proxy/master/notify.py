"""What the service manager is told (sd_notify(3)): readiness, a status line, the watchdog.

Datagrams over the socket that it names in NOTIFY_SOCKET; without one all of this does nothing. Nothing here blocks or
raises: what the manager cannot take now is sent again at the next ``tick``.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import MutableMapping

from proxy.master.status import unhealthy
from proxy.observe import counters
from proxy.observe.counters import CounterBook

STATUS_SECS = 5.0
"""The status line is sent so often at most, and only when it has changed."""
MAX_UNSENT = 16
_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
_MICROSECONDS = 1_000_000


class Notifier:
    """The way to the service manager, for the master alone: its variables are taken out of ``environ``."""

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        address, interval, pid = (environ.pop(name, "") for name in _VARIABLES)
        self._environ = {}
        if address:
            # Without WATCHDOG_PID, which would name this process.
            self._environ = dict(zip(_VARIABLES[:2], (address, interval), strict=True))
        # A leading @ stands for the NUL byte of an abstract socket's name (sd_notify(3)).
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._unsent: deque[str] = deque(maxlen=MAX_UNSENT)
        self._beat_secs = _watchdog_secs(interval, pid) / 2 if address else 0.0
        self._beat_at = 0.0
        self._status_at = 0.0
        self._status = ""
        self._handed_over = False

    def ready(self) -> None:
        """All workers accept connections; also the end of a reload."""
        self._send("READY=1")
        self._status_at = 0.0  # what was told while they started is over

    @property
    def environ(self) -> dict[str, str]:
        """The variables that were taken out, for the master that takes over (an upgrade)."""
        return dict(self._environ)

    def hand_over(self, pid: int) -> None:
        """The main process is another one from here on; this one says nothing more."""
        self._unsent.clear()
        self._send(f"MAINPID={pid}\nREADY=1")
        self._handed_over = True
        self._beat_secs = 0.0

    @property
    def unsent(self) -> bool:
        """Whether the manager could not take something yet; ``tick`` tries again."""
        return bool(self._unsent)

    def reloading(self) -> None:
        """A reload begins; ``ready`` ends it. The time says which signal it belongs to (Type=notify-reload)."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def stopping(self) -> None:
        """The drain begins."""
        self._send("STOPPING=1\nSTATUS=draining")
        self._status = "draining"

    def tick(self, book: CounterBook, permits: int, now: float, *, stopping: bool) -> None:
        """Called by the master's loop: what is due at ``now`` (monotonic seconds).

        The watchdog is kept quiet only while a worker beats; in a drain, which is bounded by itself, workers end.
        """
        if not self._address:
            return
        for _ in range(len(self._unsent)):
            self._send(self._unsent.popleft())
        if self._beat_secs and now - self._beat_at >= self._beat_secs:
            self._beat_at = now
            if stopping or not unhealthy(book, int(now * 1000)):
                self._send("WATCHDOG=1")
        if not stopping and not self._handed_over and now - self._status_at >= STATUS_SECS:
            self._status_at = now
            status = status_line(book, permits)
            if status != self._status:
                self._status = status
                self._send(f"STATUS={status}")

    def wait_secs(self, now: float) -> float:
        """How long the master may sleep until the watchdog wants to hear of it."""
        return max(0.0, self._beat_at + self._beat_secs - now) if self._beat_secs else float("inf")

    def _send(self, text: str) -> None:
        if not self._address:
            return
        try:
            # A socket a message: none is left open for the children to inherit.
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.setblocking(False)
                sock.sendto(text.encode(), self._address)
        except OSError:
            if text != "WATCHDOG=1":  # a late one would vouch for a moment that is over
                self._unsent.append(text)


def status_line(book: CounterBook, permits: int) -> str:
    """What `systemctl status` shows."""
    ready = sum(1 for slot in range(book.slots) if book.page(slot)[counters.READY])
    return f"{book.total(counters.CONNECTIONS_OPEN)} of {permits} permits held, {ready} of {book.slots} workers ready"


def _watchdog_secs(interval: str, pid: str) -> float:
    """0 when there is no watchdog, or it waits for another process (WATCHDOG_PID)."""
    try:
        meant = not pid or int(pid) == os.getpid()
        return max(0, int(interval)) / _MICROSECONDS if meant else 0.0
    except ValueError:
        return 0.0
