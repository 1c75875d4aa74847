"""Every section of RFC 9113 (4 to 8) that binds a server, by a test with its number; frames are written by hand."""

from __future__ import annotations

import re
import struct

import pytest

from proxy.protocol.http2 import (
    CONNECTION_REASONS,
    ENHANCE_YOUR_CALM,
    PROTOCOL_ERROR,
    STREAM_REASONS,
    Body,
    BodyEnd,
    ConnectionFailed,
    GoAway,
    Limits,
    Rate,
    Request,
    RequestRefused,
    StreamReset,
    encode_fields,
    encode_response,
)
from proxy.protocol.http2.errors import (
    COMPRESSION_ERROR,
    FLOW_CONTROL_ERROR,
    FRAME_SIZE_ERROR,
    NO_ERROR,
    REFUSED_STREAM,
    STREAM_CLOSED,
)
from tests.harness import http2 as h
from tests.harness.http2 import GET, POST, ClientPeer

OK = encode_response(200, [(b"content-type", b"text/plain")])


def fails(peer: ClientPeer, *parts: bytes, code: int, reason: str | None = None) -> None:
    """The connection ends with this code, by an event and by a GOAWAY, and is deaf then."""
    events = peer.feed(*parts)
    last = events[-1]
    assert isinstance(last, ConnectionFailed), events
    assert (last.code, last.reason) == (code, reason or last.reason)
    assert peer.goaway_codes()[-1:] == [code]
    assert peer.connection.failed
    assert peer.connection.finished
    assert peer.feed(h.headers(99)) == []


def resets(peer: ClientPeer, *parts: bytes, code: int, stream_id: int = 1, reason: str | None = None) -> None:
    """The stream ends with this code, and the connection lives."""
    events = peer.feed(*parts)
    reset = [event for event in events if isinstance(event, StreamReset)]
    assert [(event.stream_id, event.code, event.by_peer) for event in reset] == [(stream_id, code, False)], events
    assert reset[0].reason == (reason or reset[0].reason)
    assert peer.reset_codes(stream_id) == [code]
    assert lives(peer)


def lives(peer: ClientPeer) -> bool:
    """Whether a next request is taken."""
    stream_id = peer.connection.last_stream_id + 2 | 1
    events = peer.feed(h.headers(stream_id))
    return [type(event) for event in events] == [Request] and not peer.goaway_codes()


@pytest.fixture
def peer() -> ClientPeer:
    return ClientPeer()


# -- 3 and 4 -----------------------------------------------------------------------------------------------------------


def test_3_4_the_servers_preface_is_settings() -> None:
    peer = ClientPeer(bare=True)
    first = peer.take()[0]
    assert (first.kind, first.flags, first.stream_id) == (h.SETTINGS, 0, 0)
    values = dict(struct.iter_unpack(">HL", first.payload))
    assert values == {0x3: 128, 0x4: 32_768, 0x6: 32_768, 0x8: 1, 0x9: 1}


