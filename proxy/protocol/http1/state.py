"""Values that mark a point in a connection's life."""

from __future__ import annotations

from enum import Enum
from typing import Final, Literal


class Closed(Enum):
    """The type of `CLOSED`."""

    CLOSED = "closed"


CLOSED: Final[Literal[Closed.CLOSED]] = Closed.CLOSED
"""The input ended cleanly, between messages."""
