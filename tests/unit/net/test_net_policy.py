"""Who gives way: the order, the grace, and what finding it costs."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from proxy.budget import shares
from proxy.net.clients import ClientCounts, Prefixes, client_rows
from proxy.net.policy import BATCH_PART, LOOK_SECS, Evictions, admits
from proxy.observe.counters import CLIENTS_UNCOUNTED, private_cells
from proxy.observe.shared_tables import SharedTables
from proxy.session.standing import Standing
from tests.simulation.clients import Score, Staller, Visitor
from tests.simulation.play import LOADS, POLICIES, Load, play
from tests.simulation.world import Appliance, Clock, Setup

GRACE_SECS = 1.0


class Someone:
    """A member whose standing is as the test says; ``asked`` counts over all of them."""

    asked = 0

    def __init__(self, standing: Standing, since: float) -> None:
        self.state = standing, since

    def standing(self) -> tuple[Standing, float]:
        Someone.asked += 1
        return self.state


def order(members: list[Someone], now: float) -> list[Someone]:
    """All that give way now, one after another."""
    inside = set(members)
    evictions: Evictions[Someone] = Evictions(inside, GRACE_SECS)
    for one in sorted(members, key=lambda one: one.state[1]):
        if one.state[0] is Standing.HANDSHAKE:
            evictions.handshake_began(one, one.state[1])
    found = []
    while (candidate := evictions.candidate(now)) is not None:
        assert candidate == evictions.candidate(now), "asking changes nothing"
        member, standing = candidate
        assert standing is member.state[0]
        found.append(member)
        inside.discard(member)
        evictions.gone(member)
    return found


def test_the_order_and_the_grace() -> None:
    now = 100.0
    handshakes = [Someone(Standing.HANDSHAKE, 98.0), Someone(Standing.HANDSHAKE, 98.5)]
    heads = [Someone(Standing.HEAD, 90.0), Someone(Standing.HEAD, 99.0)]
    idle = [Someone(Standing.IDLE, 50.0), Someone(Standing.IDLE, 99.999)]
    stay = [
        Someone(Standing.HANDSHAKE, 99.1),
        Someone(Standing.HEAD, 99.1),
        Someone(Standing.BUSY, 0.0),
    ]
    assert order([*stay, *idle[::-1], *heads[::-1], *handshakes[::-1]], now) == [*handshakes, *heads, *idle]


def test_who_has_owed_since_before_gives_way_at_once() -> None:
    inside: set[Someone] = set()
    evictions: Evictions[Someone] = Evictions(inside, GRACE_SECS)
    first, silent = Someone(Standing.HANDSHAKE, 9.5), Someone(Standing.HANDSHAKE, 10.0)
    evictions.handshake_began(first, 9.5)
    evictions.handshake_began(silent, 10.0, owing_secs=3.0)
    assert evictions.candidate(10.0) == (silent, Standing.HANDSHAKE)
    evictions.handshake_ended(silent)
    assert evictions.candidate(10.0) is None
    assert evictions.wait_secs(10.0) <= 0.5
    assert evictions.candidate(10.5) == (first, Standing.HANDSHAKE)


def test_one_that_has_changed_since_the_look_is_passed_over() -> None:
    members = [Someone(Standing.IDLE, float(at)) for at in range(3)]
    evictions: Evictions[Someone] = Evictions(set(members), GRACE_SECS)
    assert evictions.candidate(10.0) == (members[0], Standing.IDLE)
    members[0].state = Standing.BUSY, 0.0
    members[1].state = Standing.IDLE, 9.0
    assert evictions.candidate(10.0) == (members[2], Standing.IDLE)


def test_a_steady_attack_costs_a_bounded_number_of_looks() -> None:
    size, evicted = 4000, 4000
    inside = {Someone(Standing.IDLE, float(at)) for at in range(size)}
    evictions: Evictions[Someone] = Evictions(inside, GRACE_SECS)
    Someone.asked = 0
    for number in range(evicted):
        candidate = evictions.candidate(5000.0 + number * 1e-3)
        assert candidate is not None
        inside.discard(candidate[0])
        evictions.gone(candidate[0])
        inside.add(Someone(Standing.IDLE, 5000.0 + number * 1e-3))
    looks_by_time = evicted * 1e-3 / LOOK_SECS + 1
    assert Someone.asked <= evicted * (BATCH_PART + 2) + looks_by_time * size, "a look is shared by many"


def test_a_batch_does_not_hide_who_has_come_to_owe_since() -> None:
    idle, head = Someone(Standing.IDLE, 0.0), Someone(Standing.HEAD, 99.5)
    evictions: Evictions[Someone] = Evictions({idle, head}, GRACE_SECS)
    assert evictions.candidate(100.0) == (idle, Standing.IDLE)
    assert evictions.candidate(101.0) == (head, Standing.HEAD)


def test_nobody_to_evict_costs_a_bounded_number_of_looks() -> None:
    evictions: Evictions[Someone] = Evictions({Someone(Standing.BUSY, 0.0) for _ in range(1000)}, GRACE_SECS)
    Someone.asked = 0
    now = 0.0
    while now < 10.0:
        assert evictions.candidate(now) is None
        now += 0.001
    assert Someone.asked <= 1000 * 101, "ten times a second, however often it is asked"


# -- clients


def test_what_counts_as_one_client() -> None:
    prefixes = Prefixes(24, 48, ["127.0.0.0/8", "::1", "2001:db8:ffff::/48"])
    assert prefixes.client_of(("192.0.2.77", 1)) == prefixes.client_of(("192.0.2.1", 2)) == bytes((192, 0, 2, 0))
    assert prefixes.client_of(("192.0.3.77", 1)) != prefixes.client_of(("192.0.2.77", 1))
    one = prefixes.client_of(("2001:db8:1:2::3", 1, 0, 0))
    assert one == prefixes.client_of(("2001:db8:1:ffff::", 1, 0, 0))
    assert one != prefixes.client_of(("2001:db8:2::", 1, 0, 0))
    for exempt in (("127.9.9.9", 1), ("::1", 1, 0, 0), ("2001:db8:ffff:1::2", 1, 0, 0), "", ()):
        assert prefixes.client_of(exempt) is None
    assert prefixes.client_of(("fe80::1%eth0", 1, 0, 2)) is not None


@given(st.integers(1, 6), st.integers(1, 4), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.booleans())))
def test_no_client_is_ever_over_its_cap(cap: int, workers: int, steps: list[tuple[int, int, bool]]) -> None:
    tables = SharedTables(workers, 64)
    counts = [ClientCounts(tables, slot, private_cells()) for slot in range(workers)]
    inside: list[tuple[int, int]] = []
    for slot, client_number, comes in steps:
        worker, client = slot % workers, client_number + 1
        if comes:
            there = sum(one == client for _, one in inside)
            assert admits(counts[worker], client, cap) == (there < cap), "exact where nobody comes at the same moment"
            if there < cap:
                inside.append((worker, client))
        elif (worker, client) in inside:
            inside.remove((worker, client))
            counts[worker].remove(client)
    for worker, client in inside:
        counts[worker].remove(client)
    assert all(not any(table.tolist()) for table in tables._tables), "nothing is left"


def test_clients_without_a_row_are_counted_by_their_worker() -> None:
    tables, cells = SharedTables(1, 8), private_cells()
    counts = ClientCounts(tables, 0, cells)
    clients = list(range(1, 21))
    assert [counts.add(client) for client in clients] == [1] * 20
    assert cells[CLIENTS_UNCOUNTED] == 12
    assert [counts.add(client) for client in clients] == [2] * 20
    for client in clients * 2:
        counts.remove(client)
    assert [counts.add(client) for client in clients] == [1] * 20


def test_the_table_has_room_for_a_workers_share() -> None:
    assert client_rows(1024, 1) == 65_536
    assert client_rows(1_000_000, 4) == 1_000_000


# -- properties over random arrivals, with simulated time

ROUND_TRIP_SECS = 0.1
EXCHANGE_SECS = 0.05
WAIT_SECS = 2 * GRACE_SECS + 5 * ROUND_TRIP_SECS + EXCHANGE_SECS
"""What docs/operations.md states, with the client's own round trips."""