@pytest.mark.parametrize("start", [b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\r", b"\x16\x03\x01"])
def test_3_4_another_preface_ends_the_connection(start: bytes) -> None:
    fails(ClientPeer(bare=True), start, code=PROTOCOL_ERROR, reason="preface")


@pytest.mark.parametrize("first", [h.headers(1), h.frame(h.PING, payload=bytes(8)), h.settings(flags=h.ACK)])
def test_3_4_the_first_frame_is_settings(first: bytes) -> None:
    fails(ClientPeer(bare=True), h.PREFACE + first, code=PROTOCOL_ERROR, reason="preface")


def test_3_4_requests_may_come_before_our_settings_are_acknowledged() -> None:
    peer = ClientPeer(bare=True)
    events = peer.feed(h.PREFACE + h.settings() + h.headers(1))
    assert [type(event) for event in events] == [Request]
    assert not peer.connection.settings_acked


def test_4_1_unknown_frames_flags_and_the_reserved_bit_are_ignored(peer: ClientPeer) -> None:
    assert peer.feed(h.frame(0xFA, 0xFF, 7, b"whatever")) == []
    assert [type(e) for e in peer.feed(h.headers(1, flags=0x42))] == [Request]
    raw = bytearray(h.headers(3))
    raw[5] |= 0x80
    assert [e.stream_id for e in peer.feed(bytes(raw)) if isinstance(e, Request)] == [3]


@pytest.mark.parametrize("kind", [h.DATA, h.HEADERS, h.SETTINGS, 0xFA])
def test_4_2_a_frame_above_max_frame_size(peer: ClientPeer, kind: int) -> None:
    fails(peer, h.frame(kind, 0, 1, bytes(16_385)), code=FRAME_SIZE_ERROR, reason="frame-too-large")


def test_4_2_a_frame_of_max_frame_size_is_taken(peer: ClientPeer) -> None:
    events = peer.feed(h.headers(1, POST, end_stream=False), h.data(1, bytes(16_384)))
    assert isinstance(events[1], Body)


@pytest.mark.parametrize(
    "frame",
    [
        h.frame(h.PING, payload=bytes(7)),
        h.frame(h.SETTINGS, payload=bytes(5)),
        h.frame(h.GOAWAY, payload=bytes(7)),
        h.frame(h.WINDOW_UPDATE, payload=bytes(3)),
        h.frame(h.RST_STREAM, 0, 1, bytes(3)),
    ],
)
def test_4_2_a_frame_of_the_wrong_size(peer: ClientPeer, frame: bytes) -> None:
    peer.feed(h.headers(1))
    fails(peer, frame, code=FRAME_SIZE_ERROR, reason="frame-size")


def test_4_3_a_block_that_is_none_is_a_compression_error(peer: ClientPeer) -> None:
    fails(peer, h.frame(h.HEADERS, h.END_HEADERS | h.END_STREAM, 1, b"\xff\xff\xff"), code=COMPRESSION_ERROR)


def test_4_3_a_refused_stream_keeps_the_table_in_step() -> None:
    peer = ClientPeer(Limits(max_concurrent_streams=1))
    encode = peer.encoder.encode
    peer.feed(h.frame(h.HEADERS, h.END_HEADERS, 1, encode(POST)))
    peer.feed(h.frame(h.HEADERS, h.END_HEADERS | h.END_STREAM, 3, encode([*GET, ("x-new", "in the table")])))
    assert peer.reset_codes(3) == [REFUSED_STREAM]
    peer.feed(h.rst_stream(1))
    (event,) = peer.feed(h.frame(h.HEADERS, h.END_HEADERS | h.END_STREAM, 5, encode([*GET, ("x-new", "in the table")])))
    assert isinstance(event, Request)
    assert event.head.get(b"x-new") == b"in the table"


@pytest.mark.parametrize(
    "between", [h.data(1, b"x"), h.headers(3), h.frame(h.PING, payload=bytes(8)), h.frame(0xFA), h.frame(9, 4, 3)]
)
def test_4_3_nothing_comes_between_the_frames_of_a_block(peer: ClientPeer, between: bytes) -> None:
    fails(peer, h.headers(1, end_headers=False), between, code=PROTOCOL_ERROR, reason="no-continuation")


def test_4_3_1_a_table_size_update_stands_first_and_within_bounds(peer: ClientPeer) -> None:
    (event,) = peer.feed(h.headers(1, prefix=b"\x20\x3f\xe1\x1f"))  # 0, then 4096
    assert isinstance(event, Request)
    fails(peer, h.headers(3, prefix=b"\x3f\xe2\x1f"), code=COMPRESSION_ERROR)  # 4097


def test_4_3_1_a_table_size_update_behind_a_field(peer: ClientPeer) -> None:
    fails(peer, h.frame(h.HEADERS, 5, 1, h.block(GET) + b"\x20"), code=COMPRESSION_ERROR)


# -- 5 -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frame", [h.data(1, b"x"), h.rst_stream(1), h.window_update(1, 1), h.data(2, b"x")])
def test_5_1_idle_takes_headers_and_priority_only(peer: ClientPeer, frame: bytes) -> None:
    fails(peer, frame, code=PROTOCOL_ERROR, reason="idle-stream")


def test_5_1_idle_takes_priority(peer: ClientPeer) -> None:
    assert peer.feed(h.frame(h.PRIORITY, 0, 7, struct.pack(">LB", 1, 15))) == []
    assert lives(peer)


@pytest.mark.parametrize("frame", [h.data(1, b"x"), h.headers(1)])
def test_5_1_half_closed_remote_takes_neither_data_nor_headers(peer: ClientPeer, frame: bytes) -> None:
    peer.feed(h.headers(1))
    resets(peer, frame, code=STREAM_CLOSED, reason="half-closed")


def test_5_1_half_closed_remote_takes_the_rest(peer: ClientPeer) -> None:
    peer.feed(h.headers(1))
    assert peer.feed(h.window_update(1, 5), h.frame(h.PRIORITY, 0, 1, struct.pack(">LB", 3, 15))) == []
    assert [type(e) for e in peer.feed(h.rst_stream(1))] == [StreamReset]


@pytest.mark.parametrize("frame", [h.data(1, b"x"), h.headers(1)])
def test_5_1_closed_by_the_end_of_both_takes_neither_data_nor_headers(peer: ClientPeer, frame: bytes) -> None:
    peer.feed(h.headers(1))
    peer.connection.send_head(1, OK, end_stream=True)
    peer.take()
    fails(peer, frame, code=STREAM_CLOSED, reason="closed-stream")


@pytest.mark.parametrize("frame", [h.data(1, b"x"), h.headers(1)])
def test_5_1_closed_by_the_clients_reset_takes_neither_data_nor_headers(peer: ClientPeer, frame: bytes) -> None:
    peer.feed(h.headers(1, POST, end_stream=False), h.rst_stream(1))
    fails(peer, frame, code=STREAM_CLOSED, reason="closed-stream")


def test_5_1_closed_takes_what_may_have_been_under_way(peer: ClientPeer) -> None:
    peer.feed(h.headers(1))
    peer.connection.send_head(1, OK, end_stream=True)
    peer.take()
    assert peer.feed(h.window_update(1, 9), h.rst_stream(1), h.frame(h.PRIORITY, 0, 1, struct.pack(">LB", 3, 1))) == []
    assert lives(peer)


def test_5_1_closed_ignores_a_window_update_whatever_its_increment(peer: ClientPeer) -> None:
    # Stream 1 is closed by the first use of 3 (section 5.1.1): no stream is left that an increment of 0 could be an
    # error of.
    peer.feed(h.headers(3))
    assert peer.feed(h.window_update(1, 0), h.window_update(1, 2**31 - 1)) == []
    assert lives(peer)


def test_5_1_what_comes_after_our_reset_is_ignored(peer: ClientPeer) -> None:
    peer.feed(h.headers(1, POST, end_stream=False))
    peer.connection.reset(1, 8)
    late = peer.feed(h.data(1, b"late"), h.headers(1, [("late", "trailer")]), h.window_update(1, 9), h.rst_stream(1))
    assert late == []
    assert lives(peer)


def test_5_1_data_after_our_reset_counts_for_the_connections_window(peer: ClientPeer) -> None:
    for stream_id in range(1, 101, 2):
        peer.feed(h.headers(stream_id, POST, end_stream=False))
        peer.connection.reset(stream_id, 8)
        assert peer.feed(*[h.data(stream_id, bytes(16_384))] * 2) == []
    given_back = sum(int.from_bytes(f.payload, "big") for f in peer.of(h.WINDOW_UPDATE, 0))
    assert 50 * 32_768 - 524_288 <= given_back <= 50 * 32_768
    assert not peer.of(h.WINDOW_UPDATE, 1)
    assert lives(peer)


def test_5_1_what_may_be_under_way_after_our_reset_is_no_attack() -> None:
    """The stream's window in DATA, then its end: however many streams we reset, no client can help that."""
    peer = ClientPeer(Limits(late_frames=_FEW))
    for stream_id in range(1, 2_001, 4):
        peer.feed(h.headers(stream_id, POST, end_stream=False), h.headers(stream_id + 2, POST, end_stream=False))
        peer.connection.reset(stream_id, 0)
        peer.connection.reset(stream_id + 2, 0)
        under_way = [*[h.data(stream_id, bytes(16_384))] * 2, h.data(stream_id, end_stream=True)]
        assert peer.feed(*under_way, h.headers(stream_id + 2, [("late", "trailer")])) == []
    assert lives(peer)


def test_5_1_1_the_clients_streams_are_odd(peer: ClientPeer) -> None:
    fails(peer, h.headers(2), code=PROTOCOL_ERROR, reason="stream-id")


def test_5_1_1_stream_ids_rise(peer: ClientPeer) -> None:
    peer.feed(h.headers(5))
    fails(peer, h.headers(3), code=PROTOCOL_ERROR, reason="stream-id")


def test_5_1_2_more_streams_than_allowed_are_refused() -> None:
    peer = ClientPeer(Limits(max_concurrent_streams=2))
    peer.feed(h.headers(1), h.headers(3))
    (event,) = peer.feed(h.headers(5))
    assert event == StreamReset(5, REFUSED_STREAM, False, "too-many-streams")
    assert peer.reset_codes(5) == [REFUSED_STREAM]
    peer.connection.send_head(1, OK, end_stream=True)
    peer.take()
    assert lives(peer)


def test_5_2_flow_control_is_by_stream_and_connection(peer: ClientPeer) -> None:
    peer.feed(h.headers(1), h.headers(3), h.window_update(1, 1_000_000), h.window_update(3, 1_000_000))
    for stream_id in (1, 3):
        peer.connection.send_head(stream_id, OK)
        peer.connection.send_data(stream_id, bytes(60_000))
    peer.take()
    assert sum(len(f.payload) for f in peer.of(h.DATA)) == 65_535
    peer.feed(h.window_update(0, 1_000_000))
    assert sum(len(f.payload) for f in peer.of(h.DATA)) == 120_000


def test_5_2_2_a_stream_that_nobody_consumes_leaves_the_connections_window_to_the_others(peer: ClientPeer) -> None:
    for stream_id in range(1, 2 * 100, 2):  # three times the connection's window, none of it consumed
        peer.feed(h.headers(stream_id, POST, end_stream=False), *[h.data(stream_id, bytes(16_384))] * 2)
    assert not peer.of(h.WINDOW_UPDATE, 1)
    peer.feed(h.headers(201, POST, end_stream=False))
    assert peer.feed(h.data(201, b"served")) == [Body(201, b"served")]


def test_5_3_1_priority_of_the_old_kind_may_not_name_its_own_stream(peer: ClientPeer) -> None:
    prefix = struct.pack(">LB", 1, 15)
    resets(peer, h.headers(1, flags=h.HAS_PRIORITY, prefix=prefix), code=PROTOCOL_ERROR, reason="depends-on-itself")


def test_5_3_2_priority_of_the_old_kind_changes_nothing(peer: ClientPeer) -> None:
    prefix = struct.pack(">LB", 0x80000000 | 11, 255)
    (event,) = peer.feed(h.headers(1, flags=h.HAS_PRIORITY, prefix=prefix))
    assert isinstance(event, Request)
    assert peer.feed(h.frame(h.PRIORITY, 0, 1, prefix)) == []


def test_5_4_1_goaway_names_the_last_stream_and_the_connection_is_over(peer: ClientPeer) -> None:
    peer.feed(h.headers(1), h.headers(7))
    fails(peer, h.frame(h.PING, 0, 1, bytes(8)), code=PROTOCOL_ERROR)
    assert peer.of(h.GOAWAY)[0].payload[:4] == struct.pack(">L", 7)
    assert peer.connection.open_streams == 0


def test_5_4_2_a_stream_error_is_answered_once(peer: ClientPeer) -> None:
    peer.feed(h.headers(1, POST, end_stream=False))
    resets(peer, h.window_update(1, 0), code=PROTOCOL_ERROR)
    assert peer.feed(h.data(1, b"x"), h.window_update(1, 0)) == []
    assert len(peer.of(h.RST_STREAM, 1)) == 1


def test_5_4_3_after_an_error_there_is_nothing_but_the_goaway(peer: ClientPeer) -> None:
    peer.feed(h.headers(1), h.headers(3))
    peer.connection.send_head(1, OK)
    peer.connection.send_data(1, bytes(100_000))
    peer.connection.feed(h.frame(h.PING, 0, 1, bytes(8)), peer.now)
    assert [frame.kind for frame in peer.take()] == [h.GOAWAY]
    peer.connection.send_head(3, OK)
    peer.connection.ping(b"8 octets")
    assert [frame.kind for frame in peer.take() if frame.kind != h.PING] == []


def test_5_5_unknown_settings_and_errors_are_ignored(peer: ClientPeer) -> None:
    assert peer.feed(h.settings((0xFF, 7), (0x6, 0))) == []
    peer.feed(h.headers(1))
    (event,) = peer.feed(h.rst_stream(1, 0xDEAD))
    assert isinstance(event, StreamReset)
    assert event.code == 0xDEAD


# -- 6 -----------------------------------------------------------------------------------------------------------------


def test_6_1_data_on_stream_0(peer: ClientPeer) -> None:
    fails(peer, h.data(0, b"x"), code=PROTOCOL_ERROR, reason="no-stream")


@pytest.mark.parametrize("payload", [b"\x05body", b"\x06body", b""])
def test_6_1_padding_as_long_as_the_payload(peer: ClientPeer, payload: bytes) -> None:
    peer.feed(h.headers(1, POST, end_stream=False))
    fails(peer, h.frame(h.DATA, h.PADDED, 1, payload), code=PROTOCOL_ERROR, reason="padding")


def test_6_1_padding_is_dropped_and_counts_for_flow_control(peer: ClientPeer) -> None:
    peer.feed(h.headers(1, POST, end_stream=False))
    padded = h.frame(h.DATA, h.PADDED, 1, b"\xffbody" + bytes(255))
    assert peer.feed(padded) == [Body(1, b"body")]
    for _ in range(400):  # 104 KB of frames, 1.6 KB of body: only with padding given back can they all come
        peer.feed(padded)
        peer.connection.consumed(1, 4)
    assert not peer.of(h.RST_STREAM)
    assert peer.of(h.WINDOW_UPDATE, 1)


def test_6_2_headers_on_stream_0(peer: ClientPeer) -> None:
    fails(peer, h.headers(0), code=PROTOCOL_ERROR, reason="no-stream")


def test_6_2_padding_longer_than_the_block(peer: ClientPeer) -> None:
    fails(peer, h.frame(h.HEADERS, 0xD, 1, b"\xff" + h.block(GET)), code=PROTOCOL_ERROR, reason="padding")


def test_6_2_padding_and_priority_are_taken_off(peer: ClientPeer) -> None:
    payload = b"\x03" + struct.pack(">LB", 0, 15) + h.block(GET) + bytes(3)
    (event,) = peer.feed(h.frame(h.HEADERS, 0xD | h.HAS_PRIORITY, 1, payload))
    assert isinstance(event, Request)


def test_6_2_too_short_for_its_flags(peer: ClientPeer) -> None:
    fails(peer, h.frame(h.HEADERS, 0x5 | h.HAS_PRIORITY, 1, b"abc"), code=FRAME_SIZE_ERROR)


def test_6_3_priority_on_stream_0(peer: ClientPeer) -> None:
    fails(peer, h.frame(h.PRIORITY, 0, 0, bytes(5)), code=PROTOCOL_ERROR, reason="no-stream")


def test_6_3_priority_of_another_size(peer: ClientPeer) -> None:
    peer.feed(h.headers(1, POST, end_stream=False))
    resets(peer, h.frame(h.PRIORITY, 0, 1, bytes(4)), code=FRAME_SIZE_ERROR)


def test_6_4_rst_stream_on_stream_0(peer: ClientPeer) -> None:
    fails(peer, h.rst_stream(0), code=PROTOCOL_ERROR, reason="no-stream")


def test_6_4_rst_stream_is_never_answered(peer: ClientPeer) -> None:
    peer.feed(h.headers(1))
    assert peer.feed(h.rst_stream(1)) == [StreamReset(1, 8, True, "reset-by-peer")]
    assert not peer.of(h.RST_STREAM)
    peer.connection.send_data(1, b"late")
    peer.connection.reset(1, 0)
    assert peer.take() == []


def test_6_5_settings_on_a_stream(peer: ClientPeer) -> None:
    fails(peer, h.frame(h.SETTINGS, 0, 1), code=PROTOCOL_ERROR, reason="not-on-stream-0")


def test_6_5_an_acknowledgement_has_no_payload(peer: ClientPeer) -> None:
    fails(peer, h.settings((1, 1), flags=h.ACK), code=FRAME_SIZE_ERROR)


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        (0x2, 2, PROTOCOL_ERROR),
        (0x4, 2**31, FLOW_CONTROL_ERROR),
        (0x5, 16_383, PROTOCOL_ERROR),
        (0x5, 2**24, PROTOCOL_ERROR),
        (0x8, 2, PROTOCOL_ERROR),
        (0x9, 2, PROTOCOL_ERROR),
    ],
)
def test_6_5_2_values_out_of_range(peer: ClientPeer, key: int, value: int, code: int) -> None:
    fails(peer, h.settings((key, value)), code=code)


