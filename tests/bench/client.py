"""The bench's own TLS client, run as a process of its own so that ``OPENSSL_CONF`` pins what it offers.

Each command prints one JSON object. No session is ever offered, so every handshake is a full one.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable

_READ_BYTES = 1 << 18
_TIMEOUT_SECS = 60
_CONTENT_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]+)", re.IGNORECASE)


class RefusedError(Exception):
    """The proxy did not answer as it must for the measurement to count."""


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _connect(context: ssl.SSLContext, port: int) -> ssl.SSLSocket:
    plain = socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_SECS)
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    secure = context.wrap_socket(plain)
    if secure.session_reused:
        raise RefusedError("a session was resumed")
    return secure


def _request_head(method: str, path: str, port: int, *fields: str) -> bytes:
    lines = (f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", "User-Agent: bench", *fields)
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def _read_response(secure: ssl.SSLSocket, buffer: bytearray) -> int:
    """Read one 2xx response whole; its body must have a Content-Length, or be absent (204).

    :returns: the number of body bytes
    :raises RefusedError: for another status, or an early end
    """
    data = b""
    while (end := data.find(b"\r\n\r\n")) < 0:
        piece = secure.recv(_READ_BYTES)
        if not piece:
            raise RefusedError(f"the connection ended inside the response head: {data[:200]!r}")
        data += piece
    if not re.match(rb"HTTP/1\.1 2\d\d ", data):
        raise RefusedError(f"not a 2xx response: {data[:200]!r}")
    length = _CONTENT_LENGTH.search(data, 0, end + 2)
    if length is None and not data.startswith(b"HTTP/1.1 204 "):
        raise RefusedError(f"no Content-Length: {data[:200]!r}")
    body_bytes = int(length[1]) if length else 0
    remaining = body_bytes - (len(data) - end - 4)
    while remaining > 0:
        count = secure.recv_into(buffer, _READ_BYTES)
        if not count:
            raise RefusedError(f"the body ended {remaining} bytes early")
        remaining -= count
    return body_bytes


def probe(port: int, path: str) -> dict[str, object]:
    """One request on one connection; tells what was negotiated."""
    with _connect(_context(), port) as secure:
        secure.sendall(_request_head("GET", path, port))
        body_bytes = _read_response(secure, bytearray(_READ_BYTES))
        cipher = secure.cipher()
        return {"version": secure.version(), "cipher": cipher[0] if cipher else None, "bytes": body_bytes}


def handshakes(port: int, path: str, count: int, threads: int) -> dict[str, object]:
    """``count`` connections with one request each, ``threads`` at a time; latency is from connect to response end."""
    latencies: list[float] = []
    failures: list[Exception] = []
    turns = iter(range(count))
    head = _request_head("GET", path, port, "Connection: close")

    def run() -> None:
        context = _context()
        buffer = bytearray(_READ_BYTES)
        try:
            for _ in turns:  # one shared range iterator: next() on it is atomic
                started = time.perf_counter()
                with _connect(context, port) as secure:
                    secure.sendall(head)
                    _read_response(secure, buffer)
                    latencies.append(time.perf_counter() - started)
                    while secure.recv_into(buffer, _READ_BYTES):
                        pass  # the proxy closes first
        except (OSError, RefusedError) as exc:
            failures.append(exc)

    crew = [threading.Thread(target=run) for _ in range(threads)]
    started = time.perf_counter()
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    duration = time.perf_counter() - started
    if failures:
        raise RefusedError(f"{len(failures)} of {threads} threads failed: {failures[0]!r}")
    latencies.sort()
    p99 = latencies[min(len(latencies) - 1, len(latencies) * 99 // 100)]
    return {"requests": len(latencies), "duration_us": duration * 1e6, "p99_us": p99 * 1e6, "errors": 0}


def _transfers(port: int, times: int, one: Callable[[ssl.SSLSocket], int]) -> dict[str, object]:
    with _connect(_context(), port) as secure:
        started = time.perf_counter()
        slowest = 0.0
        total = 0
        for _ in range(times):
            begun = time.perf_counter()
            total += one(secure)
            slowest = max(slowest, time.perf_counter() - begun)
        duration = time.perf_counter() - started
    return {"requests": times, "bytes": total, "duration_us": duration * 1e6, "p99_us": slowest * 1e6, "errors": 0}


def downloads(port: int, path: str, times: int) -> dict[str, object]:
    """``times`` GETs of ``path`` one after the other on one connection."""
    buffer = bytearray(_READ_BYTES)
    head = _request_head("GET", path, port)

    def one(secure: ssl.SSLSocket) -> int:
        secure.sendall(head)
        return _read_response(secure, buffer)

    return _transfers(port, times, one)


def uploads(port: int, path: str, times: int, size: int) -> dict[str, object]:
    """``times`` POSTs of ``size`` bytes to ``path`` one after the other on one connection."""
    buffer = bytearray(_READ_BYTES)
    head = _request_head("POST", path, port, f"Content-Length: {size}")
    piece = memoryview(bytes(_READ_BYTES))

    def one(secure: ssl.SSLSocket) -> int:
        secure.sendall(head)
        for start in range(0, size, _READ_BYTES):
            secure.sendall(piece[: size - start])
        _read_response(secure, buffer)
        return size

    return _transfers(port, times, one)


def idle(port: int, path: str) -> None:
    """Hold connections that served one request each: an input line says how many more to open, its end to close."""
    context = _context()
    buffer = bytearray(_READ_BYTES)
    head = _request_head("GET", path, port)
    held: list[ssl.SSLSocket] = []
    for line in sys.stdin:
        for _ in range(int(line)):
            secure = _connect(context, port)
            secure.sendall(head)
            _read_response(secure, buffer)
            held.append(secure)
        print(json.dumps({"held": len(held)}), flush=True)
    for secure in held:
        secure.close()


def main() -> int:
    """Run the command of the command line; 1 and a message on standard error when the proxy did not play along."""
    parser = argparse.ArgumentParser(prog="tests.bench.client")
    parser.add_argument("command", choices=("probe", "handshakes", "downloads", "uploads", "idle"))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--path", required=True)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--size", type=int, default=0)
    options = parser.parse_args()
    try:
        if options.command == "idle":
            idle(options.port, options.path)
            return 0
        if options.command == "probe":
            result = probe(options.port, options.path)
        elif options.command == "handshakes":
            result = handshakes(options.port, options.path, options.count, options.threads)
        elif options.command == "downloads":
            result = downloads(options.port, options.path, options.count)
        else:
            result = uploads(options.port, options.path, options.count, options.size)
    except (OSError, RefusedError) as exc:
        print(f"{options.command}: {exc}", file=sys.stderr)
        return 1
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
