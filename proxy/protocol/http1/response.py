"""Responses of an upstream: bytes in, heads and bodies out (RFC 9112 sections 4, 6 and 7).

As strict as for requests: an upstream may be made to echo what a client sent, and what two parsers read in two ways
is how one client's answer reaches another. Theory of operation: see request.py; the states are `_IDLE` (no exchange),
`_HEAD`, one for each way to frame a body, and `_TUNNEL` (after 101). Bytes that come while idle were not asked for,
and are an error.
"""

from __future__ import annotations

from typing import Final

from proxy.protocol.http1.body import END, ChunkedBody, EndOfMessage
from proxy.protocol.http1.connection import NO_OPTIONS, parse_connection, parse_upgrade
from proxy.protocol.http1.errors import RESPONSE_STATUS, Incomplete, ProtocolError, response_fault
from proxy.protocol.http1.framing import check_chunked, content_length
from proxy.protocol.http1.grammar import RESPONSE_HEAD, SectionScan, field_lines_fault, split_fields, status_line_fault
from proxy.protocol.http1.heads import CHUNKED, LENGTH, NO_BODY, UNTIL_CLOSE, HeadCache, Limits, ResponseHead
from proxy.protocol.http1.source import Source
from proxy.protocol.http1.state import CLOSED, Closed

_IDLE: Final = 0
_HEAD: Final = 1
_IN_LENGTH: Final = 2
_IN_CHUNKED: Final = 3
_UNTIL_CLOSE: Final = 4
_TUNNEL: Final = 5

_SWITCHING_PROTOCOLS: Final = 101
_BODILESS_STATUSES: Final = frozenset({204, 304})
_NOTED: Final = frozenset({b"content-length", b"transfer-encoding", b"connection", b"upgrade"})


def parse_response_head(raw: bytes, limits: Limits, to_head: bool) -> ResponseHead:
    """Parses a whole head with its empty line; ``to_head``: it answers HEAD. Raises `ProtocolError`."""
    match = RESPONSE_HEAD.fullmatch(raw)
    if match is None:
        raise _diagnosis(raw, limits)
    minor, status_digits, phrase = match.groups()
    fields = split_fields(raw, raw.index(b"\n") + 1)
    if len(fields) > limits.max_fields or len(raw) > limits.max_head_bytes:
        raise _diagnosis(raw, limits)
    version = 11 if minor == b"1" else 10
    status = int(status_digits)

    noted: dict[bytes, list[bytes]] = {}
    for lower, value in [(lower, value) for lower, _, value in fields if lower in _NOTED]:
        noted.setdefault(lower, []).append(value)

    length: int | None = None
    if b"content-length" in noted:
        length = content_length(noted[b"content-length"], response_fault)
    chunked = False
    if b"transfer-encoding" in noted:
        check_chunked(noted[b"transfer-encoding"], version, length is not None, response_fault)
        chunked = True
    # RFC 9112 section 6.3, in the order of its rules
    if to_head or status < 200 or status in _BODILESS_STATUSES:
        framing = NO_BODY
    elif chunked:
        framing = CHUNKED
    elif length is None:
        framing = UNTIL_CLOSE
    else:
        framing = LENGTH if length else NO_BODY

    options = NO_OPTIONS
    if b"connection" in noted:
        try:
            options = parse_connection(b",".join(noted[b"connection"]))
        except ValueError:
            raise response_fault("connection") from None
    upgrade: tuple[bytes, ...] = ()
    if options.upgrade and b"upgrade" in noted:
        upgrade = parse_upgrade(b",".join(noted[b"upgrade"]))
    switches = status == _SWITCHING_PROTOCOLS
    return ResponseHead(
        status,
        phrase or b"",
        version,
        fields,
        length,
        framing,
        not options.close and (version == 11 or options.keep_alive) and framing != UNTIL_CLOSE and not switches,
        upgrade,
        options.hop_by_hop,
        status < 200 and not switches,
    )


def _scan(limits: Limits) -> SectionScan:
    return SectionScan(
        response_fault, max_bytes=limits.max_head_bytes, max_lines=limits.max_fields + 1, reason="head-too-large"
    )


def _diagnosis(raw: bytes, limits: Limits) -> ProtocolError:
    """The error for a whole head that the expression or a limit refuses."""
    _scan(limits).end(raw, 0)
    line_end = raw.index(b"\r\n")
    return response_fault(status_line_fault(raw[:line_end]) or field_lines_fault(raw, line_end + 2))


