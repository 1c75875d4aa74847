"""Framing end to end: keep-alive, pipelining, interim responses, bodies of every kind, HTTP/1.0."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.harness import Script, Wire, answering
from tests.harness.stage import Stage, open_stage

HOST = b"Host: www.example.org\r\n"
GET = b"GET / HTTP/1.1\r\n" + HOST + b"\r\n"
GET_10 = b"GET / HTTP/1.0\r\n" + HOST + b"\r\n"
PATIENCE_SECS = 20.0


@pytest.fixture(scope="module")
def theatre() -> Iterator[Stage]:
    with open_stage() as stage:
        yield stage


def once(response: bytes) -> Script:
    """Reads a request, sends ``response``, closes."""

    def play(wire: Wire) -> None:
        wire.read_body(wire.read_head())
        wire.send(response)

    return play


def echoing(wire: Wire) -> None:
    """Answers each request with the first line of its head."""
    while True:
        head = wire.read_head()
        wire.read_body(head)
        line = head.partition(b"\r\n")[0]
        wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(line), line))


def until_eof(script: Script) -> Script:
    def play(wire: Wire) -> None:
        try:
            script(wire)
        except EOFError:
            return

    return play


# -- keep-alive


def test_a_connection_serves_one_request_after_another(stage: Stage) -> None:
    client = stage.client()
    for _ in range(3):
        assert client.request(GET).body == b"ok"
    assert len(stage.upstream.wires) == 1


def test_connection_close_is_honoured_and_announced(stage: Stage) -> None:
    client = stage.client()
    response = client.request(b"GET / HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n")
    assert (response.body, response.get("Connection")) == (b"ok", "close")
    assert client.at_end()


def test_what_comes_after_connection_close_is_not_answered(stage: Stage) -> None:
    client = stage.client()
    client.send(
        b"GET /last HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n" + b"GET /over HTTP/1.1\r\n" + HOST + b"\r\n"
    )
    assert client.read_response().get("Connection") == "close"
    assert client.at_end()
    assert b"/over" not in stage.reached()


def test_an_upstream_that_closes_does_not_close_the_client(stage: Stage) -> None:
    stage.play(once(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"))
    client = stage.client()
    for _ in range(2):
        response = client.request(GET)
        assert (response.body, response.get("Connection")) == (b"ok", None)
    assert len(stage.upstream.wires) == 2


def test_one_empty_line_before_a_request_is_skipped(stage: Stage) -> None:
    client = stage.client()
    assert client.request(b"\r\n" + GET, "GET").status == 200
    assert client.request(b"\r\n" + GET, "GET").status == 200


# -- pipelining


def test_200_pipelined_requests_are_answered_in_order(stage: Stage) -> None:
    stage.play(until_eof(echoing))
    client = stage.client()
    client.send(b"".join(b"GET /%d HTTP/1.1\r\n" % number + HOST + b"\r\n" for number in range(200)))
    for number in range(200):
        assert client.read_response().body == b"GET /%d HTTP/1.1" % number


def test_pipelined_requests_wait_for_a_slow_answer(stage: Stage) -> None:
    go = threading.Event()

    def play(wire: Wire) -> None:
        line = wire.read_head().partition(b"\r\n")[0]
        if line.startswith(b"GET /slow"):
            assert go.wait(PATIENCE_SECS)
        wire.send(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(line), line))

    stage.play(play)
    client = stage.client()
    client.send(b"GET /slow HTTP/1.1\r\n" + HOST + b"\r\n" + b"GET /quick HTTP/1.1\r\n" + HOST + b"\r\n")
    stage.upstream.next_wire()
    assert stage.ask(b"GET /other HTTP/1.1\r\n" + HOST + b"\r\n").body == b"GET /other HTTP/1.1"
    assert b"/quick" not in stage.reached()
    go.set()
    assert [client.read_response().body for _ in range(2)] == [b"GET /slow HTTP/1.1", b"GET /quick HTTP/1.1"]


def test_pipelined_requests_with_bodies_and_errors_in_between(stage: Stage) -> None:
    stage.play(until_eof(echoing))
    client = stage.client()
    client.send(
        b"POST /1 HTTP/1.1\r\n" + HOST + b"Content-Length: 5\r\n\r\nhello"
        b"GET /%2f HTTP/1.1\r\n" + HOST + b"\r\n"
        b"POST /2 HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
        b"HEAD /3 HTTP/1.1\r\n" + HOST + b"\r\n"
        b"BAD\n\r\n"
    )
    assert client.read_response().body == b"POST /1 HTTP/1.1"
    assert client.read_response().status == 400
    assert client.read_response().body == b"POST /2 HTTP/1.1"
    assert client.read_response("HEAD").get("Content-Length") == "16"
    last = client.read_response()
    assert (last.status, last.get("Connection")) == (400, "close")
    assert client.at_end()


def test_a_client_that_pipelines_and_does_not_read_is_held_back(stage: Stage) -> None:
    """Each answer fits the shortcut of a whole response, so nothing but the client's own buffer can stop them."""
    size, requests = 60_000, 1500
    stage.play(answering(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + bytes(size)))
    client = stage.client()
    client.send(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * requests)
    stage.upstream.next_wire()
    assert stage.ask(GET).status == 200
    before = -1
    while before != (before := stage.counter("requests")):
        # Others are served meanwhile; when a round of theirs sees no progress, there is none.
        for _ in range(20):
            assert stage.ask(GET).status == 200
        before += 20
    answered = stage.reached().count(b"GET / HTTP/1.1")
    assert answered < requests
    for _ in range(requests):
        assert len(client.read_response().body) == size


