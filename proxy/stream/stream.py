"""A byte stream over a non-blocking descriptor, plain or TLS: callbacks for input, a bounded buffer for output.

The TLS kind works directly on a non-blocking ``ssl.SSLSocket``: a third of the memory of an event loop's own TLS
transport per idle connection, at the same speed (docs/architecture.md).

Theory of operation: the reader stays registered unless ``pause_reading`` was called; the writer is registered only
while output is buffered. ``write`` never blocks: what the kernel does not take is buffered, and whoever writes looks at
``buffered`` to stop its source (HIGH_WATER_BYTES) until ``on_drained`` comes (LOW_WATER_BYTES). After ``close`` or
``abort`` no handler's callback comes. A stream owns its socket and closes it in one place (``_close_descriptor``);
right after that, whatever the way there, ``on_release`` is called once: what counts descriptors hangs on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import select
import socket
import ssl
import struct
import sys
import termios
from collections import deque
from collections.abc import Callable
from math import inf
from time import monotonic
from typing import Any, ClassVar, Final, Protocol

from proxy.stream.deadlines import Deadlines
from proxy.stream.read_guard import READ_GUARD

READ_BYTES = 65_536
TLS_RECORD_BYTES = 16_384
"""RFC 8446 section 5.1: a record carries at most 2^14 bytes, so one SSL_read never returns more."""
TLS_READS_A_WAKEUP = 4

HIGH_WATER_BYTES = 65_536
LOW_WATER_BYTES = 16_384

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)

# In struct tcp_info (linux/tcp.h): tcpi_last_data_sent, tcpi_last_ack_sent, tcpi_last_data_recv, in ms.
_LAST_TIMES = struct.Struct("III")
_LAST_TIMES_AT = 44
_TCP_INFO_END = _LAST_TIMES_AT + _LAST_TIMES.size


class StreamHandler(Protocol):
    """What a stream tells its user. A handler may close the stream inside any of these."""

    def on_open(self) -> None:
        """The TLS handshake has ended well (never called by a stream that is plain)."""

    def on_data(self, data: bytes) -> None:
        """Input; never empty."""

    def on_eof(self) -> None:
        """The peer ended its side cleanly (FIN, and close_notify where there is TLS)."""

    def on_lost(self, error: OSError) -> None:
        """The connection is gone; the stream has closed itself. The last callback."""

    def on_write_failed(self, error: OSError) -> None:
        """The peer takes no more; what was buffered is dropped. Input that it sent before may still come."""

    def on_drained(self) -> None:
        """Output fell to the low-water mark after it had been buffered."""

    def on_read_deadline(self) -> None:
        """``read_deadline`` has passed; it is unset now."""

    def on_write_deadline(self) -> None:
        """Output was buffered for ``write_timeout_secs`` without any progress."""


class _Nobody:
    """Handles nothing: a stream's handler before it has one, and after its end."""

    __slots__ = ()

    def on_open(self) -> None: ...
    def on_data(self, data: bytes) -> None: ...
    def on_eof(self) -> None: ...
    def on_lost(self, error: OSError) -> None: ...
    def on_write_failed(self, error: OSError) -> None: ...
    def on_drained(self) -> None: ...
    def on_read_deadline(self) -> None: ...
    def on_write_deadline(self) -> None: ...


NOBODY: Final[StreamHandler] = _Nobody()


