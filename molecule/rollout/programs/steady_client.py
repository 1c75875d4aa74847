"""A client that never stops: ``steady_client.py REPORT HOST...`` sends HTTPS requests to all hosts until SIGTERM.

To each host it makes connections for one request each, and keeps others for many. What it saw is then in the file
REPORT, as JSON: ``answered`` by host and kind of connection, ``failures`` and the first of them in ``failed``, and
``longest_gap_secs`` between two answers of a host. No certificate is verified: they are self-signed.
"""

from __future__ import annotations

import http.client
import json
import signal
import ssl
import sys
import threading
import time
from collections import Counter

SITE = "www.example.org"
TIMEOUT_SECS = 30.0
PAUSE_SECS = 0.1
CONNECTIONS_A_KIND = 2
MAX_FAILURES_KEPT = 50


class Client:
    """All threads, and what they saw."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self._lock = threading.Lock()
        self._answered: dict[str, Counter[str]] = {}
        self._failed: list[dict[str, object]] = []
        self._failures = 0
        self._last_answer: dict[str, float] = {}
        self._longest_gap: dict[str, float] = {}
        self._context = ssl.create_default_context()
        self._context.check_hostname = False
        self._context.verify_mode = ssl.CERT_NONE

    def run(self, hosts: list[str]) -> dict[str, object]:
        """Until ``stopped`` is set. Returns the report."""
        self._answered = {host: Counter() for host in hosts}
        self._longest_gap = dict.fromkeys(hosts, 0.0)
        threads = [
            threading.Thread(target=self._ask, args=(host, keep), daemon=True)
            for host in hosts
            for keep in [False, True] * CONNECTIONS_A_KIND
        ]
        for thread in threads:
            thread.start()
        self.stopped.wait()
        for thread in threads:
            thread.join(TIMEOUT_SECS)
        return {
            "answered": {host: dict(counts) for host, counts in self._answered.items()},
            "failures": self._failures,
            "failed": self._failed,
            "longest_gap_secs": {host: round(gap, 3) for host, gap in self._longest_gap.items()},
        }

    def _ask(self, host: str, keep: bool) -> None:
        kind = "kept" if keep else "new"
        connection: http.client.HTTPSConnection | None = None
        while not self.stopped.wait(PAUSE_SECS):
            try:
                if connection is None:
                    connection = http.client.HTTPSConnection(host, timeout=TIMEOUT_SECS, context=self._context)
                    connection.connect()
                _exchange(connection, host, keep)
            except (OSError, http.client.HTTPException) as error:
                self._note_failure(host, kind, error)
                if connection is not None:
                    connection.close()
                connection = None
            else:
                self._note_answer(host, kind)
                # http.client closes the socket where the answer says so, and forgets it.
                if connection.sock is None or not keep:
                    connection.close()
                    connection = None

    def _note_answer(self, host: str, kind: str) -> None:
        now = time.monotonic()
        with self._lock:
            self._answered[host][kind] += 1
            gap = now - self._last_answer.get(host, now)
            self._last_answer[host] = now
            self._longest_gap[host] = max(self._longest_gap[host], gap)

    def _note_failure(self, host: str, kind: str, error: Exception) -> None:
        with self._lock:
            self._failures += 1
            if len(self._failed) < MAX_FAILURES_KEPT:
                self._failed.append(
                    {"at": time.time(), "host": host, "connection": kind, "error": f"{type(error).__name__}: {error}"}
                )


def _exchange(connection: http.client.HTTPSConnection, host: str, keep: bool) -> None:
    connection.request("GET", "/", headers={"Host": SITE, **({} if keep else {"Connection": "close"})})
    response = connection.getresponse()
    body = response.read()
    if response.status != 200 or body != host.encode():
        raise http.client.HTTPException(f"status {response.status}, body {body[:80]!r}")


def main() -> None:
    """The program."""
    report, *hosts = sys.argv[1:]
    client = Client()
    signal.signal(signal.SIGTERM, lambda *_: client.stopped.set())
    seen = client.run(hosts)
    with open(report, "w", encoding="utf-8") as file:
        json.dump(seen, file)


if __name__ == "__main__":
    main()