@settings(max_examples=10)
@given(
    permits=st.integers(8, 40),
    workers=st.integers(1, 4),
    silent=st.integers(0, 60),
    slow=st.floats(0, 0.5),
    visitors=st.integers(1, 8),
    half=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_nobody_who_sends_what_it_owes_is_starved(permits, workers, silent, slow, visitors, half, seed) -> None:  # type: ignore[no-untyped-def]
    """Whatever number is silent, and while new connections a second that send something stay below permits / grace."""
    rng, clock = random.Random(seed), Clock()
    setup = Setup(permits, workers=workers, handshakes=max(workers, permits // 2) if half else None)
    appliance = Appliance(clock, setup, seed)
    shares_of = [front.admission.limit for front in appliance.fronts]
    assert sum(shares_of) == permits
    assert max(shares_of) - min(shares_of) <= 1
    score = Score()
    for number in range(silent):
        clock.call_at(rng.uniform(0, 3), Staller(appliance, f"192.0.2.{number}", until=30.0).come)
    # Those that send a hello and nothing more have their full grace each time, so they count as new connections: by
    # the least share, since the kernel's choice of a worker is chance.
    least = min(shares_of) // (2 if half else 1)
    for number in range(int(least * slow)):
        clock.call_at(rng.uniform(0, 3), Staller(appliance, f"203.0.113.{number}", until=30.0, hello=True).come)
    for number in range(visitors):
        visitor = Visitor(
            appliance,
            f"198.51.100.{number}",
            10,
            rng=rng,
            score=lambda _: score,
            think_secs=1.0,
            exchange_secs=EXCHANGE_SECS,
            round_trip_secs=ROUND_TRIP_SECS,
        )
        clock.call_at(rng.uniform(0, 5), visitor.want)
    while clock.now < 90.0:
        clock.run(clock.now + 0.25)
        assert all(held <= limit for held, limit in zip(appliance.held, shares_of, strict=True))
    assert score.cut == 0
    assert score.served == score.wanted == 10 * visitors
    assert score.longest_wait_secs <= WAIT_SECS


@settings(max_examples=10)
@given(
    permits=st.integers(2, 20),
    workers=st.integers(1, 2),
    cap=st.integers(1, 6),
    handshakes=st.integers(2, 20),
    busy=st.integers(0, 40),
    seed=st.integers(0, 1 << 30),
)
def test_bounds_hold_and_no_exchange_is_cut_whatever_comes(permits, workers, cap, handshakes, busy, seed) -> None:  # type: ignore[no-untyped-def]
    rng, clock = random.Random(seed), Clock()
    setup = Setup(permits, workers=workers, handshakes=min(permits, handshakes), cap=cap)
    appliance = Appliance(clock, setup, seed)
    score = Score()
    addresses = [f"192.0.2.{number}" for number in range(5)]
    for number in range(30):
        Staller(appliance, addresses[number % 5], until=8.0, hello=number % 2 == 0).come()
    for number in range(busy):
        visitor = Visitor(
            appliance,
            addresses[number % 5],
            3,
            rng=rng,
            score=lambda _: score,
            think_secs=0.1,
            exchange_secs=3.0,
            round_trip_secs=0.01,
        )
        clock.call_at(rng.uniform(0, 5), visitor.want)
    while clock.now < 20.0:
        clock.run(clock.now + 0.1)
        assert sum(appliance.held) <= permits
        for front in appliance.fronts:
            assert front.admission.handshakes is not None
            assert front.admission.handshakes.held <= front.admission.handshakes.limit
        for address in addresses:
            client = Prefixes(32, 64, ()).client_of((address, 0))
            assert client is not None
            assert appliance.tables.view(0).total(appliance.tables.key_of(client)) <= cap
    assert score.cut == 0


@given(st.integers(1, 10_000), st.integers(1, 64))
def test_shares_are_within_one_of_each_other(total: int, slots: int) -> None:
    parts = shares(total, slots)
    assert sum(parts) == total
    assert max(parts) - min(parts) <= 1


@pytest.mark.timeout(300)
def test_the_incidents_storm_at_a_hundred_times_the_rate() -> None:
    """A part of what ``python -m tests.simulation`` plays: with eviction nearly all are served, else many are not."""
    load = Load("", times=100, stallers=1600, staller_addresses=1600)
    assert load.times in {one.times for one in LOADS}
    evicts, waits = (play(load, POLICIES[name], part=40) for name in ("evicts", "timeouts alone"))
    for result in (evicts, waits):
        assert result.all.cut == 0
        assert result.most_held <= 800
    assert evicts.all.percent > 99
    assert evicts.storm.wanted > 50
    assert evicts.storm.percent > 99
    assert waits.storm.percent < 90
