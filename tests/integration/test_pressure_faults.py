"""Faults of the kernel, planted at the call: accept, socket, connect, open. Who is served and what is told."""

from __future__ import annotations

import contextlib
import errno
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import StartAppliance
from tests.harness import Appliance, RawUpstream, Wire, alive, connect_tls, wait_until
from tests.harness.arrivals import arrivals
from tests.harness.processes import cpu_secs
from tests.harness.reloading import refused, reload
from tests.unit.tls.pki import Authority

StartUpstream = Callable[..., RawUpstream]

STORM_SECS = 4.0
RECOVERY_SECS = 20.0
"""The aim is 2 s; a loaded machine gets ten times that."""
HEALTH_SECS = 1.0
"""The aim is 100 ms; ten times that."""
AT_ONCE_SECS = 5.0
CPU_SHARE = 0.5
"""The aim is 5% of a core; ten times that. A loop that spins takes all of it."""
MAX_EVENT_LINES = 10
PIECES = 200
REQUESTS = 20
NO_SUCH_ERROR = 4095

# The file says WHERE NUMBER PORT: at which call, with which errno, and for accept on which listener.
PRELUDE = """
import builtins, os, socket

def planted(where, listener=None):
    try:
        with real_open(FILE) as file:
            found, number, port = file.read().split()
    except OSError:
        return
    if found == where and (listener is None or listener.getsockname()[1] == int(port)):
        raise OSError(int(number), os.strerror(int(number)))

def accept(self):
    if self.family == socket.AF_INET:
        planted("accept", self)
    return real_accept(self)

def connect_ex(self, address):
    try:
        planted("connect")
    except OSError as error:
        return error.errno
    return real_connect_ex(self, address)

def init(self, family=-1, type=-1, proto=-1, fileno=None):
    if fileno is None and family == socket.AF_INET:
        planted("socket")
    real_init(self, family, type, proto, fileno)

def open_(file, *arguments, **options):
    if str(file).endswith(".pem"):
        planted("open")
    return real_open(file, *arguments, **options)

real_open, real_accept, real_init = builtins.open, socket.socket.accept, socket.socket.__init__
real_connect_ex = socket.socket.connect_ex
socket.socket.accept, socket.socket.connect_ex, socket.socket.__init__ = accept, connect_ex, init
builtins.open = open_
"""


