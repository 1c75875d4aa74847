"""C4: one count of permits for all listeners, and every way out of a connection gives its permit back exactly once."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.conftest import StartAppliance
from tests.harness import Appliance, RawUpstream, Wire, connect_tls, descriptor_count, wait_until

REQUEST = b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHAOS_SECS = 10.0
ROUNDS_A_THREAD = 400
THREADS = 6
PERMITS = 16
QUICK_SECS = 1.0
SETTLE_SECS = 20.0
WS = (
    b"GET /%s HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
SWITCH = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"


def worker_status(one: Appliance) -> dict[str, int]:
    status: dict[str, int] = one.status()["workers"][0]
    return status


def test_two_listeners_share_the_permits_and_the_fifth_waits(
    appliance: StartAppliance, upstream: Callable[..., RawUpstream]
) -> None:
    """Exchanges in progress give way to nobody: for as long as they take, the fifth client waits."""
    go_on = threading.Event()

    def answer_late(wire: Wire) -> None:
        with contextlib.suppress(EOFError):
            while True:
                wire.read_head()
                go_on.wait(30)
                wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    one = appliance(
        {"max_connections": 4, "listeners": [{"address": "127.0.0.1:0"}, {"address": "127.0.0.1:0"}]},
        upstream=upstream(answer_late).url,
    )
    second = int(one.config["listeners"][1]["address"].rpartition(":")[2])
    held = [one.connect(), connect_tls(second), one.connect(), connect_tls(second)]
    for wire in held:
        wire.send(REQUEST % b"")
    wait_until(lambda: worker_status(one)["upstream_open"] == 4, "all permits are held, each with an exchange")
    for port in (one.port, second):
        # The kernel completes the connection, and nobody takes it from its queue.
        with socket.create_connection(("127.0.0.1", port), 10) as waiting:
            waiting.settimeout(1.5)
            context = ssl._create_unverified_context()
            with pytest.raises(TimeoutError):
                context.wrap_socket(waiting, server_hostname="localhost")
    fifth = socket.create_connection(("127.0.0.1", second), 10)
    assert worker_status(one)["permits_held"] == 4
    go_on.set()
    for wire in held:
        assert wire.read_response().status == 200, "those inside are served"
    # Now they idle, and one of them gives way.
    with Wire(ssl._create_unverified_context().wrap_socket(fifth, server_hostname="localhost")) as wire:
        assert wire.request(REQUEST % b"").status == 200
        assert worker_status(one)["permits_held"] <= 4
    assert one.status()["totals"]["evicted_idle"] >= 1
    for wire in held:
        wire.close()
    wait_until(lambda: worker_status(one)["permits_held"] == 0, "all permits are back")


# -- chaos


class Dying(Exception):  # noqa: N818 - a way out of a script, not an error
    """The upstream ends its connection now."""


class ChaoticUpstream:
    """Does what the path says, so that each client chooses what its upstream goes through."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self.scripts: dict[bytes, Callable[[Wire, bytes], None]] = {
            b"ok": self.ok,
            b"chunked": lambda wire, _: wire.send(
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"
            ),
            b"big": lambda wire, _: wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 4000000\r\n\r\n" + bytes(4_000_000)),
            b"close": self.until_close,
            b"die": self.die,
            b"reset": self.reset,
            b"half-head": lambda wire, _: self.then_die(wire, b"HTTP/1.1 200 OK\r\nConte"),
            b"half-body": lambda wire, _: self.then_die(wire, b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf"),
            b"half-chunk": lambda wire, _: self.then_die(
                wire, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nhalf"
            ),
            b"garbage": lambda wire, _: self.then_die(wire, os.urandom(200)),
            b"bad-chunk": lambda wire, _: wire.send(
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\nzz\r\n"
            ),
            b"over": lambda wire, _: wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok, and something over"),
            b"twice": lambda wire, _: wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok" * 2),
            b"silent": lambda wire, _: self.silence(),
            b"silent-body": self.silent_body,
            b"interim": lambda wire, _: wire.send(
                b"HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
            ),
            b"tunnel": self.tunnel,
            b"tunnel-die": lambda wire, _: self.then_die(wire, SWITCH + b"some bytes"),
            b"tunnel-silent": self.silent_tunnel,
        }

    def play(self, wire: Wire) -> None:
        # LookupError: the rest of a body that was not read is taken for the next head.
        with contextlib.suppress(OSError, EOFError, ValueError, LookupError, Dying):
            while True:
                head = wire.read_head()
                name = head.split(b" ", 2)[1].lstrip(b"/")
                if name.startswith(b"early-"):
                    # An answer before the body has come; what of the body follows is not read.
                    name = name.removeprefix(b"early-")
                else:
                    wire.read_body(head)
                self.scripts[name](wire, head)

    def silence(self) -> None:
        self._stop.wait(3 * QUICK_SECS)
        raise Dying

    def ok(self, wire: Wire, _head: bytes) -> None:
        wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    def until_close(self, wire: Wire, _head: bytes) -> None:
        self.then_die(wire, b"HTTP/1.1 200 OK\r\n\r\nuntil the end")

    def die(self, _wire: Wire, _head: bytes) -> None:
        raise Dying

    def reset(self, wire: Wire, _head: bytes) -> None:
        wire.reset()
        raise Dying

    def then_die(self, wire: Wire, data: bytes) -> None:
        wire.send(data)
        raise Dying

    def silent_body(self, wire: Wire, _head: bytes) -> None:
        wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
        self.silence()

    def silent_tunnel(self, wire: Wire, _head: bytes) -> None:
        wire.send(SWITCH)
        self.silence()

    def tunnel(self, wire: Wire, _head: bytes) -> None:
        wire.send(SWITCH)
        while data := wire.sock.recv(65_536):
            wire.send(data)
        raise Dying


