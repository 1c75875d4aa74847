"""A state machine plays clients of HTTP/1.1, upstreams, reloads and killed workers against a live appliance.

Whatever the order: no answer reaches the wrong client, no body that was cut is completed, permits and descriptors add
up at the end, and the event log stays bounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test

from tests.harness import Wire, connect_tcp, connect_tls
from tests.harness.chaos import CUT, SCRIPTS, WHOLE, ChaosMachine, machine_settings

MAX_CLIENTS = 12
FAULTS = (OSError, EOFError)
ASKED = st.tuples(st.sampled_from(SCRIPTS), st.sampled_from((0, 0, 5, 70_000)), st.integers(0, 200))
"""Of a request: the upstream's script, the size of its body, and where it is cut (above 100 not at all)."""


@dataclass
class Client:
    """``rest`` is what it has not sent of its request; ``script`` and ``token`` are those of the request under way."""

    wire: Wire
    script: str = ""
    token: str = ""
    rest: bytes = b""
    shaken: bool = False
    """A worker was killed since: its connection may be gone."""

    @property
    def idle(self) -> bool:
        return not self.script


class Chaos(ChaosMachine):
    """See the module's text."""

    def __init__(self) -> None:
        super().__init__()
        self.clients: list[Client] = []
        self.stalled: list[Wire] = []

    @initialize(first=st.lists(ASKED, min_size=3, max_size=6))
    def start(self, first: list[tuple[str, int, int]]) -> None:
        """Whatever rules hypothesis leaves out of a life, there are requests in it."""
        self.begin()
        for asked in first:
            self.open()
            self._ask(self.clients[-1], *asked)

    @rule()
    def open(self) -> None:
        if len(self.clients) < MAX_CLIENTS:
            self.clients.append(Client(connect_tls(self.appliance.port)))

    @precondition(lambda self: len(self.stalled) < MAX_CLIENTS)
    @rule(data=st.binary(max_size=40))
    def stall(self, data: bytes) -> None:
        wire = connect_tcp(self.appliance.port)
        wire.send(data)
        self.stalled.append(wire)

    @rule(number=st.integers(0, MAX_CLIENTS), asked=ASKED)
    def ask(self, number: int, asked: tuple[str, int, int]) -> None:
        """A request, or the beginning of one."""
        client = self._client(number, idle=True)
        if client is not None:
            self._ask(client, *asked)

    def _ask(self, client: Client, script: str, body_bytes: int, cut_at: int) -> None:
        client.script, client.token = script, self.next_token()
        method = b"POST" if body_bytes else b"GET"
        data = b"%b /%b/%b HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % (
            method,
            script.encode(),
            client.token.encode(),
            body_bytes,
        )
        data += bytes(body_bytes)
        sent, client.rest = (data, b"") if cut_at > 100 else (data[:cut_at], data[cut_at:])
        self._step(client, lambda: client.wire.send(sent))

    @rule(number=st.integers(0, MAX_CLIENTS))
    def read(self, number: int) -> None:
        """Finish the request that is under way and judge its answer."""
        client = self._client(number, idle=False)
        if client is None:
            return
        script, token, rest = client.script, client.token, client.rest
        client.script, client.token, client.rest = "", "", b""
        try:
            client.wire.send(rest)
            response = client.wire.read_response()
            while response.status < 200:
                response = client.wire.read_response()
        except FAULTS as error:
            self._drop(client)
            if not client.shaken and script not in CUT:
                raise AssertionError(f"{script}: {error!r}") from error
            return
        if response.status == 200:
            assert script in WHOLE, f"{script} was completed: {response}"
            assert response.body == token.encode(), f"{token} got {response.body!r}"
        else:
            assert response.status == 502, response
            assert script not in WHOLE or client.shaken, f"{script}: {response}"
        if response.get("Connection") == "close":
            self._drop(client)

    @rule(number=st.integers(0, MAX_CLIENTS), reset=st.booleans())
    def leave(self, number: int, reset: bool) -> None:
        client = self._client(number, idle=None)
        if client is not None:
            if reset:
                client.wire.reset()
            self._drop(client)

    def _client(self, number: int, *, idle: bool | None) -> Client | None:
        fitting = [one for one in self.clients if idle is None or one.idle == idle]
        return fitting[number % len(fitting)] if fitting else None

    def _step(self, client: Client, act: Any) -> None:
        try:
            act()
        except FAULTS:
            self._drop(client)
            assert client.shaken

    def _drop(self, client: Client) -> None:
        client.wire.close()
        self.clients.remove(client)

    def worker_killed(self) -> None:
        for client in self.clients:
            client.shaken = True

    def close_clients(self) -> None:
        for wire in [*(client.wire for client in self.clients), *self.stalled]:
            wire.close()


@pytest.mark.timeout(400)
def test_chaos() -> None:
    run_state_machine_as_test(Chaos, settings=machine_settings(examples=8, steps=35))
