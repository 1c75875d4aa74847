"""What a whole request must pass before it is routed anywhere, whatever protocol it came by: networks and rates.

A context has a gate only where something of this is configured, so that nobody else pays for it.
"""

from __future__ import annotations

from time import monotonic_ns

from proxy.limit.buckets import Buckets
from proxy.limit.networks import Access
from proxy.limit.rates import Rate, told
from proxy.observe.counters import DENIED, RATE_LIMITED
from proxy.protocol.http1 import RequestHead
from proxy.relay.forward import ForwardedBy, Prepared, Refusal
from proxy.route.table import RouteTable


class Gate:
    """The door of one generation's sites."""

    __slots__ = ("_access", "_buckets", "_cells", "_routes")

    def __init__(self, routes: RouteTable, access: Access | None, buckets: Buckets, cells: memoryview) -> None:
        """``access``: the top level's lists. A peer in them has no connection; clients behind a trusted one do."""
        self._routes = routes
        self._access = access
        self._buckets = buckets
        self._cells = cells

    def refuses(self, forwarded: ForwardedBy, head: RequestHead, prepared: object) -> Refusal | None:
        """Whether the request goes no further, and how it is answered. A granted one has taken its tokens.

        ``prepared``: what ``prepare`` has made of the head.
        """
        if isinstance(prepared, Prepared):
            place = prepared.route.door
        else:
            site = self._routes.site(head.host)
            place = self._routes.door if site is None else site.door
        client = forwarded.client(head)
        if (place.access is not None and place.access.denies(client)) or (
            forwarded.trusted and self._access is not None and self._access.denies(client)
        ):
            self._cells[DENIED] += 1
            return Refusal(403, "denied")
        return self._over_rate(place.rates, client) if place.rates else None

    def _over_rate(self, rates: tuple[Rate, ...], client: bytes) -> Refusal | None:
        buckets, now = self._buckets, monotonic_ns()
        taken: list[tuple[int, int]] = []
        for rate in rates:
            key = rate.key(client)
            if key is None:
                continue
            spare_ns = buckets.take(key, rate.interval_ns, rate.tolerance_ns, now)
            if spare_ns < 0:
                # What is refused costs nothing elsewhere: else a client over one limit would use up another.
                for other, interval_ns in taken:
                    buckets.give_back(other, interval_ns)
                self._cells[RATE_LIMITED] += 1
                return Refusal(429, "rate-limited", told(rate, -spare_ns))
            taken.append((key, rate.interval_ns))
        return None
