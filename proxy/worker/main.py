"""Wiring of one worker: its loop, its listeners, its sessions, and its orderly end."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import signal
import socket
import ssl
import sys
from collections import deque
from collections.abc import Callable
from time import monotonic

import uvloop

from proxy.net.accept import AcceptLoop
from proxy.net.admission import Permit, Permits
from proxy.observe.accesslog import AccessLog
from proxy.observe.counters import (
    CONNECTIONS_OPEN,
    HEARTBEAT_MS,
    LISTENERS_OPEN,
    LOGS_OPEN,
    LOOP_LAG_MAX_US,
    LOOP_LAG_US,
    PERMITS,
    PID,
    READY,
    REDIRECT_OPEN,
    REQUESTS_ACTIVE,
    TUNNELS_OPEN,
)
from proxy.observe.descriptors import publish_descriptors
from proxy.observe.events import ChannelReporter
from proxy.observe.refusals import RefusalRing
from proxy.observe.tallies import Tallies
from proxy.relay.context import RelayContext
from proxy.route.table import RouteTable
from proxy.session.client import ClientSession
from proxy.session.http1 import Http1Session
from proxy.session.redirect import RedirectSession
from proxy.stream.deadlines import Deadlines
from proxy.stream.stream import Stream, TlsStream
from proxy.upstream.pool import UpstreamGroup, UpstreamPool
from proxy.upstream.resolve import Resolver
from proxy.worker.context import BoundListener, WorkerContext

__all__ = ["BoundListener", "WorkerContext", "run_worker"]

OnListenerAccept = Callable[[BoundListener, bytes, socket.socket, object, Permit], None]

HEARTBEAT_SECS = 0.5
LOG_FLUSH_SECS = 2.0
TUNNEL_CLOSE_SECS = 2.0
"""So long before a drain's timeout tunnels are closed, while there is still time to do it in order."""
LAGS_KEPT = 60
"""Heartbeats over which the largest lag of the event loop is told: half a minute."""


