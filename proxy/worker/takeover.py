"""The worker's side of a reload: prepare the next generation whole, then switch to it at a word, or drop it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass

from proxy.config.schema import UpstreamTls
from proxy.errors import OperatorError
from proxy.tls.contexts import ListenerTls, upstream_context
from proxy.worker import orders
from proxy.worker.context import BoundListener
from proxy.worker.generation import Generation, Workshop
from proxy.worker.orders import Message, NextGeneration


@dataclass(frozen=True, slots=True)
class Prepared:
    """A generation that could be switched to at once. ``listeners`` are all of them; ``tls`` by label."""

    order: NextGeneration
    generation: Generation
    new_sockets: dict[str, socket.socket]
    tls: dict[str, ListenerTls]


class Takeover:
    """Reads the master's orders; calls ``commit`` with what it has prepared.

    ``current`` gives the generation in force.
    """

    def __init__(
        self,
        workshop: Workshop,
        channel: socket.socket,
        *,
        current: Callable[[], Generation],
        commit: Callable[[Prepared], None],
        retire: Callable[[float], None],
    ) -> None:
        self._workshop = workshop
        self._channel = channel
        self._current = current
        self._commit = commit
        self._retire = retire
        self._prepared: Prepared | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Listen to the master."""
        self._channel.setblocking(False)
        self._workshop.loop.add_reader(self._channel.fileno(), self._on_order)

    def _on_order(self) -> None:
        try:
            received = orders.receive(self._channel)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            received = None
        if received is None:
            # The master has gone; the kernel's death signal is on its way.
            self._workshop.loop.remove_reader(self._channel.fileno())
            return
        message, descriptors = received
        if message.word == orders.PREPARE:
            self._drop()
            self._task = self._workshop.loop.create_task(self._prepare(descriptors))
        elif message.word == orders.COMMIT:
            self._on_commit(message.number)
        elif message.word == orders.ABORT:
            self._drop()
        elif message.word == orders.RETIRE:
            self._retire(message.number)

    async def _prepare(self, descriptors: list[int]) -> None:
        order = orders.unpack(descriptors[0])
        sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors[1:]]
        generation: Generation | None = None
        try:
            _raise_soft_limit(order.soft_limit)
            new = [listener.label for listener in order.listeners if listener.is_new]
            for sock in sockets:
                sock.setblocking(False)
            generation = Generation(self._workshop, order.settings, _upstream_contexts(order), self._current())
            tls = {one.label: ListenerTls(one.certificates) for one in order.listeners if one.certificates is not None}
            await generation.prepare()
        except Exception as error:  # noqa: BLE001 - whatever it is, the answer is that this generation cannot be
            for sock in sockets:
                sock.close()
            if generation is not None:
                generation.discard()
            text = str(error) if isinstance(error, (OperatorError, OSError)) else f"{type(error).__name__}: {error}"
            self._answer(Message(orders.FAILED, order.number, text))
            return
        self._prepared = Prepared(order, generation, dict(zip(new, sockets, strict=True)), tls)
        self._answer(Message(orders.PREPARED, order.number))

    def _on_commit(self, number: int) -> None:
        prepared, self._prepared = self._prepared, None
        if prepared is None or prepared.order.number != number:
            self._answer(Message(orders.FAILED, number, "nothing is prepared under this number"))
            return
        self._commit(prepared)
        self._answer(Message(orders.COMMITTED, number))

    def _drop(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            for sock in prepared.new_sockets.values():
                sock.close()
            prepared.generation.discard()

    def _answer(self, message: Message) -> None:
        with contextlib.suppress(OSError):
            orders.send(self._channel, message)


def bound_listeners(prepared: Prepared, in_service: dict[str, BoundListener]) -> list[BoundListener]:
    """Every listener of the prepared generation: new ones on their new sockets, old ones on theirs with new
    certificates swapped in."""
    listeners = []
    for one in prepared.order.listeners:
        old = in_service.get(one.label)
        fresh = prepared.tls.get(one.label)
        if old is None:
            listeners.append(BoundListener(prepared.new_sockets[one.label], one.label, fresh))
        elif old.tls is not None and fresh is not None:
            old.tls.swap(fresh)
            listeners.append(old)
        else:
            listeners.append(BoundListener(old.sock, one.label, fresh))
    return listeners


def _upstream_contexts(order: NextGeneration) -> dict[UpstreamTls, ssl.SSLContext]:
    wanted = set()
    for site in order.settings.sites:
        for options in (site, *site.routes):
            wanted.add(options.upstream_tls or site.upstream_tls or UpstreamTls())
    uses_tls = any(
        upstream.startswith("https:")
        for site in order.settings.sites
        for options in (site, *site.routes)
        for upstream in options.upstreams or ()
    )
    return {options: upstream_context(options) for options in wanted} if uses_tls else {}


def _raise_soft_limit(soft: int | None) -> None:
    if soft is not None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        except (OSError, ValueError) as error:
            raise OSError(f"worker {os.getpid()} cannot raise its soft descriptor limit to {soft}: {error}") from error
