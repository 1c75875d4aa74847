"""What fields of HTTP/2 may be, of requests and responses alike (RFC 9113 section 8.2)."""

from __future__ import annotations

import re
from typing import Final

from proxy.protocol.http1 import Trailers
from proxy.protocol.http1.body import FORBIDDEN_TRAILERS
from proxy.protocol.http1.grammar import CONTENT_LENGTH, Fields
from proxy.protocol.http2.errors import StreamFault
from proxy.protocol.http2.hpack_decoder import HeaderList

# RFC 9113 section 8.2.1 is wider; what HTTP/1.1 would read differently is refused, so names are tokens (RFC 9110).
_NAME: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]++")
_VALUE: Final = re.compile(rb"[\t\x20-\x7e\x80-\xff]*+")
_UPPER_CASE: Final = re.compile(rb"[A-Z]")

# Section 8.2.2
CONNECTION_FIELDS: Final = frozenset(
    (b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade")
)


def check_field(name: bytes, value: bytes) -> None:
    """Passes what is a field in HTTP/1.1 too, and no connection's own. Raises `StreamFault`."""
    if not _NAME.fullmatch(name):
        raise StreamFault("upper-case-name" if _UPPER_CASE.search(name) else "field-name")
    if not _VALUE.fullmatch(value) or value.strip(b" \t") != value:
        raise StreamFault("field-value")
    if name in CONNECTION_FIELDS:
        raise StreamFault("connection-field")
    if name == b"te" and value.lower() != b"trailers":
        raise StreamFault("te")


def content_length(values: list[bytes]) -> int | None:
    """The value of the one Content-Length field (RFC 9110 section 8.6). Raises `StreamFault`."""
    if not values:
        return None
    if len(values) > 1:
        raise StreamFault("two-content-lengths")
    if not CONTENT_LENGTH.fullmatch(values[0]):
        raise StreamFault("content-length")
    return int(values[0])


def split_pseudo(headers: HeaderList, known: frozenset[bytes]) -> tuple[dict[bytes, bytes], HeaderList]:
    """The pseudo-header fields, each once and before all others, and the others, checked (sections 8.2 and 8.3).

    Raises `StreamFault`.
    """
    pseudo: dict[bytes, bytes] = {}
    regular: HeaderList = []
    for field in headers:
        name, value = field
        if name[:1] == b":":
            if regular:
                raise StreamFault("pseudo-after-field")
            if name not in known:
                raise StreamFault("pseudo-unknown")
            if name in pseudo:
                raise StreamFault("pseudo-repeated")
            pseudo[name] = value
        else:
            check_field(name, value)
            regular.append(field)
    return pseudo, regular


def as_fields(headers: HeaderList) -> Fields:
    """Fields as HTTP/1.1's heads have them; crumbs of cookies are one again (section 8.2.3)."""
    crumbs = [value for name, value in headers if name == b"cookie"]
    if len(crumbs) < 2:
        return tuple([(name, name, value) for name, value in headers])
    # What would stand between two separators, or behind the last, is no pair (RFC 6265 section 4.2.1).
    pairs = [pair for crumb in crumbs if (pair := crumb.strip(b"; \t"))]
    fields: list[tuple[bytes, bytes, bytes]] = []
    for name, value in headers:
        if name != b"cookie":
            fields.append((name, name, value))
        elif pairs:
            fields.append((name, name, b"; ".join(pairs)))
            pairs = []
    return tuple(fields)


def check_trailers(headers: HeaderList, max_fields: int, max_bytes: int) -> Trailers:
    """A trailer section (section 8.1). Raises `StreamFault`."""
    if len(headers) > max_fields or sum(len(name) + len(value) for name, value in headers) > max_bytes:
        raise StreamFault("trailers-too-large")
    for name, value in headers:
        if name[:1] == b":":
            raise StreamFault("pseudo-in-trailers")
        check_field(name, value)
        if name in FORBIDDEN_TRAILERS:
            raise StreamFault("forbidden-trailer")
    return tuple(headers)
