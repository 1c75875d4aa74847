"""A client of HTTP/2 over TLS: the ``h2`` library for what is right, frames by hand (``send``) for what is wrong."""

from __future__ import annotations

import contextlib
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings

from tests.harness.appliance import Appliance
from tests.harness.http2 import GOAWAY, Frame, split_frames
from tests.harness.wire import READ_BYTES, TIMEOUT_SECS, Wire

Fields = Sequence[tuple[str, str]]


@dataclass
class StreamRead:
    """What has come on a stream so far."""

    status: int = 0
    fields: list[tuple[str, str]] = field(default_factory=list)
    interim: list[int] = field(default_factory=list)
    body: bytearray = field(default_factory=bytearray)
    trailers: list[tuple[str, str]] = field(default_factory=list)
    ended: bool = False
    reset: int | None = None
    """The code of an RST_STREAM."""

    def get(self, name: str) -> str | None:
        """The first value of a field."""
        return next((value for key, value in self.fields if key == name), None)

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return self.ended or self.reset is not None


class Http2Wire:
    """Blocking, with a time limit on every step. ``frames`` are all that have come, ``goaways`` their GOAWAY ones.

    What comes is acknowledged at once, but for the streams in ``held``: theirs waits for ``release``.
    """

    def __init__(self, wire: Wire, *, settings: dict[int, int] | None = None) -> None:
        assert isinstance(wire.sock, ssl.SSLSocket)
        self.wire = wire
        self.sock = wire.sock
        self.conn = h2.connection.H2Connection(
            h2.config.H2Configuration(client_side=True, header_encoding="utf-8", validate_outbound_headers=False)
        )
        if settings:
            self.conn.local_settings = h2.settings.Settings(client=True, initial_values=dict(settings))  # type: ignore[arg-type]
        self.conn.initiate_connection()
        self.streams: dict[int, StreamRead] = {}
        self.held: set[int] = set()
        self.frames: list[Frame] = []
        self.pings: list[bytes] = []
        self.windows = 0
        """WINDOW_UPDATE frames that have come."""
        self.ended = False
        self._partial = b""
        self.flush()

    # -- sending

    def flush(self) -> None:
        """Send what the library has to say."""
        data = self.conn.data_to_send()
        if data:
            self.sock.sendall(data)

    def send(self, data: bytes) -> None:
        """Send bytes that the library knows nothing of."""
        self.sock.sendall(data)

    def open(
        self,
        path: str = "/",
        *,
        method: str = "GET",
        host: str = "www.example.org",
        fields: Fields = (),
        end_stream: bool = True,
        pseudo: Fields = (),
    ) -> int:
        """Begin a request; returns its stream."""
        stream_id = self.conn.get_next_available_stream_id()
        head = [(":method", method), (":scheme", "https"), (":authority", host), (":path", path), *pseudo, *fields]
        self.streams[stream_id] = StreamRead()
        self.conn.send_headers(stream_id, head, end_stream=end_stream)
        self.flush()
        return stream_id

    def write(self, stream_id: int, data: bytes, *, end_stream: bool = False) -> None:
        """Send a body, waiting for the windows."""
        view = memoryview(data)
        while view:
            room = min(self.conn.local_flow_control_window(stream_id), self.conn.max_outbound_frame_size, len(view))
            if room <= 0:
                self.read()
                continue
            self.conn.send_data(stream_id, bytes(view[:room]))
            view = view[room:]
            self.flush()
        if end_stream:
            self.conn.end_stream(stream_id)
            self.flush()

    def get(self, path: str = "/", **options: Any) -> StreamRead:
        """One request without a body, and its answer."""
        return self.finish(self.open(path, **options))

    # -- receiving

    def read(self) -> None:
        """Take what comes next, once. Raises TimeoutError; at the end of input ``ended`` is set."""
        try:
            data = self.sock.recv(READ_BYTES)
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError, ConnectionError):
            data = b""
        if not data:
            self.ended = True
            return
        for event in self.conn.receive_data(self._keep_frames(data)):
            self._take(event)
        with contextlib.suppress(OSError):
            self.flush()

    def _keep_frames(self, data: bytes) -> bytes:
        """Note the frames; what the library is to see of them: after a GOAWAY it would hear nothing more."""
        data = self._partial + data
        seen, at = b"", 0
        while at + 9 <= len(data) and (end := at + 9 + int.from_bytes(data[at : at + 3], "big")) <= len(data):
            self.frames += split_frames(data[at:end])
            if data[at + 3] != GOAWAY:
                seen += data[at:end]
            at = end
        self._partial = data[at:]
        return seen

    def _take(self, event: Any) -> None:
        stream = self.streams.setdefault(getattr(event, "stream_id", 0) or 0, StreamRead())
        # header_encoding makes these str, which the library's types do not know.
        fields: list[tuple[str, str]] = list(getattr(event, "headers", ()) or ())
        kind = type(event)
        if kind is h2.events.InformationalResponseReceived:
            stream.interim.append(int(dict(fields)[":status"]))
        elif kind is h2.events.ResponseReceived:
            stream.status = int(dict(fields)[":status"])
            stream.fields = [(name, value) for name, value in fields if not name.startswith(":")]
        elif kind is h2.events.DataReceived:
            stream.body += event.data
            if event.stream_id not in self.held and event.flow_controlled_length:
                with contextlib.suppress(h2.exceptions.ProtocolError):
                    self.conn.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif kind is h2.events.TrailersReceived:
            stream.trailers = fields
        elif kind is h2.events.StreamEnded:
            stream.ended = True
        elif kind is h2.events.StreamReset:
            stream.reset = int(event.error_code)
        elif kind is h2.events.PingAckReceived:
            self.pings.append(event.ping_data)
        elif kind is h2.events.WindowUpdated:
            self.windows += 1

    def release(self, stream_id: int) -> None:
        """Take what was held of a stream, and all that follows as it comes."""
        self.held.discard(stream_id)
        size = len(self.streams[stream_id].body)
        if size:
            self.conn.acknowledge_received_data(size, stream_id)
        self.flush()

    def wait(self, condition: Callable[[], object], what: str, timeout_secs: float = TIMEOUT_SECS) -> None:
        """Read until ``condition`` holds. Fails at the end of input or when ``timeout_secs`` have passed."""
        deadline = time.monotonic() + timeout_secs
        while not condition():
            left = deadline - time.monotonic()
            assert left > 0, f"no {what} within {timeout_secs} s: {self.streams}"
            assert not self.ended, f"the connection ended before {what}: {self.frames[-5:]} {self.streams}"
            self.sock.settimeout(left)
            with contextlib.suppress(TimeoutError):
                self.read()
        self.sock.settimeout(TIMEOUT_SECS)

    def finish(self, stream_id: int, timeout_secs: float = TIMEOUT_SECS) -> StreamRead:
        """Read until the stream is over."""
        self.wait(lambda: self.streams[stream_id].over, f"end of stream {stream_id}", timeout_secs)
        return self.streams[stream_id]

    def read_to_end(self, timeout_secs: float = TIMEOUT_SECS) -> None:
        """Read until the other side has ended the connection."""
        deadline = time.monotonic() + timeout_secs
        while not self.ended:
            left = deadline - time.monotonic()
            assert left > 0, f"the connection did not end within {timeout_secs} s"
            self.sock.settimeout(left)
            with contextlib.suppress(TimeoutError):
                self.read()

    @property
    def goaways(self) -> list[Frame]:
        """The GOAWAY frames that have come."""
        return [one for one in self.frames if one.kind == GOAWAY]

    def close(self) -> None:
        """End the connection."""
        self.wire.close()


def connect_http2(appliance: Appliance, *, settings: dict[int, int] | None = None, **options: Any) -> Http2Wire:
    """A connection of HTTP/2 to the appliance's first listener; options as for ``Appliance.connect``."""
    wire = appliance.connect(alpn=("h2",), **options)
    assert isinstance(wire.sock, ssl.SSLSocket)
    assert wire.sock.selected_alpn_protocol() == "h2"
    return Http2Wire(wire, settings=settings)