def test_6_5_3_settings_are_acknowledged_in_order(peer: ClientPeer) -> None:
    peer.feed(h.settings((0x4, 1), (0x4, 10)), h.headers(1), h.settings())
    assert [f.flags for f in peer.of(h.SETTINGS)] == [h.ACK, h.ACK]
    peer.connection.send_head(1, OK)
    peer.connection.send_data(1, bytes(100))
    peer.take()
    assert len(peer.body(1)) == 10  # the last of equal ones counts


def test_6_6_a_client_never_pushes(peer: ClientPeer) -> None:
    fails(peer, h.frame(h.PUSH_PROMISE, h.END_HEADERS, 1, bytes(4) + h.block(GET)), code=PROTOCOL_ERROR)


def test_6_7_ping_is_answered_with_its_data(peer: ClientPeer) -> None:
    peer.feed(h.frame(h.PING, payload=b"8 octets"))
    assert peer.of(h.PING) == [h.Frame(h.PING, h.ACK, 0, b"8 octets")]
    peer.feed(h.frame(h.PING, h.ACK, payload=b"8 octets"))
    assert len(peer.of(h.PING)) == 1


def test_6_7_ping_on_a_stream(peer: ClientPeer) -> None:
    fails(peer, h.frame(h.PING, 0, 1, bytes(8)), code=PROTOCOL_ERROR, reason="not-on-stream-0")


