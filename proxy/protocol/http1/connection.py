"""What a message says about its connection (RFC 9110 sections 7.6.1 and 7.8)."""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

from proxy.protocol.http1.grammar import PROTOCOL, TOKEN

HOP_BY_HOP: Final = frozenset(
    {
        b"connection",
        b"proxy-connection",
        b"keep-alive",
        b"te",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",  # RFC 7540 section 3.2.1: belongs to an upgrade that is never forwarded
    }
)
"""Names of fields that are never forwarded, whether or not Connection names them."""

# A client must not be able to strip what the message means from the request that is forwarded.
_NEVER_HOP_BY_HOP: Final = frozenset({b"host", b"content-length"})


class ConnectionOptions(NamedTuple):
    """The options of a Connection field."""

    close: bool
    keep_alive: bool
    upgrade: bool
    hop_by_hop: frozenset[bytes]
    """`HOP_BY_HOP` and the fields that the options name."""


NO_OPTIONS: Final = ConnectionOptions(False, False, False, HOP_BY_HOP)


_REMEMBERED_BYTES: Final = 128  # a longer one is nobody's habit, and as options it takes forty times its size


def parse_connection(value: bytes) -> ConnectionOptions:
    """The options of a Connection field (several: joined by commas). Raises ValueError unless each is a token."""
    return _remembered(value) if len(value) <= _REMEMBERED_BYTES else _parse(value)


def _parse(value: bytes) -> ConnectionOptions:
    options = {option for part in value.lower().split(b",") if (option := part.strip(b" \t"))}
    if not all(map(TOKEN.fullmatch, options)):
        raise ValueError("a connection option is a token")
    return ConnectionOptions(
        b"close" in options,
        b"keep-alive" in options,
        b"upgrade" in options,
        HOP_BY_HOP | (options - {b"close"} - _NEVER_HOP_BY_HOP),
    )


_remembered: Final = lru_cache(maxsize=256)(_parse)


def parse_upgrade(value: bytes) -> tuple[bytes, ...]:
    """The protocols of an Upgrade field in lower case; none when one is malformed, since the field may be ignored."""
    protocols = tuple([part for item in value.lower().split(b",") if (part := item.strip(b" \t"))])
    return protocols if all(map(PROTOCOL.fullmatch, protocols)) else ()
