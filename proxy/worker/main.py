"""Wiring of one worker: its loop, its listeners, its sessions, and its orderly end."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import select
import signal
import socket
import ssl
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

import uvloop

from proxy.budget import shares
from proxy.config.schema import Settings
from proxy.net.accept import AcceptLoop
from proxy.net.admission import Permit, Permits
from proxy.net.client_admission import ClientAdmission, Entry
from proxy.net.clients import ClientCounts, Prefixes
from proxy.observe.counters import (
    CONNECTIONS_DENIED,
    CONNECTIONS_OPEN,
    GENERATIONS,
    HANDSHAKES_OPEN,
    HEARTBEAT_MS,
    HTTP2_OPEN,
    HTTP2_STREAMS_OPEN,
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
from proxy.observe.descriptors import publish_descriptors, publish_memory
from proxy.observe.events import ChannelReporter
from proxy.observe.refusals import RefusalRing
from proxy.observe.tallies import Tallies
from proxy.session.client import ClientSession
from proxy.session.http1 import Http1Session
from proxy.session.http2 import Http2Session
from proxy.session.redirect import RedirectSession
from proxy.stream.deadlines import Deadlines
from proxy.stream.read_guard import READ_GUARD
from proxy.stream.stream import Stream, TlsStream
from proxy.upstream.pool import UpstreamPool
from proxy.worker.blackbox import BlackBox
from proxy.worker.context import BoundListener, WorkerContext
from proxy.worker.generation import Generation, OpenLogs, Workshop
from proxy.worker.takeover import Prepared, Takeover, bound_listeners

__all__ = ["BoundListener", "WorkerContext", "run_worker"]


HEARTBEAT_SECS = 0.5
LOG_FLUSH_SECS = 2.0
TUNNEL_CLOSE_SECS = 2.0
"""So long before a drain's timeout tunnels are closed, while there is still time to do it in order."""
LAGS_KEPT = 60
"""Heartbeats over which the largest lag of the event loop is told: half a minute."""