class ResponseDecoder(Source):
    """Decodes the responses that come on one upstream connection, one exchange after another."""

    __slots__ = (
        "_cache",
        "_chunked",
        "_entries",
        "_error",
        "_fresh",
        "_head_scan",
        "_left",
        "_limits",
        "_state",
        "_to_head",
    )

    def __init__(self, limits: Limits, cache: HeadCache | None = None) -> None:
        super().__init__()
        if cache is None:
            cache = HeadCache(max_entries=0)
        cache.bind(limits)
        self._limits = limits
        self._cache = cache
        self._entries = cache.entries
        self._state = _IDLE
        self._fresh = True
        self._to_head = False
        self._chunked = ChunkedBody(response_fault, limits)
        self._left = 0
        self._error: ProtocolError | None = None
        self._head_scan: SectionScan | None = None

    def start(self, method: bytes) -> None:
        """A request with this method is being sent, whose response comes next.

        Raises RuntimeError when not `at_rest`, and ValueError for CONNECT, whose answer has a framing of its own.
        """
        if not self.at_rest:
            raise RuntimeError("the exchange before has not ended cleanly")
        if method == b"CONNECT":
            raise ValueError("CONNECT is not supported")
        self._to_head = method == b"HEAD"
        self._state = _HEAD
        self._fresh = True

    @property
    def at_rest(self) -> bool:
        """No exchange is open, no byte is left over and nothing went wrong: a next exchange may be started.

        Whether the message that ended lets the connection live is its head's ``keep_alive``.
        """
        return self._state == _IDLE and self._pos == len(self._data) and not self._eof and self._error is None

    def next_event(self) -> ResponseHead | bytes | EndOfMessage | Closed | None:
        """The next event, or None when more input is needed.

        Interim heads come first, then the final one. With the framing `NO_BODY` it is the whole message; with others
        come non-empty bytes (all that is decodable at the moment, joined), if any, and an `EndOfMessage`. After 101
        everything else is for `take_rest`. `CLOSED` is the end of input with no byte of a response, be it that one was
        awaited or not. Raises `ProtocolError`, or `Incomplete` at the end of input inside an exchange that had begun
        to be answered; every later call raises it again.
        """
        if self._error is not None:
            raise self._error.again()
        try:
            state = self._state
            if state == _HEAD:
                return self._next_head()
            if state == _IN_LENGTH:
                return self._next_of_length()
            if state == _IN_CHUNKED:
                return self._next_of_chunked()
            return self._next_until_close() if state == _UNTIL_CLOSE else self._between()
        except ProtocolError as error:
            self._error = error.again()
            raise

    def take_whole(self, data: bytes) -> tuple[ResponseHead, bytes] | None:
        """A shortcut for ``feed`` and all events where ``data`` is just one response whose head was seen before.

        The head is final, and the body (maybe empty) is complete. None: it is not so, or something is under way. Then
        nothing has been taken, and ``data`` is to be fed.
        """
        if self._state != _HEAD or self._data or self._to_head or self._eof or self._error is not None:
            return None
        end = data.find(b"\r\n\r\n") + 4
        head = self._entries.get(data[:end])
        if type(head) is not ResponseHead or head.interim or head.status == _SWITCHING_PROTOCOLS:
            return None
        length = head.content_length if head.framing == LENGTH else 0 if head.framing == NO_BODY else None
        if length is None or len(data) - end != length:
            return None
        self._state = _IDLE
        return head, data[end:]

    def _between(self) -> Closed | None:
        if self._pos < len(self._data):
            if self._state == _TUNNEL:
                return None
            raise response_fault("unsolicited")
        return CLOSED if self._eof else None

    def _next_of_length(self) -> bytes | EndOfMessage | None:
        if not self._left:
            self._state = _IDLE
            return END
        piece = self._take(self._left)
        self._left -= len(piece)
        if piece:
            return piece
        self._check_eof()
        return None

    def _next_of_chunked(self) -> bytes | EndOfMessage | None:
        event, pos = self._chunked.decode(self._data, self._pos)
        self._advance(pos)
        if event is None:
            self._check_eof()
        elif type(event) is EndOfMessage:
            self._state = _IDLE
        return event

    def _next_until_close(self) -> bytes | EndOfMessage | None:
        piece = self._take(len(self._data))
        if piece:
            return piece
        if not self._eof:
            return None
        self._state = _IDLE
        return END

    def _next_head(self) -> ResponseHead | Closed | None:
        data = self._data
        pos = self._pos
        if pos == len(data):
            if self._fresh and self._eof:
                return CLOSED
            self._check_eof()
            return None
        self._fresh = False
        end = self._head_end(data, pos)
        if end < 0:
            self._check_eof()
            return None
        raw = bytes(data[pos:end])
        # The same bytes mean another thing in answer to HEAD, so those are not remembered.
        head = None if self._to_head else self._entries.get(raw)
        if type(head) is not ResponseHead:
            head = parse_response_head(raw, self._limits, self._to_head)
            if not self._to_head and self._cache.max_entries:
                self._cache.put(raw, head)
        self._advance(end)
        self._head_scan = None
        self._begin(head)
        return head

    def _head_end(self, data: bytes | bytearray, pos: int) -> int:
        if self._head_scan is None:
            end = data.find(b"\r\n\r\n", pos) + 4
            if end >= 4 and end - pos <= self._limits.max_head_bytes:
                return end
            self._head_scan = _scan(self._limits)
        return self._head_scan.end(data, pos)

    def _check_eof(self) -> None:
        if self._eof:
            raise Incomplete(RESPONSE_STATUS, "incomplete")

    def _begin(self, head: ResponseHead) -> None:
        if head.interim:
            return
        framing = head.framing
        if framing == NO_BODY:
            self._state = _TUNNEL if head.status == _SWITCHING_PROTOCOLS else _IDLE
            return
        if framing == LENGTH:
            self._left = head.content_length or 0
            self._state = _IN_LENGTH
        elif framing == CHUNKED:
            self._chunked = ChunkedBody(response_fault, self._limits)
            self._state = _IN_CHUNKED
        else:
            self._state = _UNTIL_CLOSE
