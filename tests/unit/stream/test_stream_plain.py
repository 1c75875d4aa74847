"""The plain stream over real sockets: every way of writing, pausing and ending."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import struct
import time

import pytest

from proxy.stream.stream import HIGH_WATER_BYTES, LOW_WATER_BYTES, Stream
from tests.unit.stream.rig import Recorder, Rig, read_all

MIB = 1 << 20


def small_buffers(*socks: socket.socket) -> None:
    for sock in socks:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)


def read_exactly(sock: socket.socket, count: int) -> None:
    while count:
        piece = sock.recv(min(count, MIB))
        assert piece
        count -= len(piece)


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def fill(stream: Stream) -> None:
    """Write until the kernel takes no more."""
    while not stream.buffered:
        stream.write(bytes(HIGH_WATER_BYTES))


def descriptor_is_open(fd: int) -> bool:
    return os.path.exists(f"/proc/self/fd/{fd}")


# -- input


def test_data_and_the_end_arrive_in_order(rig: Rig) -> None:
    ours, peer = rig.pair()
    stream, seen = rig.stream(ours)
    peer.sendall(b"abc")
    rig.run_until(lambda: seen.received == b"abc", "the data")
    peer.shutdown(socket.SHUT_WR)
    rig.run_until(lambda: "eof" in seen.events, "the end")
    rig.turn()
    assert seen.events == ["data", "eof"], "the end is told once"
    assert (stream.closed, stream.bytes_read) == (False, 3)


def test_paused_it_takes_nothing_and_resumed_all(rig: Rig) -> None:
    ours, peer = rig.pair()
    stream, seen = rig.stream(ours)
    stream.pause_reading()
    stream.pause_reading()
    peer.sendall(b"abc")
    rig.turn()
    assert (seen.events, stream.reading) == ([], False)
    stream.resume_reading()
    stream.resume_reading()
    rig.run_until(lambda: seen.received == b"abc", "the data")


def test_a_paused_stream_holds_the_peer_back(rig: Rig) -> None:
    ours, peer = rig.pair()
    small_buffers(ours, peer)
    stream, seen = rig.stream(ours)
    stream.pause_reading()
    peer.setblocking(False)
    sent = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            sent += peer.send(bytes(MIB))
            assert sent < 64 * MIB
    stream.resume_reading()
    rig.run_until(lambda: len(seen.received) == sent, "everything that was sent")


def test_a_reset_is_told_once_and_closes(rig: Rig) -> None:
    ours, peer = rig.pair()
    stream, seen = rig.stream(ours)
    reset(peer)
    rig.run_until(lambda: seen.events, "the reset")
    assert (seen.events, stream.closed, seen.releases) == (["lost"], True, 1)
    assert isinstance(seen.errors[0], ConnectionResetError)
    stream.close()
    stream.abort()
    stream.write(b"nothing happens")
    assert seen.releases == 1


def test_in_on_lost_the_descriptor_is_closed_and_release_comes_after(rig: Rig) -> None:
    ours, peer = rig.pair()
    fd = ours.fileno()
    _, seen = rig.stream(ours)
    found: list[tuple[bool, int]] = []
    seen.on_event = lambda _: found.append((descriptor_is_open(fd), seen.releases))
    reset(peer)
    rig.run_until(lambda: found, "the reset")
    assert found == [(False, 0)]
    assert seen.releases == 1


def test_a_handler_that_raises_in_on_lost_does_not_keep_the_release(rig: Rig) -> None:
    ours, peer = rig.pair()
    _, seen = rig.stream(ours)

    def fail(event: str) -> None:
        raise RuntimeError(event)

    seen.on_event = fail
    reset(peer)
    rig.run_until(lambda: rig.faults, "the loop's exception handler")
    rig.turn()
    assert (seen.releases, len(rig.faults)) == (1, 1)
    rig.faults.clear()


# -- output


def test_what_the_kernel_does_not_take_is_buffered_and_arrives_intact(rig: Rig) -> None:
    ours, peer = rig.pair()
    small_buffers(ours, peer)
    stream, seen = rig.stream(ours)
    pieces = [os.urandom(size) for size in (1, 300_000, 7, 8 * MIB, 16_385)]
    for piece in pieces:
        stream.write(piece)
    assert stream.buffered > HIGH_WATER_BYTES
    stream.close()
    seen.ended = True
    assert rig.in_thread(lambda: read_all(peer)) == b"".join(pieces)
    assert (seen.releases, stream.bytes_written) == (1, sum(map(len, pieces)))


def test_drained_comes_at_the_low_water_mark_and_when_empty(rig: Rig) -> None:
    ours, peer = rig.pair()
    small_buffers(ours, peer)
    stream, seen = rig.stream(ours)
    stream.write(bytes(8 * MIB))
    levels: list[int] = []
    seen.on_event = lambda _: levels.append(stream.buffered)
    rig.in_thread(lambda: read_exactly(peer, 8 * MIB))
    rig.run_until(lambda: not stream.buffered, "all is sent")
    assert set(seen.events) == {"drained"}
    assert levels[-1] == 0
    assert all(level <= LOW_WATER_BYTES for level in levels)
    assert len(levels) <= 2


def test_100_mib_through_two_streams_with_back_pressure_stay_intact(rig: Rig) -> None:
    """As a relay does it: what comes in on one goes out on the other, which holds the first back."""
    source, client = rig.pair()
    sink, server = rig.pair()
    incoming, seen = rig.stream(source)
    outgoing, drained = rig.stream(sink)
    high = 0

    def relay(event: str) -> None:
        nonlocal high
        data = bytes(seen.received)
        seen.received.clear()
        if event == "eof":
            outgoing.close()
            return
        outgoing.write(data)
        high = max(high, outgoing.buffered)
        if outgoing.buffered > HIGH_WATER_BYTES:
            incoming.pause_reading()

    seen.on_event = relay
    drained.on_event = lambda _: incoming.resume_reading()
    sent, got = hashlib.sha256(), hashlib.sha256()

    def send() -> None:
        for number in range(100):
            block = hashlib.sha256(b"%d" % number).digest() * (MIB // 32)
            sent.update(block)
            client.sendall(block)
        client.shutdown(socket.SHUT_WR)

    def receive() -> int:
        total = 0
        while piece := server.recv(MIB):
            got.update(piece)
            total += len(piece)
        return total

    sending = rig.loop.run_in_executor(None, send)
    assert rig.in_thread(receive) == 100 * MIB
    rig.loop.run_until_complete(sending)
    assert got.digest() == sent.digest()
    assert high <= HIGH_WATER_BYTES + 65_536, "one read over the mark at most"


def test_a_failed_write_is_told_once_and_not_from_inside_write(rig: Rig) -> None:
    ours, peer = rig.pair()
    stream, seen = rig.stream(ours)
    stream.pause_reading()  # so that the reset is met by the write
    reset(peer)
    rig.turn()
    stream.write(b"one")
    stream.write(b"two")
    stream.write(b"three")
    assert seen.events == []
    rig.run_until(lambda: seen.events, "the failure")
    rig.turn()
    assert seen.events == ["write failed"]
    assert (stream.closed, stream.buffered) == (False, 0)
    stream.close()
    seen.ended = True
    assert seen.releases == 1


def test_buffered_output_that_fails_is_told_and_input_still_comes(rig: Rig) -> None:
    ours, peer = rig.pair()
    small_buffers(ours, peer)
    stream, seen = rig.stream(ours)
    stream.pause_reading()
    fill(stream)
    reset(peer)
    rig.run_until(lambda: seen.events, "the failure")
    assert (seen.events, stream.buffered) == (["write failed"], 0)
    stream.resume_reading()
    rig.run_until(lambda: len(seen.events) > 1, "the end of input")
    assert seen.events[1] in ("lost", "eof")


def test_a_write_failure_is_not_told_after_a_close_in_the_same_turn(rig: Rig) -> None:
    ours, peer = rig.pair()
    stream, seen = rig.stream(ours)
    stream.pause_reading()
    reset(peer)
    rig.turn()
    stream.write(b"one")
    stream.close()
    seen.ended = True
    rig.turn()
    assert (seen.events, seen.releases) == ([], 1)


# -- the end


@pytest.mark.parametrize("way", ["close", "abort"])
def test_closed_it_tells_nothing_more(rig: Rig, way: str) -> None:
    ours, peer = rig.pair()
    fd = ours.fileno()
    stream, seen = rig.stream(ours)
    stream.expect(time.monotonic() + 0.05)
    peer.sendall(b"unread")
    getattr(stream, way)()
    getattr(stream, way)()
    seen.ended = True
    rig.turn(0.3)
    assert (seen.events, seen.releases, stream.closed, descriptor_is_open(fd)) == ([], 1, True, False)


@pytest.mark.parametrize("way", ["close", "abort"])
@pytest.mark.parametrize("event", ["data", "eof", "drained", "read deadline", "write deadline", "write failed"])
def test_it_may_be_closed_inside_every_callback(rig: Rig, event: str, way: str) -> None:
    ours, peer = rig.pair()
    small_buffers(ours, peer)
    stream, seen = rig.stream(ours, write_timeout_secs=0.1)

    def end(name: str) -> None:
        if name == event:
            getattr(stream, way)()
            seen.ended = True

    seen.on_event = end
    if event == "data":
        peer.sendall(b"abc")
    elif event == "eof":
        peer.shutdown(socket.SHUT_WR)
    elif event == "read deadline":
        stream.expect(time.monotonic() + 0.05)
    elif event == "write failed":
        stream.pause_reading()
        reset(peer)
        rig.turn()
        stream.write(b"x")
    else:
        fill(stream)
        if event == "drained":
            peer.setblocking(False)
            rig.loop.add_reader(peer, lambda: peer.recv(MIB))
    rig.run_until(lambda: seen.releases, "it is released")
    if event == "drained":
        rig.loop.remove_reader(peer)
    rig.turn(0.25)
    assert seen.events.count(event) == 1


def test_close_ends_cleanly_and_abort_with_a_reset(rig: Rig) -> None:
    ours, peer = rig.pair()
    stream, _ = rig.stream(ours)
    stream.write(b"all of it")
    stream.close()
    assert read_all(peer) == b"all of it"

    ours, peer = rig.pair()
    small_buffers(ours, peer)
    stream, seen = rig.stream(ours)
    fill(stream)
    stream.abort()
    assert seen.releases == 1
    with pytest.raises(ConnectionResetError):
        read_all(peer)


def test_a_close_that_the_peer_does_not_read_ends_at_the_write_deadline(rig: Rig) -> None:
    ours, peer = rig.pair()
    small_buffers(ours, peer)
    stream, seen = rig.stream(ours, write_timeout_secs=0.2)
    fill(stream)
    stream.close()
    seen.ended = True
    assert seen.releases == 0
    rig.run_until(lambda: seen.releases, "the deadline")
    assert stream.closed


def test_a_close_whose_flush_fails_is_released(rig: Rig) -> None:
    ours, peer = rig.pair()
    small_buffers(ours, peer)
    stream, seen = rig.stream(ours)
    fill(stream)
    stream.close()
    seen.ended = True
    reset(peer)
    rig.run_until(lambda: seen.releases, "it is released")


def test_an_abort_while_a_close_flushes_releases_once(rig: Rig) -> None:
    ours, peer = rig.pair()
    small_buffers(ours, peer)
    stream, seen = rig.stream(ours)
    fill(stream)
    stream.close()
    stream.abort()
    seen.ended = True
    rig.turn()
    assert (seen.releases, seen.events) == (1, [])


def test_half_closed_it_still_reads(rig: Rig) -> None:
    ours, peer = rig.pair()
    stream, seen = rig.stream(ours)
    stream.write(b"question")
    stream.shut_down_writing()
    assert read_all(peer) == b"question"
    peer.sendall(b"answer")
    rig.run_until(lambda: seen.received == b"answer", "the answer")
    peer.close()
    rig.run_until(lambda: "eof" in seen.events, "the end")
    stream.shut_down_writing()
    stream.close()
    assert seen.releases == 1


def test_a_lingering_close_lets_a_client_that_still_sends_read_the_answer(rig: Rig) -> None:
    ours, peer = rig.pair()
    stream, seen = rig.stream(ours)

    def on_input() -> None:
        if stream.read_raw() < 0:
            stream.close()

    stream.write(b"answer")
    stream.drop_input(on_input)
    stream.shut_down_writing()
    seen.ended = True

    def client() -> bytes:
        for _ in range(64):
            peer.sendall(bytes(65_536))
        peer.shutdown(socket.SHUT_WR)
        return read_all(peer)

    assert rig.in_thread(client) == b"answer"
    rig.run_until(lambda: seen.releases, "it is released")


def test_closing_leaves_nothing_behind_for_the_next_user_of_the_number(rig: Rig) -> None:
    """An event loop that still knew the descriptor would call the old stream for the new socket."""
    for _ in range(50):
        ours, peer = rig.pair()
        small_buffers(ours, peer)
        stream, _ = rig.stream(ours)
        fill(stream)
        fd = ours.fileno()
        stream.abort()
        again, other = rig.pair()
        following, seen = rig.stream(again)
        other.sendall(b"mine")
        rig.run_until(lambda seen=seen: seen.received == b"mine", "the new one's data")  # type: ignore[misc]
        following.close()
        assert not descriptor_is_open(fd) or fd != ours.fileno()


# -- deadlines


def test_deadlines_come_once_each_and_progress_moves_the_write_deadline(rig: Rig) -> None:
    ours, peer = rig.pair()
    small_buffers(ours, peer)
    stream, seen = rig.stream(ours, write_timeout_secs=0.4)
    stream.expect(time.monotonic() + 0.1)
    start = time.monotonic()
    stream.write(bytes(16 * MIB))
    while time.monotonic() < start + 1.0:  # the peer reads a little now and then
        rig.in_thread(lambda: read_exactly(peer, MIB // 2))
        rig.turn(0.1)
    assert seen.events == ["read deadline"]
    rig.run_until(lambda: len(seen.events) > 1, "the write deadline")
    rig.turn(0.6)
    assert seen.events == ["read deadline", "write deadline"]


def test_recorders_see_late_callbacks() -> None:
    """The check that the other tests rest on can fail."""
    seen = Recorder()
    seen.ended = True
    seen.on_data(b"x")
    assert seen.late == ["data"]


# -- a reset right behind data: uvloop stops watching such a descriptor


def reset_behind(peer: socket.socket, data: bytes) -> None:
    peer.sendall(data)
    time.sleep(0.05)
    reset(peer)
    time.sleep(0.05)  # the loop does not run: data and reset are one event


def test_a_reset_behind_more_than_one_read_is_met_with_all_the_data(rig: Rig) -> None:
    ours, peer = rig.pair()
    _, seen = rig.stream(ours)
    reset_behind(peer, bytes(100_000))
    rig.run_until(lambda: seen.events[-1:] in (["lost"], ["eof"]), "the reset")
    assert len(seen.received) == 100_000


def test_a_reset_behind_data_is_met_where_it_is_asked_for(rig: Rig) -> None:
    ours, peer = rig.pair()
    stream, seen = rig.stream(ours)

    def on_event(event: str) -> None:
        if event == "data":
            stream.keep_watching()

    seen.on_event = on_event
    reset_behind(peer, b"abc")
    rig.run_until(lambda: seen.events == ["data", "lost"], "the reset")


def test_input_can_be_dropped_after_a_reset_behind_data(rig: Rig) -> None:
    ours, peer = rig.pair()
    stream, seen = rig.stream(ours)
    reset_behind(peer, b"abc")
    rig.run_until(lambda: seen.events == ["data"], "the data")
    rig.turn()
    raw: list[int] = []

    def on_input() -> None:
        raw.append(stream.read_raw())
        stream.close()

    stream.drop_input(on_input)
    rig.run_until(lambda: seen.releases, "it is released")
    assert raw == [-1]
