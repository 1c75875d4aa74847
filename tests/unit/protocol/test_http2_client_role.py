"""The client's side of HTTP/2, towards upstreams: what a server may answer and what not."""

from __future__ import annotations

import struct

import pytest

from proxy.protocol.http1 import CHUNKED, LENGTH, NO_BODY
from proxy.protocol.http2 import (
    PROTOCOL_ERROR,
    REFUSED_STREAM,
    Body,
    BodyEnd,
    ConnectionFailed,
    GoAway,
    Pong,
    Response,
    StreamReset,
    encode_fields,
    encode_request,
)
from tests.harness import http2 as h
from tests.harness.http2 import OK, ServerPeer

REQUEST = encode_request(b"GET", scheme=b"http", authority=b"example.org", path=b"/", fields=[(b"te", b"trailers")])


def asked(method: bytes = b"GET", *, end_stream: bool = True) -> ServerPeer:
    peer = ServerPeer()
    assert peer.connection.open(REQUEST, method=method, end_stream=end_stream) == 1
    peer.take()
    return peer


def test_the_clients_preface() -> None:
    peer = ServerPeer()
    connection = type(peer.connection)()
    first = connection.take_output()
    assert first.startswith(h.PREFACE)
    settings = h.split_frames(first[len(h.PREFACE) :])[0]
    assert dict(struct.iter_unpack(">HL", settings.payload)) == {0x2: 0, 0x4: 32_768, 0x6: 32_768}


def test_a_request_and_its_response() -> None:
    peer = asked(end_stream=False)
    peer.connection.send_data(1, b"body")
    peer.connection.send_trailers(1, encode_fields([(b"x", b"y")]))
    assert [(f.kind, f.flags) for f in peer.take()] == [(h.DATA, 0), (h.HEADERS, 5)]
    early, final, body, end = peer.feed(
        h.headers(1, [(":status", "103")], end_stream=False),
        h.headers(1, [*OK, ("content-length", "4")], end_stream=False),
        h.data(1, b"four"),
        h.headers(1, [("grpc-status", "0")]),
    )
    assert isinstance(early, Response)
    assert isinstance(final, Response)
    assert (early.head.interim, early.head.status, final.head.interim, final.head.framing) == (True, 103, False, LENGTH)
    assert (body, end) == (Body(1, b"four"), BodyEnd(1, ((b"grpc-status", b"0"),)))
    assert peer.connection.open_streams == 0


@pytest.mark.parametrize(
    ("method", "fields", "ended", "framing"),
    [
        (b"GET", OK, False, CHUNKED),
        (b"GET", OK, True, NO_BODY),
        (b"GET", [*OK, ("content-length", "0")], False, LENGTH),
        (b"HEAD", [*OK, ("content-length", "7")], True, NO_BODY),
        (b"HEAD", [*OK, ("content-length", "7")], False, NO_BODY),
        (b"GET", [(":status", "304"), ("content-length", "7")], True, NO_BODY),
    ],
)
def test_framing(method: bytes, fields: h.Headers, ended: bool, framing: int) -> None:
    (event,) = asked(method).feed(h.headers(1, fields, end_stream=ended))
    assert isinstance(event, Response)
    assert (event.head.framing, event.ended, event.head.version) == (framing, ended, 20)


@pytest.mark.parametrize(
    "frames",
    [
        h.headers(1, [(":status", "200"), (":status", "200")]),
        h.headers(1, [(":status", "99")]),
        h.headers(1, [(":status", "600")]),
        h.headers(1, [(":status", "101")], end_stream=False),
        h.headers(1, [(":status", "100")]),
        h.headers(1, []),
        h.headers(1, [*OK, (":path", "/")]),
        h.headers(1, [*OK, ("connection", "close")]),
        h.headers(1, [*OK, ("transfer-encoding", "chunked")]),
        h.headers(1, [*OK, ("x", "a\r\nset-cookie: b")]),
        h.headers(1, [*OK, ("X", "y")]),
        h.headers(1, [*OK, ("content-length", "5")]),
        h.headers(1, [*OK, ("content-length", "5"), ("content-length", "5")], end_stream=False),
        h.headers(1, [*OK, ("content-length", "5")], end_stream=False) + h.data(1, b"123456"),
        h.headers(1, [*OK, ("content-length", "5")], end_stream=False) + h.data(1, b"1234", end_stream=True),
        h.headers(1, [(":status", "204")], end_stream=False) + h.data(1, b"body"),
        h.data(1, b"before the head"),
        h.headers(1, OK, end_stream=False) + h.headers(1, [*OK]),
        h.headers(1, OK, end_stream=False) + h.headers(1, [("x", "y")], end_stream=False),
    ],
)
def test_responses_that_are_none(frames: bytes) -> None:
    peer = asked()
    last = peer.feed(frames)[-1]
    assert isinstance(last, StreamReset)
    assert (last.code, last.by_peer, last.unprocessed) == (PROTOCOL_ERROR, False, False)
    assert peer.reset_codes(1) == [PROTOCOL_ERROR]


