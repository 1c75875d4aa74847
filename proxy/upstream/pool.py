"""Connections to backends: one count for all of them, a pool a backend, balancing, and a queue in front.

``UpstreamPool`` is a worker's whole upstream side; an ``UpstreamGroup`` is the backends of one route.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections.abc import Callable, Sequence
from math import inf
from time import monotonic
from typing import Protocol

from proxy.config.upstream_address import parse_upstream
from proxy.observe.counters import (
    UPSTREAM_CONNECT_FAILURES,
    UPSTREAM_CONNECTS,
    UPSTREAM_EJECTED,
    UPSTREAM_IDLE,
    UPSTREAM_OPEN,
    UPSTREAM_QUEUE_FULL,
    UPSTREAM_QUEUE_TIMEOUTS,
    UPSTREAM_QUEUED,
    UPSTREAM_REUSED,
)
from proxy.observe.events import Reporter
from proxy.observe.rows import BACKEND_EJECTED, BACKEND_FAILURES, BACKEND_IDLE, BACKEND_OPEN, Rows
from proxy.protocol.http1 import ResponseDecoder
from proxy.protocol.http2 import ClientConnection
from proxy.stream.connect import Connector, ConnectTimeoutError
from proxy.stream.deadlines import Deadlines
from proxy.stream.stream import Stream
from proxy.upstream.backend import Backend
from proxy.upstream.connection import UpstreamConnection, UpstreamFailure, UpstreamLink, UpstreamUser
from proxy.upstream.http2 import Http2Request, Http2Upstream, speaks_http2
from proxy.upstream.queue import FairQueue

OUT_OF_RESOURCES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL))
"""A connect that fails with one of these says nothing about the backend: it is ours, and it is 503."""

RETRY_AFTER_SECS = 1


class Acquirer(UpstreamUser, Protocol):
    """Who asks for a connection; exactly one of the two is called later when ``acquire`` returned a ``Pending``."""

    @property
    def client_address(self) -> bytes:
        """Who takes turns in the queue."""

    def on_upstream_ready(self, connection: UpstreamLink) -> None: ...
    def on_upstream_failed(self, failure: UpstreamFailure) -> None: ...


class RouteOptions(Protocol):
    """What a group needs of a route."""

    @property
    def upstreams(self) -> tuple[str, ...]: ...
    @property
    def upstream_protocol(self) -> str: ...
    @property
    def balance(self) -> str: ...
    @property
    def max_fails(self) -> int: ...
    @property
    def fail_timeout_secs(self) -> float: ...
    @property
    def upstream_connect_timeout_secs(self) -> float: ...
    @property
    def write_timeout_secs(self) -> float: ...


class UpstreamGroup:
    """The backends of one route and how one of them is chosen.

    ``limit``: requests at the same time, as this worker's share (None: any number); ``max_queued`` more may wait.
    """

    __slots__ = (
        "_least",
        "_next",
        "backends",
        "connect_timeout_secs",
        "http2",
        "in_use",
        "limit",
        "max_queued",
        "serving",
        "waiting",
        "write_timeout_secs",
    )

    def __init__(self, options: RouteOptions, tls: ssl.SSLContext | None, server_name: str | None) -> None:
        self.backends = tuple(
            Backend(
                parse_upstream(upstream),
                max_fails=options.max_fails,
                fail_timeout_secs=options.fail_timeout_secs,
                tls=tls,
                server_name=server_name,
            )
            for upstream in options.upstreams
        )
        self.http2 = options.upstream_protocol == "h2"
        self.connect_timeout_secs = options.upstream_connect_timeout_secs
        self.write_timeout_secs = options.write_timeout_secs
        self._least = options.balance == "least_connections"
        self._next = 0
        self.limit: int | None = None
        self.max_queued = 0
        self.in_use = 0
        """Requests that have a connection, or are getting one."""
        self.waiting: FairQueue[Pending] = FairQueue()
        """Those over ``limit``."""
        self.serving = False
        for backend in self.backends:
            backend.group = self

    def choose(self, tried: Sequence[Backend]) -> Backend | None:
        """The backend whose turn it is, without those in ``tried`` and those ejected; None when none is left.

        A lone backend is never ejected, as in nginx: there is nothing to send the request to instead.
        """
        backends = self.backends
        count = len(backends)
        if count == 1:
            return backends[0] if not tried else None
        now = monotonic()
        best: Backend | None = None
        best_at = 0
        for step in range(count):
            at = (self._next + step) % count
            backend = backends[at]
            if backend.ejected_until > now or backend in tried:
                continue
            if best is None or (self._least and backend.active < best.active):
                best, best_at = backend, at
            if not self._least:
                break
        if best is not None:
            self._next = (best_at + 1) % count
        return best

    def retire(self) -> None:
        """No new exchange comes here: close what idles, and what is given back later."""
        for backend in self.backends:
            backend.retired = True
            while backend.idle:
                backend.idle.pop().stream.close()
            for session in list(backend.sessions):
                session.retire()


class Pending:
    """A request for a connection that could not be met at once: it is connecting, or it waits in the queue.

    Towards a backend of HTTP/2 one connects (``Backend.leader``), and the others wait for that connection.
    """

    __slots__ = (
        "_attempts",
        "_connector",
        "_deadline",
        "_pool",
        "backend",
        "client",
        "due",
        "following",
        "group",
        "has_place",
        "tried",
        "until",
        "user",
    )

    def __init__(self, pool: UpstreamPool, group: UpstreamGroup, user: Acquirer) -> None:
        self._pool = pool
        self.group = group
        self.user: Acquirer | None = user
        self.has_place = True
        """Whether it counts in ``group.in_use``; else it waits for that."""
        self.until = inf
        """When it has waited long enough, in whatever queue."""
        self.following = False
        """Whether it is one of its backend's ``followers``."""
        self.client = b""
        self.tried: list[Backend] = []
        self.backend: Backend | None = None
        self.due = inf
        self._deadline = inf
        self._connector: Connector | None = None
        self._attempts = 0

    def cancel(self) -> None:
        """The user needs it no more (idempotent)."""
        if self.user is None:
            return
        self.user = None
        if self._connector is not None:
            self._connector.cancel()
            self._connector = None
            followers = self._step_down()
            self._pool.closed()
            self._pool.regroup(followers)
        elif self.following:
            assert self.backend is not None
            self.following = False
            del self.backend.followers[self]
        else:
            self._pool.leave_queue(self)
        if self.has_place:
            self._pool.left(self.group)

    # -- in the queue ------------------------------------------------------------------------------------------------

    def wait(self, deadlines: Deadlines) -> None:
        """Stand in a queue for what is left of its time."""
        self._deadline = self.until
        deadlines.watch(self, self.until)

    def leave(self, deadlines: Deadlines) -> None:
        """No longer in the queue."""
        self._deadline = inf
        deadlines.forget(self)

    def next_deadline(self) -> float:
        """See ``Deadlined``."""
        return self._deadline

    def on_deadline(self, now: float) -> None:
        """See ``Deadlined``."""
        self._pool.waited_too_long(self)

    # -- connecting --------------------------------------------------------------------------------------------------

    def connect(self, backend: Backend) -> bool:
        """Begin to connect (the pool has counted the connection); False when no backend that is left has an address."""
        endpoint = backend.next_endpoint()
        while endpoint is None:
            self._pool.backend_failed(backend, "upstream-unresolved")
            self.tried.append(backend)
            another = self.group.choose(self.tried)
            if another is None:
                return False
            backend = another
            endpoint = backend.next_endpoint()
        self.backend = backend
        if self.group.http2 and backend.leader is None:
            backend.leader = self
        self._attempts += 1
        self._pool.connecting()
        self._connector = Connector(
            self._pool.loop,
            self._pool.deadlines,
            endpoint,
            timeout_secs=self.group.connect_timeout_secs,
            write_timeout_secs=self.group.write_timeout_secs,
            on_connected=self._on_connected,
            on_failed=self._on_failed,
        )
        self._connector.start()
        return True

    def _on_connected(self, stream: Stream) -> None:
        self._connector = None
        user, backend = self.user, self.backend
        assert user is not None
        assert backend is not None
        if self.group.http2 and not speaks_http2(stream):
            stream.abort()
            self._on_failed(OSError(errno.EPROTO, "it does not offer h2 by ALPN, which upstream_protocol asks for"))
            return
        self.user = None
        if self.group.http2:
            session = self._pool.adopt_session(backend, stream)
            if backend.leader is self:
                backend.leader = session
            user.on_upstream_ready(session.take(user))
            if backend.retired:
                session.retire()
            return
        connection = self._pool.adopt(backend, stream)
        connection.user = user
        connection.uses = 1
        backend.active += 1
        user.on_upstream_ready(connection)

    def _on_failed(self, error: OSError) -> None:
        self._connector = None
        user, backend = self.user, self.backend
        assert user is not None
        assert backend is not None
        failure = self._pool.connect_failed(backend, error)
        if failure.status != 503:
            # Nothing of the request has been sent, so whatever its method is, another address may be tried: the
            # others of the same name first, then the other backends.
            if self._attempts < len(backend.endpoints) and self.connect(backend):
                return
            self._pool.backend_failed(backend, failure.reason)
            self._attempts = 0
            if self.group.http2:
                # Elsewhere there may be a connection already, for it and for those that have waited with it.
                followers = self._step_down()
                self._pool.closed()
                self._pool.regroup((self, *followers), backend, failure)
                return
            self.tried.append(backend)
            another = self.group.choose(self.tried)
            if another is not None and self.connect(another):
                return
        followers = self._step_down()
        self.user = None
        self._pool.closed()
        user.on_upstream_failed(failure)
        self._pool.left(self.group)
        self._pool.regroup(followers, backend, failure)

    # -- of HTTP/2 ---------------------------------------------------------------------------------------------------

    def follow(self, backend: Backend) -> None:
        """Wait for the connection that another one makes."""
        self.backend = backend
        self.following = True
        backend.followers[self] = None

    def _step_down(self) -> list[Pending]:
        return [] if self.backend is None else self.backend.step_down(self)