def test_6_8_goaway_on_a_stream(peer: ClientPeer) -> None:
    fails(peer, h.frame(h.GOAWAY, 0, 1, bytes(8)), code=PROTOCOL_ERROR, reason="not-on-stream-0")


def test_6_8_after_the_clients_goaway_its_streams_go_on(peer: ClientPeer) -> None:
    peer.feed(h.headers(1))
    assert peer.feed(h.goaway(0, 0)) == [GoAway(0, 0)]
    assert not peer.connection.finished
    peer.connection.send_head(1, OK, end_stream=True)
    peer.take()
    assert peer.connection.finished


def test_6_8_goaway_goes_in_two_steps(peer: ClientPeer) -> None:
    peer.feed(h.headers(1))
    peer.connection.shut_down()
    first, ping = peer.take()
    assert (first.kind, first.payload[:4], first.code) == (h.GOAWAY, struct.pack(">L", 2**31 - 1), NO_ERROR)
    assert [type(e) for e in peer.feed(h.headers(3))] == [Request]  # it was under way
    peer.feed(h.frame(h.PING, h.ACK, payload=ping.payload))
    assert peer.of(h.GOAWAY)[-1].payload[:4] == struct.pack(">L", 3)
    peer.feed(h.headers(5))
    assert peer.reset_codes(5) == [REFUSED_STREAM]
    for stream_id in (1, 3):
        peer.connection.send_head(stream_id, OK, end_stream=True)
    assert not peer.connection.finished
    peer.take()
    assert peer.connection.finished


def test_6_9_an_increment_of_0(peer: ClientPeer) -> None:
    peer.feed(h.headers(1))
    resets(peer, h.window_update(1, 0), code=PROTOCOL_ERROR)
    fails(peer, h.window_update(0, 0), code=PROTOCOL_ERROR, reason="window-increment")


def test_6_9_1_windows_above_the_largest(peer: ClientPeer) -> None:
    peer.feed(h.headers(1))
    resets(peer, h.window_update(1, 2**31 - 1), code=FLOW_CONTROL_ERROR)
    fails(peer, h.window_update(0, 2**31 - 1), code=FLOW_CONTROL_ERROR, reason="window-overflow")


def test_6_9_1_a_client_that_ignores_the_streams_window(peer: ClientPeer) -> None:
    peer.feed(h.headers(1, POST, end_stream=False), h.data(1, bytes(16_384)), h.data(1, bytes(16_384)))
    resets(peer, h.data(1, b"x"), code=FLOW_CONTROL_ERROR, reason="stream-window-exceeded")


def test_6_9_1_a_client_that_ignores_the_connections_window() -> None:
    peer = ClientPeer(Limits(initial_window_bytes=2**20, connection_window_bytes=65_535))
    connection = peer.connection
    connection.feed(h.headers(1, POST, end_stream=False), 0.0)
    events = [e for _ in range(9) for e in connection.feed(h.data(1, bytes(16_384)), 0.0)]
    assert not any(isinstance(e, ConnectionFailed) for e in events)  # it is given back on receipt
    (update,) = [f for f in peer.take() if f.kind == h.WINDOW_UPDATE and not f.stream_id]
    assert 9 * 16_384 - 32_767 <= int.from_bytes(update.payload, "big") <= 9 * 16_384


def test_6_9_2_a_smaller_initial_window_may_make_windows_negative(peer: ClientPeer) -> None:
    peer.feed(h.headers(1))
    peer.connection.send_head(1, OK)
    peer.connection.send_data(1, bytes(20_000))
    peer.take()
    peer.feed(h.settings((0x4, 10_000)))  # the window is -10,000
    peer.connection.send_data(1, bytes(100))
    assert peer.take() == []
    assert peer.connection.stalled(1)
    peer.feed(h.window_update(1, 10_000))
    assert len(peer.body(1)) == 20_000
    peer.feed(h.window_update(1, 1))
    assert len(peer.body(1)) == 20_001


def test_6_9_2_an_initial_window_that_makes_one_too_large(peer: ClientPeer) -> None:
    peer.feed(h.headers(1), h.window_update(1, 2**31 - 1 - 65_535))
    fails(peer, h.settings((0x4, 65_536)), code=FLOW_CONTROL_ERROR, reason="settings-window")


def test_6_9_3_our_smaller_window_holds_from_its_acknowledgement_on() -> None:
    peer = ClientPeer(acked=False)
    peer.feed(h.headers(1, POST, end_stream=False), *[h.data(1, bytes(16_383))] * 4)
    assert not peer.of(h.RST_STREAM)  # 65,532 of 65,535
    peer.feed(h.settings(flags=h.ACK))
    resets(peer, h.data(1, b"x"), code=FLOW_CONTROL_ERROR)


def test_6_10_continuation_without_headers(peer: ClientPeer) -> None:
    fails(peer, h.frame(h.CONTINUATION, 4, 1, h.block(GET)), code=PROTOCOL_ERROR, reason="continuation")


def test_6_10_continuation_joins_the_block(peer: ClientPeer) -> None:
    whole = h.block(GET)
    assert peer.feed(h.frame(h.HEADERS, h.END_STREAM, 1, whole[:5])) == []
    assert peer.connection.mid_head
    assert peer.feed(h.frame(h.CONTINUATION, 0, 1, whole[5:9])) == []
    (event,) = peer.feed(h.frame(h.CONTINUATION, h.END_HEADERS, 1, whole[9:]))
    assert isinstance(event, Request)
    assert event.ended
    assert not peer.connection.mid_head


# -- 7 -----------------------------------------------------------------------------------------------------------------


def test_7_every_reason_has_a_code_of_the_registry() -> None:
    assert {*CONNECTION_REASONS.values(), *STREAM_REASONS.values()} <= set(range(0xE))


# -- 8 -----------------------------------------------------------------------------------------------------------------


