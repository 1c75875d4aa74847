"""The control plane's HTTP server over real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest
import uvloop

from proxy.config.address import Address
from proxy.master import endpoint as module
from proxy.master.endpoint import Answer, Endpoint, get_only, text_answer
from proxy.master.listeners import bind_exclusive


class Recorder:
    def __init__(self) -> None:
        self.signatures: list[str] = []

    def report(
        self, signature: str, message: str, *, level: str = "error", exc: BaseException | None = None, **fields: object
    ) -> None:
        self.signatures.append(signature)


def broken() -> Answer:
    raise RuntimeError("a fault of ours")


def play(scene: Callable[[int], Awaitable[None]], *, max_connections: int = 4) -> Recorder:
    """Runs ``scene`` (given the port) beside an endpoint; afterwards no connection of it is left."""
    return play_with(lambda port, _: scene(port), max_connections=max_connections)


def play_with(scene: Callable[[int, Endpoint], Awaitable[None]], *, max_connections: int = 4) -> Recorder:
    """The same with the endpoint, for a scene that ends it."""
    reporter = Recorder()

    async def run() -> None:
        loop = asyncio.get_running_loop()
        listener = bind_exclusive(Address("127.0.0.1", 0, socket.AF_INET))
        served = Endpoint(
            loop,
            listener,
            label="test",
            max_connections=max_connections,
            handler=get_only({"/good": lambda: text_answer(200, "fine"), "/broken": broken}),
            reporter=reporter,
        )
        served.start()
        try:
            async with asyncio.timeout(20):
                await scene(listener.getsockname()[1], served)
        finally:
            await served.stop()
            listener.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
    return reporter


async def exchange(port: int, request: bytes) -> bytes:
    """What the server sends until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


@pytest.mark.parametrize(
    ("request_line", "status", "contains"),
    [
        (b"GET /good HTTP/1.1", b"200 OK", b"\r\n\r\nfine\n"),
        (b"GET /good?verbose=1 HTTP/1.1", b"200 OK", b"\r\n\r\nfine\n"),
        (b"GET /bad HTTP/1.1", b"404 Not Found", b"/good"),
        (b"POST /good HTTP/1.1", b"405 Method Not Allowed", b"Allow: GET, HEAD\r\n"),
        (b"GET /good HTTP/1.1\r\nContent-Length: 0", b"200 OK", b"fine"),
        (b"GET /good HTTP/1.1\r\nContent-Length: 3", b"413 ", b"body"),
        (b"GET /good HTTP/1.1\r\nTransfer-Encoding: chunked", b"413 ", b"body"),
        (b"GET /good HTTP/1.0", b"200 OK", b"fine"),
        (b"nonsense", b"400 Bad Request", b"bad request"),
        (b"GET /good HTTP/1.1\r\nX: " + b"x" * 20_000, b"431 ", b"bad request"),
    ],
)
def test_answers(request_line: bytes, status: bytes, contains: bytes) -> None:
    async def scene(port: int) -> None:
        answer = await exchange(port, request_line + b"\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 " + status)
        assert contains in answer

    assert play(scene).signatures == []


def test_head_has_the_fields_and_no_body() -> None:
    async def scene(port: int) -> None:
        answer = await exchange(port, b"HEAD /good HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert b"Content-Length: 5\r\n" in answer
        assert answer.endswith(b"\r\n\r\n")

    play(scene)


def test_a_connection_is_kept_alive_and_pipelined_requests_are_answered_in_order() -> None:
    async def scene(port: int) -> None:
        one = b"GET /good HTTP/1.1\r\nHost: localhost\r\n\r\n"
        last = b"GET /other HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        answer = await exchange(port, one + one + last)
        assert [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]] == [b"200", b"200", b"404"]

    play(scene)


def test_a_silent_client_is_closed_and_its_permit_serves_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONNECTION_SECS", 0.2)

    async def scene(port: int) -> None:
        silent = asyncio.create_task(exchange(port, b""))
        trickling = asyncio.create_task(exchange(port, b"GET /good HTTP/1.1\r\nHo"))
        answer = await exchange(port, b"GET /good HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200")
        assert await silent == b""
        assert await trickling == b""

    play(scene, max_connections=2)


def test_a_late_answer_says_that_it_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LAST_ANSWER_SHARE", -1.0)

    async def scene(port: int) -> None:
        answer = await exchange(port, b"GET /good HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"Connection: close\r\n" in answer

    play(scene)


def test_a_fault_of_ours_ends_one_connection_and_is_reported() -> None:
    async def scene(port: int) -> None:
        assert await exchange(port, b"GET /broken HTTP/1.1\r\nHost: localhost\r\n\r\n") == b""
        good = await exchange(port, b"GET /good HTTP/1.0\r\n\r\n")
        assert good.startswith(b"HTTP/1.1 200")

    assert play(scene).signatures == ["control.request_failed"]


@pytest.mark.parametrize("asks", [True, False])
def test_who_is_connected_when_it_retires_may_ask_once_more(monkeypatch: pytest.MonkeyPatch, asks: bool) -> None:
    """An old generation without clients ends at once: a request on its way met a closed connection."""
    monkeypatch.setattr(module, "LAST_REQUEST_SECS", 5.0 if asks else 0.2)

    async def scene(port: int, served: Endpoint) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        request = b"GET /good HTTP/1.1\r\nHost: localhost\r\n\r\n"
        writer.write(request)
        assert b"connection: close" not in (await reader.readuntil(b"fine\n")).lower()
        served.retire()
        stopping = asyncio.create_task(served.stop())
        await asyncio.sleep(0.1)
        if asks:
            writer.write(request)
            assert b"connection: close" in (await reader.readuntil(b"fine\n")).lower()
        assert await reader.read() == b""
        await stopping
        writer.close()
        await writer.wait_closed()

    play_with(scene)
