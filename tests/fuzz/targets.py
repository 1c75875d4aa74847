"""What is fuzzed: each target takes bytes and raises AssertionError, or whatever the code raises that it must not."""

from __future__ import annotations

from collections.abc import Callable

from proxy.protocol.http1 import CLOSED, Limits, ProtocolError, RequestDecoder, RequestHead, ResponseDecoder
from proxy.route.path import PathError, normalize_path
from tests.fuzz import http2_targets

LIMITS = Limits(max_head_bytes=4096, max_fields=64)
MAX_EVENTS = 10_000
Story = list[object]
"""What a decoder said, body pieces joined, and how it ended."""


def _tell(decoder: RequestDecoder | ResponseDecoder, pieces: list[bytes]) -> Story:
    story: Story = []
    body = b""
    try:
        for piece in [*pieces, None]:
            if piece is None:
                decoder.feed_eof()
            else:
                decoder.feed(piece)
            for _ in range(MAX_EVENTS):
                event = decoder.next_event()
                if event is None:
                    break
                if isinstance(event, bytes):
                    assert event, "an empty piece of a body"
                    body += event
                    continue
                if body:
                    story.append(body)
                    body = b""
                if event is CLOSED:
                    return [*story, "closed"]
                story.append(_shown(event))
                if isinstance(event, RequestHead) and event.method == b"CONNECT":
                    return story
            else:
                raise AssertionError("a decoder that never asks for more")
    except ProtocolError as error:
        return [*story, *([body] if body else []), error.status, error.reason]
    return [*story, *([body] if body else []), "open"]


def _shown(event: object) -> object:
    names = ("method", "target", "status", "fields", "content_length", "framing", "keep_alive", "upgrade", "trailers")
    return tuple(getattr(event, name, None) for name in names)


def _pieces(data: bytes) -> list[bytes]:
    """The same bytes, cut where they themselves say."""
    step = 1 + (data[-1] % 7 if data else 0)
    return [data[start : start + step] for start in range(0, len(data), step)]


def requests(data: bytes) -> None:
    """HTTP/1 requests: nothing but ProtocolError, and the same story however the bytes are split."""
    whole, cut = _tell(RequestDecoder(LIMITS), [data]), _tell(RequestDecoder(LIMITS), _pieces(data))
    assert whole == cut, (whole, cut)


def responses(data: bytes) -> None:
    """HTTP/1 responses to GET or HEAD, as the first byte says."""
    method = b"HEAD" if data[:1] == b"\0" else b"GET"
    stories = []
    for pieces in ([data[1:]], _pieces(data[1:])):
        decoder = ResponseDecoder(LIMITS)
        decoder.start(method)
        stories.append(_tell(decoder, pieces))
    assert stories[0] == stories[1], stories


def paths(data: bytes) -> None:
    """Paths: normal ones stay as they are, and none leads out of the root."""
    if not data.startswith(b"/") or any(byte <= 0x20 or byte >= 0x7F for byte in data):
        return  # the request's grammar lets none of these through
    try:
        once = normalize_path(data)
    except PathError:
        return
    assert normalize_path(once) == once, (data, once)
    path = once.partition(b"?")[0]
    assert path.startswith(b"/"), once
    assert b"/../" not in path, once
    assert not path.endswith((b"/..", b"/.")), once


TARGETS: dict[str, Callable[[bytes], None]] = {
    "http1_requests": requests,
    "http1_responses": responses,
    "http2_client": http2_targets.client,
    "http2_server": http2_targets.server,
    "paths": paths,
}
