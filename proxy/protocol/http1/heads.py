"""The heads of messages, as values, and a bounded memo of those seen before."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from proxy.protocol.http1.grammar import Fields

NO_BODY: Final = 0
LENGTH: Final = 1
CHUNKED: Final = 2
UNTIL_CLOSE: Final = 3


class Limits(NamedTuple):
    """What a peer may send at most."""

    max_head_bytes: int
    """A head from its first byte to its empty line (431)."""
    max_fields: int
    """Field lines in a head, and again in a trailer section (431)."""
    max_target_bytes: int = 16384
    """The request target (414)."""
    max_trailer_bytes: int = 8192
    """A trailer section with its empty line (431)."""


@dataclass(slots=True)
class RequestHead:
    """A request's head (RFC 9112 section 3). Shared between equal requests by a `HeadCache`: treat it as frozen."""

    method: bytes
    """Any token; CONNECT too, which is for the session to refuse."""
    target: bytes
    """As on the wire."""
    path: bytes
    """The origin form, path and query; ``*`` for ``OPTIONS *``; empty for CONNECT."""
    version: int
    """10 or 11; 20 where `proxy.protocol.http2` makes it, which see for what else differs."""
    host: bytes
    """Lower case, without port, brackets or trailing dot; empty only in HTTP/1.0 without a Host field."""
    authority: bytes
    """The value of the Host field to forward."""
    fields: Fields
    content_length: int | None
    chunked: bool
    has_body: bool
    """Whether events of a body follow; False for a Content-Length of 0."""
    keep_alive: bool
    """Whether the client expects the connection to stay open (RFC 9112 section 9.3)."""
    expect_continue: bool
    """The client waits for 100 (Continue) before it sends the body; never True without a body or in HTTP/1.0."""
    upgrade: tuple[bytes, ...]
    """Protocols asked for, in lower case; only of an HTTP/1.1 request without a body whose Connection names Upgrade."""
    hop_by_hop: frozenset[bytes]
    """Lower-case names of the fields not to forward (RFC 9110 section 7.6.1)."""
    request_line: bytes
    """Without its CRLF."""
    protocol: bytes = b""
    """The ``:protocol`` of an extended CONNECT (RFC 8441), which only HTTP/2 has."""
    memo: object | None = field(default=None, compare=False)
    """A free slot for a value that the user derives from the head alone."""

    def get(self, lower_name: bytes) -> bytes | None:
        """The value of the first field of this name."""
        for lower, _, value in self.fields:
            if lower == lower_name:
                return value
        return None


@dataclass(slots=True)
class ResponseHead:
    """A response's head (RFC 9112 section 4). Shared between equal responses by a `HeadCache`: treat it as frozen."""

    status: int
    """100 to 599."""
    reason: bytes
    """The reason phrase, often empty."""
    version: int
    """10, 11 or 20."""
    fields: Fields
    content_length: int | None
    """As announced, also where no body follows (HEAD, 304)."""
    framing: int
    """`NO_BODY`, `LENGTH`, `CHUNKED` or `UNTIL_CLOSE`."""
    keep_alive: bool
    """Whether the upstream keeps the connection open after this message."""
    upgrade: tuple[bytes, ...]
    """Protocols in lower case, when Connection names Upgrade."""
    hop_by_hop: frozenset[bytes]
    """Lower-case names of the fields not to forward (RFC 9110 section 7.6.1)."""
    interim: bool
    """1xx but 101: another head follows (RFC 9110 section 15.2)."""
    memo: object | None = field(default=None, compare=False)
    """A free slot for a value that the user derives from the head alone."""

    def get(self, lower_name: bytes) -> bytes | None:
        """The value of the first field of this name."""
        for lower, _, value in self.fields:
            if lower == lower_name:
                return value
        return None


class HeadCache:
    """A bounded memo from the bytes of a head to its parsed form, which is a pure function of them.

    Clients repeat themselves: pollers, browsers and git send the same head many times. To be shared only by decoders
    of one kind with equal `Limits`, which what is stored has passed.
    """

    MAX_HEAD_BYTES: Final = 4096
    MAX_NAMES: Final = 64
    """A head whose Connection names more is not kept: as a set they take thirty times their size."""

    __slots__ = ("_limits", "entries", "max_entries")

    def __init__(self, max_entries: int = 512) -> None:
        self.max_entries = max_entries
        self.entries: dict[bytes, RequestHead | ResponseHead] = {}
        self._limits: Limits | None = None

    def bind(self, limits: Limits) -> None:
        """Called by each decoder that uses the cache. Raises ValueError for limits other than the first ones."""
        if self._limits is not None and self._limits != limits:
            raise ValueError(f"this cache is for {self._limits}, a decoder with {limits} needs its own")
        self._limits = limits

    def put(self, raw: bytes, head: RequestHead | ResponseHead) -> None:
        """Remembers ``head``; a full cache is emptied first, which costs less than keeping an order of use."""
        if len(raw) <= self.MAX_HEAD_BYTES and len(head.hop_by_hop) <= self.MAX_NAMES:
            if len(self.entries) >= self.max_entries:
                self.entries.clear()
            self.entries[raw] = head