class Vandal:
    """One client thread: opens connections, gets them into a phase and ends them there."""

    def __init__(self, one: Appliance, seed: str, names: list[bytes], stop: threading.Event) -> None:
        self._port = one.port
        self._redirect_port = one.redirect_port
        self._random = random.Random(seed)
        self._names = names
        self._stop = stop
        self.rounds = 0
        self.answers = 0
        self.failure: BaseException | None = None
        self._held: list[socket.socket] = []
        self._phases = (
            self.before_handshake,
            self.inside_handshake,
            self.garbage_handshake,
            self.idle,
            self.in_head,
            self.bad_request,
            self.in_upload,
            self.waiting,
            self.waiting,
            self.in_response,
            self.keep_alive,
            self.pipelined,
            self.in_tunnel,
            self.redirect,
        )

    def run(self) -> None:
        end = time.monotonic() + CHAOS_SECS
        try:
            while self.rounds < ROUNDS_A_THREAD and time.monotonic() < end and not self._stop.is_set():
                self.rounds += 1
                # The proxy ends many of these before they are through: that is what is wanted.
                with contextlib.suppress(OSError, EOFError, ValueError, IndexError):
                    self._random.choice(self._phases)()
        except BaseException as error:  # noqa: BLE001 - told by the test
            self.failure = error
        finally:
            for sock in self._held:
                sock.close()

    # -- ends

    def end(self, sock: socket.socket) -> None:
        way = self._random.randrange(4)
        if way == 0:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        elif way == 1:
            with contextlib.suppress(OSError, ValueError):
                socket.socket.shutdown(sock, socket.SHUT_WR)
            self.hold(sock)
        elif way == 2:
            self.hold(sock)  # silence
        else:
            with contextlib.suppress(OSError, ValueError):
                if isinstance(sock, ssl.SSLSocket):
                    sock.settimeout(0.01)
                    sock.unwrap()
            sock.close()

    def hold(self, sock: socket.socket) -> None:
        """Say nothing more, but not on so many that nobody else gets a permit."""
        self._held.append(sock)
        if len(self._held) > 1:
            self._held.pop(0).close()

    # -- beginnings

    def raw(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._port), 3 * QUICK_SECS)

    @contextlib.contextmanager
    def wire(self) -> Iterator[Wire]:
        wire = connect_tls(self._port, timeout_secs=3 * QUICK_SECS)
        try:
            yield wire
        finally:
            if wire.sock.fileno() >= 0:
                self.end(wire.sock)

    def name(self) -> bytes:
        return self._random.choice(self._names)

    def answered(self, wire: Wire, method: str = "GET") -> None:
        wire.read_response(method)
        self.answers += 1

    # -- phases

    def before_handshake(self) -> None:
        self.end(self.raw())

    def inside_handshake(self) -> None:
        outgoing = ssl.MemoryBIO()
        client = ssl._create_unverified_context().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")
        with contextlib.suppress(ssl.SSLWantReadError):
            client.do_handshake()
        hello = outgoing.read()
        sock = self.raw()
        sock.sendall(hello[: self._random.randrange(len(hello) + 1)])
        self.end(sock)

    def garbage_handshake(self) -> None:
        sock = self.raw()
        sock.sendall(self._random.randbytes(self._random.randrange(1, 600)))
        self.end(sock)

    def idle(self) -> None:
        with self.wire():
            pass

    def in_head(self) -> None:
        with self.wire() as wire:
            head = REQUEST % self.name()
            wire.send(head[: self._random.randrange(1, len(head))])

    def bad_request(self) -> None:
        with self.wire() as wire:
            wire.send(
                self._random.choice((b"NONSENSE\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", self._random.randbytes(300)))
            )
            if self._random.random() < 0.5:
                self.answered(wire)

    def in_upload(self) -> None:
        with self.wire() as wire:
            name = self._random.choice((b"early-", b"")) + self.name()
            size = self._random.choice((10, 100_000, 3_000_000))
            if self._random.random() < 0.5:
                wire.send(b"POST /%s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (name, size))
                wire.send(bytes(self._random.randrange(size + 1)))
            else:
                wire.send(b"POST /%s HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" % name)
                wire.send(b"%x\r\n" % size + bytes(size) + self._random.choice((b"", b"\r\n", b"zz", b"\r\n0\r\n\r\n")))
            if self._random.random() < 0.5:
                self.answered(wire, "POST")

    def waiting(self) -> None:
        with self.wire() as wire:
            wire.send(REQUEST % self.name())

    def in_response(self) -> None:
        with self.wire() as wire:
            wire.send(REQUEST % self._random.choice((b"big", self.name())))
            wire.sock.recv(self._random.randrange(1, 100_000))

    def keep_alive(self) -> None:
        with self.wire() as wire:
            for _ in range(self._random.randrange(1, 5)):
                wire.send(REQUEST % self.name())
                self.answered(wire)

    def pipelined(self) -> None:
        with self.wire() as wire:
            count = self._random.randrange(2, 30)
            wire.send(b"".join(REQUEST % self.name() for _ in range(count)))
            for _ in range(self._random.randrange(count)):
                self.answered(wire)

    def in_tunnel(self) -> None:
        with self.wire() as wire:
            wire.send(WS % self._random.choice((b"tunnel", b"tunnel-die", b"tunnel-silent", b"ok")))
            wire.read_head()
            size = self._random.choice((10, 500_000))
            wire.send(bytes(size))
            wire.read_exactly(self._random.randrange(size))

    def redirect(self) -> None:
        wire = Wire(socket.create_connection(("127.0.0.1", self._redirect_port), 3 * QUICK_SECS))
        head = REQUEST % b""
        wire.send(head[: self._random.choice((1, len(head)))])
        self.end(wire.sock)


def test_chaos_leaves_nothing_behind(appliance: StartAppliance, upstream: Callable[..., RawUpstream]) -> None:
    seed = os.environ.get("CHAOS_SEED") or str(random.SystemRandom().randrange(1 << 32))
    print(f"CHAOS_SEED={seed}")
    stop = threading.Event()
    chaotic = ChaoticUpstream(stop)
    names = [name for name in chaotic.scripts if not name.startswith(b"tunnel")]
    quick = (
        "tls_handshake_timeout_secs",
        "header_timeout_secs",
        "connection_idle_timeout_secs",
        "request_body_timeout_secs",
        "write_timeout_secs",
        "upstream_connect_timeout_secs",
        "upstream_response_timeout_secs",
        "upstream_queue_timeout_secs",
        "upstream_idle_timeout_secs",
        "tunnel_idle_timeout_secs",
    )
    config = {
        **dict.fromkeys(quick, QUICK_SECS),
        "max_connections": PERMITS,
        "max_upstream_connections": PERMITS // 2,  # so that some wait in the queue
        "redirect": {"max_connections": 4},
    }
    raw = upstream(chaotic.play)
    one = appliance(config, upstream=raw.url)
    (worker,) = one.workers

    def good_client() -> None:
        with one.connect() as wire:
            assert wire.request(REQUEST % b"ok").body == b"ok"

    def at_rest() -> bool:
        status = worker_status(one)
        keys = (
            "permits_held",
            "redirect_connections",
            "upstream_open",
            "upstream_queued",
            "tunnels",
            "requests_active",
        )
        return not any(status[key] for key in keys)

    good_client()
    wait_until(at_rest, "the first client has left nothing", SETTLE_SECS)
    idle = descriptor_count(worker)

    vandals = [Vandal(one, f"{seed}-{number}", names, stop) for number in range(THREADS)]
    threads = [threading.Thread(target=vandal.run) for vandal in vandals]
    most_held = 0
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            status = worker_status(one)
            most_held = max(most_held, status["permits_held"])
            assert status["permits_held"] <= PERMITS
            assert status["upstream_open"] <= PERMITS // 2
            time.sleep(0.1)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert [vandal.failure for vandal in vandals if vandal.failure] == []
    rounds, answers = sum(vandal.rounds for vandal in vandals), sum(vandal.answers for vandal in vandals)
    began = time.monotonic()
    wait_until(at_rest, f"all is given back: {worker_status(one)}", SETTLE_SECS)
    wait_until(lambda: descriptor_count(worker) == idle, "the descriptors are those of the start", SETTLE_SECS)
    settle_secs = time.monotonic() - began
    good_client()
    print(f"{rounds} rounds, {answers} answers, at most {most_held} held, settled after {settle_secs:.1f} s")
    print({key: value for key, value in one.status()["totals"].items() if value})
    assert one.workers == (worker,)
    # How many there are is the machine's speed: each did its part, and not in vain.
    assert rounds >= THREADS
    assert answers
    assert most_held >= THREADS // 2
    faults = ("loop.", "accept.", "worker.", "control.", "python.", "events.")
    assert [line for line in one.event_lines() if line.split(" ")[2].startswith(faults)] == []
