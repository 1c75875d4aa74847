"""Who may come: the top level's lists close connections, a site's answer 403; lists change with a reload."""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable

import pytest

from tests.conftest import StartAppliance
from tests.harness.appliance import Appliance, cli
from tests.harness.reloading import refused, reload
from tests.harness.upstream import RawUpstream

GET = b"GET %s HTTP/1.1\r\nHost: %s\r\n%s\r\n"
GONE = (ConnectionResetError, BrokenPipeError, ssl.SSLEOFError, ssl.SSLError)


def get(one: Appliance, source: str = "127.0.0.1", host: bytes = b"a.test", fields: bytes = b"") -> int:
    with one.connect(source=source) as client:
        return client.request(GET % (b"/", host, fields)).status


def sites(url: str) -> list[dict[str, object]]:
    return [
        {"hosts": ["a.test", "*"], "upstreams": [url]},
        {"hosts": ["b.test"], "upstreams": [url], "deny": ["all"], "allow": ["127.0.0.2"]},
    ]


def test_who_is_denied_has_no_connection(appliance: StartAppliance, upstream: Callable[..., RawUpstream]) -> None:
    config = {"sites": sites(upstream().url), "deny": ["127.0.0.0/28"], "allow": ["127.0.0.1"], "workers": 2}
    one = appliance(config)
    assert get(one) == 200
    for source in ("127.0.0.2", "127.0.0.15"):
        with pytest.raises(GONE):
            get(one, source)
    assert get(one, "127.0.0.16") == 200
    totals = one.status()["totals"]
    assert (totals["connections_denied"], totals["connections_open"]) == (2, 0)
    reasons = {(found["address"], found["reason"]) for found in _why(one)}
    assert reasons == {("127.0.0.2", "denied"), ("127.0.0.15", "denied")}
    assert not any(" 403 " in line for line in one.access_lines())


def test_a_site_answers_403(appliance: StartAppliance, upstream: Callable[..., RawUpstream]) -> None:
    one = appliance({"sites": sites(upstream().url)})
    assert [get(one, host=b"b.test"), get(one, "127.0.0.2", b"b.test"), get(one)] == [403, 200, 200]
    assert one.status()["totals"]["denied"] == 1
    assert [(found["status"], found["reason"]) for found in _why(one)] == [(403, "denied")]


def test_who_comes_through_a_trusted_proxy_is_answered(
    appliance: StartAppliance, upstream: Callable[..., RawUpstream]
) -> None:
    config = {"sites": sites(upstream().url), "deny": ["192.0.2.0/24"], "trusted_proxies": ["127.0.0.1"]}
    one = appliance(config)
    found = [get(one, fields=b"X-Forwarded-For: %b\r\n" % client) for client in (b"192.0.2.7", b"198.51.100.7")]
    assert found == [403, 200]
    spellings = (b"192.0.2.7:4711", b"::ffff:192.0.2.7", b"192.0.2.7, ::ffff:127.0.0.1", b"192.0.2.7,")
    assert [get(one, fields=b"X-Forwarded-For: %b\r\n" % client) for client in spellings] == [403] * 4
    # From elsewhere the field is not believed.
    assert get(one, "127.0.0.9", fields=b"X-Forwarded-For: 192.0.2.7\r\n") == 200


def test_a_ban_counts_at_once(appliance: StartAppliance, upstream: Callable[..., RawUpstream]) -> None:
    one = appliance({"sites": sites(upstream().url), "workers": 2})
    banned = one.folder / "banned.txt"
    banned.write_text("# by hand\n127.0.0.5   # noisy\n\n2001:db8::/32\n")
    with one.connect(source="127.0.0.5") as open_before, one.connect() as good:
        assert open_before.request(GET % (b"/", b"a.test", b"")).status == 200
        assert good.request(GET % (b"/", b"a.test", b"")).status == 200
        reload(one, deny=["file:" + str(banned)])
        assert open_before.at_end()
        assert good.request(GET % (b"/", b"a.test", b"")).status == 200
    with pytest.raises(GONE):
        get(one, "127.0.0.5")
    banned.write_text("127.0.0.6\n")
    assert get(one, "127.0.0.6") == 200
    reload(one)
    assert get(one, "127.0.0.5") == 200
    with pytest.raises(GONE):
        get(one, "127.0.0.6")


def test_a_bad_list_refuses_the_reload_with_its_line(
    appliance: StartAppliance, upstream: Callable[..., RawUpstream]
) -> None:
    one = appliance({"sites": sites(upstream().url)})
    banned = one.folder / "banned.txt"
    banned.write_text("127.0.0.5\nexample.org\n")
    (error,) = refused(one, deny=["file:" + str(banned)])
    assert f'deny[0]: found "example.org" at {banned}:2; wanted ' in error
    (error,) = refused(one, deny=["file:" + str(one.folder / "none")])
    assert "cannot be read: No such file" in error
    (error,) = refused(one, deny=[], allow=["127.0.0.1"])
    assert 'deny = ["all"]' in error


def _why(one: Appliance) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(cli("why", "--json", "--socket", one.admin_socket).stdout)["refusals"]
    return found
