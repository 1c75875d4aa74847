"""What concerns more than one table: duplicates, addresses taken twice, sites that lead nowhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from proxy.config.address import Address, parse_address
from proxy.config.effective import effective_listeners, effective_redirect_addresses
from proxy.config.pressure import EVERYBODY
from proxy.config.refusal import shown
from proxy.config.schema import AUTO, RouteOptions, Settings, Site

Loc = tuple[str | int, ...]

_HINT_REDIRECT: Final = (
    "the redirect listens on port 80 by default: set its addresses, or enabled = false in [redirect]"
)
_HINT_HEALTH: Final = "set another address in [health], or enabled = false"


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is not acceptable, and where."""

    loc: Loc
    found: str
    wanted: str
    hint: str = ""
    other: Loc | None = None
    """Where the other half of a contradiction is."""
    lacks: Loc | None = None
    """The key whose absence is the fault: nothing is lacking where it is there, but refused itself."""


@dataclass(frozen=True, slots=True)
class _Use:
    loc: Loc
    role: str
    address: Address
    hint: str


def conflicts(settings: Settings) -> Iterator[Problem]:
    """Yield what is wrong between the tables of ``settings``, whose values are each acceptable alone."""
    yield from _shares(settings)
    if settings.group is not None and settings.user is None:
        yield Problem(
            ("group",), shown(settings.group), "`user` beside it", "the group is that user's", lacks=("user",)
        )
    yield from _lists((), settings)
    yield from _addresses(settings)
    yield from _hosts(settings)
    for index, site in enumerate(settings.sites):
        yield from _site(("sites", index), site, settings.workers)


def nobody_is_served(settings: Settings) -> Iterator[str]:
    """Warnings: what is acceptable and yet hardly meant."""
    lists: list[tuple[str, Settings | Site]] = [("deny", settings)]
    lists += [(f"sites[{index}].deny", site) for index, site in enumerate(settings.sites)]
    for key, one in lists:
        if one.deny and not one.allow and set(EVERYBODY) <= set(one.deny):
            yield f"{key} names all addresses and there is no allow beside it: nobody is served"


def _shares(settings: Settings) -> Iterator[Problem]:
    for key in ("max_connections", "max_upstream_connections", "max_handshakes"):
        value = getattr(settings, key)
        if value is not None and AUTO not in (value, settings.workers) and value < settings.workers:
            yield Problem(
                (key,),
                str(value),
                f"at least {settings.workers}, the number of workers",
                "each worker needs a share of at least 1",
                other=("workers",),
            )


def _addresses(settings: Settings) -> Iterator[Problem]:
    seen: list[_Use] = []
    for use in _uses(settings):
        clash = next((other for other in seen if _clash(use, other)), None)
        if clash is not None:
            covers = "" if clash.address == use.address else f", which {clash.address} overlaps"
            yield Problem(
                use.loc,
                f"{shown(str(use.address))}{covers}",
                "each address in one place",
                use.hint or clash.hint,
                other=clash.loc,
            )
        seen.append(use)


def _uses(settings: Settings) -> Iterator[_Use]:
    for index, listener in enumerate(effective_listeners(settings)):
        yield _Use(("listeners", index, "address"), "https", listener.address, "")
    for index, redirect in enumerate(effective_redirect_addresses(settings)):
        yield _Use(("redirect", "addresses", index), "redirect", redirect.address, _HINT_REDIRECT)
    if settings.health.enabled:
        yield _Use(("health", "address"), "health", parse_address(settings.health.address), _HINT_HEALTH)


def _clash(one: _Use, other: _Use) -> bool:
    if one.address == other.address:
        return True
    # Listeners of one role may share a port: the kernel prefers the more specific address.
    return (
        one.role != other.role
        and one.address.family == other.address.family
        and one.address.port == other.address.port
        and (one.address.is_wildcard or other.address.is_wildcard)
    )


def _hosts(settings: Settings) -> Iterator[Problem]:
    seen: dict[str, Loc] = {}
    for index, site in enumerate(settings.sites):
        for position, host in enumerate(site.hosts):
            loc: Loc = ("sites", index, "hosts", position)
            other = seen.setdefault(host, loc)
            if other is not loc:
                yield Problem(loc, shown(host), "each host once, in one site", other=other)


def _lists(loc: Loc, lists: Settings | Site) -> Iterator[Problem]:
    """``allow`` alone would allow what is allowed anyway; who writes it means that the others may not."""
    if lists.allow and not lists.deny:
        yield Problem(
            (*loc, "allow"),
            "networks",
            "`deny` beside them",
            'allow names exceptions from it; to let in nobody else, write deny = ["all"]',
            lacks=(*loc, "deny"),
        )


def _concurrency(loc: Loc, options: RouteOptions, workers: int | Literal["auto"]) -> Iterator[Problem]:
    wanted = options.max_upstream_requests
    if wanted is not None and workers != AUTO and wanted < workers:
        yield Problem(
            (*loc, "max_upstream_requests"),
            str(wanted),
            f"at least {workers}, the number of workers",
            "each worker needs a share of at least 1",
            other=("workers",),
        )


def _site(loc: Loc, site: Site, workers: int | Literal["auto"]) -> Iterator[Problem]:
    yield from _lists(loc, site)
    if not (site.upstreams or site.routes or site.redirects):
        yield Problem(
            loc,
            f"the site of {shown(site.hosts[0])} without upstreams, routes and redirects",
            "one of them",
            'such as upstreams = ["http://127.0.0.1:3000"]',
        )
    yield from _backends((*loc, "upstreams"), site.upstreams)
    yield from _concurrency(loc, site, workers)
    paths: dict[str, Loc] = {}
    named = {"routes": [route.path for route in site.routes], "redirects": [item.path for item in site.redirects]}
    for key, entries in named.items():
        for index, path in enumerate(entries):
            path_loc: Loc = (*loc, key, index, "path")
            other = paths.setdefault(path, path_loc)
            if other is not path_loc:
                yield Problem(
                    path_loc,
                    shown(path),
                    "each path once among a site's routes and redirects",
                    "a slash at the end makes no difference",
                    other=other,
                )
    for index, route in enumerate(site.routes):
        route_loc: Loc = (*loc, "routes", index)
        yield from _backends((*route_loc, "upstreams"), route.upstreams)
        yield from _concurrency(route_loc, route, workers)
        if not (route.upstreams or site.upstreams):
            yield Problem(
                (*route_loc, "upstreams"),
                f"none for the route {shown(route.path)}",
                "upstreams in the route or in its site",
            )


def _backends(loc: Loc, upstreams: tuple[str, ...] | None) -> Iterator[Problem]:
    seen: dict[str, Loc] = {}
    for index, upstream in enumerate(upstreams or ()):
        here: Loc = (*loc, index)
        other = seen.setdefault(upstream, here)
        if other is not here:
            yield Problem(here, shown(upstream), "each upstream once", other=other)
