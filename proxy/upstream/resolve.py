"""Backend names are resolved at start and again from time to time, in a thread of the resolver's, never in the loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

from proxy.observe.events import Reporter
from proxy.upstream.backend import Backend

RESOLVE_TIMEOUT_SECS = 5.0


class Resolver:
    """Keeps the addresses of all backends that are named current. A name that does not resolve keeps its last ones."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        backends: Sequence[Backend],
        *,
        interval_secs: float,
        reporter: Reporter,
    ) -> None:
        self._loop = loop
        self._backends = [backend for backend in backends if backend.needs_resolving]
        self._interval_secs = interval_secs
        self._reporter = reporter
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Resolve every name once (bounded), then go on in the background."""
        if self._backends:
            await self._resolve_all()
            self._task = self._loop.create_task(self._run())

    def stop(self) -> None:
        """Resolve no more."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_secs)
            await self._resolve_all()

    async def _resolve_all(self) -> None:
        by_name: dict[tuple[str, int], list[Backend]] = {}
        for backend in self._backends:
            by_name.setdefault((backend.address.host, backend.address.port), []).append(backend)
        await asyncio.gather(*(self._resolve(host, port, backends) for (host, port), backends in by_name.items()))

    async def _resolve(self, host: str, port: int, backends: Sequence[Backend]) -> None:
        try:
            async with asyncio.timeout(RESOLVE_TIMEOUT_SECS):
                found = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, TimeoutError, UnicodeError) as error:
            self._reporter.report(
                f"upstream.resolve_failed:{host}",
                "an upstream's name does not resolve"
                + ("; its last addresses stay in use" if backends[0].endpoints else ""),
                upstream=host,
                error=str(error) or type(error).__name__,
                addresses=len(backends[0].endpoints),
            )
            return
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        for backend in backends:
            backend.set_addresses(addresses)
