"""Ends a connection that does not let one read of TLS come to its end.

OpenSSL answers what is no application data inside SSL_read(3) and reads on, for as long as more has come. A client that
sends nothing but KeyUpdate messages (RFC 8446 section 4.6.3) so keeps the event loop inside one call, and everybody
else waiting, until the worker is taken for hung. Python does not let SSL_MODE_AUTO_RETRY be switched off. But SSL_read
runs without the interpreter's lock: a thread looks on, and takes the descriptor away from a read that takes too long.
"""

from __future__ import annotations

import contextlib
import os
import threading

LOOK_SECS = 0.1
LOOKS = 2
"""A read that is the same at so many looks is stuck: an honest one takes microseconds."""


class ReadGuard:
    """``reading`` is the descriptor that the loop reads from, -1 while it does not; ``turn`` counts the reads.

    Both are the reader's to set. ``ended`` counts the connections that were ended.
    """

    __slots__ = ("_looks", "_nowhere", "_seen", "_stop", "_thread", "ended", "reading", "turn")

    def __init__(self) -> None:
        self.reading = -1
        self.turn = 0
        self.ended = 0
        self._seen = (-1, 0)
        self._looks = 0
        self._nowhere = -1
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Look on from now; after the fork, once. Raises OSError without a descriptor left."""
        self._nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
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
            seen = (self.reading, self.turn)
            if seen[0] < 0 or seen != self._seen:
                self._seen, self._looks = seen, 0
                continue
            self._looks += 1
            if self._looks >= LOOKS:
                self._looks = 0
                self.ended += 1
                # The number goes on being the connection's own, but what comes from it is the end. The read is still
                # going on: nobody else can have closed the number and got it back.
                with contextlib.suppress(OSError):
                    os.dup2(self._nowhere, seen[0], inheritable=False)


READ_GUARD = ReadGuard()
"""Of this process: it has one event loop, so one read at a time."""
