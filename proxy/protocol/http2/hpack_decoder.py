"""Header blocks as they come (RFC 7541): the static table and Huffman's code are the hpack package's, the loop is not.

That package's own decoder copies the rest of the block for each literal, so a hostile block costs time quadratic in its
size; this one does not, tells whether a block changed the dynamic table, and remembers short Huffman strings.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import Final

from hpack.exceptions import HPACKDecodingError
from hpack.huffman_table import decode_huffman

from proxy.protocol.http2.hpack_encoder import STATIC_TABLE

HeaderList = list[tuple[bytes, bytes]]

DEFAULT_TABLE_BYTES: Final = 4096
"""SETTINGS_HEADER_TABLE_SIZE (RFC 9113 section 6.5.2), which we leave as it is."""
FIELD_OVERHEAD_BYTES: Final = 32  # RFC 7541 section 4.1, RFC 9113 section 6.5.2

_FIRST_DYNAMIC: Final = len(STATIC_TABLE) + 1
_MAX_INTEGER_SHIFT: Final = 28  # five octets: more than any index, length or size here may be
_REMEMBERED_BYTES: Final = 128

_remembered_huffman: Final = lru_cache(maxsize=1024)(decode_huffman)


class HpackError(Exception):
    """The block is not one, or means something that is not there (RFC 7541 sections 2.3.3, 4.2, 5 and 6.3)."""


class HeaderListTooLargeError(Exception):
    """The decoded list passes ``max_list_bytes``. The table is out of step then: the connection cannot go on."""


def _integer(block: bytes, pos: int, largest: int) -> tuple[int, int]:
    """The rest of an integer whose prefix was all ones (section 5.1): its value, and where to go on."""
    value = largest
    shift = 0
    while True:
        octet = block[pos]
        pos += 1
        value += (octet & 0x7F) << shift
        if octet < 0x80:
            return value, pos
        shift += 7
        if shift > _MAX_INTEGER_SHIFT:
            raise HpackError


def _string(block: bytes, pos: int) -> tuple[bytes, int]:
    """A string literal (section 5.2): its octets, and where to go on."""
    octet = block[pos]
    size = octet & 0x7F
    pos += 1
    if size == 0x7F:
        size, pos = _integer(block, pos, 0x7F)
    end = pos + size
    text = block[pos:end]
    if len(text) != size:
        raise HpackError
    if octet & 0x80:
        text = _remembered_huffman(text) if size <= _REMEMBERED_BYTES else decode_huffman(text)
    return text, end


class HpackDecoder:
    """The peer's dynamic table, and the decoding of its blocks."""

    __slots__ = ("_entries", "_max_table_bytes", "_table_bytes", "changes")

    def __init__(self) -> None:
        self._entries: deque[tuple[bytes, bytes]] = deque()
        self._table_bytes = 0
        self._max_table_bytes = DEFAULT_TABLE_BYTES
        self.changes = 0
        """How often a block has changed the table or its size: what was decoded before may mean something else now."""

    def decode(self, block: bytes, max_list_bytes: int) -> HeaderList:
        """Decodes a whole block. Raises `HpackError` or `HeaderListTooLargeError`; the table is of no use after that.

        ``max_list_bytes``: of the list, counted as in RFC 9113 section 6.5.2.
        """
        try:
            return self._decode(block, max_list_bytes)
        except (IndexError, HPACKDecodingError):  # the block ends too early; the string is not Huffman code
            raise HpackError from None

    def _decode(self, block: bytes, max_list_bytes: int) -> HeaderList:
        fields: HeaderList = []
        end = len(block)
        pos = 0
        left = max_list_bytes
        while pos < end:
            octet = block[pos]
            pos += 1
            if octet >= 0x80:  # section 6.1
                index = octet & 0x7F
                if index == 0x7F:
                    index, pos = _integer(block, pos, 0x7F)
                field = self._entry(index)
            elif octet & 0x60 == 0x20:  # section 6.3
                if fields:
                    raise HpackError
                pos = self._resize(block, pos, octet & 0x1F)
                continue
            else:  # section 6.2
                largest = 0x3F if octet & 0x40 else 0x0F
                index = octet & largest
                if index == largest:
                    index, pos = _integer(block, pos, largest)
                if index:
                    name = self._entry(index)[0]
                else:
                    name, pos = _string(block, pos)
                value, pos = _string(block, pos)
                field = (name, value)
                if octet & 0x40:
                    self._add(field)
            left -= len(field[0]) + len(field[1]) + FIELD_OVERHEAD_BYTES
            if left < 0:
                raise HeaderListTooLargeError
            fields.append(field)
        return fields

    def _entry(self, index: int) -> tuple[bytes, bytes]:
        if index >= _FIRST_DYNAMIC:
            return self._entries[index - _FIRST_DYNAMIC]
        if not index:
            raise HpackError
        return STATIC_TABLE[index - 1]

    def _add(self, field: tuple[bytes, bytes]) -> None:
        # Section 4.4: an entry larger than the table empties it.
        self.changes += 1
        self._entries.appendleft(field)
        self._table_bytes += len(field[0]) + len(field[1]) + FIELD_OVERHEAD_BYTES
        self._evict()

    def _resize(self, block: bytes, pos: int, size: int) -> int:
        if size == 0x1F:
            size, pos = _integer(block, pos, 0x1F)
        if size > DEFAULT_TABLE_BYTES:
            raise HpackError
        if size != self._max_table_bytes:
            self.changes += 1
            self._max_table_bytes = size
            self._evict()
        return pos

    def _evict(self) -> None:
        while self._table_bytes > self._max_table_bytes:
            name, value = self._entries.pop()
            self._table_bytes -= len(name) + len(value) + FIELD_OVERHEAD_BYTES
