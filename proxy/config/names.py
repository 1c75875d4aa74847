"""Names in normal form: DNS names and hosts of sites, header fields, protocols, networks."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from typing import Final

from proxy.config.refusal import RefusedError, shown

ANY_HOST: Final = "*"
WILDCARD_PREFIX: Final = "*."

_WANTED_HOST: Final = '"git.example.org", "*.example.org" or "*", without scheme, port and path'
_MAX_NAME_CHARACTERS: Final = 253  # RFC 1035 section 2.3.4, as text and without the final dot
_LABEL: Final = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
# IDNA 2003, which the standard library speaks, and IDNA 2008, which browsers speak, give these different names.
_IDNA_DEVIATIONS: Final = frozenset("\u00df\u1e9e\u03c2\u200c\u200d")

_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110 section 5.6.2
_FIELD_VALUE: Final = re.compile(r"(?:[!-~](?:[ \t!-~]*[!-~])?)?")  # RFC 9110 section 5.5, without obs-text
_PROTOCOL: Final = re.compile(_TOKEN.pattern + "(?:/" + _TOKEN.pattern + ")?")  # RFC 9110 section 7.8

_OWNED_BY_THE_PROXY: Final = "it belongs to the connection, not to the message, and the proxy makes its own"
# Connection management and framing (RFC 9110 sections 7.6.1 and 8.6, RFC 9112 section 6): a wrong one desynchronises
# the two sides.
FORBIDDEN_FIELDS: Final[dict[str, str]] = {
    **dict.fromkeys(
        ("connection", "keep-alive", "proxy-connection", "te", "trailer", "upgrade", "http2-settings"),
        _OWNED_BY_THE_PROXY,
    ),
    **dict.fromkeys(
        ("transfer-encoding", "content-length", "expect"), "it says where the message ends, which only the proxy knows"
    ),
    "host": "what an upstream is told is chosen with preserve_host",
}

_WRITTEN_BY_THE_PROXY: Final = "the proxy writes it from what it knows (trusted_proxies says who else is believed)"
# Of a request only: an edit of one of these would come out twice, or not at all.
FORBIDDEN_REQUEST_FIELDS: Final[dict[str, str]] = {
    **dict.fromkeys(
        (
            "forwarded",
            "via",
            "x-forwarded-for",
            "x-forwarded-host",
            "x-forwarded-port",
            "x-forwarded-proto",
            "x-real-ip",
            "x-request-id",
        ),
        _WRITTEN_BY_THE_PROXY,
    ),
    # CVE-2016-5385
    "proxy": "it is always removed, because programs behind CGI would take its value for a proxy to use",
}


def normalize_dns_name(name: str, whole: str, wanted: str = "a DNS name or an IPv4 address") -> str:
    """Return a DNS name (or IPv4 address) in lower-case ASCII, without the final dot.

    Raises ``RefusedError`` that shows ``whole`` and ``wanted``.
    """
    ascii_name = name.removesuffix(".")
    if len(ascii_name) > _MAX_NAME_CHARACTERS:
        raise RefusedError(shown(whole), wanted, f"a DNS name has at most {_MAX_NAME_CHARACTERS} characters")
    if not ascii_name.isascii():
        if not _IDNA_DEVIATIONS.isdisjoint(ascii_name):
            raise RefusedError(shown(whole), wanted, 'write this international name in its ASCII form ("xn--...")')
        try:
            ascii_name = ascii_name.encode("idna").decode("ascii")
        except UnicodeError:
            raise RefusedError(shown(whole), wanted, f"{shown(name)} is not an international DNS name") from None
    ascii_name = ascii_name.lower()
    labels = ascii_name.split(".")
    if len(ascii_name) > _MAX_NAME_CHARACTERS or not all(map(_LABEL.fullmatch, labels)):
        raise RefusedError(shown(whole), wanted, f"{shown(name)} is not a DNS name")
    if labels[-1].isdigit():
        try:
            return str(ipaddress.IPv4Address(ascii_name))
        except ValueError:
            raise RefusedError(shown(whole), wanted, f"{shown(name)} is not an IPv4 address") from None
    return ascii_name


def normalize_host(text: str) -> str:
    """Return a site's host in normal form: lower-case ASCII name, ``*.name``, ``*``, or an IP without brackets.

    Raises ``RefusedError``.
    """
    if text == ANY_HOST:
        return text
    bare = text.removeprefix("[").removesuffix("]")
    try:
        return str(ipaddress.IPv6Address(bare))
    except ValueError:
        pass
    if "://" in text or "/" in text:
        raise RefusedError(shown(text), _WANTED_HOST, "a host is only the name; paths are given in [[sites.routes]]")
    if ":" in text:
        raise RefusedError(shown(text), _WANTED_HOST, "leave the port out: a site is served on every listener")
    wildcard, name = text.startswith(WILDCARD_PREFIX), text.removeprefix(WILDCARD_PREFIX)
    if "*" in name:
        raise RefusedError(
            shown(text), _WANTED_HOST, 'a "*" stands alone or for the first labels as a whole: "*.example.org"'
        )
    name = normalize_dns_name(name, text, _WANTED_HOST)
    if wildcard and name.rpartition(".")[2].isdigit():
        raise RefusedError(shown(text), _WANTED_HOST, "an IP address has no wildcard")
    return WILDCARD_PREFIX + name if wildcard else name


def check_field_name(name: str) -> str:
    """Return the name of a header field that may be edited. Raises ``RefusedError``."""
    wanted = 'the name of a header field, such as "X-Frame-Options"'
    if not _TOKEN.fullmatch(name):
        hint = "leave out the colon" if name.endswith(":") else "letters, digits and hyphens make a name"
        raise RefusedError(shown(name), wanted, hint)
    _refuse(name, FORBIDDEN_FIELDS)
    return name


def check_request_fields(names: Iterable[str]) -> None:
    """Refuse, with ``RefusedError``, fields of a request that the proxy itself writes or removes."""
    for name in names:
        _refuse(name, FORBIDDEN_REQUEST_FIELDS)


def check_field_value(value: str) -> str:
    """Return a field value. Raises ``RefusedError``, which does not show the value: it may be a secret."""
    if not _FIELD_VALUE.fullmatch(value):
        if "\r" in value or "\n" in value or "\0" in value:
            found = "a value with a line break or NUL"
        elif value.strip(" \t") != value:
            found = "a value with a space at an end"
        elif not value.isascii():
            found = "a value with a character outside ASCII"
        else:
            found = "a value with a control character"
        raise RefusedError(found, "one line of printable ASCII")
    return value


def check_protocol(name: str) -> str:
    """Return an upgrade protocol's name in lower case. Raises ``RefusedError``."""
    wanted = 'the name of a protocol as in the Upgrade field, such as "websocket"'
    if not _PROTOCOL.fullmatch(name):
        raise RefusedError(shown(name), wanted)
    if name.lower() in ("h2c", "h2"):
        raise RefusedError(
            shown(name), wanted, "HTTP/2 is never spoken through an upgrade: it would bypass every check"
        )
    return name.lower()


