"""What every exchange of a worker needs: one object, made once a configuration (generation)."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from email.utils import formatdate
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from itertools import count
from math import inf
from typing import TYPE_CHECKING

from proxy.config.schema import Settings
from proxy.limit.networks import Access
from proxy.observe.accesslog import AccessLog
from proxy.observe.events import Reporter
from proxy.observe.refusals import RefusalRing
from proxy.observe.tallies import Tallies
from proxy.protocol.http1 import HeadCache, Limits, ResponseDecoder
from proxy.protocol.http2 import DEFAULT_LIMITS, ClientConnection, Rate, RequestHeads, ResponseHeads
from proxy.route.table import RouteTable
from proxy.stream.deadlines import Deadlines
from proxy.upstream.pool import UpstreamGroup, UpstreamPool

if TYPE_CHECKING:
    from proxy.relay.gate import Gate

MAX_RESPONSE_FIELDS = 256

UPSTREAM_LIMITS = DEFAULT_LIMITS._replace(
    max_concurrent_streams=1_000,
    max_fields=MAX_RESPONSE_FIELDS,
    resets=Rate(2_000, 500),
    pings=Rate(2_000, 500),
    empty_frames=Rate(2_000, 500),
    small_frames=Rate(100_000, 50_000),
)
"""Of connections to upstreams: many clients share one, so that what each may do adds up."""


class RelayContext:
    """One generation of a worker: settings, routes, upstream groups, logs, counters."""

    __slots__ = (
        "__weakref__",
        "_date",
        "_date_second",
        "_networks",
        "_request_ids",
        "access",
        "access_log",
        "cells",
        "deadlines",
        "draining",
        "gate",
        "groups",
        "head_cache",
        "http2_heads",
        "http2_limits",
        "http2_response_heads",
        "http2_response_limits",
        "pool",
        "refusals",
        "reporter",
        "request_id_prefix",
        "request_limits",
        "requests_active",
        "response_cache",
        "response_limits",
        "retiring",
        "routes",
        "settings",
        "tallies",
    )

    def __init__(
        self,
        *,
        settings: Settings,
        routes: RouteTable,
        groups: Mapping[int, UpstreamGroup],
        pool: UpstreamPool,
        deadlines: Deadlines,
        access_log: AccessLog,
        reporter: Reporter,
        cells: memoryview,
        tallies: Tallies,
        refusals: RefusalRing,
    ) -> None:
        self.settings = settings
        self.routes = routes
        self.groups = groups
        self.pool = pool
        self.deadlines = deadlines
        self.access_log = access_log
        self.reporter = reporter
        self.cells = cells
        self.tallies = tallies
        self.refusals = refusals
        self.access = Access(settings.deny, settings.allow) if settings.deny else None
        """Who has no connection at all; None: everybody may have one."""
        self.gate: Gate | None = None
        """What requests must pass, where something is configured."""
        self.draining = False
        self.retiring = False
        """While draining: a successor serves, and whoever was not told of the end gets one more answer."""
        self.requests_active = 0
        # The memos hang on the heads (RequestHead.memo), so the caches live and die with the generation.
        self.head_cache = HeadCache()
        self.response_cache = HeadCache()
        self.request_limits = Limits(settings.max_request_head_bytes, settings.max_request_headers)
        self.http2_limits = DEFAULT_LIMITS._replace(
            max_header_list_bytes=settings.max_request_head_bytes, max_fields=settings.max_request_headers
        )
        self.http2_heads = RequestHeads(self.http2_limits)
        self.response_limits = Limits(settings.max_response_head_bytes, MAX_RESPONSE_FIELDS)
        self.http2_response_limits = UPSTREAM_LIMITS._replace(max_header_list_bytes=settings.max_response_head_bytes)
        self.http2_response_heads = ResponseHeads(self.http2_response_limits)
        self.request_id_prefix = os.urandom(8).hex().encode()
        self._request_ids = count(int.from_bytes(os.urandom(4), "big"))
        self._date_second = 0
        self._date = b""
        self._networks: tuple[IPv4Network | IPv6Network, ...] = tuple(
            ip_network(network) for network in settings.trusted_proxies
        )

    def new_response_decoder(self) -> ResponseDecoder:
        """The decoder of one upstream connection."""
        return ResponseDecoder(self.response_limits, self.response_cache)

    def new_upstream_codec(self) -> ClientConnection:
        """The codec of one upstream connection of HTTP/2."""
        return ClientConnection(self.http2_response_limits, self.http2_response_heads)

    def new_request_id(self) -> bytes:
        """32 hexadecimal digits, different for each request of each worker."""
        return b"%b%016x" % (self.request_id_prefix, next(self._request_ids))

    def date(self) -> bytes:
        """The current time as an IMF-fixdate (RFC 9110 section 5.6.7)."""
        second = int(time.time())
        if second != self._date_second:
            self._date_second = second
            self._date = formatdate(second, usegmt=True).encode()
        return self._date

    def least_rate_until(self, since: float, head_bytes: int) -> float:
        """Until when a request's head that began at ``since`` may take, as so much of it has come (monotonic secs)."""
        rate = self.settings.min_request_head_bytes_per_sec
        return since + self.settings.min_rate_grace_secs + head_bytes / rate if rate else inf

    def trusts(self, address: str) -> bool:
        """Whether ``address`` is one of ``trusted_proxies``; what is not an IP address is not."""
        if not self._networks:
            return False
        try:
            parsed = ip_address(address)
        except ValueError:
            return False
        if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is not None:
            parsed = parsed.ipv4_mapped
        return any(parsed in network for network in self._networks)