def test_8_1_a_message_is_headers_data_and_trailers(peer: ClientPeer) -> None:
    events = peer.feed(
        h.headers(1, POST, end_stream=False), h.data(1, b"body"), h.headers(1, [("x-sum", "1"), ("x-sum", "2")])
    )
    assert events[1:] == [Body(1, b"body"), BodyEnd(1, ((b"x-sum", b"1"), (b"x-sum", b"2")))]


def test_8_1_a_second_head_without_the_end(peer: ClientPeer) -> None:
    peer.feed(h.headers(1, POST, end_stream=False))
    resets(peer, h.headers(1, [("x", "y")], end_stream=False), code=PROTOCOL_ERROR, reason="trailers-without-end")


@pytest.mark.parametrize("field", [(":path", "/"), ("X", "y"), ("connection", "close"), ("host", "a"), ("x", "a\nb")])
def test_8_1_trailers_that_are_none(peer: ClientPeer, field: tuple[str, str]) -> None:
    peer.feed(h.headers(1, POST, end_stream=False))
    resets(peer, h.headers(1, [field]), code=PROTOCOL_ERROR)


@pytest.mark.parametrize(("announced", "sent"), [("1024", 0), ("1048576", 0), (None, 24_000)])
def test_8_1_a_whole_answer_stops_a_request_that_has_much_more_to_say(
    peer: ClientPeer, announced: str | None, sent: int
) -> None:
    fields = [*POST, ("content-length", announced)] if announced else POST
    body = [h.data(1, bytes(8_000)) for _ in range(sent // 8_000)]
    peer.feed(h.headers(1, fields, end_stream=False), *body)
    peer.connection.send_head(1, OK)
    peer.connection.send_data(1, b"no", end_stream=True)
    assert [(f.kind, f.flags) for f in peer.take()] == [(h.HEADERS, 4), (h.DATA, 1), (h.RST_STREAM, 0)]
    assert peer.reset_codes(1) == [NO_ERROR]
    assert peer.connection.take_half_closed() == ()
    assert peer.feed(h.data(1, b"late")) == []


def half_closed(peer: ClientPeer, *fields: tuple[str, str]) -> None:
    """Answers a request before it has ended."""
    peer.feed(h.headers(1, [*POST, *fields], end_stream=False))
    peer.connection.send_head(1, OK)
    peer.connection.send_data(1, b"no", end_stream=True)
    assert [(f.kind, f.flags) for f in peer.take()] == [(h.HEADERS, 4), (h.DATA, 1)]
    assert peer.connection.take_half_closed() == [1]
    assert peer.connection.take_half_closed() == ()


@pytest.mark.parametrize(
    "last",
    [
        h.data(1, end_stream=True),
        h.data(1, b"all") + h.data(1, b" of it", end_stream=True),
        h.headers(1, [("x-sum", "1")]),
        h.rst_stream(1),
    ],
    ids=["END_STREAM", "DATA", "trailers", "RST_STREAM"],
)
def test_8_1_a_request_that_was_answered_may_end_in_order(peer: ClientPeer, last: bytes) -> None:
    half_closed(peer)
    peer.feed(last)
    assert peer.connection.open_streams == 0
    assert not peer.of(h.RST_STREAM)
    fails(peer, h.data(1, b"x"), code=STREAM_CLOSED, reason="closed-stream")


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (h.window_update(1, 0), PROTOCOL_ERROR),
        (h.window_update(1, 2**31 - 1), FLOW_CONTROL_ERROR),
        (h.headers(1, [("x-sum", "1")], end_stream=False), PROTOCOL_ERROR),
        (h.headers(1, [(":method", "POST")]), PROTOCOL_ERROR),
        (h.data(1, b"12345", end_stream=True), PROTOCOL_ERROR),
        (h.data(1, b"123") + h.data(1, b"45"), PROTOCOL_ERROR),
        (h.frame(h.PRIORITY, 0, 1, bytes(4)), FRAME_SIZE_ERROR),
    ],
    ids=["increment of 0", "window", "no end", "pseudo-header", "length", "length of several", "PRIORITY"],
)
def test_8_1_what_comes_on_a_request_that_was_answered_is_judged(peer: ClientPeer, wrong: bytes, code: int) -> None:
    half_closed(peer, ("content-length", "4"))
    resets(peer, wrong, code=code)


def test_8_1_a_request_that_was_answered_is_stopped_by_a_reset_without_an_error(peer: ClientPeer) -> None:
    half_closed(peer)
    peer.connection.reset(1, NO_ERROR)
    peer.take()
    assert peer.reset_codes(1) == [NO_ERROR]
    assert peer.feed(h.data(1, b"late")) == []
    assert lives(peer)


@pytest.mark.parametrize("body", [b"", b"1234", b"123456"])
def test_8_1_1_content_length_must_be_right(peer: ClientPeer, body: bytes) -> None:
    post = [*POST, ("content-length", "5")]
    resets(
        peer, h.headers(1, post, end_stream=False), h.data(1, body, end_stream=True), code=1, reason="length-mismatch"
    )


def test_8_1_1_content_length_and_no_body_at_all(peer: ClientPeer) -> None:
    resets(peer, h.headers(1, [*POST, ("content-length", "5")]), code=PROTOCOL_ERROR, reason="length-mismatch")


@pytest.mark.parametrize("value", ["+5", "-1", "5,5", "0x5", "", "1" * 19])
def test_8_1_1_content_length_must_be_a_number(peer: ClientPeer, value: str) -> None:
    resets(peer, h.headers(1, [*POST, ("content-length", value)], end_stream=False), code=PROTOCOL_ERROR)


def test_8_1_1_two_content_lengths(peer: ClientPeer) -> None:
    post = [*POST, ("content-length", "5"), ("content-length", "5")]
    resets(peer, h.headers(1, post, end_stream=False), code=PROTOCOL_ERROR, reason="two-content-lengths")


@pytest.mark.parametrize("name", ["Accept", "x y", "x\ty", "", "x:", "x\r", "x\n", "x\0", "\x7f", "naïve", " x", "x,"])
def test_8_2_1_names(peer: ClientPeer, name: str) -> None:
    resets(peer, h.headers(1, [*GET, (name, "v")]), code=PROTOCOL_ERROR)


@pytest.mark.parametrize("value", ["a\rb", "a\nb", "a\r\nb: c", "a\0b", " a", "a ", "\ta", "a\t", "\x01", "\x7f"])
def test_8_2_1_values(peer: ClientPeer, value: str) -> None:
    resets(peer, h.headers(1, [*GET, ("x", value)]), code=PROTOCOL_ERROR, reason="field-value")


@pytest.mark.parametrize("name", ["connection", "proxy-connection", "keep-alive", "transfer-encoding", "upgrade"])
def test_8_2_2_fields_of_a_connection(peer: ClientPeer, name: str) -> None:
    resets(peer, h.headers(1, [*GET, (name, "x")]), code=PROTOCOL_ERROR, reason="connection-field")


@pytest.mark.parametrize("value", ["gzip", "trailers, deflate", ""])
def test_8_2_2_te(peer: ClientPeer, value: str) -> None:
    assert isinstance(peer.feed(h.headers(1, [*GET, ("te", "trailers")]))[0], Request)
    resets(peer, h.headers(3, [*GET, ("te", value)]), code=PROTOCOL_ERROR, reason="te", stream_id=3)


