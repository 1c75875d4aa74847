"""When a worker writes into its black box, and what."""

from __future__ import annotations

import ipaddress
import os
import resource
import stat
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from time import monotonic, time
from typing import Any, Final

from proxy.config.schema import Settings
from proxy.limit.networks import prefix_of
from proxy.observe.blackbox import RecordFile
from proxy.observe.counters import (
    BLACK_BOXES,
    CONNECTIONS_OPEN,
    LISTENERS_OPEN,
    LOGS_OPEN,
    NAMES,
    REDIRECT_OPEN,
    UPSTREAM_OPEN,
)
from proxy.session.client import ClientSession

INTERVAL_SECS: Final = 60.0
"""Between two records of a worker: the first error of an incident is told, not each."""
OLDEST: Final = 50
TOP_CLIENTS: Final = 20
RELOADS: Final = 8
_SCANNED: Final = 65_536
_ERRORS: Final = frozenset(("emfile", "enfile", "enobufs", "enomem", "eaddrnotavail", "MemoryError"))
"""The last word of a signature that says that something has run out."""
_CLASSES: Final = {
    "client connections": CONNECTIONS_OPEN,
    "upstream connections": UPSTREAM_OPEN,
    "redirect connections": REDIRECT_OPEN,
    "listening sockets": LISTENERS_OPEN,
    "logs": LOGS_OPEN,
}
_KINDS: Final = {
    stat.S_IFSOCK: "sockets",
    stat.S_IFREG: "files",
    stat.S_IFIFO: "pipes",
    stat.S_IFCHR: "devices",
    stat.S_IFDIR: "folders",
    0: "of the event loop",
}


class BlackBox:
    """One worker's. ``sessions`` gives its connections, ``settings`` the configuration in force."""

    def __init__(
        self,
        slot: int,
        descriptor: int,
        cells: memoryview,
        *,
        sessions: Callable[[], Iterable[ClientSession]],
        settings: Callable[[], Settings],
    ) -> None:
        self._slot = slot
        self._file = RecordFile(descriptor)
        self._cells = cells
        self._sessions = sessions
        self._settings = settings
        self._reloads: deque[float] = deque(maxlen=RELOADS)
        self._next_at = 0.0

    def reloaded(self) -> None:
        """Another configuration is in force."""
        self._reloads.append(time())

    def on_report(self, signature: str, fields: Mapping[str, Any]) -> None:
        """Something was reported: write a record if it says that something has run out. Never raises."""
        word = signature.partition(":")[0].split(".")
        if _ERRORS.isdisjoint(word) or monotonic() < self._next_at:
            return
        self._next_at = monotonic() + INTERVAL_SECS
        try:
            self._file.write(self._document(signature, fields))
        except Exception:  # noqa: BLE001 - it is called where something has run out; nothing may come of it
            return
        self._cells[BLACK_BOXES] += 1

    def _document(self, signature: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        now, settings, cells = monotonic(), self._settings(), self._cells
        sessions = sorted(self._sessions(), key=lambda session: session.opened_at)
        prefixes = (settings.client_prefix_ipv4, settings.client_prefix_ipv6)
        clients = Counter(prefix_of(session.peer, *prefixes) for session in sessions)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        return {
            "worker": self._slot,
            "pid": os.getpid(),
            "cause": signature,
            "error": str(fields.get("error", ""))[:200],
            "limit": {"soft": soft, "hard": hard},
            "descriptors": {name: cells[cell] for name, cell in _CLASSES.items()},
            "kinds": _kinds(hard),
            "reloads": list(self._reloads),
            "counters": {name: cells[index] for index, name in enumerate(NAMES) if cells[index]},
            "clients": [[_shown(client, prefixes), count] for client, count in clients.most_common(TOP_CLIENTS)],
            "oldest": [_told(session, now) for session in sessions[:OLDEST]],
        }


def _told(session: ClientSession, now: float) -> dict[str, Any]:
    stream = session.stream
    return {
        "client": session.peer.decode("ascii", "replace"),
        "age_secs": round(now - session.opened_at, 1),
        "state": session.standing()[0].name.lower(),
        "bytes_read": stream.bytes_read,
        "bytes_written": stream.bytes_written,
        "buffered": stream.buffered,
    }


def _kinds(hard: int) -> dict[str, int]:
    """Open descriptors by kind, without opening /proc, for which there may be none left; those below _SCANNED."""
    found: Counter[str] = Counter()
    for number in range(min(hard if hard > 0 else _SCANNED, _SCANNED)):
        try:
            mode = os.fstat(number).st_mode
        except OSError:
            continue
        found[_KINDS.get(stat.S_IFMT(mode), "others")] += 1
    return dict(found)


def _shown(client: bytes, prefixes: tuple[int, int]) -> str:
    if len(client) not in (4, 16):
        return client.decode("ascii", "replace")
    return f"{ipaddress.ip_address(client)}/{prefixes[len(client) == 16]}"
