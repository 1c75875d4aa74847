"""What of a request's and a response's head goes on, what is removed, what is added."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from tests.harness import RawUpstream, answering, wait_until
from tests.harness.stage import Stage, open_stage
from tests.integration.conftest import fields_of

TRUSTED = "127.0.0.2"
"""A loopback address that the tests connect from when they play a load balancer."""


@pytest.fixture(scope="module")
def theatre() -> Iterator[Stage]:
    def configure(urls: Sequence[str]) -> dict[str, Any]:
        (url,) = urls
        return {
            "trusted_proxies": ["127.0.0.2", "192.0.2.0/24", "2001:db8::/32"],
            "sites": [
                {"hosts": ["*"], "upstreams": [url]},
                {
                    "hosts": ["edits.example.org"],
                    "upstreams": [url],
                    "request_headers": {"set": {"X-Set": "ours", "X-New": "new"}, "remove": ["Accept-Language"]},
                    "response_headers": {
                        "set": {"X-Frame-Options": "DENY", "Cache-Control": "no-store"},
                        "remove": ["Server"],
                    },
                },
                {"hosts": ["rewritten.example.org"], "upstreams": [url], "preserve_host": False},
            ],
        }

    with open_stage(configure) as stage:
        yield stage


Forwarded = Callable[..., list[tuple[str, str]]]


@pytest.fixture
def forwarded(stage: Stage) -> Forwarded:
    """``forwarded(lines, source=...)``: the fields that the upstream saw of a GET with these lines."""

    def get(*lines: str, host: str = "www.example.org", source: str | None = None) -> list[tuple[str, str]]:
        request = "\r\n".join(("GET / HTTP/1.1", f"Host: {host}", *lines, "", "")).encode("latin-1")
        client = stage.client(source=source)
        assert client.request(request).status == 200
        return fields_of(bytes(stage.upstream.next_wire().received))

    return get


def values(fields: list[tuple[str, str]], name: str) -> list[str]:
    return [value for key, value in fields if key.lower() == name.lower()]


# -- fields with an underscore, and Proxy


def test_names_with_an_underscore_are_dropped_and_counted(stage: Stage, forwarded: Forwarded) -> None:
    before = stage.counter("underscore_fields_dropped")
    fields = forwarded("X_Real_IP: 192.0.2.9", "Remote_User: root", "X-Fine: yes")
    assert values(fields, "X-Fine") == ["yes"]
    assert not [name for name, _ in fields if "_" in name]
    assert stage.counter("underscore_fields_dropped") == before + 2


def test_dropped_underscores_are_counted_for_each_request_also_when_the_head_was_seen_before(
    stage: Stage, forwarded: Forwarded
) -> None:
    before = stage.counter("underscore_fields_dropped")
    forwarded("A_B: 1")
    stage.ask(b"GET / HTTP/1.1\r\nHost: www.example.org\r\nA_B: 1\r\n\r\n")
    assert stage.counter("underscore_fields_dropped") == before + 2


def test_the_field_proxy_is_removed(forwarded: Forwarded) -> None:
    fields = forwarded("Proxy: http://192.0.2.66:8080", "proxy: x")
    assert not values(fields, "Proxy")


# -- hop by hop


@pytest.mark.parametrize(
    "line",
    [
        "Connection: keep-alive",
        "Proxy-Connection: keep-alive",
        "Keep-Alive: timeout=5",
        "TE: trailers",
        "Upgrade: h2c",
        "HTTP2-Settings: AAMAAABkAAQAAP__",
    ],
)
def test_hop_by_hop_fields_are_removed_whether_connection_names_them_or_not(forwarded: Forwarded, line: str) -> None:
    name = line.partition(":")[0]
    assert not values(forwarded(line, "X-Fine: yes"), name)


def test_fields_that_connection_names_are_removed(forwarded: Forwarded) -> None:
    fields = forwarded("Connection: X-Secret, x-other", "X-Secret: 1", "X-Other: 2", "X-Third: 3")
    assert not values(fields, "X-Secret")
    assert not values(fields, "X-Other")
    assert values(fields, "X-Third") == ["3"]


def test_connection_cannot_remove_what_the_proxy_adds(forwarded: Forwarded) -> None:
    ours = ("X-Forwarded-For", "X-Forwarded-Proto", "X-Forwarded-Host", "X-Forwarded-Port", "X-Real-IP", "Forwarded",
            "Via", "X-Request-Id", "Host")  # fmt: skip
    fields = forwarded("Connection: close, " + ", ".join(ours), "X-Forwarded-For: 192.0.2.66")
    for name in ours:
        assert len(values(fields, name)) == 1, name
    assert values(fields, "X-Forwarded-For") == ["127.0.0.1"]


def test_connection_cannot_remove_the_framing(stage: Stage) -> None:
    stage.ask(b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close, Content-Length\r\nContent-Length: 3\r\n\r\nabc")
    received = stage.reached()
    assert b"\r\nContent-Length: 3\r\n" in received
    assert received.endswith(b"\r\n\r\nabc")


def test_hop_by_hop_fields_of_the_response_are_removed(stage: Stage) -> None:
    stage.play(
        answering(
            b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: keep-alive, X-Hop\r\nX-Hop: 1\r\n"
            b"Keep-Alive: timeout=9\r\nProxy-Connection: x\r\nX-End: 2\r\n\r\nok"
        )
    )
    response = stage.ask(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    names = {name.lower() for name, _ in response.fields}
    assert "x-end" in names
    assert not names & {"connection", "x-hop", "keep-alive", "proxy-connection"}


# -- who the client is


def test_what_a_stranger_says_of_itself_is_replaced(stage: Stage, forwarded: Forwarded) -> None:
    fields = forwarded(
        "Forwarded: for=192.0.2.66",
        "X-Forwarded-For: 192.0.2.66",
        "X-Forwarded-Proto: http",
        "X-Forwarded-Host: evil.example.org",
        "X-Forwarded-Port: 1",
        "X-Forwarded-Prefix: /evil",
        "X-Real-IP: 192.0.2.66",
        "X-Request-Id: chosen-by-a-stranger",
    )
    port = str(stage.appliance.port)
    assert values(fields, "X-Forwarded-For") == ["127.0.0.1"]
    assert values(fields, "X-Real-IP") == ["127.0.0.1"]
    assert values(fields, "X-Forwarded-Proto") == ["https"]
    assert values(fields, "X-Forwarded-Host") == ["www.example.org"]
    assert values(fields, "X-Forwarded-Port") == [port]
    assert values(fields, "Forwarded") == ['for=127.0.0.1;proto=https;host="www.example.org"']
    assert values(fields, "X-Forwarded-Prefix") == []
    (request_id,) = values(fields, "X-Request-Id")
    assert re.fullmatch("[0-9a-f]{32}", request_id)


def test_each_request_has_an_id_of_its_own(stage: Stage) -> None:
    client = stage.client()
    for _ in range(3):
        client.request(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    ids = re.findall(rb"X-Request-Id: (\w+)\r\n", stage.reached())
    assert len(set(ids)) == 3


def test_what_a_trusted_proxy_says_is_believed_and_extended(forwarded: Forwarded) -> None:
    fields = forwarded(
        "Forwarded: for=198.51.100.7;proto=http",
        "X-Forwarded-For: 198.51.100.7, 192.0.2.1",
        "X-Forwarded-Proto: http",
        "X-Forwarded-Host: public.example.org",
        "X-Forwarded-Port: 8080",
        "X-Real-IP: 198.51.100.7",
        "X-Request-Id: balancer-42",
        source=TRUSTED,
    )
    assert values(fields, "X-Forwarded-For") == [f"198.51.100.7, 192.0.2.1, {TRUSTED}"]
    assert values(fields, "Forwarded") == [
        f'for=198.51.100.7;proto=http, for={TRUSTED};proto=https;host="www.example.org"'
    ]
    assert values(fields, "X-Forwarded-Proto") == ["http"]
    assert values(fields, "X-Forwarded-Host") == ["public.example.org"]
    assert values(fields, "X-Forwarded-Port") == ["8080"]
    assert values(fields, "X-Real-IP") == ["198.51.100.7"]
    assert values(fields, "X-Request-Id") == ["balancer-42"]


def test_several_fields_of_a_trusted_proxy_are_one_list(forwarded: Forwarded) -> None:
    fields = forwarded("X-Forwarded-For: 198.51.100.7", "X-Forwarded-For: 192.0.2.1", source=TRUSTED)
    assert values(fields, "X-Forwarded-For") == [f"198.51.100.7, 192.0.2.1, {TRUSTED}"]


def test_a_trusted_proxy_that_says_nothing_gets_the_same_as_a_stranger(stage: Stage, forwarded: Forwarded) -> None:
    fields = forwarded(source=TRUSTED)
    assert values(fields, "X-Forwarded-For") == [TRUSTED]
    assert values(fields, "X-Real-IP") == [TRUSTED]
    assert values(fields, "X-Forwarded-Proto") == ["https"]
    assert values(fields, "X-Forwarded-Port") == [str(stage.appliance.port)]
    assert values(fields, "X-Forwarded-Host") == ["www.example.org"]


@pytest.mark.parametrize(
    ("chain", "client"),
    [
        ("198.51.100.7", "198.51.100.7"),
        ("203.0.113.66, 198.51.100.7", "198.51.100.7"),
        ("198.51.100.7, 192.0.2.1, 192.0.2.2", "198.51.100.7"),
        ("198.51.100.7, 2001:db8::1", "198.51.100.7"),
        ("192.0.2.1", "192.0.2.1"),
        ("unknown", TRUSTED),
        ("198.51.100.7, not an address, 192.0.2.1", "192.0.2.1"),
    ],
)
def test_the_client_is_the_first_address_from_the_right_that_is_not_trusted(
    forwarded: Forwarded, chain: str, client: str
) -> None:
    assert values(forwarded(f"X-Forwarded-For: {chain}", source=TRUSTED), "X-Real-IP") == [client]


def test_the_access_log_names_the_client_that_a_trusted_proxy_names(stage: Stage) -> None:
    lines = "X-Forwarded-For: 198.51.100.7, 192.0.2.1\r\nX-Request-Id: balancer-99\r\n"
    for source in (TRUSTED, None):
        request = f"GET / HTTP/1.1\r\nHost: a\r\n{lines}\r\n".encode()
        assert stage.client(source=source).request(request).status == 200

    def remotes() -> list[str]:
        logged = [line.split() for line in stage.appliance.access_lines()]
        return [line[0] for line in logged if "balancer-99" in line]

    wait_until(lambda: remotes() == ["198.51.100.7"], "the line with the client's address")


def test_via_is_added_after_those_that_were_there(forwarded: Forwarded) -> None:
    assert values(forwarded("Via: 1.0 before"), "Via") == ["1.0 before", "1.1 reverse-proxy"]


# -- edits


def test_request_headers_are_set_and_removed(forwarded: Forwarded) -> None:
    fields = forwarded("X-Set: theirs", "x-set: again", "Accept-Language: de", "Accept: */*", host="edits.example.org")
    assert values(fields, "X-Set") == ["ours"]
    assert values(fields, "X-New") == ["new"]
    assert values(fields, "Accept-Language") == []
    assert values(fields, "Accept") == ["*/*"]


def test_connection_cannot_remove_a_field_that_the_operator_sets(forwarded: Forwarded) -> None:
    assert values(forwarded("Connection: X-Set", host="edits.example.org"), "X-Set") == ["ours"]


def test_response_headers_are_set_and_removed(stage: Stage) -> None:
    stage.play(
        answering(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nServer: s\r\nCache-Control: public\r\nETag: x\r\n\r\nok")
    )
    response = stage.ask(b"GET / HTTP/1.1\r\nHost: edits.example.org\r\n\r\n")
    assert response.get_all("X-Frame-Options") == ["DENY"]
    assert response.get_all("Cache-Control") == ["no-store"]
    assert response.get_all("Server") == []
    assert response.get_all("ETag") == ["x"]


def test_the_same_response_is_edited_as_each_site_says(stage: Stage) -> None:
    """Heads that were seen before are not worked out again; what is kept belongs to a site."""
    dated = b"HTTP/1.1 200 OK\r\nDate: Sun, 06 Nov 1994 08:49:37 GMT\r\nServer: s\r\nContent-Length: 2\r\n\r\nok"
    stage.play(answering(dated))
    client = stage.client()
    for _ in range(2):
        edited = client.request(b"GET / HTTP/1.1\r\nHost: edits.example.org\r\n\r\n")
        plain = client.request(b"GET / HTTP/1.1\r\nHost: www.example.org\r\n\r\n")
        assert (edited.get("Server"), edited.get("X-Frame-Options")) == (None, "DENY")
        assert (plain.get("Server"), plain.get("X-Frame-Options")) == ("s", None)


def test_edits_of_one_site_do_not_reach_another(forwarded: Forwarded) -> None:
    fields = forwarded("Accept-Language: de")
    assert values(fields, "Accept-Language") == ["de"]
    assert values(fields, "X-New") == []


# -- Host


def test_the_upstream_sees_the_clients_host(forwarded: Forwarded) -> None:
    assert values(forwarded(host="WWW.Example.ORG:8443"), "Host") == ["WWW.Example.ORG:8443"]


def test_with_preserve_host_false_it_sees_its_own_address(stage: Stage, forwarded: Forwarded) -> None:
    fields = forwarded(host="rewritten.example.org")
    assert values(fields, "Host") == [f"127.0.0.1:{stage.upstream.port}"]
    assert values(fields, "X-Forwarded-Host") == ["rewritten.example.org"]


def test_everything_else_passes_in_order_and_spelling(forwarded: Forwarded) -> None:
    lines = [
        "Accept: a",
        "X-Many: 1",
        "aCCept-EncoDing: b",
        "X-Many: 2",
        "Cookie: a=b; c=d",
        "Authorization: Basic eA==",
    ]
    fields = forwarded(*lines)
    assert [f"{name}: {value}" for name, value in fields if f"{name}: {value}" in lines] == lines


def test_a_response_without_a_date_gets_one_and_one_with_a_date_keeps_it(stage: Stage) -> None:
    dated = b"HTTP/1.1 200 OK\r\nDate: Sun, 06 Nov 1994 08:49:37 GMT\r\nContent-Length: 0\r\n\r\n"
    stage.play(answering(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", dated))
    client = stage.client()
    first, second = (client.request(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n") for _ in range(2))
    assert re.fullmatch(r"\w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT", first.get("Date") or "")
    assert second.get_all("Date") == ["Sun, 06 Nov 1994 08:49:37 GMT"]


def test_underscores_in_headers_true_keeps_them(upstream: Callable[..., RawUpstream]) -> None:
    raw = upstream()
    config = {"underscores_in_headers": True, "sites": [{"hosts": ["*"], "upstreams": [raw.url]}]}
    with open_stage(lambda _: config) as stage:
        assert stage.ask(b"GET / HTTP/1.1\r\nHost: a\r\nX_Under: 1\r\n\r\n").status == 200
        assert values(fields_of(bytes(raw.wires[0].received)), "X_Under") == ["1"]
        assert stage.counter("underscore_fields_dropped") == 0
