"""Header blocks for sending (RFC 7541), without a dynamic table: pure functions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

# RFC 7541 appendix A
STATIC_TABLE: Final[tuple[tuple[bytes, bytes], ...]] = ()


def encode_response(status: int, fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A response's head: ``:status``, then fields (name in lower case, value)."""
    raise NotImplementedError


def encode_request(
    method: bytes,
    *,
    scheme: bytes,
    authority: bytes,
    path: bytes,
    fields: Iterable[tuple[bytes, bytes]],
    protocol: bytes = b"",
) -> bytes:
    """A request's head: pseudo-header fields, then fields (name in lower case, value)."""
    raise NotImplementedError


def encode_fields(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Trailers, or any part of a block: blocks may be joined."""
    raise NotImplementedError
