"""One HTTPS exchange for each site, from the host itself, as JSON on standard output. Standard library only.

Its one argument is JSON: `listeners` (addresses and ports), `sites` (the hosts of each), `path` and `timeout_secs`. The
certificate is not verified: whom clients trust is not what a smoke test of the host can tell.
"""

from __future__ import annotations

import json
import socket
import ssl
import sys
from typing import Any

LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - to connect to, not to bind
ANY_NAME = "smoke-test"


def host_to_ask(hosts: list[str]) -> str:
    """A name that the site takes: a host of it, or one that a wildcard of it matches."""
    return min(hosts, key=lambda host: host.startswith("*")).replace("*", ANY_NAME, 1)


def status_of(address: str, host: str, path: str, timeout_secs: float) -> int:
    """The status of one exchange. Raises OSError, or ValueError for an answer that is not HTTP."""
    name, _, port = address.rpartition(":")
    name = name.strip("[]")
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with (
        socket.create_connection((LOOPBACK.get(name, name), int(port)), timeout_secs) as raw,
        context.wrap_socket(raw, server_hostname=host) as tls,
    ):
        tls.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        line = tls.makefile("rb").readline(4096).decode("latin-1")
    words = line.split(" ")
    if not line.startswith("HTTP/1.") or len(words) < 2 or not words[1].isdigit():
        raise ValueError(f"found {line!r}; wanted a status line of HTTP/1.1")
    return int(words[1])


def exchange(asked: dict[str, Any], address: str, host: str) -> dict[str, Any]:
    try:
        status = status_of(address, host, asked["path"], asked["timeout_secs"])
    except (OSError, ValueError) as error:
        return {"host": host, "address": address, "status": None, "error": str(error)}
    return {"host": host, "address": address, "status": status, "error": ""}


def main() -> None:
    asked = json.loads(sys.argv[1])
    print(json.dumps([exchange(asked, asked["listeners"][0], host_to_ask(hosts)) for hosts in asked["sites"]]))


if __name__ == "__main__":
    main()
