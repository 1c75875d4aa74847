"""Who descends from whom, by /proc: a worker that was taken over must not be able to ask for a reload."""

from __future__ import annotations

_MAX_GENERATIONS = 128


def descends_from(pid: int, ancestor: int) -> bool:
    """Whether ``ancestor`` is the process ``pid``, its parent, or a parent further up.

    What cannot be looked up (it has ended, or no descriptor is left) counts as one that does: nobody is let in unseen.
    """
    for _ in range(_MAX_GENERATIONS):
        if pid == ancestor:
            return True
        if pid <= 1:
            return False
        try:
            with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
                pid = int(file.read().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return True
    return True
