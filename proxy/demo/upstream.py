"""The demo's embedded upstream: a small HTTP/1.1 server that shows and echoes what it received.

It runs in its own process behind the proxy, listens on loopback, and holds no more than a buffer of any body.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import re
import resource
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from urllib.parse import parse_qs

import h11

from proxy.demo.page import render_page
from proxy.demo.websocket import echo

READ_BYTES = 65_536
MAX_HEAD_BYTES = 131_072  # more than a proxy lets through, since it adds fields
IDLE_TIMEOUT_SECS = 75.0  # longer than the proxy keeps an idle upstream connection: the proxy closes first
SLOW_STEP_SECS = 0.5
SLOW_MAX_SECS = 3600.0
DESCRIPTOR_RESERVE = 200  # own files, and connections accepted in one wake-up before they are counted

Fields = list[tuple[bytes, bytes]]
TEXT: Fields = [(b"Content-Type", b"text/plain; charset=utf-8")]


class Exchange:
    """One request on a connection: its head, its body as it arrives, and the verbs to answer with."""

    def __init__(
        self,
        connection: h11.Connection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        request: h11.Request,
    ) -> None:
        self._connection = connection
        self._reader = reader
        self._writer = writer
        self.method: bytes = request.method
        self.target: bytes = request.target
        self.fields: Fields = list(request.headers.raw_items())
        path, _, query = request.target.partition(b"?")
        self.path: bytes = path
        self.query: str = query.decode("latin-1")

    async def body(self) -> AsyncIterator[bytes]:
        """The rest of the request's body in pieces."""
        while self._connection.their_state is h11.SEND_BODY:
            event = await next_event(self._connection, self._reader)
            if isinstance(event, h11.Data):
                yield bytes(event.data)

    async def invite(self) -> None:
        """Asks for the body where the client waits for that (RFC 9110 section 10.1.1): every body is welcome here."""
        if self._connection.they_are_waiting_for_100_continue:
            await self._send(h11.InformationalResponse(status_code=100, headers=[]))

    async def start(self, status: int, fields: Fields) -> None:
        """Sends the response's head."""
        await self._send(h11.Response(status_code=status, headers=fields, reason=_reason(status)))

    async def write(self, data: bytes) -> None:
        """Sends a piece of the response's body, none where the method is HEAD; waits for slow readers."""
        if self.method != b"HEAD":
            await self._send(h11.Data(data=data))

    async def finish(self) -> None:
        """Ends the response, after what is left of the request's body: the connection can then be used again."""
        async for _ in self.body():
            pass
        await self._send(h11.EndOfMessage())

    async def respond(self, status: int, fields: Fields, content: bytes) -> None:
        """A whole response with a known length; statuses that have no content get none."""
        if status in (204, 304):
            await self.start(status, [])
        else:
            await self.start(status, [*fields, (b"Content-Length", b"%d" % len(content))])
            await self.write(content)
        await self.finish()

    async def _send(self, event: h11.Event) -> None:
        data = self._connection.send(event)
        if data:
            self._writer.write(data)
            await self._writer.drain()


def _reason(status: int) -> bytes:
    try:
        return http.HTTPStatus(status).phrase.encode()
    except ValueError:
        return b""


async def next_event(connection: h11.Connection, reader: asyncio.StreamReader) -> object:
    """The connection's next event, reading as needed. Raises h11.RemoteProtocolError and OSError."""
    while (event := connection.next_event()) is h11.NEED_DATA:
        connection.receive_data(await reader.read(READ_BYTES))
    return event


async def _page(exchange: Exchange) -> None:
    page, fields = render_page(exchange.method, exchange.target, exchange.fields)
    await exchange.respond(200, fields, page)


async def _echo(exchange: Exchange) -> None:
    await exchange.start(200, TEXT)
    head = [exchange.method + b" " + exchange.target, *(n + b": " + v for n, v in exchange.fields), b"", b""]
    await exchange.write(b"\n".join(head))
    async for piece in exchange.body():
        await exchange.write(piece)
    await exchange.finish()


