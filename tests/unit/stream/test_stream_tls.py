"""The TLS stream, on either side, against the standard library's blocking sockets and against itself."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import ssl
import struct
import time
from pathlib import Path

import pytest

from proxy.stream.stream import HIGH_WATER_BYTES, TlsStream
from tests.unit.stream.rig import Recorder, Rig, read_all
from tests.unit.tls.pki import Authority

MIB = 1 << 20


class Contexts:
    """Both sides' contexts, of one authority."""

    def __init__(self, folder: Path) -> None:
        authority = Authority(folder)
        certificate = authority.issue("localhost")
        self.server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.server.load_cert_chain(certificate["chain"], certificate["key"])
        self.client = authority.client()
        # As the proxy's own client side has it: Python sets it differently from version to version.
        self.client.options &= ~ssl.OP_IGNORE_UNEXPECTED_EOF


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> Contexts:
    return Contexts(tmp_path_factory.mktemp("tls"))


def served(rig: Rig, contexts: Contexts, write_timeout_secs: float = 10.0) -> tuple[TlsStream, Recorder, ssl.SSLSocket]:
    """A server's stream after the handshake, and its client."""
    ours, peer = rig.pair()
    stream, seen = rig.tls_stream(ours, contexts.server, server=True, write_timeout_secs=write_timeout_secs)
    client = rig.in_thread(lambda: contexts.client.wrap_socket(peer, server_hostname="localhost"))
    rig.socks.append(client)
    rig.run_until(lambda: "open" in seen.events, "the handshake")
    return stream, seen, client


def asking(rig: Rig, contexts: Contexts) -> tuple[TlsStream, Recorder, ssl.SSLSocket]:
    """A client's stream after the handshake, and its server."""
    ours, peer = rig.pair()
    stream, seen = rig.tls_stream(ours, contexts.client, server=False)
    server = rig.in_thread(lambda: contexts.server.wrap_socket(peer, server_side=True))
    rig.socks.append(server)
    rig.run_until(lambda: "open" in seen.events, "the handshake")
    return stream, seen, server


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


# -- the handshake


def test_the_handshake_is_told_once_and_data_may_come_right_behind_it(rig: Rig, contexts: Contexts) -> None:
    stream, seen, client = served(rig, contexts)
    assert (seen.events, stream.handshaking, stream.tls.version()) == (["open"], False, "TLSv1.3")
    client.sendall(b"abc")
    rig.run_until(lambda: seen.received == b"abc", "the data")
    stream.write(b"xyz")
    stream.close()
    seen.ended = True
    assert read_all(client) == b"xyz"


@pytest.mark.parametrize("split", [1, 5, 100])
def test_a_handshake_in_small_pieces(rig: Rig, contexts: Contexts, split: int) -> None:
    ours, peer = rig.pair()
    stream, seen = rig.tls_stream(ours, contexts.server, server=True)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = contexts.client.wrap_bio(incoming, outgoing, server_hostname="localhost")
    done = False
    while "open" not in seen.events:
        if not done:
            try:
                client.do_handshake()
                done = True
            except ssl.SSLWantReadError:
                pass
        for at in range(0, len(hello := outgoing.read()), split):
            peer.sendall(hello[at : at + split])
            rig.turn(0)
        rig.turn(0.005)
        if not done:
            incoming.write(peer.recv(65_536))
    assert seen.events == ["open"]
    stream.close()


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n", bytes(100), b"\x16\x03\x01\xff\xff"], ids=["http", "zeros", "length"]
)
def test_what_is_no_handshake_is_lost_with_the_reason(rig: Rig, contexts: Contexts, garbage: bytes) -> None:
    ours, peer = rig.pair()
    _, seen = rig.tls_stream(ours, contexts.server, server=True)
    peer.sendall(garbage)
    peer.shutdown(socket.SHUT_WR)
    rig.run_until(lambda: seen.events, "the failure")
    rig.turn()
    assert (seen.events, seen.releases) == (["lost"], 1)
    assert isinstance(seen.errors[0], ssl.SSLError)


@pytest.mark.parametrize("way", ["end", "reset"])
def test_a_client_that_leaves_inside_the_handshake(rig: Rig, contexts: Contexts, way: str) -> None:
    ours, peer = rig.pair()
    _, seen = rig.tls_stream(ours, contexts.server, server=True)
    peer.sendall(b"\x16\x03\x01\x02\x00\x01")
    rig.turn()
    peer.close() if way == "end" else reset(peer)
    rig.run_until(lambda: seen.events, "it is lost")
    rig.turn()
    assert (seen.events, seen.releases) == (["lost"], 1)


