"""Who waits for an upstream connection: the clients take turns, the requests of each go in their order.

So a client with a hundred streams gets one connection a round, like one with a single request.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class FairQueue(Generic[Item]):
    """Every operation takes the same time however long the queue is."""

    __slots__ = ("_lines", "_size")

    def __init__(self) -> None:
        # Dictionaries keep their order: that of the turns, and within a line that of arrival.
        self._lines: dict[bytes, dict[Item, None]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def append(self, client: bytes, item: Item) -> None:
        """``item`` waits at the end of the line of ``client``; a client that is new gets its turn after the others."""
        self._lines.setdefault(client, {})[item] = None
        self._size += 1

    def first(self) -> Item:
        """Whose turn it is. Raises IndexError when nobody waits."""
        for line in self._lines.values():
            return next(iter(line))
        raise IndexError("nobody waits")

    def remove(self, client: bytes, item: Item) -> None:
        """``item`` is served, or waits no more. Where it was its turn, ``client`` goes behind the others.

        Raises KeyError when it does not wait.
        """
        lines = self._lines
        line = lines[client]
        had_the_turn = item is next(iter(line)) and client == next(iter(lines))
        del line[item]
        self._size -= 1
        if not line:
            del lines[client]
        elif had_the_turn:
            lines[client] = lines.pop(client)
