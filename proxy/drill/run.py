"""A whole drill: one round with the caps per client, from many addresses; one without them, all from one address."""

from __future__ import annotations

import resource
from collections.abc import Callable

import uvloop

from proxy.config.schema import Settings
from proxy.drill.copy import affordable_permits, running_copy
from proxy.drill.play import Figures, play
from proxy.master.crew import RunWorker

MIN_DRILL_SECS = 10.0

ROUNDS = (
    ("caps per client", True, False),
    ("one address, no caps", False, True),
)
"""Name, whether the configuration's caps per client hold, whether everybody comes from one address."""


def drill(settings: Settings, run_worker: RunWorker, *, secs: float, say: Callable[[str], None]) -> list[Figures]:
    """Play both rounds, ``secs`` in all. ``say`` is told what happens.

    The soft descriptor limit of this process is raised to the hard one: it holds the attackers' connections.
    Raises ConfigError or StartError when the copy cannot be started.
    """
    permits = affordable_permits(settings)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    played = []
    for name, capped, one_address in ROUNDS:
        say(f"{name}: {2 * permits} stalled clients against {permits} permits, {secs / len(ROUNDS):g} s")
        with running_copy(settings, run_worker, capped=capped) as copy:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            played.append(uvloop.run(play(copy, name=name, secs=secs / len(ROUNDS), one_address=one_address)))
    return played