def test_8_2_3_crumbs_of_cookies_are_joined(peer: ClientPeer) -> None:
    crumbs = [*GET, ("cookie", "a=b"), ("x", "y"), ("cookie", "c=d"), ("cookie", "e=f")]
    (event,) = peer.feed(h.headers(1, crumbs))
    assert isinstance(event, Request)
    assert event.head.fields == ((b"cookie", b"cookie", b"a=b; c=d; e=f"), (b"x", b"x", b"y"))


@pytest.mark.parametrize(
    ("crumbs", "joined"),
    [
        (["a=b", "", "c=d"], [b"a=b; c=d"]),
        (["", "a=b"], [b"a=b"]),
        (["a=b;", "c=d"], [b"a=b; c=d"]),
        (["a=b; ;", "; ;", ";c=d"], [b"a=b; c=d"]),
        (["a=b; c=d", "e=f"], [b"a=b; c=d; e=f"]),
        (["", ""], []),
        (["a=b;"], [b"a=b;"]),  # nothing to be joined: as it came
        ([""], [b""]),
    ],
)
def test_8_2_3_oddities_in_crumbs_make_no_empty_pair(peer: ClientPeer, crumbs: list[str], joined: list[bytes]) -> None:
    (event,) = peer.feed(h.headers(1, [*GET, *(("cookie", crumb) for crumb in crumbs)]))
    assert isinstance(event, Request)
    assert [value for _, _, value in event.head.fields] == joined


@pytest.mark.parametrize("crumb", ["a=b ", " a=b", "a=b\t"])
def test_8_2_3_a_crumb_is_a_field_value_like_others(peer: ClientPeer, crumb: str) -> None:
    cookies = [("cookie", "x=y"), ("cookie", crumb)]
    resets(peer, h.headers(1, [*GET, *cookies]), code=PROTOCOL_ERROR, reason="field-value")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ([*GET, (":status", "200")], "pseudo-unknown"),
        ([*GET, (":foo", "bar")], "pseudo-unknown"),
        ([GET[0], ("x", "y"), *GET[1:]], "pseudo-after-field"),
        ([*GET, (":path", "/")], "pseudo-repeated"),
    ],
)
def test_8_3_pseudo_header_fields(peer: ClientPeer, fields: h.Headers, reason: str) -> None:
    resets(peer, h.headers(1, fields), code=PROTOCOL_ERROR, reason=reason)


@pytest.mark.parametrize("missing", [":method", ":scheme", ":path"])
def test_8_3_1_what_a_request_must_have(peer: ClientPeer, missing: str) -> None:
    resets(peer, h.headers(1, [field for field in GET if field[0] != missing]), code=1, reason="pseudo-missing")


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        (":method", "", "method"),
        (":method", "GE T", "method"),
        (":method", "G" * 33, "method"),
        (":scheme", "ftp", "scheme"),
        (":scheme", "HTTPS", "scheme"),
        (":path", "", "path"),
        (":path", "a", "path"),
        (":path", "*", "path"),
        (":path", "/a b", "path"),
        (":path", "/a#b", "path"),
        (":path", "/a\r\nb", "path"),
        (":path", "http://example.org/", "path"),
        (":path", "/\xe4", "path"),
        (":authority", "", "authority"),
        (":authority", "user@example.org", "userinfo"),
        (":authority", "user:pw@example.org:443", "userinfo"),
        (":authority", "exa mple.org", "authority"),
        (":authority", "example.org:x", "authority"),
        (":authority", "example.org/", "authority"),
    ],
)
def test_8_3_1_values_of_pseudo_header_fields(peer: ClientPeer, name: str, value: str, reason: str) -> None:
    fields = [(n, value if n == name else v) for n, v in GET]
    resets(peer, h.headers(1, fields), code=PROTOCOL_ERROR, reason=reason)


def test_8_3_1_options_of_the_server(peer: ClientPeer) -> None:
    (event,) = peer.feed(h.headers(1, [(":method", "OPTIONS"), *GET[1:3], (":path", "*")]))
    assert isinstance(event, Request)
    assert event.head.path == b"*"


def test_8_3_1_host_in_place_of_authority(peer: ClientPeer) -> None:
    (event,) = peer.feed(h.headers(1, [*GET[:2], GET[3], ("host", "Example.org:8443")]))
    assert isinstance(event, Request)
    assert (event.head.host, event.head.authority) == (b"example.org", b"Example.org:8443")
    resets(peer, h.headers(3, [*GET[:2], GET[3]]), code=PROTOCOL_ERROR, reason="no-host", stream_id=3)


def test_8_3_1_host_must_agree_with_authority(peer: ClientPeer) -> None:
    (event,) = peer.feed(h.headers(1, [*GET, ("host", "EXAMPLE.org:443")]))
    assert isinstance(event, Request)
    resets(peer, h.headers(3, [*GET, ("host", "example.net")]), code=1, reason="authority-mismatch", stream_id=3)
    resets(peer, h.headers(7, [*GET, ("host", "example.org:444")]), code=1, reason="authority-mismatch", stream_id=7)


def test_8_3_2_a_response_has_status_first_and_no_other_pseudo_header_field(peer: ClientPeer) -> None:
    peer.feed(h.headers(1))
    peer.connection.send_head(1, encode_response(404, [(b"content-type", b"text/plain")]), end_stream=True)
    peer.take()
    (head,) = peer.of(h.HEADERS)
    assert peer.decoder.decode(head.payload, raw=True) == [(b":status", b"404"), (b"content-type", b"text/plain")]


@pytest.mark.parametrize("allowed", [0, 1])
def test_8_4_nothing_is_pushed_and_a_client_may_not(allowed: int) -> None:
    peer = ClientPeer(bare=True)
    peer.feed(h.PREFACE + h.settings((0x2, allowed)), h.headers(1))
    peer.connection.send_head(1, encode_response(200, [(b"link", b"</a.css>; rel=preload")]), end_stream=True)
    peer.take()
    assert not peer.of(h.PUSH_PROMISE)
    promise = h.frame(h.PUSH_PROMISE, h.END_HEADERS, 3, struct.pack(">L", 2) + h.block(GET))
    fails(peer, promise, code=PROTOCOL_ERROR, reason="push-promise")


def test_8_3_1_two_hosts(peer: ClientPeer) -> None:
    two = [*GET, ("host", "example.org"), ("host", "example.org")]
    resets(peer, h.headers(1, two), code=PROTOCOL_ERROR, reason="two-hosts")


def test_8_5_connect_has_an_authority_only(peer: ClientPeer) -> None:
    (event,) = peer.feed(h.headers(1, [(":method", "CONNECT"), (":authority", "example.org:443")], end_stream=False))
    assert isinstance(event, Request)
    assert (event.head.method, event.head.path, event.head.has_body) == (b"CONNECT", b"", False)
    for stream_id, fields in (
        (3, [(":method", "CONNECT"), *GET[1:]]),
        (7, [(":method", "CONNECT"), (":authority", "example.org")]),
        (11, [(":method", "CONNECT")]),
    ):
        resets(peer, h.headers(stream_id, fields), code=PROTOCOL_ERROR, stream_id=stream_id)


