"""Host and port as requests name them (RFC 9110 section 7.2, RFC 3986 section 3.2.2), stricter than the grammar.

A registered name may only have what host names have (letters, digits, hyphen, dot, and the underscore that some
internal names use): percent-encoding and sub-delims serve nobody, and another parser may read them differently.
"""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache
from typing import Final, NamedTuple

_MAX_NAME_BYTES: Final = 255  # RFC 1035 section 2.3.4
_MAX_PORT: Final = 65535
_AUTHORITY: Final = re.compile(
    rb"(?:([A-Za-z0-9_-]++(?:\.[A-Za-z0-9_-]++)*)\.?|\[([0-9A-Fa-f:.]{2,45}+)\])(:([0-9]{0,5}+))?"
)


class Authority(NamedTuple):
    """A host and a port, taken apart."""

    host: bytes
    """Lower case, without brackets or a trailing dot; an IPv6 address in its shortest form."""
    port: int | None
    value: bytes
    """As it was given, to be forwarded, but without a colon that no port follows."""


@lru_cache(maxsize=512)
def parse_authority(value: bytes) -> Authority:
    """Takes ``uri-host [ ":" port ]`` apart. Raises ValueError for anything else, userinfo included."""
    match = _AUTHORITY.fullmatch(value)
    if match is None:
        raise ValueError("not a host with an optional port")
    name, address, port_part, digits = match.groups()
    if name is not None:
        if len(name) > _MAX_NAME_BYTES:
            raise ValueError("the name is too long")
        host = name.lower()
    else:
        host = str(ipaddress.IPv6Address(address.decode("ascii"))).encode("ascii")
    if not digits:
        return Authority(host, None, value if port_part is None else value[:-1])
    port = int(digits)
    if port > _MAX_PORT:
        raise ValueError("the port is too large")
    return Authority(host, port, value)
