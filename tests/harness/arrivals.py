"""Connections that come all the time."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def arrivals(port: int, pause_secs: float, threads: int = 1) -> Iterator[None]:
    """Each thread makes one after another and holds the last 100; whether they are served is not theirs to judge."""
    stop = threading.Event()

    def connect() -> None:
        held: list[socket.socket] = []
        while not stop.wait(pause_secs):
            with contextlib.suppress(OSError):
                held.append(socket.create_connection(("127.0.0.1", port), 1))
            while len(held) > 100:
                held.pop(0).close()
        for sock in held:
            sock.close()

    running = [threading.Thread(target=connect) for _ in range(threads)]
    for thread in running:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in running:
            thread.join()
