"""Host and path look-up, and the inheritance of options."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.config.paths import normalize_route_path
from proxy.config.refusal import RefusedError
from proxy.config.schema import Settings
from proxy.route.path import normalize_path
from proxy.route.table import RedirectEntry, RouteEntry, RouteTable, SiteEntry

UPSTREAM = ("http://192.0.2.1:3000",)


def table(*sites: dict[str, Any], **settings: Any) -> RouteTable:
    return RouteTable(
        Settings.model_validate({"sites": [{"upstreams": UPSTREAM, **site} for site in sites], **settings})
    )


def site_of(routes: RouteTable, host: bytes) -> SiteEntry:
    site = routes.site(host)
    assert site is not None, host
    return site


def route_of(routes: RouteTable, host: bytes, path: bytes) -> RouteEntry:
    entry = site_of(routes, host).match(path)
    assert isinstance(entry, RouteEntry), entry
    return entry


@pytest.mark.parametrize(
    ("host", "name"),
    [
        (b"example.org", "example.org"),
        (b"git.example.org", "git.example.org"),
        (b"www.example.org", "*.example.org"),
        (b"a.b.example.org", "*.example.org"),
        (b"a.deep.example.org", "*.deep.example.org"),
        (b"deep.example.org", "*.example.org"),
        (b"example.com", None),
        (b"notexample.org", None),
        (b".example.org", None),
        (b"", None),
        (b"2001:db8::1", "2001:db8::1"),
        (b"2001:db8:0:0::1", "2001:db8::1"),
        (b"2001:db8::2", None),
        (b"a." * 200 + b"example.org", None),
    ],
)
def test_site(host: bytes, name: str | None) -> None:
    hosts = ["Example.org.", "git.example.org", "*.example.org", "*.deep.example.org", "[2001:DB8::1]"]
    routes = table(*({"hosts": [host_name]} for host_name in hosts))
    found = routes.site(host)
    assert (found.name if found else None) == name
    assert not routes.has_any


def test_any_host_comes_last() -> None:
    routes = table({"hosts": ["*"]}, {"hosts": ["git.example.org", "*.example.com"]})
    assert routes.has_any
    assert site_of(routes, b"git.example.org").name == "git.example.org"
    assert site_of(routes, b"www.example.com").name == "git.example.org"
    assert site_of(routes, b"anything").name == "*"
    assert site_of(routes, b"").name == "*"


@pytest.mark.parametrize(
    ("path", "matched"),
    [
        (b"/", "/"),
        (b"*", "/"),
        (b"/api", "/api"),
        (b"/api/", "/api"),
        (b"/api/x", "/api"),
        (b"/api?x", "/api"),
        (b"/apix", "/"),
        (b"/ap", "/"),
        (b"/api/v2", "/api/v2"),
        (b"/api/v2/users?q", "/api/v2"),
        (b"/api/v2x", "/api"),
        (b"/api/v22/x", "/api"),
        (b"/x?/api", "/"),
        (b"/API", "/"),
        (b"//api", "/"),
        (b"/caf%C3%A9/x", "/caf%C3%A9"),
        (b"/old/x", "/old"),
        (b"/old/kept", "/old/kept"),
    ],
)
def test_longest_prefix_at_segment_boundaries(path: bytes, matched: str) -> None:
    routes = table(
        {
            "hosts": ["example.org"],
            "routes": [{"path": "/api"}, {"path": "/api/v2/"}, {"path": "/café"}, {"path": "/old/kept"}],
            "redirects": [{"path": "/old", "to": "https://example.com/new"}],
        }
    )
    entry = site_of(routes, b"example.org").match(path)
    assert entry is not None
    assert entry.path == matched


def test_no_route_and_no_upstreams_is_none() -> None:
    routes = table({"hosts": ["example.org"], "upstreams": None, "routes": [{"path": "/api", "upstreams": UPSTREAM}]})
    assert site_of(routes, b"example.org").match(b"/") is None
    assert route_of(routes, b"example.org", b"/api/x").upstreams == UPSTREAM


def test_an_explicit_root_replaces_the_sites_own() -> None:
    routes = table({"hosts": ["example.org"], "routes": [{"path": "/", "max_fails": 9}]})
    assert route_of(routes, b"example.org", b"/x").max_fails == 9
    assert len(routes.routes) == 1


def test_ids_count_over_all_sites() -> None:
    routes = table({"hosts": ["a.example.org"], "routes": [{"path": "/x"}]}, {"hosts": ["b.example.org"]})
    assert [route.id for route in routes.routes] == [0, 1, 2]
    assert [route.site_name for route in routes.routes] == ["a.example.org", "a.example.org", "b.example.org"]
    assert [site.name for site in routes.sites] == ["a.example.org", "b.example.org"]


def test_defaults() -> None:
    routes = table({"hosts": ["example.org"]}, write_timeout_secs=7, upstream_connect_timeout_secs=3)
    entry = dataclasses.asdict(route_of(routes, b"example.org", b"/"))
    assert entry == {
        "id": 0,
        "site_name": "example.org",
        "path": "/",
        "upstreams": UPSTREAM,
        "upstream_protocol": "http/1.1",
        "balance": "round_robin",
        "max_fails": 3,
        "fail_timeout_secs": 10.0,
        "upstream_tls": entry["upstream_tls"],
        "preserve_host": True,
        "set_request_headers": (),
        "remove_request_headers": frozenset(),
        "set_response_headers": (),
        "remove_response_headers": frozenset(),
        "max_request_body_bytes": None,
        "upgrade_protocols": frozenset({b"websocket"}),
        "upstream_connect_timeout_secs": 3.0,
        "upstream_response_timeout_secs": 60.0,
        "tunnel_idle_timeout_secs": 3600.0,
        "request_body_timeout_secs": 30.0,
        "min_request_body_bytes_per_sec": 240,
        "write_timeout_secs": 7.0,
        "max_upstream_requests": None,
        "max_queued_requests": 1024,
        "door": {"access": None, "rates": ()},
    }
    assert entry["upstream_tls"].ca is None


def test_a_route_inherits_what_it_does_not_say() -> None:
    routes = table(
        {
            "hosts": ["example.org"],
            "balance": "least_connections",
            "max_fails": 1,
            "preserve_host": False,
            "max_request_body_bytes": 100,
            "upgrade_protocols": [],
            "write_timeout_secs": 5,
            "request_headers": {"set": {"X-A": "site"}, "remove": ["X-Gone"]},
            "response_headers": {"remove": ["Server"]},
            "routes": [
                {
                    "path": "/api",
                    "max_request_body_bytes": 1,
                    "upgrade_protocols": ["WebSocket", "TLS/1.0"],
                    "write_timeout_secs": 6,
                    "request_headers": {"set": {"X-B": "route"}},
                }
            ],
        }
    )
    root, api = route_of(routes, b"example.org", b"/"), route_of(routes, b"example.org", b"/api")
    for entry in (root, api):
        assert (entry.balance, entry.max_fails, entry.preserve_host) == ("least_connections", 1, False)
        assert entry.remove_response_headers == {b"server"}
    assert (root.max_request_body_bytes, api.max_request_body_bytes) == (100, 1)
    assert (root.upgrade_protocols, api.upgrade_protocols) == (
        frozenset(),
        frozenset({b"websocket", b"tls/1.0"}),
    )
    assert (root.write_timeout_secs, api.write_timeout_secs) == (5.0, 6.0)
    assert (root.set_request_headers, root.remove_request_headers) == (
        ((b"X-A", b"site"),),
        frozenset({b"x-gone"}),
    )
    assert (api.set_request_headers, api.remove_request_headers) == (((b"X-B", b"route"),), frozenset())


@pytest.mark.parametrize(
    ("to", "location"),
    [
        ("https://example.com{uri}", b"https://example.com/old/a?b={uri}"),
        ("/new{uri}", b"/new/old/a?b={uri}"),
        ("https://example.com/fixed", b"https://example.com/fixed"),
    ],
)
def test_redirect(to: str, location: bytes) -> None:
    routes = table({"hosts": ["example.org"], "redirects": [{"path": "/old", "to": to, "status": 301}]})
    entry = site_of(routes, b"example.org").match(b"/old/a")
    assert isinstance(entry, RedirectEntry)
    assert entry.status == 301
    assert entry.location(b"/old/a?b={uri}") == location


@given(st.text("/.aB~%2eEfF5cé é+;", min_size=1, max_size=10).map(lambda text: "/" + text))
def test_a_configured_path_is_in_the_normal_form_of_requests(text: str) -> None:
    """Else it could never match."""
    try:
        path = normalize_route_path(text).encode("ascii")
    except RefusedError:
        return
    assert normalize_path(path) == path
