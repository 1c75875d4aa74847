"""What must not be: an accept loop that logs an error and goes on. ``naive_accept.py ADDRESS PORT LOG SECS MAX_BYTES``.

It holds what it accepts and says nothing, as a server does whose clients do not begin their handshake. It ends after
SECS seconds, or when its log has MAX_BYTES.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from datetime import UTC, datetime


def main() -> None:
    """The program."""
    address, port, path, secs, max_bytes = sys.argv[1:]
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o640)
    listener = socket.create_server((address, int(port)), backlog=1024)
    held: list[socket.socket] = []
    ends_at = time.monotonic() + float(secs)
    written = 0
    while time.monotonic() < ends_at and written < int(max_bytes):
        if not select.select([listener], [], [], 0.2)[0]:
            continue
        try:
            held.append(listener.accept()[0])
        except OSError as error:
            written += os.write(
                log, f"{datetime.now(UTC).isoformat()} ERROR failed to accept a connection error={error}\n".encode()
            )


if __name__ == "__main__":
    main()
