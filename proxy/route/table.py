"""Which site a host name belongs to and which route of it a path takes: pure look-ups, made once a configuration."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from proxy.config.names import ANY_HOST, WILDCARD_PREFIX
from proxy.config.paths import URI_PLACEHOLDER
from proxy.config.schema import INHERITED_DEFAULTS, HeaderEdit, RouteOptions, Settings, Site, UpstreamTls
from proxy.limit.networks import Access
from proxy.limit.rates import Rate, make_rates

_URI: Final = URI_PLACEHOLDER.encode("ascii")

# RFC 1035 section 2.3.4. What is longer is no DNS name, and walking its labels would cost quadratic time.
_MAX_DNS_NAME_BYTES: Final = 255
# The end of the path, the next segment, the query.
_BOUNDARIES: Final = frozenset((b"", b"/", b"?"))


@dataclass(frozen=True, slots=True, eq=False)
class Door:
    """Who may come and how often: ``access`` is the site's lists, ``rates`` every limit that applies."""

    access: Access | None
    rates: tuple[Rate, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RouteEntry:
    """One route with every option resolved: its own value, else the site's, else the default.

    ``id`` is unique in its table and counts from 0. Entries compare and hash by identity, so they can be keys.
    Header edits are not merged: a route's ``request_headers`` (or ``response_headers``) table replaces the site's.
    """

    id: int
    site_name: str
    path: str
    upstreams: tuple[str, ...]
    upstream_protocol: str
    balance: str
    max_fails: int
    fail_timeout_secs: float
    upstream_tls: UpstreamTls
    preserve_host: bool
    set_request_headers: tuple[tuple[bytes, bytes], ...]
    remove_request_headers: frozenset[bytes]
    set_response_headers: tuple[tuple[bytes, bytes], ...]
    remove_response_headers: frozenset[bytes]
    max_request_body_bytes: int | None
    upgrade_protocols: frozenset[bytes]
    upstream_connect_timeout_secs: float
    upstream_response_timeout_secs: float
    tunnel_idle_timeout_secs: float
    request_body_timeout_secs: float
    write_timeout_secs: float
    min_request_body_bytes_per_sec: int
    max_upstream_requests: int | None
    max_queued_requests: int
    door: Door


@dataclass(frozen=True, slots=True, eq=False)
class RedirectEntry:
    """A path that is answered with a redirect: ``status`` and a ``template`` for Location."""

    site_name: str
    path: str
    status: int
    template: bytes

    def location(self, path_and_query: bytes) -> bytes:
        """Return the Location for a request of ``path_and_query`` (in normal form): it replaces each ``{uri}``."""
        return self.template.replace(_URI, path_and_query)


Entry = RouteEntry | RedirectEntry


class SiteEntry:
    """One site: its name (the first of its hosts) and what its paths map to."""

    __slots__ = ("_entries", "_lengths", "_root", "door", "hosts", "name")

    def __init__(self, name: str, hosts: tuple[str, ...], entries: Mapping[bytes, Entry], door: Door) -> None:
        self.name: Final = name
        self.hosts: Final = hosts
        """In the normal form of the configuration."""
        self.door: Final = door
        """For what has no route."""
        self._root: Final = entries.get(b"/")
        self._entries: Final = {prefix: entry for prefix, entry in entries.items() if prefix != b"/"}
        self._lengths: Final = tuple(sorted({len(prefix) for prefix in self._entries}, reverse=True))

    def match(self, path: bytes) -> RouteEntry | RedirectEntry | None:
        """Return the entry with the longest prefix of ``path`` that ends at a segment boundary.

        ``path`` is in normal form, with its query. ``/api`` matches ``/api``, ``/api/x`` and ``/api?x``, not ``/apix``.
        None (404): no route matches and the site has no upstreams of its own. ``b"*"`` takes the root.
        """
        # A prefix has no "?", so one that reaches into the query cannot be found.
        for length in self._lengths:
            entry = self._entries.get(path[:length])
            if entry is not None and path[length : length + 1] in _BOUNDARIES:
                return entry
        return self._root


class RouteTable:
    """The sites of one configuration; that its values are in normal form and without conflicts is ``config``'s part."""

    def __init__(self, settings: Settings) -> None:
        self._exact: Final[dict[bytes, SiteEntry]] = {}
        self._wildcards: Final[dict[bytes, SiteEntry]] = {}
        self._any: SiteEntry | None = None
        routes: list[RouteEntry] = []
        sites: list[SiteEntry] = []
        for site in settings.sites:
            entry = _site_entry(site, settings, routes)
            sites.append(entry)
            for host in site.hosts:
                if host == ANY_HOST:
                    self._any = entry
                elif host.startswith(WILDCARD_PREFIX):
                    self._wildcards[host.removeprefix(WILDCARD_PREFIX).encode("ascii")] = entry
                else:
                    self._exact[host.encode("ascii")] = entry
        self.sites: Final = tuple(sites)
        """In the configuration's order."""
        self.routes: Final = tuple(routes)
        """All routes of all sites; ``routes[n].id == n``."""
        self.has_any: Final = self._any is not None
        """A site has the host ``*``."""
        self.door: Final = Door(None, _common_rates(settings))
        """Of requests to no site."""
        doors = [self.door, *(site.door for site in sites), *(route.door for route in routes)]
        self.has_doors: Final = any(door.access is not None or door.rates for door in doors)
        """Some site or route does not let everybody in at any rate."""

    def site(self, host: bytes) -> SiteEntry | None:
        """Return the site of ``host``: the exact name, else the longest wildcard, else the site of ``*``, else None.

        ``host`` is in lower case, without port, brackets and trailing dot. ``*.example.org`` covers one or more labels.
        An IPv6 address may be spelled in any way.
        """
        found = self._exact.get(host)
        if found is not None:
            return found
        if len(host) <= _MAX_DNS_NAME_BYTES:
            dot = host.find(b".") if self._wildcards else -1
            while dot > 0:
                found = self._wildcards.get(host[dot + 1 :])
                if found is not None:
                    return found
                dot = host.find(b".", dot + 1)
            if b":" in host:
                return self._exact.get(_canonical_ipv6(host), self._any)
        return self._any


def _site_entry(site: Site, settings: Settings, routes: list[RouteEntry]) -> SiteEntry:
    """Make a site's entry and append its routes to ``routes``."""
    name = site.hosts[0]
    door = _site_door(site, settings)
    entries: dict[bytes, Entry] = {}
    for redirect in site.redirects:
        template = redirect.to.encode("ascii")
        entries[redirect.path.encode("ascii")] = RedirectEntry(name, redirect.path, redirect.status, template)
    tables: dict[str, tuple[RouteOptions, ...]] = {route.path: (route, site) for route in site.routes}
    if site.upstreams and b"/" not in entries:
        tables.setdefault("/", (site,))
    for path, options in tables.items():
        route = _route_entry(len(routes), name, path, options, settings, door)
        routes.append(route)
        entries[path.encode("ascii")] = route
    return SiteEntry(name, site.hosts, entries, door)


def _common_rates(settings: Settings) -> tuple[Rate, ...]:
    return make_rates(settings.rate_limits, "", (settings.client_prefix_ipv4, settings.client_prefix_ipv6))


def _site_door(site: Site, settings: Settings) -> Door:
    prefixes = (settings.client_prefix_ipv4, settings.client_prefix_ipv6)
    rates = _common_rates(settings) + make_rates(site.rate_limits or (), f"site {site.hosts[0]} ", prefixes)
    return Door(Access(site.deny, site.allow) if site.deny else None, rates)


def _route_door(path: str, site_name: str, options: RouteOptions, settings: Settings, door: Door) -> Door:
    """A route with limits of its own has them in place of its site's, and tokens of its own."""
    if isinstance(options, Site) or options.rate_limits is None:
        return door
    prefixes = (settings.client_prefix_ipv4, settings.client_prefix_ipv6)
    return Door(
        door.access, _common_rates(settings) + make_rates(options.rate_limits, f"route {site_name} {path} ", prefixes)
    )


def _route_entry(
    number: int, site_name: str, path: str, options: tuple[RouteOptions, ...], settings: Settings, door: Door
) -> RouteEntry:
    """Resolve each option: ``options`` go from the route to its site."""

    def resolve(key: str, default: Any = None) -> Any:
        said = (getattr(table, key) for table in options)
        return next((value for value in said if value is not None), INHERITED_DEFAULTS.get(key, default))

    def seconds(key: str) -> float:
        return float(resolve(key, getattr(settings, key)))

    request_headers: HeaderEdit = resolve("request_headers", HeaderEdit())
    response_headers: HeaderEdit = resolve("response_headers", HeaderEdit())
    return RouteEntry(
        id=number,
        site_name=site_name,
        path=path,
        upstreams=resolve("upstreams"),
        upstream_protocol=resolve("upstream_protocol"),
        balance=resolve("balance"),
        max_fails=resolve("max_fails"),
        fail_timeout_secs=float(resolve("fail_timeout_secs")),
        upstream_tls=resolve("upstream_tls", UpstreamTls()),
        preserve_host=resolve("preserve_host"),
        set_request_headers=_pairs(request_headers),
        remove_request_headers=_lower_names(request_headers.remove),
        set_response_headers=_pairs(response_headers),
        remove_response_headers=_lower_names(response_headers.remove),
        max_request_body_bytes=resolve("max_request_body_bytes"),
        upgrade_protocols=_lower_names(resolve("upgrade_protocols")),
        upstream_connect_timeout_secs=seconds("upstream_connect_timeout_secs"),
        upstream_response_timeout_secs=seconds("upstream_response_timeout_secs"),
        tunnel_idle_timeout_secs=seconds("tunnel_idle_timeout_secs"),
        request_body_timeout_secs=seconds("request_body_timeout_secs"),
        write_timeout_secs=seconds("write_timeout_secs"),
        min_request_body_bytes_per_sec=resolve(
            "min_request_body_bytes_per_sec", settings.min_request_body_bytes_per_sec
        ),
        max_upstream_requests=resolve("max_upstream_requests"),
        max_queued_requests=resolve("max_queued_requests", settings.max_queued_requests),
        door=_route_door(path, site_name, options[0], settings, door),
    )


def _canonical_ipv6(host: bytes) -> bytes:
    """Return the one spelling of an IPv6 address (RFC 5952 section 4); anything else as it is."""
    try:
        return str(ipaddress.IPv6Address(host.decode("ascii", "replace"))).encode("ascii")
    except ValueError:
        return host


def _pairs(edit: HeaderEdit) -> tuple[tuple[bytes, bytes], ...]:
    return tuple((name.encode("ascii"), value.encode("ascii")) for name, value in edit.set.items())


def _lower_names(names: tuple[str, ...]) -> frozenset[bytes]:
    return frozenset(name.lower().encode("ascii") for name in names)