# -- Expect: 100-continue and other interim responses

POST_EXPECTING = b"POST / HTTP/1.1\r\n" + HOST + b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\n"


def test_100_continue_is_passed_on(stage: Stage) -> None:
    def play(wire: Wire) -> None:
        head = wire.read_head()
        assert b"\r\nExpect: 100-continue\r\n" in head
        wire.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n" + wire.read_body(head))

    stage.play(play)
    client = stage.client()
    client.send(POST_EXPECTING)
    assert client.read_head() == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.send(b"hello")
    response = client.read_response("POST")
    assert (response.status, response.body) == (200, b"hello")


@pytest.mark.parametrize(
    "request_head",
    [
        b"GET / HTTP/1.1\r\n" + HOST + b"Expect: 100-continue\r\n\r\n",
        b"POST / HTTP/1.1\r\n" + HOST + b"Expect: 100-continue\r\nContent-Length: 0\r\n\r\n",
        b"POST / HTTP/1.0\r\n" + HOST + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\nhi",
    ],
    ids=["no body", "an empty body", "HTTP/1.0"],
)
def test_an_expectation_without_sense_is_not_passed_on(stage: Stage, request_head: bytes) -> None:
    """RFC 9110 section 10.1.1: only of use with content, and to be ignored in HTTP/1.0."""
    assert stage.client().request(request_head).status == 200
    assert b"\r\nexpect:" not in stage.reached().lower()


