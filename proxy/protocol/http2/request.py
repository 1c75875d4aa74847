"""Requests of HTTP/2 as the relay knows them (RFC 9113 section 8.3.1), and a bounded memo of those seen before."""

from __future__ import annotations

from typing import Final, NamedTuple

from proxy.protocol.http1 import HOP_BY_HOP, HeadCache, RequestHead
from proxy.protocol.http1.authority import Authority, parse_authority
from proxy.protocol.http1.grammar import MAX_METHOD_BYTES, TARGET, TOKEN
from proxy.protocol.http2.errors import REFUSED_STATUSES, StreamFault
from proxy.protocol.http2.fields import as_fields, content_length, split_pseudo
from proxy.protocol.http2.hpack_decoder import FIELD_OVERHEAD_BYTES, HeaderList
from proxy.protocol.http2.limits import DEFAULT_LIMITS, Limits
from proxy.protocol.http2.priority import UNSIGNALLED, Priority, parse_priority

VERSION: Final = 20
_PSEUDO: Final = frozenset((b":method", b":scheme", b":authority", b":path", b":protocol"))
_DEFAULT_PORTS: Final = {b"http": 80, b"https": 443}


class ParsedRequest(NamedTuple):
    """What a header list says."""

    head: RequestHead
    priority: Priority


class Refused(Exception):  # noqa: N818 (says what it is)
    """A well-formed request that is not taken; ``reason`` is out of `REFUSED_STATUSES`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    @property
    def status(self) -> int:
        """What to answer."""
        return REFUSED_STATUSES[self.reason]


class RequestHeads:
    """Makes request heads of header lists, and remembers at most ``max_entries``; one a generation, as `HeadCache`."""

    def __init__(self, limits: Limits = DEFAULT_LIMITS, max_entries: int = 512) -> None:
        self._limits = limits
        self._max_entries = max_entries
        self._entries: dict[tuple[tuple[tuple[bytes, bytes], ...], bool], ParsedRequest] = {}

    def parse(self, headers: HeaderList, ended: bool) -> ParsedRequest:
        """The head of a header list; ``ended``: no body follows. Raises `StreamFault` or `Refused`."""
        key = (tuple(headers), ended)
        parsed = self._entries.get(key)
        if parsed is None:
            parsed, size = _parse(headers, ended, self._limits)
            if self._max_entries and size <= HeadCache.MAX_HEAD_BYTES:
                if len(self._entries) >= self._max_entries:
                    self._entries.clear()
                self._entries[key] = parsed
        return parsed


def _parse(headers: HeaderList, ended: bool, limits: Limits) -> tuple[ParsedRequest, int]:
    pseudo, regular = split_pseudo(headers, _PSEUDO)
    method = pseudo.get(b":method")
    if method is None:
        raise StreamFault("pseudo-missing")
    if len(method) > MAX_METHOD_BYTES or not TOKEN.fullmatch(method):
        raise StreamFault("method")
    noted: dict[bytes, list[bytes]] = {b"host": [], b"content-length": [], b"expect": [], b"priority": []}
    for name, value in regular:
        if name in noted:
            noted[name].append(value)
    authority = _authority(pseudo, noted[b"host"])
    protocol = pseudo.get(b":protocol", b"")
    path = _path(method, pseudo, authority)
    length = content_length(noted[b"content-length"])
    tunnel = method == b"CONNECT"
    if tunnel and length is not None:
        raise StreamFault("connect")
    if ended and length:
        raise StreamFault("length-mismatch")
    size = sum([len(name) + len(value) for name, value in headers]) + FIELD_OVERHEAD_BYTES * len(headers)
    if len(path) > limits.max_target_bytes:
        raise Refused("target-too-long")
    if size > limits.max_header_list_bytes:
        raise Refused("head-too-large")
    if len(regular) > limits.max_fields:
        raise Refused("too-many-fields")
    expects = bool(noted[b"expect"])
    if any(value.lower() != b"100-continue" for value in noted[b"expect"]):  # RFC 9110 section 10.1.1
        raise Refused("expectation")
    has_body = not ended and not tunnel
    target = path or pseudo[b":authority"]
    head = RequestHead(
        b"GET" if protocol else method,
        target,
        path,
        VERSION,
        authority.host,
        authority.value,
        as_fields(regular),
        length,
        has_body and length is None,
        has_body,
        True,
        expects and has_body,
        (protocol.lower(),) if protocol else (),
        HOP_BY_HOP,
        b"%b %b HTTP/2.0" % (method, target),
        protocol,
    )
    priority = parse_priority(b",".join(noted[b"priority"])) if noted[b"priority"] else UNSIGNALLED
    return ParsedRequest(head, priority), size


def _authority(pseudo: dict[bytes, bytes], hosts: list[bytes]) -> Authority:
    """``:authority``, or the Host field in its place; where there are both, they must agree (section 8.3.1)."""
    if len(hosts) > 1:
        raise StreamFault("two-hosts")
    value = pseudo.get(b":authority")
    if value is None:
        if not hosts or pseudo[b":method"] == b"CONNECT":
            raise StreamFault("no-host")
        return _parse_authority(hosts[0])
    authority = _parse_authority(value)
    if hosts and hosts[0] != value:
        host = _parse_authority(hosts[0])
        default_port = _DEFAULT_PORTS.get(pseudo.get(b":scheme", b""))
        if host.host != authority.host or (host.port or default_port) != (authority.port or default_port):
            raise StreamFault("authority-mismatch")
    return authority


def _parse_authority(value: bytes) -> Authority:
    try:
        return parse_authority(value)
    except ValueError:
        raise StreamFault("userinfo" if b"@" in value else "authority") from None


def _path(method: bytes, pseudo: dict[bytes, bytes], authority: Authority) -> bytes:
    """``:path``, checked with ``:scheme`` and ``:protocol``; empty for a plain CONNECT (sections 8.3.1 and 8.5)."""
    path = pseudo.get(b":path")
    scheme = pseudo.get(b":scheme")
    protocol = pseudo.get(b":protocol")
    if method == b"CONNECT" and protocol is None:
        if path is not None or scheme is not None or authority.port is None:
            raise StreamFault("connect")
        return b""
    if path is None or scheme is None:
        raise StreamFault("pseudo-missing")
    if protocol is not None and (method != b"CONNECT" or not TOKEN.fullmatch(protocol)):  # RFC 8441 section 4
        raise StreamFault("protocol")
    if scheme not in _DEFAULT_PORTS:
        raise StreamFault("scheme")
    if not TARGET.fullmatch(path) or (path[:1] != b"/" and (path != b"*" or method != b"OPTIONS")):
        raise StreamFault("path")
    return path
