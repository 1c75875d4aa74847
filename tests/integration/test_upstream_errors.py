"""What the client is told when the upstream fails, and that a response that is cut is never completed."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.harness import FreePorts, RawUpstream, Script, Wire, answering, wait_until
from tests.harness.stage import Stage, open_stage
from tests.unit.tls.pki import Authority

GET = b"GET / HTTP/1.1\r\nHost: www.example.org\r\n\r\n"
GET_10 = b"GET / HTTP/1.0\r\nHost: www.example.org\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
PATIENCE_SECS = 20.0


@pytest.fixture(scope="module")
def closed_port() -> Iterator[int]:
    """Bound, but nobody listens: connections are refused, and nobody else can take it."""
    ports = FreePorts()
    yield ports.take()
    ports.release()


@pytest.fixture(scope="module")
def deaf_port() -> Iterator[int]:
    """Listens with a full queue: a connection is neither accepted nor refused."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting = []
        while True:
            sock = socket.socket()
            waiting.append(sock)
            sock.settimeout(0.3)
            try:
                sock.connect(listener.getsockname())
            except TimeoutError:
                break
        yield listener.getsockname()[1]
        for sock in waiting:
            sock.close()


@pytest.fixture(scope="module")
def theatre(closed_port: int, deaf_port: int) -> Iterator[Stage]:
    def configure(urls: Sequence[str]) -> dict[str, Any]:
        first, second = urls
        closed, deaf = f"http://127.0.0.1:{closed_port}", f"http://127.0.0.1:{deaf_port}"
        return {
            "upstream_connect_timeout_secs": 0.5,
            "sites": [
                {"hosts": ["*"], "upstreams": [first]},
                {"hosts": ["slow.example.org"], "upstreams": [first], "upstream_response_timeout_secs": 0.5},
                {"hosts": ["refused.example.org"], "upstreams": [closed]},
                {"hosts": ["deaf.example.org"], "upstreams": [deaf]},
                {"hosts": ["second.example.org"], "upstreams": [closed, second], "max_fails": 1000},
                {
                    "hosts": ["ejected.example.org"],
                    "upstreams": [closed, f"http://localhost:{closed_port}"],
                    "max_fails": 2,
                    "fail_timeout_secs": 600,
                },
            ],
        }

    with open_stage(configure, upstreams=2) as stage:
        yield stage


def ask(stage: Stage, host: str, method: bytes = b"GET") -> Any:
    return stage.ask(method + b" / HTTP/1.1\r\nHost: " + host.encode() + b"\r\n\r\n")


def once(response: bytes, reset: bool = False) -> Script:
    def play(wire: Wire) -> None:
        wire.read_head()
        wire.send(response)
        if reset:
            wire.reset()

    return play


# -- no response


INVALID = {
    "not HTTP": b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
    "HTTP/0.9": b"<html>hello</html>",
    "HTTP/2": b"HTTP/2 200 OK\r\n\r\n",
    "bad status": b"HTTP/1.1 2000 OK\r\n\r\n",
    "bare LF": b"HTTP/1.1 200 OK\nContent-Length: 2\n\nok",
    "folded line": b"HTTP/1.1 200 OK\r\nX: a\r\n b\r\nContent-Length: 2\r\n\r\nok",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nokk",
    "both framings": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    "unknown coding": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    "head over its limit": b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000 + b"\r\n\r\n",
    "NUL in a value": b"HTTP/1.1 200 OK\r\nX: a\x00b\r\nContent-Length: 2\r\n\r\nok",
}


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_answer_is_a_bad_gateway(stage: Stage, name: str) -> None:
    stage.play(once(INVALID[name]))
    client = stage.client()
    response = client.request(GET)
    assert (response.status, response.get("Connection")) == (502, None)
    stage.play(once(OK))
    assert client.request(GET).body == b"ok"


@pytest.mark.parametrize("part", [b"", b"HTTP/1.1 200", b"HTTP/1.1 200 OK\r\nContent-Le"])
@pytest.mark.parametrize("reset", [False, True], ids=["end", "reset"])
def test_an_upstream_that_closes_before_its_response_is_a_bad_gateway(stage: Stage, part: bytes, reset: bool) -> None:
    stage.play(once(part, reset))
    assert stage.ask(GET).status == 502


def test_no_connection_is_a_bad_gateway(stage: Stage) -> None:
    before = stage.counter("upstream_connect_failures")
    assert ask(stage, "refused.example.org").status == 502
    assert stage.counter("upstream_connect_failures") == before + 1


def test_a_lone_upstream_is_never_ejected(stage: Stage) -> None:
    for _ in range(10):
        assert ask(stage, "refused.example.org").status == 502


