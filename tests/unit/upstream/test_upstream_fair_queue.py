"""The queue for upstream connections: turns by client, order within a client."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.upstream.queue import FairQueue


def drained(queue: FairQueue[tuple[bytes, int]]) -> list[tuple[bytes, int]]:
    order = []
    while queue:
        item = queue.first()
        queue.remove(item[0], item)
        order.append(item)
    return order


def test_one_client_is_served_in_order() -> None:
    queue: FairQueue[tuple[bytes, int]] = FairQueue()
    for number in range(5):
        queue.append(b"a", (b"a", number))
    assert drained(queue) == [(b"a", number) for number in range(5)]


def test_a_greedy_client_does_not_starve_another() -> None:
    queue: FairQueue[tuple[bytes, int]] = FairQueue()
    for number in range(100):
        queue.append(b"greedy", (b"greedy", number))
    queue.append(b"modest", (b"modest", 0))
    assert drained(queue).index((b"modest", 0)) == 1


def test_nobody_waits() -> None:
    queue: FairQueue[tuple[bytes, int]] = FairQueue()
    with pytest.raises(IndexError):
        queue.first()
    with pytest.raises(KeyError):
        queue.remove(b"a", (b"a", 0))
    assert len(queue) == 0


@given(st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.booleans(), st.integers(0, 20)), max_size=60))
def test_turns_by_a_plain_model(steps: list[tuple[bytes, bool, int]]) -> None:
    """Whatever comes and goes: nothing is lost, and between two of one client each other waiting one has a turn."""
    queue: FairQueue[tuple[bytes, int]] = FairQueue()
    waiting: list[tuple[bytes, int]] = []
    for at, (client, leaves, pick) in enumerate(steps):
        if leaves and waiting:
            item = waiting.pop(pick % len(waiting))
            queue.remove(item[0], item)
        else:
            waiting.append((client, at))
            queue.append(client, (client, at))
        assert len(queue) == len(waiting)
    order = drained(queue)
    assert sorted(order) == sorted(waiting)
    for client in (b"a", b"b", b"c"):
        assert [item for item in order if item[0] == client] == [item for item in waiting if item[0] == client]
    counts = {client: sum(item[0] == client for item in order) for client in (b"a", b"b", b"c")}
    rounds = min((count for count in counts.values() if count), default=0)
    clients = sum(count > 0 for count in counts.values())
    for start in range(0, rounds * clients, clients or 1):
        assert len({item[0] for item in order[start : start + clients]}) == clients