@pytest.mark.parametrize("way", ["close", "abort"])
def test_ended_inside_the_handshake(rig: Rig, contexts: Contexts, way: str) -> None:
    ours, peer = rig.pair()
    stream, seen = rig.tls_stream(ours, contexts.server, server=True)
    peer.sendall(b"\x16\x03\x01\x02\x00\x01")
    rig.turn()
    getattr(stream, way)()
    seen.ended = True
    assert seen.releases == 1
    peer.close()
    rig.turn()
    assert seen.events == []


def test_closed_while_the_handshake_waits_to_write(rig: Rig, contexts: Contexts) -> None:
    """The state in which the writer is registered although nothing of the user's is buffered."""
    ours, peer = rig.pair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with contextlib.suppress(BlockingIOError):
        while True:
            ours.send(bytes(4096))  # no room is left for the server's part
    stream, seen = rig.tls_stream(ours, contexts.server, server=True)
    outgoing = ssl.MemoryBIO()
    client = contexts.client.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    peer.sendall(outgoing.read())
    rig.turn()
    assert (seen.events, stream.handshaking) == ([], True)
    stream.close()
    seen.ended = True
    assert (seen.releases, stream.closed) == (1, True)


# -- input and output


def test_one_wakeup_takes_a_bounded_amount_and_nothing_is_left_lying(rig: Rig, contexts: Contexts) -> None:
    _, seen, client = served(rig, contexts)
    data = os.urandom(3 * MIB + 17)
    sizes: list[int] = []

    def on_event(_event: str) -> None:
        sizes.append(len(seen.received) - sum(sizes))

    seen.on_event = on_event
    rig.in_thread(lambda: client.sendall(data))
    rig.run_until(lambda: len(seen.received) == len(data), "all of it")
    assert seen.received == data
    assert max(sizes) <= 65_536


def test_32_mib_each_way_arrive_intact(rig: Rig, contexts: Contexts) -> None:
    """An echo: both sides are our streams, and each is held back by the other."""
    ours, theirs = rig.pair()
    theirs.setblocking(False)
    server, served = rig.tls_stream(ours, contexts.server, server=True)
    client, asked = rig.tls_stream(theirs, contexts.client, server=False)
    block, total = os.urandom(MIB), 32
    received = hashlib.sha256()
    left_to_send, left_to_receive = total, total * MIB
    high = 0

    def echo(event: str) -> None:
        nonlocal high
        if event == "data":
            server.write(bytes(served.received))
            served.received.clear()
            high = max(high, server.buffered)
            if server.buffered > HIGH_WATER_BYTES:
                server.pause_reading()
        elif event == "drained":
            server.resume_reading()

    def send(event: str) -> None:
        nonlocal left_to_send, left_to_receive
        received.update(asked.received)
        left_to_receive -= len(asked.received)
        asked.received.clear()
        if event in ("open", "drained"):
            while left_to_send and not client.buffered:
                left_to_send -= 1
                client.write(block)

    served.on_event, asked.on_event = echo, send
    rig.run_until(lambda: left_to_receive <= 0, "all of it")
    assert (left_to_send, left_to_receive) == (0, 0)
    assert received.digest() == hashlib.sha256(block * total).digest()
    assert high <= HIGH_WATER_BYTES + 65_536, "one wake-up over the mark at most"
    client.close()
    asked.ended = True
    rig.run_until(lambda: "eof" in served.events, "the goodbye")


def test_what_is_buffered_at_a_close_arrives_with_the_goodbye(rig: Rig, contexts: Contexts) -> None:
    stream, seen, client = served(rig, contexts)
    client.suppress_ragged_eofs = False  # type: ignore[attr-defined]  # an end without close_notify would raise
    data = os.urandom(16 * MIB)
    stream.write(data)
    assert stream.buffered
    stream.close()
    seen.ended = True
    assert rig.in_thread(lambda: read_all(client)) == data
    assert seen.releases == 1


def test_an_aborted_stream_cannot_be_taken_for_complete(rig: Rig, contexts: Contexts) -> None:
    stream, seen, client = served(rig, contexts)
    stream.write(b"part of it")
    stream.abort()
    seen.ended = True
    client.suppress_ragged_eofs = False  # type: ignore[attr-defined]
    with pytest.raises(OSError, match=r"reset|EOF"):
        read_all(client)


def test_a_write_deadline_while_closing_releases(rig: Rig, contexts: Contexts) -> None:
    stream, seen, _client = served(rig, contexts, write_timeout_secs=0.2)
    stream.write(bytes(32 * MIB))
    stream.close()
    seen.ended = True
    rig.run_until(lambda: seen.releases, "the deadline")


