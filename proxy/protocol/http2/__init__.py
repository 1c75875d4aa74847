"""HTTP/2 (RFC 9113) without input or output: feed bytes, take events, take bytes.

How a session uses it
---------------------

One `ServerConnection` a client connection (`ClientConnection` for an upstream; both are a `Connection`)::

    conn = ServerConnection(limits, heads)      # heads: one RequestHeads a configuration (generation), shared
    stream.write(conn.take_output())            # the server's preface: SETTINGS
    ...
    for event in conn.feed(data, monotonic()):  # on_data
        ...                                     # exchanges call conn.send_head(...), send_data(...), consumed(...)
    flush()                                     # once a wake-up, after everything that may have sent something:

    def flush():
        while conn.has_output and stream.buffered <= HIGH_WATER_BYTES:
            stream.write(conn.take_output())    # control frames, then all streams by RFC 9218, at most 64 KB
        for stream_id in conn.take_drained():   # its queue fell to the low-water mark: its producer may go on
            exchange_of[stream_id].on_client_drained()
        for stream_id in conn.take_half_closed():   # answered before its request has ended: give it a moment, then
            ...                                     # conn.reset(stream_id, NO_ERROR)
        if conn.finished: stream.close()

``on_drained`` of the byte stream calls ``flush`` again. Nothing that is sent leaves before ``take_output``.

Requests come as `proxy.protocol.http1.RequestHead` (``version`` 20), the same object for the same head, so that what
hangs on ``memo`` works as for HTTP/1.1. What differs:

- ``chunked`` is True for a body whose length is not announced (an HTTP/1.1 upstream gets it chunked), ``has_body``
  is ``not ended``, ``keep_alive`` is always True, ``hop_by_hop`` always `HOP_BY_HOP` (``te`` among them)
- ``request_line`` is ``GET /path HTTP/2.0``, for logs
- cookie crumbs are one field; a Host field that equals ``:authority`` stays among ``fields``
- extended CONNECT (RFC 8441): ``method`` is ``GET``, ``upgrade`` is (:protocol,), ``protocol`` holds it too (a new
  attribute of RequestHead, else empty), ``has_body`` is False, but the stream is open both ways: what comes on it are
  `Body` events, and ``BodyEnd`` is the client's FIN. ``request_line`` has ``CONNECT``. The answer is 200, not 101.
  Plain CONNECT has ``method`` CONNECT and no path.

Responses go out as header blocks made by ``encode_response(status, fields)``: a pure function (no dynamic table is used
for sending), so a block may be kept wherever a head is kept, and be sent on any connection::

    block = encode_response(200, [(b"content-type", b"text/plain")])   # names in lower case; no hop-by-hop fields
    conn.send_head(stream_id, block, end_stream=False)                 # interim heads too; the last head counts
    conn.send_data(stream_id, data, end_stream=True)
    conn.send_trailers(stream_id, encode_fields(trailers))             # instead of end_stream
    conn.send_whole(stream_id, block, body)                            # a final head and all of the body, in one

Back-pressure: towards the client, a producer stops while ``conn.blocked(stream_id)`` is True and goes on when
``take_drained`` names the stream. From the client, `Body` events are bounded by the stream's window; the window opens
again as ``consumed`` is called for what has been passed on.

Methods with a ``stream_id`` do nothing when that stream is gone already (reset by the peer, say): its `StreamReset` may
be in the very list of events that is being worked off. When a response has been sent before its request has ended, the
codec asks a client that has much more to send to stop (RST_STREAM with NO_ERROR, RFC 9113 section 8.1); one whose last
words may be under way is the session's to wait for (``take_half_closed``).
"""

from __future__ import annotations

from proxy.protocol.http2.client import ClientConnection
from proxy.protocol.http2.connection import Connection
from proxy.protocol.http2.errors import (
    CANCEL,
    CONNECT_ERROR,
    CONNECTION_REASONS,
    ENHANCE_YOUR_CALM,
    HTTP_1_1_REQUIRED,
    INTERNAL_ERROR,
    NO_ERROR,
    PROTOCOL_ERROR,
    REFUSED_STATUSES,
    REFUSED_STREAM,
    STREAM_REASONS,
)
from proxy.protocol.http2.events import (
    Body,
    BodyEnd,
    ConnectionFailed,
    Event,
    GoAway,
    Pong,
    Request,
    RequestRefused,
    Response,
    StreamReset,
)
from proxy.protocol.http2.hpack_encoder import encode_fields, encode_request, encode_response
from proxy.protocol.http2.limits import DEFAULT_LIMITS, Limits, Rate
from proxy.protocol.http2.outbox import JOINED_BYTES
from proxy.protocol.http2.request import RequestHeads
from proxy.protocol.http2.response import ResponseHeads
from proxy.protocol.http2.server import LAST_WORDS_BYTES, ServerConnection

__all__ = [
    "CANCEL",
    "CONNECTION_REASONS",
    "CONNECT_ERROR",
    "DEFAULT_LIMITS",
    "ENHANCE_YOUR_CALM",
    "HTTP_1_1_REQUIRED",
    "INTERNAL_ERROR",
    "JOINED_BYTES",
    "LAST_WORDS_BYTES",
    "NO_ERROR",
    "PROTOCOL_ERROR",
    "REFUSED_STATUSES",
    "REFUSED_STREAM",
    "STREAM_REASONS",
    "Body",
    "BodyEnd",
    "ClientConnection",
    "Connection",
    "ConnectionFailed",
    "Event",
    "GoAway",
    "Limits",
    "Pong",
    "Rate",
    "Request",
    "RequestHeads",
    "RequestRefused",
    "Response",
    "ResponseHeads",
    "ServerConnection",
    "StreamReset",
    "encode_fields",
    "encode_request",
    "encode_response",
]
