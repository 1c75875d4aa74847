"""A state machine plays clients of HTTP/2, upstreams, reloads and killed workers against a live appliance.

Whatever the order: an answer belongs to its stream, a body that was cut ends in RST_STREAM and never in END_STREAM, the
other streams of the connection do not notice, permits and descriptors add up at the end, and the event log stays
bounded. Clients of HTTP/1.1 come in between: the upstream's connections are the same.
"""

from __future__ import annotations

import select
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
from h2.errors import ErrorCodes
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test

from tests.harness import Wire, connect_tls
from tests.harness.chaos import CUT, LONG_SCRIPTS, SCRIPTS, WHOLE, ChaosMachine, answer_to, machine_settings
from tests.harness.http2 import GET, PREFACE, headers, settings
from tests.harness.http2_wire import Http2Wire, StreamRead, connect_http2

# Together below what may be open of one client, and streams below a worker's share of the upstream connections.
MAX_CLIENTS = 6
MAX_STREAMS = 4
MAX_STALLED = 4
ALL_SCRIPTS = (*SCRIPTS, *LONG_SCRIPTS)
BODIES: tuple[tuple[int, ...], ...] = ((), (), (1,), (500, 1), (20_000, 500), (20_000, 20_000, 20_000))
"""Sizes of their parts; without any it is a GET."""
Wanted = Sequence[tuple[str, Sequence[int]]]
"""Requests: a script and one of ``BODIES``."""
WANTED = st.lists(
    st.tuples(st.sampled_from(ALL_SCRIPTS), st.sampled_from(BODIES)),
    min_size=2,
    max_size=MAX_STREAMS,
)
INITIAL_WINDOW_SIZE = 4
WINDOW = 1 << 20
LOOK_SECS = 0.01
BEGINNING = PREFACE + settings() + headers(1, GET)


@dataclass(eq=False)
class Request:
    """On a stream that the client has not seen the end of. ``parts`` are what has not been sent of its body."""

    stream: int
    script: str
    whole: bytes
    """The body of the answer, where one comes that is whole."""
    parts: list[bytes]


@dataclass(eq=False)
class Client:
    """``patient``: each of its streams has no window until the client wants the answer."""

    wire: Http2Wire
    patient: bool
    requests: list[Request] = field(default_factory=list)

    def read_of(self, request: Request) -> StreamRead:
        return self.wire.streams[request.stream]

    def look(self) -> None:
        """Take what is there, and wait for no more."""
        sock = self.wire.sock
        while not self.wire.ended and (sock.pending() or select.select([sock], [], [], LOOK_SECS)[0]):
            self.wire.read()

    def flush(self) -> None:
        """Send; where the connection has gone, read what came before."""
        try:
            self.wire.flush()
        except ConnectionError:
            while not self.wire.ended:
                self.wire.read()

    def over(self, request: Request) -> bool:
        return self.wire.ended or self.read_of(request).over

    def send_part(self, request: Request) -> None:
        """Send the next part of the body, unless the other side ends the stream before."""
        conn = self.wire.conn
        part = memoryview(request.parts.pop(0))
        while part and not self.over(request):
            room = min(conn.local_flow_control_window(request.stream), conn.max_outbound_frame_size, len(part))
            if room <= 0:
                self.wire.read()
                continue
            data, part = part[:room], part[room:]
            conn.send_data(request.stream, bytes(data), end_stream=not part and not request.parts)
            self.flush()

    def finish(self, request: Request) -> None:
        """Send the rest, and read until the stream or the connection is over."""
        if self.patient and not self.over(request):
            self.wire.conn.increment_flow_control_window(WINDOW, request.stream)
            self.flush()
        while request.parts:
            self.send_part(request)
        while not self.over(request):
            self.wire.read()

    def refused(self, request: Request) -> bool:
        """Whether the appliance has said that it will not look at the stream (RFC 9113 section 6.8)."""
        return any(int.from_bytes(one.payload[:4], "big") < request.stream for one in self.wire.goaways)


