"""What a reload says has changed, in the words of the file."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.config.diff import Changes, diff, keep_what_is_not_live
from proxy.config.load import load_mapping
from proxy.config.schema import Settings

BASE: dict[str, Any] = {
    "listeners": [{"address": "127.0.0.1:8443"}],
    "redirect": {"addresses": ["127.0.0.1:8080"]},
    "sites": [
        {
            "hosts": ["a.example.org", "b.example.org"],
            "upstreams": ["http://192.0.2.1:80"],
            "routes": [{"path": "/api", "upstreams": ["http://192.0.2.2:80"]}],
        },
        {"hosts": ["c.example.org"], "upstreams": ["http://192.0.2.3:80"]},
    ],
}


def settings(**changes: Any) -> Settings:
    return load_mapping({**BASE, **changes}, source="test")


def site(**changes: Any) -> list[dict[str, Any]]:
    return [{**BASE["sites"][0], **changes}, BASE["sites"][1]]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, {}),
        ({"max_connections": 77}, {"limits_changed": ["max_connections: 1024 -> 77"]}),
        ({"header_timeout_secs": 3}, {"limits_changed": ["header_timeout_secs: 10 -> 3"]}),
        ({"access_log": {"format": "json"}}, {"limits_changed": ['access_log.format: "combined" -> "json"']}),
        ({"event_log": {"level": "debug"}}, {"limits_changed": ['event_log.level: "info" -> "debug"']}),
        (
            {"deny": ["192.0.2.0/24", "2001:db8::/32"]},
            {"limits_changed": ['deny: [] -> ["192.0.2.0/24", "2001:db8::/32"]']},
        ),
        (
            {"rate_limits": [{"requests": 10, "per_secs": 0.5, "exempt": ["192.0.2.0/24"]}]},
            {"limits_changed": ['rate_limits: [] -> [{ requests = 10, per_secs = 0.5, exempt = ["192.0.2.0/24"] }]']},
        ),
        ({"event_log": {"format": "json"}}, {"needs_restart": ["event_log.format"]}),
        ({"workers": 3, "user": "nobody"}, {"needs_restart": ["workers", "user"]}),
        ({"health": {"address": "127.0.0.1:9"}}, {"needs_restart": ["health"]}),
        ({"sites": BASE["sites"][:1]}, {"sites_removed": ["c.example.org"]}),
        (
            {"sites": [*BASE["sites"], {"hosts": ["d.example.org"], "upstreams": ["http://192.0.2.4:80"]}]},
            {"sites_added": ["d.example.org"]},
        ),
        (
            {"sites": site(upstreams=["http://192.0.2.9:80"])},
            {"sites_changed": ["a.example.org: upstreams"]},
        ),
        (
            {"sites": site(routes=[{"path": "/api", "upstreams": ["http://192.0.2.9:80"]}, {"path": "/new"}])},
            {"sites_changed": ["a.example.org: route /api, route /new"]},
        ),
        ({"sites": site(routes=[])}, {"sites_changed": ["a.example.org: route /api"]}),
        (
            {"listeners": [{"address": "127.0.0.1:8444"}]},
            {"listeners_added": ["127.0.0.1:8444"], "listeners_removed": ["127.0.0.1:8443"]},
        ),
        (
            {"listeners": [{"address": "127.0.0.1:8443", "min_tls_version": "1.3"}]},
            {"listeners_changed": ["127.0.0.1:8443"]},
        ),
        (
            {"redirect": {"addresses": ["127.0.0.1:8081"]}},
            {
                "listeners_added": ["127.0.0.1:8081 (redirect)"],
                "listeners_removed": ["127.0.0.1:8080 (redirect)"],
            },
        ),
        (
            {"redirect": {"addresses": ["127.0.0.1:8080"], "max_connections": 9}},
            {"limits_changed": ["redirect.max_connections: 64 -> 9"]},
        ),
        ({"redirect": {"enabled": False}}, {"listeners_removed": ["127.0.0.1:8080 (redirect)"]}),
    ],
)
def test_what_is_told(changes: dict[str, Any], told: dict[str, list[str]]) -> None:
    found = diff(settings(), settings(**changes)).as_dict()
    found["limits_changed"] = [line for line in found.get("limits_changed", []) if not line.startswith("redirect.ena")]
    assert {key: value for key, value in found.items() if value} == told


def test_of_long_arrays_what_is_other_is_told() -> None:
    addresses = [f"192.0.2.{number}" for number in range(200)]
    changes = diff(settings(deny=addresses), settings(deny=[*addresses[1:], "2001:db8::/32"]))
    assert changes.limits_changed == ('deny: 200 -> 200 values, added "2001:db8::/32", removed "192.0.2.0"',)
    (line,) = diff(settings(deny=addresses[:1]), settings(deny=addresses)).limits_changed
    assert line.startswith('deny: 1 -> 200 values, added "192.0.2.1", "192.0.2.2"')
    assert line.endswith(" and 193 more")
    (line,) = diff(settings(deny=addresses), settings(deny=addresses[::-1])).limits_changed
    assert line == "deny: 200 -> 200 values, in another order"


def test_certificates_are_told_by_who_has_read_them() -> None:
    assert diff(settings(), settings(), ["127.0.0.1:8443"]) == Changes(certificates_changed=("127.0.0.1:8443",))


def test_what_cannot_change_live_keeps_its_value() -> None:
    old = settings()
    wanted = settings(
        workers=3,
        user="nobody",
        state_dir="/elsewhere",
        health={"address": "127.0.0.1:9"},
        event_log={"path": "/elsewhere/events.log", "level": "debug"},
        max_connections=7,
    )
    kept = keep_what_is_not_live(old, wanted)
    assert (kept.workers, kept.user, kept.state_dir, kept.health) == (old.workers, None, old.state_dir, old.health)
    assert (kept.event_log.path, kept.event_log.level) == (old.event_log.path, "debug")
    assert kept.max_connections == 7
    assert not diff(old, kept).needs_restart
