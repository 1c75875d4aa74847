"""What a host is like, beside what it should be like: reads only. Standard library only.

Its one argument is JSON, a list of expectations: `what` (for people), `kind` (a key of LOOKS), `wanted`, and what that
kind needs. Standard output is a JSON list of rows: `what`, `wanted`, `found`, `good`.
"""

from __future__ import annotations

import grp
import hashlib
import json
import os
import pwd
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

TIMEOUT_SECS = 30
NOTHING = "nothing"


def output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECS, check=False)
    return done.stdout.strip()


def file(path: str, content: bool = True) -> str:
    """Mode, owner, group, and the beginning of the content's hash."""
    about = os.stat(path)
    said = f"{about.st_mode & 0o7777:04o} {pwd.getpwuid(about.st_uid).pw_name}:{grp.getgrgid(about.st_gid).gr_name}"
    if not content:
        return said
    with open(path, "rb") as opened:
        return f"{said} {hashlib.sha256(opened.read()).hexdigest()[:12]}"


def link(path: str) -> str:
    return os.path.basename(os.readlink(path))


def unit_property(unit: str, name: str) -> str:
    return output("systemctl", "show", "--value", f"--property={name}", unit)


def pids_of(unit: str) -> list[str]:
    group = unit_property(unit, "ControlGroup")
    for mount in ("", "unified", "systemd"):
        path = f"/sys/fs/cgroup/{mount}{group}/cgroup.procs"
        if group and os.path.exists(path):
            with open(path, encoding="ascii") as procs:
                return procs.read().split()
    return []


def limits(unit: str) -> str:
    """`soft:hard` of every process of the unit; all of them where they differ."""
    found = set()
    for pid in pids_of(unit):
        with open(f"/proc/{pid}/limits", encoding="ascii") as lines:
            words = re.search(r"^Max open files +(\S+) +(\S+)", lines.read(), re.MULTILINE)
        found.add(":".join(words.groups()) if words else "?")
    return ", ".join(sorted(found)) or NOTHING


def running_release(unit: str) -> str:
    """From whose folder the master's libraries are."""
    with open(f"/proc/{unit_property(unit, 'MainPID')}/maps", encoding="utf-8") as maps:
        return ", ".join(sorted(set(re.findall(r"/releases/([^/\n]+)/", maps.read())))) or NOTHING


def at_least(path: str, wanted: str) -> str:
    """The number in the file; the wanted one where it is enough."""
    with open(path, encoding="ascii") as opened:
        number = opened.read().strip()
    return wanted if int(number) >= int(wanted) else number


def get(url: str) -> str:
    """The status, and the beginning of the content where it is not 200."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECS) as answer:  # noqa: S310 - of this host's own
            return str(answer.status)
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.read(200).decode('utf-8', 'replace').strip()}"


def command(argv: list[str]) -> str:
    """`good`, or what the command complains of."""
    done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_SECS, check=False)
    return "good" if done.returncode == 0 else (done.stderr.strip() or f"exit code {done.returncode}")


def in_force(argv: list[str]) -> str:
    """Whether a reload would change nothing; otherwise what it would."""
    done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_SECS, check=False)
    try:
        changes = json.loads(done.stdout)["changes"]
    except (ValueError, KeyError):
        return done.stderr.strip() or f"exit code {done.returncode}"
    return ", ".join(key for key, value in (changes or {}).items() if value) or "in force"


LOOKS: dict[str, Callable[..., str]] = {
    "file": file,
    "link": link,
    "property": unit_property,
    "limits": limits,
    "running_release": running_release,
    "at_least": at_least,
    "get": get,
    "command": command,
    "in_force": in_force,
}


def row(expected: dict[str, Any]) -> dict[str, Any]:
    arguments = {key: value for key, value in expected.items() if key not in {"what", "kind", "wanted"}}
    wanted = str(expected["wanted"])
    if expected["kind"] == "at_least":
        arguments["wanted"] = wanted
    try:
        found = LOOKS[expected["kind"]](**arguments)
    except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
        found = str(error)
    return {"what": expected["what"], "wanted": wanted, "found": found, "good": found == wanted}


def main() -> None:
    print(json.dumps([row(expected) for expected in json.loads(sys.argv[1])]))


if __name__ == "__main__":
    main()
