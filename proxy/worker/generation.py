"""One accepted configuration inside a worker: its routes, upstream groups and logs, made whole before it is used."""

from __future__ import annotations

import asyncio
import ssl
import weakref
from collections.abc import Mapping
from dataclasses import dataclass

from proxy.config.schema import Settings, UpstreamTls
from proxy.observe.accesslog import AccessLog
from proxy.observe.events import Reporter
from proxy.observe.refusals import RefusalRing
from proxy.observe.tallies import Tallies
from proxy.relay.context import RelayContext
from proxy.route.table import RouteEntry, RouteTable
from proxy.stream.deadlines import Deadlines
from proxy.upstream.pool import UpstreamGroup, UpstreamPool
from proxy.upstream.resolve import Resolver

LOG_CLOSE_SECS = 1.0


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


class Generation:
    """``relay`` is what sessions hold: a generation lives as long as one of its connections."""

    def __init__(
        self,
        workshop: Workshop,
        settings: Settings,
        upstream_contexts: Mapping[UpstreamTls, ssl.SSLContext],
        previous: Generation | None,
    ) -> None:
        """Make everything; what is the same in ``previous`` is taken over, with its pooled connections and its health.

        Raises OperatorError for a log that cannot be opened. Nothing is in use yet: ``discard`` undoes it.
        """
        self.settings = settings
        self._previous = previous
        self.owns_log = previous is None or previous.settings.access_log != settings.access_log
        if previous is None or self.owns_log:
            self.access_log = AccessLog(settings.access_log, workshop.cells, workshop.reporter)
            self.access_log.attach(workshop.loop)
        else:
            self.access_log = previous.access_log
        routes = RouteTable(settings)
        known = {} if previous is None else previous.groups_by_key
        self.groups_by_key: dict[object, UpstreamGroup] = {}
        groups: dict[int, UpstreamGroup] = {}
        for route in routes.routes:
            key = _group_key(route)
            group = self.groups_by_key.get(key) or known.get(key)
            if group is None:
                group = UpstreamGroup(route, upstream_contexts.get(route.upstream_tls), route.upstream_tls.server_name)
            groups[route.id] = self.groups_by_key[key] = group
        self.groups = list(self.groups_by_key.values())
        self.relay = RelayContext(
            settings=settings,
            routes=routes,
            groups=groups,
            pool=workshop.pool,
            deadlines=workshop.deadlines,
            access_log=self.access_log,
            reporter=workshop.reporter,
            cells=workshop.cells,
            tallies=workshop.tallies,
            refusals=workshop.refusals,
        )
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
        if self.owns_log:
            self.access_log.close(LOG_CLOSE_SECS)

    def retire(self, successor: Generation) -> None:
        """``successor`` has taken over: end what it does not share. The log ends with the last connection."""
        self.resolver.stop()
        for key, group in self.groups_by_key.items():
            if successor.groups_by_key.get(key) is not group:
                group.retire()
        if successor.access_log is not self.access_log:
            weakref.finalize(self.relay, self.access_log.close, LOG_CLOSE_SECS)


def _group_key(route: RouteEntry) -> object:
    return (
        route.upstreams,
        route.balance,
        route.max_fails,
        route.fail_timeout_secs,
        route.upstream_tls,
        route.upstream_connect_timeout_secs,
        route.write_timeout_secs,
    )
