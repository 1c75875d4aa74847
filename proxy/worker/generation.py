"""One accepted configuration inside a worker: its routes, upstream groups and logs, made whole before it is used."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field

from proxy.budget import shares
from proxy.config.schema import AccessLog as AccessLogSettings
from proxy.config.schema import Settings, UpstreamTls
from proxy.limit.buckets import Buckets
from proxy.observe.accesslog import AccessLog
from proxy.observe.events import Reporter
from proxy.observe.refusals import RefusalRing
from proxy.observe.tallies import Tallies
from proxy.relay.context import RelayContext
from proxy.relay.gate import Gate
from proxy.route.table import RouteEntry, RouteTable
from proxy.stream.deadlines import Deadlines
from proxy.tls.contexts import UpstreamTrust, upstream_context
from proxy.upstream.pool import UpstreamGroup, UpstreamPool
from proxy.upstream.resolve import Resolver

LOG_FINISH_SECS = 2.0
"""For the writer of a log that is no longer used; what it has not written by then is counted as dropped."""


@dataclass(slots=True)
class _OpenLog:
    log: AccessLog
    users: int = 0


class OpenLogs:
    """The access logs of all generations that live: one for the same settings, however often they come and go."""

    def __init__(self, loop: asyncio.AbstractEventLoop, cells: memoryview, reporter: Reporter) -> None:
        self._loop = loop
        self._cells = cells
        self._reporter = reporter
        self._open: dict[AccessLogSettings, _OpenLog] = {}
        self._finishing: set[AccessLog] = set()

    @property
    def descriptors(self) -> int:
        """Descriptors that they have for themselves."""
        return sum(one.log.descriptors for one in self._open.values())

    def take(self, settings: AccessLogSettings) -> AccessLog:
        """The log that ``settings`` ask for; ``give_back`` follows. Raises OperatorError when it cannot be opened."""
        one = self._open.get(settings)
        if one is None:
            one = self._open[settings] = _OpenLog(AccessLog(settings, self._cells, self._reporter))
            one.log.attach(self._loop)
        one.users += 1
        return one.log

    def give_back(self, settings: AccessLogSettings) -> None:
        """One that took it needs it no more; the last one's words are written without anybody waiting for it."""
        one = self._open.get(settings)
        if one is None:
            return  # all are closed
        one.users -= 1
        if not one.users:
            del self._open[settings]
            one.log.finish()
            self._finishing.add(one.log)
            self._loop.call_later(LOG_FINISH_SECS, self._finished, one.log)

    def _finished(self, log: AccessLog) -> None:
        if log in self._finishing:
            self._finishing.discard(log)
            log.close(0)

    def reopen(self) -> None:
        """Log rotation."""
        for one in self._open.values():
            one.log.reopen()

    def close(self, timeout_secs: float) -> None:
        """The end: write what is buffered, for at most ``timeout_secs`` each."""
        logs = [*(one.log for one in self._open.values()), *self._finishing]
        self._open.clear()
        self._finishing.clear()
        for log in logs:
            log.close(timeout_secs)


@dataclass(frozen=True, slots=True)
class Workshop:
    """What a worker has for its whole life; every generation is made with it."""

    loop: asyncio.AbstractEventLoop
    deadlines: Deadlines
    pool: UpstreamPool
    reporter: Reporter
    cells: memoryview
    tallies: Tallies
    refusals: RefusalRing
    buckets: Buckets
    logs: OpenLogs
    slot: int
    workers: int
    alive: weakref.WeakSet[RelayContext] = field(default_factory=weakref.WeakSet)
    """Every generation that is in force, or prepared, or has a connection left."""

    def share(self, number: int) -> int:
        """This worker's part of a number that holds for the whole appliance."""
        return shares(number, self.workers)[self.slot]


class Generation:
    """``relay`` is what sessions hold: a generation lives as long as one of its connections."""

    def __init__(
        self,
        workshop: Workshop,
        settings: Settings,
        trust: Mapping[UpstreamTls, UpstreamTrust],
        previous: Generation | None,
    ) -> None:
        """Make everything; what is the same in ``previous`` is taken over, with its pooled connections and its health.

        Raises OperatorError for a log that cannot be opened. Nothing is in use yet: ``discard`` undoes it.
        """
        self.settings = settings
        self.trust = trust
        self._logs = workshop.logs
        routes = RouteTable(settings)
        known = {} if previous is None else previous.groups_by_key
        self.groups_by_key: dict[object, UpstreamGroup] = {}
        groups: dict[int, UpstreamGroup] = {}
        for route in routes.routes:
            context = trust[route.upstream_tls].context if route.upstream_tls in trust else None
            key = (*_group_key(route), context)
            group = self.groups_by_key.get(key) or known.get(key)
            if group is None:
                if context is not None and route.upstream_protocol == "h2":
                    context = upstream_context(route.upstream_tls, trust[route.upstream_tls].ca, ["h2"])
                group = UpstreamGroup(route, context, route.upstream_tls.server_name)
                if route.max_upstream_requests is not None:
                    group.limit = workshop.share(route.max_upstream_requests)
                    group.max_queued = workshop.share(route.max_queued_requests)
            groups[route.id] = self.groups_by_key[key] = group
        self.groups = list(self.groups_by_key.values())
        access_log = self._logs.take(settings.access_log)
        self.relay = RelayContext(
            settings=settings,
            routes=routes,
            groups=groups,
            pool=workshop.pool,
            deadlines=workshop.deadlines,
            access_log=access_log,
            reporter=workshop.reporter,
            cells=workshop.cells,
            tallies=workshop.tallies,
            refusals=workshop.refusals,
        )
        if self.relay.access is not None or routes.has_doors:
            self.relay.gate = Gate(routes, self.relay.access, workshop.buckets, workshop.cells)
        workshop.alive.add(self.relay)
        # The log ends with the last connection that may write to it.
        weakref.finalize(self.relay, self._logs.give_back, settings.access_log).atexit = False
        self.resolver = Resolver(
            workshop.loop,
            [backend for group in self.groups for backend in group.backends],
            interval_secs=settings.resolve_interval_secs,
            reporter=workshop.reporter,
        )

    async def prepare(self) -> None:
        """What takes time: resolve the backends' names once."""
        await self.resolver.start()

    def discard(self) -> None:
        """It is not wanted after all."""
        self.resolver.stop()

    def retire(self, successor: Generation) -> None:
        """``successor`` has taken over: end what it does not share."""
        self.resolver.stop()
        for key, group in self.groups_by_key.items():
            if successor.groups_by_key.get(key) is not group:
                group.retire()


def renewed_trust(
    cas: Mapping[UpstreamTls, bytes | None], known: Mapping[UpstreamTls, UpstreamTrust]
) -> dict[UpstreamTls, UpstreamTrust]:
    """What ``cas`` ask for: from ``known`` where that is the same, so that connections made with it can be kept.

    Raises ConfigError.
    """
    return {
        options: known[options]
        if options in known and known[options].ca == ca
        else UpstreamTrust(ca, upstream_context(options, ca))
        for options, ca in cas.items()
    }


def _group_key(route: RouteEntry) -> tuple[object, ...]:
    return (
        route.upstreams,
        route.upstream_protocol,
        route.balance,
        route.max_fails,
        route.fail_timeout_secs,
        route.upstream_tls,
        route.upstream_connect_timeout_secs,
        route.write_timeout_secs,
        route.max_upstream_requests,
        route.max_queued_requests,
    )
