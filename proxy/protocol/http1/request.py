"""Requests: bytes in, heads and bodies out (RFC 9112 sections 3, 6 and 7).

Theory of operation. A decoder is between messages or at a head, or in a body, of a length or chunked. A head that has
come whole costs one expression for its grammar and one pass over its lines, or one look-up where it was seen before. A
head in pieces, or one that the expression refuses, goes through a `SectionScan`, which looks at each byte once and
decides by the bytes alone; only then are the parts looked at for the reason. So the verdict on a stream is the same
however it is cut. After an error the decoder raises that same error for good.
"""

from __future__ import annotations

import re
from typing import Final

from proxy.protocol.http1.authority import Authority, parse_authority
from proxy.protocol.http1.body import END, ChunkedBody, EndOfMessage
from proxy.protocol.http1.connection import NO_OPTIONS, parse_connection, parse_upgrade
from proxy.protocol.http1.errors import REQUEST_STATUSES, Incomplete, ProtocolError, request_fault
from proxy.protocol.http1.framing import check_chunked, content_length
from proxy.protocol.http1.grammar import (
    REQUEST_HEAD,
    SectionScan,
    field_lines_fault,
    request_line_fault,
    request_scan,
    split_fields,
)
from proxy.protocol.http1.heads import HeadCache, Limits, RequestHead
from proxy.protocol.http1.source import Source
from proxy.protocol.http1.state import CLOSED, Closed

_CR: Final = 13
_NOTED: Final = frozenset({b"host", b"content-length", b"transfer-encoding", b"connection", b"expect", b"upgrade"})
# RFC 9112 section 3.2.2; the schemes that this proxy serves (RFC 9110 section 4.2)
_ABSOLUTE_FORM: Final = re.compile(rb"(?i:(https?)://)([^/?]*+)(.*+)")
_DEFAULT_PORTS: Final = {b"http": 80, b"https": 443}


def parse_request_head(raw: bytes, limits: Limits) -> RequestHead:
    """Parses a whole head with its empty line. Raises `ProtocolError`."""
    match = REQUEST_HEAD.fullmatch(raw)
    if match is None:
        raise _diagnosis(raw, limits)
    method, target, minor = match.groups()
    line_end = match.end(3)
    fields = split_fields(raw, line_end + 2)
    if len(fields) > limits.max_fields or len(target) > limits.max_target_bytes or len(raw) > limits.max_head_bytes:
        raise _diagnosis(raw, limits)
    version = 11 if minor == b"1" else 10

    noted: dict[bytes, list[bytes]] = {}
    for lower, value in [(lower, value) for lower, _, value in fields if lower in _NOTED]:
        noted.setdefault(lower, []).append(value)

    authority, path = _target(method, target, _host(noted.get(b"host"), version))
    length: int | None = None
    chunked = False
    if b"content-length" in noted:
        length = content_length(noted[b"content-length"], request_fault)
    if b"transfer-encoding" in noted:
        check_chunked(noted[b"transfer-encoding"], version, length is not None, request_fault)
        chunked = True
    has_body = chunked or bool(length)

    options = NO_OPTIONS
    if b"connection" in noted:
        try:
            options = parse_connection(b",".join(noted[b"connection"]))
        except ValueError:
            raise request_fault("connection") from None
    upgrade: tuple[bytes, ...] = ()
    if options.upgrade and version == 11 and not has_body and b"upgrade" in noted:
        upgrade = parse_upgrade(b",".join(noted[b"upgrade"]))
    expects = False
    if b"expect" in noted and version == 11:  # RFC 9110 section 10.1.1: ignored in HTTP/1.0
        if any(value.lower() != b"100-continue" for value in noted[b"expect"]):
            raise request_fault("expectation")
        expects = has_body

    return RequestHead(
        method,
        target,
        path,
        version,
        authority.host if authority else b"",
        authority.value if authority else b"",
        fields,
        length,
        chunked,
        has_body,
        not options.close and (version == 11 or options.keep_alive),
        expects,
        upgrade,
        options.hop_by_hop,
        raw[:line_end],
    )


def _host(values: list[bytes] | None, version: int) -> Authority | None:
    """The Host field (RFC 9112 section 3.2), which only HTTP/1.0 may do without."""
    if values is None:
        if version == 11:
            raise request_fault("no-host")
        return None
    if len(values) > 1:
        raise request_fault("two-hosts")
    try:
        return parse_authority(values[0])
    except ValueError:
        raise request_fault("host") from None


def _target(method: bytes, target: bytes, host: Authority | None) -> tuple[Authority | None, bytes]:
    """The authority and the origin form of a request target in any of its four forms (RFC 9112 section 3.2)."""
    if method == b"CONNECT":
        authority = _target_authority(target)
        if authority.port is None:
            raise request_fault("target")
        return host or authority, b""
    if target[0] == 47:  # the origin form starts with a slash
        return host, target
    if target == b"*":
        if method != b"OPTIONS":
            raise request_fault("target")
        return host, target
    absolute = _ABSOLUTE_FORM.fullmatch(target)
    if absolute is None:
        raise request_fault("target")
    scheme, authority_part, path = absolute.groups()
    authority = _target_authority(authority_part)
    default_port = _DEFAULT_PORTS[scheme.lower()]
    if host is not None and (
        host.host != authority.host or (host.port or default_port) != (authority.port or default_port)
    ):
        raise request_fault("authority-mismatch")
    if not path and method == b"OPTIONS":  # RFC 9112 section 3.2.4
        path = b"*"
    elif path[:1] != b"/":
        path = b"/" + path
    return host or authority, path


