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
        rest = bytes(self._data[self._pos :])
        self._data = b""
        self._pos = 0
        return rest

    def _advance(self, pos: int) -> None:
        """Everything before ``pos`` is decoded; nothing is held for an idle connection."""
        if pos == len(self._data):
            self._data = b""
            self._pos = 0
        else:
            self._pos = pos