class UpstreamPool:
    """All connections of a worker to all backends: at most ``limit`` are open, connecting ones included."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        deadlines: Deadlines,
        *,
        limit: int,
        max_queued: int,
        queue_timeout_secs: float,
        idle_timeout_secs: float,
        make_decoder: Callable[[], ResponseDecoder],
        make_codec: Callable[[], ClientConnection],
        reporter: Reporter,
        cells: memoryview,
    ) -> None:
        self.loop = loop
        self.deadlines = deadlines
        self.limit = limit
        self.max_queued = max_queued
        self.waiting = 0
        """Requests in any queue."""
        self.open = 0
        self.reused = 0
        self.groups: list[UpstreamGroup] = []
        self._queue_timeout_secs = queue_timeout_secs
        self._idle_timeout_secs = idle_timeout_secs
        self._make_decoder = make_decoder
        self._make_codec = make_codec
        self._reporter = reporter
        self._cells = cells
        self._rows = Rows(cells)
        self._published: set[int] = set()
        self._queue: FairQueue[Pending] = FairQueue()
        self._serving_queue = False

    def acquire(self, group: UpstreamGroup, user: Acquirer) -> UpstreamLink | Pending | UpstreamFailure:
        """A pooled connection at once; else a ``Pending`` that will call ``user``; else why there is none.

        Where backends stand in ``group`` several times or are ejected is the group's business. Raises nothing.
        """
        if group.limit is not None and (group.in_use >= group.limit or group.waiting):
            return self._wait_for_place(group, user)
        group.in_use += 1
        got = self._acquire(group, user, None)
        if type(got) is UpstreamFailure:
            self.left(group)
        return got

    def _acquire(
        self, group: UpstreamGroup, user: Acquirer, waited: Pending | None
    ) -> UpstreamLink | Pending | UpstreamFailure:
        """For a request that has its place in ``group``; ``waited``: what it waited for that with."""
        backend = group.choose(())
        if backend is None:
            return UpstreamFailure(503, "upstreams-ejected")
        if group.http2:
            return self._acquire_stream(group, user, waited, backend)
        if not self._queue:
            while backend.idle:
                connection = backend.idle.pop()
                if connection.take(user):
                    self.reused += 1
                    return connection
            pending = waited or Pending(self, group, user)
            if self._make_room():
                return self._connect(pending, backend) or pending
        else:
            pending = waited or Pending(self, group, user)
        return self._enqueue(pending, self._queue)

    def _acquire_stream(
        self, group: UpstreamGroup, user: Acquirer, waited: Pending | None, backend: Backend
    ) -> Http2Request | Pending | UpstreamFailure:
        """A stream of a connection that is there, or is being made; else of a new one."""
        session = backend.free_session()
        if session is not None:
            self.reused += 1
            return session.take(user)
        pending = waited or Pending(self, group, user)
        if backend.leader is not None:
            pending.follow(backend)
            return pending
        if not self._queue and self._make_room():
            return self._connect(pending, backend) or pending
        return self._enqueue(pending, self._queue)

    def regroup(
        self, pendings: Sequence[Pending], failed: Backend | None = None, failure: UpstreamFailure | None = None
    ) -> None:
        """Those that waited for a connection of HTTP/2: there is one now, or ``failed`` cannot be reached."""
        for pending in pendings:
            user, group = pending.user, pending.group
            if user is None:
                continue
            if failed is not None:
                pending.tried.append(failed)
            backend = group.choose(pending.tried)
            if backend is not None:
                self._hand_over(pending, user, self._acquire_stream(group, user, pending, backend))
            else:
                self._hand_over(pending, user, failure or UpstreamFailure(503, "upstreams-ejected"))

    def _hand_over(self, pending: Pending, user: Acquirer, got: UpstreamLink | Pending | UpstreamFailure) -> None:
        if got is pending:
            return
        pending.user = None
        if type(got) is UpstreamFailure:
            user.on_upstream_failed(got)
            self.left(pending.group)
        else:
            user.on_upstream_ready(got)  # type: ignore[arg-type]

    def _wait_for_place(self, group: UpstreamGroup, user: Acquirer) -> Pending | UpstreamFailure:
        if len(group.waiting) >= group.max_queued:
            return self._queue_is_full(group.limit, len(group.waiting))
        pending = Pending(self, group, user)
        pending.has_place = False
        return self._enqueue(pending, group.waiting)

    def _enqueue(self, pending: Pending, queue: FairQueue[Pending]) -> Pending | UpstreamFailure:
        if self.waiting >= self.max_queued:
            return self._queue_is_full(self.limit, self.waiting)
        assert pending.user is not None
        pending.client = pending.user.client_address
        queue.append(pending.client, pending)
        self._count_waiting(+1)
        pending.until = min(pending.until, monotonic() + self._queue_timeout_secs)
        pending.wait(self.deadlines)
        return pending

    def _queue_is_full(self, limit: int | None, queued: int) -> UpstreamFailure:
        self._cells[UPSTREAM_QUEUE_FULL] += 1
        self._reporter.report(
            "upstream.queue_full",
            "a request found no upstream connection and no place to wait for one",
            level="warning",
            limit=limit or 0,
            queued=queued,
        )
        return UpstreamFailure(503, "upstream-queue-full")

    def left(self, group: UpstreamGroup) -> None:
        """A request has left ``group``: the next one that waits for its place has it."""
        group.in_use -= 1
        if not group.waiting or group.serving:
            return
        group.serving = True  # whoever is served may fail at once and leave again, from inside this very loop
        try:
            while group.waiting and (group.limit is None or group.in_use < group.limit):
                pending = group.waiting.first()
                user = pending.user
                assert user is not None
                self.leave_queue(pending)
                pending.has_place = True
                group.in_use += 1
                got = self._acquire(group, user, pending)
                self._hand_over(pending, user, got)
        finally:
            group.serving = False

    def _count_waiting(self, change: int) -> None:
        self.waiting += change
        self._cells[UPSTREAM_QUEUED] = self.waiting

    def _connect(self, pending: Pending, backend: Backend) -> UpstreamFailure | None:
        self._count(+1)
        if pending.connect(backend):
            return None
        self._count(-1)
        return UpstreamFailure(502, "upstream-unresolved")

    def _make_room(self) -> bool:
        """Whether one more connection may be opened; an idle one of another backend gives way."""
        if self.open < self.limit:
            return True
        for group in self.groups:
            for backend in group.backends:
                if backend.idle:
                    backend.idle.pop(0).stream.close()  # the longest idle one
                    return True
                for session in backend.sessions:
                    if session.idle:
                        session.retire()
                        return True
        return False

    def _count(self, change: int) -> None:
        self.open += change
        self._cells[UPSTREAM_OPEN] = self.open

    # -- told by connections and pending requests ------------------------------------------------------------------

    def adopt(self, backend: Backend, stream: Stream) -> UpstreamConnection:
        """Make a connection of a stream that has just been connected."""
        return UpstreamConnection(self, backend, stream, self._make_decoder())

    def adopt_session(self, backend: Backend, stream: Stream) -> Http2Upstream:
        """The same for HTTP/2."""
        assert backend.group is not None
        return Http2Upstream(
            self,
            backend,
            stream,
            self._make_codec(),
            idle_secs=self._idle_timeout_secs,
            settings_timeout_secs=backend.group.connect_timeout_secs,
        )

    def stream_freed(self) -> None:
        """A connection of HTTP/2 may take one more request."""
        if self._queue:
            self._serve_queue()

    def check_in(self, connection: UpstreamConnection) -> None:
        """Put a clean connection back."""
        if connection.backend.retired:
            connection.stream.close()
            return
        connection.rest(self._idle_timeout_secs)
        connection.backend.idle.append(connection)
        if self._queue:
            self._serve_queue()

    def closed(self) -> None:
        """A connection that was counted is no more."""
        self._count(-1)
        if self._queue:
            self._serve_queue()

    def connecting(self) -> None:
        """One more connect is tried."""
        self._cells[UPSTREAM_CONNECTS] += 1

    def connect_failed(self, backend: Backend, error: OSError) -> UpstreamFailure:
        """Count and report; what the client is to be told."""
        self._cells[UPSTREAM_CONNECT_FAILURES] += 1
        if error.errno in OUT_OF_RESOURCES:
            name = errno.errorcode.get(error.errno, "unknown")
            self._reporter.report(
                f"upstream.{name.lower()}",
                "no descriptor or port left for a connection to an upstream",
                upstream=backend.label,
                error=str(error),
            )
            return UpstreamFailure(503, "out-of-descriptors")
        self._reporter.report(
            f"upstream.connect_failed:{backend.label}",
            "cannot connect to an upstream",
            upstream=backend.label,
            error=str(error),
        )
        if isinstance(error, ConnectTimeoutError):
            return UpstreamFailure(504, "upstream-connect-timeout")
        return UpstreamFailure(502, "upstream-unreachable")

    def backend_failed(self, backend: Backend, reason: str) -> None:
        """Count a failure of a backend; a word in the log when it is ejected for it."""
        self._cells[self._cells_at(backend) + BACKEND_FAILURES] += 1
        ejectable = any(len(group.backends) > 1 and backend in group.backends for group in self.groups)
        if backend.failed(monotonic()) and ejectable:
            self._cells[UPSTREAM_EJECTED] += 1
            self._reporter.report(
                f"upstream.ejected:{backend.label}",
                "an upstream failed repeatedly and is left out for a while",
                level="warning",
                upstream=backend.label,
                reason=reason,
                ejected_secs=backend.fail_timeout_secs,
            )

    def leave_queue(self, pending: Pending) -> None:
        """Its user has gone, or its turn has come."""
        pending.leave(self.deadlines)
        (self._queue if pending.has_place else pending.group.waiting).remove(pending.client, pending)
        self._count_waiting(-1)

    def waited_too_long(self, pending: Pending) -> None:
        """It stood in the queue for its whole time."""
        user = pending.user
        if user is None:
            return
        pending.cancel()
        self._cells[UPSTREAM_QUEUE_TIMEOUTS] += 1
        self._reporter.report(
            "upstream.queue_timeout",
            "a request got no upstream connection in time",
            level="warning",
            max_upstream_connections=self.limit,
            queued=self.waiting,
        )
        user.on_upstream_failed(UpstreamFailure(503, "upstream-queue-timeout"))

    def _serve_queue(self) -> None:
        """Client by client in turns (``FairQueue``), as long as there is a connection or room for one."""
        if self._serving_queue:
            return  # whoever is served may fail at once and give its connection back, from inside this very loop
        self._serving_queue = True
        try:
            while self._queue:
                pending = self._queue.first()
                user, group = pending.user, pending.group
                assert user is not None
                backend = group.choose(())
                if backend is None:
                    self.leave_queue(pending)
                    pending.user = None
                    user.on_upstream_failed(UpstreamFailure(503, "upstreams-ejected"))
                    self.left(group)
                    continue
                if group.http2 and (backend.leader is not None or backend.free_session() is not None):
                    self.leave_queue(pending)
                    self._hand_over(pending, user, self._acquire_stream(group, user, pending, backend))
                    continue
                served = False
                while backend.idle and not served:
                    connection = backend.idle.pop()
                    if connection.take(user):
                        self.leave_queue(pending)
                        pending.user = None
                        self.reused += 1
                        user.on_upstream_ready(connection)
                        served = True
                if served:
                    continue
                if not self._make_room():
                    return
                self.leave_queue(pending)
                failure = self._connect(pending, backend)
                if failure is not None:
                    pending.user = None
                    user.on_upstream_failed(failure)
                    self.left(group)
        finally:
            self._serving_queue = False

    def publish(self) -> None:
        """Bring the counters up to date that are too dear to keep for each request."""
        self._cells[UPSTREAM_IDLE] = sum(backend.count_idle() for group in self.groups for backend in group.backends)
        self._cells[UPSTREAM_REUSED] += self.reused
        self.reused = 0
        self._publish_backends()

    def _publish_backends(self) -> None:
        """Several routes may have the same backend: its row holds their sum."""
        now = monotonic()
        gauges: dict[int, list[int]] = {at: [0, 0, 0] for at in self._published}
        for group in self.groups:
            for backend in group.backends:
                sums = gauges.setdefault(self._cells_at(backend), [0, 0, 0])
                sums[BACKEND_OPEN] += backend.count_open()
                sums[BACKEND_IDLE] += backend.count_idle()
                sums[BACKEND_EJECTED] += len(group.backends) > 1 and backend.ejected_until > now
        for at, values in gauges.items():
            for gauge, value in enumerate(values):
                self._cells[at + gauge] = value
        self._published = set(gauges)

    def _cells_at(self, backend: Backend) -> int:
        if not backend.cells_at:
            backend.cells_at = self._rows.backend_at(backend.label)
        return backend.cells_at

    def configure(
        self,
        groups: Sequence[UpstreamGroup],
        *,
        limit: int,
        max_queued: int,
        queue_timeout_secs: float,
        idle_timeout_secs: float,
    ) -> None:
        """Take over the values of a new generation. A lower limit closes nothing."""
        self.groups = list(groups)
        self.limit = limit
        self.max_queued = max_queued
        self._queue_timeout_secs = queue_timeout_secs
        self._idle_timeout_secs = idle_timeout_secs
        if self._queue:
            self._serve_queue()

    def close_idle(self) -> None:
        """Close every idle connection (a drain)."""
        for group in self.groups:
            for backend in group.backends:
                while backend.idle:
                    backend.idle.pop().stream.close()
                for session in list(backend.sessions):
                    if session.idle:
                        session.retire()
