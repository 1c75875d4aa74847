"""The backend of the show, a process of its own: short answers, a long download, an upload, a WebSocket."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
import sys

from proxy.demo.websocket import echo

DOWNLOAD_BYTES = 200_000_000
UPLOAD_BYTES = 50_000_000
READ_BYTES = 65_536
BLOCK = hashlib.shake_256(b"show").digest(65_521)
"""What bodies repeat; a prime length, so that no cut at a buffer's size goes unnoticed."""
_DOUBLE = BLOCK * 2


def pattern(offset: int, count: int) -> bytes:
    """``count`` bytes (at most a block) of an endless body from ``offset`` on."""
    start = offset % len(BLOCK)
    return _DOUBLE[start : start + count]


def _answer(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


async def _download(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % DOWNLOAD_BYTES)
    for offset in range(0, DOWNLOAD_BYTES, len(BLOCK)):
        writer.write(pattern(offset, min(len(BLOCK), DOWNLOAD_BYTES - offset)))
        await writer.drain()


async def _upload(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    digest, left = hashlib.sha256(), UPLOAD_BYTES
    while left:
        data = await reader.read(min(left, READ_BYTES))
        if not data:
            return
        digest.update(data)
        left -= len(data)
    writer.write(_answer(digest.hexdigest().encode()))


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head[:-4].split(b"\r\n")
        target = first.split(b" ")[1]
        if target == b"/download":
            await _download(writer)
        elif target == b"/upload":
            await _upload(reader, writer)
        elif target == b"/ws":
            pairs = (line.partition(b":") for line in lines)
            await echo(reader, writer, target, [(name, value.strip()) for name, _, value in pairs], b"")
            return
        else:
            writer.write(_answer(target))
        await writer.drain()


async def _on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):  # the proxy may close when it likes
        await _serve(reader, writer)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def _main(number: int) -> None:
    server = await asyncio.start_server(_on_connection, sock=socket.socket(fileno=number))
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1])))
