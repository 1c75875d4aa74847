"""Clients that connect and say nothing: ``stalled_clients.py REPORT HOST PORT COUNT SECS ADDRESS...``.

Keeps COUNT connections from the addresses in turn, each replaced when the server ends it, for at most SECS seconds or
until SIGTERM. What it saw is then in the file REPORT, as JSON: ``connected``, ``ended`` by the server, ``failed``.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import resource
import selectors
import signal
import socket
import sys
import time
from collections import Counter

MAX_CONNECTIONS = 50_000
"""In all: a load has a bound."""
MAX_CONNECTIONS_A_SEC = 500
LOOK_SECS = 0.2


class Crowd:
    """The connections, and what became of them."""

    def __init__(self, address: tuple[str, int], sources: list[str]) -> None:
        self.is_over = False
        self._sources = itertools.cycle(sources)
        self.counts: Counter[str] = Counter(connected=0, ended=0, failed=0)
        self._address = address
        self._selector = selectors.DefaultSelector()

    def stand(self, count: int, secs: float) -> None:
        """Keep ``count`` connections for ``secs`` seconds."""
        began = time.monotonic()
        while not self.is_over and (lasted := time.monotonic() - began) < secs:
            allowed = min(MAX_CONNECTIONS, (lasted + LOOK_SECS) * MAX_CONNECTIONS_A_SEC)
            while len(self._selector.get_map()) < count and self._tried < allowed:
                if not self._connect():
                    break
            for key, _ in self._selector.select(LOOK_SECS):
                self._look(key.fileobj)
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]

    @property
    def _tried(self) -> int:
        return self.counts["connected"] + self.counts["failed"]

    def _connect(self) -> bool:
        sock = socket.socket()
        try:
            sock.settimeout(LOOK_SECS)
            sock.bind((next(self._sources), 0))
            sock.connect(self._address)
        except OSError:
            self.counts["failed"] += 1
            sock.close()
            return False
        self.counts["connected"] += 1
        sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_READ)
        return True

    def _look(self, sock: object) -> None:
        assert isinstance(sock, socket.socket)
        data = b""
        with contextlib.suppress(OSError):
            data = sock.recv(65_536)
        if not data:
            self.counts["ended"] += 1
            self._selector.unregister(sock)
            sock.close()


def main() -> None:
    """The program."""
    report, host, port, count, secs, *sources = sys.argv[1:]
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    crowd = Crowd((host, int(port)), sources)

    def stop(*_: object) -> None:
        crowd.is_over = True

    signal.signal(signal.SIGTERM, stop)
    crowd.stand(int(count), float(secs))
    with open(report, "w", encoding="utf-8") as file:
        json.dump(crowd.counts, file)


if __name__ == "__main__":
    main()
