"""Which site a host name belongs to and which route of it a path takes: pure look-ups, made once a configuration."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeVar
from urllib.parse import quote

from proxy.config.schema import HeaderEdit, PathRedirect, RouteOptions, Settings, Site, UpstreamTls
from proxy.errors import ConfigError
from proxy.route.path import PathError, normalize_path

ANY_HOST: Final = "*"
WILDCARD_PREFIX: Final = "*."
URI_PLACEHOLDER: Final = "{uri}"

DEFAULT_BALANCE: Final = "round_robin"
DEFAULT_MAX_FAILS: Final = 3
DEFAULT_FAIL_TIMEOUT_SECS: Final = 10.0
DEFAULT_UPGRADE_PROTOCOLS: Final = ("websocket",)

# RFC 1035 section 2.3.4. What is longer is no DNS name, and walking its labels would cost quadratic time.
_MAX_DNS_NAME_BYTES: Final = 255
# The end of the path, the next segment, the query.
_BOUNDARIES: Final = frozenset((b"", b"/", b"?"))

T = TypeVar("T")


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


@dataclass(frozen=True, slots=True, eq=False)
class RedirectEntry:
    """A path that is answered with a redirect: ``status`` and a ``template`` for Location."""

    site_name: str
    path: str
    status: int
    template: bytes

    def location(self, path_and_query: bytes) -> bytes:
        """Return the Location for a request of ``path_and_query`` (in normal form): it replaces each ``{uri}``."""
        return self.template.replace(URI_PLACEHOLDER.encode(), path_and_query)


Entry = RouteEntry | RedirectEntry


class SiteEntry:
    """One site: its name (the first of its hosts) and what its paths map to."""

    __slots__ = ("_entries", "_lengths", "_root", "hosts", "name")

    def __init__(self, name: str, hosts: tuple[str, ...], entries: Mapping[bytes, Entry]) -> None:
        self.name: Final = name
        self.hosts: Final = hosts
        """The host names as configured."""
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
    """The sites of one configuration. Raises ``ConfigError`` for what cannot be matched without ambiguity."""

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
                self._add_host(host, entry)
        self.sites: Final = tuple(sites)
        """In the configuration's order."""
        self.routes: Final = tuple(routes)
        """All routes of all sites; ``routes[n].id == n``."""
        self.has_any: Final = self._any is not None
        """A site has the host ``*``."""

    def site(self, host: bytes) -> SiteEntry | None:
        """Return the site of ``host``: the exact name, else the longest wildcard, else the site of ``*``, else None.

        ``host`` is in lower case, without port, brackets and trailing dot. ``*.example.org`` covers one or more labels.
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
                found = self._exact.get(_canonical_ip(host.decode("latin-1")).encode("latin-1"))
                if found is not None:
                    return found
        return self._any

    def _add_host(self, host: str, entry: SiteEntry) -> None:
        if host == ANY_HOST:
            other, self._any = self._any, entry
        else:
            table = self._wildcards if host.startswith(WILDCARD_PREFIX) else self._exact
            name = _host_key(host.removeprefix(WILDCARD_PREFIX), host)
            other = table.get(name)
            table[name] = entry
        if other is not None:
            where = f"twice in site {entry.name!r}" if other is entry else f"in site {other.name!r} too"
            raise ConfigError(f"sites: host {host!r} is named {where}: a host belongs to one site, once")


def _site_entry(site: Site, settings: Settings, routes: list[RouteEntry]) -> SiteEntry:
    if not site.hosts:
        raise ConfigError("sites: a site has no hosts: name at least one, or '*' for any")
    name = site.hosts[0]
    entries: dict[bytes, Entry] = {}

    def add(path: str, entry: Entry) -> None:
        prefix = _prefix(path, name)
        if prefix in entries:
            raise ConfigError(f"site {name!r}: path {path!r} is named twice (a slash at its end makes no difference)")
        entries[prefix] = entry

    for route in site.routes:
        if not (route.upstreams or site.upstreams):
            raise ConfigError(f"site {name!r}: route {route.path!r} has no upstreams, and neither has its site")
        entry = _route_entry(len(routes), name, route.path, (route, site), settings)
        routes.append(entry)
        add(route.path, entry)
    for redirect in site.redirects:
        add(redirect.path, _redirect_entry(redirect, name))
    if site.upstreams and b"/" not in entries:
        root = _route_entry(len(routes), name, "/", (site,), settings)
        routes.append(root)
        add("/", root)
    if not entries:
        raise ConfigError(f"site {name!r}: it has no upstreams, routes or redirects: give it one of them")
    return SiteEntry(name, site.hosts, entries)


def _route_entry(
    number: int, site_name: str, path: str, options: tuple[RouteOptions, ...], settings: Settings
) -> RouteEntry:
    """Resolve each option: ``options`` go from the route to its site."""

    def own(key: str) -> object:
        return next((value for table in options if (value := getattr(table, key)) is not None), None)

    def resolve(key: str, default: T) -> T:
        value = own(key)
        return default if value is None else value  # type: ignore[return-value]  # the schema types both alike

    def seconds(key: str) -> float:
        return float(resolve(key, getattr(settings, key)))

    limit: int | None = resolve("max_request_body_bytes", None)
    request_headers = resolve("request_headers", HeaderEdit())
    response_headers = resolve("response_headers", HeaderEdit())
    return RouteEntry(
        id=number,
        site_name=site_name,
        path=path,
        upstreams=next(table.upstreams for table in options if table.upstreams),
        balance=resolve("balance", DEFAULT_BALANCE),
        max_fails=resolve("max_fails", DEFAULT_MAX_FAILS),
        fail_timeout_secs=float(resolve("fail_timeout_secs", DEFAULT_FAIL_TIMEOUT_SECS)),
        upstream_tls=resolve("upstream_tls", UpstreamTls()),
        preserve_host=resolve("preserve_host", True),
        set_request_headers=_pairs(request_headers),
        remove_request_headers=_lower_names(request_headers.remove),
        set_response_headers=_pairs(response_headers),
        remove_response_headers=_lower_names(response_headers.remove),
        max_request_body_bytes=limit,
        upgrade_protocols=_lower_names(resolve("upgrade_protocols", DEFAULT_UPGRADE_PROTOCOLS)),
        upstream_connect_timeout_secs=seconds("upstream_connect_timeout_secs"),
        upstream_response_timeout_secs=seconds("upstream_response_timeout_secs"),
        tunnel_idle_timeout_secs=seconds("tunnel_idle_timeout_secs"),
        request_body_timeout_secs=seconds("request_body_timeout_secs"),
        write_timeout_secs=seconds("write_timeout_secs"),
    )


def _redirect_entry(redirect: PathRedirect, site_name: str) -> RedirectEntry:
    to = redirect.to
    where = f"site {site_name!r}: redirect {redirect.path!r}: to = {to!r}"
    # "//host" is a reference to another host (RFC 3986 section 4.2), and {uri} begins with a slash of the client's.
    if to.startswith((URI_PLACEHOLDER, "/" + URI_PLACEHOLDER)):
        raise ConfigError(
            f"{where} lets the client choose the host: put a scheme and host, or a path segment, before {{uri}}"
        )
    if not to or not all("!" <= character <= "~" for character in to):
        raise ConfigError(f"{where} is not a URI: percent-encode spaces, control and non-ASCII characters")
    return RedirectEntry(site_name, redirect.path, redirect.status, to.encode("ascii"))


def _prefix(path: str, site_name: str) -> bytes:
    where = f"site {site_name!r}: path {path!r}"
    if "?" in path:
        raise ConfigError(f"{where} holds a '?': routes match the path only, not the query")
    # Non-ASCII is spelled as browsers send it.
    raw = quote(path, safe="".join(map(chr, range(128)))).encode("ascii")
    if not raw.startswith(b"/"):
        raise ConfigError(f"{where} does not begin with '/'")
    try:
        return normalize_path(raw).rstrip(b"/") or b"/"
    except PathError as error:
        raise ConfigError(f"{where} can never match a request: {error.reason}") from error


def _host_key(name: str, host: str) -> bytes:
    key = name.lower().removesuffix(".").removeprefix("[").removesuffix("]")
    if not key or not key.isascii():
        raise ConfigError(
            f"sites: host {host!r} is not a name as clients send it: write a DNS name (an international one as xn--...)"
        )
    return _canonical_ip(key).encode("ascii")


def _canonical_ip(name: str) -> str:
    """Return the one spelling of an IPv6 address (RFC 5952); any other name as it is."""
    try:
        return str(ipaddress.IPv6Address(name))
    except ValueError:
        return name


def _pairs(edit: HeaderEdit) -> tuple[tuple[bytes, bytes], ...]:
    return tuple((name.encode("ascii"), value.encode("utf-8")) for name, value in edit.set.items())


def _lower_names(names: tuple[str, ...]) -> frozenset[bytes]:
    return frozenset(name.lower().encode("ascii") for name in names)
