"""Rate limits as they are used: what a configured one comes to, and what a client that is over it is told."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from proxy.config.pressure import RateLimit
from proxy.limit.networks import Networks, packed, prefix_of

_NS: Final = 1_000_000_000
Fields = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Rate:
    """One limit. ``scope`` names whose it is; with the client it is the bucket's key.

    A token comes each ``interval_ns``; ``tolerance_ns`` is the time of those that a burst may take beyond the first.
    """

    scope: str
    name: str
    interval_ns: int
    tolerance_ns: int
    burst: int
    prefixes: tuple[int, int] | None
    exempt: Networks | None

    def key(self, client: bytes) -> int | None:
        """The bucket of a client's address; None for one that is not counted.

        A hash with a secret of this master's life, which all workers have by the fork: nobody can choose addresses
        that share a bucket.
        """
        if self.exempt is not None and self.exempt.longest(packed(client)) >= 0:
            return None
        return hash((self.scope, b"" if self.prefixes is None else prefix_of(client, *self.prefixes)))


def make_rates(limits: Iterable[RateLimit], scope: str, prefixes: tuple[int, int]) -> tuple[Rate, ...]:
    """The limits of one table of the configuration; ``prefixes``: bits of IPv4 and IPv6 that make a client."""
    made: list[Rate] = []
    for number, limit in enumerate(limits, 1):
        burst = limit.requests if limit.burst is None else limit.burst
        interval_ns = max(1, round(limit.per_secs * _NS / limit.requests))
        made.append(
            Rate(
                scope=f"{scope}#{number} {limit.by}",
                name=limit.by if number == 1 else f"{limit.by}-{number}",
                interval_ns=interval_ns,
                tolerance_ns=(burst - 1) * interval_ns,
                burst=burst,
                prefixes=prefixes if limit.by == "client" else None,
                exempt=Networks(limit.exempt) if limit.exempt else None,
            )
        )
    return tuple(made)


def told(rate: Rate, wait_ns: int) -> Fields:
    """What a client that is ``wait_ns`` early is told.

    Retry-After (RFC 9110 section 10.2.3), and for programs that read them RateLimit-Policy, the quota and the time in
    which it is full again, and RateLimit, what is left of it (draft-ietf-httpapi-ratelimit-headers-11).
    """
    wait_secs = max(1, -(-wait_ns // _NS))
    window_secs = max(1, -(-rate.burst * rate.interval_ns // _NS))
    return (
        (b"Retry-After", b"%d" % wait_secs),
        (b"RateLimit-Policy", b'"%b";q=%d;w=%d' % (rate.name.encode("ascii"), rate.burst, window_secs)),
        (b"RateLimit", b'"%b";r=0;t=%d' % (rate.name.encode("ascii"), wait_secs)),
    )