class Http2Chaos(ChaosMachine):
    """See the module's text."""

    # Clients leave requests and answers alone for as long as the machine is busy with others.
    config: ClassVar = {
        "upstream_idle_timeout_secs": 0.3,
        "request_body_timeout_secs": 300,
        "write_timeout_secs": 300,
        "min_request_body_bytes_per_sec": 0,
        "min_response_bytes_per_sec": 0,
    }

    def __init__(self) -> None:
        super().__init__()
        self.clients: list[Client] = []
        self.stalled: list[Wire] = []

    @initialize(first=st.lists(st.tuples(st.booleans(), WANTED), min_size=3, max_size=4))
    def start(self, first: Sequence[tuple[bool, Wanted]]) -> None:
        """Whatever rules hypothesis leaves out of a life, there are streams in it."""
        self.begin()
        for number, (patient, wanted) in enumerate(first):
            self._ask(number, patient, wanted)

    # -- connections

    @precondition(lambda self: len(self.stalled) < MAX_STALLED)
    @rule(cut_at=st.integers(0, len(BEGINNING) - 1))
    def stall(self, cut_at: int) -> None:
        wire = connect_tls(self.appliance.port, alpn=("h2",))
        wire.send(BEGINNING[:cut_at])
        self.stalled.append(wire)

    @rule(number=st.integers(0, MAX_CLIENTS), how=st.sampled_from(("goaway", "close", "reset")))
    def leave(self, number: int, how: str) -> None:
        client = self._client(number)
        if client is None:
            return
        if how == "goaway":
            client.wire.conn.close_connection()
            client.flush()
        elif how == "reset":
            client.wire.wire.reset()
        self._drop(client)

    # -- streams

    @rule(number=st.integers(0, MAX_CLIENTS - 1), patient=st.booleans(), wanted=WANTED)
    def ask(self, number: int, patient: bool, wanted: Wanted) -> None:
        self._ask(number, patient, wanted)

    def _ask(self, number: int, patient: bool, wanted: Wanted) -> None:
        """Begin requests on a connection or a new one: each a GET, or a POST whose body follows in parts."""
        if number < len(self.clients):
            client = self.clients[number]
        else:
            window = {INITIAL_WINDOW_SIZE: 0} if patient else None
            client = Client(connect_http2(self.appliance, settings=window), patient)
            self.clients.append(client)
        for script, sizes in wanted:
            client.look()
            if client.wire.ended or client.wire.goaways or len(client.requests) >= MAX_STREAMS:
                return
            token = self.next_token()
            mark = f"{token} of the request. ".encode()
            parts = [(mark * (size // len(mark) + 1))[:size] for size in sizes]
            method = "POST" if parts else "GET"
            stream = client.wire.open(f"/{script}/{token}", method=method, end_stream=not parts)
            client.requests.append(Request(stream, script, answer_to(script, token, b"".join(parts)), parts))

    @rule(number=st.integers(0, MAX_CLIENTS), which=st.integers(0, MAX_STREAMS))
    def send_part(self, number: int, which: int) -> None:
        client, request = self._request(number, which)
        if client is not None and request is not None and request.parts:
            client.send_part(request)

    @rule(number=st.integers(0, MAX_CLIENTS), which=st.integers(0, MAX_STREAMS))
    def read(self, number: int, which: int) -> None:
        """Finish a request and judge its answer."""
        client, request = self._request(number, which)
        if client is not None and request is not None:
            self._finish(client, request)

    @rule(number=st.integers(0, MAX_CLIENTS), which=st.integers(0, MAX_STREAMS))
    def reset_stream(self, number: int, which: int) -> None:
        client, request = self._request(number, which)
        if client is None or request is None:
            return
        client.requests.remove(request)
        if not client.over(request):
            client.wire.conn.reset_stream(request.stream, ErrorCodes.CANCEL)
            client.flush()

    @rule(number=st.integers(0, MAX_CLIENTS))
    def look(self, number: int) -> None:
        """Take what has come on any stream, acknowledge it, answer a PING."""
        client = self._client(number)
        if client is not None:
            client.look()

    @rule(script=st.sampled_from(SCRIPTS))
    def ask_by_http1(self, script: str) -> None:
        """A client of HTTP/1.1, on the upstream's connections that the others have left."""
        token = self.next_token()
        with connect_tls(self.appliance.port) as wire:
            wire.send(b"GET /%b/%b HTTP/1.1\r\nHost: a\r\n\r\n" % (script.encode(), token.encode()))
            try:
                response = wire.read_response()
                while response.status < 200:
                    response = wire.read_response()
            except (EOFError, ssl.SSLEOFError, ConnectionError):
                assert script in CUT, script
                return
        if response.status == 200:
            assert script in WHOLE, f"{script} was completed: {response}"
            assert response.body == token.encode(), f"{token} got {response.body!r}"
        else:
            assert response.status == 502, response
            assert script not in WHOLE, f"{script}: {response}"

    # -- judging

    def _finish(self, client: Client, request: Request) -> None:
        client.requests.remove(request)
        client.finish(request)
        self._judge_answer(client, request)

    def _judge_answer(self, client: Client, request: Request) -> None:
        read, script = client.read_of(request), request.script
        told = f"{script} on stream {request.stream}: {read.status}, {len(read.body)} bytes, reset {read.reset}"
        if not read.over:
            assert client.refused(request), f"the connection has ended, though no worker was killed; {told}"
            return
        if read.status == 200:
            assert request.whole.startswith(read.body), (
                f"the body is not this stream's: {bytes(read.body[:80])!r}; {told}"
            )
            assert read.ended == (script in WHOLE), f"completed what was cut, or cut what was whole: {told}"
            assert not read.ended or read.body == request.whole, f"a part is missing: {told}"
        else:
            assert (read.status, read.ended) == (502, True), told
            assert script not in WHOLE, told

    def worker_killed(self) -> None:
        """Whose connection was that worker's loses it; the others' streams are judged as ever."""
        for client in list(self.clients):
            client.look()
            if client.wire.ended:
                for request in client.requests:
                    if client.read_of(request).over:
                        self._judge_answer(client, request)
                self._drop(client)

    def finish(self) -> None:
        for client in self.clients:
            for request in list(client.requests):
                self._finish(client, request)

    def close_clients(self) -> None:
        for wire in [*(client.wire.wire for client in self.clients), *self.stalled]:
            wire.close()

    def _client(self, number: int) -> Client | None:
        return self.clients[number % len(self.clients)] if self.clients else None

    def _request(self, number: int, which: int) -> tuple[Client, Request] | tuple[None, None]:
        """One of those that are under way."""
        asking = [one for one in self.clients if one.requests]
        if not asking:
            return None, None
        client = asking[number % len(asking)]
        return client, client.requests[which % len(client.requests)]

    def _drop(self, client: Client) -> None:
        client.wire.close()
        self.clients.remove(client)


@pytest.mark.timeout(400)
def test_chaos() -> None:
    run_state_machine_as_test(Http2Chaos, settings=machine_settings(examples=4, steps=40))
