"""Single values: addresses, upstreams, hosts, fields, paths. Good ones in normal form, bad ones with advice."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.config.address import parse_address
from proxy.config.names import (
    FORBIDDEN_FIELDS,
    check_field_name,
    check_field_value,
    check_protocol,
    normalize_host,
    normalize_network,
)
from proxy.config.paths import (
    check_log_path,
    check_redirect_target,
    check_socket_path,
    normalize_route_path,
    resolve_file,
)
from proxy.config.refusal import RefusedError, shown
from proxy.config.upstream_address import UpstreamAddress, parse_upstream
from proxy.errors import ConfigError
from proxy.route.path import normalize_path


def address(text: str) -> str:
    return str(parse_address(text))


def upstream(text: str) -> str:
    return str(parse_upstream(text))


@pytest.mark.parametrize(
    ("text", "host", "port", "family"),
    [
        ("0.0.0.0:443", "0.0.0.0", 443, socket.AF_INET),
        ("[::]:443", "::", 443, socket.AF_INET6),
        ("[2001:DB8:0::1]:1", "2001:db8::1", 1, socket.AF_INET6),
        ("192.0.2.1:65535", "192.0.2.1", 65535, socket.AF_INET),
    ],
)
def test_address(text: str, host: str, port: int, family: socket.AddressFamily) -> None:
    parsed = parse_address(text)
    assert (parsed.host, parsed.port, parsed.family) == (host, port, family)
    assert parse_address(str(parsed)) == parsed
    assert parsed.is_wildcard == (host in ("0.0.0.0", "::"))


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("http://127.0.0.1:3000", UpstreamAddress("http", "127.0.0.1", 3000, "")),
        ("HTTP://Backend.Example.org:1", UpstreamAddress("http", "backend.example.org", 1, "")),
        ("https://backend.example.org", UpstreamAddress("https", "backend.example.org", 443, "")),
        ("http://backend", UpstreamAddress("http", "backend", 80, "")),
        ("http://[2001:db8::1]:3000", UpstreamAddress("http", "2001:db8::1", 3000, "")),
        ("http://[::1]", UpstreamAddress("http", "::1", 80, "")),
        ("unix:/run/app.sock", UpstreamAddress("unix", "", 0, "/run/app.sock")),
    ],
)
def test_upstream(text: str, parsed: UpstreamAddress) -> None:
    assert parse_upstream(text) == parsed
    assert parse_upstream(str(parsed)) == parsed


@pytest.mark.parametrize(
    ("function", "text", "normal"),
    [
        (normalize_host, "Git.Example.ORG", "git.example.org"),
        (normalize_host, "example.org.", "example.org"),
        (normalize_host, "*.Example.org", "*.example.org"),
        (normalize_host, "*", "*"),
        (normalize_host, "bücher.example.org", "xn--bcher-kva.example.org"),
        (normalize_host, "XN--BCHER-KVA.example.org", "xn--bcher-kva.example.org"),
        (normalize_host, "my_host", "my_host"),
        (normalize_host, "192.0.2.1", "192.0.2.1"),
        (normalize_host, "[2001:DB8::1]", "2001:db8::1"),
        (normalize_host, "a" * 63 + ".example.org", "a" * 63 + ".example.org"),
        (normalize_network, "192.0.2.7", "192.0.2.7"),
        (normalize_network, "2001:DB8:0::/32", "2001:db8::/32"),
        (check_field_name, "X-Frame-Options", "X-Frame-Options"),
        (check_field_value, "", ""),
        (check_field_value, "a b\tc", "a b\tc"),
        (check_protocol, "WebSocket", "websocket"),
        (normalize_route_path, "/", "/"),
        (normalize_route_path, "/api/", "/api"),
        (normalize_route_path, "/%7euser/%c3%a4", "/~user/%C3%A4"),
        (normalize_route_path, "/ä", "/%C3%A4"),
        (normalize_route_path, "/a;b=c,d/@e", "/a;b=c,d/@e"),
        (check_redirect_target, "https://example.org:8443{uri}", "https://example.org:8443{uri}"),
        (check_redirect_target, "http://[2001:db8::1]/", "http://[2001:db8::1]/"),
        (check_redirect_target, "/new{uri}", "/new{uri}"),
        (check_socket_path, "/" + "a" * 106, "/" + "a" * 106),
    ],
)
def test_normal_form(function: Callable[[str], str], text: str, normal: str) -> None:
    assert function(text) == normal
    assert function(normal) == normal, "the normal form is its own normal form"


@pytest.mark.parametrize(
    ("function", "text", "advice"),
    [
        (address, "example.org:443", "names are not resolved here"),
        (address, "localhost:443", "127.0.0.1 or [::1]"),
        (address, "443", 'the address is missing: write "0.0.0.0:443"'),
        (address, "99999", 'the port "99999" is not a number from 1 to 65535'),
        (address, ":99999", 'write "0.0.0.0:443"'),
        (address, "8443x", "is neither an address nor a port"),
        (address, ":443", 'write "0.0.0.0:443"'),
        (address, "*:443", 'write "0.0.0.0:443"'),
        (address, "0.0.0.0", "the port is missing"),
        (address, "0.0.0.0:", "the port is missing"),
        (address, "0.0.0.0:0", "not a number from 1 to 65535"),
        (address, "0.0.0.0:65536", "not a number from 1 to 65535"),
        (address, "0.0.0.0:٣", "not a number from 1 to 65535"),
        (address, "0.0.0.0:+1", "not a number from 1 to 65535"),
        (address, ":::443", "in brackets"),
        (address, "[::]", "the port is missing"),
        (address, "[::", "the bracket is not closed"),
        (address, "[::]443", "a colon and the port come after the bracket"),
        (address, "[127.0.0.1]:443", "only an IPv6 address stands in brackets"),
        (address, "[fe80::1%eth0]:443", "zone"),
        (address, "[::ffff:192.0.2.1]:443", "write 192.0.2.1"),
        (address, "192.0.2.01:443", "is not an IP address"),
        (address, "", "the port is missing"),
        (upstream, "127.0.0.1:3000", 'write "http://127.0.0.1:3000"'),
        (upstream, "/run/app.sock", 'write "unix:/run/app.sock"'),
        (upstream, "unix:///run/app.sock", 'write "unix:/run/app.sock"'),
        (upstream, "unix:run/app.sock", 'begins with "/"'),
        (upstream, "http://example.org/path", 'write "http://example.org"'),
        (upstream, "http://example.org/", 'write "http://example.org"'),
        (upstream, "http://example.org?x", "has no path"),
        (upstream, "http://user:secret@example.org", "request_headers"),
        (upstream, "http://", "the host is missing"),
        (upstream, "http://2001:db8::1:80", "in brackets"),
        (upstream, "http://[2001:db8::g]:80", "is not an IPv6 address"),
        (upstream, "http://[::1]x", "in brackets"),
        (upstream, "http://example.org:http", "not a number from 1 to 65535"),
        (upstream, "http://exa mple.org", "is not a DNS name"),
        (upstream, "ws://example.org", "write http://"),
        (upstream, "ftp://example.org", '"http://host:port"'),
        (normalize_host, "https://example.org", "only the name"),
        (normalize_host, "example.org/path", "only the name"),
        (normalize_host, "example.org:443", "leave the port out"),
        (normalize_host, "git*.example.org", '"*.example.org"'),
        (normalize_host, "*.*.example.org", '"*.example.org"'),
        (normalize_host, "*.192.0.2.1", "no wildcard"),
        (normalize_host, "300.0.2.1", "is not an IPv4 address"),
        (normalize_host, "", "is not a DNS name"),
        (normalize_host, "a..example.org", "is not a DNS name"),
        (normalize_host, "-a.example.org", "is not a DNS name"),
        (normalize_host, "a" * 64 + ".example.org", "is not a DNS name"),
        (normalize_host, "a." * 127 + "org", "at most 253"),
        (normalize_host, "straße.example.org", "xn--"),
        (normalize_host, "ex\u0000ample.org", "is not a DNS name"),
        (normalize_network, "10.0.0.1/8", "write 10.0.0.0/8"),
        (normalize_network, "10.0.0.0/255.0.0.0", "write the length of the prefix: 10.0.0.0/8"),
        (normalize_network, "fe80::1%eth0", "zone"),
        (normalize_network, "proxy.example.org", "names are not resolved"),
        (normalize_network, "10.0.0.0/33", "an IP address or network"),
        (check_field_name, "X Y", "letters, digits and hyphens"),
        (check_field_name, "X-Y:", "leave out the colon"),
        (check_field_name, "", "letters, digits and hyphens"),
        (check_field_name, "Host", "preserve_host"),
        (check_field_name, "CONTENT-LENGTH", "where the message ends"),
        (check_field_value, "a\r\nSet-Cookie: b", "line break"),
        (check_field_value, "a\0b", "NUL"),
        (check_field_value, "a\x1bb", "control character"),
        (check_field_value, " a", "a space at an end"),
        (check_field_value, "ä", "outside ASCII"),
        (check_protocol, "h2c", "never spoken through an upgrade"),
        (check_protocol, "a b", "Upgrade field"),
        (normalize_route_path, "api", 'write "/api"'),
        (normalize_route_path, "", "begins with"),
        (normalize_route_path, "/api?x=y", "leave out the query"),
        (normalize_route_path, "/api/*", "without a star"),
        (normalize_route_path, "https://example.org/api", "the site's hosts"),
        (normalize_route_path, "/a/../b", '".."'),
        (normalize_route_path, "/a/%2e%2e/b", '".."'),
        (normalize_route_path, "/a%2Fb", "encoded slash"),
        (normalize_route_path, "/a%5cb", "encoded slash"),
        (normalize_route_path, "/a\\b", "backslash"),
        (normalize_route_path, "/a%zz", "two hexadecimal digits"),
        (normalize_route_path, "/%%34%31", "two hexadecimal digits"),
        (normalize_route_path, "/a b", "percent-encode"),
        (check_redirect_target, "/{uri}", "choose the host"),
        (check_redirect_target, "{uri}", "choose the host"),
        (check_redirect_target, "//example.org{uri}", "choose the host"),
        (check_redirect_target, "https://{uri}", "https://host/path"),
        (check_redirect_target, "https:/{uri}", "https://host/path"),
        (check_redirect_target, "javascript:alert(1)", "https://host/path"),
        (check_redirect_target, "https://example.org:x/", "https://host/path"),
        (check_redirect_target, "https://example.org/{path}", "only placeholder"),
        (check_redirect_target, "/a\r\nSet-Cookie: b", "percent-encode"),
        (check_redirect_target, "", "percent-encode"),
        (check_socket_path, "/" + "a" * 107, "at most 107 bytes"),
        (check_socket_path, "/a\nb", "no control characters"),
        (check_socket_path, "a", 'begins with "/"'),
    ],
)
def test_refused_with_advice(function: Callable[[str], str], text: str, advice: str) -> None:
    with pytest.raises(RefusedError) as caught:
        function(text)
    message = str(caught.value)
    assert advice in message
    assert message.startswith("found ")
    assert "; wanted " in message
    assert message.isprintable(), "one line, nothing that a terminal obeys"
    assert isinstance(caught.value, ConfigError), "the command line prints it without a traceback"


def test_secrets_are_not_shown() -> None:
    for function, text in ((check_field_value, "Bearer hunter2\n"), (upstream, "http://user:hunter2@example.org")):
        with pytest.raises(RefusedError) as caught:
            function(text)
        assert "hunter2" not in str(caught.value)


def test_fields_of_framing_and_connection_are_forbidden_in_any_case() -> None:
    for name in ("Connection", "Transfer-Encoding", "Content-Length", "Host", "Upgrade", "TE", "Keep-Alive"):
        assert name.lower() in FORBIDDEN_FIELDS
        for spelling in (name, name.upper(), name.lower()):
            with pytest.raises(RefusedError):
                check_field_name(spelling)


def test_files_are_relative_to_the_folder_of_the_configuration() -> None:
    assert resolve_file("tls/../key.pem", "/etc/reverse-proxy") == "/etc/reverse-proxy/key.pem"
    assert resolve_file("/key.pem", "/etc/reverse-proxy") == "/key.pem"
    assert resolve_file("key.pem", None) == "key.pem"
    with pytest.raises(RefusedError, match="text of a PEM file"):
        resolve_file("-----BEGIN PRIVATE KEY-----\nMII", "/etc")


def test_log_paths() -> None:
    assert check_log_path("stdout", ("stdout", "off")) == "stdout"
    assert check_log_path("/var/log/x", ("stdout",)) == "/var/log/x"
    with pytest.raises(RefusedError, match="events are never switched off"):
        check_log_path("off", ("stdout", "stderr"))
    with pytest.raises(RefusedError, match='"stdout" or an absolute path'):
        check_log_path("access.log", ("stdout",))


@pytest.mark.parametrize("function", [address, upstream, normalize_host, normalize_network, normalize_route_path])
@given(text=st.text(alphabet=st.one_of(st.characters(), st.sampled_from("[]:./%*@0123456789af"))))
def test_any_text_is_normal_or_refused(function: Callable[[str], str], text: str) -> None:
    try:
        normal = function(text)
    except RefusedError as refused:
        message = str(refused)
    else:
        assert function(normal) == normal
        return
    assert message.isprintable()


@given(st.text(alphabet=st.one_of(st.characters(), st.sampled_from("/%.~aF2e"))).map(lambda text: "/" + text))
def test_a_route_path_is_as_requests_are_matched(text: str) -> None:
    try:
        path = normalize_route_path(text)
    except RefusedError:
        return
    assert normalize_path(path.encode("ascii")) == path.encode("ascii")


@given(
    st.one_of(st.text(), st.integers(), st.floats(), st.booleans(), st.dates(), st.lists(st.text()), st.just({"a": 1}))
)
def test_what_is_shown_is_one_short_printable_line(value: object) -> None:
    text = shown(value)
    assert text.isprintable()
    assert text.isascii()
    assert len(text) < 600
    assert shown(10**5000) == "an integer of too many digits"
