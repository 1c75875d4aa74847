"""What goes out in which order, and who is held back when."""

from __future__ import annotations

import pytest

from proxy.protocol.http2 import (
    ENHANCE_YOUR_CALM,
    Body,
    ConnectionFailed,
    Limits,
    Rate,
    Request,
    StreamReset,
    encode_response,
)
from proxy.protocol.http2.priority import UNSIGNALLED, Priority, parse_priority
from tests.harness import http2 as h
from tests.harness.http2 import GET, POST, ClientPeer

OK = encode_response(200, [])
WIDE = 2**30
FRAME = 16_384


def opened(*priorities: str | None, window: int = WIDE) -> ClientPeer:
    """A peer with streams 1, 3, ... of these priorities, each with four frames to send."""
    peer = ClientPeer()
    peer.feed(h.window_update(0, WIDE), h.settings((0x4, window)))
    for number, priority in enumerate(priorities):
        extra = [] if priority is None else [("priority", priority)]
        peer.feed(h.headers(2 * number + 1, [*GET, *extra]))
    peer.frames.clear()
    for number in range(len(priorities)):
        peer.connection.send_head(2 * number + 1, OK)
        peer.connection.send_data(2 * number + 1, bytes(4 * FRAME), end_stream=True)
    return peer


def order(peer: ClientPeer) -> list[int]:
    return [f.stream_id for f in peer.of(h.DATA)]


@pytest.mark.parametrize(
    ("value", "priority"),
    [
        (b"u=1", Priority(1, False)),
        (b"u=7, i", Priority(7, True)),
        (b"i=?1,u=0", Priority(0, True)),
        (b"i=?0", Priority(3, False)),
        (b"u=9, i;a=b, x", Priority(3, True)),
        (b"", Priority(3, False)),
        (b"u=1" + b" " * 300, UNSIGNALLED),
    ],
)
def test_priority_fields(value: bytes, priority: Priority) -> None:
    assert parse_priority(value) == priority


def test_the_more_urgent_goes_first() -> None:
    peer = opened("u=5", "u=1", "u=3")
    peer.take()
    assert order(peer) == [3] * 4 + [5] * 4 + [1] * 4


def test_the_incremental_take_turns() -> None:
    peer = opened("i", "i")
    peer.take()
    assert order(peer) == [1, 3] * 4


def test_those_that_say_nothing_take_turns() -> None:
    peer = opened(None, None, None)
    peer.take()
    assert order(peer) == [1, 3, 5] * 4


def test_those_that_are_not_incremental_go_one_after_another() -> None:
    peer = opened("u=3", "u=3")
    peer.take()
    assert order(peer) == [1] * 4 + [3] * 4


def test_both_kinds_share_an_urgency() -> None:
    peer = opened("u=3", "u=3", "u=3, i")
    peer.take()
    assert order(peer) == [1, 5, 1, 5, 1, 5, 1, 5, 3, 3, 3, 3]


def test_turns_go_on_over_wake_ups() -> None:
    peer = opened("i", "i", "i")
    for _ in range(3):
        peer.frames += h.split_frames(peer.connection.take_output(2 * FRAME))
    assert order(peer) == [1, 3, 5, 1, 3, 5]


def _update(stream_id: int, value: bytes) -> bytes:
    return h.frame(h.PRIORITY_UPDATE, 0, 0, stream_id.to_bytes(4, "big") + value)


def test_priority_update_before_and_after_the_request() -> None:
    peer = ClientPeer()
    peer.feed(h.window_update(0, WIDE), h.settings((0x4, WIDE)))
    peer.feed(_update(3, b"u=0"), h.headers(1), h.headers(3), h.headers(5), _update(5, b"u=1"))
    for stream_id in (1, 3, 5):
        peer.connection.send_head(stream_id, OK)
        peer.connection.send_data(stream_id, bytes(2 * FRAME))
    peer.take()
    assert order(peer) == [3, 3, 5, 5, 1, 1]


def test_a_stream_without_window_lets_the_others_pass() -> None:
    peer = opened("u=0", "u=7")
    peer.feed(h.settings((0x4, 0)))
    peer.frames.clear()
    peer.feed(h.window_update(3, WIDE))
    assert set(order(peer)) == {3}
    assert peer.connection.stalled(1)
    assert not peer.connection.stalled(3)


