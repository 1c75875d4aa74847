"""Settings without a file: `serve` and `demo`, and the folders that they use."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from proxy.config.address import is_port
from proxy.config.checks import Loc
from proxy.config.explain import Option
from proxy.config.load import load_mapping
from proxy.config.schema import Settings
from proxy.errors import ConfigError, OperatorError, StartError
from proxy.master.listeners import ipv6_available

ANY_IPV4 = "0.0.0.0"  # noqa: S104  the operator asked for every address
SYSTEM_RUNTIME_DIR = "/run/reverse-proxy"
SYSTEM_SOCKET = f"{SYSTEM_RUNTIME_DIR}/admin.sock"
_NAME = "reverse-proxy"
SERVE_OPTIONS: Final = {"listeners": "--listen", "redirect": "--redirect", "health": "--health"}
DEMO_OPTIONS: Final = {"listeners": "--port", "redirect": "--redirect-port", "health": "--health-port"}
"""By the table of a configuration that it stands for."""


def state_dir(environ: Mapping[str, str]) -> str:
    """Where certificates made on the spot are kept: the service manager's folder, else the user's."""
    given = environ.get("STATE_DIRECTORY", "").partition(":")[0]
    if given:
        return given
    base = environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(base, _NAME)


def runtime_dir(environ: Mapping[str, str]) -> str:
    """Where the admin sockets of `serve` and `demo` are."""
    if os.geteuid() == 0:
        return SYSTEM_RUNTIME_DIR
    base = environ.get("XDG_RUNTIME_DIR")
    return os.path.join(base, _NAME) if base else state_dir(environ)


def admin_sockets(environ: Mapping[str, str]) -> list[str]:
    """Where an instance of this user may answer, the service's own socket first."""
    found = sorted(glob.glob(os.path.join(glob.escape(runtime_dir(environ)), "*.sock")))
    return [SYSTEM_SOCKET, *(path for path in found if path != SYSTEM_SOCKET)]


def make_private_folder(path: str) -> None:
    """Make ``path``, which is a ``state_dir``, with mode 0700 where it is missing. Raises StartError."""
    remedy = "set XDG_STATE_HOME to a folder that this user can write"
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
    except OSError as error:
        raise StartError(f"cannot make the folder {path}: {error.strerror}; {remedy}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise StartError(f"the folder {path} cannot be written by user {os.geteuid()}; {remedy}")


def expand_listen(text: str) -> list[str]:
    """``:8443`` means every address of the host: IPv4, and IPv6 where there is any."""
    if not text.startswith(":"):
        return [text]
    return [f"{ANY_IPV4}{text}", *([f"[::]{text}"] if ipv6_available() else [])]


def serve_settings(
    *,
    to: Sequence[str],
    listen: Sequence[str],
    hosts: Sequence[str],
    redirect: Sequence[str],
    health: str | None,
    environ: Mapping[str, str],
) -> Settings:
    """The settings of `reverse-proxy serve`. Raises ConfigError."""
    addresses = _typed("--listen", listen)
    plain = _typed("--redirect", redirect)
    port = addresses[0][0].rpartition(":")[2]
    data: dict[str, Any] = {
        "state_dir": state_dir(environ),
        "listeners": [{"address": address} for address, _ in addresses],
        "redirect": {"addresses": [address for address, _ in plain]} if plain else {"enabled": False},
        "health": {"address": health} if health else {"enabled": False},
        "admin": {"socket": os.path.join(runtime_dir(environ), f"serve-{port}.sock")},
        "sites": [{"hosts": list(hosts) or ["*"], "upstreams": [_upstream_url(text) for text in to]}],
    }
    options: dict[Loc, Option] = {
        **{("listeners", index, "address"): option for index, (_, option) in enumerate(addresses)},
        **{("redirect", "addresses", index): option for index, (_, option) in enumerate(plain)},
        ("health", "address"): Option("--health", health or ""),
        **{("sites", 0, "hosts", index): Option("--host", text, _host_hint(text)) for index, text in enumerate(hosts)},
        **{
            ("sites", 0, "upstreams", index): Option("--to", text, _upstream_hint(text))
            for index, text in enumerate(to)
        },
    }
    return load_mapping(data, source="serve", options=options)


@contextlib.contextmanager
def faults_of_options(command: str, options: Mapping[str, str]) -> Iterator[None]:
    """Faults with a place in the configuration get the option of ``command`` that it came from before their message."""
    try:
        yield
    except OperatorError as error:
        option = options.get(str(error.key[0])) if error.key else None
        if option is not None:
            error.args = (f"{command}: {option}: {error}",)
        raise


def _host_hint(text: str) -> str:
    name = urlsplit(text).hostname if "://" in text else text.partition("/")[0]
    return f"write the name alone: {name}" if name and "/" in text else ""


def _upstream_hint(text: str) -> str:
    return f"write 127.0.0.1:{text}" if is_port(text) else ""


def _typed(name: str, texts: Sequence[str]) -> list[tuple[str, Option]]:
    """Each address, with the option that it comes from."""
    return [(address, Option(name, text)) for text in texts for address in expand_listen(text)]


def demo_settings(
    *, port: int, redirect_port: int, health_port: int, upstream_port: int, environ: Mapping[str, str]
) -> Settings:
    """The settings of `reverse-proxy demo`: loopback only, any host, the access log in a file. Raises ConfigError."""

    def loopback(port: int) -> list[str]:
        return [f"127.0.0.1:{port}", *([f"[::1]:{port}"] if ipv6_available() else [])]

    named: dict[int, str] = {}
    for option, number in zip(DEMO_OPTIONS.values(), (port, redirect_port, health_port), strict=True):
        other = named.setdefault(number, option)
        if other is not option:
            raise ConfigError(f"demo: {other} and {option} are both {number}: give each a port of its own")
    data: dict[str, Any] = {
        "state_dir": state_dir(environ),
        "listeners": [{"address": address} for address in loopback(port)],
        "redirect": {"addresses": loopback(redirect_port)},
        "health": {"address": f"127.0.0.1:{health_port}"},
        "admin": {"socket": os.path.join(runtime_dir(environ), f"demo-{port}.sock")},
        "access_log": {"path": os.path.join(state_dir(environ), "demo-access.log")},
        "sites": [{"hosts": ["*"], "upstreams": [f"http://127.0.0.1:{upstream_port}"]}],
    }
    return load_mapping(data, source="demo")


def _upstream_url(text: str) -> str:
    return text if "://" in text or text.startswith("unix:") else f"http://{text}"
