"""Whole files: every kind of error with its line, all at once, and never anything but Settings or ConfigError."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from proxy.config.load import load_mapping, load_settings, load_text
from proxy.config.schema import Settings
from proxy.errors import EXIT_USAGE, ConfigError

SITE = """
[[sites]]
hosts = ["git.example.org"]
upstreams = ["http://127.0.0.1:3000"]
"""


def load(text: str) -> Settings:
    return load_text(text, file="config.toml", base_dir="/etc/reverse-proxy")


def errors(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert caught.value.exit_code == EXIT_USAGE
    message = str(caught.value)
    for word in ("pydantic", "Input should", "http://errors", "https://errors", "validation error", "Traceback"):
        assert word not in message
    return message.splitlines()


def only_error(text: str) -> str:
    lines = errors(text)
    assert len(lines) == 1, lines
    return lines[0]


def test_a_good_file() -> None:
    settings = load(
        """
        max_connections = "auto"
        trusted_proxies = ["2001:DB8::/32"]
        [[listeners]]
        address = "[0::0]:443"
        certificates = [{ chain = "tls/chain.pem", key = "/keys/key.pem" }]
        [[sites]]
        hosts = ["GIT.example.org", "*"]
        upstreams = ["http://127.0.0.1:3000"]
        write_timeout_secs = 5
        [[sites.routes]]
        path = "/%7eapi/"
        upstream_tls = { ca = "ca.pem" }
        """
    )
    listener, site = settings.listeners[0], settings.sites[0]
    assert settings.max_connections == settings.upstream_connections == "auto"
    assert settings.trusted_proxies == ("2001:db8::/32",)
    assert listener.address == "[::]:443"
    assert (listener.certificates[0].chain, listener.certificates[0].key) == (
        "/etc/reverse-proxy/tls/chain.pem",
        "/keys/key.pem",
    )
    assert site.hosts == ("git.example.org", "*")
    assert site.write_timeout_secs == 5.0
    assert site.routes[0].path == "/~api"
    assert site.routes[0].upstream_tls is not None
    assert site.routes[0].upstream_tls.ca == "/etc/reverse-proxy/ca.pem"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        # Unknown keys.
        ("max_conections = 1" + SITE, "config.toml:1: unknown key `max_conections`: did you mean `max_connections`?"),
        (
            SITE + "max_connections = 10",
            (
                "config.toml:5: sites[0]: unknown key `max_connections`: it is not a key of [[sites]], but of the top "
                "level, [redirect], [health] or [admin]: top-level keys stand before the first [table]"
            ),
        ),
        (
            "address = 1" + SITE,
            "config.toml:1: unknown key `address`: it is not a key of the top level, but of [[listeners]] or [health]",
        ),
        (SITE + "[health]\nadress = 1", "config.toml:6: health: unknown key `adress`: did you mean `address`?"),
        (
            SITE + "[health]\nunrelated = 1",
            "health: unknown key `unrelated`: the keys here are enabled, address, max_conn",
        ),
        ("min_tls_versions = 1" + SITE, "did you mean `min_tls_version` of [[listeners]]?"),
        ('"a\\nb" = 1' + SITE, 'config.toml:1: unknown key `"a\\nb"`'),
        ("x" * 1000 + " = 1" + SITE, 'unknown key `"' + "x" * 80 + '..."`: the keys here are'),
        # Types, strictly.
        ("workers = true" + SITE, "config.toml:1: workers: found true; wanted an integer from 1 to 256"),
        ("workers = 2.0" + SITE, 'workers: found 2.0; wanted an integer from 1 to 256, or "auto"; write 2'),
        (
            'workers = "2"' + SITE,
            'workers: found "2"; wanted an integer from 1 to 256, or "auto"; write 2 without quotes',
        ),
        ("workers = 2026-11-29" + SITE, "workers: found a date or time (2026-11-29); wanted an integer"),
        ("workers = []" + SITE, "workers: found an array of 0; wanted an integer"),
        ("workers = 0" + SITE, "workers: found 0; wanted an integer from 1 to 256"),
        ("workers = 257" + SITE, "workers: found 257; wanted an integer from 1 to 256"),
        (f"workers = {'9' * 4000}" + SITE, "workers: found an integer of too many digits; wanted an integer"),
        ('max_connections = "all"' + SITE, 'found "all"; wanted an integer from 1 to 1000000, or "auto"'),
        ('max_connections = "10"' + SITE, 'or "auto"; write 10 without quotes'),
        ("max_connections = 10.0" + SITE, 'or "auto"; write 10'),
        ("max_connections = true" + SITE, "max_connections: found true; wanted an integer from 1"),
        ("max_connections = 0" + SITE, "max_connections: found 0; wanted an integer from 1"),
        (
            "tls_handshake_timeout_secs = 0" + SITE,
            "found 0; wanted a number of seconds greater than 0, at most 604800; 0 does not switch it off",
        ),
        ("write_timeout_secs = -1" + SITE, "found -1; wanted a number of seconds greater than 0"),
        ("write_timeout_secs = nan" + SITE, "found nan; wanted a number of seconds greater than 0"),
        ("write_timeout_secs = inf" + SITE, "found inf; wanted a number of seconds greater than 0"),
        ("write_timeout_secs = true" + SITE, "found true; wanted a number of seconds greater than 0"),
        ('write_timeout_secs = "10s"' + SITE, "write a plain number: the unit is in the key's name"),
        # Rates as others write them.
        (
            'rate_limits = [{ requests = "10/s" }]' + SITE,
            (
                'rate_limits[0].requests: found "10/s"; wanted an integer from 1 to 1000000; '
                "write requests = 10, per_secs = 1"
            ),
        ),
        (
            SITE + 'rate_limits = [{ requests = "600r/m" }]',
            (
                'sites[0].rate_limits[0].requests: found "600r/m"; wanted an integer from 1 to 1000000; '
                "write requests = 600, per_secs = 60"
            ),
        ),
        ('rate_limits = [{ requests = "5 per hour" }]' + SITE, "write requests = 5, per_secs = 3600"),
        ('rate_limits = [{ requests = "2 requests/day" }]' + SITE, "write requests = 2, per_secs = 86400"),
        (
            'rate_limits = "10/s"' + SITE,
            "wanted an array of tables; write [{ requests = 10, per_secs = 1 }]",
        ),
        ('rate_limits = ["10/s"]' + SITE, "wanted a table; write { requests = 10, per_secs = 1 }"),
        ('max_request_head_bytes = "64k"' + SITE, "write a plain number: the unit is in the key's name"),
        ("write_timeout_secs = 12:00:00" + SITE, "found a date or time (12:00:00); wanted a number of seconds"),
        ('underscores_in_headers = "yes"' + SITE, "wanted true or false; write true or false without quotes"),
        ("underscores_in_headers = 1" + SITE, "underscores_in_headers: found 1; wanted true or false"),
        ("state_dir = 1" + SITE, "found 1; wanted a string (absolute path); write the value in quotes"),
        ('state_dir = "state"' + SITE, 'found "state"; wanted an absolute path; it begins with "/"'),
        ('event_log = { format = "xml" }' + SITE, 'event_log.format: found "xml"; wanted one of "text", "json"'),
        ('event_log = { path = "off" }' + SITE, "events are never switched off"),
        ('access_log = { path = "a.log" }' + SITE, '"stdout", "stderr", "off" or an absolute path'),
        ('trusted_proxies = ["10.0.0.1/8"]' + SITE, 'trusted_proxies[0]: found "10.0.0.1/8"; wanted an IP address'),
        ("health = 1" + SITE, "config.toml:1: health: found 1; wanted a table"),
        (
            'listeners = { address = "0.0.0.0:443" }' + SITE,
            "listeners: found a table; wanted an array of tables; write [[listeners]] with two brackets",
        ),
        (
            SITE + "[[redirect]]\nenabled = false",
            "config.toml:5: redirect: found an array of 1; wanted a table; write [re",
        ),
        (
            "[redirect]\naddresses = []" + SITE,
            "config.toml:2: redirect.addresses: found an empty array; wanted an array",
        ),
        (
            '[redirect]\naddresses = "0.0.0.0:80"' + SITE,
            (
                'config.toml:2: redirect.addresses: found "0.0.0.0:80"; wanted an array of strings (IP address '
                'and port), not empty; write ["0.0.0.0:80"] with brackets'
            ),
        ),
        (
            "[[listeners]]" + SITE,
            "config.toml:1: listeners[0].address: found nothing; wanted a string (IP address and port)",
        ),
        # Sites.
        ("", 'config.toml: sites: found none; wanted at least one site; such as [[sites]] with hosts = ["git.example'),
        ("sites = []", "config.toml:1: sites: found none; wanted at least one site"),
        (
            '[[sites]]\nhosts = ["a"]',
            'config.toml:1: sites[0]: found the site of "a" without upstreams, routes and redir',
        ),
        (SITE + "[[sites]]\nhosts = []", "config.toml:6: sites[1].hosts: found an empty array"),
        (
            SITE + '[[sites]]\nhosts = [\n"a",\n"GIT.example.org"]\nupstreams = ["http://a"]',
            (
                'config.toml:8: sites[1].hosts[1]: found "git.example.org"; wanted each host once, in one site; '
                "see sites[0].hosts[0] (line 3)"
            ),
        ),
        (
            SITE + '[[sites.routes]]\npath = "/a/"\n[[sites.redirects]]\npath = "/%61"\nto = "/b"',
            (
                'config.toml:8: sites[0].redirects[0].path: found "/a"; wanted each path once among a site\'s routes '
                "and redirects; see sites[0].routes[0].path (line 6)"
            ),
        ),
        (
            '[[sites]]\nhosts = ["a"]\n[[sites.routes]]\npath = "/x"',
            'config.toml:3: sites[0].routes[0].upstreams: found none for the route "/x"; wanted upstreams in the route',
        ),
        (
            '[[sites]]\nhosts = ["a"]\nupstreams = [\n"http://a",\n"http://A:80"]',
            'config.toml:5: sites[0].upstreams[1]: found "http://a:80"; wanted each upstream once; see sites[0].ups',
        ),
        (SITE + 'request_headers.set.Host = "x"', "config.toml:5: sites[0].request_headers.set.Host: found"),
        (SITE + 'request_headers.remove = ["TE"]', 'request_headers.remove[0]: found "TE"; wanted a header field'),
        (
            SITE + 'request_headers = { set = { X-A = "1" }, remove = ["x-a"] }',
            'config.toml:5: sites[0].request_headers: found the field "x-a" twice',
        ),
        (
            SITE + 'request_headers.set.X-Forwarded-Proto = "https"',
            'sites[0].request_headers: found "X-Forwarded-Proto"; wanted a header field that may be edited; X-Forw',
        ),
        (SITE + 'request_headers.remove = ["via"]', 'request_headers: found "via"; wanted a header field'),
        (SITE + 'request_headers.set.Proxy = "http://a"', "behind CGI would take its value for a proxy to use"),
        (SITE + 'response_headers.set = "X: y"', 'response_headers.set: found "X: y"; wanted a table'),
        (SITE + "max_request_body_bytes = 0", "found 0; wanted an integer from 1 to"),
        # Between tables.
        (
            "workers = 4\nmax_connections = 3\nmax_upstream_connections = 2" + SITE,
            "config.toml:2: max_connections: found 3; wanted at least 4, the number of workers; see workers (line 1)",
        ),
        (
            '[[listeners]]\naddress = "[::]:443"\n[[listeners]]\naddress = "[0::]:443"' + SITE,
            (
                'config.toml:4: listeners[1].address: found "[::]:443"; wanted each address in one place; '
                "see listeners[0].address (line 2)"
            ),
        ),
        (
            '[[listeners]]\naddress = "0.0.0.0:80"' + SITE,
            (
                'redirect.addresses[0]: found "0.0.0.0:80"; wanted each address in one place; see '
                "listeners[0].address (line 2); the redirect listens on port 80 by default"
            ),
        ),
        (
            '[health]\naddress = "127.0.0.1:443"' + SITE,
            (
                'config.toml:2: health.address: found "127.0.0.1:443", which 0.0.0.0:443 overlaps; wanted each address '
                "in one place; see listeners[0].address (by default)"
            ),
        ),
        # Not TOML.
        ("a = \n", "config.toml:1:5: not TOML: Invalid value at `a`; text stands in quotes"),
        ("\n\na = [1,", "config.toml:3: not TOML:"),
        ("a = 1\na = 2", "config.toml:2: not TOML: Cannot overwrite a value at `a`; the key is there twice"),
        ("a b = 1", "config.toml:1:3: not TOML: Expected '=' after a key"),
        ("a = " + "[" * 100_000, "config.toml: found arrays or tables nested too deeply"),
        (f"a = {'9' * 5000}", "config.toml: not TOML: a value that cannot be read, such as a too long number"),
    ],
)
def test_error(text: str, message: str) -> None:
    lines = errors(text)
    assert any(message in line for line in lines), lines
    assert all(line.startswith("config.toml") and line.isprintable() for line in lines)


def test_a_digit_of_another_script_is_not_advised() -> None:
    assert only_error('workers = "²"' + SITE).endswith('wanted an integer from 1 to 256, or "auto"')


def test_a_unit_is_said_to_be_in_the_name_only_of_a_key_that_has_one() -> None:
    assert only_error('max_upstream_connections = "1k"' + SITE).endswith("; write a plain number")


def test_all_errors_at_once_in_the_order_of_the_file() -> None:
    lines = errors(
        """\
