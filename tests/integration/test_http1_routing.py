"""Which request goes where: misdirected ones, the normal form of paths, redirects of sites and plain listener."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.harness.stage import Stage, open_stage
from tests.unit.tls.pki import Authority

HOST = b"Host: www.example.org\r\n"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def theatre(authority: Authority) -> Iterator[Stage]:
    """Sites of exact and wildcard names, none for any host; certificates that cover not all of them."""

    def configure(urls: Sequence[str]) -> dict[str, Any]:
        first, second = urls
        certificates = [authority.issue("www.example.org", "*.git.example.org"), authority.issue("other.example.org")]
        return {
            "listeners": [{"address": "127.0.0.1:0", "certificates": certificates}],
            "sites": [
                {
                    "hosts": ["www.example.org"],
                    "upstreams": [first],
                    "routes": [{"path": "/api", "upstreams": [second]}],
                    "redirects": [
                        {"path": "/old", "to": "https://new.example.org{uri}"},
                        {"path": "/gone", "to": "https://new.example.org/", "status": 302},
                    ],
                },
                {"hosts": ["*.git.example.org"], "upstreams": [first]},
                {"hosts": ["other.example.org"], "upstreams": [first]},
                {"hosts": ["uncovered.example.org"], "upstreams": [first]},
                {"hosts": ["moved.example.org"], "redirects": [{"path": "/", "to": "https://new.example.org{uri}"}]},
                {"hosts": ["bare.example.org"], "routes": [{"path": "/only", "upstreams": [first]}]},
            ],
        }

    with open_stage(configure, upstreams=2) as stage:
        yield stage


def get(stage: Stage, target: str, host: str = "www.example.org", server_name: str | None = "www.example.org") -> Any:
    client = stage.client(server_name)
    return client.request(f"GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode("latin-1"))


# -- 421


@pytest.mark.parametrize(
    ("server_name", "host", "status"),
    [
        ("www.example.org", "www.example.org", 200),
        ("www.example.org", "WWW.EXAMPLE.ORG:443", 200),
        ("www.example.org", "www.example.org.", 200),
        ("www.example.org", "a.git.example.org", 200),
        ("a.git.example.org", "b.git.example.org", 200),
        ("other.example.org", "other.example.org", 200),
        # no site
        ("www.example.org", "unknown.example.org", 421),
        ("unknown.example.org", "unknown.example.org", 421),
        ("www.example.org", "127.0.0.1", 421),
        # a site, but not of the certificate that was chosen by SNI
        ("www.example.org", "other.example.org", 421),
        ("other.example.org", "www.example.org", 421),
        ("www.example.org", "uncovered.example.org", 421),
        ("a.git.example.org", "a.b.git.example.org", 421),
        # without SNI the first certificate counts
        (None, "www.example.org", 200),
        (None, "other.example.org", 421),
    ],
)
def test_a_host_without_site_or_certificate_is_misdirected(
    stage: Stage, server_name: str | None, host: str, status: int
) -> None:
    before = stage.counter("misdirected")
    assert get(stage, "/", host, server_name).status == status
    assert stage.counter("misdirected") == before + (status == 421)
    assert bool(stage.upstream.wires) == (status == 200)


@pytest.mark.parametrize(
    ("host", "target"), [("moved.example.org", "/"), ("bare.example.org", "/none"), ("other.example.org", "/%2f")]
)
def test_a_misdirected_request_is_told_so_whatever_else_its_answer_would_be(
    stage: Stage, host: str, target: str
) -> None:
    assert get(stage, target, host, "www.example.org").status == 421


def test_a_connection_goes_on_after_a_misdirected_request(stage: Stage) -> None:
    client = stage.client("www.example.org")
    assert client.request(b"GET / HTTP/1.1\r\nHost: other.example.org\r\n\r\n").status == 421
    assert client.request(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n").status == 200
    assert client.request(b"GET / HTTP/1.1\r\nHost: other.example.org\r\n\r\n").status == 421


def test_http_1_0_without_host_is_misdirected_where_no_site_takes_any_host(stage: Stage) -> None:
    assert stage.client("www.example.org").request(b"GET / HTTP/1.0\r\n\r\n").status == 421


def test_with_a_site_for_any_host_no_name_is_misdirected() -> None:
    def configure(urls: Sequence[str]) -> dict[str, Any]:
        return {
            "sites": [
                {"hosts": ["*"], "upstreams": [urls[0]]},
                {"hosts": ["www.example.org"], "upstreams": [urls[1]]},
            ]
        }

    with open_stage(configure, upstreams=2) as stage:
        for host in ("unknown.example.org", "192.0.2.7", "[2001:db8::1]:443", "www.example.org"):
            assert get(stage, "/", host, "another.example.org").status == 200
        stage.strike()


# -- paths


@pytest.mark.parametrize(
    ("asked", "forwarded"),
    [
        ("/", "/"),
        ("/a//b", "/a//b"),
        ("/a/./b", "/a/b"),
        ("/a/x/../b", "/a/b"),
        ("/a/%2e%2E/b", "/b"),
        ("/%61%7e%2d", "/a~-"),
        ("/%c3%a4%20", "/%C3%A4%20"),
        ("/a/..", "/"),
        ("/a?x=%2f..%00&y=%61/../b", "/a?x=%2f..%00&y=%61/../b"),
        ("/a/../b?/../%2e", "/b?/../%2e"),
        ("http://www.example.org/a/../b?q", "/b?q"),
        ("https://www.example.org?q", "/?q"),
    ],
)
def test_what_is_forwarded_is_the_path_in_normal_form(stage: Stage, asked: str, forwarded: str) -> None:
    assert get(stage, asked).status == 200
    assert stage.reached().startswith(f"GET {forwarded} HTTP/1.1\r\n".encode())


@pytest.mark.parametrize(
    ("asked", "forwarded"),
    [
        ("/api", "/api"),
        ("/api/x", "/api/x"),
        ("/api?x", "/api?x"),
        ("/x/../api", "/api"),
        ("/%61pi/x", "/api/x"),
        ("/./api/../api/y", "/api/y"),
        ("/x/%2e%2e/ap%69", "/api"),
    ],
)
def test_what_is_matched_is_what_is_forwarded(stage: Stage, asked: str, forwarded: str) -> None:
    assert get(stage, asked).status == 200
    assert stage.reached(1).startswith(f"GET {forwarded} HTTP/1.1\r\n".encode())
    assert not stage.upstreams[0].wires


@pytest.mark.parametrize("asked", ["/apix", "/api/../x", "/x/api", "/x?/api", "/API"])
def test_a_route_matches_at_segment_boundaries_only(stage: Stage, asked: str) -> None:
    assert get(stage, asked).status == 200
    assert not stage.upstreams[1].wires


@pytest.mark.parametrize(
    "asked",
    ["/a%2fb", "/a%2Fb", "/a%5cb", "/a%5Cb", "/a%00", "/..", "/../a", "/a/../../b", "/%2e%2e/a", "/a\\b", "/a%", "/%zz",
     "/api%2f..%2fsecret"],
)  # fmt: skip
def test_a_path_of_more_than_one_meaning_is_refused(stage: Stage, asked: str) -> None:
    assert get(stage, asked).status == 400
    assert not stage.reached()
    assert not stage.reached(1)


def test_options_of_the_server_is_forwarded(stage: Stage) -> None:
    client = stage.client("www.example.org")
    assert client.request(b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n").status == 200
    assert stage.reached().startswith(b"OPTIONS * HTTP/1.1\r\n")


def test_a_path_that_no_route_takes_is_not_found() -> None:
    def configure(urls: Sequence[str]) -> dict[str, Any]:
        return {"sites": [{"hosts": ["*"], "routes": [{"path": "/only", "upstreams": [urls[0]]}]}]}

    with open_stage(configure) as stage:
        assert get(stage, "/none").status == 404
        assert get(stage, "/only/x").status == 200
        stage.strike()


# -- redirects of a site


@pytest.mark.parametrize(
    ("asked", "status", "location"),
    [
        ("/old", 308, "https://new.example.org/old"),
        ("/old/a?b=c", 308, "https://new.example.org/old/a?b=c"),
        ("/x/../old/%61", 308, "https://new.example.org/old/a"),
        ("/gone/x", 302, "https://new.example.org/"),
    ],
)
def test_a_site_redirects(stage: Stage, asked: str, status: int, location: str) -> None:
    client = stage.client("www.example.org")
    for _ in range(2):
        response = client.request(f"GET {asked} HTTP/1.1\r\nHost: www.example.org\r\n\r\n".encode())
        assert (response.status, response.get("Location")) == (status, location)
    assert not stage.upstream.wires


def test_options_of_the_server_is_redirected_to_the_root() -> None:
    redirect = {"path": "/", "to": "https://new.example.org{uri}"}
    with open_stage(lambda _: {"sites": [{"hosts": ["*"], "redirects": [redirect]}]}) as stage:
        response = stage.ask(b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (response.status, response.get("Location")) == (308, "https://new.example.org/")


# -- the plain listener


def plainly(stage: Stage, request: bytes) -> Any:
    return stage.leave_to_me(stage.appliance.connect_redirect()).request(request, "GET")


@pytest.mark.parametrize(
    ("target", "location"),
    [
        ("/", "/"),
        ("/a/../b?q=%2f", "/b?q=%2f"),
        ("/old", "/old"),
        ("http://www.example.org/x", "/x"),
    ],
)
def test_the_plain_listener_redirects_to_the_same_place_over_https(stage: Stage, target: str, location: str) -> None:
    response = plainly(stage, f"GET {target} HTTP/1.1\r\nHost: www.example.org:80\r\n\r\n".encode())
    port = stage.appliance.port
    assert (response.status, response.get("Location")) == (308, f"https://www.example.org:{port}{location}")
    assert not stage.upstream.wires


def test_the_plain_listener_serves_one_request_after_another(stage: Stage) -> None:
    client = stage.leave_to_me(stage.appliance.connect_redirect())
    for _ in range(2):
        assert client.request(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n").status == 308
    last = client.request(b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 3\r\n\r\nabc")
    assert (last.status, last.get("Connection")) == (308, "close")
    assert client.at_end()


@pytest.mark.parametrize(
    ("request_head", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: evil.example.net\r\n\r\n", 421),
        (b"GET / HTTP/1.0\r\n\r\n", 421),
        (b"GET /..%2f HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"GET /../x HTTP/1.1\r\n" + HOST + b"\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a@b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\nHost: www.example.org\n\n", 400),
        (b"CONNECT www.example.org:443 HTTP/1.1\r\n" + HOST + b"\r\n", 501),
        (b"GET / HTTP/3.0\r\n" + HOST + b"\r\n", 505),
    ],
)
def test_the_plain_listener_sends_nobody_elsewhere(stage: Stage, request_head: bytes, status: int) -> None:
    response = plainly(stage, request_head)
    assert (response.status, response.get("Location")) == (status, None)


def test_https_port_names_the_port_in_location() -> None:
    for https_port, authority_part in ((443, "www.example.org"), (8443, "www.example.org:8443")):
        config = {"redirect": {"https_port": https_port}}
        with open_stage(lambda _, config=config: config) as stage:  # type: ignore[misc]
            response = plainly(stage, b"GET /x HTTP/1.1\r\n" + HOST + b"\r\n")
            assert response.get("Location") == f"https://{authority_part}/x"
            stage.strike()
