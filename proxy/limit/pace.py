"""The least rate at which a peer must send what it owes, or take what it is owed: a credit of time that bytes earn.

Pure: the time is handed in. A peer begins with ``grace_secs`` of credit, waiting for it spends the credit, each byte
earns ``1 / bytes_per_sec`` seconds, up to ``longest_secs``. So a peer that keeps the rate is never cut, whatever its
pauses below the idle timeout, and one that stays below it is cut once its credit is gone, however it spaces its bytes.
Time in which nobody waits for it (it is held back, or nothing is owed) costs nothing.
"""

from __future__ import annotations


class Pace:
    """One direction of one message: a request's head, its body, or a response."""

    __slots__ = ("_bytes_per_sec", "_credit_secs", "_longest_secs", "_waits_since")

    def __init__(self, bytes_per_sec: float, *, grace_secs: float, longest_secs: float) -> None:
        """``longest_secs``: no burst earns more credit than this; the idle timeout, or the grace if that is longer."""
        self._bytes_per_sec = bytes_per_sec
        self._credit_secs = grace_secs
        self._longest_secs = max(grace_secs, longest_secs)
        self._waits_since: float | None = None

    def wait(self, now: float) -> float:
        """The peer has to move from now on, unless it had to already. Returns when it is too slow (monotonic secs)."""
        if self._waits_since is None:
            self._waits_since = now
        return self._waits_since + self._credit_secs

    def moved(self, size: int, now: float) -> None:
        """``size`` bytes came or went. It ends the wait: call ``wait`` when the next one begins."""
        self.rest(now)
        self._credit_secs = min(self._longest_secs, self._credit_secs + size / self._bytes_per_sec)

    def rest(self, now: float) -> None:
        """Nobody waits for the peer any more (idempotent)."""
        if self._waits_since is not None:
            self._credit_secs -= now - self._waits_since
            self._waits_since = None
