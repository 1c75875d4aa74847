"""Bodies, pipelining, ends of input, and what the decoders hold on to."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest

from proxy.protocol.http1 import (
    CLOSED,
    END,
    LAST_CHUNK,
    EndOfMessage,
    Incomplete,
    ProtocolError,
    RequestDecoder,
    RequestHead,
    ResponseDecoder,
    encode_chunk,
    encode_last_chunk,
)
from proxy.protocol.http1.body import FORBIDDEN_TRAILERS, MAX_EXTENSION_BYTES, MAX_EXTENSIONS_BYTES
from tests.harness.codec import LIMITS, bytewise, pieces, requests, responses

CHUNKED = b"POST /c HTTP/1.1\r\nHost: example.org\r\nTransfer-Encoding: chunked\r\n\r\n"
LENGTH_5 = b"POST /l HTTP/1.1\r\nHost: example.org\r\nContent-Length: 5\r\n\r\n"
GET = b"GET /g HTTP/1.1\r\nHost: example.org\r\n\r\n"
CHUNKED_RESPONSE = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def body_events(body: bytes) -> list[object]:
    """What follows the head of a chunked message, the same for requests and responses however they are cut."""
    outcomes = [
        requests(CHUNKED + body)[1:],
        requests(bytewise(CHUNKED + body))[1:],
        responses(CHUNKED_RESPONSE + body)[1:],
        responses(bytewise(CHUNKED_RESPONSE + body))[1:],
    ]
    told = [[_without_status(event) for event in events] for events in outcomes]
    assert told[0] == told[1] == told[2] == told[3]
    return list(told[0])


def _without_status(event: object) -> object:
    return f"! {event.split()[2]}" if isinstance(event, str) and event.startswith("!") else event


@pytest.mark.parametrize(
    ("body", "data", "trailers"),
    [
        (b"0\r\n\r\n", b"", ""),
        (b"5\r\nhello\r\n0\r\n\r\n", b"hello", ""),
        (b"5\r\nhello\r\n00006\r\n world\r\n000\r\n\r\n", b"hello world", ""),
        (b"A\r\n0123456789\r\na\r\n0123456789\r\n0\r\n\r\n", b"01234567890123456789", ""),
        (b"0000000000000001\r\nx\r\n0\r\n\r\n", b"x", ""),
        (b"2\r\n\r\n\r\n0\r\n\r\n", b"\r\n", ""),
        (b'1;a\r\nx\r\n1;a=b;c="d;\\"\xe9";e\r\ny\r\n0;z\r\n\r\n', b"xy", ""),
        (b"1;abcdef\r\nx\r\n1;a\r\ny\r\n0;ab\r\n\r\n", b"xy", ""),
        (b"1;" + b"a" * (MAX_EXTENSION_BYTES - 1) + b"\r\nx\r\n0\r\n\r\n", b"x", ""),
        (b"1\r\nx\r\n0\r\nX-Sum:  1 \r\ny:\r\n\r\n", b"x", "((b'X-Sum', b'1'), (b'y', b''))"),
    ],
)
def test_chunked(body: bytes, data: bytes, trailers: str) -> None:
    end = f"end {trailers}" if trailers else "end"
    assert body_events(body) == [*([data] if data else []), end, "closed"]


REFUSED = [
    *[
        (size + b"\r\nhello\r\n0\r\n\r\n", "chunk-size")
        for size in (
            *(b"", b" 5", b"5 ", b"\t5", b"+5", b"-5", b"0x5", b"0X5", b"5_", b"g", b"5h", b"5 ;a", b";a", b"1" * 17),
            *(b"0" * 17, b"\xd9\xa5", b"5\x00", b"5,5", b"5.0", b'"5"'),
        )
    ],
    (b"5\nhello\n0\n\n", "chunk-size"),
    (b"5\rhello\r\n0\r\n\r\n", "chunk-size"),
    (b"5;a\nhello\r\n0\r\n\r\n", "bare-lf"),
    (b"5;a\rb\r\nhello\r\n0\r\n\r\n", "chunk-extension"),
    *[
        (b"5" + extension + b"\r\nhello\r\n0\r\n\r\n", "chunk-extension")
        for extension in (
            b";",
            b";;",
            b";a=",
            b";a b",
            b';a="b',
            b';a="b"c',
            b";a\x00",
            b";\xe9",
            b";a=b=c",
            b';"a"',
            b"; a",
            b";a ",
            b";a =b",
            b";a= b",
        )
    ],
    (b"5;" + b"a" * MAX_EXTENSION_BYTES + b"\r\nhello\r\n0\r\n\r\n", "chunk-line-too-long"),
    (b"5;" + b"a" * 400, "chunk-line-too-long"),
    (b"8000000000000000\r\n", "chunk-too-large"),
    (b"FFFFFFFFFFFFFFFF\r\n", "chunk-too-large"),
    (b"0\n\n", "chunk-size"),
    (b"0\r\n\n", "bare-lf"),
    (b"0\r\n\rX", "bare-cr"),
    (b"0\r\nX: y\n\r\n", "bare-lf"),
    (b"0\r\nX: y\r\n\n", "bare-lf"),
    (b"0\r\nX: a\rb\r\n\r\n", "bare-cr"),
    (b"0\r\n X: y\r\n\r\n", "obs-fold"),
    (b"0\r\nX : y\r\n\r\n", "space-before-colon"),
    (b"0\r\nX\r\n\r\n", "field-line"),
    (b"0\r\n: y\r\n\r\n", "field-name"),
    (b"0\r\nX: \x00\r\n\r\n", "field-value"),
    (b"0\r\n" + b"X: y\r\n" * 21 + b"\r\n", "too-many-fields"),
    (b"0\r\nX: " + b"y" * 256, "trailers-too-large"),
    (b"0\r\n" + (b"X: " + b"y" * 40 + b"\r\n") * 6 + b"\r\n", "trailers-too-large"),
    *[(b"0\r\n%b: x\r\n\r\n" % name.title(), "forbidden-trailer") for name in sorted(FORBIDDEN_TRAILERS)],
]


@pytest.mark.parametrize(("body", "reason"), REFUSED, ids=[f"{reason}-{n}" for n, (_, reason) in enumerate(REFUSED)])
def test_refused(body: bytes, reason: str) -> None:
    assert body_events(body) == [f"! {reason}"]


@pytest.mark.parametrize("bad_end", [b"\n", b"\r\r", b"x", b"XX", b"0\r\n\r\n", b"\n\r"])
def test_a_chunk_must_end_where_its_size_says_and_what_came_before_is_delivered(bad_end: bytes) -> None:
    assert body_events(b"2\r\nab\r\n3\r\ncde" + bad_end) == [b"abcde", "! chunk-end"]


def test_extensions_are_bounded_over_the_whole_message() -> None:
    chunk = b"1;" + b"a" * (MAX_EXTENSION_BYTES - 1) + b"\r\nx\r\n"
    fit = MAX_EXTENSIONS_BYTES // MAX_EXTENSION_BYTES
    assert body_events(chunk * fit + LAST_CHUNK) == [b"x" * fit, "end", "closed"]
    assert body_events(chunk * (fit + 1) + LAST_CHUNK) == [b"x" * fit, "! chunk-extensions-too-large"]


def test_status_of_trailers_over_the_limit() -> None:
    assert requests(CHUNKED + b"0\r\nX: " + b"y" * 256)[1:] == ["! 431 trailers-too-large"]


def test_pipelined_requests_come_in_order() -> None:
    data = GET + LENGTH_5 + b"hello" + b"\r\n" + CHUNKED + b"1\r\nx\r\n0\r\nT: u\r\n\r\n" + b"\r\n" + GET + b"\r\n"
    for parts in (data, bytewise(data)):
        events = requests(parts)
        names = [event.path if isinstance(event, RequestHead) else event for event in events]
        assert names == [b"/g", b"/l", b"hello", "end", b"/c", b"x", "end ((b'T', b'u'),)", b"/g", "closed"]


@pytest.mark.parametrize(
    ("data", "last"),
    [
        (b"", "closed"),
        (b"\r\n", "closed"),
        (b"\r", "! 400 incomplete"),
        (b"G", "! 400 incomplete"),
        (GET[:-1], "! 400 incomplete"),
        (GET, "closed"),
        (GET + b"\r\n", "closed"),
        (GET + GET[:5], "! 400 incomplete"),
        (LENGTH_5, "! 400 incomplete"),
        (LENGTH_5 + b"hell", "! 400 incomplete"),
        (LENGTH_5 + b"hello", "closed"),
        *[(CHUNKED + b"5;a\r\nhello\r\n0\r\nX: y\r\n\r\n"[:n], "! 400 incomplete") for n in range(23)],
        (CHUNKED + b"5;a\r\nhello\r\n0\r\nX: y\r\n\r\n", "closed"),
    ],
)
def test_the_end_of_input(data: bytes, last: str) -> None:
    assert requests(data)[-1] == last
    assert requests(bytewise(data))[-1] == last


def test_incomplete_is_an_error_of_its_own() -> None:
    decoder = RequestDecoder(LIMITS)
    decoder.feed(b"GET")
    assert decoder.next_event() is None
    decoder.feed_eof()
    with pytest.raises(Incomplete):
        decoder.next_event()
    with pytest.raises(Incomplete):
        decoder.next_event()


def bad_request() -> RequestDecoder:
    decoder = RequestDecoder(LIMITS)
    decoder.feed(b"GET\r\n\r\n")
    return decoder


def bad_response() -> ResponseDecoder:
    decoder = ResponseDecoder(LIMITS)
    decoder.start(b"GET")
    decoder.feed(b"HTTP/1.1 2OO so what\r\n\r\n")
    return decoder


@pytest.mark.parametrize("make", [bad_request, bad_response])
def test_an_error_that_is_remembered_holds_nobody_who_decoded(
    make: Callable[[], RequestDecoder | ResponseDecoder],
) -> None:
    class Exchange:
        """What is at work while an error is raised."""

    def decode() -> weakref.ref[Exchange]:
        exchange = Exchange()
        with pytest.raises(ProtocolError):
            decoder.next_event()
        return weakref.ref(exchange)

    decoder = make()
    gc.disable()
    try:
        assert [decode()(), decode()()] == [None, None]
    finally:
        gc.enable()


def test_closed_stays_closed() -> None:
    decoder = RequestDecoder(LIMITS)
    decoder.feed_eof()
    assert decoder.next_event() is CLOSED
    assert decoder.next_event() is CLOSED


def test_started_tells_that_a_next_head_has_begun() -> None:
    decoder = RequestDecoder(LIMITS)
    assert not decoder.started
    decoder.feed(b"G")
    assert decoder.started
    decoder.feed(GET[1:] + b"\r\n")
    assert isinstance(decoder.next_event(), RequestHead)
    assert decoder.next_event() is None
    assert not decoder.started, "an empty line begins no request"
    decoder.feed(LENGTH_5 + b"he")
    assert decoder.started
    assert isinstance(decoder.next_event(), RequestHead)
    assert not decoder.started, "what is held belongs to the body"
    decoder.feed(b"lloG")
    assert decoder.next_event() == b"hello"
    assert decoder.next_event() is END
    assert decoder.started


def test_data_comes_joined_and_a_whole_piece_is_not_copied() -> None:
    decoder = RequestDecoder(LIMITS)
    decoder.feed(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n")
    assert isinstance(decoder.next_event(), RequestHead)
    piece = b"x" * 60
    decoder.feed(piece)
    assert decoder.next_event() is piece
    assert decoder.next_event() is None
    decoder.feed(b"y" * 20)
    decoder.feed(b"z" * 20 + b"rest")
    assert decoder.next_event() == b"y" * 20 + b"z" * 20
    assert decoder.next_event() == EndOfMessage()
    assert decoder.buffered == 4
    assert decoder.take_rest() == b"rest"
    assert decoder.buffered == 0

    decoder = RequestDecoder(LIMITS)
    decoder.feed(CHUNKED + b"64\r\n" + piece)
    assert isinstance(decoder.next_event(), RequestHead)
    assert decoder.next_event() == piece
    piece = b"y" * 40
    decoder.feed(piece)
    assert decoder.next_event() is piece
    decoder.feed(b"\r\n1\r\na\r\n2\r\nbc\r\n0\r\n")
    assert decoder.next_event() == b"abc"
    assert decoder.next_event() is None
    decoder.feed(b"\r\n")
    assert decoder.next_event() is END


def test_nothing_is_held_between_requests() -> None:
    decoder = RequestDecoder(LIMITS)
    for part in (GET, LENGTH_5 + b"hello", CHUNKED + LAST_CHUNK, *bytewise(GET)):
        decoder.feed(part)
        while decoder.next_event() is not None:
            pass
    assert decoder.buffered == 0
    assert decoder._data == b""
    assert type(decoder._data) is bytes


def test_take_rest_after_an_upgrade() -> None:
    decoder = RequestDecoder(LIMITS)
    for part in bytewise(GET + b"\x81\x05hello"):
        decoder.feed(part)
    assert isinstance(decoder.next_event(), RequestHead)
    assert decoder.take_rest() == b"\x81\x05hello"
    assert decoder.take_rest() == b""


def test_encoding() -> None:
    assert encode_chunk(b"x" * 26) == b"1a\r\n" + b"x" * 26 + b"\r\n"
    assert encode_chunk(b"") == b""
    assert encode_last_chunk(()) == LAST_CHUNK == b"0\r\n\r\n"
    trailers = ((b"X-Sum", b"1"), (b"Y", b""))
    body = encode_chunk(b"ab") + encode_chunk(b"") + encode_chunk(b"c") + encode_last_chunk(trailers)
    assert body_events(body) == [b"abc", f"end {trailers}", "closed"]


def test_ends_are_values() -> None:
    assert EndOfMessage(()) == END
    assert hash(END) == hash(EndOfMessage(()))
    assert EndOfMessage(((b"a", b"b"),)) != END
    assert repr(EndOfMessage(((b"a", b"b"),))) == "EndOfMessage(((b'a', b'b'),))"


def test_every_single_cut_of_a_chunked_body() -> None:
    data = CHUNKED + b"1;abcdef\r\nx\r\n1;a\r\ny\r\n0;ab\r\nX: y\r\n\r\n" + GET
    expected = requests(data)
    assert expected[1:3] == [b"xy", "end ((b'X', b'y'),)"]
    for cut in range(len(data)):
        assert requests(pieces(data, [cut])) == expected, cut
