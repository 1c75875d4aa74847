"""Header blocks for sending (RFC 7541), without a dynamic table: pure functions.

So a block costs nothing when it is sent again, on whichever connection; a table would be one more state a connection,
and would have to be told apart from what the peer holds. Names and values go as they are: Huffman coding spares some
bytes on the wire and costs more time than all the rest. Every literal is marked "never indexed" (section 6.2.3),
because what came marked so must go on marked so, and the mark does not survive HTTP/1.1.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from hpack.table import HeaderTable

STATIC_TABLE: Final[tuple[tuple[bytes, bytes], ...]] = HeaderTable.STATIC_TABLE
"""RFC 7541 appendix A; its indexes count from 1."""

TABLE_SIZE_ZERO: Final = b"\x20"
"""Section 6.3: what the first block of a connection begins with, so that no limit of the peer's can be exceeded."""

_NEVER_INDEXED: Final = 0x10
_INDEXED: Final = {field: bytes((0x80 | at,)) for at, field in reversed(list(enumerate(STATIC_TABLE, 1)))}
_NAME_INDEXES: Final = {name: at for at, (name, _) in reversed(list(enumerate(STATIC_TABLE, 1)))}
_REMEMBERED_BYTES: Final = 64  # a longer name is nobody's habit
_ONE_BYTE_LENGTHS: Final = 127


def _integer(value: int, prefix_bits: int, mark: int) -> bytes:
    """Section 5.1, with ``mark`` in the bits above the prefix."""
    largest = (1 << prefix_bits) - 1
    if value < largest:
        return bytes((mark | value,))
    octets = bytearray((mark | largest,))
    value -= largest
    while value >= 0x80:
        octets.append(0x80 | (value & 0x7F))
        value >>= 7
    octets.append(value)
    return bytes(octets)


def _name(name: bytes) -> bytes:
    index = _NAME_INDEXES.get(name)
    if index is not None:
        return _integer(index, 4, _NEVER_INDEXED)
    return b"%c%b%b" % (_NEVER_INDEXED, _integer(len(name), 7, 0), name)


_remembered_name: Final = lru_cache(maxsize=512)(_name)


def encode_fields(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Trailers, or any part of a block (name in lower case, value): blocks may be joined."""
    parts: list[bytes] = []
    for field in fields:
        indexed = _INDEXED.get(field)
        if indexed is not None:
            parts.append(indexed)
            continue
        name, value = field
        parts.append(_remembered_name(name) if len(name) <= _REMEMBERED_BYTES else _name(name))
        size = len(value)
        parts.append(b"%c%b" % (size, value) if size < _ONE_BYTE_LENGTHS else _integer(size, 7, 0) + value)
    return b"".join(parts)


def encode_response(status: int, fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A response's head: ``:status``, then fields (name in lower case, value)."""
    return encode_fields(((b":status", b"%d" % status), *fields))


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
    pseudo = [(b":method", method), (b":scheme", scheme), (b":authority", authority), (b":path", path)]
    if protocol:
        pseudo.append((b":protocol", protocol))
    return encode_fields((*pseudo, *fields))
