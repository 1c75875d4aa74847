"""Settings without a file, and where their folders are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from proxy.errors import ConfigError, StartError
from proxy.master import quickstart
from proxy.master.quickstart import demo_settings, serve_settings, state_dir


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"STATE_DIRECTORY": "/var/lib/one:/var/lib/two", "XDG_STATE_HOME": "/home/x"}, "/var/lib/one"),
        ({"XDG_STATE_HOME": "/home/x"}, "/home/x/reverse-proxy"),
        ({}, os.path.expanduser("~/.local/state/reverse-proxy")),
    ],
)
def test_the_state_folder(environ: dict[str, str], folder: str) -> None:
    assert state_dir(environ) == folder


@pytest.mark.parametrize(
    ("uid", "environ", "folder"),
    [
        (0, {"XDG_RUNTIME_DIR": "/run/user/0"}, "/run/reverse-proxy"),
        (1000, {"XDG_RUNTIME_DIR": "/run/user/1000"}, "/run/user/1000/reverse-proxy"),
        (1000, {"XDG_STATE_HOME": "/home/x"}, "/home/x/reverse-proxy"),
    ],
)
def test_the_admin_socket_is_where_its_user_may_write(
    monkeypatch: pytest.MonkeyPatch, uid: int, environ: dict[str, str], folder: str
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    assert quickstart.runtime_dir(environ) == folder


def test_a_state_folder_that_cannot_be_used_is_told_with_what_to_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    remedy = "; set XDG_STATE_HOME to a folder that this user can write"
    with pytest.raises(StartError, match="cannot make the folder /dev/null/reverse-proxy: Not a directory" + remedy):
        quickstart.make_private_folder("/dev/null/reverse-proxy")
    monkeypatch.setattr(os, "access", lambda *_: False)  # the test may run as root, to whom all is allowed
    with pytest.raises(StartError, match=f"{tmp_path} cannot be written by user {os.geteuid()}{remedy}"):
        quickstart.make_private_folder(str(tmp_path))


def serve(**changed: object) -> object:
    options: dict[str, object] = {
        "to": ["127.0.0.1:3000"],
        "listen": [":8443"],
        "hosts": [],
        "redirect": [],
        "health": None,
        "environ": {"XDG_STATE_HOME": "/home/x"},
    }
    return serve_settings(**(options | changed))  # type: ignore[arg-type]


def test_serve_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quickstart, "ipv6_available", lambda: True)
    settings = serve_settings(
        to=["127.0.0.1:3000", "https://origin.example.org"],
        listen=[":8443"],
        hosts=["git.example.org"],
        redirect=[":8080"],
        health="127.0.0.1:9901",
        environ={},
    )
    assert [one.address for one in settings.listeners] == ["0.0.0.0:8443", "[::]:8443"]
    assert settings.redirect.addresses == ("0.0.0.0:8080", "[::]:8080")
    assert settings.health.address == "127.0.0.1:9901"
    assert settings.sites[0].hosts == ("git.example.org",)
    assert settings.sites[0].upstreams is not None
    assert settings.sites[0].upstreams[0] == "http://127.0.0.1:3000"
    assert settings.sites[0].upstreams[1].startswith("https://origin.example.org")


def test_serve_listens_on_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quickstart, "ipv6_available", lambda: False)
    settings = serve_settings(
        to=["127.0.0.1:1"], listen=[":8443"], hosts=[], redirect=[], health=None, environ={"XDG_STATE_HOME": "/x"}
    )
    assert [one.address for one in settings.listeners] == ["0.0.0.0:8443"]
    assert (settings.redirect.enabled, settings.health.enabled) == (False, False)
    assert settings.sites[0].hosts == ("*",)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"listen": [":99999"]}, ['--listen: found ":99999"; wanted an IP address and a port']),
        ({"listen": [":"]}, ['--listen: found ":"; wanted']),
        ({"listen": ["8443x"]}, ['--listen: found "8443x"; wanted an IP address and a port']),
        ({"to": ["3000"]}, ['--to: found "3000"; wanted a DNS name or an IPv4 address; write 127.0.0.1:3000']),
        ({"hosts": ["https://a.test/x"]}, ['--host: found "https://a.test/x"; wanted']),
        ({"to": ["::::"]}, ['--to: found "::::"; wanted']),
        ({"hosts": ["a b"]}, ['--host: found "a b"; wanted']),
        ({"hosts": ["a.test", "a.test"]}, ['--host: found "a.test"; wanted each host once']),
        (
            {"redirect": ["x"], "health": "y", "to": ["127.0.0.1:0", "127.0.0.1:9"]},
            ['--to: found "127.0.0.1:0"', '--redirect: found "x"', '--health: found "y"'],
        ),
        (
            {"listen": ["127.0.0.1:1"], "redirect": ["127.0.0.1:1"]},
            ['--redirect: found "127.0.0.1:1"; wanted each address in one place; see --listen 127.0.0.1:1'],
        ),
    ],
)
def test_a_wrong_argument_is_told_with_its_option_as_typed(changed: dict[str, object], said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        serve(**changed)
    lines = str(caught.value).splitlines()
    assert len(lines) == len(said), lines
    for part in said:
        assert any(line.startswith(f"serve: {part}") for line in lines), lines


def test_an_option_that_is_a_url_is_not_told_of_routes() -> None:
    with pytest.raises(ConfigError) as caught:
        serve(hosts=["https://git.example.org/x"])
    assert str(caught.value).endswith("write the name alone: git.example.org")
    assert "sites" not in str(caught.value)


def test_a_port_twice_in_the_demo_is_one_message_that_names_the_options() -> None:
    with pytest.raises(ConfigError) as caught:
        demo_settings(port=8443, redirect_port=8443, health_port=1900, upstream_port=2000, environ={})
    assert str(caught.value) == "demo: --port and --redirect-port are both 8443: give each a port of its own"


def test_the_demo_stays_on_loopback() -> None:
    settings = demo_settings(port=1443, redirect_port=1080, health_port=1900, upstream_port=2000, environ={})
    addresses = [one.address for one in settings.listeners] + list(settings.redirect.addresses)
    assert {address.rpartition(":")[0] for address in addresses} <= {"127.0.0.1", "[::1]"}
    assert settings.health.address == "127.0.0.1:1900"
