"""An upstream that plays a script: a function per connection says what it reads and what it sends, byte for byte."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from tests.harness.wire import TIMEOUT_SECS, Wire

Script = Callable[[Wire], None]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def answering(*responses: bytes) -> Script:
    """A script that reads requests and answers with the given responses in turn, the last one again and again.

    Each connection starts at the first. Without arguments it answers 200 with the body ``ok``.
    """
    lines = responses or (OK,)

    def play(wire: Wire) -> None:
        turn = 0
        while True:
            try:
                wire.wait_for_more()
                wire.read_body(wire.read_head())
            except EOFError:
                return
            wire.send(lines[min(turn, len(lines) - 1)])
            turn += 1

    return play


class RawUpstream:
    """A listening socket whose connections each run ``script`` in a thread; closes a connection when it returns.

    ``url`` is what the configuration takes. ``wires`` are the connections so far in order, each with what it
    ``received``. An error in a script (a connection error apart) fails the test when the upstream is closed.
    """

    def __init__(self, script: Script | None = None, *, unix_path: str | None = None) -> None:
        self.script = script or answering()
        self.wires: list[Wire] = []
        self._errors: list[BaseException] = []
        self._arrived: queue.SimpleQueue[Wire] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closing = False
        self._unix_path = unix_path
        if unix_path is None:
            self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
            self.port: int = self._listener.getsockname()[1]
            self.url = f"http://127.0.0.1:{self.port}"
        else:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(unix_path)
            self._listener.listen(128)
            self.port = 0
            self.url = f"unix:{unix_path}"
        self._start(self._accept)

    def _start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return  # closed
            if self._closing:
                sock.close()
                continue
            wire = Wire(sock)
            self.wires.append(wire)
            self._arrived.put(wire)
            self._start(lambda wire=wire: self._play(wire))  # type: ignore[misc]

    def _play(self, wire: Wire) -> None:
        try:
            self.script(wire)
        except ConnectionError:
            pass  # the proxy may close when it likes; what it sent is in wire.received
        except Exception as error:  # noqa: BLE001  handed to the test by close()
            if not self._closing:
                self._errors.append(error)
        finally:
            wire.close()

    def next_wire(self, timeout_secs: float = TIMEOUT_SECS) -> Wire:
        """The next connection that this was not yet asked for; waits for it."""
        try:
            return self._arrived.get(timeout=timeout_secs)
        except queue.Empty:
            raise AssertionError(f"no connection reached the upstream within {timeout_secs} s") from None

    def start_over(self) -> None:
        """Ends every connection and raises the first error that a script had; then it is as new, and still listens."""
        self._closing = True
        self._end_connections(self._threads[1:])
        self._closing = False
        self.script = answering()
        self.wires.clear()
        del self._threads[1:]
        while not self._arrived.empty():
            self._arrived.get()
        errors, self._errors = self._errors, []
        self._raise(errors)

    def _end_connections(self, threads: list[threading.Thread]) -> None:
        for wire in self.wires:
            with contextlib.suppress(OSError):
                wire.sock.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(TIMEOUT_SECS)

    @staticmethod
    def _raise(errors: list[BaseException]) -> None:
        if errors:
            raise AssertionError("the upstream's script failed") from errors[0]

    def close(self) -> None:
        """Ends every connection and thread, then raises the first error that a script had."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._listener.close()
        self._end_connections(self._threads)
        if self._unix_path is not None:
            os.unlink(self._unix_path)
        self._raise(self._errors)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
