"""A backend for the scenarios: ``upstream.py PORT [ADDRESS]``, HTTP on the loopback address unless told otherwise.

``/`` answers with the host's name; ``/slow?bytes=N&secs=S&hurry=FILE`` sends N bytes evenly over S seconds, and what is
left of them at once when FILE is there.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

PIECES_A_SEC = 10
MAX_BYTES = 64 * 1024 * 1024
MAX_SECS = 300


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    """Head and body are written apart: the body would wait for the acknowledgement of the head, 40 ms each time."""

    def do_GET(self) -> None:
        """Answer one request."""
        target = urlsplit(self.path)
        body = socket.gethostname().encode()
        if target.path != "/slow":
            self._begin(len(body))
            self.wfile.write(body)
            return
        query = {name: values[0] for name, values in parse_qs(target.query).items()}
        size, secs = min(int(query["bytes"]), MAX_BYTES), min(float(query["secs"]), MAX_SECS)
        self._begin(size)
        pieces = max(1, round(secs * PIECES_A_SEC))
        for number in range(pieces):
            self.wfile.write(b"x" * (size * (number + 1) // pieces - size * number // pieces))
            if not os.path.exists(query.get("hurry", "")):
                time.sleep(secs / pieces)

    def _begin(self, size: int) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(size))
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing: the scenarios count what the journal gets."""


class Server(ThreadingHTTPServer):
    """A thread a connection."""

    daemon_threads = True
    request_queue_size = 1024


if __name__ == "__main__":
    Server((sys.argv[2] if len(sys.argv) > 2 else "127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