@dataclass(frozen=True, slots=True)
class Front:
    """A listener in service."""

    listener: BoundListener
    accepting: AcceptLoop


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
        self._deadlines = Deadlines(loop)
        self._sessions: dict[ClientSession, Entry] = {}
        self._done = asyncio.Event()
        self._terminations = 0
        self._reads_ended = 0
        self._retiring = False
        self._tallies = Tallies(cells)
        self._buckets = context.buckets
        self._lags_us: deque[int] = deque(maxlen=LAGS_KEPT)
        self._beat_due = monotonic()
        self._pool = UpstreamPool(
            loop,
            self._deadlines,
            limit=context.upstream_permits,
            max_queued=shares(settings.max_queued_requests, context.workers)[context.slot],
            queue_timeout_secs=settings.upstream_queue_timeout_secs,
            idle_timeout_secs=settings.upstream_idle_timeout_secs,
            make_decoder=lambda: self._relay.new_response_decoder(),  # noqa: PLW0108 - made below
            make_codec=lambda: self._relay.new_upstream_codec(),  # noqa: PLW0108
            reporter=self._reporter,
            cells=cells,
        )
        workshop = Workshop(
            loop,
            self._deadlines,
            self._pool,
            self._reporter,
            cells,
            self._tallies,
            RefusalRing(cells),
            context.buckets,
            OpenLogs(loop, cells, self._reporter),
            context.slot,
            context.workers,
        )
        self._generation = Generation(workshop, settings, context.upstream_trust, None)
        self._relay = self._generation.relay
        self._relays = workshop.alive
        self._logs = workshop.logs
        self._pool.groups = self._generation.groups
        self._https_port = context.https_port
        self._permits = Permits(context.permits, cells, CONNECTIONS_OPEN)
        self._handshakes = Permits(context.handshake_permits, cells, HANDSHAKES_OPEN)
        self._redirect_permits = Permits(context.redirect_permits, cells, REDIRECT_OPEN)
        counts = ClientCounts(context.clients, context.slot, cells)
        admission = functools.partial(
            ClientAdmission,
            loop,
            counts=counts,
            prefixes=_prefixes(settings),
            grace_secs=settings.eviction_grace_secs,
            cells=cells,
            reporter=self._reporter,
            refusals=workshop.refusals,
        )
        self._admission = admission(self._permits, handshakes=self._handshakes, cap=context.client_cap)
        # Not by client: a redirect is answered and closed at once, and the next browser may come from the same network.
        self._redirect_admission = admission(self._redirect_permits, handshakes=None, cap=None)
        self._fronts = {one.label: self._front(one) for one in (*context.https, *context.redirect)}
        self._black_box: BlackBox | None = None
        if context.black_box is not None:
            self._black_box = BlackBox(
                context.slot,
                context.black_box,
                cells,
                sessions=lambda: self._sessions,
                settings=lambda: self._generation.settings,
            )
            self._reporter.on_report = self._black_box.on_report
        self._takeover = Takeover(
            workshop, context.orders, current=lambda: self._generation, commit=self._switch, retire=self._retire
        )

    async def run(self) -> None:
        """Serve until drained."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._terminate)
        self._loop.add_signal_handler(signal.SIGUSR1, self._reopen_logs)
        self._cells[PID] = os.getpid()
        self._cells[PERMITS] = self._context.permits
        self._beat()
        await self._generation.prepare()
        for front in self._fronts.values():
            front.accepting.start()
        self._takeover.start()
        READ_GUARD.start(self._loop)
        gc.collect()
        gc.freeze()
        publish_memory(self._cells, is_base=True)
        self._cells[READY] = 1
        await self._done.wait()
        self._generation.resolver.stop()
        if self._sessions:
            self._reporter.report(
                "drain.cut",
                "connections were cut at the end of the drain",
                level="warning",
                connections=len(self._sessions),
                requests=sum(relay.requests_active for relay in self._relays),
                tunnels=self._cells[TUNNELS_OPEN],
            )
        for session in list(self._sessions):
            session.cut("drain")
        self._tallies.publish()
        self._logs.close(LOG_FLUSH_SECS)
        READ_GUARD.stop()
        self._reporter.detach()  # last, so that what the access log could not write is still told
        self._cells[READY] = 0

    def _reopen_logs(self) -> None:
        self._logs.reopen()

    def _on_unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        # By default Python writes a traceback to standard error each time, and a client can provoke one at will: a
        # server name that is not ASCII fails to decode before the SNI callback runs.
        self._reporter.report(
            f"python.unraisable.{unraisable.exc_type.__name__}", "an exception had nowhere to go", level="warning"
        )

    # -- accepting ---------------------------------------------------------------------------------------------------

    def _front(self, listener: BoundListener) -> Front:
        if listener.sock.family != socket.AF_UNIX:
            # Accepted sockets inherit it: a system call a connection less.
            listener.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        admission, on_accept = (
            (self._redirect_admission, self._accept_redirect)
            if listener.tls is None
            else (self._admission, self._accept_https)
        )
        accepting = AcceptLoop(
            self._loop,
            listener.sock,
            label=listener.label,
            permits=admission,
            on_accept=functools.partial(on_accept, listener, str(listener.sock.getsockname()[1]).encode()),
            reporter=self._reporter,
            cells=self._cells,
        )
        return Front(listener, accepting)

    def _accept_https(
        self, listener: BoundListener, port: bytes, sock: socket.socket, peer: object, permit: Permit
    ) -> None:
        tls = listener.tls
        assert tls is not None
        if self._relay.access is not None and self._turn_away(sock, peer, permit):
            return
        try:
            sock = tls_sock = tls.wrap(sock)
            session = Http1Session(
                self._relay,
                functools.partial(self._tls_stream, tls_sock),
                peer=_host_of(peer),
                port=port,
                names_of=tls.certificate_of,
                succeed=self._succeed,
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

    def _turn_away(self, sock: socket.socket, peer: object, permit: Permit) -> bool:
        """Close what ``deny`` names, before a word is said."""
        assert self._relay.access is not None
        address = _host_of(peer).encode("ascii", "replace")
        if not self._relay.access.denies(address):
            return False
        sock.close()
        permit.release()
        self._cells[CONNECTIONS_DENIED] += 1
        self._relay.refusals.note(address, "denied")
        return True

    def _tls_stream(self, sock: ssl.SSLSocket, session: Http1Session) -> TlsStream:
        settings = self._generation.settings
        stream = TlsStream(self._loop, sock, self._deadlines, session, settings.write_timeout_secs)
        stream.min_write_rate = settings.min_response_bytes_per_sec
        stream.rate_grace_secs = settings.min_rate_grace_secs
        return stream

    def _accept_redirect(
        self, _listener: BoundListener, port: bytes, sock: socket.socket, peer: object, permit: Permit
    ) -> None:
        if self._relay.access is not None and self._turn_away(sock, peer, permit):
            return
        write_timeout_secs = self._generation.settings.write_timeout_secs
        session = RedirectSession(
            self._relay,
            lambda session: Stream(self._loop, sock, self._deadlines, session, write_timeout_secs),
            peer=_host_of(peer),
            port=port,
            https_port=self._https_port,
        )
        self._register(session, permit)

    def _register(self, session: ClientSession, permit: Permit) -> None:
        assert isinstance(permit, Entry)
        stream = session.stream
        self._sessions[session] = permit
        stream.on_release = functools.partial(self._released, session, permit)
        if isinstance(stream, TlsStream):
            stream.on_shaken = permit.handshake_ended
        try:
            stream.start()
            if permit.evicts and isinstance(stream, TlsStream):
                # Who waited in the queue had the time to send what is read here; who has not, has owed it since.
                stream.shake_hands()
        except BaseException:
            stream.abort()
            raise
        if not stream.closed and session in self._sessions:
            permit.seat(session, owing_secs=stream.owing_secs() if permit.evicts else 0.0)

    def _succeed(self, session: ClientSession, successor: ClientSession) -> None:
        """Another protocol has been agreed on: its session takes the place of the one that shook hands."""
        successor.opened_at = session.opened_at
        permit = self._sessions.pop(session)
        self._sessions[successor] = permit
        successor.stream.on_release = functools.partial(self._released, successor, permit)
        permit.seat(successor)

    def _released(self, session: ClientSession, permit: Permit) -> None:
        permit.release()
        del self._sessions[session]
        session.released()
        if self._relay.draining:
            self._go_on_draining()

    # -- the next generation -----------------------------------------------------------------------------------------

    def _switch(self, prepared: Prepared) -> None:
        """New connections belong to the prepared generation from here on; those there are stay with theirs."""
        order, old = prepared.order, self._generation
        self._generation = prepared.generation
        self._relay = prepared.generation.relay
        self._relay.draining = self._terminations > 0
        self._https_port = order.https_port
        settings = order.settings
        self._pool.configure(
            prepared.generation.groups,
            limit=order.upstream_permits,
            max_queued=shares(settings.max_queued_requests, self._context.workers)[self._context.slot],
            queue_timeout_secs=settings.upstream_queue_timeout_secs,
            idle_timeout_secs=settings.upstream_idle_timeout_secs,
        )
        prefixes = _prefixes(settings)
        self._admission.configure(prefixes=prefixes, cap=order.client_cap, grace_secs=settings.eviction_grace_secs)
        self._redirect_admission.configure(prefixes=prefixes, cap=None, grace_secs=settings.eviction_grace_secs)
        self._permits.resize(order.permits)
        self._handshakes.resize(order.handshake_permits)
        self._redirect_permits.resize(order.redirect_permits)
        self._cells[PERMITS] = order.permits
        in_service = {label: front.listener for label, front in self._fronts.items()}
        wanted = {listener.label: listener for listener in bound_listeners(prepared, in_service)}
        for label in set(self._fronts) - set(wanted):
            front = self._fronts.pop(label)
            front.accepting.finish()
            front.listener.sock.close()
        for label, listener in wanted.items():
            before = self._fronts.get(label)
            if before is not None and before.listener is listener:
                continue
            if before is not None:
                before.accepting.stop()
            front = self._fronts[label] = self._front(listener)
            if not self._terminations:
                front.accepting.start()
        old.retire(prepared.generation)
        if self._black_box is not None:
            self._black_box.reloaded()
        for session in list(self._sessions):
            session.go_away()
        access = self._relay.access
        if access is not None:
            # A ban is meant now, and not when its connections have ended.
            for session in [one for one in self._sessions if access.denies(one.peer)]:
                self._cells[CONNECTIONS_DENIED] += 1
                session.cut("denied")

    # -- the end -----------------------------------------------------------------------------------------------------

    def _terminate(self) -> None:
        self._terminations += 1
        if self._terminations > 1:
            self._done.set()
            return
        for relay in self._relays:
            relay.draining, relay.retiring = True, False
        # The master closes its own ends: whoever connects from now on is refused, instead of waiting for nobody.
        self._close_fronts(AcceptLoop.stop)
        self._pool.close_idle()
        self._cells[READY] = 0
        for session in list(self._sessions):
            session.drain()
        self._go_on_draining()
        timeout_secs = self._generation.settings.drain_timeout_secs
        self._loop.call_later(max(timeout_secs / 2, timeout_secs - TUNNEL_CLOSE_SECS), self._end_tunnels)
        self._loop.call_later(timeout_secs, self._done.set)

    def _retire(self, timeout_secs: float) -> None:
        """A successor accepts on the same sockets. Whoever is connected here may stay for ``timeout_secs``.

        An idle connection gets one more answer, with Connection: close: a request may be on its way.
        """
        self._retiring = True
        for relay in self._relays:
            relay.draining = relay.retiring = True
        for session in list(self._sessions):
            session.go_away()
        # Where the successor has fewer workers or listeners, nobody else would take who waits in the queue.
        self._close_fronts(AcceptLoop.finish)
        self._cells[READY] = 0
        self._go_on_draining()
        self._loop.call_later(max(timeout_secs / 2, timeout_secs - TUNNEL_CLOSE_SECS), self._end_tunnels)
        self._loop.call_later(timeout_secs, self._done.set)

    def _close_fronts(self, end: Callable[[AcceptLoop], None]) -> None:
        while self._fronts:
            _, front = self._fronts.popitem()
            end(front.accepting)
            front.listener.sock.close()
        self._admission.close()
        self._redirect_admission.close()

    def _go_on_draining(self) -> None:
        if not self._sessions:
            self._done.set()
        elif self._retiring and not self._terminations:
            return
        elif len(self._sessions) <= self._cells[TUNNELS_OPEN] and all(one.tunnelling for one in self._sessions):
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
        cells[LISTENERS_OPEN] = len(self._fronts)
        cells[LOGS_OPEN] = self._logs.descriptors
        cells[GENERATIONS] = len(self._relays)
        self._tallies.publish()
        self._buckets.publish(cells)
        cells[REQUESTS_ACTIVE] = sum(relay.requests_active for relay in self._relays)
        http2 = [session for session in self._sessions if isinstance(session, Http2Session)]
        cells[HTTP2_OPEN] = len(http2)
        cells[HTTP2_STREAMS_OPEN] = sum(session.open_streams for session in http2)
        self._pool.publish()
        publish_descriptors(cells)
        publish_memory(cells)
        self._beat_due = monotonic() + HEARTBEAT_SECS
        self._loop.call_later(HEARTBEAT_SECS, self._beat)
        self._look_for_resets()
        if READ_GUARD.ended != self._reads_ended:
            self._reads_ended = READ_GUARD.ended
            self._reporter.report(
                "tls.read_stuck",
                "a client kept one read of TLS from ending, as a flood of KeyUpdate messages does; it was cut",
                level="warning",
                connections_total=READ_GUARD.ended,
            )

    def _look_for_resets(self) -> None:
        """A reset that came together with a request is told only once (see ``Stream.keep_watching``), and a client that
        is held back is not watched at all: one poll(2) over all clients finds those that are gone while they wait."""
        poll = select.poll()
        streams = {session.stream.register(poll): session.stream for session in self._sessions}
        for descriptor, _ in poll.poll(0):
            streams[descriptor].reset_seen()


def _prefixes(settings: Settings) -> Prefixes:
    exempt = (*settings.client_cap_exempt, *settings.trusted_proxies)
    return Prefixes(settings.client_prefix_ipv4, settings.client_prefix_ipv6, exempt)


def _host_of(peer: object) -> str:
    return str(peer[0]).partition("%")[0] if isinstance(peer, tuple) and peer else "-"


def run_worker(context: WorkerContext) -> int:
    """Serve on the slot's sockets until SIGTERM has been obeyed: nothing new is accepted, what is under way ends within
    ``drain_timeout_secs``; a second SIGTERM ends it at once. Returns the exit code."""

    async def main() -> None:
        await Worker(context, asyncio.get_running_loop()).run()

    uvloop.run(main())
    return 0
