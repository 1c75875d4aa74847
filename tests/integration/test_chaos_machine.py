"""A state machine plays clients, upstreams, reloads and killed workers against a live appliance.

Whatever the order: no answer reaches the wrong client, no body that was cut is completed, permits and descriptors add
up at the end, and the event log stays bounded.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.harness import Appliance, RawUpstream, Wire, connect_tcp, connect_tls, wait_until
from tests.harness.toml import to_toml
from tests.show.sight import AdminClient

MAX_CONNECTIONS = 60
MAX_CLIENTS = 12
MAX_KILLS = 2
MAX_EVENT_LINES = 60
FAULTS = (OSError, EOFError)
SLOW_SECS = 0.1

SCRIPTS = ("ok", "chunked", "slow", "cut", "chunk-cut", "garbage", "silent-end", "reset", "early")
WHOLE = frozenset(("ok", "chunked", "slow", "early"))
"""After these the client gets a whole 200 with its own token."""

CUT = frozenset(("cut", "chunk-cut"))
"""A head and a part of the body: the client must see that it is cut."""


def upstream_script(wire: Wire) -> None:
    """Answers as the path says: /SCRIPT/TOKEN."""
    while True:
        try:
            head = wire.read_head()
            wire.read_body(head)
        except EOFError:
            return  # the client's end, passed on
        script, token = head.split(b" ", 2)[1].decode().strip("/").split("/")
        if script == "early":
            wire.send(b"HTTP/1.1 103 Early Hints\r\n\r\n")
        body = token.encode()
        if script == "slow":
            threading.Event().wait(SLOW_SECS)
        if script in ("ok", "slow", "early"):
            wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        elif script == "chunked":
            wire.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        elif script == "cut":
            wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body) + 9, body))
            return
        elif script == "chunk-cut":
            wire.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(body), body))
            return
        elif script == "garbage":
            wire.send(b"HTTP/1.1 2OO so what\r\n\r\n")
            return
        elif script == "silent-end":
            return
        else:
            wire.reset()
            return


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


class Chaos(RuleBasedStateMachine):
    """See the module's text."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix="rp-chaos-")))
        self.upstream = self.stack.enter_context(RawUpstream(upstream_script))
        config: dict[str, Any] = {"workers": 2, "max_connections": MAX_CONNECTIONS, "upstream_idle_timeout_secs": 1}
        self.appliance = Appliance(folder, config, upstream=self.upstream.url)
        self.stack.callback(self.appliance.forget)
        self.stack.callback(self.appliance.kill)
        self.admin = AdminClient(self.appliance.admin_socket)
        self.stack.callback(self.admin.close)
        self.clients: list[Client] = []
        self.stalled: list[Wire] = []
        self.tokens = 0
        self.reloads = 0
        self.kills = 0

    @initialize()
    def start(self) -> None:
        self.appliance.start()
        with connect_tls(self.appliance.port) as wire:
            assert wire.request(b"GET /ok/first HTTP/1.1\r\nHost: a\r\n\r\n").body == b"first"
        wait_until(self.quiet, "the first client is gone")

    def workers(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.appliance.status()["workers"]
        return found

    def quiet(self) -> bool:
        return not any(one["permits_held"] or one["upstream_open"] or one["connections"] for one in self.workers())

    # -- clients

    # What may be done next depends on what was drawn alone, not on what the appliance has done to a client: hypothesis
    # plays a failure again. So the bounds are inside.

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

    @rule(
        number=st.integers(0, MAX_CLIENTS),
        script=st.sampled_from(SCRIPTS),
        body_bytes=st.sampled_from((0, 0, 5, 70_000)),
        cut_at=st.integers(0, 200),
    )
    def ask(self, number: int, script: str, body_bytes: int, cut_at: int) -> None:
        """A request, or the beginning of one."""
        client = self._client(number, idle=True)
        if client is None:
            return
        self.tokens += 1
        client.script, client.token = script, f"token-{self.tokens}"
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

    # -- the appliance

    @rule()
    def reload(self) -> None:
        self.reloads += 1
        config = {**self.appliance.config, "max_connections": MAX_CONNECTIONS - self.reloads % 2}
        self.appliance.path.write_text(to_toml(config))
        document = self.admin.ask("POST", "/reload")
        assert document["result"] == "accepted", document

    @precondition(lambda self: self.kills < MAX_KILLS)
    @rule(slot=st.integers(0, 1))
    def kill_worker(self, slot: int) -> None:
        self.kills += 1
        for client in self.clients:
            client.shaken = True
        pid = self.workers()[slot]["pid"]
        if pid:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: self._replaced(slot, pid), "the worker is replaced")

    def _replaced(self, slot: int, pid: int | None) -> bool:
        worker = self.workers()[slot]
        return bool(worker["ready"] and worker["pid"] not in (None, pid))

    # -- the end

    def teardown(self) -> None:
        try:
            if self.appliance.running:
                self._judge()
        finally:
            for wire in [*(client.wire for client in self.clients), *self.stalled]:
                wire.close()
            self.stack.close()

    def _judge(self) -> None:
        for wire in [*(client.wire for client in self.clients), *self.stalled]:
            wire.close()
        wait_until(self.quiet, "every permit and upstream connection is given back")
        open_now = [len(os.listdir(f"/proc/{one['pid']}/fd")) for one in self.workers()]
        assert len(set(open_now)) == 1, f"workers at rest hold {open_now} descriptors: one of them leaked"
        lines = self.appliance.event_lines()
        assert len(lines) <= MAX_EVENT_LINES, "\n".join(lines)
        strangers = [line for line in lines if " loop." in line or " python." in line or "Traceback" in line]
        assert not strangers, strangers
        self.appliance.stop()


@pytest.mark.timeout(400)
def test_chaos() -> None:
    run_state_machine_as_test(
        Chaos,
        settings=settings(
            max_examples=8,
            stateful_step_count=35,
            deadline=None,
            phases=(Phase.explicit, Phase.reuse, Phase.generate),  # to shrink a failure would take minutes
            suppress_health_check=list(HealthCheck),
        ),
    )