def test_a_final_answer_instead_of_100_ends_the_connection(stage: Stage) -> None:
    def play(wire: Wire) -> None:
        wire.read_head()
        wire.send(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\nno")
        assert wire.read_to_end() == b""

    stage.play(play)
    client = stage.client()
    response = client.request(POST_EXPECTING)
    assert (response.status, response.body, response.get("Connection")) == (403, b"no", "close")
    assert client.at_end()


def test_a_body_that_does_not_wait_for_100_passes(stage: Stage) -> None:
    client = stage.client()
    assert client.request(POST_EXPECTING + b"hello").body == b"ok"
    assert client.request(GET).body == b"ok"
    assert b"hello" in stage.reached()


EARLY_HINTS = b"HTTP/1.1 103 Early Hints\r\nLink: </a.css>; rel=preload\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def test_other_interim_responses_are_passed_on(stage: Stage) -> None:
    stage.play(answering(b"HTTP/1.1 102 Processing\r\n\r\n" + EARLY_HINTS + EARLY_HINTS + OK))
    client = stage.client()
    for _ in range(2):
        statuses = [client.request(GET).status] + [client.read_response().status for _ in range(3)]
        assert statuses == [102, 103, 103, 200]
    assert len(stage.upstream.wires) == 1


def test_a_client_of_http_1_0_gets_no_interim_response(stage: Stage) -> None:
    stage.play(answering(EARLY_HINTS + OK))
    client = stage.client()
    response = client.request(GET_10)
    assert (response.status, response.body) == (200, b"ok")


# -- responses without a body


def test_head_has_the_length_and_no_body(stage: Stage) -> None:
    stage.play(answering(b"HTTP/1.1 200 OK\r\nContent-Length: 123456\r\n\r\n", OK))
    client = stage.client()
    assert client.request(b"HEAD / HTTP/1.1\r\n" + HOST + b"\r\n").get("Content-Length") == "123456"
    assert client.request(GET).body == b"ok"
    assert len(stage.upstream.wires) == 1


def test_the_same_head_answers_head_and_get_differently(stage: Stage) -> None:
    """Heads are kept by their bytes; whether a body follows depends on the request."""
    stage.play(
        answering(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n", OK, b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n")
    )
    client = stage.client()
    assert client.request(b"HEAD / HTTP/1.1\r\n" + HOST + b"\r\n").body == b""
    assert client.request(GET).body == b"ok"
    assert client.request(b"HEAD / HTTP/1.1\r\n" + HOST + b"\r\n").body == b""


@pytest.mark.parametrize(
    ("head", "length"),
    [
        (b"HTTP/1.1 204 No Content\r\n\r\n", None),
        (b"HTTP/1.1 304 Not Modified\r\nETag: x\r\n\r\n", None),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 99\r\n\r\n", "99"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", "0"),
        (b"HTTP/1.1 205 Reset Content\r\nContent-Length: 0\r\n\r\n", "0"),
    ],
)
def test_responses_without_a_body(stage: Stage, head: bytes, length: str | None) -> None:
    stage.play(answering(head, OK))
    client = stage.client()
    response = client.request(GET)
    assert (response.status, response.body) == (int(head[9:12]), b"")
    assert response.get("Content-Length") == length
    assert response.get("Transfer-Encoding") is None
    assert client.request(GET).body == b"ok"
    assert len(stage.upstream.wires) == 1