def test_a_connection_that_does_not_come_about_in_time_is_a_gateway_timeout(stage: Stage) -> None:
    assert ask(stage, "deaf.example.org").status == 504


def test_a_post_that_nobody_has_seen_goes_to_the_next_upstream(stage: Stage) -> None:
    for _ in range(4):
        assert ask(stage, "second.example.org", b"POST").body == b"ok"


def test_when_every_upstream_is_ejected_the_service_is_unavailable(stage: Stage) -> None:
    before = stage.counter("upstream_ejected")
    statuses = [ask(stage, "ejected.example.org").status for _ in range(4)]
    assert statuses == [502, 502, 503, 503]
    response = ask(stage, "ejected.example.org")
    assert (response.status, response.get("Retry-After")) == (503, "1")
    assert stage.counter("upstream_ejected") == before + 2


def test_a_slow_upstream_is_a_gateway_timeout(stage: Stage) -> None:
    def play(wire: Wire) -> None:
        wire.read_head()
        assert wire.at_end()

    stage.play(play)
    before = stage.counter("timeouts_upstream")
    client = stage.client()
    response = client.request(GET.replace(b"www.", b"slow."))
    assert (response.status, response.get("Connection")) == (504, None)
    assert stage.counter("timeouts_upstream") == before + 1


def test_an_upstream_that_stops_inside_its_body_is_cut_off(stage: Stage) -> None:
    def play(wire: Wire) -> None:
        wire.read_head()
        wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhello")
        assert wire.at_end()

    stage.play(play)
    assert_cut(stage, GET.replace(b"www.", b"slow."), b"hello")


def test_an_upstream_that_is_slow_but_steady_is_waited_for(stage: Stage) -> None:
    """A byte each fifth of the time that is allowed between two."""
    pause = threading.Event()

    def play(wire: Wire) -> None:
        wire.read_head()
        wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n")
        for _ in range(12):
            pause.wait(0.1)
            wire.send(b".")

    stage.play(play)
    assert stage.ask(GET.replace(b"www.", b"slow.")).body == b"." * 12


def test_the_time_of_an_upload_does_not_count_as_silence_of_the_upstream(stage: Stage) -> None:
    pause = threading.Event()
    stage.play(answering(OK))
    client = stage.client()
    client.send(b"POST / HTTP/1.1\r\nHost: slow.example.org\r\nContent-Length: 10\r\n\r\n")
    for _ in range(10):
        pause.wait(0.1)
        client.send(b".")
    assert client.read_response().body == b"ok"


# -- a response that is cut


def assert_cut(stage: Stage, request: bytes, begin: bytes) -> None:
    """The client's connection ends so that what it got cannot be taken for complete."""
    client = stage.client()
    client.send(request)
    head = client.read_head()
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    with pytest.raises((ConnectionError, ssl.SSLEOFError)):
        client.read_to_end()
    assert begin in client.received
    assert b"0\r\n\r\n" not in client.received[len(head) :]
    assert stage.ask(GET.replace(b"www.", b"second.")).status == 200


CUT = {
    "length": b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhello",
    "chunked": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
    "inside a chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nhello",
    "before the trailer's end": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n",
    "bad chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nzz\r\n",
}


@pytest.mark.parametrize("request_bytes", [GET, GET_10], ids=["1.1", "1.0"])
@pytest.mark.parametrize("name", CUT)
def test_a_body_that_is_cut_is_cut_for_the_client(stage: Stage, name: str, request_bytes: bytes) -> None:
    begun = threading.Event()

    def play(wire: Wire) -> None:
        wire.read_head()
        head, mark, body = CUT[name].partition(b"\r\n\r\n")
        wire.send(head + mark)
        assert begun.wait(PATIENCE_SECS)
        wire.send(body)

    stage.play(play)
    client = stage.client()
    client.send(request_bytes)
    head = client.read_head()
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    begun.set()
    with pytest.raises((ConnectionError, ssl.SSLEOFError)):
        client.read_to_end()
    assert not client.received.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("request_bytes", [GET, GET_10], ids=["1.1", "1.0"])
def test_a_close_delimited_body_that_ends_with_a_reset_is_cut(stage: Stage, request_bytes: bytes) -> None:
    read = threading.Event()

    def play(wire: Wire) -> None:
        wire.read_head()
        wire.send(b"HTTP/1.1 200 OK\r\n\r\nhello")
        assert read.wait(PATIENCE_SECS)
        wire.reset()

    stage.play(play)
    client = stage.client()
    client.send(request_bytes)
    client.read_until(b"hello")
    read.set()
    with pytest.raises((ConnectionError, ssl.SSLEOFError)):
        client.read_to_end()
    assert not client.received.endswith(b"0\r\n\r\n")