class Stream:
    """The plain kind. See the module's text.

    ``read_deadline`` is the user's (monotonic seconds, set with ``expect``); the write deadline is kept here.
    """

    __slots__ = (
        "_broken",
        "_closing",
        "_deadlines",
        "_dropping",
        "_fd",
        "_loop",
        "_output",
        "_rate_due",
        "_reading",
        "_sock",
        "_taken",
        "_unwatched",
        "_write_deadline",
        "buffered",
        "bytes_read",
        "bytes_written",
        "closed",
        "due",
        "handler",
        "min_write_rate",
        "on_release",
        "rate_grace_secs",
        "read_deadline",
        "too_slow",
        "write_timeout_secs",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        deadlines: Deadlines,
        handler: StreamHandler,
        write_timeout_secs: float,
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._fd = sock.fileno()
        self._deadlines = deadlines
        self.handler = handler
        self.on_release: Callable[[], None] | None = None
        self.write_timeout_secs = write_timeout_secs
        self.min_write_rate = 0
        """Bytes a second that a peer must take at least while output is buffered, over ``write_timeout_secs`` (or over
        ``rate_grace_secs``, where that is longer); 0: any rate. For the user to set before anything is written."""
        self.rate_grace_secs = 0.0
        self.too_slow = False
        """With ``on_write_deadline``: it was for that."""
        self._output: deque[bytes | memoryview] | None = None
        self.buffered = 0
        self.bytes_read = 0
        self.bytes_written = 0
        self._reading = False
        self._dropping = False
        self._unwatched = False  # uvloop has given the descriptor up once: the peer has reset it
        self._closing = False
        self._broken = False
        self.closed = False
        self.due = inf
        self.read_deadline = inf
        self._write_deadline = inf
        self._rate_due = inf
        self._taken = 0

    def start(self) -> None:
        """Begin to read."""
        self._reading = True
        self._loop.add_reader(self._fd, self._on_readable)

    # -- deadlines ---------------------------------------------------------------------------------------------------

    def expect(self, when: float) -> None:
        """Set ``read_deadline`` (monotonic seconds; infinity: none)."""
        self.read_deadline = when
        if when < self.due and not self.closed:
            self._deadlines.watch(self, when)

    def next_deadline(self) -> float:
        """See ``Deadlined``."""
        return min(self.read_deadline, self._write_deadline)

    def on_deadline(self, now: float) -> None:
        """See ``Deadlined``."""
        if self._write_deadline <= now:
            self._write_deadline = inf
            if self._goes_on_taking(now):
                pass
            elif self._closing:
                self._release()
                return
            else:
                self.handler.on_write_deadline()
        elif self.read_deadline <= now:
            self.read_deadline = inf
            self.handler.on_read_deadline()
        if not self.closed and (when := self.next_deadline()) < self.due:
            self._deadlines.watch(self, when)

    # -- input -------------------------------------------------------------------------------------------------------

    @property
    def closing(self) -> bool:
        """Whether ``close`` was called and what is buffered is still to be sent."""
        return self._closing and not self.closed

    @property
    def reading(self) -> bool:
        """Whether input is being read."""
        return self._reading

    def pause_reading(self) -> None:
        """Take no more input (idempotent): the peer is held back by the kernel's window."""
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._fd)

    def resume_reading(self) -> None:
        """Take input again (idempotent)."""
        if not self._reading and not self.closed and not self._closing:
            self._reading = True
            self._loop.add_reader(self._fd, self._on_readable)

    def keep_watching(self) -> None:
        """Make sure that what comes after this wake-up is met too; for where nothing else would end a wait.

        uvloop stops watching a descriptor for good once it has seen an error event on it (a reset), whatever the
        callback found: behind the last data a reset would then stay unseen. It costs a microsecond, so it is called
        after a full read, behind which there may be more, and by tunnels, which wait for hours.
        """
        self._loop.call_soon(self._watch_again)

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Call after the other connections have had their turn, unless the stream is closed by then."""
        self._loop.call_soon(self._call_if_open, callback)

    def _call_if_open(self, callback: Callable[[], None]) -> None:
        if not self.closed and not self._closing:
            callback()

    @property
    def descriptor(self) -> int:
        """The descriptor's number; it is somebody else's once the stream is closed."""
        return self._fd

    def owing_secs(self) -> float:
        """How long the peer has not sent anything although it had all that we sent; 0.0 where nobody can tell.

        The kernel's times count from the connection's beginning, so also what went by in the queue of the listener.
        """
        try:
            info = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_END)
        except OSError:
            return 0.0
        if len(info) < _TCP_INFO_END:
            return 0.0
        # A socket that has never sent tells the time since the machine's start: the smaller one is what counts.
        last_sent_ms: int
        last_received_ms: int
        last_sent_ms, _, last_received_ms = _LAST_TIMES.unpack_from(info, _LAST_TIMES_AT)
        return min(last_sent_ms, last_received_ms) / 1000

    def register(self, poll: select.poll) -> int:
        """Have ``poll`` look for an error or the end of both directions, and nothing else. Returns the descriptor."""
        poll.register(self._fd, 0)
        return self._fd

    def reset_seen(self) -> None:
        """``poll`` found what the loop has not told: end, after what there is to read."""
        if self._reading and not self._dropping:
            self.keep_watching()
        elif not self.closed:
            self._lose(ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)))

    def _watch_again(self) -> None:
        if self._reading and not self.closed and not self._dropping:
            try:
                self._loop.add_reader(self._fd, self._on_readable)
            except RuntimeError:
                self._unwatched = True
                self._loop.remove_reader(self._fd)
                self._loop.add_reader(self._fd, self._on_readable)

    def _on_readable(self) -> None:
        try:
            data = self._sock.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._lose(error)
            return
        if data:
            if len(data) == READ_BYTES or self._unwatched:
                self.keep_watching()
            self.bytes_read += len(data)
            self.handler.on_data(data)
        else:
            self.pause_reading()
            self.handler.on_eof()

    def _lose(self, error: OSError) -> None:
        self._close_descriptor()
        try:
            self.handler.on_lost(error)
        finally:
            self._tell_released()

    # -- output ------------------------------------------------------------------------------------------------------

    def _send(self, data: bytes | memoryview) -> int:
        """One write: how many bytes were taken, 0 when none can be now. Raises OSError."""
        try:
            return self._sock.send(data)
        except (BlockingIOError, InterruptedError):
            return 0

    def write(self, data: bytes) -> None:
        """Send ``data``; what the kernel does not take now is buffered. Does nothing on a stream that is closing."""
        if self.closed or self._closing or self._broken:
            return
        self.bytes_written += len(data)
        if self._output is not None:
            self._output.append(data)
            self.buffered += len(data)
            return
        size = len(data)
        try:
            sent = self._send(data)
            if sent < size:
                view = memoryview(data)
                while 0 < sent < size:
                    taken = self._send(view[sent:])
                    if taken == 0:
                        break
                    sent += taken
        except OSError as error:
            self._write_failed(error)
            return
        if sent < size:
            self._output = deque((memoryview(data)[sent:],))
            self.buffered = size - sent
            self._loop.add_writer(self._fd, self._on_writable)
            self._taken = self.taken_by_peer()
            self._rate_due = monotonic() + self._rate_secs
            self._write_progress()

    def _write_progress(self) -> None:
        self._write_deadline = when = min(monotonic() + self.write_timeout_secs, self._rate_due)
        if when < self.due:
            self._deadlines.watch(self, when)

    @property
    def _rate_secs(self) -> float:
        return max(self.rate_grace_secs, self.write_timeout_secs) if self.min_write_rate else inf

    def waiting_in_kernel(self) -> int:
        """Bytes that the kernel holds for the peer, since they are not sent or not acknowledged."""
        waiting = bytearray(4)
        with contextlib.suppress(OSError):
            fcntl.ioctl(self._fd, termios.TIOCOUTQ, waiting)
        return int.from_bytes(waiting, sys.byteorder)

    def taken_by_peer(self) -> int:
        """Bytes that are neither buffered here nor waiting in the kernel: that takes far more than a slow peer."""
        return self.bytes_written - self.buffered - self.waiting_in_kernel()

    def _goes_on_taking(self, now: float) -> bool:
        """Whether the peer has taken enough since it was last looked at; then the write deadline begins anew.

        The kernel tells room for more only when a third of its buffer is free: progress that only it has seen counts.
        """
        if self._output is None:
            return False
        taken = self.taken_by_peer()
        self.too_slow = now >= self._rate_due and taken - self._taken < self.min_write_rate * self._rate_secs
        if self.too_slow or (now < self._rate_due and taken <= self._taken):
            return False
        self._taken = taken
        if now >= self._rate_due:
            self._rate_due = now + self._rate_secs
        self._write_progress()
        return True

    def _on_writable(self) -> None:
        output = self._output
        assert output is not None
        was = self.buffered
        try:
            while output:
                piece = output[0]
                sent = self._send(piece)
                if sent == 0:
                    break
                self.buffered -= sent
                if sent == len(piece):
                    output.popleft()
                else:
                    output[0] = memoryview(piece)[sent:]
        except OSError as error:
            self._write_failed(error)
            return
        if not output:
            self._end_of_output()
            if self._closing:
                self._finish_close()
                return
        elif self.buffered < was:
            self._write_progress()
        if self._closing:
            return
        if self.buffered <= LOW_WATER_BYTES < was or not output:
            self.handler.on_drained()

    def _end_of_output(self) -> None:
        self._output = None
        self.buffered = 0
        self._write_deadline = inf
        self._loop.remove_writer(self._fd)

    def _write_failed(self, error: OSError) -> None:
        self._broken = True
        if self._output is not None:
            self._end_of_output()
        if self._closing:
            self._release()
            return
        # Not from inside write(): its caller is in the middle of something.
        self._loop.call_soon(self._tell_write_failed, error)

    def _tell_write_failed(self, error: OSError) -> None:
        if not self.closed:
            self.handler.on_write_failed(error)

    # -- the end -----------------------------------------------------------------------------------------------------

    half_closes: ClassVar[bool] = True
    """Whether input that comes after ``shut_down_writing`` is whole."""

    def shut_down_writing(self) -> None:
        """End our side (FIN) while input goes on; call it when nothing is buffered."""
        if not self.closed:
            with contextlib.suppress(OSError):  # the peer was faster
                self._say_goodbye()
                socket.socket.shutdown(self._sock, socket.SHUT_WR)

    def read_raw(self) -> int:
        """Read and drop what has come, below TLS: how many bytes, 0 when nothing is there, -1 at the end or on error.

        For a lingering close, where only the fact that the peer still sends matters.
        """
        try:
            return len(socket.socket.recv(self._sock, READ_BYTES)) or -1
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            return -1

    def make_peek(self) -> Callable[[int], list[tuple[int, int]]]:
        """A function that, called with 0, tells whether there is anything to read: bytes, the end, an error.

        It is poll(2), half the price of a recv with MSG_PEEK that ends in an exception.
        """
        poll = select.poll()
        poll.register(self._fd, select.POLLIN | select.POLLRDHUP)
        return poll.poll

    def drop_input(self, callback: Callable[[], None]) -> None:
        """Hand each wake-up for input to ``callback`` from now on, unread."""
        self._reading = self._dropping = True
        self._loop.remove_reader(self._fd)  # it may be one that uvloop watches no more, see keep_watching
        self._loop.add_reader(self._fd, callback)

    def close(self) -> None:
        """Send what is buffered, say goodbye, close. Idempotent; no callback comes after it."""
        if self.closed or self._closing:
            return
        self.pause_reading()
        self.read_deadline = inf
        if not self._output:  # empty but there: a handshake that waits to write
            self._finish_close()
            return
        self._closing = True
        if self._write_deadline == inf:  # closed from inside on_write_deadline: the flush must not wait for ever
            self._write_progress()

    def abort(self) -> None:
        """Close at once with a reset and drop what is buffered: the peer cannot take what it got for complete."""
        if not self.closed:
            with contextlib.suppress(OSError):  # not a TCP socket, or already gone
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            self._release()

    def _say_goodbye(self) -> None:
        """What the protocol of the stream sends last; nothing for a plain one."""

    def _finish_close(self) -> None:
        if not self._broken:
            self._say_goodbye()
        self._release()

    def _release(self) -> None:
        if not self.closed:
            self._close_descriptor()
            self._tell_released()

    def _tell_released(self) -> None:
        # The handler refers to the stream: without the way back both are freed now, and with them OpenSSL's state of
        # the connection, instead of at some garbage collection.
        self.handler = NOBODY
        on_release, self.on_release = self.on_release, None
        if on_release is not None:
            on_release()

    def _close_descriptor(self) -> None:
        """The one place where a stream's descriptor is closed."""
        self.closed = True
        # Before the close: an event loop that still knows the number would meet its next user.
        self._loop.remove_reader(self._fd)
        if self._output is not None:
            self._loop.remove_writer(self._fd)
            self._output = None
            self.buffered = 0
        self._write_deadline = self.read_deadline = inf
        self._deadlines.forget(self)
        self._sock.close()