workers = 9
max_connections = 8
header_timeout_secs = "1"
[[listeners]]
address = "here:443"
[[listeners]]
address = "0.0.0.0:443"
[[listeners]]
address = "0.0.0.0:443"
[[sites]]
hosts = ["a b"]
upstreams = ["a"]
[[sites]]
hosts = ["c.example.org"]
[[sites]]
hosts = ["C.example.org"]
upstreams = ["http://a"]
unknown = 1
[[sites]]
hosts = ["c.example.org"]
upstreams = ["http://a"]
"""
    )
    assert [line.split(": ")[:2] for line in lines] == [
        ["config.toml:2", "max_connections"],
        ["config.toml:3", "header_timeout_secs"],
        ["config.toml:5", "listeners[0].address"],
        ["config.toml:9", "listeners[2].address"],
        ["config.toml:11", "sites[0].hosts[0]"],
        ["config.toml:12", "sites[0].upstreams[0]"],
        ["config.toml:13", "sites[1]"],
        ["config.toml:18", "sites[2]"],
        ["config.toml:20", "sites[3].hosts[0]"],
    ]
    assert "see listeners[1].address (line 7)" in lines[3]
    assert "see sites[1].hosts[0] (line 14)" in lines[8]


def test_an_array_with_a_bad_element_is_not_called_empty() -> None:
    line = only_error('[[sites]]\nhosts = ["a b"]\nupstreams = ["http://a"]')
    assert line.startswith('config.toml:2: sites[0].hosts[0]: found "a b"')


def test_every_bad_line_of_a_list_is_told_up_to_ten(tmp_path: Path) -> None:
    networks = tmp_path / "banned.txt"
    networks.write_text("192.0.2.1\nexample.org # a name\n\n192.0.2.300\n192.0.2.9/24\n")
    config = tmp_path / "proxy.toml"
    config.write_text('deny = ["2001:db8::/32", "file:banned.txt"]' + SITE)

    def told() -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load_settings(str(config))
        return str(caught.value).splitlines()

    lines = told()
    assert [line.partition("; wanted ")[0] for line in lines] == [
        f'{config}:1: deny[1]: found "example.org" at {networks}:2',
        f'{config}:1: deny[1]: found "192.0.2.300" at {networks}:4',
        f'{config}:1: deny[1]: found "192.0.2.9/24" at {networks}:5',
    ]
    networks.write_text("".join(f"host{number}.example.org\n" for number in range(5000)))
    lines = told()
    assert len(lines) == 11
    assert f"found 4990 more bad lines in {networks}; wanted " in lines[-1]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('deny = ["file:none.txt"]\nallow = ["192.0.2.0/24"]', "config.toml:1: deny[0]"),
        ('deny = ["192.0.2.300"]\nallow = ["192.0.2.0/24"]', "config.toml:1: deny[0]"),
        ('user = true\ngroup = "www-data"', "config.toml:1: user"),
    ],
)
def test_what_is_there_and_refused_is_not_called_missing(text: str, told: str) -> None:
    assert only_error(text + SITE).startswith(f"{told}: found ")


def test_an_empty_deny_beside_allow_is_told_with_the_other_faults() -> None:
    lines = errors('deny = []\nallow = ["192.0.2.0/24"]\nmax_connections = 0' + SITE)
    assert [line.split(": ")[1] for line in lines] == ["allow", "max_connections"]


def test_header_values_are_not_shown() -> None:
    line = only_error(SITE + 'request_headers.set.Authorization = "Bearer hunter2\\n"')
    assert "hunter2" not in line
    line = only_error(SITE + "request_headers.set.Authorization = 20261129")
    assert "20261129" not in line


def test_other_fields_of_the_family_may_be_set() -> None:
    site = load(SITE + 'request_headers.set.X-Forwarded-Prefix = "/app"\nresponse_headers.remove = ["Via"]').sites[0]
    assert site.request_headers is not None
    assert site.request_headers.set == {"X-Forwarded-Prefix": "/app"}
    assert site.response_headers is not None
    assert site.response_headers.remove == ("Via",)


def test_specific_listener_beside_a_wildcard_one_is_fine() -> None:
    text = '[[listeners]]\naddress = "0.0.0.0:443"\n[[listeners]]\naddress = "192.0.2.1:443"' + SITE
    assert len(load(text).listeners) == 2


def test_disabled_endpoints_take_no_address() -> None:
    text = '[redirect]\nenabled = false\n[health]\nenabled = false\n[[listeners]]\naddress = "0.0.0.0:80"'
    assert load(text + '\n[[listeners]]\naddress = "127.0.0.1:9900"' + SITE).redirect.enabled is False


def test_settings_are_immutable() -> None:
    settings = load(SITE)
    with pytest.raises(ValueError, match="frozen"):
        settings.workers = 3  # type: ignore[misc]


def test_mapping() -> None:
    site = {"hosts": ["*"], "upstreams": ["http://127.0.0.1:3000"]}
    assert load_mapping({"sites": [site]}, source="command line").sites[0].hosts == ("*",)
    with pytest.raises(ConfigError, match=r"^command line: sites\[0\]\.upstreams\[0\]: found \"x\"; wanted"):
        load_mapping({"sites": [{**site, "upstreams": ["x"]}]}, source="command line")


def test_file(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('listeners = [{ address = "0.0.0.0:443", certificates = [{ chain = "c", key = "k" }] }]' + SITE)
    certificate = load_settings(str(file)).listeners[0].certificates[0]
    assert (certificate.chain, certificate.key) == (str(tmp_path / "c"), str(tmp_path / "k"))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xef\xbb\xbfworkers = 1", ":1: found a byte order mark; wanted UTF-8 without one"),
        ("workers = 1".encode("utf-16"), ":1: found UTF-16; wanted UTF-8"),
        (b"# fine\n# caf\xe9\n", ":2: found the byte 0xe9, which is not UTF-8"),
        (b"#" * (4 * 1024 * 1024 + 1), ": found more than 4194304 bytes"),
    ],
)
def test_file_that_is_no_text(tmp_path: Path, data: bytes, message: str) -> None:
    file = tmp_path / "config.toml"
    file.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        load_settings(str(file))
    assert str(caught.value).startswith(f"{file}{message}")


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file; name the configuration with --config"):
        load_settings(str(tmp_path / "none.toml"))
    with pytest.raises(ConfigError, match="found a directory; wanted a TOML file"):
        load_settings(str(tmp_path))
    with pytest.raises(ConfigError, match="cannot be read: Not a directory"):
        load_settings("/dev/null/config.toml")
    with pytest.raises(ConfigError, match="cannot be read: not a usable path"):
        load_settings("a\0b")


def test_file_without_permission(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(SITE)
    file.chmod(0)
    # Root may read everything, so a child that is nobody asks; another user's folders must let it come so far.
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o111)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setuid(NOBODY)
            load_settings(str(file))
        except ConfigError as error:
            os.write(write_end, str(error).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with open(read_end, encoding="utf-8") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    assert "permission denied for user" in said


NOBODY = 65534


def test_a_file_name_cannot_forge_a_line() -> None:
    with pytest.raises(ConfigError) as caught:
        load_text("a = ", file="x\n\x1b[31m.toml", base_dir=None)
    assert str(caught.value).isprintable()


KEYS = st.sampled_from([*Settings.model_fields, "hosts", "upstreams", "address", "path", "to", "set", "x y"])
VALUES = st.recursive(
    st.one_of(
        st.integers(),
        st.floats(),
        st.booleans(),
        st.dates(),
        st.text(max_size=8),
        st.sampled_from(["auto", "*", "/", "0.0.0.0:443", "http://a", "a.example.org", "stdout", "{uri}"]),
    ),
    lambda values: st.one_of(st.lists(values, max_size=3), st.dictionaries(KEYS, values, max_size=4)),
    max_leaves=12,
)


@given(st.dictionaries(KEYS, VALUES, max_size=5))
def test_any_values_are_settings_or_a_config_error(data: dict[str, object]) -> None:
    settings_or_errors(lambda: load_mapping(data, source="fuzz"))


@given(st.text())
@example("\ufeff")
@example("a = 9999-99-99")
@example("sites = [[]]")
@example("[[sites]]\n[sites.x]")
def test_any_text_is_settings_or_a_config_error(text: str) -> None:
    settings_or_errors(lambda: load(text))


@given(st.lists(st.sampled_from([*SITE.split("\n"), "[", "]", "[health]", "=", '"', "'''", "sites", "1", "\n", "{"])))
def test_any_shuffle_of_toml_is_settings_or_a_config_error(parts: list[str]) -> None:
    settings_or_errors(lambda: load("\n".join(parts)))


def settings_or_errors(attempt: Callable[[], Settings]) -> None:
    try:
        assert isinstance(attempt(), Settings)
    except ConfigError as error:
        message = str(error)
    else:
        return
    assert message
    assert all(line.isprintable() for line in message.split("\n"))
