"""The input of a decoder: pieces in, a position, the end."""

from __future__ import annotations


class Source:
    """Holds what was fed and not yet decoded. A piece that comes when nothing is held is not copied."""

    __slots__ = ("_data", "_eof", "_pos")

    def __init__(self) -> None:
        self._data: bytes | bytearray = b""
        self._pos = 0
        self._eof = False

    def feed(self, data: bytes) -> None:
        """Takes the next piece of input, as long as one likes."""
        held = self._data
        if self._pos == len(held):
            self._data = data
        elif type(held) is bytearray:
            del held[: self._pos]
            held += data
        else:
            self._data = held = bytearray(memoryview(held)[self._pos :])
            held += data
        self._pos = 0

    def feed_eof(self) -> None:
        """The peer sends nothing more."""
        self._eof = True

    @property
    def buffered(self) -> int:
        """How many bytes were fed and not yet decoded."""
        return len(self._data) - self._pos

    def take_rest(self) -> bytes:
        """Removes and returns what was fed and not decoded: the first bytes of a tunnel."""
        return self._take(len(self._data))

    def _take(self, max_bytes: int) -> bytes:
        """Removes and returns what is held, at most ``max_bytes``; without a copy where a whole piece goes."""
        data = self._data
        pos = self._pos
        end = pos + max_bytes
        if end >= len(data):
            self._data = b""
            self._pos = 0
            return bytes(data[pos:] if pos else data)
        self._pos = end
        return bytes(data[pos:end])

    def _advance(self, pos: int) -> None:
        """Everything before ``pos`` is decoded; nothing is held for an idle connection."""
        if pos == len(self._data):
            self._data = b""
            self._pos = 0
        else:
            self._pos = pos
