"""The worker's side of a reload: prepare the next generation whole, then switch to it at a word, or drop it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass

from proxy.errors import OperatorError
from proxy.tls.contexts import ListenerTls
from proxy.worker import orders
from proxy.worker.context import BoundListener
from proxy.worker.generation import Generation, Workshop, renewed_trust
from proxy.worker.orders import Message, NextGeneration


@dataclass(frozen=True, slots=True)
class Prepared:
    """A generation that could be switched to. ``listeners`` are all of them; ``tls`` by label."""

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
        self._candidate: Prepared | None = None
        self._is_prepared = False
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
            self._prepare(message.number, descriptors)
        elif message.word == orders.COMMIT:
            self._on_commit(message.number)
        elif message.word == orders.ABORT:
            self._drop()
        elif message.word == orders.RETIRE:
            self._retire(message.number)

    def _prepare(self, number: int, descriptors: list[int]) -> None:
        sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors[1:]]
        for sock in sockets:
            sock.setblocking(False)
        generation: Generation | None = None
        try:
            order = _unpacked(descriptors)
            new = [listener.label for listener in order.listeners if listener.is_new]
            _raise_soft_limit(order.soft_limit)
            current = self._current()
            trust = renewed_trust(order.cas, current.trust)
            generation = Generation(self._workshop, order.settings, trust, current)
            tls = {one.label: ListenerTls(one.certificates) for one in order.listeners if one.certificates is not None}
        except Exception as error:  # noqa: BLE001 - whatever it is, the answer is that this generation cannot be
            for sock in sockets:
                sock.close()
            if generation is not None:
                generation.discard()
            self._fail(number, error)
            return
        self._candidate = Prepared(order, generation, dict(zip(new, sockets, strict=True)), tls)
        # From here on an abort finds it, whenever it comes.
        self._task = self._workshop.loop.create_task(self._finish(self._candidate))

    async def _finish(self, candidate: Prepared) -> None:
        try:
            await candidate.generation.prepare()
        except Exception as error:  # noqa: BLE001 - as above
            self._drop()
            self._fail(candidate.order.number, error)
            return
        self._is_prepared = True
        self._answer(Message(orders.PREPARED, candidate.order.number))

    def _on_commit(self, number: int) -> None:
        candidate = self._candidate
        if candidate is None or not self._is_prepared or candidate.order.number != number:
            self._answer(Message(orders.FAILED, number, "nothing is prepared under this number"))
            return
        self._candidate, self._task, self._is_prepared = None, None, False
        try:
            self._commit(candidate)
        except Exception as error:  # noqa: BLE001 - see below
            # Between two configurations: what is under way ends, and the worker that follows has the new one whole.
            self._workshop.reporter.report("reload.switch_failed", "a worker could not switch and ends", exc=error)
            self._fail(number, error)
            signal.raise_signal(signal.SIGTERM)
            return
        self._answer(Message(orders.COMMITTED, number))

    def _drop(self) -> None:
        candidate, self._candidate = self._candidate, None
        task, self._task = self._task, None
        self._is_prepared = False
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        if candidate is not None:
            for sock in candidate.new_sockets.values():
                sock.close()
            candidate.generation.discard()

    def _fail(self, number: int, error: Exception) -> None:
        text = str(error) if isinstance(error, (OperatorError, OSError)) else f"{type(error).__name__}: {error}"
        self._answer(Message(orders.FAILED, number, text))

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


def _unpacked(descriptors: list[int]) -> NextGeneration:
    """The order, when everything has come that belongs to it: the kernel leaves out what finds no free number."""
    order = orders.unpack(descriptors[0]) if descriptors else None
    if order is None or sum(one.is_new for one in order.listeners) != len(descriptors) - 1:
        raise OSError("no descriptor was left to receive the new configuration with")
    return order


def _raise_soft_limit(soft: int | None) -> None:
    if soft is not None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        except (OSError, ValueError) as error:
            raise OSError(f"worker {os.getpid()} cannot raise its soft descriptor limit to {soft}: {error}") from error
