"""gRPC through the proxy: client and server are grpcio, the messages are plain bytes."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest

from tests.harness import Appliance, wait_until
from tests.unit.tls.pki import Authority

PATIENCE_SECS = 20.0
BIG = 5_000_000
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
SERVICE = "lab.Echo"


class Echo(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpcio has no types
    """Every kind of call, by name; what a test needs to know of them is kept."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.begun = threading.Event()
        self.cancelled = threading.Event()
        self.peers: set[str] = set()
        self.metadata: dict[str, str | bytes] = {}
        self.requests_seen = 0

    def service(self, handler_call_details: Any) -> Any:
        kinds: dict[str, tuple[Callable[..., Any], Any]] = {
            "Unary": (grpc.unary_unary_rpc_method_handler, self.unary),
            "Down": (grpc.unary_stream_rpc_method_handler, self.down),
            "Up": (grpc.stream_unary_rpc_method_handler, self.up),
            "Both": (grpc.stream_stream_rpc_method_handler, self.both),
            "Fail": (grpc.unary_unary_rpc_method_handler, self.fail),
            "FailEarly": (grpc.stream_unary_rpc_method_handler, self.fail_early),
            "FailLate": (grpc.unary_stream_rpc_method_handler, self.fail_late),
            "Sleep": (grpc.unary_unary_rpc_method_handler, self.sleep),
            "Endless": (grpc.unary_stream_rpc_method_handler, self.endless),
        }
        found = kinds.get(handler_call_details.method.rpartition("/")[2])
        return None if found is None else found[0](found[1])

    def unary(self, request: bytes, context: Any) -> bytes:
        self.peers.add(context.peer())
        self.metadata = dict(context.invocation_metadata())
        context.send_initial_metadata((("x-early", "yes"),))
        context.set_trailing_metadata((("x-late", "too"), ("x-raw-bin", b"\x00\xff")))
        return request

    def down(self, request: bytes, context: Any) -> Iterator[bytes]:
        for number in range(int(request)):
            yield b"%d" % number

    def up(self, requests: Iterator[bytes], context: Any) -> bytes:
        return b",".join(requests)

    def both(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        for request in requests:
            yield request[::-1]

    def fail(self, request: bytes, context: Any) -> bytes:
        context.set_trailing_metadata((("x-why", "because"),))
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not today: 100% \u2713")
        raise AssertionError

    def fail_early(self, requests: Iterator[bytes], context: Any) -> bytes:
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "whatever you are about to say")
        raise AssertionError

    def fail_late(self, request: bytes, context: Any) -> Iterator[bytes]:
        yield b"one"
        context.abort(grpc.StatusCode.DATA_LOSS, "after the first")

    def sleep(self, request: bytes, context: Any) -> bytes:
        self.begun.set()
        context.add_callback(self.cancelled.set)
        self.cancelled.wait(PATIENCE_SECS)
        return b"too late"

    def endless(self, request: bytes, context: Any) -> Iterator[bytes]:
        context.add_callback(self.cancelled.set)
        while not self.cancelled.is_set():
            self.requests_seen += 1
            yield bytes(10_000)


def _serve(echo: Echo, credentials: Any = None) -> tuple[Any, int]:
    server = grpc.server(futures.ThreadPoolExecutor(8), handlers=(echo,), options=OPTIONS)
    address = "127.0.0.1:0"
    port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    server.start()
    return server, port


def _channel(proxy: Appliance) -> Any:
    root = ssl.get_server_certificate(("127.0.0.1", proxy.port)).encode()
    credentials = grpc.ssl_channel_credentials(root)
    options = [*OPTIONS, ("grpc.ssl_target_name_override", "localhost"), ("grpc.enable_http_proxy", 0)]
    return grpc.secure_channel(f"127.0.0.1:{proxy.port}", credentials, options)


def _config(url: str, **route: Any) -> dict[str, Any]:
    site = {"hosts": ["*"], "upstreams": [url], "upstream_protocol": "h2", **route}
    return {"workers": 1, "sites": [site]}