def test_heads_go_out_when_the_connection_has_no_window() -> None:
    peer = opened(None)
    peer.take()
    peer = ClientPeer()
    peer.feed(h.headers(1), h.headers(3))
    peer.connection.send_head(1, OK)
    peer.connection.send_data(1, bytes(70_000))
    peer.take()
    assert peer.connection.stalled(1)
    peer.connection.send_head(3, OK, end_stream=True)
    assert peer.connection.has_output
    peer.take()
    assert [f.flags for f in peer.of(h.HEADERS, 3)] == [5]
    assert not peer.connection.has_output


def test_a_producer_is_held_back_and_goes_on() -> None:
    peer = opened(window=WIDE)
    peer.feed(h.headers(1))
    connection = peer.connection
    connection.send_head(1, OK)
    connection.send_data(1, bytes(65_536))
    assert not connection.blocked(1)
    connection.send_data(1, b"x")
    assert connection.blocked(1)
    assert connection.queued(1) == 65_537
    connection.take_output(30_000)
    assert list(connection.take_drained()) == []
    peer.take()
    assert list(connection.take_drained()) == [1]
    assert list(connection.take_drained()) == []
    assert not connection.blocked(1)


def test_many_queues_together_hold_their_producers_back_earlier() -> None:
    peer = opened(*[None] * 17, window=0)
    assert peer.connection.blocked(1)  # 64 KB each, above 1 MB together
    peer.connection.reset(3, 0)
    peer.connection.reset(5, 0)
    peer.feed(h.window_update(1, 1))
    assert not peer.connection.blocked(1)


def test_one_string_a_wake_up_for_all_streams() -> None:
    peer = ClientPeer()
    peer.feed(*[h.headers(stream_id) for stream_id in range(1, 33, 2)])
    for stream_id in range(1, 33, 2):
        peer.connection.send_head(stream_id, OK)
        peer.connection.send_data(stream_id, b"small", end_stream=True)
    assert len(h.split_frames(peer.connection.take_output())) == 32
    assert not peer.connection.has_output
    assert peer.connection.open_streams == 0


def test_small_pieces_are_put_together() -> None:
    peer = ClientPeer()
    peer.feed(h.headers(1))
    peer.connection.send_head(1, OK)
    for number in range(10_000):
        peer.connection.send_data(1, b"%04d" % number)
    peer.take()
    assert peer.body(1) == b"".join(b"%04d" % number for number in range(10_000))
    assert len(peer.of(h.DATA)) < 20


def test_windows_of_an_octet_are_a_flood() -> None:
    peer = ClientPeer(Limits(window_updates=Rate(20, 0)))
    peer.feed(h.settings((0x4, 0)), h.headers(1))
    peer.connection.send_head(1, OK)
    peer.connection.send_data(1, bytes(60_000))
    for _ in range(20):
        assert peer.feed(h.window_update(1, 1)) == []
    assert peer.feed(h.window_update(1, 1)) == [ConnectionFailed(ENHANCE_YOUR_CALM, "window-update-flood")]


def test_who_takes_frames_may_open_windows() -> None:
    peer = ClientPeer(Limits(window_updates=Rate(2, 0)))
    peer.feed(h.settings((0x4, 0)), h.headers(1))
    peer.connection.send_head(1, OK)
    for _ in range(50):
        peer.connection.send_data(1, bytes(1_000))
        assert peer.feed(h.window_update(1, 1_000), h.window_update(0, 1_000)) == []


def test_short_messages_and_ends_of_answers_open_windows_too() -> None:
    """What gRPC is: a few octets, then trailers; or nothing but a head that ends the answer."""
    peer = ClientPeer(Limits(window_updates=Rate(2, 0)))
    both = h.window_update(0, 5) * 2
    for stream_id in range(1, 41, 4):
        peer.feed(h.headers(stream_id), h.headers(stream_id + 2))
        peer.connection.send_head(stream_id, OK)
        for _ in range(10):
            peer.connection.send_data(stream_id, b"short")
            peer.take()
            assert peer.feed(h.window_update(stream_id, 5), both) == []
        peer.connection.send_trailers(stream_id, OK)
        peer.take()
        assert peer.feed(both) == []
        peer.connection.send_head(stream_id + 2, OK, end_stream=True)
        peer.take()
        assert peer.feed(both) == []


