"""A worker that dies or hangs in the middle of a reload: nothing has changed, and its successor is the right one."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.conftest import StartAppliance
from tests.harness import Appliance, RawUpstream, Script, Wire, descriptor_count, wait_until
from tests.harness.reloading import Document, post, reload, rewrite
from tests.harness.upstream import answering

LAST_REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
WORKERS = 4
TRIES = 24

# Names take their time to resolve in the workers, so that a test comes between prepare and prepared.
SLOW_NAMES = """
import asyncio, pathlib, sys, uvloop
class Loop(uvloop.Loop):
    async def getaddrinfo(self, host, *args, **kwargs):
        if str(host).startswith("slow"):
            pathlib.Path(sys.argv[-1], "..", "asked").resolve().touch()
            await asyncio.sleep(4)
        return await super().getaddrinfo("127.0.0.1", *args, **kwargs)
uvloop.new_event_loop = Loop
uvloop.run = lambda main: asyncio.Runner(loop_factory=Loop).run(main)
"""

FAULTY_SWITCH = """
import os
from proxy.upstream.pool import UpstreamPool
configure = UpstreamPool.configure
def faulty(self, *args, **options):
    if self._cells is not None and options["limit"] == 3:
        raise RuntimeError("planted")
    configure(self, *args, **options)
UpstreamPool.configure = faulty
"""


def reply(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def everywhere(one: Appliance) -> set[bytes]:
    found = set()
    for _ in range(TRIES):
        with one.connect() as client:
            found.add(client.request(LAST_REQUEST).body)
    return found


def pids(one: Appliance) -> list[int]:
    return [worker["pid"] for worker in one.status()["workers"]]


@contextlib.contextmanager
def reloading(one: Appliance) -> Iterator[Callable[[], Document]]:
    """A reload in a thread of its own; what is yielded waits for the answer."""
    answers: list[Document] = []
    thread = threading.Thread(target=lambda: answers.append(post(one, "/reload")))
    thread.start()

    def answer() -> Document:
        thread.join(60)
        assert answers, "there is no answer"
        return answers[0]

    try:
        yield answer
    finally:
        thread.join(60)


def patient(body: bytes) -> Script:
    """Answers with ``body``, however long it is until the next request."""

    def play(wire: Wire) -> None:
        wire.sock.settimeout(90)
        answering(reply(body))(wire)

    return play


def two(upstream: Callable[..., RawUpstream]) -> tuple[str, str]:
    return upstream(patient(b"old")).url, upstream(patient(b"new")).url


def sites(url: str, *more: str) -> list[dict[str, object]]:
    routes = [{"path": f"/{at}", "upstreams": [other]} for at, other in enumerate(more)]
    return [{"hosts": ["*"], "upstreams": [url], "routes": routes}]


def held(one: Appliance) -> list[int]:
    """Descriptors of the master and the workers, without the workers' connections to upstreams."""
    workers = one.status()["workers"]
    return [descriptor_count(one.pid), *(descriptor_count(each["pid"]) - each["upstream_open"] for each in workers)]


def test_a_worker_that_dies_while_it_prepares(appliance: StartAppliance, upstream: Callable[..., RawUpstream]) -> None:
    old, new = two(upstream)
    one = appliance({"workers": WORKERS, "sites": sites(old)}, prelude=SLOW_NAMES)
    one.supervised()
    victim = pids(one)[1]
    rewrite(one, sites=sites(new, "http://slow.example.org:80"))
    os.kill(victim, signal.SIGSTOP)  # so that it has not answered yet, whoever is faster
    with reloading(one) as answer:
        wait_until((one.folder / "asked").exists, "the others prepare")
        os.kill(victim, signal.SIGKILL)
        document = answer()
    assert document["result"] == "refused"
    assert any("worker 1" in error for error in document["errors"]), document
    wait_until(lambda: one.ready() and pids(one)[1] not in (None, victim), "its successor is ready")
    assert everywhere(one) == {b"old"}
    assert [worker["generations"] for worker in one.status()["workers"]] == [1] * WORKERS
    reload(one, sites=sites(new))
    assert everywhere(one) == {b"new"}


def test_a_worker_that_hangs_is_waited_for_in_bounds(
    appliance: StartAppliance, upstream: Callable[..., RawUpstream]
) -> None:
    old, new = two(upstream)
    one = appliance({"workers": WORKERS, "sites": sites(old)})
    one.supervised()
    victim = pids(one)[2]
    before = held(one)
    listeners = one.config["listeners"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.kill(victim, signal.SIGSTOP)
    try:
        rewrite(one, sites=sites(new), listeners=[*listeners, {"address": f"127.0.0.1:{port}"}])
        document = post(one, "/reload")
        assert document["result"] == "refused"
        assert document["errors"] == ["worker 2 did not answer in 20 s"]
        assert one.health("/readyz")[0] == 503
    finally:
        os.kill(victim, signal.SIGCONT)
    wait_until(one.ready, "it runs again")
    assert everywhere(one) == {b"old"}
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5)
    wait_until(lambda: held(one) == before, f"nothing is left over of {before}")
    reload(one, sites=sites(new))
    assert pids(one)[2] == victim
    assert everywhere(one) == {b"new"}


def test_a_worker_that_follows_a_dead_one_has_the_new_configuration(
    appliance: StartAppliance, upstream: Callable[..., RawUpstream]
) -> None:
    old, new = two(upstream)
    one = appliance({"workers": WORKERS, "sites": sites(old)})
    one.supervised()
    victim = pids(one)[0]
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: pids(one)[0] != victim, "it is reaped")
    reload(one, sites=sites(new))  # while the slot is empty, or its next worker begins
    wait_until(lambda: one.ready() and pids(one)[0] is not None, "its successor is ready")
    assert everywhere(one) == {b"new"}
    victims = one.workers
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: one.ready() and not set(victims) & set(one.workers), "all are replaced")
    assert everywhere(one) == {b"new"}
    reload(one, sites=sites(old))
    assert everywhere(one) == {b"old"}


def test_a_worker_that_cannot_switch_is_replaced(
    appliance: StartAppliance, upstream: Callable[..., RawUpstream]
) -> None:
    one = appliance({"workers": 2, "max_upstream_connections": 20}, upstream=upstream().url, prelude=FAULTY_SWITCH)
    one.supervised()
    before = pids(one)
    document = reload(one, max_upstream_connections=6)
    assert [warning for warning in document["warnings"] if "planted" in warning]
    wait_until(lambda: one.ready() and not set(before) & set(pids(one)), "they are replaced")
    assert everywhere(one) == {b"ok"}
    assert one.status()["generation"] == 2
