"""The incident's day, as it was and at a multiple of its rate, with and without a storm of stalled handshakes."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from tests.simulation.clients import Score, Staller, Visitor
from tests.simulation.world import Appliance, Clock, Setup

DAY_SECS = 86_400.0
CRAWLER_ADDRESSES = 63
CRAWLER_REQUESTS = 77_000
POLLER_REQUESTS = 30_000
OTHER_REQUESTS = 97_000
"""204,000 in all."""
REQUESTS_A_VISIT = 4
PERMITS = 800
STORM_SECS = 60.0
SETTLE_SECS = 90.0


@dataclass(frozen=True)
class Load:
    """``times`` the incident's rate; the day is as much shorter, so that its requests are the same."""

    name: str
    times: float = 1.0
    stallers: int = 0
    staller_addresses: int = 1


@dataclass(frozen=True)
class Result:
    """What became of it. ``storm``: requests wanted while handshakes stalled."""

    all: Score
    storm: Score
    evicted: int
    most_held: int
    cpu_secs: float


LOADS = (
    Load("the day"),
    Load("a hundred times its rate", times=100),
    Load("the day, 1600 stalled handshakes", stallers=1600, staller_addresses=1600),
    Load("a hundred times, 1600 stalled", times=100, stallers=1600, staller_addresses=1600),
    Load("a hundred times, 1600 stalled from 2 addresses", times=100, stallers=1600, staller_addresses=2),
)
POLICIES = {
    "timeouts alone": Setup(PERMITS, evicts=False),
    "evicts": Setup(PERMITS, handshakes=PERMITS // 2),
    "evicts, caps clients": Setup(PERMITS, handshakes=PERMITS // 2, cap=PERMITS // 4),
    "the same, 4 workers": Setup(PERMITS, workers=4, handshakes=PERMITS // 2, cap=PERMITS // 4),
}


def play(load: Load, setup: Setup, *, part: int = 1, seed: int = 1) -> Result:
    """Play one day, or one ``part``-th of it at the same rate. The same seed gives the same day."""
    began = time.process_time()
    rng = random.Random(seed)
    clock = Clock()
    appliance = Appliance(clock, setup, seed)
    day_secs = DAY_SECS / load.times / part
    storm_from = day_secs / 2
    storm_to = storm_from + (min(STORM_SECS, day_secs / 3) if load.stallers else 0.0)
    scores = Score(), Score()

    def score(wanted_at: float) -> Score:
        return scores[1] if storm_from <= wanted_at < storm_to else scores[0]

    def visitor(address: str, requests: int, think_secs: float, exchange_secs: float) -> Visitor:
        return Visitor(
            appliance,
            address,
            requests,
            rng=rng,
            score=score,
            think_secs=think_secs,
            exchange_secs=exchange_secs,
            round_trip_secs=rng.uniform(0.005, 0.2),
        )

    # Commit, blame and raw pages are dear; each address of the fleet asks evenly over the day.
    for number in range(CRAWLER_ADDRESSES):
        requests = CRAWLER_REQUESTS // CRAWLER_ADDRESSES // part
        crawler = visitor(f"198.51.100.{number}", requests, day_secs / requests * 0.95, 0.3)
        clock.call_at(rng.uniform(0, day_secs / requests), crawler.want)
    polls = POLLER_REQUESTS // part
    poller = visitor("203.0.113.1", polls, day_secs / polls * 0.9, 0.05 / load.times)
    clock.call_at(0.0, poller.want)
    for number in range(OTHER_REQUESTS // REQUESTS_A_VISIT // part):
        address = f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"
        clock.call_at(rng.uniform(0, day_secs * 0.99), visitor(address, REQUESTS_A_VISIT, 3.0, 0.1).want)
    for number in range(load.stallers):
        which = number % load.staller_addresses
        staller = Staller(appliance, f"192.0.{2 + (which >> 8)}.{which & 255}", until=storm_to)
        clock.call_at(storm_from + rng.uniform(0, 0.5), staller.come)

    most_held = [0]

    def look() -> None:
        most_held[0] = max(most_held[0], sum(appliance.held))
        clock.call_later(day_secs / 2000, look)

    look()
    clock.run(day_secs + SETTLE_SECS)
    everything = Score(
        wanted=scores[0].wanted + scores[1].wanted,
        served=scores[0].served + scores[1].served,
        longest_wait_secs=max(one.longest_wait_secs for one in scores),
        waits_secs=scores[0].waits_secs + scores[1].waits_secs,
        cut=scores[0].cut + scores[1].cut,
    )
    return Result(everything, scores[1], appliance.evicted, most_held[0], time.process_time() - began)
