"""The codec against two independent parsers, h11 and httptools (llhttp), on the same bytes.

Two rules. What we accept, the other accepts too, and reads the same in it; the exceptions are in `LAXER_THAN`. What we
refuse and the other does not, we refuse for a reason that `STRICTER_THAN` explains. So a request that passes here has
one meaning for three parsers, and each difference is a decision that is written down.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.protocol.http1 import UNTIL_CLOSE, ProtocolError, ResponseDecoder, ResponseHead
from tests.harness.readings import (
    LIMITS,
    Message,
    Reading,
    h11_of_requests,
    h11_of_responses,
    httptools_of_requests,
    httptools_of_responses,
    ours_of_requests,
    ours_of_responses,
)

_BOTH = {
    "version": "the other reads any HTTP/x.y, we serve 1.0 and 1.1 only",
    "target": "the other does not take targets apart: forms, fragments, schemes",
    "host": "the other does not look into Host",
    "userinfo": "the other does not look into the authority",
    "authority-mismatch": "the other does not compare the target with Host",
    "expectation": "the other leaves Expect to its user",
    "connection": "the other takes connection options that are no tokens",
    "method": "the other does not bound methods",
    "forbidden-trailer": "the other passes on every trailer",
    "coding-in-1.0": "RFC 9112 section 6.1: framing of HTTP/1.0 with a coding is faulty; the other decodes it",
    "incomplete": "the other was not asked at the end of input",
    "empty-line": "we skip one empty line before a request, the other any number",
}
STRICTER_THAN: dict[str, dict[str, str]] = {
    "h11": _BOTH
    | {
        "bare-lf": "h11 takes a bare LF for a line end",
        "two-content-lengths": "h11 takes repeats that agree",
        "content-length": "h11 takes lists that agree, and 20 digits",
        "obs-fold": "h11 unfolds",
        "field-value": "h11 passes most control bytes in values",
        "chunk-size": "h11 takes whitespace after a chunk's size, and 20 digits",
        "chunk-too-large": "h11 has integers without end",
        "chunk-extension": "h11 takes anything for an extension",
        "chunk-line-too-long": "h11 bounds extensions only with its buffer",
        "length-and-coding": "h11 lets the coding win, as the RFC allows",
        "status-line": "h11 takes statuses over 599",
    },
    "httptools": _BOTH
    | {
        "no-host": "llhttp leaves Host to its user",
        "two-hosts": "llhttp leaves Host to its user",
        "unknown-coding": "llhttp leaves codings before chunked to its user",
        "transfer-encoding": "llhttp looks for chunked at the end only",
        "content-length": "llhttp bounds the value, not its digits",
        "chunk-size": "llhttp bounds the value, not its digits",
        "chunk-extension": "llhttp passes extensions without a name",
        "chunk-line-too-long": "llhttp does not bound extensions",
        "request-line": "llhttp reads HTTP/0.9",
        "bare-lf": "llhttp skips any CR and LF before a start line",
        "bare-cr": "llhttp skips any CR and LF before a start line",
        "status-line": "llhttp takes any three digits, and skips CR and LF before the line",
    },
}


def _has_empty_line_first(data: bytes, message: Message) -> bool:
    """RFC 9112 section 2.2 asks a server to ignore an empty line before a request; h11 does not."""
    return data.startswith(b"\r\n") or b"\r\n\r\n" in data


def _has_tab_last(data: bytes, message: Message) -> bool:
    """RFC 9110 section 5.5: tabs around a value are no part of it; llhttp takes only spaces from its end."""
    return b"\t\r\n" in data


def _has_method_of_its_own(data: bytes, message: Message) -> bool:
    """RFC 9110 section 9.1: a method is any token, and is for the server behind us to know; llhttp has a list."""
    return isinstance(message.start, tuple) and message.start[0] not in (b"GET", b"POST", b"CONNECT")


# By what the other says when it refuses what we accept; the condition keeps anything else from hiding behind it.
LAXER_THAN: dict[str, dict[str, Callable[[bytes, Message], bool]]] = {
    "h11": {"no request line received": _has_empty_line_first},
    "httptools": {
        "Request has invalid `Transfer-Encoding`": _has_tab_last,
        "Invalid method encountered": _has_method_of_its_own,
        "Expected space after method": _has_method_of_its_own,
    },
}


def compare(data: bytes, ours: Reading, theirs: Reading, peer: str) -> None:
    """Checks the two rules."""
    for index, message in enumerate(ours.messages):
        if index == len(theirs.messages):
            explains = LAXER_THAN[peer].get(theirs.fault)
            assert theirs.last or (explains and explains(data, message)), (
                f"{peer} refuses what we accept: {theirs.fault!r} {message}"
            )
            return
        assert theirs.messages[index] == message, peer
    if len(theirs.messages) > len(ours.messages) and not ours.last:
        assert ours.fault in STRICTER_THAN[peer], f"we refuse for {ours.fault!r} what {peer} accepts"


POST = b"POST / HTTP/1.1\r\nHost: a\r\n"
GET = b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n"
# What has been used to make two servers disagree about where a request ends.
CLASSICS = [
    POST + b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nG",
    POST + b"Transfer-Encoding: chunked\r\nContent-Length: 6\r\n\r\n0\r\n\r\nG",
    *[
        POST + line + b"\r\n\r\n5\r\nhello\r\n0\r\n\r\n" + SMUGGLED
        for line in (
            b"Transfer-Encoding: chunked",
            b"Transfer-Encoding : chunked",
            b"Transfer-Encoding\t: chunked",
            b"Transfer-Encoding:chunked",
            b"Transfer-Encoding:\tchunked\t",
            b"Transfer-Encoding:\x0bchunked",
            b"Transfer-Encoding:\x0cchunked",
            b"Transfer-Encoding: \x00chunked",
            b"Transfer-Encoding: chunked\x00",
            b"Transfer-Encoding: xchunked",
            b"Transfer-Encoding: chunkedx",
            b"Transfer-Encoding: CHUNKED",
            b"Transfer-Encoding: chun\\ked",
            b"Transfer-Encoding: identity",
            b"Transfer-Encoding: identity, chunked",
            b"Transfer-Encoding: chunked, identity",
            b"Transfer-Encoding: chunked, chunked",
            b"Transfer-Encoding: ,chunked",
            b"Transfer-Encoding: chunked,",
            b"Transfer-Encoding:\r\n chunked",
            b"Transfer-Encoding: chunked\r\n , identity",
            b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
            b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked",
            b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
            b"Transfer-Encoding:",
            b"Transfer_Encoding: chunked",
            b"Transfer-Encoding: chunked;q=1",
            b'Transfer-Encoding: "chunked"',
            b" Transfer-Encoding: chunked",
            b"X: y\nTransfer-Encoding: chunked",
            b"X: y\rTransfer-Encoding: chunked",
            b"X: y\r\rTransfer-Encoding: chunked",
            b"\x00Transfer-Encoding: chunked",
            b"\xefTransfer-Encoding: chunked",
            b"Transfer-Encoding\x00: chunked",
            b"X\r\nTransfer-Encoding: chunked",
            b": x\r\nTransfer-Encoding: chunked",
        )
    ],
    *[
        POST + b"Content-Length: " + value + b"\r\n\r\nhello" + SMUGGLED
        for value in (
            *(
                b"5",
                b"+5",
                b"-5",
                b"05",
                b"0x5",
                b"5 ",
                b"\t5",
                b"5 5",
                b"5, 5",
                b"5,6",
                b"5\x00",
                b"5\x0b",
                b"5.",
                b"5e0",
                b"",
            ),
            *(b"5\r\nContent-Length: 5", b"5\r\nContent-Length: 0", b"5\r\n ", b"5\n", b"0000000000000000000000000005"),
            *(b"18446744073709551621", b"99999999999999999999", b"5_0", b"\xd9\xa5", b'"5"', b"five"),
        )
    ],
    *[
        POST + b"Transfer-Encoding: chunked\r\n\r\n" + body + SMUGGLED
        for body in (
            *(
                b"5\r\nhello\r\n0\r\n\r\n",
                b"5 \r\nhello\r\n0\r\n\r\n",
                b" 5\r\nhello\r\n0\r\n\r\n",
                b"+5\r\nhello\r\n0\r\n\r\n",
            ),
            *(b"0x5\r\nhello\r\n0\r\n\r\n", b"-0\r\n\r\n", b"5_0\r\nhello\r\n0\r\n\r\n", b"5;\r\nhello\r\n0\r\n\r\n"),
            *(b"5;a\nhello\r\n0\r\n\r\n", b"5;a\rb\r\nhello\r\n0\r\n\r\n", b"5\nhello\n0\n\n", b"5\r\nhello0\r\n\r\n"),
            *(
                b"5\r\nhello\n0\r\n\r\n",
                b"5\r\nhello\r0\r\n\r\n",
                b"5\r\nhelloXX0\r\n\r\n",
                b"0\n\r\n",
                b"0\r\n\n",
                b"0\r\n\r",
            ),
            *(b"10000000000000005\r\nhello\r\n0\r\n\r\n", b"00000000000000005\r\nhello\r\n0\r\n\r\n", b"\r\n0\r\n\r\n"),
            *(b'5;a="\r\nhello\r\n0\r\n\r\n', b'5;a="b\\"c"\r\nhello\r\n0\r\n\r\n', b"5;a\x00b\r\nhello\r\n0\r\n\r\n"),
            *(
                b"0\r\nContent-Length: 5\r\n\r\n",
                b"0\r\nX: y\r\n\r\n",
                b"0\r\nX : y\r\n\r\n",
                b"0\r\nX: y\n\n",
                b"0\r\n X: y\r\n\r\n",
            ),
            *(
                b"5;" + b"a" * 1000 + b"\r\nhello\r\n0\r\n\r\n",
                b"0;a\r\n\r\n",
                b"000\r\n\r\n",
                b"A\r\n0123456789\r\n0\r\n\r\n",
            ),
        )
    ],
    POST.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    POST.replace(b"1.1", b"1.0") + b"Content-Length: 5\r\nConnection: keep-alive\r\n\r\nhello" + SMUGGLED,
    POST.replace(b"1.1", b"1.2") + b"Content-Length: 5\r\n\r\nhello" + SMUGGLED,
    POST.replace(b"1.1", b"1.1 ") + b"\r\n" + SMUGGLED,
    POST.replace(b" HTTP/1.1", b"") + b"\r\n" + SMUGGLED,
    POST + b"Host: b\r\n\r\n",
    POST.replace(b"Host: a", b"Host:") + b"\r\n",
    POST.replace(b"Host: a", b"Host: a@b") + b"\r\n",
    POST.replace(b"Host: a", b"Host: a\r\n b") + b"\r\n",
    POST.replace(b"Host: a\r\n", b"") + b"\r\n",
    b"GET http://b/ HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /\x00 HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /a b HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /\tHTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET  / HTTP/1.1\r\nHost: a\r\n\r\n",
    b"\r\n" + GET,
    b"\r\n\r\n" + GET,
    b"\n" + GET,
    b" " + GET,
    GET + b"\r\n" + GET + GET,
    GET * 3 + POST + b"Content-Length: 5\r\n\r\nhello",
    b"CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\n\r\n" + SMUGGLED,
    b"GET / HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n" + SMUGGLED,
    b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n" + SMUGGLED,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
]
RESPONSES = [
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX: y\r\n\r\n",
    b"HTTP/1.1 200\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 200 \r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.0 200 OK\r\n\r\nuntil close",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 204 No Content\r\n\r\n",
    b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n",
    b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\nx",
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    b"HTTP/1.1 200 OK\r\nContent-Length: 5, 5\r\n\r\nhello",
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\nContent-Length: 5\n\nhello",
    b"HTTP/1.1 200 OK\r\nX: y\r\n z\r\nContent-Length: 5\r\n\r\nhello",
    b"HTTP/1.1 600 x\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/2.0 200 OK\r\nContent-Length: 0\r\n\r\n",
]
# What a mutation puts in: the bytes of the grammar's joints, and whole lines that frame.
FRAGMENTS = [
    *(
        b"\r",
        b"\n",
        b"\r\n",
        b"\r\n\r\n",
        b" ",
        b"\t",
        b":",
        b";",
        b",",
        b"=",
        b'"',
        b"\\",
        b"\x00",
        b"\x0b",
        b"\x7f",
        b"\x80",
    ),
    *(b"\xff", b"0", b"5", b"+", b"-", b"_", b"x", b"/", b"?", b"@", b"#", b"%", b"HTTP/1.0", b"HTTP/1.1", b"chunked"),
    *(
        b"Content-Length: 5\r\n",
        b"Content-Length: 0\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Host: a\r\n",
        b"X: y\r\n",
    ),
    *(b"Connection: close\r\n", b"Expect: 100-continue\r\n", b"0\r\n\r\n", b"5\r\nhello\r\n", b" folded\r\n", GET),
]
MUTATIONS = st.lists(
    st.tuples(
        st.sampled_from(["insert", "delete", "replace", "double"]), st.integers(0, 400), st.sampled_from(FRAGMENTS)
    ),
    min_size=1,
    max_size=4,
)


def mutate(data: bytes, mutations: list[tuple[str, int, bytes]]) -> bytes:
    for kind, place, fragment in mutations:
        at = place % (len(data) + 1)
        if kind == "insert":
            data = data[:at] + fragment + data[at:]
        elif kind == "delete":
            data = data[:at] + data[at + 1 :]
        elif kind == "replace":
            data = data[:at] + fragment + data[at + len(fragment) :]
        else:
            data = data[: at + 1] + data[at : at + 8] + data[at + 8 :]
    return data


def compare_requests(data: bytes) -> None:
    ours = ours_of_requests(data)
    compare(data, ours, h11_of_requests(data), "h11")
    compare(data, ours, httptools_of_requests(data), "httptools")


def compare_responses(data: bytes) -> None:
    ours = ours_of_responses(data)
    compare(data, ours, h11_of_responses(data), "h11")
    if not _reads_until_close(data):  # httptools is never told of the end of input
        compare(data, ours, httptools_of_responses(data), "httptools")


def _reads_until_close(data: bytes) -> bool:
    decoder = ResponseDecoder(LIMITS)
    decoder.start(b"GET")
    decoder.feed(data)
    try:
        while event := decoder.next_event():
            if isinstance(event, ResponseHead) and event.framing == UNTIL_CLOSE:
                return True
    except ProtocolError:
        pass
    return False


@pytest.mark.parametrize("data", CLASSICS)
def test_classics(data: bytes) -> None:
    compare_requests(data)


@pytest.mark.parametrize("data", RESPONSES)
def test_responses(data: bytes) -> None:
    compare_responses(data)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(CLASSICS), MUTATIONS)
def test_mutated_requests(data: bytes, mutations: list[tuple[str, int, bytes]]) -> None:
    compare_requests(mutate(data, mutations))


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(RESPONSES), MUTATIONS)
def test_mutated_responses(data: bytes, mutations: list[tuple[str, int, bytes]]) -> None:
    compare_responses(mutate(data, mutations))


def test_the_comparison_compares() -> None:
    """Good traffic is read, by all three, in full: none of the rules holds only because nothing was accepted."""
    data = GET + POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX: y\r\n\r\n" + GET
    expected = [
        Message((b"GET", b"/x"), [(b"host", b"a")]),
        Message((b"POST", b"/"), [(b"host", b"a"), (b"transfer-encoding", b"chunked")], b"hello", [(b"x", b"y")]),
        Message((b"GET", b"/x"), [(b"host", b"a")]),
    ]
    for read in (ours_of_requests, h11_of_requests, httptools_of_requests):
        assert read(data) == Reading(expected), read
    response = Message(200, [(b"content-length", b"5")], b"hello")
    for read in (ours_of_responses, h11_of_responses, httptools_of_responses):
        assert read(RESPONSES[0]).messages == [response], read
