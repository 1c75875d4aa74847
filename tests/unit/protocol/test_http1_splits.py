"""The same bytes give the same events however they are cut, and each costs the same however they are cut."""

from __future__ import annotations

import re
from types import ModuleType

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from proxy.protocol.http1 import (
    CLOSED,
    HeadCache,
    Limits,
    RequestDecoder,
    RequestHead,
    ResponseDecoder,
    authority,
    body,
    grammar,
    request,
)
from proxy.protocol.http1.body import MAX_EXTENSION_BYTES, ChunkedBody
from proxy.protocol.http1.errors import request_fault
from proxy.protocol.http1.grammar import SectionScan
from tests.harness.codec import bytewise, drain, pieces, requests, responses

# Lines that make messages, and the ways to spoil them; small limits, so that they are met as well.
TINY = Limits(max_head_bytes=120, max_fields=5, max_target_bytes=20, max_trailer_bytes=40)
PARTS = [
    *(
        b"GET / HTTP/1.1\r\n",
        b"POST /abcdefghijklmnopq HTTP/1.1\r\n",
        b"GET http://a/ HTTP/1.0\r\n",
        b"OPTIONS * HTTP/1.1\r\n",
    ),
    *(b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 100 Continue\r\n", b"HTTP/1.0 204\r\n", b"HTTP/1.1 101 x\r\n"),
    *(b"Host: a\r\n", b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n"),
    *(b"X: y\r\n", b"X : y\r\n", b" folded\r\n", b": y\r\n", b"X: " + b"y" * 30 + b"\r\n", b"Host: b\r\n"),
    *(b"\r\n", b"\r\n\r\n", b"\n", b"\r", b"\x00", b" ", b"abc", b"\xff", b":"),
    *(b"3\r\nabc\r\n", b"0\r\n\r\n", b"0\r\nT: u\r\n\r\n", b"1;a=b\r\nx\r\n", b"+3\r\n", b"fffffffffffffffff\r\n"),
]
WHOLE = [
    b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc",
    b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n1;a=b\r\nx\r\n0\r\nT: u\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc",
    b"HTTP/1.1 200 OK\r\n\r\nuntil close",
]
STREAMS = st.lists(st.sampled_from(WHOLE + PARTS), max_size=12).map(b"".join)
CUTS = st.lists(st.integers(1, 400), max_size=12)


@settings(max_examples=200, deadline=None)
@given(STREAMS, CUTS)
@example(b"\r\n\r", [1, 2])
@example(b"\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n\r\n", [1])
@example(b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 4 + b"\r\n", [40])
@example(b"GET / HTTP/1.1\r\nX: " + b"y" * 99 + b"\r\r\n", [119, 120])
@example(b"GET / HTTP/1.1\r\nX: " + b"y" * 101 + b"\rz", [119, 120])
@example(b"GET / HTTP/1.1\r\nX: " + b"y" * 100 + b"\n", [119, 120])
@example(b"GET / HTTP/1.1\r\nX: " + b"y" * 101 + b"\n", [119, 120])
def test_any_split_of_requests_gives_the_same_events(data: bytes, cuts: list[int]) -> None:
    expected = requests(data, limits=TINY, cache=HeadCache())
    assert requests(pieces(data, cuts), limits=TINY, cache=HeadCache()) == expected
    assert requests(bytewise(data), limits=TINY) == expected


@settings(max_examples=200, deadline=None)
@given(STREAMS, CUTS, st.sampled_from([b"GET", b"HEAD"]))
def test_any_split_of_responses_gives_the_same_events(data: bytes, cuts: list[int], method: bytes) -> None:
    expected = responses(data, method, limits=TINY, cache=HeadCache())
    assert responses(pieces(data, cuts), method, limits=TINY, cache=HeadCache()) == expected
    assert responses(bytewise(data), method, limits=TINY) == expected


@settings(max_examples=200, deadline=None)
@given(STREAMS, CUTS)
def test_the_bytes_that_a_decoder_holds_do_not_depend_on_the_split(data: bytes, cuts: list[int]) -> None:
    """Events seen so far are all that the bytes fed so far allow: nothing that could be told waits in a decoder."""
    whole = RequestDecoder(TINY)
    parts = RequestDecoder(TINY)
    events = drain(whole, data, eof=False)
    assert events == drain(parts, pieces(data, cuts), eof=False)
    if events and isinstance(events[-1], str) and events[-1].startswith("!"):
        return
    assert whole.buffered == parts.buffered
    assert whole.started == parts.started
    assert whole.take_rest() == parts.take_rest()


@given(st.binary(max_size=200))
def test_noise_raises_nothing_but_protocol_errors(data: bytes) -> None:
    assert requests(data, limits=TINY) == requests(bytewise(data), limits=TINY)
    assert responses(data, limits=TINY) == responses(bytewise(data), limits=TINY)


class CountingScan(SectionScan):
    """Adds up how many bytes each call is given that an earlier call has not dealt with."""

    looked_at = 0

    def end(self, data: bytes | bytearray, start: int) -> int:
        CountingScan.looked_at += len(data) - start - self.scanned
        return super().end(data, start)


BIG = Limits(max_head_bytes=30_000, max_fields=5_000, max_target_bytes=20_000, max_trailer_bytes=30_000)
LONG_SECTIONS = [b"X: y\r\n" * 3_000, b"X: " + b"y" * 18_000 + b"\r\n", b"X:\r\n" * 4_000]


@pytest.mark.parametrize("section", LONG_SECTIONS)
def test_a_head_byte_by_byte_is_looked_at_once(section: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.protocol.http1.grammar.SectionScan", CountingScan)
    monkeypatch.setattr("proxy.protocol.http1.response.SectionScan", CountingScan)
    monkeypatch.setattr("proxy.protocol.http1.body.SectionScan", CountingScan)
    head = b"GET / HTTP/1.1\r\nHost: a\r\n" + section + b"\r\n"
    response = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n" + section + b"\r\n"
    trailers = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + section + b"\r\n"
    for data, run in ((head, requests), (response, responses), (trailers, requests)):
        CountingScan.looked_at = 0
        assert run(bytewise(data), limits=BIG)[-1] == "closed"
        # A CR is looked at again with the byte after it; nothing else is.
        assert 0 < CountingScan.looked_at <= len(data) + data.count(b"\r")


def test_a_size_line_byte_by_byte_is_searched_once() -> None:
    class Searched(bytearray):
        bytes_searched = 0

        def find(self, sub: bytes, start: int = 0, end: int = 0) -> int:  # type: ignore[override]
            Searched.bytes_searched += min(end, len(self)) - start
            return super().find(sub, start, end)

    decoder = ChunkedBody(request_fault, BIG)
    held = Searched()
    line = b"1;" + b"a" * (MAX_EXTENSION_BYTES - 1) + b"\r\n"
    for byte in line[:-1]:
        held.append(byte)
        assert decoder.decode(held, 0) == (None, 0)
    held += b"\nx"
    assert decoder.decode(held, 0) == (b"x", len(line) + 1)
    assert len(line) - 2 <= Searched.bytes_searched <= len(line) + 1


def test_a_byte_at_a_time_is_appended_not_copied() -> None:
    for decoder in (RequestDecoder(BIG), ResponseDecoder(BIG)):
        held = set()
        for byte in bytewise(b"HTTP/1.1 200 OK\r\n" if isinstance(decoder, ResponseDecoder) else b"GET / HTTP/1.1\r\n"):
            decoder.feed(byte)
            if isinstance(decoder._data, bytearray):
                held.add(id(decoder._data))
        assert len(held) == 1


REPEATS = [
    *(
        b"a",
        b" ",
        b"\t",
        b":",
        b"a:",
        b"a: ",
        b"X: y\r\n",
        b"X:\r\n",
        b"a\r\n",
        b"\r\n",
        b",",
        b"a,",
        b"a , ",
        b";a",
        b";a=b",
    ),
    *(
        b';a="b"',
        b';a="\\"',
        b"a.",
        b"a-",
        b"1",
        b"\xff",
        b"GET / HTTP/1.1\r\n",
        b"HTTP/1.1 200 OK\r\n",
        b"http://",
        b"/",
        b"?",
    ),
]
STARTS = [b"", b"GET / HTTP/1.1\r\n", b"GET /", b"GET / HTTP/1.1\r\nX: ", b"HTTP/1.1 200 ", b"[", b';a="', b"http://"]


@pytest.mark.parametrize("module", [grammar, authority, body, request])
def test_no_expression_tries_a_second_way_through(module: ModuleType) -> None:
    """Near misses of half a megabyte: in linear time they take moments, else the test's time-out ends it."""
    expressions = [value for value in vars(module).values() if isinstance(value, re.Pattern)]
    assert expressions
    for expression in expressions:
        for start in STARTS:
            for repeat in REPEATS:
                text = start + repeat * (500_000 // len(repeat))
                for end in (b"\x00", b"\r", b"\r\n\x00"):
                    expression.fullmatch(text + end)


def test_closed_is_one_value() -> None:
    decoder = RequestDecoder(TINY)
    decoder.feed_eof()
    assert decoder.next_event() is CLOSED


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(WHOLE), min_size=1, max_size=4).map(b"".join), st.lists(st.sampled_from(WHOLE), max_size=3)
)
def test_the_shortcut_for_a_whole_request_only_tells_what_the_long_way_does(data: bytes, before: list[bytes]) -> None:
    cache = HeadCache()
    expected = requests(data, limits=TINY, cache=cache, eof=False)
    decoder = RequestDecoder(TINY, cache)
    drain(decoder, before, eof=False)
    under_way = decoder.buffered or requests(b"".join(before), limits=TINY)[-1] != "closed"
    head = decoder.take_whole(data)
    if head is not None:
        assert not under_way
        assert [head] == expected
        assert decoder.buffered == 0
    elif not under_way:
        assert len(expected) > 1 or not isinstance(expected[0], RequestHead)


@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
@pytest.mark.parametrize(
    "data", [*WHOLE, b"HTTP/1.1 204 x\r\n\r\n", b"HTTP/1.1 101 x\r\n\r\n", b"HTTP/1.1 100 x\r\n\r\n"]
)
def test_the_shortcut_for_a_whole_response_only_tells_what_the_long_way_does(data: bytes, method: bytes) -> None:
    cache = HeadCache()
    responses(data, limits=TINY, cache=cache, eof=False)
    for extra in (b"", b"x"):
        expected = responses(data + extra, method, limits=TINY, cache=cache, eof=False)
        decoder = ResponseDecoder(TINY, cache)
        assert decoder.take_whole(data) is None, "no exchange is open"
        decoder.start(method)
        whole = decoder.take_whole(data + extra)
        if whole is None:
            assert drain(decoder, data + extra, eof=False) == expected, "nothing has been taken"
            continue
        head, content = whole
        assert expected == ([head, content, "end"] if content else [head])
        assert decoder.at_rest
        decoder.start(b"GET")


def test_the_shortcuts_are_taken() -> None:
    cache = HeadCache()
    requests(WHOLE[0], limits=TINY, cache=cache)
    assert RequestDecoder(TINY, cache).take_whole(WHOLE[0]) is not None
    cache = HeadCache()
    data = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc"
    responses(data, limits=TINY, cache=cache)
    decoder = ResponseDecoder(TINY, cache)
    decoder.start(b"GET")
    assert decoder.take_whole(data) is not None