def test_the_failure_is_reported_with_the_upstream_and_the_request(stage: Stage) -> None:
    stage.play(once(b"nonsense\r\n\r\n"))
    response = stage.ask(GET)
    request_id = response.get("X-Request-Id") or "-"
    wait_until(lambda: any("upstream.invalid-response:" in line for line in stage.appliance.event_lines()), "the event")
    assert request_id in response.body.decode()


# -- TLS and Unix sockets


class TlsUpstream(RawUpstream):
    """Speaks TLS; a client that does not like the certificate is no error of the script."""

    def __init__(self, context: ssl.SSLContext, script: Script) -> None:
        def play(wire: Wire) -> None:
            try:
                secured = Wire(context.wrap_socket(wire.sock, server_side=True))
            except OSError:
                return
            try:
                script(secured)
            finally:
                secured.close()

        super().__init__(play)
        self.url = self.url.replace("http://", "https://")


def server_context(pair: dict[str, str]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair["chain"], pair["key"])
    return context


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def answer(wire: Wire) -> None:
    try:
        while True:
            wire.read_body(wire.read_head())
            wire.send(OK)
    except EOFError:
        return


def test_the_certificate_of_an_upstream_is_verified(authority: Authority, tmp_path: Path) -> None:
    by_address, by_name = authority.issue("127.0.0.1"), authority.issue("internal.example.org")
    with (
        TlsUpstream(server_context(by_address), answer) as good,
        TlsUpstream(server_context(by_name), answer) as named,
    ):

        def configure(_: Sequence[str]) -> dict[str, Any]:
            ca = {"ca": authority.ca_file}
            return {
                "sites": [
                    {"hosts": ["ca.example.org"], "upstreams": [good.url], "upstream_tls": ca},
                    {"hosts": ["system.example.org"], "upstreams": [good.url]},
                    {"hosts": ["othername.example.org"], "upstreams": [named.url], "upstream_tls": ca},
                    {
                        "hosts": ["name.example.org"],
                        "upstreams": [named.url],
                        "upstream_tls": {**ca, "server_name": "internal.example.org"},
                    },
                    {"hosts": ["*"], "upstreams": [good.url.replace("https", "http")]},
                ]
            }

        with open_stage(configure) as stage:
            expected = {"ca": 200, "system": 502, "othername": 502, "name": 200}
            found = {site: ask(stage, f"{site}.example.org").status for site in expected}
            assert found == expected
            # A connection over TLS is used again.
            connects = stage.counter("upstream_connects")
            assert ask(stage, "ca.example.org").status == 200
            assert stage.counter("upstream_connects") == connects
            lines = [line for line in stage.appliance.event_lines() if "upstream.connect_failed" in line]
            assert any("certificate verify failed" in line.lower() for line in lines), lines


@pytest.mark.parametrize("clean", [True, False], ids=["close_notify", "truncated"])
@pytest.mark.parametrize("request_bytes", [GET, GET_10], ids=["1.1", "1.0"])
def test_a_close_delimited_body_over_tls_ends_with_close_notify_only(
    authority: Authority, clean: bool, request_bytes: bytes
) -> None:
    def play(wire: Wire) -> None:
        wire.read_head()
        wire.send(b"HTTP/1.1 200 OK\r\n\r\nhello")
        if clean:
            assert isinstance(wire.sock, ssl.SSLSocket)
            wire.sock.unwrap()

    with TlsUpstream(server_context(authority.issue("127.0.0.1")), play) as upstream:
        site = {"hosts": ["*"], "upstreams": [upstream.url], "upstream_tls": {"ca": authority.ca_file}}
        with open_stage(lambda _: {"sites": [site]}) as stage:
            client = stage.client()
            client.send(request_bytes)
            if clean:
                assert client.read_response().body == b"hello"
            else:
                client.read_head()
                with pytest.raises((ConnectionError, ssl.SSLEOFError)):
                    client.read_to_end()
            client.close()


def test_an_upstream_behind_a_unix_socket(tmp_path: Path) -> None:
    folder = Path("/tmp") / f"rp-unix-{tmp_path.name}"
    folder.mkdir(exist_ok=True)
    try:
        with RawUpstream(unix_path=str(folder / "up.sock")) as upstream:
            site = {"hosts": ["*"], "upstreams": [upstream.url]}
            absent = {"hosts": ["absent.example.org"], "upstreams": [f"unix:{folder}/absent.sock"]}
            with open_stage(lambda _: {"sites": [site, absent]}) as stage:
                client = stage.client()
                for _ in range(2):
                    assert client.request(GET).body == b"ok"
                assert len(upstream.wires) == 1
                assert ask(stage, "absent.example.org").status == 502
                client.close()
    finally:
        folder.rmdir()
