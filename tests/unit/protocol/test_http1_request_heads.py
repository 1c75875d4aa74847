"""What a request's head may look like, row by row: each row is tried whole and byte by byte."""

from __future__ import annotations

import pytest

from proxy.protocol.http1 import (
    HOP_BY_HOP,
    REQUEST_STATUSES,
    HeadCache,
    Limits,
    ProtocolError,
    RequestDecoder,
    RequestHead,
)
from tests.harness.codec import LIMITS, bytewise, requests


def head_of(data: bytes) -> RequestHead:
    """The only head in ``data``, the same in one piece, byte by byte, and out of a cache."""
    cache = HeadCache()
    heads = [requests(data, cache=cache)[0], requests(bytewise(data))[0], requests(data, cache=cache)[0]]
    assert heads[0] == heads[1] == heads[2]
    assert isinstance(heads[0], RequestHead), heads[0]
    return heads[0]


def get(*lines: bytes, start: bytes = b"GET / HTTP/1.1", host: bytes | None = b"Host: example.org") -> bytes:
    """A request with these field lines."""
    return b"\r\n".join([start, *([host] if host is not None else []), *lines, b"", b""])


REFUSED = [
    # RFC 9112 section 2.2: line ends
    (b"GET / HTTP/1.1\nHost: a\n\n", "bare-lf"),
    (b"GET / HTTP/1.1\r\nHost: a\n\r\n", "bare-lf"),
    (b"GET / HTTP/1.1\r\nHost: a\r\nX: a\nY: b\r\n\r\n", "bare-lf"),
    (b"\nGET / HTTP/1.1\r\nHost: a\r\n\r\n", "bare-lf"),
    (b"GET / HTTP/1.1\r\nHost: a\rX: b\r\n\r\n", "bare-cr"),
    (b"GET / HTTP/1.1\r\nHost: a\r\r\n\r\n", "bare-cr"),
    (b"GET / HTTP/1.1\r\r\nHost: a\r\n\r\n", "bare-cr"),
    (b"\rGET / HTTP/1.1\r\nHost: a\r\n\r\n", "bare-cr"),
    (b"\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n", "empty-line"),
    # section 3: request line
    (b" GET / HTTP/1.1\r\nHost: a\r\n\r\n", "method"),
    (b"GE(T / HTTP/1.1\r\nHost: a\r\n\r\n", "method"),
    (b"G\x00T / HTTP/1.1\r\nHost: a\r\n\r\n", "method"),
    (b"G\xc3\x89T / HTTP/1.1\r\nHost: a\r\n\r\n", "method"),
    (b"GET\t/ HTTP/1.1\r\nHost: a\r\n\r\n", "method"),
    (b"GET\r\nHost: a\r\n\r\n", "method"),
    (b"M" * 33 + b" / HTTP/1.1\r\nHost: a\r\n\r\n", "method"),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", "method"),
    (b"GET /\r\n\r\n", "request-line"),
    (b"GET / \r\nHost: a\r\n\r\n", "request-line"),
    (b"GET  / HTTP/1.1\r\nHost: a\r\n\r\n", "target"),
    (b"GET /  HTTP/1.1\r\nHost: a\r\n\r\n", "request-line"),
    (b"GET / HTTP/1.1 \r\nHost: a\r\n\r\n", "request-line"),
    (b"GET / /x HTTP/1.1\r\nHost: a\r\n\r\n", "request-line"),
    (b"GET /a\tb HTTP/1.1\r\nHost: a\r\n\r\n", "target"),
    (b"GET /a#b HTTP/1.1\r\nHost: a\r\n\r\n", "target"),
    (b"GET /\x00 HTTP/1.1\r\nHost: a\r\n\r\n", "target"),
    (b"GET /\x7f HTTP/1.1\r\nHost: a\r\n\r\n", "target"),
    (b"GET /\xe9 HTTP/1.1\r\nHost: a\r\n\r\n", "target"),
    (b"GET x HTTP/1.1\r\nHost: a\r\n\r\n", "target"),
    (b"GET ?x HTTP/1.1\r\nHost: a\r\n\r\n", "target"),
    (b"GET * HTTP/1.1\r\nHost: a\r\n\r\n", "target"),
    (b"GET a:80 HTTP/1.1\r\nHost: a\r\n\r\n", "target"),
    (b"GET ftp://a/ HTTP/1.1\r\nHost: a\r\n\r\n", "target"),
    (b"GET http:/a/ HTTP/1.1\r\nHost: a\r\n\r\n", "target"),
    (b"GET http:///x HTTP/1.1\r\nHost: a\r\n\r\n", "target"),
    (b"GET /" + b"a" * 512 + b" HTTP/1.1\r\nHost: a\r\n\r\n", "target-too-long"),
    (b"GET / http/1.1\r\nHost: a\r\n\r\n", "request-line"),
    (b"GET / HTTP/1\r\nHost: a\r\n\r\n", "request-line"),
    (b"GET / HTTP/1.10\r\nHost: a\r\n\r\n", "request-line"),
    (b"GET / HTTP/01.1\r\nHost: a\r\n\r\n", "request-line"),
    (b"GET / HTTP/1.2\r\nHost: a\r\n\r\n", "version"),
    (b"GET / HTTP/0.9\r\nHost: a\r\n\r\n", "version"),
    (b"GET / HTTP/3.0\r\nHost: a\r\n\r\n", "version"),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "version"),
    # section 5: field lines
    (get(b" folded"), "obs-fold"),
    (get(b"X: a", b"\tb"), "obs-fold"),
    (get(host=b" Host: a"), "obs-fold"),
    (get(b"X : a"), "space-before-colon"),
    (get(b"X\t: a"), "space-before-colon"),
    (get(b"Content-Length : 5"), "space-before-colon"),
    (get(b": a"), "field-name"),
    (get(b"X"), "field-line"),
    (get(b"a b: c"), "field-name"),
    (get(b"a\x00: c"), "field-name"),
    (get(b"a\x7f: c"), "field-name"),
    (get(b"caf\xc3\xa9: c"), "field-name"),
    (get(b"\xefX: c"), "field-name"),
    (get(b"a(b): c"), "field-name"),
    (get(b'"a": c'), "field-name"),
    (get(b"X: \x00"), "field-value"),
    (get(b"X: a\x0bb"), "field-value"),
    (get(b"X: \x1b[31m"), "field-value"),
    (get(b"X: a\x7f"), "field-value"),
    (get(b"Transfer-Encoding: \x0bchunked"), "field-value"),
    # section 3.2: Host
    (get(host=None), "no-host"),
    (get(b"Host: example.org"), "two-hosts"),
    (get(b"host: other.example.org"), "two-hosts"),
    *[
        (get(host=b"Host: " + value), "host")
        for value in (
            *(b"", b" ", b"a b", b"a,b", b"a/b", b"a?b", b"user@a", b"a#b", b"a\\b", b"http://a", b"a%20b", b"a%00b"),
            *(
                b"a:b",
                b"a:80:80",
                b"a:+80",
                b"a:65536",
                b"a:999999",
                b":80",
                b".",
                b"a..b",
                b".a",
                b"caf\xc3\xa9",
                b"a'b",
            ),
            *(b"[::1", b"::1", b"[::1]x", b"[1:2]", b"[fe80::1%25eth0]", b"[v1.x]", b"[]", b"[:::]", b"a" * 256),
        )
    ],
    (get(start=b"GET / HTTP/1.0", host=b"Host:"), "host"),
    (get(start=b"GET http://b/ HTTP/1.1"), "authority-mismatch"),
    (get(start=b"GET http://example.org:81/ HTTP/1.1"), "authority-mismatch"),
    (get(start=b"GET https://example.org:80/ HTTP/1.1"), "authority-mismatch"),
    (get(start=b"GET http://example.org/ HTTP/1.1", host=b"Host: example.org:443"), "authority-mismatch"),
    (get(start=b"GET http://u:p@example.org/ HTTP/1.1"), "userinfo"),
    (get(start=b"GET http://example.org@evil/ HTTP/1.1"), "userinfo"),
    (get(start=b"GET http://exa%6dple.org/ HTTP/1.1"), "target"),
    (get(start=b"CONNECT / HTTP/1.1"), "target"),
    (get(start=b"CONNECT example.org HTTP/1.1"), "target"),
    (get(start=b"CONNECT http://example.org:80 HTTP/1.1"), "target"),
    # section 6: framing
    *[
        (get(b"Content-Length: " + value), "content-length")
        for value in (
            *(
                b"",
                b"+5",
                b"-5",
                b"5 5",
                b"5, 5",
                b"5,6",
                b"0x5",
                b"5.0",
                b"five",
                b"1" * 19,
                b"5;",
                b"\xd9\xa5",
                b"1_0",
            ),
        )
    ],
    (get(b"Content-Length: 5", b"Content-Length: 5"), "two-content-lengths"),
    (get(b"Content-Length: 5", b"content-length: 6"), "two-content-lengths"),
    (get(b"Content-Length: 5", b"Transfer-Encoding: chunked"), "length-and-coding"),
    (get(b"Transfer-Encoding: chunked", b"Content-Length: 0"), "length-and-coding"),
    *[
        (get(b"Transfer-Encoding: " + value), "transfer-encoding")
        for value in (
            *(b"", b"chunked,", b",chunked", b"chunked, chunked", b"chunked, gzip", b'"chunked"', b"chunked;q=1"),
            *(b"chun ked", b"chunked\xa0", b"gzip;x"),
        )
    ],
    (get(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"), "transfer-encoding"),
    (get(b"Transfer-Encoding: gzip", b"Transfer-Encoding: chunked"), "transfer-encoding"),
    (get(b"Transfer-Encoding: gzip"), "unknown-coding"),
    (get(b"Transfer-Encoding: gzip, chunked"), "unknown-coding"),
    (get(b"Transfer-Encoding: identity"), "unknown-coding"),
    (get(b"Transfer-Encoding: xchunked"), "unknown-coding"),
    (get(b"Transfer-Encoding: chunked", start=b"POST / HTTP/1.0"), "coding-in-1.0"),
    # RFC 9110 sections 7.6.1 and 10.1.1
    (get(b"Connection: a b"), "connection"),
    (get(b"Connection: close;x"), "connection"),
    (get(b"Expect: 200-ok"), "expectation"),
    (get(b"Expect:"), "expectation"),
    (get(b"Expect: 100-continue", b"Expect: other"), "expectation"),
    # limits
    (get(*[b"X: y"] * 20), "too-many-fields"),
    (get(b"X: " + b"y" * 2048), "head-too-large"),
]


@pytest.mark.parametrize(("data", "reason"), REFUSED, ids=[f"{reason}-{n}" for n, (_, reason) in enumerate(REFUSED)])
def test_refused(data: bytes, reason: str) -> None:
    expected = [f"! {REQUEST_STATUSES[reason]} {reason}"]
    assert requests(data, cache=HeadCache()) == expected
    assert requests(bytewise(data)) == expected


def test_every_reason_about_heads_has_a_row() -> None:
    about_bodies = {
        *("trailers-too-large", "chunk-size", "chunk-too-large", "chunk-line-too-long", "chunk-extension"),
        *("chunk-extensions-too-large", "chunk-end", "forbidden-trailer", "incomplete"),
    }
    assert {reason for _, reason in REFUSED} == set(REQUEST_STATUSES) - about_bodies


def test_statuses_that_are_not_400() -> None:
    assert {reason: status for reason, status in REQUEST_STATUSES.items() if status != 400} == {
        "target-too-long": 414,
        "expectation": 417,
        "head-too-large": 431,
        "too-many-fields": 431,
        "trailers-too-large": 431,
        "unknown-coding": 501,
        "version": 505,
    }


def test_a_plain_head() -> None:
    head = head_of(
        b"GET /a/b?c=d HTTP/1.1\r\nHost: Example.ORG:8443\r\nX-Y:  z \t\r\nEmpty:\r\nB: caf\xc3\xa9\tx\r\n\r\n"
    )
    assert (head.method, head.target, head.path, head.version) == (b"GET", b"/a/b?c=d", b"/a/b?c=d", 11)
    assert (head.host, head.authority) == (b"example.org", b"Example.ORG:8443")
    assert head.fields == (
        (b"host", b"Host", b"Example.ORG:8443"),
        (b"x-y", b"X-Y", b"z"),
        (b"empty", b"Empty", b""),
        (b"b", b"B", b"caf\xc3\xa9\tx"),
    )
    assert (head.content_length, head.chunked, head.has_body) == (None, False, False)
    assert (head.keep_alive, head.expect_continue, head.upgrade) == (True, False, ())
    assert head.hop_by_hop == HOP_BY_HOP
    assert head.request_line == b"GET /a/b?c=d HTTP/1.1"
    assert head.get(b"x-y") == b"z"
    assert head.get(b"z") is None


@pytest.mark.parametrize(
    ("value", "host", "authority"),
    [
        (b"a", b"a", b"a"),
        (b"A.b.:80", b"a.b", b"A.b.:80"),
        (b"a:", b"a", b"a"),
        (b"a:065", b"a", b"a:065"),
        (b"a_b-c", b"a_b-c", b"a_b-c"),
        (b"192.0.2.1:1", b"192.0.2.1", b"192.0.2.1:1"),
        (b"[2001:DB8:0::1]:1", b"2001:db8::1", b"[2001:DB8:0::1]:1"),
        (b"[::1]", b"::1", b"[::1]"),
    ],
)
def test_hosts(value: bytes, host: bytes, authority: bytes) -> None:
    head = head_of(get(host=b"Host: " + value))
    assert (head.host, head.authority) == (host, authority)


@pytest.mark.parametrize(
    ("start", "host", "path", "name"),
    [
        (b"GET http://example.org/x?y HTTP/1.1", b"example.org", b"/x?y", b"example.org"),
        (b"GET HTTP://EXAMPLE.org HTTP/1.1", b"example.org", b"/", b"example.org"),
        (b"GET http://example.org?y HTTP/1.1", b"example.org", b"/?y", b"example.org"),
        (b"GET http://example.org:80/ HTTP/1.1", b"example.org", b"/", b"example.org"),
        (b"GET https://example.org/ HTTP/1.1", b"example.org:443", b"/", b"example.org"),
        (b"GET http://[2001:db8::1]/ HTTP/1.1", b"[2001:db8:0::1]", b"/", b"2001:db8::1"),
        (b"OPTIONS * HTTP/1.1", b"example.org", b"*", b"example.org"),
        (b"OPTIONS http://example.org HTTP/1.1", b"example.org", b"*", b"example.org"),
        (b"OPTIONS http://example.org?x HTTP/1.1", b"example.org", b"/?x", b"example.org"),
        (b"CONNECT example.org:443 HTTP/1.1", b"example.org:443", b"", b"example.org"),
        (b"GET // HTTP/1.1", b"example.org", b"//", b"example.org"),
        (b'GET /\\^`{|}"<> HTTP/1.1', b"example.org", b'/\\^`{|}"<>', b"example.org"),
        (b"!#$%&'*+-.^_`|~09 / HTTP/1.1", b"example.org", b"/", b"example.org"),
    ],
)
def test_targets(start: bytes, host: bytes, path: bytes, name: bytes) -> None:
    head = head_of(get(start=start, host=b"Host: " + host))
    assert (head.path, head.host, head.authority) == (path, name, host)
    assert head.request_line == start
    assert head.target == start.split(b" ")[1]


def test_http_1_0_may_lack_a_host() -> None:
    head = head_of(b"GET / HTTP/1.0\r\n\r\n")
    assert (head.host, head.authority, head.version, head.fields) == (b"", b"", 10, ())
    head = head_of(b"GET http://Example.org:81/ HTTP/1.0\r\n\r\n")
    assert (head.host, head.authority) == (b"example.org", b"Example.org:81")


@pytest.mark.parametrize(
    ("start", "lines", "keep_alive"),
    [
        (b"GET / HTTP/1.1", [], True),
        (b"GET / HTTP/1.1", [b"Connection: CLOSE"], False),
        (b"GET / HTTP/1.1", [b"Connection: keep-alive, close"], False),
        (b"GET / HTTP/1.1", [b"Connection: keep-alive", b"Connection: close"], False),
        (b"GET / HTTP/1.1", [b"Connection: , ,x,"], True),
        (b"GET / HTTP/1.0", [], False),
        (b"GET / HTTP/1.0", [b"Connection: Keep-Alive"], True),
        (b"GET / HTTP/1.0", [b"Connection: keep-alive, close"], False),
        (b"GET / HTTP/1.0", [b"Proxy-Connection: keep-alive"], False),
    ],
)
def test_keep_alive(start: bytes, lines: list[bytes], keep_alive: bool) -> None:
    assert head_of(get(*lines, start=start)).keep_alive is keep_alive


def test_fields_that_connection_names_are_hop_by_hop_but_not_those_that_route_and_frame() -> None:
    head = head_of(get(b"Connection: X-A, close, Host, Content-Length", b"Connection: HTTP2-Settings,x-b"))
    assert head.hop_by_hop == HOP_BY_HOP | {b"x-a", b"x-b"}


@pytest.mark.parametrize(
    ("start", "lines", "upgrade"),
    [
        (b"GET / HTTP/1.1", [b"Connection: Upgrade", b"Upgrade: WebSocket"], (b"websocket",)),
        (
            b"GET / HTTP/1.1",
            [b"Connection: a,upgrade", b"Upgrade: h2c, x/1.0", b"Upgrade: y"],
            (b"h2c", b"x/1.0", b"y"),
        ),
        (b"GET / HTTP/1.1", [b"Upgrade: websocket"], ()),
        (b"GET / HTTP/1.1", [b"Connection: upgrade"], ()),
        (b"GET / HTTP/1.1", [b"Connection: upgrade", b"Upgrade: web socket"], ()),
        (b"GET / HTTP/1.0", [b"Connection: upgrade", b"Upgrade: websocket"], ()),
        (b"GET / HTTP/1.1", [b"Connection: upgrade", b"Upgrade: websocket", b"Content-Length: 1"], ()),
        (b"GET / HTTP/1.1", [b"Connection: upgrade", b"Upgrade: websocket", b"Transfer-Encoding: chunked"], ()),
    ],
)
def test_upgrade(start: bytes, lines: list[bytes], upgrade: tuple[bytes, ...]) -> None:
    assert head_of(get(*lines, start=start)).upgrade == upgrade


@pytest.mark.parametrize(
    ("start", "lines", "expects"),
    [
        (b"POST / HTTP/1.1", [b"Expect: 100-Continue", b"Content-Length: 5"], True),
        (b"POST / HTTP/1.1", [b"Expect: 100-continue", b"Transfer-Encoding: chunked"], True),
        (b"POST / HTTP/1.1", [b"Expect: 100-continue"], False),
        (b"POST / HTTP/1.0", [b"Expect: 100-continue", b"Content-Length: 5"], False),
        (b"POST / HTTP/1.0", [b"Expect: whatever", b"Content-Length: 5"], False),
    ],
)
def test_expect(start: bytes, lines: list[bytes], expects: bool) -> None:
    assert head_of(get(*lines, start=start)).expect_continue is expects


@pytest.mark.parametrize(
    ("lines", "length", "chunked", "has_body"),
    [
        ([b"Content-Length: 0"], 0, False, False),
        ([b"Content-Length: 007"], 7, False, True),
        ([b"Content-Length: " + b"9" * 18], 10**18 - 1, False, True),
        ([b"Transfer-Encoding: CHUNKED"], None, True, True),
    ],
)
def test_framing(lines: list[bytes], length: int | None, chunked: bool, has_body: bool) -> None:
    head = head_of(get(*lines))
    assert (head.content_length, head.chunked, head.has_body) == (length, chunked, has_body)


@pytest.mark.parametrize(
    ("data", "limits", "reason"),
    [
        (b"GET / HTTP/1.1\r\nX: " + b"y" * 200, Limits(100, 10), "431 head-too-large"),
        (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 4, Limits(10000, 3), "431 too-many-fields"),
        (b"GET /" + b"y" * 200, Limits(10000, 10, max_target_bytes=100), "414 target-too-long"),
        (b"G" * 200, Limits(100, 10), "414 target-too-long"),
        (b"GET / HTTP/1.1\r\nX: " + b"y" * 81 + b"\r", Limits(100, 10), "431 head-too-large"),
    ],
)
def test_limits_do_not_wait_for_the_end_of_the_head(data: bytes, limits: Limits, reason: str) -> None:
    assert requests(data, limits=limits, eof=False) == [f"! {reason}"]
    assert requests(bytewise(data), limits=limits, eof=False) == [f"! {reason}"]


def test_exactly_at_the_limits() -> None:
    data = get(*[b"X: y"] * 19)
    assert len(requests(data)) == 2
    limits = Limits(len(data), 20, max_target_bytes=1)
    for parts in (data, bytewise(data)):
        assert isinstance(requests(parts, limits=limits)[0], RequestHead)
        assert requests(parts, limits=limits._replace(max_head_bytes=len(data) - 1)) == ["! 431 head-too-large"]
        assert requests(parts, limits=limits._replace(max_fields=19)) == ["! 431 too-many-fields"]


def test_an_error_is_raised_for_good() -> None:
    decoder = RequestDecoder(LIMITS)
    decoder.feed(get(b"X : y") + get())
    seen = []
    for _ in range(3):
        with pytest.raises(ProtocolError) as caught:
            decoder.next_event()
        seen.append(str(caught.value))
        decoder.feed(get())
    assert seen == ["space-before-colon (400)"] * 3


def test_a_cache_is_bounded_and_keeps_to_its_limits() -> None:
    cache = HeadCache(max_entries=3)
    for n in range(10):
        head = requests(get(b"N: %d" % n), cache=cache)[0]
        assert requests(get(b"N: %d" % n), cache=cache)[0] is head
        assert len(cache.entries) <= 3
    requests(get(b"N: " + b"n" * HeadCache.MAX_HEAD_BYTES), cache=HeadCache(), limits=Limits(10000, 10))
    large = HeadCache()
    requests(get(b"N: " + b"n" * HeadCache.MAX_HEAD_BYTES), cache=large, limits=Limits(10000, 10))
    assert not large.entries
    with pytest.raises(ValueError, match="needs its own"):
        RequestDecoder(LIMITS._replace(max_fields=3), cache)


def test_refused_heads_are_not_remembered() -> None:
    cache = HeadCache()
    for _ in range(2):
        assert requests(get(b"X : y"), cache=cache) == ["! 400 space-before-colon"]
    assert not cache.entries