def test_a_close_inside_the_write_deadline_is_bounded_too(rig: Rig, contexts: Contexts) -> None:
    stream, seen, _client = served(rig, contexts, write_timeout_secs=0.2)

    def on_event(event: str) -> None:
        if event == "write deadline":
            stream.close()
            seen.ended = True

    seen.on_event = on_event
    stream.write(bytes(32 * MIB))
    rig.run_until(lambda: seen.releases, "it is released")


# -- the peer's end


def test_a_clean_end_is_eof(rig: Rig, contexts: Contexts) -> None:
    stream, seen, server = asking(rig, contexts)
    rig.in_thread(lambda: server.sendall(b"whole"))
    server.setblocking(False)
    with pytest.raises(ssl.SSLWantReadError):
        server.unwrap()
    rig.run_until(lambda: "eof" in seen.events, "the end")
    assert seen.received == b"whole"
    assert (seen.events[-1], stream.closed) == ("eof", False)


def test_a_truncated_end_is_lost_on_the_client_side(rig: Rig, contexts: Contexts) -> None:
    """RFC 8446 section 6.1: without close_notify what came may be a part, and a body may end with the connection."""
    stream, seen, server = asking(rig, contexts)
    rig.in_thread(lambda: server.sendall(b"part"))
    rig.run_until(lambda: seen.received == b"part", "the data")
    socket.socket.shutdown(server, socket.SHUT_WR)
    rig.run_until(lambda: len(seen.events) > 2, "the end")
    rig.turn()
    assert (seen.events, stream.closed, seen.releases) == (["open", "data", "lost"], True, 1)


def test_a_truncated_end_is_eof_on_the_server_side(rig: Rig, contexts: Contexts) -> None:
    _, seen, client = served(rig, contexts)
    socket.socket.shutdown(client, socket.SHUT_WR)
    rig.run_until(lambda: len(seen.events) > 1, "the end")
    assert seen.events == ["open", "eof"]


def test_a_reset_is_lost(rig: Rig, contexts: Contexts) -> None:
    _, seen, server = asking(rig, contexts)
    reset(server)
    rig.run_until(lambda: len(seen.events) > 1, "the reset")
    assert (seen.events, seen.releases) == (["open", "lost"], 1)


def test_a_reset_is_told_once_on_the_server_side_too(rig: Rig, contexts: Contexts) -> None:
    _, seen, client = served(rig, contexts)
    reset(client)
    rig.run_until(lambda: len(seen.events) > 1, "the reset")
    rig.turn()
    # Python before 3.13 takes a reset in SSL_read_ex for an end without close_notify.
    assert seen.events in (["open", "lost"], ["open", "eof"])


def test_a_failed_write_is_told_once(rig: Rig, contexts: Contexts) -> None:
    stream, seen, client = served(rig, contexts)
    stream.pause_reading()
    reset(client)
    rig.turn()
    stream.write(b"one")
    stream.write(b"two")
    rig.run_until(lambda: len(seen.events) > 1, "the failure")
    rig.turn()
    assert seen.events == ["open", "write failed"]
    stream.close()
    assert seen.releases == 1


# -- half close


def test_half_closed_the_peer_reads_the_end_and_may_still_send(rig: Rig, contexts: Contexts) -> None:
    stream, seen, client = served(rig, contexts)
    stream.write(b"last words")
    stream.shut_down_writing()
    assert read_all(client) == b"last words"
    client.sendall(b"an answer")
    rig.run_until(lambda: seen.received == b"an answer", "the answer")
    stream.close()
    assert seen.releases == 1


def test_goodbyes_that_cross_are_an_end_and_no_fault(rig: Rig, contexts: Contexts) -> None:
    """Our close_notify goes out when the peer's is in the socket already and not read yet."""
    stream, seen, client = served(rig, contexts)
    client.setblocking(False)
    with pytest.raises(ssl.SSLWantReadError):
        client.unwrap()
    time.sleep(0.05)  # the loop does not run: the peer's goodbye waits in the socket
    stream.shut_down_writing()
    rig.turn()
    client.close()
    rig.turn()
    assert seen.events == ["open", "eof"]
    stream.close()
    assert seen.releases == 1


def test_lingering_below_tls(rig: Rig, contexts: Contexts) -> None:
    stream, seen, client = served(rig, contexts)

    def on_input() -> None:
        if stream.read_raw() < 0:
            stream.close()

    stream.write(b"answer")
    stream.drop_input(on_input)
    stream.shut_down_writing()
    seen.ended = True

    def work() -> bytes:
        for _ in range(32):
            client.sendall(bytes(65_536))
        answer = read_all(client)
        client.close()
        return answer

    assert rig.in_thread(work) == b"answer"
    rig.run_until(lambda: seen.releases, "it is released")
