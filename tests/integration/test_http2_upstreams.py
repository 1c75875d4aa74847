"""Upstreams that speak HTTP/2: sharing of connections, both kinds of clients, and what goes wrong."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from proxy.upstream.http2 import PING_AFTER_SECS, PING_TIMEOUT_SECS
from tests.harness import RawUpstream, Response, Wire, wait_until
from tests.harness import http2 as h
from tests.harness.http2_upstream import Asked, Http2Server, answering_all, serving
from tests.harness.http2_wire import connect_http2
from tests.harness.stage import Stage, open_stage
from tests.unit.tls.pki import Authority

PATIENCE_SECS = 20.0


@pytest.fixture(scope="module")
def theatre(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    nobody = socket.socket()
    nobody.bind(("127.0.0.1", 0))  # and does not listen: the port refuses
    authority = Authority(tmp_path_factory.mktemp("pki"))
    files = authority.issue("127.0.0.1")

    def configure(urls: Sequence[str]) -> dict[str, Any]:
        one, two, three, dead = urls
        h2: dict[str, Any] = {"upstream_protocol": "h2"}
        return {
            "workers": 1,
            "upstream_idle_timeout_secs": 60,
            "sites": [
                {"hosts": ["*"], "upstreams": [one], **h2},
                {"hosts": ["pair.example.org"], "upstreams": [two, three], "max_fails": 1000, **h2},
                {
                    "hosts": ["half.example.org"],
                    "upstreams": [f"http://127.0.0.1:{nobody.getsockname()[1]}", three],
                    "max_fails": 1000,
                    **h2,
                },
                {"hosts": ["dead.example.org"], "upstreams": [dead], **h2},
                {"hosts": ["brief.example.org"], "upstreams": [one], "upstream_response_timeout_secs": 0.6, **h2},
                {"hosts": ["mute.example.org"], "upstreams": [one], "upstream_connect_timeout_secs": 0.6, **h2},
                {
                    "hosts": ["tls.example.org"],
                    "upstreams": [two.replace("http:", "https:")],
                    "upstream_tls": {"ca": authority.ca_file},
                    **h2,
                },
            ],
        }

    with nobody, open_stage(configure, upstreams=4) as stage:
        stage.files = files  # type: ignore[attr-defined]
        yield stage


def ask(stage: Stage, host: str = "www.example.org", *, method: str = "GET", body: bytes = b"") -> Response:
    length = f"Content-Length: {len(body)}\r\n" if body else ""
    return stage.ask(f"{method} /path?query HTTP/1.1\r\nHost: {host}\r\n{length}\r\n".encode() + body, method)


def together(stage: Stage, count: int, host: str = "www.example.org") -> list[Response]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda _: ask(stage, host), range(count)))


def test_a_request_of_http1_as_the_upstream_sees_it(stage: Stage) -> None:
    seen: list[Asked] = []

    def play(server: Http2Server) -> None:
        asked = server.asked()
        seen.append(asked)
        server.answer(asked.stream_id, fields=[("x-answer", "yes"), ("set-cookie", "a=b"), ("set-cookie", "c=d")])
        server.asked()

    stage.play(serving(play))
    request = (
        b"GET /path?query HTTP/1.1\r\nHost: www.example.org\r\nX-Mine: Value\r\nConnection: x-hop\r\nX-Hop: 1\r\n\r\n"
    )
    answer = stage.ask(request)
    assert (answer.status, answer.body, answer.get("x-answer")) == (200, b"ok", "yes")
    assert answer.get_all("set-cookie") == ["a=b", "c=d"]
    (asked,) = seen
    assert asked.ended
    assert asked.headers[:4] == [
        (":method", "GET"),
        (":scheme", "http"),
        (":authority", "www.example.org"),
        (":path", "/path?query"),
    ]
    names = [name for name, _ in asked.headers]
    assert all(name == name.lower() for name in names)
    assert asked.get("x-mine") == "Value"
    assert asked.get("te") == "trailers"
    assert asked.get("x-forwarded-proto") == "https"
    assert not {"host", "connection", "x-hop", "transfer-encoding", "upgrade"} & set(names)


def test_bodies_and_trailers_both_ways(stage: Stage) -> None:
    seen: list[Any] = []

    def play(server: Http2Server) -> None:
        asked = server.asked()
        seen.append(server.body(asked.stream_id))
        server.wire.send(
            h.headers(asked.stream_id, [(":status", "103"), ("link", "</a>")], end_stream=False)
            + h.headers(asked.stream_id, [(":status", "201")], end_stream=False)
            + h.data(asked.stream_id, b"some ")
            + h.data(asked.stream_id, b"body")
            + h.headers(asked.stream_id, [("x-sum", "9")])
        )
        server.asked()

    stage.play(serving(play))
    chunked = (
        b"POST / HTTP/1.1\r\nHost: a.example.org\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    )
    with stage.appliance.connect() as wire:
        wire.send(chunked)
        assert b" 103 " in wire.read_head()
        answer = wire.read_response("POST")
    assert (answer.status, answer.body, answer.trailers) == (201, b"some body", (("x-sum", "9"),))
    assert seen == [b"abcde"]


def test_a_response_without_body_or_length(stage: Stage) -> None:
    """HTTP/1.1 must be told that there is none, or its client would wait for the close."""

    def play(server: Http2Server) -> None:
        while True:
            server.wire.send(h.headers(server.asked().stream_id, [(":status", "200")]))

    stage.play(serving(play))
    with stage.appliance.connect() as wire:
        for _ in range(2):
            answer = wire.request(b"GET / HTTP/1.1\r\nHost: a.example.org\r\n\r\n")
            assert (answer.status, answer.body, answer.get("content-length")) == (200, b"", "0")


def test_head_and_no_content(stage: Stage) -> None:
    def play(server: Http2Server) -> None:
        head = server.asked()
        server.wire.send(h.headers(head.stream_id, [(":status", "200"), ("content-length", "7")], end_stream=False))
        server.wire.send(h.data(head.stream_id, end_stream=True))
        server.wire.send(h.headers(server.asked().stream_id, [(":status", "204")]))
        server.asked()

    stage.play(serving(play))
    answer = ask(stage, method="HEAD")
    assert (answer.status, answer.body, answer.get("content-length")) == (200, b"", "7")
    assert ask(stage).status == 204


def test_requests_share_a_connection(stage: Stage) -> None:
    gathered = threading.Barrier(10)

    def play(server: Http2Server) -> None:
        for _ in range(5):
            batch = [server.asked().stream_id for _ in range(10)]
            for stream_id in reversed(batch):  # in any order
                server.answer(stream_id)

    stage.play(serving(play))

    def one(_: int) -> int:
        gathered.wait(PATIENCE_SECS)
        return ask(stage).status

    with ThreadPoolExecutor(10) as pool:
        for _ in range(5):
            assert list(pool.map(one, range(10))) == [200] * 10
    assert len(stage.upstream.wires) == 1


def test_the_upstreams_limit_of_streams_is_kept(stage: Stage) -> None:
    def play(server: Http2Server) -> None:
        while True:
            asked = server.asked()
            server.wire.send(h.frame(h.PING, 0, 0, bytes(8)))
            # Were there another request, it would come before the answer to the PING.
            assert server.until(lambda f: f.kind in (h.HEADERS, h.PING)).kind == h.PING
            server.answer(asked.stream_id)

    stage.play(serving(play, (0x3, 1)))
    assert [answer.status for answer in together(stage, 8)] == [200] * 8
    assert 1 <= len(stage.upstream.wires) <= 8


def test_flow_control_holds_the_upstream_back_and_not_the_others(stage: Stage) -> None:
    sent = [0]
    stalled = threading.Event()

    def play(server: Http2Server) -> None:
        big = server.asked()
        server.wire.send(h.headers(big.stream_id, [(":status", "200")], end_stream=False))
        window = 65_535 if not any(f.kind == h.SETTINGS and not f.flags for f in server.frames) else 32_768
        while True:
            while window >= 16_000:
                server.wire.send(h.data(big.stream_id, bytes(16_000)))
                window -= 16_000
                sent[0] += 16_000
            frame = server.next()
            if frame.kind == h.WINDOW_UPDATE and frame.stream_id == big.stream_id:
                window += int.from_bytes(frame.payload, "big")
            elif frame.kind == h.HEADERS:
                server.answer(frame.stream_id)
            elif frame.kind == h.RST_STREAM:
                stalled.set()

    stage.play(serving(play))
    reader = stage.client()
    reader.send(b"GET /big HTTP/1.1\r\nHost: a.example.org\r\n\r\n")
    reader.read_head()
    before = -1

    def stands_still() -> bool:
        nonlocal before
        was, before = before, sent[0]
        return was == before > 0

    wait_until(stands_still, "the upstream is held back", PATIENCE_SECS)
    assert sent[0] < 20_000_000
    assert ask(stage).body == b"ok"  # on the same connection
    assert len(stage.upstream.wires) == 1
    reader.close()
    assert stalled.wait(PATIENCE_SECS)  # whoever has left is told to the upstream


def test_a_body_waits_for_the_upstreams_window(stage: Stage) -> None:
    size = 300_000

    def play(server: Http2Server) -> None:
        asked = server.asked()
        got = 0
        while got < size:
            frame = server.next()
            if frame.kind == h.DATA:
                got += len(frame.payload)
                assert frame.payload or frame.flags & h.END_STREAM
                if frame.payload:
                    server.wire.send(
                        h.window_update(0, len(frame.payload)) + h.window_update(asked.stream_id, len(frame.payload))
                    )
        server.answer(asked.stream_id, str(got).encode())
        server.asked()

    stage.play(serving(play, (0x4, 1_000)))
    assert ask(stage, method="POST", body=bytes(size)).body == b"300000"


def test_goaway_lets_requests_end_and_the_next_connect_anew(stage: Stage) -> None:
    def play(server: Http2Server) -> None:
        asked = server.asked()
        server.wire.send(h.goaway(asked.stream_id))
        server.answer(asked.stream_id)
        with pytest.raises(EOFError):
            server.asked()

    stage.play(serving(play))
    assert [ask(stage).status for _ in range(3)] == [200] * 3
    assert len(stage.upstream.wires) == 3


@pytest.mark.parametrize("how", ["goaway", "refused"])
def test_what_was_not_processed_is_sent_again(stage: Stage, how: str) -> None:
    connections = [0]

    def play(server: Http2Server) -> None:
        connections[0] += 1
        asked = server.asked()
        if connections[0] == 1 or (how == "refused" and asked.stream_id == 1):
            server.wire.send(h.goaway(0) if how == "goaway" else h.rst_stream(asked.stream_id, 7))
            asked = server.asked()
        server.answer(asked.stream_id)
        server.asked()

    stage.play(serving(play))
    assert ask(stage, method="DELETE").status == 200
    assert stage.counter("upstream_retries") >= 1


def test_goaway_in_the_midst_of_streams(stage: Stage) -> None:
    """RFC 9113 section 6.8: what is above its last stream is sent again elsewhere, what is below goes on."""
    both, connections = threading.Event(), [0]
    second: list[Asked] = []

    def play(server: Http2Server) -> None:
        connections[0] += 1
        if connections[0] == 2:
            second.append(server.asked())
            server.answer(second[0].stream_id, b"again")
            server.asked()
            return
        first = server.asked()
        server.wire.send(h.headers(first.stream_id, [(":status", "200")], end_stream=False))
        server.wire.send(h.data(first.stream_id, b"begun "))
        both.set()
        server.asked()
        server.wire.send(h.goaway(first.stream_id))
        assert again.wait(PATIENCE_SECS)
        server.wire.send(h.data(first.stream_id, b"and ended", end_stream=True))
        server.until(lambda _: False)

    again = threading.Event()
    stage.play(serving(play))
    with ThreadPoolExecutor(1) as pool:
        begun = pool.submit(ask, stage, method="POST")
        assert both.wait(PATIENCE_SECS)
        answer = ask(stage, method="POST")
        again.set()
        assert (answer.status, answer.body) == (200, b"again")
        assert begun.result().body == b"begun and ended"
    assert second[0].get(":method") == "POST"
    assert connections[0] == 2


def test_a_body_that_is_gone_is_not_sent_again(stage: Stage) -> None:
    """The upstream has not acted on it, but nobody has it any more: the client is told to try again (503)."""
    tried = [0]

    def play(server: Http2Server) -> None:
        asked = server.asked()
        tried[0] += 1
        server.body(asked.stream_id)
        server.wire.send(h.goaway(0))
        server.asked()

    stage.play(serving(play))
    assert ask(stage, method="POST", body=b"once").status == 503
    assert tried[0] == 1


def test_an_upstream_that_never_sends_settings(stage: Stage) -> None:
    """RFC 9113 section 3.4: both sides begin with SETTINGS. It is given as long as a connection may take."""
    ended = threading.Event()

    def play(wire: Wire) -> None:
        wire.sock.settimeout(60)
        assert wire.read_exactly(len(h.PREFACE)) == h.PREFACE
        with contextlib.suppress(ConnectionError):
            wire.read_to_end()
        ended.set()

    stage.play(play)
    began = time.monotonic()
    assert {answer.status for answer in together(stage, 3, "mute.example.org")} == {502}
    assert time.monotonic() - began >= 0.5
    assert ended.wait(PATIENCE_SECS), "its connection is closed"
    assert any("no SETTINGS came" in line for line in stage.appliance.event_lines())
    stage.play(serving(answering_all))
    assert ask(stage, "mute.example.org").status == 200


def test_a_silent_upstream_is_asked_by_ping_and_given_up(stage: Stage) -> None:
    """One that is slow answers the PING and is waited for; one that is dead fails its requests together."""
    pings: list[float] = []
    given_up = threading.Event()

    def slow(server: Http2Server) -> None:
        server.wire.sock.settimeout(60)
        asked = server.asked()
        server.until(lambda f: f.kind == h.PING and not f.flags & h.ACK)  # which answers
        assert given_up.wait(60)
        server.answer(asked.stream_id, b"late")
        server.asked()

    def dead(server: Http2Server) -> None:
        server.wire.sock.settimeout(60)
        for _ in range(2):
            server.asked()
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                head = server.wire.read_exactly(9)
                server.wire.read_exactly(int.from_bytes(head[:3], "big"))
                if head[3] == h.PING:
                    pings.append(time.monotonic())
        given_up.set()

    def ask_for(host: str) -> Response:
        wire = stage.client(timeout_secs=90)
        return wire.request(f"POST / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode(), "POST")

    stage.play(serving(dead), serving(slow), serving(slow))
    with ThreadPoolExecutor(3) as pool:
        began = time.monotonic()
        patient = pool.submit(ask_for, "pair.example.org")
        lost = [pool.submit(ask_for, "www.example.org") for _ in range(2)]
        assert [answer.result().status for answer in lost] == [502, 502]
        lasted_secs = time.monotonic() - began
        assert (patient.result().status, patient.result().body) == (200, b"late")
    assert len(pings) == 1
    assert pings[0] - began >= PING_AFTER_SECS
    assert lasted_secs >= PING_AFTER_SECS + PING_TIMEOUT_SECS
    assert any("no answer to a PING" in line for line in stage.appliance.event_lines())


def test_what_may_have_been_processed_is_not(stage: Stage) -> None:
    asked_for = [0]

    def play(server: Http2Server) -> None:
        while True:
            asked = server.asked()
            asked_for[0] += 1
            server.wire.send(h.rst_stream(asked.stream_id, 2))

    stage.play(serving(play))
    assert ask(stage, method="PATCH").status == 502
    assert asked_for[0] == 1


@pytest.mark.parametrize(
    "fields",
    [
        [(":status", "200"), ("connection", "close")],
        [(":status", "200"), ("x", "a\r\nb: c")],
        [(":status", "101")],
        [(":status", "200"), ("content-length", "1"), ("content-length", "2")],
    ],
)
def test_responses_that_are_none(stage: Stage, fields: h.Headers) -> None:
    def play(server: Http2Server) -> None:
        server.wire.send(h.headers(server.asked().stream_id, fields, end_stream=False))
        server.until(lambda f: f.kind == h.RST_STREAM)
        server.answer(server.asked().stream_id)  # the connection lives
        server.asked()

    stage.play(serving(play))
    assert ask(stage).status == 502
    assert ask(stage).status == 200
    assert len(stage.upstream.wires) == 1


def test_a_connection_that_breaks_the_protocol_fails_its_requests(stage: Stage) -> None:
    def play(server: Http2Server) -> None:
        server.asked()
        server.wire.send(h.frame(h.PING, 0, 1, bytes(8)))
        assert server.until(lambda f: f.kind == h.GOAWAY).code == 1  # PROTOCOL_ERROR
        with pytest.raises(EOFError):
            server.next()

    stage.play(serving(play))
    assert ask(stage).status == 502


def test_a_response_that_is_cut_short(stage: Stage) -> None:
    def play(server: Http2Server) -> None:
        asked = server.asked()
        server.wire.send(h.headers(asked.stream_id, [(":status", "200"), ("content-length", "9")], end_stream=False))
        server.wire.send(h.data(asked.stream_id, b"half") + h.rst_stream(asked.stream_id, 2))
        server.asked()

    stage.play(serving(play))
    client = connect_http2(stage.appliance)
    try:
        answer = client.finish(client.open("/"))
        assert answer.reset is not None
        assert not answer.ended
    finally:
        client.close()
    with stage.appliance.connect() as wire, pytest.raises((EOFError, OSError)):
        wire.request(b"GET / HTTP/1.1\r\nHost: a.example.org\r\n\r\n")


def test_an_upstream_that_does_not_answer(stage: Stage) -> None:
    cancelled = threading.Event()

    def play(server: Http2Server) -> None:
        asked = server.asked()
        server.until(lambda f: f.kind == h.RST_STREAM and f.stream_id == asked.stream_id)
        cancelled.set()
        server.answer(server.asked().stream_id)
        server.asked()

    stage.play(serving(play))
    assert ask(stage, "brief.example.org").status == 504
    assert cancelled.wait(PATIENCE_SECS)
    assert ask(stage, "brief.example.org").status == 200  # the stream ended, not the connection


def test_an_upstream_that_speaks_http1(stage: Stage) -> None:
    stage.play(lambda wire: wire.send(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"))
    assert ask(stage).status == 502


def test_upstreams_take_turns(stage: Stage) -> None:
    for at in (1, 2):
        stage.upstreams[at].script = serving(answering_all)
    assert [ask(stage, "pair.example.org").status for _ in range(4)] == [200] * 4
    assert [len(stage.upstreams[at].wires) for at in (1, 2)] == [1, 1]


def test_those_that_wait_for_a_connection_that_fails_go_elsewhere_or_fail(stage: Stage) -> None:
    def refuse(upstream: RawUpstream) -> None:
        upstream.script = lambda wire: wire.reset()

    refuse(stage.upstreams[3])
    assert {answer.status for answer in together(stage, 6, "dead.example.org")} == {502}


def test_a_backend_that_refuses_is_passed_over_by_all_that_wait(stage: Stage) -> None:
    stage.upstreams[2].script = serving(answering_all)
    for _ in range(3):
        assert [answer.status for answer in together(stage, 6, "half.example.org")] == [200] * 6
    assert len(stage.upstreams[2].wires) == 1


def test_over_tls_and_who_connects_may_leave(stage: Stage) -> None:
    """The first request makes the connection, the second waits for it, and goes on when the first gives up."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(stage.files["chain"], stage.files["key"])  # type: ignore[attr-defined]
    context.set_alpn_protocols(["h2"])
    knocks: list[Wire] = []

    def play(wire: Wire) -> None:
        knocks.append(wire)
        if len(knocks) == 1:
            wire.read_to_end()  # no handshake for the first
            return
        wire.sock = context.wrap_socket(wire.sock, server_side=True)
        serving(answering_all)(wire)

    stage.upstreams[1].script = play
    first = stage.client()
    first.send(b"GET / HTTP/1.1\r\nHost: tls.example.org\r\n\r\n")
    wait_until(lambda: knocks, "the first connection")
    second = stage.client()
    second.send(b"GET / HTTP/1.1\r\nHost: tls.example.org\r\n\r\n")
    wait_until(lambda: stage.appliance.status()["workers"][0]["requests_active"] >= 2, "both to be waiting")
    assert len(knocks) == 1
    first.close()
    assert second.read_response().body == b"ok"
    assert len(knocks) == 2


def test_without_alpn_it_is_not_spoken(stage: Stage, tmp_path: Path) -> None:
    files = stage.files  # type: ignore[attr-defined]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files["chain"], files["key"])

    def shake(wire: Any) -> None:
        wire.sock = context.wrap_socket(wire.sock, server_side=True)
        wire.sock.recv(1)

    stage.upstreams[1].script = shake
    assert ask(stage, "tls.example.org").status == 502
    wait_until(lambda: any("does not offer h2" in line for line in stage.appliance.event_lines()), "the log tells why")


def test_status_counts_connections_and_not_streams(stage: Stage) -> None:
    stage.play(serving(answering_all))
    assert [answer.status for answer in together(stage, 5)] == [200] * 5
    wait_until(lambda: stage.counter("upstream_open") >= 1, "one connection is counted")
