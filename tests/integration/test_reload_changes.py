"""What a reload changes while four workers serve, and what lives on with the configuration that it began with."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import StartAppliance
from tests.harness import Appliance, FreePorts, RawUpstream, Wire, connect_tcp, connect_tls, wait_until
from tests.harness.http2_wire import connect_http2
from tests.harness.reloading import reload
from tests.harness.upstream import answering
from tests.unit.tls.pki import Authority

REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
INITIAL_WINDOW_SIZE = 4
WORKERS = 4
TRIES = 24
"""So many connections that each of the workers has some."""
WAITING_SECS = 1.5
"""More than the grace after which what is not in progress gives way."""


def reply(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def free_port() -> int:
    ports = FreePorts()
    port = ports.take()
    ports.release()
    return port


def echo_head(wire: Wire) -> None:
    """Answers each request with the head that has come."""
    while True:
        try:
            head = wire.read_head()
        except EOFError:
            return
        wire.send(reply(head))


def ask(one: Appliance, path: bytes = b"/") -> bytes:
    with one.connect() as client:
        return client.request(REQUEST.replace(b" / ", b" " + path + b" ")).body


def generations(one: Appliance) -> list[int]:
    return [worker["generations"] for worker in one.status()["workers"]]


def test_routes_upstreams_and_header_edits(appliance: StartAppliance, upstream: Callable[..., RawUpstream]) -> None:
    first, second = upstream(echo_head), upstream(answering(reply(b"second")))
    one = appliance({"workers": WORKERS, "sites": [{"hosts": ["*"], "upstreams": [first.url]}]})
    held = [one.connect() for _ in range(TRIES)]
    assert all(b"X-Mark" not in client.request(REQUEST).body for client in held)
    site = {
        "hosts": ["*"],
        "upstreams": [first.url],
        "request_headers": {"set": {"X-Mark": "new"}},
        "response_headers": {"set": {"X-Answer": "new"}},
        "routes": [{"path": "/second", "upstreams": [second.url]}],
    }
    assert reload(one, sites=[site])["changes"]["sites_changed"] == [
        "*: request_headers, response_headers, route /second"
    ]
    for _ in range(TRIES):
        with one.connect() as client:
            answer = client.request(REQUEST)
            assert b"X-Mark: new" in answer.body
            assert answer.get("X-Answer") == "new"
            assert client.request(REQUEST.replace(b" / ", b" /second/x ")).body == b"second"
    for client in held:  # with the configuration that they began with
        answer = client.request(REQUEST.replace(b" / ", b" /second/x "))
        assert b"GET /second/x " in answer.body
        assert b"X-Mark" not in answer.body
        assert answer.get("X-Answer") is None
        client.close()
    wait_until(lambda: generations(one) == [1] * WORKERS, "the first generation ends with its connections")


def test_uploads_and_tunnels_live_on(appliance: StartAppliance, upstream: Callable[..., RawUpstream]) -> None:
    def play(wire: Wire) -> None:
        wire.sock.settimeout(60)
        head = wire.read_head()
        if b"upgrade: echo" in head.lower():
            wire.send(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
            while data := wire.sock.recv(1000):
                wire.send(data)
        else:
            wire.send(reply(b"%d" % len(wire.read_body(head))))

    old, new = upstream(play), upstream()
    site = {"hosts": ["*"], "upstreams": [old.url], "upgrade_protocols": ["echo"]}
    one = appliance({"workers": WORKERS, "sites": [site]})
    tunnel, upload = one.connect(), one.connect()
    tunnel.send(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
    assert tunnel.read_response().status == 101
    upload.send(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 200000\r\n\r\n" + bytes(100_000))
    wait_until(lambda: sum(len(wire.received) for wire in old.wires) > 50_000, "the upload is under way")
    for count in range(3):
        sites = [{"hosts": ["*"], "upstreams": [new.url], "max_request_body_bytes": 1000}]
        assert reload(one, sites=sites, header_timeout_secs=3 + count)["connections_closed"] == 0
        tunnel.send(b"ping")
        assert tunnel.read_exactly(4) == b"ping"
    assert ask(one) == b"ok"
    wait_until(lambda: max(generations(one)) == 2, "the first one is left, the second is not")
    upload.send(bytes(100_000))
    answer = upload.read_response()
    assert (answer.status, answer.body) == (200, b"200000")
    with one.connect() as client:
        client.send(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 200000\r\n\r\n")
        assert client.read_response().status == 413
    for client in (tunnel, upload):
        client.close()
    wait_until(lambda: generations(one) == [1] * WORKERS, "no old generation is left")


def the_first_generation_ends(one: Appliance) -> None:
    """Reloads, and asserts that nothing holds the first generation but a connection that is made here: how many there
    are is told now and then only, and was 1 before."""
    with one.connect() as client:
        client.send(REQUEST[:-2])
        reload(one, header_timeout_secs=3)
        wait_until(lambda: generations(one) == [2], "the first generation is left while it has a connection")
    wait_until(lambda: generations(one) == [1], "it has gone")


def test_a_stream_reset_with_its_answer_waiting_keeps_no_generation(
    appliance: StartAppliance, upstream: Callable[..., RawUpstream]
) -> None:
    url = upstream(answering(reply(bytes(100_000)))).url
    one = appliance({"workers": 1, "write_timeout_secs": 300}, upstream=url)
    client = connect_http2(one, settings={INITIAL_WINDOW_SIZE: 0})
    stream = client.open()
    client.wait(lambda: client.streams[stream].status, "the head")
    client.conn.reset_stream(stream)
    client.flush()
    client.close()
    the_first_generation_ends(one)


def test_a_request_answered_before_its_end_keeps_no_generation(
    appliance: StartAppliance, upstream: Callable[..., RawUpstream]
) -> None:
    def by_the_head(wire: Wire) -> None:
        wire.read_head()
        wire.send(reply(b"no"))

    one = appliance({"workers": 1}, upstream=upstream(by_the_head).url)
    client = connect_http2(one)
    stream = client.open(method="POST", end_stream=False)
    client.wait(lambda: client.streams[stream].ended, "the answer")
    client.close()
    the_first_generation_ends(one)


# -- certificates


def resumed(port: int, context: ssl.SSLContext, session: ssl.SSLSession | None) -> tuple[bool, ssl.SSLSession, int]:
    raw = socket.create_connection(("127.0.0.1", port), 10)
    sock = context.wrap_socket(raw, server_hostname="localhost", session=session)
    with Wire(sock) as client:
        assert client.request(REQUEST).status == 200
        certificate = sock.getpeercert()
        assert sock.session is not None
        serial = int(str(certificate["serialNumber"]), 16) if certificate else 0
        return bool(sock.session_reused), sock.session, serial


@pytest.mark.parametrize("in_place", [True, False])
def test_certificates(
    appliance: StartAppliance, upstream: Callable[..., RawUpstream], tmp_path: Path, in_place: bool
) -> None:
    authority = Authority(tmp_path)
    leaf, key = authority.leaf("localhost")
    served = authority.write(leaf, authority.issuer, key=key)
    one = appliance(
        {"workers": WORKERS, "listeners": [{"address": "127.0.0.1:0", "certificates": [served]}]},
        upstream=upstream().url,
    )
    held = one.connect(cafile=authority.ca_file)
    clients: list[tuple[ssl.SSLContext, list[ssl.SSLSession]]] = []
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        context = authority.client()
        context.minimum_version = context.maximum_version = version
        clients.append((context, [resumed(one.port, context, None)[1] for _ in range(20)]))
    renewed, renewed_key = authority.leaf("localhost")
    files = authority.write(renewed, authority.issuer, key=renewed_key)
    address = one.config["listeners"][0]["address"]
    if in_place:
        for kind in ("chain", "key"):
            Path(served[kind]).write_bytes(Path(files[kind]).read_bytes())
        changes = reload(one)["changes"]
        assert changes == {"certificates_changed": [address]}
    else:
        changes = reload(one, listeners=[{"address": address, "certificates": [files]}])["changes"]
        assert changes == {"listeners_changed": [address], "certificates_changed": [address]}
    for context, sessions in clients:
        fresh = [resumed(one.port, context, None)[2] for _ in range(TRIES)]
        assert set(fresh) == {renewed.serial_number}, "the new one at once, from every worker"
        reused = [resumed(one.port, context, session)[0] for session in sessions]
        assert sum(reused) >= 0.95 * len(sessions)
    assert held.request(REQUEST).status == 200
    held.close()
    expiry = one.status()["listeners"][0]["certificates"][0]["not_after"]
    assert expiry[:10] == renewed.not_valid_after_utc.isoformat()[:10]


# -- listeners


def test_listeners_come_and_go(appliance: StartAppliance, upstream: Callable[..., RawUpstream]) -> None:
    one = appliance({"workers": WORKERS, "max_connections": 40}, upstream=upstream().url)
    first = one.config["listeners"]
    port = free_port()
    second = {"address": f"127.0.0.1:{port}"}
    reload(one, listeners=[*first, second])
    for _ in range(TRIES):
        with connect_tls(port) as client:
            assert client.request(REQUEST).status == 200
    held = connect_tls(port)
    queued = [connect_tcp(port) for _ in range(12)]
    assert reload(one, listeners=first)["changes"] == {"listeners_removed": [second["address"]]}
    with pytest.raises(ConnectionRefusedError):
        connect_tcp(port)
    assert held.request(REQUEST).status == 200
    held.close()
    context = ssl._create_unverified_context()
    for client in queued:
        with Wire(context.wrap_socket(client.sock, server_hostname="localhost")) as secured:
            assert secured.request(REQUEST).status == 200, "what had come is served"
    assert ask(one) == b"ok"


def test_the_redirect_goes_off_and_on(appliance: StartAppliance) -> None:
    one = appliance({"workers": WORKERS})
    redirect = one.config["redirect"]
    for _ in range(2):
        with one.connect_redirect() as client:
            assert client.request(REQUEST).status == 308
        reload(one, redirect={**redirect, "enabled": False})
        with pytest.raises(ConnectionRefusedError):
            one.connect_redirect()
        reload(one, redirect=redirect)
    port = free_port()
    reload(one, redirect={**redirect, "addresses": [*redirect["addresses"], f"127.0.0.1:{port}"]})
    for _ in range(TRIES):
        with connect_tcp(port) as client:
            assert client.request(REQUEST).status == 308


# -- limits


def test_max_connections_down_and_up(appliance: StartAppliance, upstream: Callable[..., RawUpstream]) -> None:
    go_on = threading.Event()

    def hold_some(wire: Wire) -> None:
        while head := wire.read_head():
            if b"GET /held " in head:
                go_on.wait(60)
            wire.send(reply(b"ok"))

    limits = {"max_connections": 400, "max_upstream_connections": 800}
    one = appliance({"workers": WORKERS, **limits}, upstream=upstream(hold_some).url)
    held: list[Wire] = []
    while not all(worker["permits_held"] for worker in one.status()["workers"]):
        held.append(one.connect())  # the kernel chooses the worker
    reload(one, max_connections=WORKERS)
    assert [worker["permits"] for worker in one.status()["workers"]] == [1] * WORKERS
    for client in held:
        assert client.request(REQUEST).status == 200, "a lowered limit closes nothing"
        client.send(REQUEST.replace(b" / ", b" /held "))  # what is in progress does not give way to a new one
    wait_until(lambda: one.status()["totals"]["upstream_open"] == len(held), "all of them are in progress")
    answers: list[int] = []

    def serve(raw: Wire) -> None:
        with Wire(ssl._create_unverified_context().wrap_socket(raw.sock, server_hostname="localhost"), 60) as client:
            answers.append(client.request(REQUEST).status)

    threads = [threading.Thread(target=serve, args=(connect_tcp(one.port, timeout_secs=60),)) for _ in range(30)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(WAITING_SECS)
        assert one.status()["totals"]["connections_open"] == len(held)
        assert not answers
        reload(one, max_connections=100)
        for thread in threads:
            thread.join(60)
        assert answers == [200] * 30, "the listeners that waited were woken"
    finally:
        go_on.set()
    for client in held:
        assert client.read_response().status == 200
        client.close()
    wait_until(lambda: one.status()["totals"]["connections_open"] == 0, "all permits are back")


def test_timeouts(appliance: StartAppliance) -> None:
    one = appliance({"workers": WORKERS, "connection_idle_timeout_secs": 60})
    old = one.connect()
    assert old.request(REQUEST).status == 502
    reload(one, connection_idle_timeout_secs=1)
    new = one.connect()
    assert new.request(REQUEST).status == 502
    assert new.at_end()
    assert old.request(REQUEST).status == 502
    for client in (old, new):
        client.close()


def test_upstream_limits(appliance: StartAppliance, upstream: Callable[..., RawUpstream]) -> None:
    go_on = threading.Event()

    def hold(wire: Wire) -> None:
        wire.read_head()
        go_on.wait(20)
        wire.send(reply(b"ok"))

    limits = {"max_upstream_connections": 4, "upstream_queue_timeout_secs": 30}
    one = appliance({"workers": WORKERS, **limits}, upstream=upstream(hold).url)
    clients = [one.connect() for _ in range(40)]
    for client in clients:
        client.send(REQUEST)
    wait_until(lambda: one.status()["totals"]["upstream_queued"] == 36, "all but four wait")
    reload(one, max_upstream_connections=400)
    wait_until(lambda: one.status()["totals"]["upstream_queued"] == 0, "nobody waits any more")
    go_on.set()
    assert {client.read_response().status for client in clients} == {200}
    for client in clients:
        client.close()


# -- logs


def test_the_access_log_moves(appliance: StartAppliance, upstream: Callable[..., RawUpstream]) -> None:
    one = appliance({"workers": WORKERS}, upstream=upstream().url)
    before, after = one.folder / "access.log", one.folder / "after.log"
    held = [one.connect() for _ in range(8)]
    reload(one, access_log={"path": str(after)})
    reload(one, access_log={"path": str(after), "format": "json"})
    reload(one, access_log={"path": str(after)})
    for client in held:
        assert client.request(REQUEST.replace(b" / ", b" /held ")).status == 200
    for _ in range(TRIES):
        ask(one, b"/new")
    wait_until(lambda: before.read_text().count("/held") == 8, "the old connections' lines go to the old file")
    wait_until(lambda: after.read_text().count("/new") == TRIES, "the new ones' to the new one")
    assert "/new" not in before.read_text()
    assert "/held" not in after.read_text()
    assert sum(worker["descriptors_open"] for worker in one.status()["workers"]) > 0
    for client in held:
        client.close()
    wait_until(lambda: generations(one) == [1] * WORKERS, "the first generation has gone")
    wait_until(lambda: not holders(one, before), "and nobody has its file open")


def holders(one: Appliance, path: Path) -> list[int]:
    return [
        pid
        for pid in one.workers
        for link in Path(f"/proc/{pid}/fd").iterdir()
        if link.exists() and link.samefile(path)
    ]


def test_the_last_lines_of_an_old_generation_are_written_at_the_end(
    appliance: StartAppliance, upstream: Callable[..., RawUpstream]
) -> None:
    one = appliance({"workers": WORKERS}, upstream=upstream().url)
    held = one.connect()
    reload(one, access_log={"path": "off"})
    assert held.request(REQUEST.replace(b" / ", b" /late ")).status == 200
    held.close()
    one.stop()
    assert "/late" in (one.folder / "access.log").read_text()


def test_the_event_logs_level(appliance: StartAppliance) -> None:
    one = appliance()
    assert one.status()["events"]["level"] == "info"
    reload(one, event_log={**one.config["event_log"], "level": "error"})
    wait_until(lambda: one.status()["events"]["level"] == "error", "it is in force")
