"""Requests and responses between a client of HTTP/2 and an upstream of HTTP/1.1, message by message."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.harness import Wire, answering, wait_until
from tests.harness.http2_wire import Http2Wire, StreamRead, connect_http2
from tests.harness.stage import Stage, open_stage
from tests.integration.conftest import fields_of

LIMIT_BYTES = 100_000


@pytest.fixture(scope="module")
def theatre() -> Iterator[Stage]:
    def configure(urls: Sequence[str]) -> dict[str, Any]:
        first, second = urls
        return {
            "access_log": {"format": "json"},
            "trusted_proxies": ["127.0.0.3/32"],
            "sites": [
                {
                    "hosts": ["*"],
                    "upstreams": [first],
                    "response_headers": {"set": {"X-Frame-Options": "DENY"}, "remove": ["Server"]},
                    "request_headers": {"set": {"X-Edge": "yes"}, "remove": ["X-Secret"]},
                    "redirects": [{"path": "/old", "to": "https://new.example.org{uri}", "status": 301}],
                },
                {"hosts": ["limited.example.org"], "upstreams": [second], "max_request_body_bytes": LIMIT_BYTES},
                {"hosts": ["bare.example.org"], "routes": [{"path": "/only", "upstreams": [first]}]},
            ],
        }

    with open_stage(configure, upstreams=2) as stage:
        yield stage


@pytest.fixture
def client(stage: Stage) -> Iterator[Http2Wire]:
    client = connect_http2(stage.appliance)
    yield client
    client.close()


def logged(stage: Stage, stream: int, request: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = []

    def look() -> bool:
        lines = [json.loads(line) for line in stage.appliance.access_lines()]
        found[:] = [line for line in lines if line["stream"] == stream and line["request"].startswith(request)]
        return bool(found)

    wait_until(look, f"{request} to be logged")
    return found[-1]


# -- requests


def test_a_request_as_the_upstream_sees_it(stage: Stage, client: Http2Wire) -> None:
    answer = client.get(
        "/a/../b?c=d", fields=[("user-agent", "test"), ("x-secret", "1"), ("cookie", "a=1"), ("cookie", "b=2")]
    )
    assert (answer.status, bytes(answer.body)) == (200, b"ok")
    reached = stage.reached()
    assert reached.startswith(b"GET /b?c=d HTTP/1.1\r\nHost: www.example.org\r\n")
    names = [name.lower() for name, _ in fields_of(reached)]
    sent = {name.lower(): value for name, value in fields_of(reached)}
    assert len(names) == len(set(names))
    assert sent["cookie"] == "a=1; b=2"
    assert sent["x-edge"] == "yes"
    assert sent["x-forwarded-for"] == "127.0.0.1"
    assert sent["x-forwarded-proto"] == "https"
    assert sent["x-forwarded-host"] == "www.example.org"
    assert sent["via"].endswith("reverse-proxy")
    assert not {"x-secret", "transfer-encoding", "content-length", "connection", "te", "upgrade"} & set(names)


def test_the_access_log_names_protocol_and_stream(stage: Stage, client: Http2Wire) -> None:
    client.get("/first-one")
    client.get("/logged")
    line = logged(stage, 3, "GET /logged")
    assert (line["request"], line["status"], line["bytes"]) == ("GET /logged HTTP/2.0", 200, 2)
    assert (line["host"], line["tls"]) == ("www.example.org", "TLSv1.3")


def test_a_body_without_a_length_becomes_chunked(stage: Stage, client: Http2Wire) -> None:
    stream = client.open(method="POST", end_stream=False)
    client.write(stream, b"hello, ")
    client.write(stream, b"upstream", end_stream=True)
    assert client.finish(stream).status == 200
    head, _, body = stage.reached().partition(b"\r\n\r\n")
    assert b"\r\nTransfer-Encoding: chunked" in head
    assert b"Content-Length" not in head
    assert body.endswith(b"\r\n0\r\n\r\n")
    assert b"hello, " in body


def test_a_body_with_a_length_keeps_it(stage: Stage, client: Http2Wire) -> None:
    stream = client.open(method="PUT", fields=[("content-length", "5")], end_stream=False)
    client.write(stream, b"hello", end_stream=True)
    assert client.finish(stream).status == 200
    assert stage.reached().endswith(b"\r\n\r\nhello")
    assert b"\r\nContent-Length: 5\r\n" in stage.reached()
    assert b"Transfer-Encoding" not in stage.reached()


def test_an_empty_body_after_the_head(stage: Stage, client: Http2Wire) -> None:
    """END_STREAM comes with an empty DATA frame, with a length of 0 and without one."""
    for fields in ((), (("content-length", "0"),)):
        stream = client.open(method="POST", fields=fields, end_stream=False)
        client.write(stream, b"", end_stream=True)
        assert client.finish(stream).status == 200
    first, _, second = stage.reached().partition(b"\r\n\r\n0\r\n\r\n")
    assert b"\r\nTransfer-Encoding: chunked\r\n" in first
    assert b"\r\nContent-Length: 0\r\n" in second


def test_trailers_go_both_ways(stage: Stage, client: Http2Wire) -> None:
    stage.play(answering(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX-Sum: abc\r\n\r\n"))
    stream = client.open(method="POST", end_stream=False)
    client.write(stream, b"body")
    client.conn.send_headers(stream, [("x-checksum", "42"), ("x_under", "1")], end_stream=True)
    client.flush()
    answer = client.finish(stream)
    assert (answer.status, bytes(answer.body), answer.trailers) == (200, b"ok", [("x-sum", "abc")])
    assert stage.reached().endswith(b"\r\n0\r\nx-checksum: 42\r\n\r\n")
    assert stage.counter("underscore_fields_dropped") > 0


def test_fields_with_an_underscore_are_dropped(stage: Stage, client: Http2Wire) -> None:
    before = stage.counter("underscore_fields_dropped")
    client.get(fields=[("x_real_ip", "192.0.2.1")])
    assert b"x_real_ip" not in stage.reached().lower()
    assert stage.counter("underscore_fields_dropped") == before + 1


def test_what_a_trusted_proxy_says_is_kept(stage: Stage) -> None:
    client = connect_http2(stage.appliance, source="127.0.0.3")
    client.get(fields=[("x-forwarded-for", "192.0.2.7"), ("x-request-id", "abc-1")])
    client.close()
    sent = {name.lower(): value for name, value in fields_of(stage.reached())}
    assert sent["x-forwarded-for"] == "192.0.2.7, 127.0.0.3"
    assert sent["x-request-id"] == "abc-1"


def test_what_a_client_says_of_itself_is_replaced(stage: Stage, client: Http2Wire) -> None:
    client.get(fields=[("x-forwarded-for", "192.0.2.7"), ("forwarded", "for=192.0.2.7"), ("proxy", "evil")])
    assert b"192.0.2.7" not in stage.reached()
    assert b"evil" not in stage.reached()


# -- routing and answers of the proxy's own


def test_redirects_refusals_and_unknown_paths(stage: Stage, client: Http2Wire) -> None:
    answer = client.get("/old/x?y")
    assert (answer.status, answer.get("location")) == (301, "https://new.example.org/old/x?y")
    assert client.get("/nothing", host="bare.example.org").status == 404
    assert client.get("/only/x", host="bare.example.org").status == 200
    refused = client.get("/%zz")
    assert refused.status == 400
    assert client.get("/", method="TRACE").status == 405
    head = client.get("/nothing", host="bare.example.org", method="HEAD")
    assert (head.status, bytes(head.body)) == (404, b"")
    assert int(head.get("content-length") or 0) > 0


def test_a_plain_connect_is_not_what_this_proxy_is_for(stage: Stage, client: Http2Wire) -> None:
    stream = client.conn.get_next_available_stream_id()
    client.streams[stream] = StreamRead()
    client.conn.send_headers(stream, [(":method", "CONNECT"), (":authority", "example.org:22")])
    client.flush()
    assert client.finish(stream).status == 501
    assert client.get("/").status == 200
    assert not any(b"example.org:22" in wire.received for wire in stage.upstream.wires)


@pytest.mark.parametrize(
    ("fields", "status"),
    [([("x-long", "a" * 33_000)], 431), ([(f"x-{n}", "1") for n in range(200)], 431), ([("expect", "200-maybe")], 417)],
    ids=["long", "many", "expectation"],
)
def test_well_formed_requests_that_are_not_taken(
    stage: Stage, client: Http2Wire, fields: list[tuple[str, str]], status: int
) -> None:
    assert client.get(fields=fields).status == status
    assert client.get().status == 200


def test_a_length_over_max_request_body_bytes_is_refused_without_the_upstream(stage: Stage, client: Http2Wire) -> None:
    fields = [("content-length", str(LIMIT_BYTES + 1))]
    stream = client.open(method="POST", host="limited.example.org", fields=fields, end_stream=False)
    assert client.finish(stream).status == 413
    assert not stage.upstreams[1].wires


def test_a_body_over_max_request_body_bytes_is_refused_where_it_is_over(stage: Stage, client: Http2Wire) -> None:
    stream = client.open(method="POST", host="limited.example.org", end_stream=False)
    for _ in range(20):
        if client.streams[stream].over:
            break
        client.conn.send_data(stream, bytes(10_000))
        client.flush()
        client.wait(
            lambda: client.streams[stream].over or client.conn.local_flow_control_window(stream) > 10_000, "room"
        )
    answer = client.finish(stream)
    assert answer.status == 413
    assert len(stage.reached(1)) < 2 * LIMIT_BYTES
    assert not stage.reached(1).endswith(b"\r\n0\r\n\r\n")
    assert client.get().status == 200, "the connection lives on"


# -- responses


def test_a_response_as_the_client_sees_it(stage: Stage, client: Http2Wire) -> None:
    stage.play(
        answering(
            b"HTTP/1.1 200 Fine\r\nServer: x\r\nConnection: X-Hop, keep-alive\r\nX-Hop: 1\r\nKeep-Alive: timeout=5\r\n"
            b"X-UPPER: Value\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\nContent-Length: 2\r\n\r\nok"
        )
    )
    answer = client.get()
    names = [name for name, _ in answer.fields]
    assert answer.status == 200
    assert answer.get("x-upper") == "Value"
    assert answer.get("x-frame-options") == "DENY"
    assert answer.get("content-length") == "2"
    assert answer.get("date")
    assert [value for name, value in answer.fields if name == "set-cookie"] == ["a=1", "b=2"]
    assert not {"connection", "keep-alive", "x-hop", "server", "transfer-encoding"} & set(names)
    assert all(name == name.lower() for name in names)


@pytest.mark.parametrize(
    "framing",
    [
        b"Content-Length: 300000\r\n\r\n" + bytes(300_000),
        b"Transfer-Encoding: chunked\r\n\r\n493e0\r\n" + bytes(300_000) + b"\r\n0\r\n\r\n",
        b"Connection: close\r\n\r\n" + bytes(300_000),
    ],
    ids=["length", "chunked", "until-close"],
)
def test_bodies_of_every_framing(stage: Stage, client: Http2Wire, framing: bytes) -> None:
    def play(wire: Wire) -> None:
        wire.read_head()
        wire.send(b"HTTP/1.1 200 OK\r\n" + framing)

    stage.play(play)
    answer = client.get()
    assert (answer.status, len(answer.body), answer.ended) == (200, 300_000, True)


@pytest.mark.parametrize("status", [204, 304], ids=str)
def test_responses_without_a_body(stage: Stage, client: Http2Wire, status: int) -> None:
    stage.play(answering(b"HTTP/1.1 %d X\r\nETag: a\r\n\r\n" % status))
    answer = client.get()
    assert (answer.status, bytes(answer.body), answer.ended, answer.get("etag")) == (status, b"", True, "a")
    assert client.frames[-1].kind != 0, "no empty DATA frame follows such a head"
    assert client.get().status == status


def test_head_has_a_length_and_no_body(stage: Stage, client: Http2Wire) -> None:
    def play(wire: Wire) -> None:
        while True:
            wire.read_head()
            wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 12345\r\n\r\n")

    stage.play(play)
    answer = client.get(method="HEAD")
    assert (answer.status, answer.get("content-length"), answer.ended) == (200, "12345", True)


def test_interim_responses_are_passed_on(stage: Stage, client: Http2Wire) -> None:
    early = b"HTTP/1.1 103 Early Hints\r\nLink: </a.css>; rel=preload\r\n\r\n"
    stage.play(answering(early + early + b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"))
    answer = client.get()
    assert (answer.interim, answer.status, bytes(answer.body)) == ([103, 103], 200, b"ok")


def test_expect_is_answered_by_the_upstream(stage: Stage, client: Http2Wire) -> None:
    def play(wire: Wire) -> None:
        head = wire.read_head()
        assert b"\r\nexpect: 100-continue\r\n" in head.lower()
        wire.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        assert wire.read_exactly(5) == b"hello"
        wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    stage.play(play)
    fields = [("expect", "100-continue"), ("content-length", "5")]
    stream = client.open(method="POST", fields=fields, end_stream=False)
    client.wait(lambda: client.streams[stream].interim == [100], "100 Continue")
    client.write(stream, b"hello", end_stream=True)
    assert client.finish(stream).status == 200


@pytest.mark.parametrize(("method", "fields"), [("GET", []), ("POST", [("content-length", "0")])])
def test_an_expectation_without_a_body_is_not_passed_on(
    stage: Stage, client: Http2Wire, method: str, fields: list[tuple[str, str]]
) -> None:
    """RFC 9110 section 10.1.1."""
    assert client.get(method=method, fields=[("expect", "100-continue"), *fields]).status == 200
    assert b"\r\nexpect:" not in stage.reached().lower()


def test_cookies_are_one_field_for_the_upstream(stage: Stage, client: Http2Wire) -> None:
    crumbs = ["a=b", "", "c=d;", "; ;", "e=f"]
    assert client.get(fields=[("cookie", crumb) for crumb in crumbs]).status == 200
    assert b"\r\ncookie: a=b; c=d; e=f\r\n" in stage.reached()


def test_an_expecting_client_is_refused_before_its_body(stage: Stage, client: Http2Wire) -> None:
    def play(wire: Wire) -> None:
        wire.read_head()
        wire.send(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n")

    stage.play(play)
    stream = client.open(method="POST", fields=[("expect", "100-continue"), ("content-length", "5")], end_stream=False)
    assert client.finish(stream).status == 401


def test_an_early_answer_ends_the_upload_without_an_error(stage: Stage, client: Http2Wire) -> None:
    """RFC 9113 section 8.1: the answer is whole, then the client is asked to stop."""

    def play(wire: Wire) -> None:
        wire.read_head()
        wire.read_exactly(1024)
        wire.send(b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 2\r\n\r\nno")
        wire.read_to_end()

    stage.play(play)
    stream = client.open(method="POST", end_stream=False)
    client.write(stream, bytes(20_000))
    client.wait(lambda: client.streams[stream].reset is not None, "RST_STREAM")
    answer = client.streams[stream]
    assert (answer.status, bytes(answer.body), answer.ended, answer.reset) == (413, b"no", True, 0)
    stage.play(answering())
    assert client.get("/next").status == 200


@pytest.mark.parametrize("framing", [b"Content-Length: 100", b"Transfer-Encoding: chunked"], ids=["length", "chunked"])
def test_an_upstream_that_dies_inside_a_body_leaves_no_complete_answer(
    stage: Stage, client: Http2Wire, framing: bytes
) -> None:
    def play(wire: Wire) -> None:
        wire.read_head()
        wire.send(b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n\r\n5\r\nhello\r\n")

    stage.play(play)
    sibling = client.open("/sibling", host="limited.example.org")
    answer = client.get()
    assert (answer.status, answer.ended, answer.reset) == (200, False, 2)
    assert client.finish(sibling).status == 200, "the connection lives on"


def test_an_upstream_that_says_nothing_is_a_bad_gateway(stage: Stage, client: Http2Wire) -> None:
    stage.play(lambda wire: wire.close())
    assert client.get().status == 502


def test_an_invalid_response_is_a_bad_gateway(stage: Stage, client: Http2Wire) -> None:
    stage.play(answering(b"HTTP/1.1 200 OK\r\nContent-Length: 1, 2\r\n\r\nx"))
    assert client.get().status == 502
    assert client.get().status == 502


def test_a_client_that_resets_a_stream_ends_only_that(stage: Stage, client: Http2Wire) -> None:
    gone, asked = threading.Event(), threading.Event()

    def play(wire: Wire) -> None:
        wire.read_head()
        asked.set()
        assert wire.at_end()
        gone.set()

    stage.play(play)
    stream = client.open("/abandoned")
    assert asked.wait(10)
    client.conn.reset_stream(stream, 8)
    client.flush()
    assert gone.wait(10), "the upstream's connection is let go"
    stage.play(answering())
    assert client.get().status == 200
    assert logged(stage, stream, "GET /abandoned")["status"] == 499


def test_a_client_that_closes_ends_all_its_streams(stage: Stage) -> None:
    gone = threading.Semaphore(0)

    def play(wire: Wire) -> None:
        wire.read_head()
        assert wire.at_end()
        gone.release()

    stage.play(play)
    client = connect_http2(stage.appliance)
    for _ in range(5):
        client.open()
    wait_until(lambda: len(stage.upstream.wires) == 5, "the requests to reach the upstream")
    client.close()
    for _ in range(5):
        assert gone.acquire(timeout=10)
    wait_until(lambda: stage.counter("requests_active") == 0, "no request to be under way")
