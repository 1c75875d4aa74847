"""One connection to a backend: carries one exchange at a time, or waits in its backend's pool."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from proxy.protocol.http1 import ResponseDecoder
from proxy.stream.stream import Stream

if TYPE_CHECKING:
    from proxy.upstream.backend import Backend
    from proxy.upstream.pool import UpstreamPool


class UpstreamUser(Protocol):
    """The exchange that has the connection now."""

    def on_upstream_data(self, data: bytes) -> None: ...
    def on_upstream_eof(self) -> None: ...
    def on_upstream_lost(self, error: OSError) -> None: ...
    def on_upstream_write_failed(self, error: OSError) -> None: ...
    def on_upstream_drained(self) -> None: ...
    def on_upstream_read_deadline(self) -> None: ...
    def on_upstream_write_deadline(self) -> None: ...


class UpstreamConnection:
    """Owns the stream to a backend from the moment it is connected until it is closed.

    A connection without a user is idle: anything that comes in then (an unsolicited response, the end) closes it.
    """

    __slots__ = ("_peek", "_pool", "backend", "decoder", "stream", "user", "uses")

    def __init__(self, pool: UpstreamPool, backend: Backend, stream: Stream, decoder: ResponseDecoder) -> None:
        self._pool = pool
        self.backend = backend
        self.stream = stream
        self.decoder = decoder
        self.user: UpstreamUser | None = None
        self.uses = 0
        self._peek: Callable[[int], list[tuple[int, int]]] | None = None
        stream.handler = self
        stream.on_release = pool.closed

    def release(self, reusable: bool) -> None:
        """The exchange is done with it: ``reusable`` only if request and response both ended cleanly."""
        self.user = None
        self.backend.active -= 1
        if reusable and not self.stream.closed:
            self._pool.check_in(self)
        else:
            self._discard()

    def _discard(self) -> None:
        # The pool's count hangs on the stream's on_release. What is left of a request that nobody waits for is dropped:
        # a backend that does not read it must not keep the descriptor.
        if self.stream.buffered and not self.stream.closing:
            self.stream.abort()
        else:
            self.stream.close()

    def _end_idle(self) -> None:
        self.backend.idle.remove(self)
        self._discard()

    # -- StreamHandler -----------------------------------------------------------------------------------------------

    def on_open(self) -> None: ...

    def on_data(self, data: bytes) -> None:
        user = self.user
        if user is not None:
            user.on_upstream_data(data)
        else:
            self._end_idle()

    def on_eof(self) -> None:
        if self.user is not None:
            self.user.on_upstream_eof()
        else:
            self._end_idle()

    def on_lost(self, error: OSError) -> None:
        if self.user is not None:
            self.user.on_upstream_lost(error)
        else:
            self._end_idle()

    def on_write_failed(self, error: OSError) -> None:
        if self.user is not None:
            self.user.on_upstream_write_failed(error)
        else:
            self._end_idle()

    def on_drained(self) -> None:
        if self.user is not None:
            self.user.on_upstream_drained()

    def on_read_deadline(self) -> None:
        if self.user is not None:
            self.user.on_upstream_read_deadline()
        else:
            self._end_idle()

    def on_write_deadline(self) -> None:
        if self.user is not None:
            self.user.on_upstream_write_deadline()

    # -- the pool's --------------------------------------------------------------------------------------------------

    def take(self, user: UpstreamUser) -> bool:
        """Take an idle connection into use; False when it was found dead or has something to read: then it is closed.

        The look costs one system call. It is what keeps a response that nobody asked for, already in the socket but not
        yet reported by the event loop, from being taken for the answer to ``user``'s request.
        """
        if self._peek is None:
            self._peek = self.stream.make_peek()
        if self.stream.closed or self._peek(0):
            self._discard()
            return False
        self.stream.read_deadline = inf
        self.user = user
        self.uses += 1
        self.backend.active += 1
        return True

    def rest(self, idle_secs: float) -> None:
        """Wait in the pool for at most ``idle_secs``."""
        self.stream.resume_reading()
        self.stream.expect(monotonic() + idle_secs)