def test_head_of_a_chunked_resource_has_no_body(stage: Stage) -> None:
    stage.play(answering(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", OK))
    client = stage.client()
    assert client.request(b"HEAD / HTTP/1.1\r\n" + HOST + b"\r\n").body == b""
    assert client.request(GET).body == b"ok"


# -- bodies

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n4;x=y\r\ndefg\r\n0\r\n\r\n"
UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nto the end"


def test_a_chunked_response_stays_chunked(stage: Stage) -> None:
    stage.play(answering(CHUNKED))
    client = stage.client()
    for _ in range(2):
        response = client.request(GET)
        assert (response.body, response.get("Transfer-Encoding")) == (b"abcdefg", "chunked")
    assert len(stage.upstream.wires) == 1


def test_chunks_reach_the_client_as_they_come(stage: Stage) -> None:
    go = threading.Event()

    def play(wire: Wire) -> None:
        wire.read_head()
        wire.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n")
        assert go.wait(PATIENCE_SECS)
        wire.send(b"6\r\nsecond\r\n0\r\n\r\n")

    stage.play(play)
    client = stage.client()
    client.send(GET)
    client.read_until(b"5\r\nfirst\r\n")
    go.set()
    assert client.read_until(b"0\r\n\r\n") == b"6\r\nsecond\r\n0\r\n\r\n"


def test_a_chunked_request_stays_chunked(stage: Stage) -> None:
    client = stage.client()
    request = b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;ext\r\nde\r\n0\r\n\r\n"
    for _ in range(2):
        assert client.request(request).body == b"ok"
    head, _, body = stage.reached().partition(b"\r\n\r\n")
    assert b"\r\nTransfer-Encoding: chunked" in head
    assert b"Content-Length" not in head
    assert body.startswith(b"5\r\nabcde\r\n0\r\n\r\n")


def test_a_close_delimited_response_is_chunked_for_http_1_1(stage: Stage) -> None:
    stage.play(once(UNTIL_CLOSE))
    client = stage.client()
    for _ in range(2):
        response = client.request(GET)
        assert (response.body, response.get("Transfer-Encoding")) == (b"to the end", "chunked")
    assert len(stage.upstream.wires) == 2


def test_a_response_of_http_1_0_is_passed_on_as_http_1_1(stage: Stage) -> None:
    stage.play(once(UNTIL_CLOSE.replace(b"HTTP/1.1", b"HTTP/1.0")))
    response = stage.ask(GET)
    assert response.head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert response.body == b"to the end"


@pytest.mark.parametrize("script", [answering(CHUNKED), once(UNTIL_CLOSE)], ids=["chunked", "close-delimited"])
def test_a_body_of_unknown_length_ends_with_the_connection_for_http_1_0(stage: Stage, script: Script) -> None:
    stage.play(script)
    client = stage.client()
    response = client.request(b"GET / HTTP/1.0\r\n" + HOST + b"Connection: keep-alive\r\n\r\n")
    assert response.body in (b"abcdefg", b"to the end")
    assert (response.get("Transfer-Encoding"), response.get("Connection")) == (None, "close")


def test_trailers_of_a_response_are_passed_on(stage: Stage) -> None:
    stage.play(
        answering(
            b"HTTP/1.1 200 OK\r\nTrailer: X-Sum\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nX-Sum: 9\r\n\r\n"
        )
    )
    client = stage.client()
    response = client.request(GET)
    assert (response.body, response.trailers) == (b"abc", (("X-Sum", "9"),))
    assert client.request(GET).trailers == response.trailers


def test_trailers_of_a_request_are_passed_on(stage: Stage) -> None:
    client = stage.client()
    request = (
        b"POST / HTTP/1.1\r\n" + HOST + b"Trailer: X-Sum\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"3\r\nabc\r\n0\r\nX-Sum: 9\r\n\r\n"
    )
    assert client.request(request).body == b"ok"
    assert client.request(GET).body == b"ok"
    assert b"3\r\nabc\r\n0\r\nX-Sum: 9\r\n\r\nGET / " in stage.reached()


def test_a_body_of_any_method_is_passed_on(stage: Stage) -> None:
    client = stage.client()
    for method in (b"GET", b"DELETE", b"PROPFIND", b"PATCH"):
        assert client.request(method + b" / HTTP/1.1\r\n" + HOST + b"Content-Length: 3\r\n\r\nabc").body == b"ok"
        assert method + b" / HTTP/1.1\r\n" in stage.reached()
    assert stage.reached().count(b"\r\n\r\nabc") == 4


def test_content_length_zero_is_passed_on(stage: Stage) -> None:
    client = stage.client()
    for _ in range(2):
        assert client.request(b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 0\r\n\r\n").body == b"ok"
    assert stage.reached().count(b"\r\nContent-Length: 0\r\n") == 2


# -- HTTP/1.0


def test_a_client_of_http_1_0_is_closed_after_its_answer(stage: Stage) -> None:
    client = stage.client()
    response = client.request(GET_10)
    assert (response.body, response.get("Connection")) == (b"ok", "close")
    assert client.at_end()
    assert stage.reached().startswith(b"GET / HTTP/1.1\r\n")


def test_a_client_of_http_1_0_with_keep_alive_is_kept(stage: Stage) -> None:
    client = stage.client()
    for _ in range(2):
        response = client.request(b"GET / HTTP/1.0\r\n" + HOST + b"Connection: keep-alive\r\n\r\n")
        assert (response.body, response.get("Connection")) == (b"ok", "keep-alive")


def test_http_1_0_without_host_is_served_where_a_site_takes_any_host(stage: Stage) -> None:
    assert stage.ask(b"GET / HTTP/1.0\r\n\r\n").body == b"ok"
    assert b"\r\nHost: 127.0.0.1:%d\r\n" % stage.upstream.port in stage.reached()


# -- the answer comes before the request has ended


def test_both_bodies_flow_at_the_same_time(stage: Stage) -> None:
    def play(wire: Wire) -> None:
        wire.read_head()
        wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n")
        wire.send(wire.read_exactly(5))
        wire.send(wire.read_exactly(5))

    stage.play(play)
    client = stage.client()
    client.send(b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 10\r\n\r\n")
    head = client.read_head()
    assert b"\r\nConnection: close\r\n" in head
    client.send(b"hello")
    assert client.read_exactly(5) == b"hello"
    client.send(b"world")
    assert client.read_exactly(5) == b"world"
    assert client.at_end()
