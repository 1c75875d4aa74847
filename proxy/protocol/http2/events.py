"""What comes out of a connection. Events of one stream come in the order of its frames."""

from __future__ import annotations

from typing import NamedTuple

from proxy.protocol.http1 import RequestHead, ResponseHead, Trailers


class Request(NamedTuple):
    """A request has begun (server role)."""

    stream_id: int
    head: RequestHead
    """See `proxy.protocol.http2.request`. Shared between equal requests, so ``memo`` holds what was derived from it."""
    ended: bool
    """Neither `Body` nor `BodyEnd` follows."""


class RequestRefused(NamedTuple):
    """A well-formed request that is not taken: to be answered with ``status`` (server role).

    The stream is open for the answer, no other event of it comes but `StreamReset`.
    """

    stream_id: int
    status: int
    reason: str
    """A slug out of `REFUSED_STATUSES`."""


class Response(NamedTuple):
    """A response's head, interim ones included (client role)."""

    stream_id: int
    head: ResponseHead
    ended: bool
    """Neither `Body` nor `BodyEnd` follows."""


class Body(NamedTuple):
    """A piece of a body, never empty. ``consumed(stream_id, len(data))`` is owed for it."""

    stream_id: int
    data: bytes


class BodyEnd(NamedTuple):
    """The body is complete."""

    stream_id: int
    trailers: Trailers
    """(name in lower case, value), in order; mostly empty."""


class StreamReset(NamedTuple):
    """The stream is gone, whoever ended it; no other event of it comes and nothing more can be sent on it."""

    stream_id: int
    code: int
    """The code of the peer's RST_STREAM, or of ours."""
    by_peer: bool
    reason: str
    """A slug out of `STREAM_REASONS`: ``reset-by-peer``, or the fault for which the codec has reset it."""
    unprocessed: bool = False
    """The peer has not acted on the request, which may be sent again elsewhere (RFC 9113 section 8.7)."""


class GoAway(NamedTuple):
    """The peer opens (server role) or takes (client role) no more streams.

    Those above ``last_stream_id`` have got their `StreamReset` with ``unprocessed`` before it (client role).
    """

    last_stream_id: int
    code: int


class Pong(NamedTuple):
    """The peer has answered a ``ping``."""

    data: bytes


class ConnectionFailed(NamedTuple):
    """The connection is over: send ``take_output`` (a GOAWAY is in it), then close. The last event.

    All streams are gone; no `StreamReset` comes for them. Past an abuse bound ``code`` is ENHANCE_YOUR_CALM.
    """

    code: int
    reason: str
    """A slug out of `CONNECTION_REASONS`."""


Event = Request | RequestRefused | Response | Body | BodyEnd | StreamReset | GoAway | Pong | ConnectionFailed