def normalize_network(text: str) -> str:
    """Return an IP address or network in its normal spelling. Raises ``RefusedError``."""
    wanted = 'an IP address or network, such as "192.0.2.7", "192.0.2.0/24" or "2001:db8::/32"'
    if "%" in text:
        raise RefusedError(shown(text), wanted, 'leave out the zone ("%...")')
    try:
        if "/" not in text:
            return str(ipaddress.ip_address(text))
        network = ipaddress.ip_network(text, strict=False)
    except ValueError:
        hint = "names are not resolved here" if re.search("[g-zG-Z]", text) else ""
        raise RefusedError(shown(text), wanted, hint) from None
    address, _, prefix = text.partition("/")
    if not prefix.isdigit():
        raise RefusedError(shown(text), wanted, f"write the length of the prefix: {network}")
    if ipaddress.ip_address(address) != network.network_address:
        raise RefusedError(shown(text), wanted, f"bits are set behind the prefix: write {network}")
    return str(network)


def _refuse(name: str, forbidden: Mapping[str, str]) -> None:
    reason = forbidden.get(name.lower())
    if reason is not None:
        raise RefusedError(shown(name), "a header field that may be edited", f"{name} may not: {reason}")


def check_protocols(protocols: tuple[str, ...]) -> tuple[str, ...]:
    """What a listener offers by ALPN: each once, HTTP/1.1 among them. Raises ``RefusedError``."""
    if len(set(protocols)) < len(protocols):
        raise RefusedError(", ".join(map(shown, protocols)), "each protocol once")
    if "http/1.1" not in protocols:
        raise RefusedError(
            ", ".join(map(shown, protocols)) or "an empty list",
            'a list with "http/1.1" in it',
            "clients that do not negotiate a protocol speak HTTP/1.1",
        )
    return protocols
