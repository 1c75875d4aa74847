"""The clients of a drill: attackers that stall in the handshake, good ones at a steady rate, and a look at health."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from dataclasses import dataclass, field
from time import monotonic
from typing import cast

GOOD_PER_SEC = 20.0
PATIENCE_SECS = 10.0
"""How long a good client waits for its answer: what browsers and git clients bear at least."""

HEALTH_EVERY_SECS = 0.25
CONNECTS_A_STEP = 32
STEP_SECS = 0.02
RETURN_SECS = 2.0
"""An attacker that is closed comes back after it: twice the permits in attackers are then fewer a second than permits
a grace, which is what the policy bears."""

_HELLO = bytes.fromhex("160301020001")
"""A record header that promises 512 bytes of ClientHello, and the first byte of it (RFC 8446 section 5.1)."""

_REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@dataclass(slots=True)
class Answer:
    """What became of one good client; ``secs`` from its first step to the end of the answer."""

    began: float
    ended: float
    fault: str
    """What kept it from being good; empty when it was."""

    @property
    def good(self) -> bool:
        """Whether it was the whole answer, with 200."""
        return not self.fault

    @property
    def secs(self) -> float:
        return self.ended - self.began


class _Stalled(asyncio.Protocol):
    def __init__(self, owner: Attackers, number: int) -> None:
        self._owner = owner
        self._number = number

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods without being of the class.
        self._owner.arrived(self._number, cast("asyncio.Transport", transport))

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner.lost(self._number)


@dataclass
class Attackers:
    """``count`` clients that connect, stall, and come back when they are closed."""

    port: int
    count: int
    addresses: tuple[str, ...]
    return_secs: float = RETURN_SECS
    open: dict[int, asyncio.Transport] = field(default_factory=dict)
    most: int = 0
    seen: set[int] = field(default_factory=set)
    closed_by_proxy: int = 0
    _due: list[tuple[float, int]] = field(default_factory=list)
    _stopping: bool = False

    def arrived(self, number: int, transport: asyncio.Transport) -> None:
        """One of them is connected."""
        self.open[number] = transport
        self.seen.add(number)
        if number % 2:  # one half says nothing at all, the other begins
            transport.write(_HELLO)

    def lost(self, number: int) -> None:
        """One of them was closed."""
        self.open.pop(number, None)
        if not self._stopping:
            self.closed_by_proxy += 1
            self._due.append((monotonic() + self.return_secs, number))

    async def run(self) -> None:
        """Keep all of them connected, until cancelled; then close them all."""
        self._due = [(0.0, number) for number in range(self.count)]
        try:
            while True:
                now = monotonic()
                ready = [number for at, number in self._due if at <= now][:CONNECTS_A_STEP]
                self._due = [one for one in self._due if one[1] not in set(ready)]
                await asyncio.gather(*(self._connect(number) for number in ready))
                self.most = max(self.most, len(self.open))
                await asyncio.sleep(STEP_SECS)
        finally:
            self._stopping = True
            for transport in list(self.open.values()):
                transport.abort()

    async def _connect(self, number: int) -> None:
        address = self.addresses[number % len(self.addresses)]
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(1.0):
                await loop.create_connection(
                    lambda: _Stalled(self, number), "127.0.0.1", self.port, local_addr=(address, 0)
                )
        except (OSError, TimeoutError):
            # The kernel's queue is full: it tries again like any client.
            self._due.append((monotonic() + self.return_secs, number))


@dataclass
class GoodClients:
    """One new client after another at a steady rate; each asks for a page over TLS and goes."""

    port: int
    addresses: tuple[str, ...]
    answers: list[Answer] = field(default_factory=list)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def once(self) -> None:
        """One of them; its answer does not count."""
        await self._one(_trusting(), self.addresses[0])
        self.answers.clear()

    async def run(self) -> None:
        """Until cancelled; ``finish`` waits for those that are under way."""
        context = _trusting()
        began = monotonic()
        number = 0
        while True:
            address = self.addresses[number % len(self.addresses)]
            task = asyncio.create_task(self._one(context, address))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            number += 1
            await asyncio.sleep(max(0.0, began + number / GOOD_PER_SEC - monotonic()))

    async def finish(self) -> None:
        """Wait for the answers that are still owed, as long as a client would."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=PATIENCE_SECS + 1.0)

    async def _one(self, context: ssl.SSLContext, address: str) -> None:
        began = monotonic()
        try:
            async with asyncio.timeout(PATIENCE_SECS):
                fault = await self._exchange(context, address)
        except TimeoutError:
            fault = f"nothing for {PATIENCE_SECS:g} s"
        except (OSError, ValueError) as error:
            fault = getattr(error, "strerror", None) or type(error).__name__
        self.answers.append(Answer(began, monotonic(), fault))

    async def _exchange(self, context: ssl.SSLContext, address: str) -> str:
        """What was wrong with the answer; empty when it was good."""
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=context, server_hostname="localhost", local_addr=(address, 0)
        )
        try:
            writer.write(_REQUEST)
            answer = await reader.read()
            while more := await reader.read():
                answer += more
            if not answer:
                return "closed without an answer"
            if not answer.startswith(b"HTTP/1.1 200 "):
                return answer.partition(b"\r\n")[0].decode("latin-1")
            return "" if answer.endswith(b"</html>\n") else "a cut answer"
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


def _trusting() -> ssl.SSLContext:
    # Whose certificate it is is not the question here: the copy shows that of the configuration.
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


@dataclass
class HealthLook:
    """/healthz again and again: the slowest answer, and how many were not 200. /readyz beside it: how often 503."""

    port: int
    looks: int = 0
    failed: int = 0
    slowest_secs: float = 0.0
    not_ready: set[str] = field(default_factory=set)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            began = monotonic()
            status, _ = await self._get(b"/healthz")
            self.slowest_secs = max(self.slowest_secs, monotonic() - began)
            self.looks += 1
            self.failed += status != 200
            status, body = await self._get(b"/readyz")
            if status == 503:
                self.not_ready.update(body.decode("utf-8", "replace").split("\n"))
            await asyncio.sleep(HEALTH_EVERY_SECS)

    async def _get(self, path: bytes) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(PATIENCE_SECS):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.write(b"GET %b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n" % path)
                answer = await reader.read()
                writer.close()
            head, _, body = answer.partition(b"\r\n\r\n")
            return int(head.split(b" ", 2)[1]), body
        except (OSError, TimeoutError, ValueError, IndexError):
            return 0, b""
