"""Streams over socket pairs on a real loop, and a handler that writes down what it is told."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any

import uvloop

from proxy.stream.deadlines import Deadlines
from proxy.stream.stream import Stream, TlsStream

WAIT_SECS = 10.0


class Recorder:
    """A handler. ``ended``: the test has closed the stream, so nothing may come any more."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.late: list[str] = []
        self.received = bytearray()
        self.errors: list[OSError] = []
        self.ended = False
        self.releases = 0
        self.on_event: Callable[[str], None] = lambda event: None

    def _note(self, event: str) -> None:
        if self.ended:
            self.late.append(event)
        self.events.append(event)
        self.on_event(event)

    def on_open(self) -> None:
        self._note("open")

    def on_data(self, data: bytes) -> None:
        assert data
        self.received += data
        self._note("data")

    def on_eof(self) -> None:
        self._note("eof")

    def on_lost(self, error: OSError) -> None:
        self.errors.append(error)
        self._note("lost")

    def on_write_failed(self, error: OSError) -> None:
        self.errors.append(error)
        self._note("write failed")

    def on_drained(self) -> None:
        self._note("drained")

    def on_read_deadline(self) -> None:
        self._note("read deadline")

    def on_write_deadline(self) -> None:
        self._note("write deadline")

    def release(self) -> None:
        self.releases += 1


class Rig:
    """Owner of a loop and of everything that is made on it."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self.faults: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda _loop, context: self.faults.append(context))
        self.deadlines = Deadlines(self.loop)
        self.socks: list[socket.socket] = []
        self.streams: list[tuple[Stream, Recorder]] = []

    def pair(self) -> tuple[socket.socket, socket.socket]:
        """Two connected TCP sockets: our end (non-blocking) and the peer's (blocking, with a time limit)."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            peer = socket.create_connection(listener.getsockname(), WAIT_SECS)
            ours, _ = listener.accept()
        ours.setblocking(False)
        self.socks += [ours, peer]
        return ours, peer

    def stream(self, sock: socket.socket, write_timeout_secs: float = WAIT_SECS) -> tuple[Stream, Recorder]:
        recorder = Recorder()
        one = Stream(self.loop, sock, self.deadlines, recorder, write_timeout_secs)
        return self._started(one, recorder)

    def tls_stream(
        self, sock: socket.socket, context: ssl.SSLContext, *, server: bool, write_timeout_secs: float = WAIT_SECS
    ) -> tuple[TlsStream, Recorder]:
        recorder = Recorder()
        wrapped = context.wrap_socket(
            sock,
            server_side=server,
            do_handshake_on_connect=False,
            suppress_ragged_eofs=server,
            server_hostname=None if server else "localhost",
        )
        one = TlsStream(self.loop, wrapped, self.deadlines, recorder, write_timeout_secs)
        self._started(one, recorder)
        return one, recorder

    def _started(self, one: Stream, recorder: Recorder) -> tuple[Stream, Recorder]:
        one.on_release = recorder.release
        self.streams.append((one, recorder))
        one.start()
        return one, recorder

    def run_until(self, holds: Callable[[], object], what: str) -> None:
        async def wait() -> None:
            deadline = time.monotonic() + WAIT_SECS
            while not holds():
                assert time.monotonic() < deadline, f"not within {WAIT_SECS} s: {what}"
                await asyncio.sleep(0.001)

        self.loop.run_until_complete(wait())

    def turn(self, secs: float = 0.05) -> None:
        """Let the loop run: what must not happen gets its chance."""
        self.loop.run_until_complete(asyncio.sleep(secs))

    def in_thread(self, work: Callable[[], Any]) -> Any:
        """Run the peer's blocking work while the loop runs."""
        return self.loop.run_until_complete(asyncio.wait_for(asyncio.to_thread(work), WAIT_SECS))

    def close(self) -> None:
        """Ends all, and asserts what holds for every test: no exception in a callback, one release, nothing late."""
        for one, _ in self.streams:
            one.abort()
        self.turn(0)
        for sock in self.socks:
            sock.close()
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        assert self.faults == []
        assert [recorder.late for _, recorder in self.streams] == [[] for _ in self.streams]
        assert [recorder.releases for _, recorder in self.streams] == [1 for _ in self.streams]


def read_all(sock: socket.socket) -> bytes:
    """What the peer receives until the end of the stream."""
    pieces = []
    while piece := sock.recv(1 << 20):
        pieces.append(piece)
    return b"".join(pieces)
