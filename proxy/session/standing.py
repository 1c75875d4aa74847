"""What a client's connection is worth when there is no room for another: the scale, for sessions and for admission."""

from __future__ import annotations

import enum


class Standing(enum.IntEnum):
    """What a connection waits for, in the order in which connections give way."""

    HANDSHAKE = 0
    """The client owes the rest of its TLS handshake."""
    HEAD = 1
    """The client owes the first request, the rest of a request's head, or the end of a connection that is over."""
    IDLE = 2
    """Between exchanges; an HTTP/2 connection without open streams."""
    BUSY = 3
    """An exchange is in progress, or its answer has not been taken whole: never gives way."""