class Plant:
    """Where the fault is told to the program."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "planted"
        self._draft = folder / "draft"
        self.prelude = f"FILE = {str(self._file)!r}\n{PRELUDE}"

    @contextlib.contextmanager
    def fault(self, where: str, number: int, port: int = 0) -> Iterator[None]:
        self._draft.write_text(f"{where} {number} {port}")
        self._draft.rename(self._file)
        try:
            yield
        finally:
            self._file.unlink()


@pytest.fixture
def plant(tmp_path: Path) -> Plant:
    return Plant(tmp_path)


def name_of(number: int) -> str:
    return errno.errorcode.get(number, "unknown").lower()


def request(path: bytes) -> bytes:
    return b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % path


def pieces(wire: Wire) -> None:
    """/long is a body of many pieces, one each 50 ms; anything else is ``ok``."""
    while True:
        try:
            head = wire.read_head()
        except EOFError:
            return
        if head.startswith(b"GET /long "):
            wire.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            for number in range(PIECES):
                wire.send(b"9\r\n%08d\n\r\n" % number)
                threading.Event().wait(0.05)
            wire.send(b"0\r\n\r\n")
        else:
            wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "number",
    [
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOBUFS,
        errno.ENOMEM,
        errno.ECONNABORTED,
        errno.EPROTO,
        errno.EPERM,
        NO_SUCH_ERROR,
    ],
    ids=name_of,
)
def test_accept_fails_under_load(appliance: StartAppliance, upstream: StartUpstream, plant: Plant, number: int) -> None:
    one = appliance(upstream=upstream(pieces).url, prelude=plant.prelude)
    (worker,) = one.workers
    with one.connect() as kept, one.connect() as idle:
        assert idle.request(request(b"/")).body == b"ok"
        kept.send(request(b"/long"))
        kept.read_until(b"00000001\n")
        before_errors, before_cpu = one.status()["totals"]["accept_errors"], cpu_secs(worker)
        with plant.fault("accept", number, one.port), arrivals(one.port, 0.005):
            end = time.monotonic() + STORM_SECS
            while time.monotonic() < end:
                asked = time.monotonic()
                assert one.health() == (200, b"ok\n")
                assert time.monotonic() - asked < HEALTH_SECS
                time.sleep(0.2)
            spent_secs = cpu_secs(worker) - before_cpu
            errors = one.status()["totals"]["accept_errors"] - before_errors
        restored = time.monotonic()
        with one.connect(timeout_secs=RECOVERY_SECS) as wire:
            assert wire.request(request(b"/")).body == b"ok"
        recovery_secs = time.monotonic() - restored
        assert recovery_secs < RECOVERY_SECS
        kept.read_until(b"0\r\n\r\n")
        told = [int(number) for number in re.findall(rb"([0-9]{8})\n", kept.received)]
        assert told == list(range(PIECES)), "the exchange in progress is whole"
    assert one.workers == (worker,)
    assert alive(worker)
    assert errors >= 1
    assert spent_secs < STORM_SECS * CPU_SHARE, f"{errors} errors took {spent_secs:.2f} s of CPU"
    lines = [line for line in one.event_lines() if " source=master " not in line]
    assert any(f" accept.{name_of(number)} " in line for line in lines), lines
    assert len(lines) <= MAX_EVENT_LINES, "\n".join(lines)
    print(f"recovery {recovery_secs:.2f} s, {errors} errors, {len(lines)} lines, CPU {spent_secs:.2f} s")


OURS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("where", ["socket", "connect"])
@pytest.mark.parametrize(
    "number",
    [*OURS, errno.EADDRNOTAVAIL, errno.ECONNABORTED, errno.EPROTO, errno.EPERM, NO_SUCH_ERROR],
    ids=name_of,
)
def test_the_way_to_an_upstream_fails(
    appliance: StartAppliance, upstream: StartUpstream, plant: Plant, where: str, number: int
) -> None:
    """What is ours is 503 and no fault of the backend, anything else is 502; at once, and good again with the cause."""
    one = appliance({"upstream_idle_timeout_secs": 1}, upstream=upstream(pieces).url, prelude=plant.prelude)
    with one.connect() as wire:
        assert wire.request(request(b"/")).status == 200
        wait_until(lambda: not one.status()["workers"][0]["upstream_open"], "its connection is given up")
        statuses = set()
        with plant.fault(where, number):
            began = time.monotonic()
            for _ in range(REQUESTS):
                statuses.add(wire.request(request(b"/")).status)
            assert time.monotonic() - began < AT_ONCE_SECS
            assert one.health() == (200, b"ok\n")
        if number in (*OURS, errno.EADDRNOTAVAIL):
            assert statuses == {503}
        else:
            assert statuses <= {502, 503}, "503 where the backend is left out for a while"
            assert 502 in statuses
        wait_until(lambda: wire.request(request(b"/")).body == b"ok", "served again", RECOVERY_SECS)
    lines = [line for line in one.event_lines() if " source=master " not in line]
    assert 1 <= len(lines) <= MAX_EVENT_LINES, "\n".join(lines)
    assert all(" upstream." in line for line in lines), lines


@pytest.mark.parametrize("number", [*OURS, errno.EIO], ids=name_of)
def test_a_certificate_that_cannot_be_read_leaves_the_old_one_in_service(
    appliance: StartAppliance, tmp_path: Path, plant: Plant, number: int
) -> None:
    authority = Authority(tmp_path)
    leaf, key = authority.leaf("localhost")
    files = authority.write(leaf, authority.issuer, key=key)
    listener: dict[str, Any] = {"address": "127.0.0.1:0", "certificates": [files]}
    one = appliance({"listeners": [listener]}, prelude=plant.prelude)
    before = certificate_of(one)
    with one.connect() as kept:
        with plant.fault("open", number):
            errors = refused(one, max_connections=77)
            assert "Traceback" not in "".join(errors)
            (error,) = errors
            assert str(one.path) in error
            assert "certificates[0]" in error
            assert files["chain"] in error
        assert one.status()["generation"] == 1
        assert one.status()["permits"] != 77
        assert certificate_of(one) == before
        assert kept.request(request(b"/")).status == 502, "the connection goes on"
    reload(one, max_connections=77)
    assert one.status()["permits"] == 77
    assert certificate_of(one) == before


def certificate_of(one: Appliance) -> bytes:
    with connect_tls(one.port) as wire:
        assert isinstance(wire.sock, ssl.SSLSocket)
        certificate = wire.sock.getpeercert(binary_form=True)
    assert certificate
    return certificate