async def _bytes(exchange: Exchange) -> None:
    left = int(exchange.path.rpartition(b"/")[2])
    await exchange.start(200, [(b"Content-Type", b"application/octet-stream"), (b"Content-Length", b"%d" % left)])
    block = bytes(range(256)) * (READ_BYTES // 256)
    while left > 0 and exchange.method != b"HEAD":
        await exchange.write(block[:left])
        left -= min(left, len(block))
    await exchange.finish()


async def _slow(exchange: Exchange) -> None:
    try:
        secs = float(parse_qs(exchange.query).get("secs", ["5"])[0])
    except ValueError:
        secs = -1.0
    if not 0 <= secs <= SLOW_MAX_SECS:
        await exchange.respond(400, TEXT, b"secs is a number from 0 to %d\n" % SLOW_MAX_SECS)
        return
    await exchange.start(200, TEXT)
    begin = time.monotonic()
    while exchange.method != b"HEAD" and (passed := time.monotonic() - begin) < secs:
        await exchange.write(b"%.1f of %.1f seconds\n" % (passed, secs))
        await asyncio.sleep(min(SLOW_STEP_SECS, secs - passed))
    await exchange.finish()


async def _status(exchange: Exchange) -> None:
    status = int(exchange.path.rpartition(b"/")[2])
    await exchange.respond(status, TEXT, b"%d %s\n" % (status, _reason(status)))


async def _not_found(exchange: Exchange) -> None:
    await exchange.respond(404, TEXT, b"Nothing here. Try /, /echo, /bytes/N, /slow?secs=N, /status/NNN or /ws.\n")


Route = tuple[re.Pattern[bytes], Callable[[Exchange], Awaitable[None]]]
ROUTES: tuple[Route, ...] = (
    (re.compile(rb"/"), _page),
    (re.compile(rb"/echo(/.*)?"), _echo),
    (re.compile(rb"/bytes/[0-9]{1,13}"), _bytes),
    (re.compile(rb"/slow"), _slow),
    (re.compile(rb"/status/[2-5][0-9][0-9]"), _status),
    (re.compile(rb".*", re.DOTALL), _not_found),
)


def _wants_websocket(exchange: Exchange) -> bool:
    return exchange.path == b"/ws" and any(
        name.lower() == b"upgrade" and value.lower() == b"websocket" for name, value in exchange.fields
    )


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
    while True:
        try:
            async with asyncio.timeout(IDLE_TIMEOUT_SECS):
                request = await next_event(connection, reader)
        except h11.RemoteProtocolError as error:
            if connection.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                writer.write(connection.send(_refusal(error)) or b"")
                await writer.drain()
            return
        if not isinstance(request, h11.Request):
            return
        exchange = Exchange(connection, reader, writer, request)
        if _wants_websocket(exchange):
            await echo(reader, writer, exchange.target, exchange.fields, connection.trailing_data[0])
            return
        await exchange.invite()
        await next(answer for path, answer in ROUTES if path.fullmatch(exchange.path))(exchange)
        if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
            return
        connection.start_next_cycle()


def _refusal(error: h11.RemoteProtocolError) -> h11.Response:
    return h11.Response(
        status_code=error.error_status_hint,
        headers=[(b"Content-Length", b"0"), (b"Connection", b"close")],
        reason=_reason(error.error_status_hint),
    )


async def _run(sock: socket.socket) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = max(1, soft - DESCRIPTOR_RESERVE)
    serving: set[asyncio.Task[None]] = set()

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        try:
            if len(serving) <= room:
                await _serve(reader, writer)
        except (OSError, h11.ProtocolError):
            pass  # the peer went away or cut its message short: there is nobody to tell
        except asyncio.CancelledError:
            pass  # asyncio.streams would log a cancelled handler as a fault
        finally:
            serving.discard(task)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    server = await asyncio.start_server(on_connection, sock=sock)
    await stopped.wait()
    server.close()
    for task in tuple(serving):
        task.cancel()
    await asyncio.gather(*serving, return_exceptions=True)


def run_demo_upstream(sock: socket.socket) -> None:
    """Serves on ``sock``, a bound listening TCP or Unix socket, until SIGTERM or SIGINT. Blocks; owns ``sock``.

    Connections beyond what the soft RLIMIT_NOFILE leaves room for are closed at once.
    """
    asyncio.run(_run(sock))
