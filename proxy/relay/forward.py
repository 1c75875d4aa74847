"""What a request looks like on its way to the upstream: fields removed, fields added, framing restated.

Where it goes and most of its bytes depend on the request's head alone, so they are worked out once for a head and kept
with it (``RequestHead.memo``): a head that was seen before costs a look-up.
"""

from __future__ import annotations

import functools
import re
from ipaddress import IPv6Address, ip_address
from typing import TYPE_CHECKING, NamedTuple

from proxy.observe.accesslog import LoggedRequest
from proxy.protocol.http1 import RequestHead
from proxy.relay.context import RelayContext
from proxy.route.path import PathError, normalize_path
from proxy.route.table import RedirectEntry, RouteEntry
from proxy.upstream.pool import UpstreamGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from proxy.protocol.http1 import Trailers

VIA = b"1.1 reverse-proxy"
"""RFC 9110 section 7.6.3: a pseudonym stands for the host's name."""

PROXY_FIELD = b"proxy"
"""Not a field of HTTP; CGI turns it into HTTP_PROXY, which programs take for a proxy to use (CVE-2016-5385)."""

WEBSOCKET_KEY = b"sec-websocket-key"
"""Of no use in an extended CONNECT (RFC 8441 section 5); the proxy has its own."""

X_FORWARDED = b"x-forwarded-"
REPLACED_FIELDS = frozenset((b"forwarded", b"x-real-ip", b"x-request-id"))
"""With X-Forwarded-*: what a client says of itself. Replaced, unless a trusted proxy says it."""

REFUSED_METHODS = {b"CONNECT": 501, b"TRACE": 405}
"""A tunnel to anywhere is not what a reverse proxy is for; TRACE would show a client what the proxy adds."""

_REQUEST_ID = re.compile(rb"[!-~]{1,128}")


def edited(sets: Iterable[tuple[bytes, bytes]], removes: Iterable[bytes]) -> frozenset[bytes]:
    """The lower-case names of the fields that a route sets itself or removes."""
    return frozenset((*(name.lower() for name, _ in sets), *removes))


class Refusal(NamedTuple):
    """A request that goes no further: the status, a word for the log, and fields of the answer."""

    status: int
    reason: str
    fields: tuple[tuple[bytes, bytes], ...] = ()


def logged_request(head: RequestHead) -> LoggedRequest:
    """What the access log says of a request."""
    return LoggedRequest(head.request_line, head.get(b"referer") or b"", head.get(b"user-agent") or b"", head.host)


class Prepared:
    """A request's way: where to, and its head for the upstream but for what only the connection knows.

    The head is: ``line``, the Host's value (``host``, or the backend's where that is empty), ``fields``, the
    connection's part (``ForwardedBy.plain``), ``tail``, the request id, and an empty line.
    """

    __slots__ = (
        "fields",
        "group",
        "host",
        "kept_out",
        "line",
        "logged",
        "response_timeout_secs",
        "route",
        "tail",
        "tally",
        "underscore_fields",
        "underscores",
        "upgrade",
    )

    def __init__(self, context: RelayContext, head: RequestHead, route: RouteEntry, path: bytes) -> None:
        self.route = route
        self.group: UpstreamGroup = context.groups[route.id]
        self.logged = logged_request(head)
        self.tally = context.tallies.of(route.site_name, head.method)
        self.response_timeout_secs = route.upstream_response_timeout_secs
        # Only HTTP/1.1 has upgrades.
        offered = () if self.group.http2 else head.upgrade
        self.upgrade = next((name for name in offered if name in route.upgrade_protocols), None)
        self.line = b"%b %b HTTP/1.1\r\nHost: " % (head.method, path)
        self.underscore_fields = 0
        self.underscores = context.settings.underscores_in_headers
        self.kept_out = head.hop_by_hop | edited(route.set_request_headers, route.remove_request_headers)
        self.fields = self._forwarded_fields(head)
        self.host = head.authority if route.preserve_host else b""
        authority = head.authority or head.host
        self.tail = b'%b"\r\nX-Forwarded-Host: %b\r\nVia: %b\r\nX-Request-Id: ' % (
            authority.replace(b'"', b""),
            authority,
            VIA,
        )

    def _forwarded_fields(self, head: RequestHead) -> bytes:
        route, kept_out = self.route, self.kept_out
        lines = [b""]
        dropped = DROPPED_FIELDS if not head.protocol else DROPPED_FIELDS | {WEBSOCKET_KEY}
        for lower, name, value in head.fields:
            if lower in kept_out or lower in dropped or lower.startswith(X_FORWARDED):
                continue
            if lower == b"expect" and not head.expect_continue:
                # RFC 9110 section 10.1.1: there is nothing to be continued, or HTTP/1.0 did not mean it.
                continue
            if b"_" in lower and not self.underscores:
                # CGI makes "_" and "-" the same, so X_Real_IP would pass for X-Real-IP.
                self.underscore_fields += 1
            else:
                lines.append(b"%b: %b" % (name, value))
        lines.extend(b"%b: %b" % (name, value) for name, value in route.set_request_headers)
        if head.chunked:
            lines.append(b"Transfer-Encoding: chunked")
        elif head.content_length is not None:
            lines.append(b"Content-Length: %d" % head.content_length)
        if self.upgrade is not None:
            lines.append(b"Connection: Upgrade\r\nUpgrade: %b" % self.upgrade)
        lines.append(b"")
        return b"\r\n".join(lines)

    def trailers(self, trailers: Trailers) -> tuple[Trailers, int]:
        """Those that go on, and how many were dropped for an underscore: an upstream may merge them into the head's
        fields (RFC 9110 section 6.5.1), so what a head may not say they may not say either."""
        kept: list[tuple[bytes, bytes]] = []
        underscore_fields = 0
        for name, value in trailers:
            lower = name.lower()
            if b"_" in lower and not self.underscores:
                underscore_fields += 1
            elif lower not in self.kept_out and not lower.startswith(X_FORWARDED):
                kept.append((name, value))
        return tuple(kept), underscore_fields