@pytest.fixture(scope="module")
def theatre(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Appliance, Echo]]:
    """A plain server (h2c) and an appliance before it."""
    echo = Echo()
    server, port = _serve(echo)
    proxy = Appliance(tmp_path_factory.mktemp("grpc"), _config(f"http://127.0.0.1:{port}"))
    try:
        proxy.start()
        yield proxy, echo
        proxy.stop()
    finally:
        proxy.kill()
        proxy.forget()
        server.stop(None).wait()


@pytest.fixture
def echo(theatre: tuple[Appliance, Echo]) -> Echo:
    theatre[1].reset()
    return theatre[1]


@pytest.fixture
def channel(theatre: tuple[Appliance, Echo], echo: Echo) -> Iterator[Any]:
    with _channel(theatre[0]) as opened:
        yield opened


def _call(channel: Any, kind: str, name: str) -> Any:
    return getattr(channel, kind)(f"/{SERVICE}/{name}")


def test_unary_with_metadata_both_ways(channel: Any, echo: Echo) -> None:
    reply, call = _call(channel, "unary_unary", "Unary").with_call(
        b"hello", metadata=(("x-mine", "value"), ("x-bytes-bin", b"\x01\x02")), timeout=PATIENCE_SECS
    )
    assert reply == b"hello"
    assert call.code() is grpc.StatusCode.OK
    assert dict(call.initial_metadata())["x-early"] == "yes"
    late = dict(call.trailing_metadata())
    assert [late["x-late"], late["x-raw-bin"]] == ["too", b"\x00\xff"]
    assert [echo.metadata["x-mine"], echo.metadata["x-bytes-bin"]] == ["value", b"\x01\x02"]
    assert echo.metadata["x-forwarded-for"] == "127.0.0.1"
    assert echo.metadata["x-forwarded-proto"] == "https"


def connection_errors(proxy: Appliance) -> int:
    return int(proxy.status()["totals"]["http2_connection_errors"])


def test_many_short_calls_are_no_flood(theatre: tuple[Appliance, Echo], channel: Any) -> None:
    """grpcio sends a WINDOW_UPDATE or two for each message, however short."""
    before = connection_errors(theatre[0])
    unary = _call(channel, "unary_unary", "Unary")
    for _ in range(10):
        calls = [unary.future(b"short", timeout=PATIENCE_SECS) for _ in range(100)]
        assert {call.result() for call in calls} == {b"short"}
    assert connection_errors(theatre[0]) == before


def test_many_calls_that_fail_before_they_have_ended_are_no_flood(
    theatre: tuple[Appliance, Echo], channel: Any
) -> None:
    """grpcio resets a call that has failed before it was at its own end."""
    before = connection_errors(theatre[0])
    up = _call(channel, "stream_unary", "FailEarly")
    for _ in range(400):
        told = threading.Event()

        def ask(told: threading.Event = told) -> Iterator[bytes]:
            yield b"more to come"
            told.wait(PATIENCE_SECS)

        with pytest.raises(grpc.RpcError) as failed:
            up(ask(), timeout=PATIENCE_SECS)
        told.set()
        assert failed.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert connection_errors(theatre[0]) == before


def test_server_streaming(channel: Any) -> None:
    replies = list(_call(channel, "unary_stream", "Down")(b"500", timeout=PATIENCE_SECS))
    assert replies == [b"%d" % number for number in range(500)]


def test_client_streaming(channel: Any) -> None:
    reply = _call(channel, "stream_unary", "Up")(iter([b"a", b"b", b"c"] * 100), timeout=PATIENCE_SECS)
    assert reply == b",".join([b"a", b"b", b"c"] * 100)


def test_both_ways_in_turns(channel: Any) -> None:
    """Each message is sent only when the answer to the one before has come: nothing may wait for a buffer to fill."""
    answered = threading.Semaphore(1)

    def ask() -> Iterator[bytes]:
        for number in range(50):
            assert answered.acquire(timeout=PATIENCE_SECS)
            yield b"%03d" % number

    replies = []
    for reply in _call(channel, "stream_stream", "Both")(ask(), timeout=PATIENCE_SECS):
        replies.append(reply)
        answered.release()
    assert replies == [(b"%03d" % number)[::-1] for number in range(50)]


def test_errors_and_their_details(channel: Any) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        _call(channel, "unary_unary", "Fail")(b"", timeout=PATIENCE_SECS)
    error: Any = raised.value
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert error.details() == "not today: 100% \u2713"
    assert dict(error.trailing_metadata())["x-why"] == "because"


