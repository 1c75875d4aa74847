"""Runs a decoder of proxy.protocol.http1 over bytes cut in any way, and writes down what came out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from proxy.protocol.http1 import (
    CLOSED,
    EndOfMessage,
    HeadCache,
    Limits,
    ProtocolError,
    RequestDecoder,
    RequestHead,
    ResponseDecoder,
    ResponseHead,
)

LIMITS = Limits(max_head_bytes=2048, max_fields=20, max_target_bytes=512, max_trailer_bytes=256)

Event = RequestHead | ResponseHead | bytes | str
"""Data is joined; an end is ``"end"`` or its trailers written out, an error ``"! status reason"``."""


def pieces(data: bytes, cuts: Iterable[int]) -> list[bytes]:
    """``data`` cut at these offsets."""
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < len(data)}), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


def bytewise(data: bytes) -> list[bytes]:
    return pieces(data, range(len(data)))


def requests(
    parts: bytes | Sequence[bytes], *, limits: Limits = LIMITS, cache: HeadCache | None = None, eof: bool = True
) -> list[Event]:
    """The events of a connection on which ``parts`` arrive, and then its end."""
    return drain(RequestDecoder(limits, cache), parts, eof)


def responses(
    parts: bytes | Sequence[bytes],
    method: bytes = b"GET",
    *,
    limits: Limits = LIMITS,
    cache: HeadCache | None = None,
    eof: bool = True,
) -> list[Event]:
    """The events of an upstream connection that serves one exchange."""
    decoder = ResponseDecoder(limits, cache)
    decoder.start(method)
    return drain(decoder, parts, eof)


def drain(decoder: RequestDecoder | ResponseDecoder, parts: bytes | Sequence[bytes], eof: bool) -> list[Event]:
    """The events that come out while ``parts`` go in."""
    events: list[Event] = []

    def step() -> bool:
        event = decoder.next_event()
        if event is None:
            return False
        if event is CLOSED:
            events.append("closed")
            return False
        if isinstance(event, EndOfMessage):
            events.append(f"end {event.trailers}" if event.trailers else "end")
        elif isinstance(event, bytes):
            assert event, "an event of data is never empty"
            if events and isinstance(events[-1], bytes):
                events[-1] += event
            else:
                events.append(event)
        else:
            events.append(event)
        return True

    try:
        for part in [parts] if isinstance(parts, bytes) else parts:
            decoder.feed(part)
            while step():
                pass
        if eof:
            decoder.feed_eof()
            while step():
                pass
    except ProtocolError as error:
        events.append(f"! {error.status} {error.reason}")
    return events
