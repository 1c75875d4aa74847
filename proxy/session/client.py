"""What every session of HTTP/1.1 does: deadlines by phase, requests one after another, refusals, a bounded end."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from math import inf
from time import monotonic

from proxy.observe.accesslog import LoggedRequest
from proxy.observe.counters import (
    BAD_REQUESTS,
    BYTES_FROM_CLIENTS,
    BYTES_TO_CLIENTS,
    REQUESTS,
    RESPONSES_1XX,
    TIMEOUTS_HEADER,
    TIMEOUTS_IDLE,
    TIMEOUTS_SLOW,
    TIMEOUTS_WRITE,
)
from proxy.protocol.http1 import CLOSED, ProtocolError, RequestDecoder, RequestHead
from proxy.relay.answer import own_response
from proxy.relay.context import RelayContext
from proxy.relay.forward import ForwardedBy, logged_request
from proxy.session.standing import Standing
from proxy.stream.stream import HIGH_WATER_BYTES, Stream

LINGER_SECS = 5.0
"""After an early answer the client may still be sending. Its bytes are read and dropped for so long, since closing on
unread bytes would reset the connection and take the answer with it (RFC 9112 section 9.6)."""

LINGER_READS_A_WAKEUP = 64

PIPELINE_BYTES = 65_536
"""What a client may send ahead of the answer to its request before it is held back."""

PIPELINE_BATCH = 32
"""Requests of one client that are answered at once in a row; then the other connections get their turn."""

HEADER_TIMEOUT = "header-timeout"
"""What a client is refused for that began a request and did not end it."""

NO_REQUEST = LoggedRequest(b"", b"", b"", b"")
"""For the access log: what came was none."""


class Phase(enum.IntEnum):
    """What a session waits for; it decides what its read deadline means."""

    HANDSHAKE = 0
    IDLE = 1
    HEAD = 2
    BODY = 3
    EXCHANGE = 4
    LINGER = 5


class ClientSession:
    """One client connection from admission on. The subclasses say what a request is answered with.

    ``sessions`` is the worker's register: the session is in it as long as its descriptor is open.
    """

    __slots__ = (
        "_advancing",
        "_closing",
        "_context",
        "_decoder",
        "_head_since",
        "_idle_secs",
        "_phase",
        "_served",
        "_stream",
        "opened_at",
    )

    def __init__(self, context: RelayContext) -> None:
        self._context = context
        self._decoder: RequestDecoder | None = None
        self._stream: Stream
        self._phase = Phase.HANDSHAKE
        self._head_since = 0.0
        self._advancing = False
        self._closing = False
        self._served = False
        self._idle_secs = context.settings.connection_idle_timeout_secs
        self.opened_at = monotonic()
        """For the black box; monotonic seconds."""

    @property
    def stream(self) -> Stream:
        """The client's byte stream."""
        return self._stream

    @property
    def decoder(self) -> RequestDecoder:
        """The codec of the client's requests."""
        assert self._decoder is not None
        return self._decoder

    # -- for the subclasses ------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a request is being answered."""
        return False

    @property
    def tunnelling(self) -> bool:
        """Whether there is nothing under way but what has been upgraded."""
        return False

    def go_away(self) -> None:
        """A successor serves new connections: tell the client, where its protocol has a word for it."""

    def answer(self, head: RequestHead) -> None:
        """Begin to answer a request."""
        raise NotImplementedError

    @property
    def forwarded(self) -> ForwardedBy:
        """Who the client is."""
        raise NotImplementedError

    @property
    def peer(self) -> bytes:
        """The address at the other end."""
        return self.forwarded.peer

    @property
    def tls_version(self) -> bytes:
        """For the access log; empty without TLS."""
        return b""

    # -- the stream's ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """The connection is ready for requests."""
        context = self._context
        self._decoder = RequestDecoder(context.request_limits, context.head_cache)
        self._phase = Phase.HEAD
        self._stream.expect(monotonic() + context.settings.header_timeout_secs)

    def on_open(self) -> None:
        """See ``StreamHandler``."""
        self.begin()

    def on_data(self, data: bytes) -> None:
        """See ``StreamHandler``."""
        decoder = self._decoder
        assert decoder is not None
        if self.busy:
            decoder.feed(data)
            self.on_busy_data()
            return
        head = None if self._advancing else decoder.take_whole(data)
        if head is not None:
            self._begin_answer(head)
        else:
            decoder.feed(data)
            self.advance()

    def on_busy_data(self) -> None:
        """More has come while a request is being answered: the next one, which has to wait."""
        if self.decoder.buffered > PIPELINE_BYTES:
            self._stream.pause_reading()

    def on_eof(self) -> None:
        """See ``StreamHandler``."""
        self._closing = True
        if self._decoder is not None and self._decoder.started:
            self.refuse(400, "incomplete")
        else:
            self._stream.close()

    def on_lost(self, error: OSError) -> None:
        """See ``StreamHandler``."""
        self._closing = True

    def on_write_failed(self, error: OSError) -> None:
        """See ``StreamHandler``."""
        self._closing = True
        self._stream.abort()

    def on_drained(self) -> None:
        """See ``StreamHandler``."""
        if self._phase is Phase.LINGER:
            if not self._stream.buffered:
                self._stream.shut_down_writing()
        elif not self.busy:
            self._stream.resume_reading()
            self.advance()

    def on_write_deadline(self) -> None:
        """See ``StreamHandler``."""
        self._context.cells[TIMEOUTS_WRITE] += 1
        self.note("write-timeout")
        self._closing = True
        self._stream.abort()

    def on_read_deadline(self) -> None:
        """See ``StreamHandler``."""
        if self._phase is Phase.HEAD and self._decoder is not None and self._decoder.started:
            self._context.cells[TIMEOUTS_HEADER] += 1
            least = self._context.least_rate_until(self._head_since, self._decoder.buffered)
            self._context.cells[TIMEOUTS_SLOW] += least <= monotonic()
            self.refuse(408, HEADER_TIMEOUT)
            return
        if self._phase is Phase.IDLE:
            self._context.cells[TIMEOUTS_IDLE] += 1
        elif self._phase is Phase.HEAD:
            self._context.cells[TIMEOUTS_HEADER] += 1
            self.note(HEADER_TIMEOUT)
        self._closing = True
        self._stream.close()

    # -- requests ----------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Answer what has come, request after request, until one is under way or more input is needed."""
        if self._advancing:
            return  # an answer that is complete at once comes back here from inside the loop below
        self._advancing = True
        try:
            for _ in range(PIPELINE_BATCH):
                if self.busy or self._closing or not self._next():
                    return
                if self._stream.buffered > HIGH_WATER_BYTES:
                    # A client that asks and does not read: it is asked to read first.
                    self._stream.pause_reading()
                    return
            if not self.busy and self.decoder.buffered:
                # Not read meanwhile, so that the end of its input does not overtake what it has asked.
                self._stream.pause_reading()
                self._stream.call_soon(self._go_on)
        finally:
            self._advancing = False

    def _go_on(self) -> None:
        if not self._closing and not self.busy and self._stream.buffered <= HIGH_WATER_BYTES:
            self._stream.resume_reading()
            self.advance()

    def _next(self) -> bool:
        decoder, stream = self._decoder, self._stream
        assert decoder is not None
        try:
            event = decoder.next_event()
        except ProtocolError as error:
            self._context.cells[BAD_REQUESTS] += 1
            self.refuse(error.status, error.reason)
            return False
        if type(event) is RequestHead:
            self._begin_answer(event)
            return True
        if event is CLOSED:
            stream.close()
            return False
        self._await_head()
        return False

    def _begin_answer(self, head: RequestHead) -> None:
        self._phase = Phase.EXCHANGE
        self._served = True
        self._head_since = 0.0
        self._stream.read_deadline = inf
        self.answer(head)

    def _await_head(self) -> None:
        decoder, settings = self._decoder, self._context.settings
        assert decoder is not None
        now = monotonic()
        if decoder.started:
            self._phase = Phase.HEAD
            if not self._head_since:
                self._head_since = now
            total = self._head_since + settings.header_total_timeout_secs
            least = self._context.least_rate_until(self._head_since, decoder.buffered)
            self._stream.expect(min(now + settings.header_timeout_secs, total, least))
            self._stream.keep_watching()
        elif self._served:
            if self._context.draining and not self._context.retiring:
                self._closing = True
                self._stream.close()
                return
            self._phase = Phase.IDLE
            self._stream.expect(now + self._idle_secs)

    def answered(self, close: bool, clean: bool = True) -> None:
        """The answer has been written; ``close``: the connection ends after it. ``clean``: see ``linger``."""
        if self._closing or self._stream.closed:
            return
        if close or (self._context.draining and not self._context.retiring):
            self.linger(clean)
            return
        self._phase = Phase.IDLE
        if self._stream.buffered > HIGH_WATER_BYTES:
            # A client that asks and does not read: it is asked to read first; ``on_drained`` goes on.
            self._stream.pause_reading()
            return
        self._stream.resume_reading()
        if self.decoder.buffered:
            self.advance()
        else:
            self._phase = Phase.IDLE
            self._stream.expect(monotonic() + self._idle_secs)

    # -- the end -----------------------------------------------------------------------------------------------------

    def respond(
        self,
        head: RequestHead,
        status: int,
        *,
        location: bytes | None = None,
        cause: str = "",
        fields: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        """Answer a whole request with a response of the proxy's own; ``cause``: what was wrong with it, if anything."""
        context = self._context
        close = not head.keep_alive or head.has_body or context.draining
        request_id = self.forwarded.request_id(head)
        data, size = own_response(
            context,
            status,
            method=head.method,
            request_id=request_id,
            close=close,
            version=head.version,
            location=location,
            fields=fields,
        )
        client = self.forwarded.client(head)
        self._log(client, logged_request(head), status, size, request_id)
        site = context.routes.site(head.host)
        context.tallies.count(None if site is None else site.name, head.method, status, 0.0)
        if status >= 400:
            context.refusals.note(client, cause or "refused", status=status)
        self._stream.write(data)
        self.answered(close, clean=not head.has_body)

    def refuse(self, status: int, reason: str) -> None:
        """Answer what is no request and end the connection."""
        request_id = self._context.new_request_id()
        data, size = own_response(self._context, status, method=b"", request_id=request_id, close=True)
        self._log(self.forwarded.peer, NO_REQUEST, status, size, request_id)
        self._context.tallies.count(None, b"", status, 0.0)
        if reason == HEADER_TIMEOUT:
            self.note(reason, status=status)
        else:
            self.note("bad-request", status=status, detail=reason)
        self._closing = True
        self._stream.write(data)
        self.linger()

    def _log(
        self, client: bytes, logged: LoggedRequest, status: int, size: int, request_id: bytes, stream_id: int = 0
    ) -> None:
        context = self._context
        context.cells[REQUESTS] += 1
        context.cells[RESPONSES_1XX - 1 + status // 100] += 1
        context.access_log.request(client, logged, status, size, 0.0, -1.0, request_id, self.tls_version, stream_id)

    def note(self, reason: str, *, status: int = 0, detail: str = "") -> None:
        """Remember why this connection is refused or cut, for who asks later."""
        self._context.refusals.note(self.peer, reason, status=status, detail=detail)

    def cut(self, reason: str) -> None:
        """End the connection at once, whatever is under way."""
        if self.busy or self._phase is Phase.HANDSHAKE or self._phase is Phase.HEAD:
            self.note(reason)
        self._stream.abort()

    # -- for admission -----------------------------------------------------------------------------------------------

    def standing(self) -> tuple[Standing, float]:
        """What the connection waits for, and since when (monotonic seconds); asked when there is no room for others.

        The time follows from the deadline that is set anyway, so that no request pays for it.
        """
        stream, phase = self._stream, self._phase
        deadline = stream.read_deadline
        if stream.closed or stream.closing or stream.buffered or deadline == inf:
            return Standing.BUSY, 0.0
        if phase is Phase.IDLE:
            return Standing.IDLE, deadline - self._idle_secs
        settings = self._context.settings
        if phase is Phase.HEAD:
            return Standing.HEAD, self._head_since or deadline - settings.header_timeout_secs
        if phase is Phase.HANDSHAKE:
            return Standing.HANDSHAKE, deadline - settings.tls_handshake_timeout_secs
        if phase is Phase.LINGER:
            return Standing.HEAD, deadline - LINGER_SECS
        return Standing.BUSY, 0.0

    def evict(self, reason: str) -> None:
        """Give way to another connection: end at once, in order."""
        self.note(reason)
        self._closing = True
        self._stream.close()

    def has_descriptor_below(self, limit: int) -> bool:
        """Whether its descriptor's number is less than ``limit``."""
        return self._stream.descriptor < limit

    def linger(self, clean: bool = False) -> None:
        """Close so that the client can read the answer although it may still be sending (bounded: LINGER_SECS).

        ``clean``: the request has been read to its end, so that there is nothing to wait for.
        """
        self._closing = True
        stream = self._stream
        if stream.closed:
            return
        if clean and not self.decoder.buffered:
            stream.close()
            return
        self._phase = Phase.LINGER
        stream.drop_input(self._on_linger)
        if not stream.buffered:
            stream.shut_down_writing()
        stream.expect(monotonic() + LINGER_SECS)

    def _on_linger(self) -> None:
        # More than one read, because a reset behind the data is not told again (see Stream.keep_watching).
        for _ in range(LINGER_READS_A_WAKEUP):
            size = self._stream.read_raw()
            if size < 0:
                self._stream.close()
            if size <= 0:
                return

    def drain(self) -> None:
        """Close at once when nothing is under way; otherwise after the answer that is."""
        if self._phase is Phase.IDLE or (self._phase is Phase.HEAD and not self.decoder.started):
            self._closing = True
            self._stream.close()

    def end_tunnel(self) -> None:
        """The last step of a drain. Only what has been upgraded has one."""

    def released(self) -> None:
        """The descriptor is closed: the last thing that happens to a session."""
        cells, stream = self._context.cells, self._stream
        cells[BYTES_FROM_CLIENTS] += stream.bytes_read
        cells[BYTES_TO_CLIENTS] += stream.bytes_written
