"""An HTTP/1.1 upstream that reads each request body to its end, throws it away and answers 204 (for uploads).

Not a server for anything else: one thread a connection, and bodies by ``Content-Length`` only.
"""

from __future__ import annotations

import re
import socket
import sys
import threading

_READ_BYTES = 1 << 20
_MAX_HEAD_BYTES = 65_536
_CONTENT_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]+)", re.IGNORECASE)
_EXPECT = re.compile(rb"\r\nexpect:[ \t]*100-continue", re.IGNORECASE)


def _read_head(connection: socket.socket) -> tuple[bytes, int]:
    """The head, and how many body bytes came with it; an empty head at the clean end of the connection."""
    data = b""
    while (end := data.find(b"\r\n\r\n")) < 0:
        piece = connection.recv(_MAX_HEAD_BYTES)
        if not piece or len(data) > _MAX_HEAD_BYTES:
            return b"", 0
        data += piece
    return data[: end + 2], len(data) - end - 4


def _serve(connection: socket.socket) -> None:
    buffer = bytearray(_READ_BYTES)
    with connection:
        while True:
            head, received = _read_head(connection)
            length = _CONTENT_LENGTH.search(head)
            if length is None:
                return
            if _EXPECT.search(head):
                connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            remaining = int(length[1]) - received
            while remaining > 0:
                count = connection.recv_into(buffer, min(_READ_BYTES, remaining))
                if not count:
                    return
                remaining -= count
            connection.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")


def main() -> None:
    """Serve on the loopback port given as the only argument until the process is ended."""
    with socket.create_server(("127.0.0.1", int(sys.argv[1])), backlog=128) as listener:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_serve, args=(connection,), daemon=True).start()


if __name__ == "__main__":
    main()