def test_an_error_behind_messages(channel: Any) -> None:
    replies = []
    with pytest.raises(grpc.RpcError) as raised:
        replies.extend(_call(channel, "unary_stream", "FailLate")(b"", timeout=PATIENCE_SECS))
    error: Any = raised.value
    assert (error.code(), error.details()) == (grpc.StatusCode.DATA_LOSS, "after the first")


def test_a_method_that_is_not_there(channel: Any) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        _call(channel, "unary_unary", "Nothing")(b"", timeout=PATIENCE_SECS)
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_deadline_reaches_the_server(channel: Any, echo: Echo) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        _call(channel, "unary_unary", "Sleep")(b"", timeout=0.5)
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert echo.cancelled.wait(PATIENCE_SECS)


def test_cancelling_reaches_the_server(channel: Any, echo: Echo) -> None:
    call = _call(channel, "unary_stream", "Endless")(b"")
    assert len(next(call)) == 10_000
    call.cancel()
    assert echo.cancelled.wait(PATIENCE_SECS)


def test_big_messages(channel: Any) -> None:
    big = bytes(range(256)) * (BIG // 256)
    assert _call(channel, "unary_unary", "Unary")(big, timeout=60) == big


def test_a_client_that_does_not_read_holds_the_server_back(channel: Any, echo: Echo) -> None:
    call = _call(channel, "unary_stream", "Endless")(b"")
    next(call)
    before = -1
    while before != echo.requests_seen:  # until it stands still
        before = echo.requests_seen
        time.sleep(0.5)
    assert echo.requests_seen * 10_000 < 10_000_000
    other = _call(channel, "unary_unary", "Unary")(b"passes by", timeout=PATIENCE_SECS)
    assert other == b"passes by"
    next(call)
    call.cancel()


def test_many_calls_share_one_connection(channel: Any, echo: Echo) -> None:
    calls = [_call(channel, "unary_unary", "Unary").future(b"%d" % n, timeout=PATIENCE_SECS) for n in range(200)]
    assert [call.result() for call in calls] == [b"%d" % n for n in range(200)]
    assert len(echo.peers) <= 2  # the one, and perhaps a second while the first was full


def test_over_tls_by_alpn(appliance: Any, tmp_path: Path) -> None:
    echo = Echo()
    authority = Authority(tmp_path)
    leaf, private = authority.leaf("127.0.0.1")
    files = authority.write(leaf, authority.issuer, key=private)
    pair = (Path(files["key"]).read_bytes(), Path(files["chain"]).read_bytes())
    server, port = _serve(echo, grpc.ssl_server_credentials([pair]))
    try:
        proxy = appliance(_config(f"https://127.0.0.1:{port}", upstream_tls={"ca": authority.ca_file}))
        with _channel(proxy) as channel:
            assert _call(channel, "unary_unary", "Unary")(b"hello", timeout=PATIENCE_SECS) == b"hello"
    finally:
        server.stop(None).wait()


def test_a_server_that_goes_away_is_replaced(appliance: Any) -> None:
    """Its GOAWAY ends the connection and not the calls; the next one comes to whoever listens then."""
    echo = Echo()
    server, port = _serve(echo)
    proxy = appliance(_config(f"http://127.0.0.1:{port}"))
    with _channel(proxy) as channel:
        unary = _call(channel, "unary_unary", "Unary")
        assert unary(b"1", timeout=PATIENCE_SECS) == b"1"
        call = _call(channel, "unary_unary", "Sleep").future(b"", timeout=PATIENCE_SECS)
        assert echo.begun.wait(PATIENCE_SECS)
        stopping = server.stop(PATIENCE_SECS)
        second = grpc.server(futures.ThreadPoolExecutor(4), handlers=(echo,), options=OPTIONS)
        wait_until(lambda: second.add_insecure_port(f"127.0.0.1:{port}") == port, "the port is free")
        second.start()
        try:
            echo.cancelled.set()
            assert call.result() == b"too late"
            stopping.wait()
            assert unary(b"2", timeout=PATIENCE_SECS) == b"2"
        finally:
            second.stop(None).wait()