def test_no_body_after_head() -> None:
    (_, reset) = asked(b"HEAD").feed(h.headers(1, OK, end_stream=False), h.data(1, b"x"))
    assert isinstance(reset, StreamReset)


@pytest.mark.parametrize(
    "frame",
    [
        h.headers(2, OK),
        h.headers(3, OK),
        h.frame(h.PUSH_PROMISE, 4, 1, bytes(3) + b"\2"),
        h.settings((2, 1)),
        h.frame(h.PRIORITY_UPDATE, 0, 0, bytes(4)),
    ],
)
def test_what_a_server_may_not_do(frame: bytes) -> None:
    last = asked().feed(frame)[-1]
    assert isinstance(last, ConnectionFailed)
    assert last.code == PROTOCOL_ERROR


def test_what_was_not_processed_may_be_sent_again() -> None:
    peer = ServerPeer()
    for _ in range(3):
        peer.connection.open(REQUEST, method=b"GET", end_stream=True)
    peer.take()
    events = peer.feed(h.goaway(3), h.rst_stream(3, REFUSED_STREAM), h.headers(1, OK))
    assert events[0] == StreamReset(5, REFUSED_STREAM, True, "not-processed", True)
    assert events[1] == GoAway(3, 0)
    assert events[2] == StreamReset(3, REFUSED_STREAM, True, "reset-by-peer", True)
    assert isinstance(events[3], Response)
    assert peer.connection.free_streams == 0
    assert peer.connection.finished
    with pytest.raises(RuntimeError):
        peer.connection.open(REQUEST, method=b"GET", end_stream=True)


def test_goaway_may_not_take_back_what_it_said() -> None:
    peer = asked()
    (_, last) = peer.feed(h.goaway(3), h.goaway(5))
    assert last == ConnectionFailed(PROTOCOL_ERROR, "goaway-id")


def test_the_servers_limit_of_streams() -> None:
    peer = asked()
    peer.feed(h.settings((0x3, 2)))
    assert peer.connection.free_streams == 1
    peer.connection.open(REQUEST, method=b"GET", end_stream=True)
    assert peer.connection.free_streams == 0
    peer.feed(h.headers(1, OK))
    assert peer.connection.free_streams == 1
    peer.feed(h.settings((0x3, 0)))
    assert peer.connection.free_streams == 0


def test_ids_rise_on_the_wire_and_a_reset_follows_its_head() -> None:
    peer = ServerPeer()
    for _ in range(3):
        peer.connection.open(REQUEST, method=b"GET", end_stream=False)
    peer.connection.reset(1, 8)
    assert [(f.kind, f.stream_id) for f in peer.take()] == [(1, 1), (1, 3), (1, 5), (3, 1)]


def test_an_answer_before_the_request_has_ended() -> None:
    peer = asked(end_stream=False)
    peer.feed(h.headers(1, OK))
    assert peer.connection.open_streams == 1
    peer.connection.send_data(1, b"", end_stream=True)
    peer.take()
    assert peer.connection.open_streams == 0


def test_ping() -> None:
    peer = asked()
    peer.connection.ping(b"are you?")
    assert peer.take() == [h.Frame(h.PING, 0, 0, b"are you?")]
    assert peer.feed(h.frame(h.PING, h.ACK, 0, b"are you?")) == [Pong(b"are you?")]