def _target_authority(value: bytes) -> Authority:
    try:
        return parse_authority(value)
    except ValueError:
        raise request_fault("userinfo" if b"@" in value else "target") from None


def _scan(limits: Limits) -> SectionScan:
    return request_scan(request_fault, limits.max_head_bytes, limits.max_fields, limits.max_target_bytes)


def _diagnosis(raw: bytes, limits: Limits) -> ProtocolError:
    """The error for a whole head that the expression or a limit refuses."""
    _scan(limits).end(raw, 0)
    line_end = raw.index(b"\r\n")
    reason = request_line_fault(raw[:line_end], limits.max_target_bytes) or field_lines_fault(raw, line_end + 2)
    return request_fault(reason)


class RequestDecoder(Source):
    """Decodes the requests of one connection, one event a call.

    With ``cache``, heads seen before are not parsed again.
    """

    __slots__ = (
        "_cache",
        "_chunked",
        "_entries",
        "_error",
        "_head_scan",
        "_in_length",
        "_left",
        "_limits",
        "_line_skipped",
    )

    def __init__(self, limits: Limits, cache: HeadCache | None = None) -> None:
        super().__init__()
        if cache is None:
            cache = HeadCache(max_entries=0)
        cache.bind(limits)
        self._limits = limits
        self._cache = cache
        self._entries = cache.entries
        self._chunked: ChunkedBody | None = None
        self._left = 0
        self._in_length = False
        self._error: ProtocolError | None = None
        self._head_scan: SectionScan | None = None
        self._line_skipped = False

    @property
    def started(self) -> bool:
        """Some byte of a next head has arrived."""
        return not self._in_length and self._chunked is None and self._pos < len(self._data)

    def next_event(self) -> RequestHead | bytes | EndOfMessage | Closed | None:
        """The next event, or None when more input is needed.

        A head whose ``has_body`` is False is a whole message. After another one come non-empty bytes (all that is
        decodable at the moment, joined), if any, and an `EndOfMessage`. `CLOSED` is the end of input between messages.
        Raises `ProtocolError`, or `Incomplete` at the end of input inside a message; every later call raises it again.
        """
        if self._error is not None:
            raise self._error.again()
        try:
            if self._in_length:
                return self._next_of_length()
            return self._next_head() if self._chunked is None else self._next_of_chunked(self._chunked)
        except ProtocolError as error:
            self._error = error.again()
            raise

    def take_whole(self, data: bytes) -> RequestHead | None:
        """A shortcut for ``feed`` and one ``next_event`` where ``data`` is just one bodiless request seen before.

        None: it is not, or something else is under way. Then nothing has been taken, and ``data`` is to be fed.
        """
        if self._data or self._in_length or self._line_skipped or self._chunked is not None or self._error is not None:
            return None
        head = self._entries.get(data)
        return head if type(head) is RequestHead and not head.has_body else None

    def _next_of_length(self) -> bytes | EndOfMessage | None:
        if not self._left:
            self._in_length = False
            return END
        piece = self._take(self._left)
        self._left -= len(piece)
        if piece:
            return piece
        self._check_eof()
        return None

    def _next_of_chunked(self, body: ChunkedBody) -> bytes | EndOfMessage | None:
        event, pos = body.decode(self._data, self._pos)
        self._advance(pos)
        if event is None:
            self._check_eof()
        elif type(event) is EndOfMessage:
            self._chunked = None
        return event

    def _next_head(self) -> RequestHead | Closed | None:
        data = self._data
        pos = self._pos
        if pos == len(data):
            return CLOSED if self._eof else None
        if not pos and len(data) <= HeadCache.MAX_HEAD_BYTES and type(data) is bytes:
            head = self._entries.get(data)
            if type(head) is RequestHead:
                return self._begin(head, len(data))
        if data[pos] == _CR and self._head_scan is None:
            # RFC 9112 section 2.2: one empty line before a request is for the sake of old clients.
            if self._line_skipped:
                raise request_fault("empty-line")
            if pos + 1 == len(data):
                self._check_eof()
                return None
            if data[pos + 1] != 10:
                raise request_fault("bare-cr")
            self._line_skipped = True
            self._advance(pos + 2)
            return self._next_head()
        end = self._head_end(data, pos)
        if end < 0:
            self._check_eof()
            return None
        raw = bytes(data[pos:end])
        head = self._entries.get(raw)
        if type(head) is not RequestHead:
            head = parse_request_head(raw, self._limits)
            if self._cache.max_entries:
                self._cache.put(raw, head)
        return self._begin(head, end)

    def _head_end(self, data: bytes | bytearray, pos: int) -> int:
        if self._head_scan is None:
            end = data.find(b"\r\n\r\n", pos) + 4
            if end >= 4 and end - pos <= self._limits.max_head_bytes:
                return end
            self._head_scan = _scan(self._limits)
        return self._head_scan.end(data, pos)

    def _check_eof(self) -> None:
        if self._eof:
            raise Incomplete(REQUEST_STATUSES["incomplete"], "incomplete")

    def _begin(self, head: RequestHead, end: int) -> RequestHead:
        self._advance(end)
        self._head_scan = None
        self._line_skipped = False
        if head.chunked:
            self._chunked = ChunkedBody(request_fault, self._limits)
        elif head.content_length:
            self._left = head.content_length
            self._in_length = True
        return head
