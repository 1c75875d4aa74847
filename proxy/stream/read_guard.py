"""Ends a connection that does not let one read of TLS come to its end.

OpenSSL answers what is no application data inside SSL_read(3) and reads on, for as long as more has come. A client that
sends nothing but KeyUpdate messages (RFC 8446 section 4.6.3) so keeps the event loop inside one call, and everybody
else waiting, until the worker is taken for hung. Python does not let SSL_MODE_AUTO_RETRY be switched off. But SSL_read
runs without the interpreter's lock: a thread looks on, and takes the descriptor away from a read that takes too much.

What counts is the processor time of the reading thread. On a machine that is busy otherwise an honest read may last.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from typing import Protocol

LOOK_SECS = 0.1
STUCK_SECS = 0.1
"""A read that has taken so much processor time since a look is stuck: an honest one takes microseconds."""


class Reader(Protocol):
    """A connection that is read from."""

    @property
    def descriptor(self) -> int:
        """Of its socket."""

    def cut(self) -> None:
        """Its descriptor leads nowhere any more. Called by the loop; it may be closed by then."""


class ReadGuard:
    """``reading`` is what the loop reads from, None while it does not; ``turn`` counts the reads.

    Both are the reader's to set. ``ended`` counts the connections that were ended.
    """

    __slots__ = ("_clock", "_cpu_secs", "_loop", "_nowhere", "_seen", "_stop", "_thread", "ended", "reading", "turn")

    def __init__(self) -> None:
        self.reading: Reader | None = None
        self.turn = 0
        self.ended = 0
        self._seen: tuple[Reader | None, int] = (None, 0)
        self._clock = 0
        self._cpu_secs = 0.0
        self._nowhere = -1
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Look on from now; after the fork, once, from the loop's thread. Raises OSError without descriptors left."""
        nowhere, other = socket.socketpair()
        other.close()
        self._nowhere = nowhere.detach()
        self._loop = loop
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._thread = threading.Thread(target=self._run, name="read guard", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look on no more (idempotent)."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            os.close(self._nowhere)

    def _run(self) -> None:
        while not self._stop.wait(LOOK_SECS):
            self.look()

    def look(self) -> None:
        """Whether the read that goes on is the one of the last look, and has worked all the time."""
        reader, turn = seen = (self.reading, self.turn)
        if reader is None:
            self._seen = seen
            return
        cpu_secs = time.clock_gettime(self._clock)
        if seen != self._seen:
            self._seen, self._cpu_secs = seen, cpu_secs
        elif cpu_secs - self._cpu_secs >= STUCK_SECS:
            self._seen = (None, turn)
            self.ended += 1
            # The number goes on being the connection's own, but what comes from it is the end. The read is still
            # going on: nobody else can have closed the number and got it back.
            with contextlib.suppress(OSError):
                os.dup2(self._nowhere, reader.descriptor, inheritable=False)
            # The event loop has lost sight of it, and the read may end without an error.
            assert self._loop is not None
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                self._loop.call_soon_threadsafe(reader.cut)


READ_GUARD = ReadGuard()
"""Of this process: it has one event loop, so one read at a time."""
