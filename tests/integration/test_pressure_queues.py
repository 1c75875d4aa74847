"""``max_upstream_requests`` and the queues: exact over the workers, bounded, nobody waits for ever."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.conftest import StartAppliance
from tests.harness.appliance import Appliance
from tests.harness.processes import wait_until
from tests.harness.upstream import RawUpstream
from tests.harness.wire import Wire

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
GET = b"GET %s HTTP/1.1\r\nHost: a.test\r\n\r\n"
PATIENCE_SECS = 60.0


class Slow:
    """An upstream that answers once ``go`` is set, and knows how many requests it had at the same time."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self._lock = threading.Lock()
        self.now = 0
        self.most = 0

    def play(self, wire: Wire) -> None:
        try:
            while True:
                wire.read_head()
                with self._lock:
                    self.now += 1
                    self.most = max(self.most, self.now)
                assert self.go.wait(PATIENCE_SECS)
                with self._lock:
                    self.now -= 1
                wire.send(OK)
        except (EOFError, OSError):
            return


def start(
    appliance: StartAppliance, upstream: Callable[..., RawUpstream], slow: Slow, site: dict[str, Any], **config: Any
) -> Appliance:
    url = upstream(slow.play).url
    routes = [{"path": "/free", "max_upstream_requests": 300}]
    sites = [{"hosts": ["*"], "upstreams": [url], "routes": routes, **site}]
    return appliance({"sites": sites, "max_connections": 400, "upstream_queue_timeout_secs": 60, **config})


def waiting(one: Appliance, count: int) -> None:
    wait_until(lambda: one.status()["totals"]["upstream_queued"] == count, f"{count} requests wait", PATIENCE_SECS)


def test_the_limit_holds_over_four_workers(appliance: StartAppliance, upstream: Callable[..., RawUpstream]) -> None:
    slow, found = Slow(), Counter[int]()
    one = start(appliance, upstream, slow, {"max_upstream_requests": 8}, workers=4)
    clients = []
    for _ in range(32):
        clients.append(one.connect(timeout_secs=PATIENCE_SECS))
        clients[-1].send(GET % b"/")
    wait_until(lambda: one.status()["totals"]["upstream_queued"] + slow.now == 32, "all to come", PATIENCE_SECS)
    assert 4 <= slow.now <= 8  # the kernel may leave a worker without any
    slow.go.set()
    found.update(client.read_response().status for client in clients)
    assert found == {200: 32}
    assert slow.most <= 8
    waiting(one, 0)
    for client in clients:
        client.close()


def test_who_finds_the_queue_full_is_answered_at_once(
    appliance: StartAppliance, upstream: Callable[..., RawUpstream]
) -> None:
    slow = Slow()
    one = start(appliance, upstream, slow, {"max_upstream_requests": 1, "max_queued_requests": 2})
    clients = [one.connect() for _ in range(3)]
    for number, client in enumerate(clients):
        client.send(GET % b"/")
        if number:
            waiting(one, number)
        else:
            wait_until(lambda: slow.now == 1, "the first request to reach the upstream")
    with one.connect() as late:
        answer = late.request(GET % b"/")
        assert (answer.status, answer.get("Retry-After")) == (503, "1")
    assert one.status()["totals"]["upstream_queue_full"] == 1
    clients.pop().close()  # who leaves makes room
    waiting(one, 1)
    with one.connect() as another, one.connect() as free:
        another.send(GET % b"/")
        waiting(one, 2)
        # A route with a number of its own does not share its site's.
        free.send(GET % b"/free")
        slow.go.set()
        assert [client.read_response().status for client in (*clients, another, free)] == [200] * 4
    for client in clients:
        client.close()


def test_all_queues_together_are_bounded(appliance: StartAppliance, upstream: Callable[..., RawUpstream]) -> None:
    slow = Slow()
    one = start(
        appliance, upstream, slow, {"max_upstream_requests": 1}, max_queued_requests=1, max_upstream_connections=1
    )
    with one.connect() as first, one.connect() as second, one.connect() as third:
        first.send(GET % b"/")
        wait_until(lambda: slow.now == 1, "the first request to reach the upstream")
        second.send(GET % b"/free")
        waiting(one, 1)
        assert third.request(GET % b"/").status == 503
        slow.go.set()
        assert [first.read_response().status, second.read_response().status] == [200, 200]


def test_who_waits_too_long_and_who_loses_its_upstream_give_their_places_up(
    appliance: StartAppliance, upstream: Callable[..., RawUpstream]
) -> None:
    slow = Slow()
    site = {"max_upstream_requests": 1, "upstream_response_timeout_secs": 3}
    one = start(appliance, upstream, slow, site, upstream_queue_timeout_secs=1)
    with one.connect() as first, one.connect() as second:
        first.send(GET % b"/")
        wait_until(lambda: slow.now == 1, "the first request to reach the upstream")
        assert second.request(GET % b"/").status == 503
        assert first.read_response().status == 504
        slow.go.set()
        assert [client.request(GET % b"/").status for client in (first, second, first)] == [200] * 3
    totals = one.status()["totals"]
    assert (totals["upstream_queue_timeouts"], totals["upstream_queued"]) == (1, 0)


def test_a_failed_connect_gives_its_place_up(appliance: StartAppliance, upstream: Callable[..., RawUpstream]) -> None:
    dead = upstream()
    url = dead.url
    dead.close()
    one = appliance({"sites": [{"hosts": ["*"], "upstreams": [url], "max_upstream_requests": 1}]})
    with one.connect() as client:
        assert [client.request(GET % b"/").status for _ in range(3)] == [502] * 3
