"""Requests of HTTP/2 as the relay knows them (stub: being written)."""

from __future__ import annotations

from proxy.protocol.http2.limits import DEFAULT_LIMITS, Limits


class RequestHeads:
    """Makes request heads of decoded header lists and remembers them (bounded); one a generation."""

    def __init__(self, limits: Limits = DEFAULT_LIMITS) -> None:
        self.limits = limits
