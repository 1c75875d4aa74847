"""A small HTTP/1.1 server for the control plane: our accept loop, h11 for the protocol, one answer a request.

It is for probes and the operator's own tools: requests have no body, answers are whole, a connection ends after
``CONNECTION_SECS`` whatever it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import os
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl

import h11

from proxy.master.family import descends_from
from proxy.net.accept import AcceptLoop
from proxy.net.admission import Permit, Permits
from proxy.observe.events import Reporter

CONNECTION_SECS = 10.0
LAST_ANSWER_SHARE = 0.5
"""An answer later than this share of its connection's time says ``Connection: close``."""
LAST_REQUEST_SECS = 1.0
"""Who is connected when somebody else has taken over may ask once more for so long after the end was ordered."""
MAX_HEAD_BYTES = 8192
_RECEIVE_BYTES = 8192
_PEER = struct.Struct("3i")
"""Of SO_PEERCRED: pid, uid, gid (unix(7))."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    allow: str = ""


Handler = Callable[[str, str, Mapping[str, str]], Answer | Awaitable[Answer]]
"""Of (method, path, query); answers GET and HEAD alike."""


def text_answer(status: int, text: str) -> Answer:
    return Answer(status, text.encode() + b"\n")


def get_only(routes: dict[str, Callable[[], Answer]]) -> Handler:
    """A handler that answers GET and HEAD from a table of paths: others 404, other methods 405 (RFC 9110 15.5.6)."""

    def handle(method: str, path: str, _query: Mapping[str, str]) -> Answer:
        route = routes.get(path)
        if route is None:
            return text_answer(404, "not found: " + " ".join(routes))
        if method not in ("GET", "HEAD"):
            return Answer(405, b"only GET and HEAD\n", allow="GET, HEAD")
        return route()

    return handle


class Endpoint:
    """One listening socket (owned by the caller) and its connections."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listener: socket.socket,
        *,
        label: str,
        max_connections: int,
        handler: Handler,
        reporter: Reporter,
        connection_secs: float | None = None,
        uids: frozenset[int] | None = None,
    ) -> None:
        """``uids``: on a Unix socket, whose processes are answered; others are turned away and reported."""
        self.label = label
        self._permits = Permits(max_connections)
        self._loop = loop
        self._handler = handler
        self._connection_secs = CONNECTION_SECS if connection_secs is None else connection_secs
        self._reporter = reporter
        self._uids = uids
        self._listener = listener
        self._retired = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._accept = AcceptLoop(
            loop,
            listener,
            label=label,
            permits=self._permits,
            on_accept=self._on_accept,
            reporter=reporter,
            cells=None,
        )

    @property
    def connections(self) -> int:
        """Connections that are open now."""
        return self._permits.held

    def start(self) -> None:
        self._accept.start()

    def retire(self) -> None:
        """Somebody else accepts on this socket from here on; who is connected gets one more answer (idempotent)."""
        if not self._retired:
            self._retired = True
            self._accept.stop()
            self._listener.close()

    async def stop(self) -> None:
        """Accept nothing more and end the connections there are."""
        if not self._retired:
            self._accept.stop()
        elif self._tasks:
            # An old generation without clients ends at once, and a request may be on its way that would meet a reset.
            await asyncio.wait(self._tasks, timeout=LAST_REQUEST_SECS)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _on_accept(self, sock: socket.socket, _peer: object, permit: Permit) -> None:
        if self._uids is not None and self._is_stranger(sock, self._uids):
            sock.close()
            permit.release()
            return
        task = self._loop.create_task(self._serve(sock))
        self._tasks.add(task)

        # Not in the task's own ``finally``: a task cancelled before its first step never runs any of its code.
        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            sock.close()
            permit.release()

        task.add_done_callback(done)

    def _is_stranger(self, sock: socket.socket, uids: frozenset[int]) -> bool:
        pid, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        # Workers may be of the same user as the operator, or of root: what descends from the master is turned away.
        # One that is not root cannot become it, and ProtectProc= hides root's processes from a service's user.
        if uid in uids and ((uid == 0 and os.geteuid() != 0) or not descends_from(pid, os.getppid())):
            return False
        self._reporter.report(
            f"{self.label}.stranger",
            "a process that may not use this socket was turned away",
            level="warning",
            uid=uid,
            pid=pid,
        )
        return True

    async def _serve(self, sock: socket.socket) -> None:
        try:
            async with asyncio.timeout(self._connection_secs):
                await self._exchanges(sock)
        except (TimeoutError, OSError):
            return  # the client is slow or gone: its own affair
        except Exception as error:  # noqa: BLE001  a fault of ours ends this connection, not the control plane
            self._reporter.report("control.request_failed", "a control request failed", exc=error)

    async def _exchanges(self, sock: socket.socket) -> None:
        started_at = time.monotonic()
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        while True:
            close = head = False
            try:
                request = await self._next(sock, connection)
                if not isinstance(request, h11.Request):
                    return
                head = request.method == b"HEAD"
                if _has_body(request):
                    close = True
                    answer = text_answer(413, "a body is not accepted here")
                else:
                    await self._next(sock, connection)  # the end of the message, which is in the buffer already
                    path, _, query = request.target.decode("ascii", "replace").partition("?")
                    given = self._handler(request.method.decode("ascii"), path, dict(parse_qsl(query)))
                    answer = given if isinstance(given, Answer) else await given
            except h11.RemoteProtocolError as error:
                close = True
                answer = text_answer(error.error_status_hint, "bad request")
            # A request must not meet a connection that is about to end.
            late = time.monotonic() - started_at > self._connection_secs * LAST_ANSWER_SHARE
            await self._send(sock, connection, answer, close=close or late or self._retired, head=head)
            if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_WR)
                return
            connection.start_next_cycle()

    async def _next(self, sock: socket.socket, connection: h11.Connection) -> h11.Event | None:
        """The next event, None when the client has closed. Raises RemoteProtocolError."""
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await self._loop.sock_recv(sock, _RECEIVE_BYTES))
            elif isinstance(event, h11.ConnectionClosed) or not isinstance(event, h11.Event):
                return None
            else:
                return event

    async def _send(
        self, sock: socket.socket, connection: h11.Connection, answer: Answer, *, close: bool, head: bool
    ) -> None:
        fields = [
            ("Content-Type", answer.content_type),
            ("Content-Length", str(len(answer.body))),
            ("Cache-Control", "no-store"),
        ]
        if answer.allow:
            fields.append(("Allow", answer.allow))
        if close:
            fields.append(("Connection", "close"))
        data = (
            connection.send(
                h11.Response(status_code=answer.status, headers=fields, reason=http.HTTPStatus(answer.status).phrase)
            )
            or b""
        )
        if not head:
            data += connection.send(h11.Data(data=answer.body)) or b""
        data += connection.send(h11.EndOfMessage()) or b""
        await self._loop.sock_sendall(sock, data)


def _has_body(request: h11.Request) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0"))
        for name, value in request.headers
    )
