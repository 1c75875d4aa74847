"""An appliance that the tests of a module share, with upstreams behind it whose script each test writes anew."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.harness.appliance import Appliance, Config
from tests.harness.upstream import RawUpstream, Script
from tests.harness.wire import Response, Wire


class Stage:
    """``upstreams`` stand behind the sites as the module's configuration says; ``upstream`` is the first."""

    def __init__(self, appliance: Appliance, upstreams: Sequence[RawUpstream]) -> None:
        self.appliance = appliance
        self.upstreams = upstreams
        self._clients: list[Wire] = []

    @property
    def upstream(self) -> RawUpstream:
        """The first upstream."""
        return self.upstreams[0]

    def play(self, *scripts: Script) -> None:
        """What each upstream does on a connection from now on."""
        for upstream, script in zip(self.upstreams, scripts, strict=False):
            upstream.script = script

    def client(self, server_name: str | None = "localhost", **options: Any) -> Wire:
        """A TLS client, closed at the end of the test."""
        return self.leave_to_me(self.appliance.connect(server_name, **options))

    def leave_to_me(self, wire: Wire) -> Wire:
        """Closes ``wire`` at the end of the test."""
        self._clients.append(wire)
        return wire

    def ask(self, request: bytes, method: str | None = None) -> Response:
        """The answer to one request on a connection of its own."""
        with self.appliance.connect() as client:
            return client.request(request, method)

    def counter(self, name: str) -> int:
        """One of the status' totals."""
        return int(self.appliance.status()["totals"][name])

    def reached(self, at: int = 0) -> bytes:
        """Everything that an upstream has received in this test, connection after connection."""
        return b"".join(bytes(wire.received) for wire in self.upstreams[at].wires)

    def strike(self) -> None:
        """Ends a test: every client and every upstream connection. Raises what went wrong in a script."""
        for client in self._clients:
            client.close()
        self._clients.clear()
        for upstream in self.upstreams:
            upstream.start_over()


@contextlib.contextmanager
def open_stage(
    configure: Callable[[Sequence[str]], Config] | None = None, *, upstreams: int = 1, **options: Any
) -> Iterator[Stage]:
    """An appliance configured by what ``configure`` makes of the upstreams' URLs; one site for any host without it."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rp-stage-")))
        raw = [stack.enter_context(RawUpstream()) for _ in range(upstreams)]
        urls = [upstream.url for upstream in raw]
        config = configure(urls) if configure else {"sites": [{"hosts": ["*"], "upstreams": [urls[0]]}]}
        appliance = Appliance(folder, config, **options)
        try:
            appliance.start()
            yield Stage(appliance, raw)
            appliance.stop()
        finally:
            appliance.kill()
            appliance.forget()
