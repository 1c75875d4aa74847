"""Who listens on a TCP port, and what a process is: for messages that name the other side."""

from __future__ import annotations

import os
import re

_MAX_SHOWN = 3
_TCP_LISTEN = "0A"  # the state column of /proc/net/tcp, include/net/tcp_states.h


def describe_owner(port: int) -> str:
    """The processes that listen on ``port`` as text, with pid and command; says so where they cannot be seen.

    Another user's descriptors are readable by root only; then the owner's uid is all that /proc tells.
    """
    inodes = _listening_inodes(port)
    if not inodes:
        return "a process that /proc does not show (another network namespace, or it has just ended)"
    owners = _owners(set(inodes))
    if owners:
        more = [f"and {len(owners) - _MAX_SHOWN} more"] if len(owners) > _MAX_SHOWN else []
        return ", ".join([*(f"pid {pid} ({command})" for pid, command in owners[:_MAX_SHOWN]), *more])
    uids = sorted(set(inodes.values()))
    return "a process of " + ", ".join(f"uid {uid}" for uid in uids) + " (run as root to see which)"


def _listening_inodes(port: int) -> dict[str, int]:
    """Socket inode to uid of each socket that listens on ``port``."""
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table, encoding="ascii") as lines:
                rows = [line.split() for line in lines][1:]
        except OSError:
            continue  # no IPv6, or /proc is not mounted
        for row in rows:
            local, state, uid, inode = row[1], row[3], row[7], row[9]
            if state == _TCP_LISTEN and int(local.rpartition(":")[2], 16) == port:
                found[inode] = int(uid)
    return found


def _owners(inodes: set[str]) -> list[tuple[int, str]]:
    targets = {f"socket:[{inode}]" for inode in inodes}
    holders = (name for name in os.listdir("/proc") if name.isdigit() and _holds(name, targets))
    return sorted((int(name), command_of(int(name))) for name in holders)


def _holds(pid: str, targets: set[str]) -> bool:
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except OSError:
        return False  # another user's, or it has just ended
    for name in names:
        try:
            if os.readlink(f"{folder}/{name}") in targets:
                return True
        except OSError:
            continue  # closed meanwhile
    return False


def command_of(pid: int) -> str:
    """The command line of a process as text without control characters; ``?`` when it is gone."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            raw = file.read(256)
    except OSError:
        return "?"
    text = raw.replace(b"\0", b" ").decode("ascii", "backslashreplace").strip()
    # Any process chooses its own command line: no terminal escape of it may reach the operator's screen.
    return re.sub(r"[\x00-\x1f\x7f]", "?", text) or "?"
