"""The wheel of deadlines on a real loop."""

from __future__ import annotations

import time
from math import inf

import pytest

from proxy.stream.deadlines import GRANULARITY_SECS
from tests.unit.stream.rig import Rig

SLACK_SECS = 0.005
"""The loop's clock and ours are rounded apart."""


class Item:
    """A deadline that writes down when it came."""

    def __init__(self, rig: Rig, name: str = "", fired: list[str] | None = None) -> None:
        self.due = inf
        self.when = inf
        self.looks = 0
        self.fired_at: list[float] = []
        self._rig = rig
        self._name = name
        self._fired = [] if fired is None else fired

    def set(self, when: float) -> None:
        self.when = when
        if when < self.due:
            self._rig.deadlines.watch(self, when)

    def next_deadline(self) -> float:
        self.looks += 1
        return self.when

    def on_deadline(self, now: float) -> None:
        assert self.when <= now
        self.when = inf
        self.fired_at.append(time.monotonic())
        self._fired.append(self._name)


class FailingItem(Item):
    def on_deadline(self, now: float) -> None:
        super().on_deadline(now)
        raise RuntimeError("a fault in on_deadline")


def test_deadlines_come_in_their_order_and_never_early(rig: Rig) -> None:
    fired: list[str] = []
    start = time.monotonic()
    offsets = {"third": 0.35, "first": 0.05, "second": 0.2}
    items = {name: Item(rig, name, fired) for name in offsets}
    for name, item in items.items():
        item.set(start + offsets[name])
    rig.run_until(lambda: len(fired) == 3, "all three")
    assert fired == ["first", "second", "third"]
    for name, item in items.items():
        assert item.fired_at[0] >= start + offsets[name] - SLACK_SECS
        assert item.due == inf


def test_a_deadline_in_the_past_comes_at_once(rig: Rig) -> None:
    item = Item(rig)
    item.set(time.monotonic() - 5)
    rig.run_until(lambda: item.fired_at, "it comes")


def test_moved_earlier_it_comes_earlier_and_once(rig: Rig) -> None:
    item = Item(rig)
    start = time.monotonic()
    item.set(start + 60)
    item.set(start + 0.1)
    rig.run_until(lambda: item.fired_at, "it comes")
    rig.turn(3 * GRANULARITY_SECS)
    assert len(item.fired_at) == 1


def test_moved_later_it_comes_later_and_costs_no_look_each_time(rig: Rig) -> None:
    item = Item(rig)
    start = time.monotonic()
    item.set(start + 0.1)
    for step in range(1000):
        item.set(start + 0.1 + step / 2000)
    rig.run_until(lambda: item.fired_at, "it comes")
    assert item.fired_at[0] >= start + 0.1 + 999 / 2000 - SLACK_SECS
    assert item.looks <= 3


def test_taken_back_it_never_comes(rig: Rig) -> None:
    item, other = Item(rig), Item(rig)
    item.set(time.monotonic() + 0.05)
    item.when = inf
    other.set(time.monotonic() + 0.15)
    rig.run_until(lambda: other.fired_at, "the other comes")
    assert item.fired_at == []
    item.set(time.monotonic() + 0.05)
    rig.run_until(lambda: item.fired_at, "it can be set again")


def test_forgotten_it_is_not_even_looked_at(rig: Rig) -> None:
    item, other = Item(rig), Item(rig)
    item.set(time.monotonic() + 0.05)
    rig.deadlines.forget(item)
    rig.deadlines.forget(item)
    other.set(time.monotonic() + 0.05)
    rig.run_until(lambda: other.fired_at, "the other comes")
    assert (item.looks, item.fired_at, item.due) == (0, [], inf)


@pytest.mark.parametrize("apart_secs", [0.0, 0.3])
def test_an_exception_in_one_does_not_end_the_others(rig: Rig, apart_secs: float) -> None:
    fired: list[str] = []
    start = time.monotonic()
    for number in range(20):
        kind = FailingItem if number % 4 == 0 else Item
        kind(rig, str(number), fired).set(start + 0.05 + apart_secs * (number % 2))
    rig.run_until(lambda: len(fired) == 20, "all of them")
    assert sorted(map(int, fired)) == [*range(20)]
    assert [str(context["exception"]) for context in rig.faults] == ["a fault in on_deadline"] * 5
    rig.faults.clear()
    later = Item(rig)
    later.set(time.monotonic() + 0.05)
    rig.run_until(lambda: later.fired_at, "the wheel goes on")


def test_inside_on_deadline_items_may_be_set_and_forgotten(rig: Rig) -> None:
    victim, again = Item(rig), Item(rig)

    class Meddler(Item):
        def on_deadline(self, now: float) -> None:
            super().on_deadline(now)
            rig.deadlines.forget(victim)
            again.set(now)
            if len(self.fired_at) < 3:
                self.set(now - 1)

    meddler = Meddler(rig)
    start = time.monotonic()
    meddler.set(start + 0.05)
    victim.set(start + 0.45)
    rig.run_until(lambda: len(meddler.fired_at) == 3, "three times")
    rig.turn(0.5)
    assert victim.fired_at == []
    assert 1 <= len(again.fired_at) <= 3


def test_many_items_each_come_once(rig: Rig) -> None:
    fired: list[str] = []
    start = time.monotonic()
    items = [Item(rig, str(number), fired) for number in range(5000)]
    for number, item in enumerate(items):
        item.set(start + (number * 7919 % 400) / 1000)
    for item in items[::3]:
        rig.deadlines.forget(item)
    expected = 5000 - len(items[::3])
    rig.run_until(lambda: len(fired) == expected, "all that were not forgotten")
    rig.turn(2 * GRANULARITY_SECS)
    assert len(fired) == len(set(fired)) == expected
