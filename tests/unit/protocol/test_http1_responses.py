"""Responses of an upstream: heads, framing, exchanges on one connection."""

from __future__ import annotations

import pytest

from proxy.protocol.http1 import (
    CHUNKED,
    CLOSED,
    END,
    HOP_BY_HOP,
    LENGTH,
    NO_BODY,
    RESPONSE_REASONS,
    UNTIL_CLOSE,
    HeadCache,
    Limits,
    ProtocolError,
    ResponseDecoder,
    ResponseHead,
)
from tests.harness.codec import LIMITS, bytewise, drain, responses


def head_of(data: bytes, method: bytes = b"GET") -> ResponseHead:
    """The first head in ``data``, the same in one piece, byte by byte, and out of a cache."""
    cache = HeadCache()
    heads = [
        responses(data, method, cache=cache, eof=False)[0],
        responses(bytewise(data), method, eof=False)[0],
        responses(data, method, cache=cache, eof=False)[0],
    ]
    assert heads[0] == heads[1] == heads[2]
    assert isinstance(heads[0], ResponseHead), heads[0]
    return heads[0]


def answer(*lines: bytes, start: bytes = b"HTTP/1.1 200 OK") -> bytes:
    return b"\r\n".join([start, *lines, b"", b""])


REFUSED = [
    *[
        (answer(start=start), "status-line")
        for start in (
            *(b"HTTP/1.1", b"HTTP/1.1 ", b"HTTP/1.1 20", b"HTTP/1.1 2000 OK", b"HTTP/1.1 099 x", b"HTTP/1.1 600 x"),
            *(b"HTTP/1.1 999 x", b"HTTP/1.1  200 OK", b" HTTP/1.1 200 OK", b"HTTP/1.1 +20 OK", b"HTTP/1.1\t200 OK"),
            *(
                b"HTTP/1.1 200OK",
                b"HTTP/1.1 200 O\x00K",
                b"HTTP/1.1 200 O\x7f",
                b"http/1.1 200 OK",
                b"ICY 200 OK",
                b"HTTP/1 200",
            ),
            *(b"HTTP/1.10 200 OK", b"", b"HTTP/1.1 \xb2\xb0\xb0 OK"),
        )
    ],
    (answer(start=b"HTTP/2.0 200 OK"), "version"),
    (answer(start=b"HTTP/1.2 200 OK"), "version"),
    (b"HTTP/1.1 200 OK\nContent-Length: 0\n\n", "bare-lf"),
    (b"HTTP/1.1 200 OK\r\nX: y\nContent-Length: 0\r\n\r\n", "bare-lf"),
    (b"HTTP/1.1 200 OK\r\nX: y\rZ: a\r\n\r\n", "bare-cr"),
    (answer(b"X: a", b" b"), "obs-fold"),
    (answer(b"X : a"), "space-before-colon"),
    (answer(b"X"), "field-line"),
    (answer(b": a"), "field-name"),
    (answer(b"\xe9: a"), "field-name"),
    (answer(b"X: \x00"), "field-value"),
    (answer(b"Content-Length: +5"), "content-length"),
    (answer(b"Content-Length: 5, 5"), "content-length"),
    (answer(b"Content-Length: 5", b"Content-Length: 6"), "two-content-lengths"),
    (answer(b"Content-Length: 5", b"Content-Length: 5"), "two-content-lengths"),
    (answer(b"Content-Length: 5", b"Transfer-Encoding: chunked"), "length-and-coding"),
    (answer(b"Transfer-Encoding: gzip, chunked"), "unknown-coding"),
    (answer(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"), "transfer-encoding"),
    (answer(b"Transfer-Encoding: chunked", start=b"HTTP/1.0 200 OK"), "coding-in-1.0"),
    (answer(b"Connection: a b"), "connection"),
    (answer(*[b"X: y"] * 21), "too-many-fields"),
    (answer(b"X: " + b"y" * 2048), "head-too-large"),
]


@pytest.mark.parametrize(("data", "reason"), REFUSED, ids=[f"{reason}-{n}" for n, (_, reason) in enumerate(REFUSED)])
def test_refused(data: bytes, reason: str) -> None:
    assert reason in RESPONSE_REASONS
    assert responses(data, cache=HeadCache()) == [f"! 502 {reason}"]
    assert responses(bytewise(data)) == [f"! 502 {reason}"]


def test_limits_do_not_wait_for_the_end_of_the_head() -> None:
    for data, reason in ((b"X" * 200, "head-too-large"), (b"HTTP/1.1 200 OK\r\n" + b"X:\r\n" * 6, "too-many-fields")):
        assert responses(data, limits=Limits(100, 5), eof=False) == [f"! 502 {reason}"]


def test_a_plain_head() -> None:
    head = head_of(b"HTTP/1.1 404 Not \tF\xf6und\r\nX-Y: z \r\nContent-Length: 3\r\nConnection: x-y\r\n\r\nabc")
    assert (head.status, head.reason, head.version) == (404, b"Not \tF\xf6und", 11)
    assert head.fields == (
        (b"x-y", b"X-Y", b"z"),
        (b"content-length", b"Content-Length", b"3"),
        (b"connection", b"Connection", b"x-y"),
    )
    assert (head.content_length, head.framing, head.keep_alive, head.interim) == (3, LENGTH, True, False)
    assert head.upgrade == ()
    assert head.hop_by_hop == HOP_BY_HOP | {b"x-y"}
    assert head.get(b"x-y") == b"z"
    assert head.get(b"y") is None


@pytest.mark.parametrize("start", [b"HTTP/1.1 200", b"HTTP/1.1 200 "])
def test_the_reason_phrase_may_be_missing(start: bytes) -> None:
    assert head_of(answer(b"Content-Length: 0", start=start)).reason == b""


@pytest.mark.parametrize(
    ("start", "lines", "method", "framing", "length", "keep_alive"),
    [
        (b"HTTP/1.1 200 OK", [b"Content-Length: 0"], b"GET", NO_BODY, 0, True),
        (b"HTTP/1.1 200 OK", [b"Content-Length: 7"], b"GET", LENGTH, 7, True),
        (b"HTTP/1.1 200 OK", [b"Transfer-Encoding: Chunked"], b"GET", CHUNKED, None, True),
        (b"HTTP/1.1 200 OK", [], b"GET", UNTIL_CLOSE, None, False),
        (b"HTTP/1.1 200 OK", [b"Content-Length: 7"], b"HEAD", NO_BODY, 7, True),
        (b"HTTP/1.1 200 OK", [b"Transfer-Encoding: chunked"], b"HEAD", NO_BODY, None, True),
        (b"HTTP/1.1 200 OK", [], b"HEAD", NO_BODY, None, True),
        (b"HTTP/1.1 204 No Content", [], b"GET", NO_BODY, None, True),
        (b"HTTP/1.1 204 No Content", [b"Content-Length: 7"], b"GET", NO_BODY, 7, True),
        (b"HTTP/1.1 304 Not Modified", [b"Content-Length: 7"], b"GET", NO_BODY, 7, True),
        (b"HTTP/1.1 304 Not Modified", [b"Transfer-Encoding: chunked"], b"GET", NO_BODY, None, True),
        (b"HTTP/1.1 200 OK", [b"Content-Length: 7", b"Connection: close"], b"GET", LENGTH, 7, False),
        (b"HTTP/1.0 200 OK", [b"Content-Length: 7"], b"GET", LENGTH, 7, False),
        (b"HTTP/1.0 200 OK", [b"Content-Length: 7", b"Connection: keep-alive"], b"GET", LENGTH, 7, True),
        (b"HTTP/1.0 200 OK", [b"Connection: keep-alive"], b"GET", UNTIL_CLOSE, None, False),
        (b"HTTP/1.1 101 Switching", [b"Connection: upgrade", b"Upgrade: websocket"], b"GET", NO_BODY, None, False),
    ],
)
def test_framing(
    start: bytes, lines: list[bytes], method: bytes, framing: int, length: int | None, keep_alive: bool
) -> None:
    head = head_of(answer(*lines, start=start), method)
    assert (head.framing, head.content_length, head.keep_alive) == (framing, length, keep_alive)


def test_the_same_bytes_mean_another_thing_in_answer_to_head() -> None:
    data = answer(b"Content-Length: 5")
    decoder = ResponseDecoder(LIMITS, HeadCache())
    for method in (b"HEAD", b"GET", b"GET", b"HEAD", b"HEAD", b"GET"):
        decoder.start(method)
        events = drain(decoder, data if method == b"HEAD" else data + b"hello", eof=False)
        assert isinstance(events[0], ResponseHead)
        assert events[1:] == ([] if method == b"HEAD" else [b"hello", "end"])
        assert decoder.at_rest


def test_interim_heads_come_first() -> None:
    data = answer(start=b"HTTP/1.1 100 Continue") + answer(b"Link: x", start=b"HTTP/1.1 103 Early Hints")
    data += answer(b"Content-Length: 2") + b"ok"
    for parts in (data, bytewise(data)):
        events = responses(parts)
        heads = [(event.status, event.interim) for event in events if isinstance(event, ResponseHead)]
        assert heads == [(100, True), (103, True), (200, False)]
        assert events[3:] == [b"ok", "end", "closed"]


def test_after_101_the_rest_is_a_tunnel() -> None:
    decoder = ResponseDecoder(LIMITS)
    decoder.start(b"GET")
    data = answer(b"Connection: Upgrade", b"Upgrade: WebSocket", start=b"HTTP/1.1 101 Switching Protocols")
    decoder.feed(data + b"HTTP/1.1 200 OK\r\n\r\n")
    head = decoder.next_event()
    assert isinstance(head, ResponseHead)
    assert (head.upgrade, head.interim) == ((b"websocket",), False)
    assert decoder.next_event() is None
    assert not decoder.at_rest
    assert decoder.take_rest() == b"HTTP/1.1 200 OK\r\n\r\n"
    assert decoder.next_event() is None
    assert not decoder.at_rest
    decoder.feed_eof()
    assert decoder.next_event() is CLOSED


def test_until_close() -> None:
    for parts in (answer() + b"hello", bytewise(answer() + b"hello")):
        assert responses(parts)[1:] == [b"hello", "end", "closed"]
        assert responses(parts, eof=False)[1:] == [b"hello"]
    assert responses(answer())[1:] == ["end", "closed"]


def test_at_rest_between_exchanges_only() -> None:
    decoder = ResponseDecoder(LIMITS)
    assert decoder.at_rest
    decoder.start(b"GET")
    assert not decoder.at_rest
    with pytest.raises(RuntimeError):
        decoder.start(b"GET")
    decoder.feed(answer(b"Content-Length: 2"))
    assert isinstance(decoder.next_event(), ResponseHead)
    assert not decoder.at_rest
    decoder.feed(b"ok")
    assert decoder.next_event() == b"ok"
    assert not decoder.at_rest
    assert decoder.next_event() is END
    assert decoder.at_rest
    decoder.start(b"HEAD")
    decoder.feed(answer(b"Content-Length: 2") + b"x")
    assert isinstance(decoder.next_event(), ResponseHead)
    assert not decoder.at_rest, "a byte is left over"
    with pytest.raises(RuntimeError):
        decoder.start(b"GET")


def test_bytes_that_nobody_asked_for_are_an_error() -> None:
    decoder = ResponseDecoder(LIMITS)
    decoder.feed(answer(b"Content-Length: 0"))
    for _ in range(2):
        with pytest.raises(ProtocolError, match="unsolicited") as caught:
            decoder.next_event()
        assert caught.value.status == 502
    assert not decoder.at_rest
    assert responses(answer(b"Content-Length: 0") * 2)[1:] == ["! 502 unsolicited"]


def test_an_ended_connection_is_not_at_rest() -> None:
    decoder = ResponseDecoder(LIMITS)
    decoder.feed_eof()
    assert decoder.next_event() is CLOSED
    assert not decoder.at_rest


def test_connect_is_never_sent() -> None:
    with pytest.raises(ValueError, match="CONNECT"):
        ResponseDecoder(LIMITS).start(b"CONNECT")


CONTINUE = answer(start=b"HTTP/1.1 100 Continue")


@pytest.mark.parametrize(
    ("data", "last"),
    [
        (b"", "closed"),
        (b"H", "! 502 incomplete"),
        (answer(b"Content-Length: 5")[:-1], "! 502 incomplete"),
        (CONTINUE, "! 502 incomplete"),
        (CONTINUE + b"HTTP", "! 502 incomplete"),
        (answer(b"Content-Length: 5"), "! 502 incomplete"),
        (answer(b"Content-Length: 5") + b"hell", "! 502 incomplete"),
        (answer(b"Content-Length: 5") + b"hello", "closed"),
        (answer(b"Transfer-Encoding: chunked") + b"5\r\nhello\r\n0\r\n", "! 502 incomplete"),
        (answer(b"Transfer-Encoding: chunked") + b"5\r\nhello\r\n0\r\n\r\n", "closed"),
    ],
)
def test_the_end_of_input(data: bytes, last: str) -> None:
    assert responses(data)[-1] == last
    assert responses(bytewise(data))[-1] == last
