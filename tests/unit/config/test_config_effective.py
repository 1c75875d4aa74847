"""Defaults that depend on the rest of the configuration."""

from __future__ import annotations

from proxy.config.effective import effective_https_port, effective_listeners, effective_redirect_addresses
from proxy.config.schema import INHERITED_DEFAULTS, Listener, Redirect, RouteOptions, Settings, Site
from proxy.route.table import RouteEntry, RouteTable


def test_default_listeners() -> None:
    listeners = effective_listeners(Settings())
    assert [(str(item.address), item.listener.address, item.optional) for item in listeners] == [
        ("0.0.0.0:443", "0.0.0.0:443", False),
        ("[::]:443", "[::]:443", True),
    ]


def test_configured_listeners_are_never_optional() -> None:
    listeners = effective_listeners(Settings(listeners=(Listener(address="[::]:443"),)))
    assert [(str(item.address), item.optional) for item in listeners] == [("[::]:443", False)]


def test_redirect_addresses() -> None:
    def addresses(redirect: Redirect) -> list[tuple[str, bool]]:
        found = effective_redirect_addresses(Settings(redirect=redirect))
        return [(str(item.address), item.optional) for item in found]

    assert addresses(Redirect()) == [("0.0.0.0:80", False), ("[::]:80", True)]
    assert addresses(Redirect(max_connections=3)) == [("0.0.0.0:80", False), ("[::]:80", True)]
    assert addresses(Redirect(addresses=("[::]:80",))) == [("[::]:80", False)]
    assert addresses(Redirect(enabled=False)) == []


def test_https_port() -> None:
    listeners = (Listener(address="127.0.0.1:8443"), Listener(address="127.0.0.1:9443"))
    assert effective_https_port(Settings()) == 443
    assert effective_https_port(Settings(listeners=listeners)) == 8443
    assert effective_https_port(Settings(listeners=listeners, redirect=Redirect(https_port=443))) == 443


def test_upstream_connections() -> None:
    assert Settings(max_connections=7).upstream_connections == 7
    assert Settings(max_connections="auto").upstream_connections == "auto"
    assert Settings(max_connections=7, max_upstream_connections=3).upstream_connections == 3


def test_documented_defaults_are_those_that_routes_have() -> None:
    settings = Settings(sites=(Site(hosts=("*",), upstreams=("http://127.0.0.1:3000",)),))
    site = RouteTable(settings).site(b"example.org")
    assert site is not None
    entry = site.match(b"/")
    assert isinstance(entry, RouteEntry)
    expected = {**INHERITED_DEFAULTS, "upgrade_protocols": frozenset({b"websocket"})}
    assert {key: getattr(entry, key) for key in expected} == expected
    shared_timeouts = [
        key for key in RouteOptions.model_fields if key in Settings.model_fields and key.endswith("_timeout_secs")
    ]
    assert len(shared_timeouts) == 5
    assert all(getattr(entry, key) == getattr(settings, key) for key in shared_timeouts)
