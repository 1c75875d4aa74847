"""A client that pipelines what the proxy answers itself gets no more than its turn."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from proxy.protocol.http1 import HeadCache, Limits, RequestHead
from proxy.session.client import PIPELINE_BATCH, ClientSession
from proxy.stream.deadlines import Deadlines
from proxy.stream.stream import Stream

REQUEST = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
MANY = 2000


class Answering(ClientSession):
    """Answers each request on the spot."""

    def __init__(self, context: Any, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        super().__init__(context)
        self.answers = 0
        self._stream = Stream(loop, sock, Deadlines(loop), self, 10)
        self.begin()
        self._stream.start()

    def answer(self, head: RequestHead) -> None:
        self.answers += 1
        self.answered(False)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        yield ours, theirs


def test_a_batch_a_turn_all_in_the_end_and_the_end_is_not_overtaken(pair: tuple[socket.socket, socket.socket]) -> None:
    settings = SimpleNamespace(connection_idle_timeout_secs=60, header_timeout_secs=10, header_total_timeout_secs=60)
    context = SimpleNamespace(
        settings=settings, request_limits=Limits(32_768, 128), head_cache=HeadCache(), draining=False
    )
    ours, theirs = pair

    async def play() -> list[int]:
        session = Answering(context, asyncio.get_running_loop(), ours)
        theirs.sendall(REQUEST * MANY)
        theirs.shutdown(socket.SHUT_WR)
        turns = [0]
        while not session.stream.closed:
            await asyncio.sleep(0)
            turns.append(session.answers)
        return turns

    turns = asyncio.run(asyncio.wait_for(play(), 20))
    assert turns[-1] == MANY
    assert max(after - before for before, after in pairwise(turns)) <= PIPELINE_BATCH