def test_8_5_a_tunnel_takes_no_trailers(peer: ClientPeer) -> None:
    peer.feed(h.headers(1, [(":method", "CONNECT"), *GET[1:], (":protocol", "websocket")], end_stream=False))
    resets(peer, h.headers(1, [("x", "y")]), code=PROTOCOL_ERROR, reason="connect")


def test_8_5_the_two_directions_of_a_tunnel_end_apart(peer: ClientPeer) -> None:
    """RFC 8441: an extended CONNECT asks for a WebSocket."""
    connect = [(":method", "CONNECT"), *GET[1:], (":protocol", "websocket"), ("sec-websocket-version", "13")]
    (event,) = peer.feed(h.headers(1, connect, end_stream=False))
    assert isinstance(event, Request)
    head = event.head
    assert (head.method, head.upgrade, head.protocol, head.has_body) == (b"GET", (b"websocket",), b"websocket", False)
    assert head.request_line == b"CONNECT / HTTP/2.0"
    peer.connection.send_head(1, OK)
    peer.connection.send_data(1, b"bye", end_stream=True)
    peer.take()
    assert not peer.of(h.RST_STREAM)
    assert peer.feed(h.data(1, b"more"), h.data(1, end_stream=True)) == [Body(1, b"more"), BodyEnd(1, ())]
    assert peer.connection.open_streams == 0


@pytest.mark.parametrize("fields", [[*GET, (":protocol", "websocket")], [(":method", "CONNECT"), (":protocol", "x")]])
def test_8_5_protocol_belongs_to_connect_with_a_path(peer: ClientPeer, fields: h.Headers) -> None:
    resets(peer, h.headers(1, fields), code=PROTOCOL_ERROR)


def test_8_1_trailers_go_out_behind_the_body(peer: ClientPeer) -> None:
    peer.feed(h.headers(1))
    peer.connection.send_head(1, encode_response(103, [(b"link", b"</a>")]))
    peer.connection.send_head(1, OK)
    peer.connection.send_data(1, b"body")
    peer.connection.send_trailers(1, encode_fields([(b"grpc-status", b"0")]))
    kinds = [(f.kind, f.flags) for f in peer.take()]
    assert kinds == [(h.HEADERS, 4), (h.HEADERS, 4), (h.DATA, 0), (h.HEADERS, 5)]
    blocks = [peer.decoder.decode(f.payload, raw=True) for f in peer.of(h.HEADERS)]
    assert [dict(block) for block in blocks] == [
        {b":status": b"103", b"link": b"</a>"},
        {b":status": b"200", b"content-type": b"text/plain"},
        {b"grpc-status": b"0"},
    ]


def test_8_6_there_is_no_upgrade(peer: ClientPeer) -> None:
    resets(peer, h.headers(1, [*GET, ("upgrade", "h2c")]), code=PROTOCOL_ERROR, reason="connection-field")


def test_8_7_a_stream_that_is_refused_was_not_processed() -> None:
    """Nobody hears of its request, so the client may send it again."""
    peer = ClientPeer(Limits(max_concurrent_streams=1))
    peer.feed(h.headers(1, POST, end_stream=False))
    (event,) = peer.feed(h.headers(3))
    assert event == StreamReset(3, REFUSED_STREAM, False, "too-many-streams")
    peer.connection.shut_down()
    peer.connection.shut_down()
    peer.feed(h.rst_stream(1))
    (event,) = peer.feed(h.headers(5))
    assert event == StreamReset(5, REFUSED_STREAM, False, "too-many-streams")
    assert [frame.payload[:4] for frame in peer.of(h.GOAWAY)][-1] == struct.pack(">L", 3)


# What binds a server; the others define words or show examples.
SECTIONS = (
    *("3.4", "4.1", "4.2", "4.3", "4.3.1"),
    *("5.1", "5.1.1", "5.1.2", "5.2", "5.2.2", "5.3.1", "5.3.2", "5.4.1", "5.4.2", "5.4.3", "5.5"),
    *("6.1", "6.2", "6.3", "6.4", "6.5", "6.5.2", "6.5.3", "6.6", "6.7", "6.8"),
    *("6.9", "6.9.1", "6.9.2", "6.9.3", "6.10", "7"),
    *("8.1", "8.1.1", "8.2.1", "8.2.2", "8.2.3", "8.3", "8.3.1", "8.3.2", "8.4", "8.5", "8.6", "8.7", "10.5", "10.5.1"),
)


@pytest.mark.parametrize("section", SECTIONS)
def test_every_section_has_a_test(section: str) -> None:
    name = re.compile(f"test_{section.replace('.', '_')}_[a-z]")
    assert any(map(name.match, globals()))


# -- 10.5: more than is good -------------------------------------------------------------------------------------------

_FEW = Rate(10, 1)
CALM = {
    "settings-flood": (h.settings(), Limits(settings=_FEW)),
    "ping-flood": (h.frame(h.PING, payload=bytes(8)), Limits(pings=_FEW)),
    "empty-frame-flood": (h.data(1), Limits(empty_frames=_FEW)),
    "small-frame-flood": (h.data(1, b"x"), Limits(small_frames=_FEW)),
    "priority-flood": (h.frame(h.PRIORITY, 0, 3, bytes(5)), Limits(priorities=_FEW)),
    "window-update-flood": (h.window_update(0, 1), Limits(window_updates=_FEW)),
    "unknown-frame-flood": (h.frame(0xFA), Limits(unknown_frames=_FEW)),
}


@pytest.mark.parametrize("reason", CALM)
def test_10_5_floods(reason: str) -> None:
    frame, limits = CALM[reason]
    peer = ClientPeer(limits)
    peer.feed(h.headers(1, POST, end_stream=False))
    for _ in range(50):  # at the rate that is allowed it may go on for ever
        peer.now += 1
        assert peer.feed(frame) in ([], [Body(1, b"x")])
    fails(peer, *[frame] * 12, code=ENHANCE_YOUR_CALM, reason=reason)


def test_10_5_rapid_reset() -> None:
    peer = ClientPeer(Limits(resets=_FEW))
    floods = [h.headers(stream_id) + h.rst_stream(stream_id) for stream_id in range(1, 41, 2)]
    fails(peer, *floods, code=ENHANCE_YOUR_CALM, reason="reset-flood")
    assert sum(isinstance(e, Request) for e in peer.events) <= 11


def test_10_5_a_reset_that_takes_nothing_back_is_none_too_many() -> None:
    peer = ClientPeer(Limits(resets=_FEW))
    for stream_id in range(1, 81, 4):
        peer.feed(h.headers(stream_id, POST, end_stream=False), h.headers(stream_id + 2, POST, end_stream=False))
        peer.connection.send_head(stream_id, OK, end_stream=True)
        peer.take()
        assert peer.feed(h.rst_stream(stream_id, NO_ERROR)) == [StreamReset(stream_id, 0, True, "reset-by-peer")]
        peer.connection.reset(stream_id + 2, NO_ERROR)
        assert peer.feed(h.rst_stream(stream_id + 2, NO_ERROR)) == []  # it has crossed ours
    assert lives(peer)
    fails(peer, *[h.rst_stream(79)] * 11, code=ENHANCE_YOUR_CALM, reason="reset-flood")


