"""Who comes: visitors that send what they owe, and clients that stall."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from proxy.session.standing import Standing
from tests.simulation.world import Appliance, Event, Session

PATIENCE_SECS = 10.0
RETRY_SECS = 0.05


@dataclass
class Score:
    """What became of the requests of good clients. Waits are from the wish to the end of the answer."""

    wanted: int = 0
    served: int = 0
    longest_wait_secs: float = 0.0
    waits_secs: list[float] = field(default_factory=list)
    cut: int = 0
    """Exchanges that were cut: never."""

    @property
    def percent(self) -> float:
        return 100.0 * self.served / self.wanted if self.wanted else 100.0


class Visitor:
    """A good client: asks one request after another, over a connection that it keeps while it is kept."""

    def __init__(
        self,
        appliance: Appliance,
        address: str,
        requests: int,
        *,
        rng: random.Random,
        score: Callable[[float], Score],
        think_secs: float,
        exchange_secs: float,
        round_trip_secs: float,
    ) -> None:
        """``score`` gives whom a request wanted at a time counts for; ``think_secs``: mean pause between requests."""
        self._appliance = appliance
        self._address = address
        self._left = requests
        self._random = rng
        self._score_of = score
        self._think_secs = think_secs
        self._exchange_secs = exchange_secs
        self._round_trip_secs = round_trip_secs
        self._session: Session | None = None
        self._wanted_at = 0.0
        self._wants = False
        self._patience: Event | None = None
        self._score = score(0.0)

    def want(self) -> None:
        """The next request is wanted now."""
        clock = self._appliance.clock
        self._left -= 1
        self._wants = True
        self._wanted_at = clock.now
        self._score = self._score_of(clock.now)
        self._score.wanted += 1
        if self._session is not None:
            self._exchange(self._session)  # nobody cuts it, so nobody has to wait for longer than it takes
        else:
            self._patience = clock.call_later(PATIENCE_SECS, self._give_up)
            self._connect()

    def _connect(self) -> None:
        if self._wants and self._session is None:
            self._session = self._appliance.connect(
                self._address, hello=True, on_accepted=self._on_accepted, on_end=self._on_end
            )

    def _on_accepted(self, session: Session) -> None:
        self._later(session, self._round_trip_secs, lambda: self._shaken(session))

    def _shaken(self, session: Session) -> None:
        session.become(Standing.HEAD)
        self._later(session, self._round_trip_secs / 2, lambda: self._exchange(session))

    def _exchange(self, session: Session) -> None:
        session.become(Standing.BUSY)
        self._later(session, self._exchange_secs, lambda: self._answered(session))

    def _answered(self, session: Session) -> None:
        clock = self._appliance.clock
        if self._wants:
            self._wants = False
            if self._patience is not None:
                self._patience.cancel()
            score, wait_secs = self._score, clock.now - self._wanted_at
            score.served += 1
            score.longest_wait_secs = max(score.longest_wait_secs, wait_secs)
            score.waits_secs.append(wait_secs)
        session.become(Standing.IDLE)
        self._next()

    def _next(self) -> None:
        if self._left > 0:
            self._appliance.clock.call_later(self._random.expovariate(1 / self._think_secs), self.want)

    def _later(self, session: Session, secs: float, step: Callable[[], None]) -> None:
        def run() -> None:
            if not session.over:
                step()

        self._appliance.clock.call_later(secs, run)

    def _on_end(self, session: Session) -> None:
        if session.was_busy_when_evicted:
            self._score.cut += 1
        if self._session is session:
            self._session = None
            if self._wants:
                self._appliance.clock.call_later(RETRY_SECS, self._connect)

    def _give_up(self) -> None:
        if self._wants:
            self._wants = False
            session, self._session = self._session, None
            if session is not None:
                session.end()
            self._next()


class Staller:
    """Connects and says nothing; comes back as soon as it is thrown out, until ``until``."""

    def __init__(self, appliance: Appliance, address: str, *, until: float, hello: bool = False) -> None:
        self._appliance = appliance
        self._address = address
        self._until = until
        self._hello = hello

    def come(self) -> None:
        if self._appliance.clock.now < self._until:
            self._appliance.connect(
                self._address, hello=self._hello, on_accepted=lambda _: None, on_end=lambda _: self._again()
            )

    def _again(self) -> None:
        self._appliance.clock.call_later(0.01, self.come)
