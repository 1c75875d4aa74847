"""HTTP/1.1 (RFC 9112) without input or output: feed bytes, take events.

Strict by grammar: what two parsers could read in two ways is refused, never repaired.
"""

from __future__ import annotations

from proxy.protocol.http1.body import END, LAST_CHUNK, EndOfMessage, Trailers, encode_chunk, encode_last_chunk
from proxy.protocol.http1.connection import HOP_BY_HOP
from proxy.protocol.http1.errors import REQUEST_STATUSES, RESPONSE_REASONS, Incomplete, ProtocolError
from proxy.protocol.http1.heads import (
    CHUNKED,
    LENGTH,
    NO_BODY,
    UNTIL_CLOSE,
    HeadCache,
    Limits,
    RequestHead,
    ResponseHead,
)
from proxy.protocol.http1.request import RequestDecoder
from proxy.protocol.http1.response import ResponseDecoder
from proxy.protocol.http1.state import CLOSED, Closed

__all__ = [
    "CHUNKED",
    "CLOSED",
    "END",
    "HOP_BY_HOP",
    "LAST_CHUNK",
    "LENGTH",
    "NO_BODY",
    "REQUEST_STATUSES",
    "RESPONSE_REASONS",
    "UNTIL_CLOSE",
    "Closed",
    "EndOfMessage",
    "HeadCache",
    "Incomplete",
    "Limits",
    "ProtocolError",
    "RequestDecoder",
    "RequestHead",
    "ResponseDecoder",
    "ResponseHead",
    "Trailers",
    "encode_chunk",
    "encode_last_chunk",
]
