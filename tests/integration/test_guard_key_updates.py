"""A client that sends nothing but KeyUpdate messages (RFC 8446 section 4.6.3) holds nobody up for long.

Python cannot send them, so OpenSSL is asked through ctypes for a session's own SSL object, in memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import ssl
import threading
import time
from pathlib import Path

from tests.conftest import StartAppliance
from tests.harness import RawUpstream, wait_until
from tests.harness.upstream import answering

UPDATES = 300_000
PATIENCE_SECS = 10.0
"""Ten times the second that a good client may have to wait."""
_SSL_AT = 24
"""Where CPython 3.11 to 3.14 keep the SSL pointer in an _ssl._SSLSocket: behind the head and one reference."""


def libssl() -> ctypes.CDLL:
    maps = Path("/proc/self/maps").read_text().splitlines()
    library = ctypes.CDLL(next(line.split()[-1] for line in maps if "libssl" in line))
    library.SSL_key_update.argtypes = [ctypes.c_void_p, ctypes.c_int]
    library.SSL_do_handshake.argtypes = [ctypes.c_void_p]
    return library


def flood(port: int) -> tuple[socket.socket, bytes]:
    """A connection whose handshake is done, and many megabytes of KeyUpdate records for it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    sock = socket.create_connection(("127.0.0.1", port))
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
    while True:
        try:
            tls.do_handshake()
            break
        except ssl.SSLWantReadError:
            sock.sendall(outgoing.read())
            incoming.write(sock.recv(65536))
    sock.sendall(outgoing.read())
    assert tls.version() == "TLSv1.3"
    library = libssl()
    pointer = ctypes.c_void_p.from_address(id(tls._sslobj) + _SSL_AT).value  # type: ignore[attr-defined]
    for _ in range(UPDATES):
        library.SSL_key_update(pointer, 0)
        library.SSL_do_handshake(pointer)
    return sock, outgoing.read()


def test_a_flood_of_key_updates_ends_its_connection_and_no_other(appliance: StartAppliance) -> None:
    with RawUpstream(answering()) as upstream, contextlib.ExitStack() as stack:
        one = appliance({"worker_heartbeat_timeout_secs": 10}, upstream=upstream.url)
        workers = one.workers
        sock, records = flood(one.port)
        held = stack.enter_context(one.connect())

        def send() -> None:
            with contextlib.suppress(OSError):
                sock.sendall(records)

        thread = threading.Thread(target=send)
        thread.start()
        try:
            slowest = 0.0
            for _ in range(5):
                begun = time.monotonic()
                held.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                held.read_response("GET")
                slowest = max(slowest, time.monotonic() - begun)
            assert slowest < PATIENCE_SECS
            # On a busy machine the flood may come so slowly that no read lasts, and that the worker takes all of it.
            wait_until(
                lambda: not thread.is_alive() or any(" tls.read_stuck " in line for line in one.event_lines()),
                "it is told, or over",
                60.0,
            )
            thread.join(PATIENCE_SECS)
            assert not thread.is_alive(), "the flood still goes on"
            if any(" tls.read_stuck " in line for line in one.event_lines()):
                wait_until(
                    lambda: sum(worker["permits_held"] for worker in one.status()["workers"]) == 1,
                    "the one that was cut is gone although its socket is still open, and only the held one is there",
                    PATIENCE_SECS,
                )
        finally:
            sock.close()
            thread.join()
        assert one.workers == workers, "the worker was replaced"
        assert not any(" worker.hung " in line for line in one.event_lines())
        print(f"the slowest of 5 good requests took {slowest:.2f} s")
