"""How far a run of the master has come: what its parts must know of each other."""

from __future__ import annotations

from dataclasses import dataclass

from proxy.master.upgrade import Upgrade

STOPPING = "it is about to stop"


@dataclass(slots=True)
class Stage:
    """Written by the supervisor (``serving``, ``stopping``) and by the operations (the rest)."""

    serving: bool = False
    """All workers have been ready once."""
    stopping: bool = False
    upgrade: Upgrade | None = None
    """The one that is under way."""
    successor: int | None = None
    """The pid of the master that has taken over."""
    last_reload: dict[str, object] | None = None
    """For the status document."""
