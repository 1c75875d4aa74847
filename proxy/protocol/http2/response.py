"""Responses of HTTP/2 as the relay knows them (RFC 9113 section 8.3.2), and a bounded memo of those seen before."""

from __future__ import annotations

import re
from typing import Final

from proxy.protocol.http1 import CHUNKED, HOP_BY_HOP, LENGTH, NO_BODY, HeadCache, ResponseHead
from proxy.protocol.http2.errors import StreamFault
from proxy.protocol.http2.fields import as_fields, content_length, split_pseudo
from proxy.protocol.http2.hpack_decoder import FIELD_OVERHEAD_BYTES, HeaderList
from proxy.protocol.http2.limits import DEFAULT_LIMITS, Limits
from proxy.protocol.http2.request import VERSION

_PSEUDO: Final = frozenset((b":status",))
_STATUS: Final = re.compile(rb"[1-5][0-9][0-9]")
_SWITCHING_PROTOCOLS: Final = 101
BODILESS_STATUSES: Final = frozenset((204, 304))


class ResponseHeads:
    """Makes response heads of header lists, and remembers at most ``max_entries``; one a generation, as `HeadCache`."""

    def __init__(self, limits: Limits = DEFAULT_LIMITS, max_entries: int = 512) -> None:
        self._limits = limits
        self._max_entries = max_entries
        self._entries: dict[tuple[tuple[tuple[bytes, bytes], ...], bool, bool], ResponseHead] = {}

    def parse(self, headers: HeaderList, ended: bool, to_head: bool) -> ResponseHead:
        """The head of a header list; ``ended``: no body follows; ``to_head``: it answers HEAD. Raises `StreamFault`."""
        key = (tuple(headers), ended, to_head)
        head = self._entries.get(key)
        if head is None:
            head, size = _parse(headers, ended, to_head, self._limits)
            if self._max_entries and size <= HeadCache.MAX_HEAD_BYTES:
                if len(self._entries) >= self._max_entries:
                    self._entries.clear()
                self._entries[key] = head
        return head


def _parse(headers: HeaderList, ended: bool, to_head: bool, limits: Limits) -> tuple[ResponseHead, int]:
    pseudo, regular = split_pseudo(headers, _PSEUDO)
    value = pseudo.get(b":status")
    if value is None:
        raise StreamFault("pseudo-missing")
    if not _STATUS.fullmatch(value):
        raise StreamFault("status")
    status = int(value)
    if status == _SWITCHING_PROTOCOLS:  # section 8.6
        raise StreamFault("switching-protocols")
    interim = status < 200
    if interim and ended:  # section 8.1
        raise StreamFault("interim-with-end")
    size = sum([len(name) + len(value) for name, value in headers]) + FIELD_OVERHEAD_BYTES * len(headers)
    if len(regular) > limits.max_fields or size > limits.max_header_list_bytes:
        raise StreamFault("head-too-large")
    length = content_length([value for name, value in regular if name == b"content-length"])
    bodiless = to_head or interim or status in BODILESS_STATUSES
    if ended and length and not bodiless:  # section 8.1.1
        raise StreamFault("length-mismatch")
    with_body = CHUNKED if length is None else LENGTH
    framing = NO_BODY if ended or bodiless else with_body
    if ended and not bodiless:
        length = 0  # said to a client of HTTP/1.1, which could not know otherwise
    head = ResponseHead(status, b"", VERSION, as_fields(regular), length, framing, True, (), HOP_BY_HOP, interim)
    return head, size