def test_10_5_a_reset_of_a_request_whose_answer_has_begun_counts() -> None:
    peer = ClientPeer(Limits(resets=_FEW))
    for stream_id in range(1, 21, 2):
        peer.feed(h.headers(stream_id, POST, end_stream=False))
        peer.connection.send_head(stream_id, OK)
        peer.take()
        assert peer.feed(h.rst_stream(stream_id)) == [StreamReset(stream_id, 8, True, "reset-by-peer")]
    peer.feed(h.headers(21, POST, end_stream=False))
    peer.connection.send_head(21, OK, end_stream=True)  # not taken yet
    fails(peer, h.rst_stream(21), code=ENHANCE_YOUR_CALM, reason="reset-flood")


LATE = {
    "data": h.data(1, b"x" * 100),
    "empty-data": h.data(1, end_stream=True),
    "trailers": h.headers(1, [("late", "trailer")]),
    "head-without-end": h.headers(1, [("late", "trailer")], end_stream=False),
}


@pytest.mark.parametrize("kind", LATE)
def test_10_5_more_after_our_reset_than_can_be_under_way(kind: str) -> None:
    peer = ClientPeer(Limits(late_frames=_FEW))
    peer.feed(h.headers(1, POST, end_stream=False))
    peer.connection.reset(1, 0)
    taken = 0
    while not peer.connection.failed and taken < 1_000:
        peer.feed(LATE[kind])
        taken += 1
    assert peer.events[-1] == ConnectionFailed(ENHANCE_YOUR_CALM, "late-frame-flood")
    assert 10 < taken <= 32_768 // 100 + 12
    assert peer.goaway_codes() == [ENHANCE_YOUR_CALM]


@pytest.mark.parametrize(
    ("frame", "reason"), [(h.window_update(1, 1), "window-update-flood"), (h.rst_stream(1), "reset-flood")]
)
def test_10_5_window_updates_and_resets_after_our_reset(frame: bytes, reason: str) -> None:
    peer = ClientPeer(Limits(window_updates=_FEW, resets=_FEW))
    peer.feed(h.headers(1, POST, end_stream=False))
    peer.connection.reset(1, 0)
    fails(peer, *[frame] * 12, code=ENHANCE_YOUR_CALM, reason=reason)


@pytest.mark.parametrize("end_stream", [True, False])
def test_10_5_a_request_that_had_ended_has_nothing_under_way(end_stream: bool) -> None:
    peer = ClientPeer(Limits(late_frames=_FEW))
    peer.feed(h.headers(1))
    late = h.data(1, b"x", end_stream=end_stream)
    assert isinstance(peer.feed(late)[-1], StreamReset)  # half-closed
    fails(peer, *[late] * 11, code=ENHANCE_YOUR_CALM, reason="late-frame-flood")


@pytest.mark.parametrize(
    "fault", [lambda s: h.window_update(s, 0), lambda s: h.data(s, b"x"), lambda s: h.window_update(s, 2**31 - 1)]
)
def test_10_5_made_you_reset(fault: object) -> None:
    assert callable(fault)
    peer = ClientPeer(Limits(resets=_FEW))
    floods = [h.headers(stream_id) + fault(stream_id) for stream_id in range(1, 41, 2)]
    fails(peer, *floods, code=ENHANCE_YOUR_CALM, reason="reset-flood")


def test_10_5_refused_streams_count_as_resets() -> None:
    peer = ClientPeer(Limits(max_concurrent_streams=1, resets=_FEW))
    fails(peer, *[h.headers(s) for s in range(1, 41, 2)], code=ENHANCE_YOUR_CALM, reason="reset-flood")


def test_10_5_1_a_head_above_the_limit_is_answered() -> None:
    peer = ClientPeer(Limits(max_header_list_bytes=2_000))
    (event,) = peer.feed(h.headers(1, [*GET, ("x", "y" * 2_000)], end_stream=False))
    assert event == RequestRefused(1, 431, "head-too-large")
    assert peer.feed(h.data(1, b"its body is dropped")) == []
    peer.connection.send_head(1, encode_response(431, []), end_stream=True)
    peer.take()
    assert peer.reset_codes(1) == [NO_ERROR]
    assert lives(peer)


@pytest.mark.parametrize(
    ("field", "status"),
    [(("expect", "a-miracle"), 417), ((":path", "/" + "a" * 5_000), 414), (("x", "y" * 9_000), 431)],
)
def test_10_5_1_requests_that_are_answered_and_not_taken(field: tuple[str, str], status: int) -> None:
    peer = ClientPeer(Limits(max_target_bytes=4_000, max_header_list_bytes=8_000))
    (event,) = peer.feed(h.headers(1, [*(f for f in GET if f[0] != field[0]), field]))
    assert isinstance(event, RequestRefused)
    assert event.status == status


def test_10_5_1_too_many_fields() -> None:
    peer = ClientPeer(Limits(max_fields=10))
    assert isinstance(peer.feed(h.headers(1, [*GET, *[("x", "y")] * 10]))[0], Request)
    assert peer.feed(h.headers(3, [*GET, *[("x", "y")] * 11])) == [RequestRefused(3, 431, "too-many-fields")]


def test_10_5_1_a_head_far_above_the_limit_ends_the_connection() -> None:
    peer = ClientPeer(Limits(max_header_list_bytes=1_000))
    fails(peer, h.headers(1, [*GET, ("x", "y" * 5_000)]), code=ENHANCE_YOUR_CALM, reason="header-list-size")


def test_10_5_1_an_hpack_bomb() -> None:
    peer = ClientPeer()
    entry = b"\x40" + b"\x01a" + b"\x7f\x81\x1e" + b"b" * 3_968  # one large entry of the table, named 16,000 times
    peer.feed(h.frame(h.HEADERS, 5, 1, h.block(GET) + entry))
    bomb = h.frame(h.HEADERS, 5, 3, h.block(GET) + b"\xbe" * 16_000)
    fails(peer, bomb, code=ENHANCE_YOUR_CALM, reason="header-list-size")


def test_10_5_1_continuation_without_end() -> None:
    peer = ClientPeer()
    more = h.frame(h.CONTINUATION, 0, 1, b"\x00\x01x\x01y")
    start = h.headers(1, end_headers=False)
    fails(peer, start, *[more] * 33, code=ENHANCE_YOUR_CALM, reason="continuation-flood")


def test_10_5_1_a_block_that_grows_and_grows() -> None:
    peer = ClientPeer()
    more = h.frame(h.CONTINUATION, 0, 1, bytes(16_000))
    fails(peer, h.headers(1, end_headers=False), *[more] * 9, code=ENHANCE_YOUR_CALM, reason="header-block-size")


def test_10_5_answers_that_nobody_reads() -> None:
    peer = ClientPeer(Limits(pings=Rate(10_000, 0)))
    events = [e for _ in range(2_000) for e in peer.connection.feed(h.frame(h.PING, payload=bytes(8)), 0.0)]
    assert events == [ConnectionFailed(ENHANCE_YOUR_CALM, "unread-answers")]
    assert len(peer.connection.take_output()) < 20_000
