"""Connections that must survive: ``held_connections.py REPORT HOST SITE BYTES SECS HURRY``.

A download of BYTES over at most SECS seconds (see the upstream), and a connection that has made one request and then
idles. On SIGTERM the idle one makes its second request and the download is read to its end. What came is then in the
file REPORT, as JSON; ``fault`` is empty where all is as it must be. Certificates are not verified: self-signed ones.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import ssl
import sys
import threading

TIMEOUT_SECS = 60.0
PIECE_BYTES = 65_536


class Connection:
    """One connection that is never made again: http.client would otherwise do so by itself."""

    def __init__(self, host: str, site: str, context: ssl.SSLContext) -> None:
        self._site = site
        self._connection = http.client.HTTPSConnection(host, timeout=TIMEOUT_SECS, context=context)
        self._connection.connect()
        self._connection.auto_open = 0
        self.port: int = self._connection.sock.getsockname()[1]

    def begin(self, target: str) -> http.client.HTTPResponse:
        """Send a request. Raises OSError or HTTPException, also when the connection has ended."""
        self._connection.request("GET", target, headers={"Host": self._site})
        response = self._connection.getresponse()
        if response.status != http.client.OK:
            raise http.client.HTTPException(f"status {response.status}")
        return response


class Download:
    """Read by a thread of its own."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.received_bytes = 0
        self.fault = ""
        self._response = response
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            while data := self._response.read1(PIECE_BYTES):
                self.received_bytes += len(data)
        except (OSError, http.client.HTTPException) as error:
            self.fault = f"{type(error).__name__}: {error}"

    def wait(self) -> None:
        """Until its end."""
        self._thread.join(TIMEOUT_SECS)


def _write(path: str, seen: dict[str, object]) -> None:
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump(seen, file)
    os.replace(f"{path}.new", path)


def main() -> None:
    """The program."""
    report, host, site, size, secs, hurry = sys.argv[1:]
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told.set())

    idle = Connection(host, site, context)
    idle.begin("/").read()
    loading = Connection(host, site, context)
    download = Download(loading.begin(f"/slow?bytes={size}&secs={secs}&hurry={hurry}"))
    seen: dict[str, object] = {"idle_port": idle.port, "download_port": loading.port}
    _write(report, seen)

    told.wait()
    seen["bytes_before"] = download.received_bytes
    faults = []
    try:
        seen["second_answer"] = idle.begin("/").read().decode()
    except (OSError, http.client.HTTPException) as error:
        faults.append(f"idle connection: {type(error).__name__}: {error}")
    _write(report, seen)
    download.wait()
    if download.fault or download.received_bytes != int(size):
        faults.append(f"download: {download.received_bytes} of {size} bytes {download.fault}")
    _write(report, seen | {"bytes": download.received_bytes, "fault": "; ".join(faults)})


if __name__ == "__main__":
    main()