class Worker:
    """One data-plane process."""

    def __init__(self, context: WorkerContext, loop: asyncio.AbstractEventLoop) -> None:
        self._context = context
        self._loop = loop
        self._settings = settings = context.settings
        self._cells = cells = context.cells
        self._reporter = ChannelReporter(f"worker {context.slot}", context.channel, cells)
        self._reporter.attach(loop)
        sys.unraisablehook = self._on_unraisable
        self._access_log = AccessLog(settings.access_log, cells, self._reporter)
        self._access_log.attach(loop)
        self._deadlines = Deadlines(loop)
        self._sessions: set[ClientSession] = set()
        self._done = asyncio.Event()
        self._terminations = 0
        self._tallies = Tallies(cells)
        self._lags_us: deque[int] = deque(maxlen=LAGS_KEPT)
        self._beat_due = monotonic()

        routes = RouteTable(settings)
        self._pool = UpstreamPool(
            loop,
            self._deadlines,
            limit=context.upstream_permits,
            queue_timeout_secs=settings.upstream_queue_timeout_secs,
            idle_timeout_secs=settings.upstream_idle_timeout_secs,
            make_decoder=lambda: self._relay.new_response_decoder(),  # noqa: PLW0108 - made below
            reporter=self._reporter,
            cells=cells,
        )
        groups = {
            route.id: UpstreamGroup(
                route, context.upstream_contexts.get(route.upstream_tls), route.upstream_tls.server_name
            )
            for route in routes.routes
        }
        self._pool.groups = list(groups.values())
        self._relay = RelayContext(
            settings=settings,
            routes=routes,
            groups=groups,
            pool=self._pool,
            deadlines=self._deadlines,
            access_log=self._access_log,
            reporter=self._reporter,
            cells=cells,
            tallies=self._tallies,
            refusals=RefusalRing(cells),
        )
        self._resolver = Resolver(
            loop,
            [backend for group in groups.values() for backend in group.backends],
            interval_secs=settings.resolve_interval_secs,
            reporter=self._reporter,
        )
        permits = Permits(context.permits, cells, CONNECTIONS_OPEN)
        redirect_permits = Permits(context.redirect_permits, cells, REDIRECT_OPEN)
        self._accept_loops = [
            self._accept_loop(listener, permits, self._accept_https) for listener in context.https
        ] + [self._accept_loop(listener, redirect_permits, self._accept_redirect) for listener in context.redirect]

    async def run(self) -> None:
        """Serve until drained."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._terminate)
        self._loop.add_signal_handler(signal.SIGUSR1, self._access_log.reopen)
        self._cells[PID] = os.getpid()
        self._cells[PERMITS] = self._context.permits
        self._beat()
        await self._resolver.start()
        for accept_loop in self._accept_loops:
            accept_loop.start()
        gc.collect()
        gc.freeze()
        self._cells[READY] = 1
        await self._done.wait()
        self._resolver.stop()
        for session in list(self._sessions):
            session.cut("drain")
        self._tallies.publish()
        self._access_log.close(LOG_FLUSH_SECS)
        self._reporter.detach()  # last, so that what the access log could not write is still told
        self._cells[READY] = 0

    def _on_unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        # By default Python writes a traceback to standard error each time, and a client can provoke one at will: a
        # server name that is not ASCII fails to decode before the SNI callback runs.
        self._reporter.report(
            f"python.unraisable.{unraisable.exc_type.__name__}", "an exception had nowhere to go", level="warning"
        )

    # -- accepting ---------------------------------------------------------------------------------------------------

    def _accept_loop(self, listener: BoundListener, permits: Permits, on_accept: OnListenerAccept) -> AcceptLoop:
        if listener.sock.family != socket.AF_UNIX:
            # Accepted sockets inherit it: a system call a connection less.
            listener.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return AcceptLoop(
            self._loop,
            listener.sock,
            label=listener.label,
            permits=permits,
            on_accept=functools.partial(on_accept, listener, str(listener.sock.getsockname()[1]).encode()),
            reporter=self._reporter,
            cells=self._cells,
        )

    def _accept_https(
        self, listener: BoundListener, port: bytes, sock: socket.socket, peer: object, permit: Permit
    ) -> None:
        tls = listener.tls
        assert tls is not None
        try:
            sock = tls_sock = tls.context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            session = Http1Session(
                self._relay,
                functools.partial(self._tls_stream, tls_sock),
                peer=_host_of(peer),
                port=port,
                names_of=tls.certificate_of,
            )
        except OSError:
            # The client has gone between its connect and now; nothing to serve and nothing of ours that failed.
            sock.close()
            permit.release()
            return
        except BaseException:
            sock.close()  # whoever called has only the socket before TLS, which owns no descriptor any more
            raise
        self._register(session, permit)

    def _tls_stream(self, sock: ssl.SSLSocket, session: Http1Session) -> TlsStream:
        return TlsStream(self._loop, sock, self._deadlines, session, self._settings.write_timeout_secs)

    def _accept_redirect(
        self, _listener: BoundListener, port: bytes, sock: socket.socket, peer: object, permit: Permit
    ) -> None:
        session = RedirectSession(
            self._relay,
            lambda session: Stream(self._loop, sock, self._deadlines, session, self._settings.write_timeout_secs),
            peer=_host_of(peer),
            port=port,
            https_port=self._context.https_port,
        )
        self._register(session, permit)

    def _register(self, session: ClientSession, permit: Permit) -> None:
        self._sessions.add(session)
        session.stream.on_release = functools.partial(self._released, session, permit)
        try:
            session.stream.start()
        except BaseException:
            session.stream.abort()
            raise

    def _released(self, session: ClientSession, permit: Permit) -> None:
        permit.release()
        self._sessions.discard(session)
        session.released()
        if self._relay.draining:
            self._go_on_draining()

    # -- the end -----------------------------------------------------------------------------------------------------

    def _terminate(self) -> None:
        self._terminations += 1
        if self._terminations > 1:
            self._done.set()
            return
        self._relay.draining = True
        for accept_loop in self._accept_loops:
            accept_loop.stop()
        # The master closes its own ends: whoever connects from now on is refused, instead of waiting for nobody.
        for listener in (*self._context.https, *self._context.redirect):
            listener.sock.close()
        self._pool.close_idle()
        self._cells[READY] = 0
        for session in list(self._sessions):
            session.drain()
        self._go_on_draining()
        timeout_secs = self._settings.drain_timeout_secs
        self._loop.call_later(max(timeout_secs / 2, timeout_secs - TUNNEL_CLOSE_SECS), self._end_tunnels)
        self._loop.call_later(timeout_secs, self._done.set)

    def _go_on_draining(self) -> None:
        if not self._sessions:
            self._done.set()
        elif len(self._sessions) <= self._cells[TUNNELS_OPEN]:
            # Tunnels never end by themselves, so they do not keep the process; but all else comes first.
            self._end_tunnels()

    def _end_tunnels(self) -> None:
        for session in list(self._sessions):
            session.end_tunnel()

    # -- the heartbeat -----------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        cells = self._cells
        now = monotonic()
        cells[HEARTBEAT_MS] = int(now * 1000)
        self._lags_us.append(max(0, int((now - self._beat_due) * 1_000_000)))
        cells[LOOP_LAG_US], cells[LOOP_LAG_MAX_US] = self._lags_us[-1], max(self._lags_us)
        cells[LISTENERS_OPEN] = len(self._accept_loops)
        cells[LOGS_OPEN] = self._access_log.descriptors
        self._tallies.publish()
        cells[REQUESTS_ACTIVE] = self._relay.requests_active
        self._pool.publish()
        publish_descriptors(cells)
        self._beat_due = monotonic() + HEARTBEAT_SECS
        self._loop.call_later(HEARTBEAT_SECS, self._beat)


def _host_of(peer: object) -> str:
    return str(peer[0]).partition("%")[0] if isinstance(peer, tuple) and peer else "-"


def run_worker(context: WorkerContext) -> int:
    """Serve on the slot's sockets until SIGTERM has been obeyed: nothing new is accepted, what is under way ends within
    ``drain_timeout_secs``; a second SIGTERM ends it at once. Returns the exit code."""

    async def main() -> None:
        await Worker(context, asyncio.get_running_loop()).run()

    uvloop.run(main())
    return 0
