"""The HTTP/2 codec under fuzzing: frames as they come after the connection's beginning, whole and in pieces."""

from __future__ import annotations

from collections.abc import Callable

from proxy.protocol.http2 import (
    Body,
    ClientConnection,
    Connection,
    Event,
    Request,
    Response,
    ServerConnection,
    encode_request,
)
from proxy.protocol.http2.frames import PREFACE

NOW = 0.0
SETTINGS = bytes(9)[:3] + b"\x04" + bytes(5)
"""An empty SETTINGS frame (RFC 9113 section 6.5)."""

MAX_OUTPUT_BYTES = 1_000_000
MAX_TAKES = 1000
Story = tuple[list[object], dict[int, bytes]]


def _pieces(data: bytes) -> list[bytes]:
    step = 1 + (data[-1] % 11 if data else 0)
    return [data[start : start + step] for start in range(0, len(data), step)]


def _tell(connection: Connection, beginning: bytes, pieces: list[bytes]) -> Story:
    """The events but for bodies, and each stream's body joined. Nothing is answered: what is said depends on the bytes
    alone."""
    story: list[object] = []
    bodies: dict[int, bytes] = {}
    for piece in [beginning, *pieces]:
        for event in connection.feed(piece, NOW):
            _note(event, story, bodies)
        _drain(connection)
    return story, bodies


def _note(event: Event, story: list[object], bodies: dict[int, bytes]) -> None:
    if isinstance(event, Body):
        assert event.data, "an empty piece of a body"
        bodies[event.stream_id] = bodies.get(event.stream_id, b"") + event.data
        return
    if isinstance(event, Request | Response):
        path = event.head.path if isinstance(event, Request) else b""
        story.append((type(event).__name__, event.stream_id, event.head.fields, path, event.ended))
    else:
        story.append(event)


def _drain(connection: Connection) -> None:
    size = 0
    for _ in range(MAX_TAKES):
        if not connection.has_output:
            return
        taken = connection.take_output()
        assert taken, "output is promised and does not come"
        size += len(taken)
        assert size <= MAX_OUTPUT_BYTES, size
    raise AssertionError("output without end")


def _same_story(make: Callable[[], Connection], beginning: bytes, data: bytes) -> None:
    whole, cut = _tell(make(), beginning, [data]), _tell(make(), beginning, _pieces(data))
    assert whole == cut, (whole, cut)


def server(data: bytes) -> None:
    """A client's frames."""
    _same_story(ServerConnection, PREFACE + SETTINGS, data)


def client(data: bytes) -> None:
    """An upstream's frames, in answer to two requests."""

    def make() -> ClientConnection:
        connection = ClientConnection()
        for method in (b"GET", b"HEAD"):
            block = encode_request(method, scheme=b"http", authority=b"a", path=b"/", fields=())
            connection.open(block, method=method, end_stream=True)
        return connection

    _same_story(make, SETTINGS, data)