def test_a_reset_drops_what_is_queued() -> None:
    peer = opened(None, None)
    peer.connection.reset(1, 8)
    peer.take()
    assert set(order(peer)) == {3}
    assert peer.reset_codes(1) == [8]


def test_the_window_of_a_stream_opens_as_it_is_consumed_and_not_before() -> None:
    limits = Limits(initial_window_bytes=32_768, max_window_bytes=32_768)
    peer = ClientPeer(limits)
    peer.feed(h.headers(1, POST, end_stream=False), h.data(1, bytes(FRAME)), h.data(1, bytes(FRAME)))
    assert not peer.of(h.WINDOW_UPDATE, 1)
    peer.connection.consumed(1, FRAME)
    peer.connection.consumed(1, FRAME)
    peer.take()
    assert sum(int.from_bytes(f.payload, "big") for f in peer.of(h.WINDOW_UPDATE, 1)) == 2 * FRAME


def test_a_stream_that_nobody_consumes_does_not_stall_its_siblings() -> None:
    peer = ClientPeer(Limits(connection_window_bytes=65_535, max_window_bytes=32_768))
    for stream_id in (1, 3, 5):
        peer.feed(h.headers(stream_id, POST, end_stream=False), *[h.data(stream_id, bytes(FRAME))] * 2)
    for _ in range(50):
        peer.connection.consumed(5, 2 * FRAME)
        peer.feed(*[h.data(5, bytes(FRAME))] * 2)
    assert sum(len(e.data) for e in peer.events if isinstance(e, Body) and e.stream_id == 5) == 51 * 2 * FRAME
    assert not peer.goaway_codes()
    assert not peer.of(h.RST_STREAM)


def test_a_window_grows_for_who_consumes_and_out_of_a_bounded_pool() -> None:
    limits = Limits(window_pool_bytes=300_000)
    peer = ClientPeer(limits)
    granted = {1: 32_768, 3: 32_768}
    for stream_id in granted:
        peer.feed(h.headers(stream_id, POST, end_stream=False))
    for _ in range(20):
        for stream_id, used in list(granted.items()):
            peer.frames.clear()
            for at in range(0, used, FRAME):
                peer.feed(h.data(stream_id, bytes(min(FRAME, used - at))))
            peer.connection.consumed(stream_id, used)
            peer.take()
            granted[stream_id] = sum(int.from_bytes(f.payload, "big") for f in peer.of(h.WINDOW_UPDATE, stream_id))
    assert granted[1] > 200_000
    assert sum(granted.values()) == 2 * 32_768 + 300_000
    peer.feed(h.rst_stream(1))  # what a stream has grown by comes back
    before = granted[3]
    for at in range(0, before, FRAME):
        peer.feed(h.data(3, bytes(min(FRAME, before - at))))
    peer.frames.clear()
    peer.connection.consumed(3, before)
    peer.take()
    assert sum(int.from_bytes(f.payload, "big") for f in peer.of(h.WINDOW_UPDATE, 3)) > before


def test_the_same_head_is_the_same_object() -> None:
    peer = ClientPeer()
    encoded = [peer.encoder.encode(GET) for _ in range(3)]
    heads = []
    for number, block in enumerate(encoded):
        (event,) = peer.feed(h.frame(h.HEADERS, 5, 2 * number + 1, block))
        assert isinstance(event, Request)
        heads.append(event.head)
    assert heads[0] is heads[1] is heads[2]
    (other,) = peer.feed(h.frame(h.HEADERS, 4, 7, encoded[2]))
    assert isinstance(other, Request)
    assert other.head.chunked  # a body follows: it is another head
    assert other.head is not heads[0]


def test_what_was_remembered_is_forgotten_when_the_table_changes() -> None:
    peer = ClientPeer()
    peer.feed(h.frame(h.HEADERS, 5, 1, peer.encoder.encode([*GET, ("x-a", "1")])))
    indexed = peer.encoder.encode([*GET, ("x-a", "1")])
    peer.feed(h.frame(h.HEADERS, 5, 3, indexed))
    peer.feed(h.frame(h.HEADERS, 5, 5, peer.encoder.encode([*GET, ("x-b", "2")])))
    (event,) = peer.feed(h.frame(h.HEADERS, 5, 7, indexed))  # the same octets name other entries now
    assert isinstance(event, StreamReset)
    assert event.reason == "pseudo-after-field"