DROPPED_FIELDS = REPLACED_FIELDS | {PROXY_FIELD, b"host", b"content-length", b"transfer-encoding"}


def prepare(context: RelayContext, head: RequestHead) -> Prepared | RedirectTo | Refusal:
    """Route a request and work out its head for the upstream; the result is the same for the same head."""
    refused = REFUSED_METHODS.get(head.method)
    if refused is not None:
        return Refusal(refused, "method")
    site = context.routes.site(head.host)
    if site is None:
        return Refusal(421, "unknown-host")
    try:
        path = normalize_path(head.path)
    except PathError as error:
        return Refusal(400, str(error) or "path")
    route = site.match(path)
    if route is None:
        return Refusal(404, "no-route")
    if isinstance(route, RedirectEntry):
        return RedirectTo(route.status, route.location(b"/" if path == b"*" else path))
    if (
        route.max_request_body_bytes is not None
        and head.content_length is not None
        and head.content_length > route.max_request_body_bytes
    ):
        return Refusal(413, "body-too-large")
    return Prepared(context, head, route, path)


class RedirectTo(NamedTuple):
    """A request that is answered with a redirect."""

    status: int
    location: bytes


class ForwardedBy:
    """The fields that tell the upstream who the client is; one a connection (RFC 7239, and the X- fields in use)."""

    __slots__ = ("_context", "_for", "_port", "_proto", "peer", "plain", "trusted")

    def __init__(self, context: RelayContext, peer: bytes, port: bytes, proto: bytes = b"https") -> None:
        self._context = context
        self.peer = peer
        self._port = port
        self._proto = proto
        self._for = b'"[%b]"' % peer if b":" in peer else peer
        self.trusted = context.trusts(peer.decode("ascii", "replace"))
        self.plain = (
            b"X-Forwarded-For: %b\r\nX-Real-IP: %b\r\nX-Forwarded-Proto: %b\r\nX-Forwarded-Port: %b\r\n"
            b'Forwarded: for=%b;proto=%b;host="' % (peer, peer, proto, port, self._for, proto)
        )

    def trusted_fields(self, head: RequestHead, request_id: bytes) -> bytes:
        """What stands for ``plain``, ``tail`` and the request id when the peer is a trusted proxy.

        What it says is kept; where the field is a list, this hop is added."""
        value: Callable[[bytes], bytes | None] = head.get
        authority = head.authority or head.host
        chain = [v for lower, _, v in head.fields if lower == b"x-forwarded-for" and v]
        hops = [v for lower, _, v in head.fields if lower == b"forwarded" and v]
        hops.append(b'for=%b;proto=%b;host="%b"' % (self._for, self._proto, authority.replace(b'"', b"")))
        lines = [
            b"X-Forwarded-For: " + b", ".join([*chain, self.peer]),
            b"X-Real-IP: " + (value(b"x-real-ip") or self.client(head)),
            b"X-Forwarded-Proto: " + (value(b"x-forwarded-proto") or self._proto),
            b"X-Forwarded-Port: " + (value(b"x-forwarded-port") or self._port),
            b"X-Forwarded-Host: " + (value(b"x-forwarded-host") or authority),
            b"Forwarded: " + b", ".join(hops),
            b"Via: " + VIA,
            b"X-Request-Id: " + request_id,
        ]
        return b"\r\n".join(lines)

    def client(self, head: RequestHead) -> bytes:
        """The client's address: the peer's, or what trusted proxies say, read from the right up to the first address
        that is not one of theirs."""
        if not self.trusted:
            return self.peer
        chain = b",".join(v for lower, _, v in head.fields if lower == b"x-forwarded-for")
        client = self.peer
        for element in map(bytes.strip, reversed(chain.split(b","))):
            if not element:
                continue  # RFC 9110 section 5.6.1.2: empty elements of a list are ignored
            hop = hop_address(element)
            if not hop:
                break
            client = hop
            if not self._context.trusts(hop.decode("ascii")):
                break
        return client

    def request_id(self, head: RequestHead) -> bytes:
        """The request's id: a trusted proxy's own, else a new one."""
        if self.trusted:
            given = head.get(b"x-request-id")
            if given is not None and _REQUEST_ID.fullmatch(given):
                return given
        return self._context.new_request_id()


_HOP = re.compile(
    rb'"?(?:'
    rb"\[([0-9A-Fa-f:.]{2,45})(?:%[^\]]*)?\](?::[0-9]{1,5})?"
    rb"|([0-9.]{7,15}):[0-9]{1,5}"
    rb"|([0-9A-Fa-f:.]{2,45})(?:%[^,\"]*)?"
    rb')"?'
)
"""An address as an element of X-Forwarded-For: alone, in brackets, with a port or a zone, as balancers write it."""


@functools.lru_cache(maxsize=4096)
def hop_address(element: bytes) -> bytes:
    """The address of an element of X-Forwarded-For in its usual spelling, an IPv4-mapped one as IPv4; empty for what is
    none (``unknown``, say)."""
    found = _HOP.fullmatch(element)
    if found is None:
        return b""
    try:
        address = ip_address((found[1] or found[2] or found[3]).decode("ascii"))
    except ValueError:
        return b""
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address).encode("ascii")
