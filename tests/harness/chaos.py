"""What the machines of the chaos tests share: an appliance that is reloaded and killed, its upstream, the judgement.

What clients do in it, each machine says for its own protocol.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from tests.harness import Appliance, RawUpstream, Wire, connect_tls, wait_until
from tests.harness.toml import to_toml
from tests.show.sight import AdminClient, census, gained, unrest

MAX_CONNECTIONS = 60
MAX_KILLS = 2
MAX_RELOADS = 4
MAX_EVENT_LINES = 60
SLOW_SECS = 0.1
LONG_BYTES = 200_000
"""More than a stream's window, and than what a stream may have waiting in the proxy."""

SCRIPTS = ("ok", "chunked", "slow", "cut", "chunk-cut", "garbage", "silent-end", "reset", "early")
LONG_SCRIPTS = ("echo", "long", "long-cut")
WHOLE = frozenset(("ok", "chunked", "slow", "early", "echo", "long"))
"""After these the client gets a whole 200 with the body of ``answer_to``."""

CUT = frozenset(("cut", "chunk-cut", "long-cut"))
"""A head and a part of the body: the client must see that it is cut."""


def answer_to(script: str, token: str, asked: bytes) -> bytes:
    """The whole body of a response to a request with the body ``asked``; of one that is cut, what comes of it."""
    if script == "echo":
        return asked
    if script in ("long", "long-cut"):
        return f"{token} ".encode() * (LONG_BYTES // (len(token) + 1))
    return token.encode()


def upstream_script(wire: Wire) -> None:
    """Answers as the path says: /SCRIPT/TOKEN."""
    while True:
        try:
            head = wire.read_head()
            asked = wire.read_body(head)
        except EOFError:
            return  # the client's end, passed on
        script, token = head.split(b" ", 2)[1].decode().strip("/").split("/")
        if script == "early":
            wire.send(b"HTTP/1.1 103 Early Hints\r\n\r\n")
        body = answer_to(script, token, asked)
        if script == "slow":
            threading.Event().wait(SLOW_SECS)
        if script in ("ok", "slow", "early", "echo", "long"):
            wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        elif script == "chunked":
            wire.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        elif script in ("cut", "long-cut"):
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


def machine_settings(examples: int, steps: int) -> settings:
    """So many lives of so many steps."""
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        phases=(Phase.explicit, Phase.reuse, Phase.generate),  # to shrink a failure would take minutes
        suppress_health_check=list(HealthCheck),
    )


class ChaosMachine(RuleBasedStateMachine):
    """See the module's text. At the end permits and descriptors add up, and the event log is bounded.

    What may be done next must depend on what was drawn alone, not on what the appliance has done to a client:
    hypothesis plays a failure again. So rules have their bounds inside.
    """

    config: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix="rp-chaos-")))
        self.upstream = self.stack.enter_context(RawUpstream(upstream_script))
        config = {
            "workers": 2,
            "max_connections": MAX_CONNECTIONS,
            "upstream_idle_timeout_secs": 1,
            **self.config,
        }
        self.appliance = Appliance(folder, config, upstream=self.upstream.url)
        self.stack.callback(self.appliance.forget)
        self.stack.callback(self.appliance.kill)
        self.admin = AdminClient(self.appliance.admin_socket)
        self.stack.callback(self.admin.close)
        self.tokens = 0
        self.reloads = 0
        self.kills = 0

    def begin(self) -> None:
        self.appliance.start()
        with connect_tls(self.appliance.port) as wire:
            assert wire.request(b"GET /ok/first HTTP/1.1\r\nHost: a\r\n\r\n").body == b"first"
        wait_until(self.quiet, "the first client is gone")
        self.before = census(self.status())

    # -- what a machine has of its own

    def worker_killed(self) -> None:
        """A worker was killed, and has a successor: connections may be gone."""
        raise NotImplementedError

    def finish(self) -> None:
        """The end has come, and the appliance runs: ask whatever is left to be asked."""

    def close_clients(self) -> None:
        raise NotImplementedError

    # -- the appliance

    def status(self) -> dict[str, Any]:
        return self.admin.ask("GET", "/status")

    def workers(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.status()["workers"]
        return found

    def quiet(self) -> bool:
        return not any(one["permits_held"] or one["upstream_open"] or one["connections"] for one in self.workers())

    def next_token(self) -> str:
        """A mark that no other request has."""
        self.tokens += 1
        return f"token-{self.tokens}"

    @precondition(lambda self: self.reloads < MAX_RELOADS)
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
        pid = self.workers()[slot]["pid"]
        if pid:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: self._replaced(slot, pid), "the worker is replaced")
        self.worker_killed()

    def _replaced(self, slot: int, pid: int | None) -> bool:
        worker = self.workers()[slot]
        return bool(worker["ready"] and worker["pid"] not in (None, pid))

    # -- the end

    def teardown(self) -> None:
        whole = sys.exc_info()[0] is None  # else a rule has failed, or hypothesis has given this life up
        try:
            if whole and self.appliance.running:
                self.finish()
                self._judge()
        finally:
            self.close_clients()
            self.stack.close()

    def _judge(self) -> None:
        self.close_clients()
        wait_until(self.quiet, "every permit and upstream connection is given back")
        wait_until(lambda: not unrest(self.status()), "every request and every old generation has ended")
        more = gained(self.before, census(self.status()))
        assert not more, f"at rest there are more or fewer descriptors than at the start: {more}"
        lines = self.appliance.event_lines()
        assert len(lines) <= MAX_EVENT_LINES, "\n".join(lines)
        strangers = [line for line in lines if " loop." in line or " python." in line or "Traceback" in line]
        assert not strangers, strangers
        self.appliance.stop()
