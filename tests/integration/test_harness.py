"""What the tests themselves stand on."""

from __future__ import annotations

import threading

from tests.conftest import StartAppliance
from tests.harness import RawUpstream, Wire

PIECE = bytes(50_000)
COUNT = 20_000
REQUEST = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % (COUNT * len(PIECE))
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % COUNT


def count_pieces(wire: Wire) -> None:
    """Answers with one byte for each piece, so that the client waits for most of them."""
    wire.read_head()
    wire.send(HEAD)
    for _ in range(COUNT):
        wire.read_exactly(len(PIECE))
        wire.send(b".")


def test_one_thread_sends_over_tls_while_another_reads(appliance: StartAppliance) -> None:
    """OpenSSL allows one call at a time to a connection; two at once ended in SSLEOFError now and then."""
    with RawUpstream(count_pieces) as upstream, appliance({}, upstream=upstream.url).connect() as client:
        client.send(REQUEST)

        def send() -> None:
            for _ in range(COUNT):
                client.send(PIECE)

        sender = threading.Thread(target=send)
        sender.start()
        try:
            client.read_head()
            assert all(client.read_exactly(1) == b"." for _ in range(COUNT))
        finally:
            client.close()
            sender.join()
