"""Paths in normal form: those of URLs that routes match, and those of files."""

from __future__ import annotations

import os
import re
from typing import Final
from urllib.parse import quote, urlsplit

from proxy.config.names import normalize_dns_name
from proxy.config.refusal import RefusedError, shown

URI_PLACEHOLDER: Final = "{uri}"
MAX_SOCKET_PATH_BYTES: Final = 107  # sun_path of Linux, unix(7), without the final NUL

_WANTED_ROUTE: Final = 'a path such as "/api": it begins with "/" and has no query'
_WANTED_TARGET: Final = '"https://host/path" or "/path", in which {uri} stands for the path and query asked for'
_WANTED_SOCKET: Final = "the absolute path of a Unix socket"
_PATH: Final = re.compile(r"(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-F]{2})+")  # RFC 3986 section 3.3
_PERCENT: Final = re.compile(r"%([0-9A-Fa-f]{2})")
_STRAY_PERCENT: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")
_UNRESERVED: Final = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
_AMBIGUOUS: Final = ("%2F", "%5C", "%00")
_VISIBLE: Final = re.compile(r"[!-~]+")


def normalize_route_path(text: str) -> str:
    """Return a route's path as requests' paths are normalised, without a slash at its end.

    Percent-encoded unreserved characters are decoded (RFC 3986 section 6.2.2.2), the others' hex digits upper-cased,
    characters outside ASCII percent-encoded as browsers do. Raises ``RefusedError`` for what no request could match.
    """
    if "://" in text:
        raise RefusedError(shown(text), _WANTED_ROUTE, "the host is given in the site's hosts")
    if not text.startswith("/"):
        hint = "" if "*" in text or not text else f"write {shown('/' + text)}"
        raise RefusedError(shown(text), _WANTED_ROUTE, hint)
    if "?" in text or "#" in text:
        raise RefusedError(shown(text), _WANTED_ROUTE, "routes match the path only: leave out the query and fragment")
    if text.endswith("*"):
        raise RefusedError(shown(text), _WANTED_ROUTE, "a path matches everything below it without a star")
    try:
        encoded = quote(text, safe="".join(map(chr, range(128))))
    except UnicodeEncodeError:
        raise RefusedError(shown(text), _WANTED_ROUTE) from None
    if _STRAY_PERCENT.search(encoded):
        raise RefusedError(shown(text), _WANTED_ROUTE, 'a "%" stands before two hexadecimal digits')
    path = _PERCENT.sub(_normal_percent, encoded)
    if "\\" in path or any(code in path for code in _AMBIGUOUS):
        raise RefusedError(
            shown(text), _WANTED_ROUTE, "requests with a backslash, or an encoded slash, backslash or NUL, are refused"
        )
    if not _PATH.fullmatch(path):
        raise RefusedError(shown(text), _WANTED_ROUTE, "percent-encode what may not stand in a URL's path")
    if any(segment in (".", "..") for segment in path.split("/")):
        raise RefusedError(
            shown(text), _WANTED_ROUTE, 'requests are matched after "." and ".." are resolved: resolve them'
        )
    return path.rstrip("/") or "/"


def check_redirect_target(text: str) -> str:
    """Return the ``to`` of a redirect. Raises ``RefusedError``, also for one that lets the client choose the host."""
    if not _VISIBLE.fullmatch(text):
        raise RefusedError(shown(text), _WANTED_TARGET, "percent-encode spaces, control and non-ASCII characters")
    plain = text.replace(URI_PLACEHOLDER, "")
    if "{" in plain or "}" in plain:
        raise RefusedError(shown(text), _WANTED_TARGET, "{uri} is the only placeholder")
    # "//host" is a reference to another host (RFC 3986 section 4.2), and {uri} begins with a slash.
    if text.startswith(("/" + URI_PLACEHOLDER, "//", "/\\", URI_PLACEHOLDER)):
        raise RefusedError(
            shown(text),
            _WANTED_TARGET,
            'this lets the client choose the host: put "https://host" or a path segment before {uri}',
        )
    if text.startswith("/"):
        return text
    try:
        url = urlsplit(text.replace(URI_PLACEHOLDER, "/"))
        host, _ = url.hostname, url.port
    except ValueError:
        raise RefusedError(shown(text), _WANTED_TARGET) from None
    if url.scheme not in ("http", "https") or not host or "@" in url.netloc:
        raise RefusedError(shown(text), _WANTED_TARGET)
    if ":" not in host:
        normalize_dns_name(host, text, _WANTED_TARGET)
    return text


def check_absolute_path(text: str, wanted: str = "an absolute path") -> str:
    """Return the absolute path of a file or folder. Raises ``RefusedError``."""
    if not text.startswith("/"):
        raise RefusedError(shown(text), wanted, 'it begins with "/"')
    _check_characters(text, wanted)
    return text


def check_socket_path(text: str) -> str:
    """Return the absolute path of a Unix socket, at most 107 bytes. Raises ``RefusedError``."""
    path = check_absolute_path(text, _WANTED_SOCKET)
    if len(path.encode()) > MAX_SOCKET_PATH_BYTES:
        raise RefusedError(shown(text), _WANTED_SOCKET, f"the system allows at most {MAX_SOCKET_PATH_BYTES} bytes")
    return path


def resolve_file(text: str, base_dir: str | None) -> str:
    """Return a file's path, a relative one taken from ``base_dir`` (None: left as is). Raises ``RefusedError``."""
    wanted = "the path of a file, absolute or relative to the folder of the configuration file"
    if not text:
        raise RefusedError(shown(text), wanted)
    if text.startswith("-----BEGIN"):
        raise RefusedError("the text of a PEM file", wanted)
    _check_characters(text, wanted)
    return text if base_dir is None else os.path.normpath(os.path.join(base_dir, text))


def check_log_path(text: str, names: tuple[str, ...]) -> str:
    """Return a log's path: one of ``names`` or an absolute path. Raises ``RefusedError``."""
    if text in names:
        return text
    wanted = ", ".join(f'"{name}"' for name in names) + " or an absolute path"
    if text == "off":
        raise RefusedError(shown(text), wanted, 'events are never switched off; level = "error" keeps them few')
    return check_absolute_path(text, wanted)


def _check_characters(text: str, wanted: str) -> None:
    if not text.isprintable():
        raise RefusedError(shown(text), wanted, "a path has no control characters")


def _normal_percent(match: re.Match[str]) -> str:
    char = chr(int(match[1], 16))
    return char if char in _UNRESERVED else match[0].upper()
