"""What a peer can get wrong in HTTP/1.1, as a closed set of reasons, and the status that answers each.

The reasons are slugs for logs and counters; they never contain a peer's bytes.
"""

from __future__ import annotations

from typing import Self

REQUEST_STATUSES: dict[str, int] = {
    # RFC 9112 section 2.2: lines end in CRLF, and a lone CR or LF is where two parsers part ways.
    "bare-lf": 400,
    "bare-cr": 400,
    # RFC 9112 section 3
    "empty-line": 400,
    "request-line": 400,
    "method": 400,
    "target": 400,
    "target-too-long": 414,
    "version": 505,
    # RFC 9112 section 5
    "obs-fold": 400,
    "field-line": 400,
    "field-name": 400,
    "field-value": 400,
    "space-before-colon": 400,
    # RFC 6585 section 5
    "head-too-large": 431,
    "too-many-fields": 431,
    "trailers-too-large": 431,
    # RFC 9112 section 3.2
    "no-host": 400,
    "two-hosts": 400,
    "host": 400,
    "userinfo": 400,
    "authority-mismatch": 400,
    # RFC 9112 section 6
    "content-length": 400,
    "two-content-lengths": 400,
    "length-and-coding": 400,
    "transfer-encoding": 400,
    "unknown-coding": 501,
    "coding-in-1.0": 400,
    # RFC 9112 section 7.1
    "chunk-size": 400,
    "chunk-too-large": 400,
    "chunk-line-too-long": 400,
    "chunk-extension": 400,
    "chunk-extensions-too-large": 400,
    "chunk-end": 400,
    "forbidden-trailer": 400,
    # RFC 9110 sections 7.6.1 and 10.1.1
    "connection": 400,
    "expectation": 417,
    "incomplete": 400,
}
"""Every reason a request can be refused for, with the status of the answer."""

RESPONSE_STATUS = 502
"""The status that answers every invalid response of an upstream (RFC 9110 section 15.6.3)."""

RESPONSE_REASONS = frozenset(REQUEST_STATUSES) | {"status-line", "unsolicited"}
"""Every reason an upstream's response can be refused for."""


class ProtocolError(Exception):
    """The peer broke the protocol; the connection must be closed after the answer, if one can still be sent.

    ``status``: the HTTP status to answer with. ``reason``: a slug out of `REQUEST_STATUSES` or `RESPONSE_REASONS`.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"{reason} ({status})")
        self.status = status
        self.reason = reason

    def again(self) -> Self:
        """The same to keep or to raise later: this one's traceback leads to all that was at work when it was raised."""
        return type(self)(self.status, self.reason)


class Incomplete(ProtocolError):  # noqa: N818 (says what the input is)
    """The input ended inside a message (RFC 9112 section 8)."""


def request_fault(reason: str) -> ProtocolError:
    """The error for a request that is refused for ``reason``."""
    return ProtocolError(REQUEST_STATUSES[reason], reason)


def response_fault(reason: str) -> ProtocolError:
    """The error for an upstream's response that is refused for ``reason``."""
    return ProtocolError(RESPONSE_STATUS, reason)