class TlsStream(Stream):
    """The TLS kind, for either side: ``sock`` is a non-blocking ``ssl.SSLSocket`` whose handshake has not begun.

    Making one raises OSError (ENOTCONN) when the peer has gone already; ``sock`` is then still the caller's.

    ``start`` begins the handshake; ``on_open`` tells its end, ``on_lost`` its failure. The handshake's own bound is the
    user's read deadline, and no progress moves it. ``on_shaken`` is called before ``on_open``: what counts handshakes
    hangs on it.
    """

    __slots__ = ("_handshaking", "_sslobj", "_tls", "on_shaken")

    half_closes = False
    """SSL_shutdown drops a record that has come before it, so that what follows would have a hole."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: ssl.SSLSocket,
        deadlines: Deadlines,
        handler: StreamHandler,
        write_timeout_secs: float,
    ) -> None:
        super().__init__(loop, sock, deadlines, handler, write_timeout_secs)
        self._tls = sock
        # What the socket's own methods call: they add two frames to each read and write, and two ioctl(2) to each step
        # of a handshake. It is None when the peer had gone before the socket was wrapped.
        self._sslobj: Any = sock._sslobj  # type: ignore[attr-defined]
        if self._sslobj is None:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        self._handshaking = True
        self.on_shaken: Callable[[], None] | None = None

    @property
    def handshaking(self) -> bool:
        """Whether the handshake has not ended yet."""
        return self._handshaking

    @property
    def tls(self) -> ssl.SSLSocket:
        """The socket, to be asked for what was negotiated."""
        return self._tls

    def start(self) -> None:
        super().start()
        if not self._tls.server_side:
            self._shake_hands()

    def shake_hands(self) -> None:
        """Take the next step now, instead of when the loop tells that there is something to read."""
        if self._handshaking and not self.closed:
            self._shake_hands()

    def _shake_hands(self) -> None:
        try:
            self._sslobj.do_handshake()
        except ssl.SSLWantReadError:
            self._wait_to_write(False)
            return
        except ssl.SSLWantWriteError:
            self._wait_to_write(True)
            return
        except OSError as error:
            self._lose(error)
            return
        self._wait_to_write(False)
        self._handshaking = False
        on_shaken, self.on_shaken = self.on_shaken, None
        if on_shaken is not None:
            on_shaken()
        self.handler.on_open()

    def _wait_to_write(self, wait: bool) -> None:
        # During the handshake there is no output of ours, so the writer's registration means only this.
        if wait and self._output is None:
            self._output = deque()
            self._loop.add_writer(self._fd, self._on_writable)
        elif not wait and self._output is not None:
            self._end_of_output()

    def _on_readable(self) -> None:
        # The plain kind's, with _receive written out: this is every request's way.
        if self._handshaking:
            self._shake_hands()
            return
        READ_GUARD.turn += 1
        READ_GUARD.reading = self
        try:
            data = self._sslobj.read(TLS_RECORD_BYTES)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except ssl.SSLZeroReturnError:
            data = b""
        except ssl.SSLEOFError as error:
            # No close_notify. Many clients leave so; but a body that an upstream ends with the connection must not end
            # by a cut (RFC 9112 section 9.8).
            if not self._tls.server_side:
                self._lose(error)
                return
            data = b""
        except OSError as error:
            self._lose(error)
            return
        finally:
            READ_GUARD.reading = None
        if len(data) == TLS_RECORD_BYTES:
            data = self._receive_more(data)
            self.keep_watching()
        elif self._unwatched:
            self.keep_watching()
        if data:
            self.bytes_read += len(data)
            self.handler.on_data(data)
        else:
            self.pause_reading()
            self.handler.on_eof()

    @property
    def descriptor(self) -> int:
        """The socket's."""
        return self._fd

    def cut(self) -> None:
        """See ``ReadGuard``: the peer is treated as if it had reset the connection."""
        if not self.closed:
            self._lose(ConnectionAbortedError(errno.ECONNABORTED, os.strerror(errno.ECONNABORTED)))

    def _on_writable(self) -> None:
        if self._handshaking:
            self._shake_hands()
            return
        super()._on_writable()

    def _receive_more(self, data: bytes) -> bytes:
        # A full record: an upload. A few more of them make one piece, so that the rest of the way is paid once. The end
        # and errors come again with the next wake-up: the descriptor stays readable.
        pieces = [data]
        READ_GUARD.reading = self
        with contextlib.suppress(OSError):
            while len(pieces) < TLS_READS_A_WAKEUP and len(pieces[-1]) == TLS_RECORD_BYTES:
                pieces.append(self._sslobj.read(TLS_RECORD_BYTES))
        READ_GUARD.reading = None
        return b"".join(pieces)

    def _send(self, data: bytes | memoryview) -> int:
        try:
            return self._sslobj.write(data)  # type: ignore[no-any-return]
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return 0

    def _say_goodbye(self) -> None:
        if self._handshaking:
            return
        with contextlib.suppress(OSError, ValueError):
            self._tls.unwrap()  # sends close_notify; the answer is not waited for (RFC 8446 section 6.1)
