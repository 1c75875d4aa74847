"""A connection of HTTP/2 as a whole: negotiation, deadlines, flow control, fairness, its end."""

from __future__ import annotations

import contextlib
import os
import signal
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from proxy.session.client import LINGER_SECS
from tests.conftest import StartAppliance
from tests.harness import Appliance, RawUpstream, Wire, answering, connect_tls, wait_until
from tests.harness.appliance import cli
from tests.harness.http2 import GOAWAY, PING, PREFACE, block, frame, settings, split_frames
from tests.harness.http2_wire import Http2Wire, connect_http2

INITIAL_WINDOW_SIZE = 4
NO_ERROR = 0
BIG = 3_000_000
StartUpstream = Callable[..., RawUpstream]
Connect = Callable[..., Http2Wire]


@pytest.fixture
def connect() -> Iterator[Callable[..., Http2Wire]]:
    """``connect_http2``; what it opened is closed at the end."""
    with contextlib.ExitStack() as stack:

        def one(front: Appliance, **options: Any) -> Http2Wire:
            client = connect_http2(front, **options)
            stack.callback(client.close)
            return client

        yield one


def totals(front: Appliance, name: str) -> int:
    return int(front.status()["totals"][name])


def holding(go: threading.Event, body: bytes = b"ok") -> Callable[[Wire], None]:
    """Answers each request when ``go`` is set."""

    def play(wire: Wire) -> None:
        wire.sock.settimeout(60)
        while True:
            try:
                wire.read_head()
            except EOFError:
                return
            assert go.wait(30)
            wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    return play


# -- negotiation


def test_each_listener_offers_what_it_is_told(appliance: StartAppliance, upstream: StartUpstream) -> None:
    front = appliance(
        {"listeners": [{"address": "127.0.0.1:0"}, {"address": "127.0.0.1:0", "protocols": ["http/1.1"]}]},
        upstream=upstream().url,
    )
    ports = [int(one["address"].rpartition(":")[2]) for one in front.config["listeners"]]
    chosen = {}
    for at, port in enumerate(ports):
        for offer in (("h2", "http/1.1"), ("http/1.1", "h2"), ("http/1.1",), ()):
            with connect_tls(port, "localhost", alpn=offer) as wire:
                assert isinstance(wire.sock, ssl.SSLSocket)
                chosen[at, offer] = wire.sock.selected_alpn_protocol()
    assert chosen == {
        (0, ("h2", "http/1.1")): "h2",
        (0, ("http/1.1", "h2")): "h2",
        (0, ("http/1.1",)): "http/1.1",
        (0, ()): None,
        (1, ("h2", "http/1.1")): "http/1.1",
        (1, ("http/1.1", "h2")): "http/1.1",
        (1, ("http/1.1",)): "http/1.1",
        (1, ()): None,
    }


@pytest.mark.parametrize("protocols", ['["h2"]', "[]", '["h2", "h2", "http/1.1"]', '["h3", "http/1.1"]'])
def test_a_list_of_protocols_that_cannot_be(tmp_path: Path, protocols: str) -> None:
    path = tmp_path / "proxy.toml"
    path.write_text(
        f'[[listeners]]\naddress = "127.0.0.1:8443"\nprotocols = {protocols}\n'
        '[[sites]]\nhosts = ["*"]\nupstreams = ["http://127.0.0.1:9"]\n'
    )
    done = cli("check", "--config", str(path))
    assert done.returncode == 2
    assert "protocols" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_client_that_agreed_on_http2_and_speaks_http1(appliance: StartAppliance, upstream: StartUpstream) -> None:
    front = appliance(upstream=upstream().url)
    with front.connect(alpn=("h2",)) as wire:
        wire.send(b"GET / HTTP/1.1\r\nHost: www.example.org\r\n\r\n")
        assert wire.at_end() or wire.read_to_end()
    assert totals(front, "http2_connection_errors") == 1


def test_a_host_that_the_certificate_does_not_stand_for_is_misdirected(
    appliance: StartAppliance, connect: Connect, upstream: StartUpstream
) -> None:
    """RFC 9113 section 9.1.2: connections are reused for other hosts, which must be possible to refuse."""
    back = upstream()
    sites = [
        {"hosts": ["a.example.org"], "upstreams": [back.url]},
        {"hosts": ["b.example.org"], "upstreams": [back.url]},
    ]
    front = appliance({"sites": sites})
    client = connect(front, server_name="a.example.org")
    assert client.get(host="a.example.org").status == 200
    assert client.get(host="c.example.org").status == 421
    assert client.get(host="a.example.org").status == 200
    assert totals(front, "misdirected") == 1


# -- deadlines

TIMEOUTS: dict[str, Any] = {
    "header_timeout_secs": 0.5,
    "header_total_timeout_secs": 2,
    "connection_idle_timeout_secs": 0.5,
    "request_body_timeout_secs": 0.5,
    "write_timeout_secs": 0.5,
    "upstream_response_timeout_secs": 30,
}


def test_a_client_that_says_nothing_is_closed(appliance: StartAppliance) -> None:
    front = appliance(TIMEOUTS)
    with front.connect(alpn=("h2",)) as client:
        assert client.read_to_end(), "SETTINGS and GOAWAY"
    assert totals(front, "timeouts_header") == 1


def test_a_client_that_begins_and_asks_nothing_is_closed(appliance: StartAppliance, connect: Connect) -> None:
    front = appliance(TIMEOUTS)
    client = connect(front)
    client.read_to_end()
    assert [one.code for one in client.goaways] == [NO_ERROR]
    assert totals(front, "timeouts_header") == 1


def test_a_head_that_does_not_end_is_given_up(appliance: StartAppliance, upstream: StartUpstream) -> None:
    """In one HEADERS frame that stops, and in CONTINUATION frames that do not come."""
    front = appliance(TIMEOUTS, upstream=upstream().url)
    head = block([(":method", "GET"), (":scheme", "https"), (":authority", "a.example.org"), (":path", "/")])
    for part in (frame(1, 1, 1, head)[:-3], frame(1, 1, 1, head)):  # END_STREAM without END_HEADERS
        with front.connect(alpn=("h2",)) as client:
            client.send(PREFACE + settings() + part)
            assert client.read_to_end()
    assert totals(front, "timeouts_header") == 2


def test_a_connection_without_streams_is_idle_and_pings_keep_it_not(
    appliance: StartAppliance, connect: Connect, upstream: StartUpstream
) -> None:
    front = appliance(TIMEOUTS | {"connection_idle_timeout_secs": 1}, upstream=upstream().url)
    client = connect(front)
    assert client.get().status == 200
    for _ in range(30):
        client.conn.ping(b"12345678")
        with contextlib.suppress(OSError):
            client.flush()
        client.sock.settimeout(0.1)
        with contextlib.suppress(TimeoutError):
            client.read()
        if client.goaways:
            break
        threading.Event().wait(0.1)
    client.read_to_end()
    assert [one.code for one in client.goaways] == [NO_ERROR, NO_ERROR], "in two steps"
    assert totals(front, "timeouts_idle") == 1


SPLIT_PING = frame(PING, payload=b"12345678")


def ping_in_two_parts(client: Http2Wire, for_secs: float) -> float:
    """Send PINGs cut in two until a GOAWAY comes, at most for so long. Returns after how many seconds that was."""
    begun = time.monotonic()
    client.sock.settimeout(0.1)
    while not (client.goaways or client.ended) and time.monotonic() - begun < for_secs:
        with contextlib.suppress(OSError):
            client.send(SPLIT_PING[:5])
            threading.Event().wait(0.1)
            client.send(SPLIT_PING[5:])
            client.read()
    return time.monotonic() - begun


def test_idleness_is_not_put_off_by_pings_in_two_parts(
    appliance: StartAppliance, connect: Connect, upstream: StartUpstream
) -> None:
    front = appliance(TIMEOUTS | {"connection_idle_timeout_secs": 1, "header_timeout_secs": 5}, upstream=upstream().url)
    client = connect(front)
    assert client.get().status == 200
    assert ping_in_two_parts(client, 10) < 10
    client.read_to_end()
    assert [one.code for one in client.goaways] == [NO_ERROR, NO_ERROR], "in two steps"
    assert (totals(front, "timeouts_idle"), totals(front, "timeouts_header")) == (1, 0)


def test_idleness_begins_anew_with_each_request(
    appliance: StartAppliance, connect: Connect, upstream: StartUpstream
) -> None:
    """Also with one that the proxy answers itself, at once."""
    config = {"connection_idle_timeout_secs": 3, "sites": [{"hosts": ["a.example.org"], "upstreams": [upstream().url]}]}
    front = appliance(TIMEOUTS | config)
    client = connect(front, server_name="a.example.org")
    for _ in range(8):
        assert client.get(host="c.example.org").status == 421
        threading.Event().wait(0.5)
    assert not client.goaways


def test_a_client_that_asks_nothing_but_pings_in_two_parts_is_closed(
    appliance: StartAppliance, connect: Connect
) -> None:
    front = appliance(TIMEOUTS | {"header_timeout_secs": 1, "header_total_timeout_secs": 60})
    client = connect(front)
    assert ping_in_two_parts(client, 10) < 10
    client.read_to_end()
    assert [one.code for one in client.goaways] == [NO_ERROR]
    assert totals(front, "timeouts_header") == 1


def test_a_body_that_stops_is_answered_408_and_only_its_stream_ends(
    appliance: StartAppliance, connect: Connect, upstream: StartUpstream
) -> None:
    front = appliance(TIMEOUTS, upstream=upstream().url)
    client = connect(front)
    slow = client.open(method="POST", end_stream=False)
    client.write(slow, b"a")
    assert client.finish(slow).status == 408
    assert client.get().status == 200
    assert totals(front, "timeouts_body") == 1


@pytest.mark.parametrize("size", [10, 40_000, BIG], ids=["tiny", "small", "big"])
def test_a_window_that_stays_closed_times_out_and_only_its_stream_ends(
    appliance: StartAppliance, connect: Connect, upstream: StartUpstream, size: int
) -> None:
    go = threading.Event()
    go.set()
    front = appliance(TIMEOUTS, upstream=upstream(holding(go, bytes(size))).url)
    client = connect(front, settings={INITIAL_WINDOW_SIZE: 0})
    stream = client.open()
    client.held.add(stream)
    answer = client.finish(stream, 20)
    assert (answer.status, answer.ended, answer.reset) == (200, False, 8)
    wait_until(lambda: totals(front, "timeouts_write") == 1, "the hold to be counted")
    wait_until(lambda: totals(front, "requests_active") == 0, "its exchange to end")
    again = client.open()
    client.conn.increment_flow_control_window(BIG, again)
    client.flush()
    assert len(client.finish(again, 20).body) == size


def test_answers_of_the_proxy_itself_time_out_too(appliance: StartAppliance, connect: Connect) -> None:
    front = appliance(
        TIMEOUTS | {"sites": [{"hosts": ["*"], "routes": [{"path": "/x", "upstreams": ["http://127.0.0.1:9"]}]}]}
    )
    client = connect(front, settings={INITIAL_WINDOW_SIZE: 0})
    answer = client.finish(client.open("/nothing"))
    assert (answer.status, answer.ended, answer.reset) == (404, False, 8)


def test_a_slow_reader_that_goes_on_is_not_cut(
    appliance: StartAppliance, connect: Connect, upstream: StartUpstream
) -> None:
    go = threading.Event()
    go.set()
    front = appliance(TIMEOUTS, upstream=upstream(holding(go, bytes(40_000))).url)
    client = connect(front, settings={INITIAL_WINDOW_SIZE: 1000})
    stream = client.open()
    client.held.add(stream)
    for _ in range(15):
        threading.Event().wait(0.1)
        client.conn.increment_flow_control_window(1000, stream)
        client.flush()
        client.sock.settimeout(1)
        client.read()
    assert client.streams[stream].reset is None
    client.conn.increment_flow_control_window(100_000, stream)
    client.flush()
    assert len(client.finish(stream).body) == 40_000


# -- flow control


def test_a_stream_that_is_not_read_stalls_neither_its_siblings_nor_memory(
    appliance: StartAppliance, connect: Connect, upstream: StartUpstream
) -> None:
    sent = [0]

    def play(wire: Wire) -> None:
        while True:
            try:
                head = wire.read_head()
            except EOFError:
                return
            if b" /big " not in head:
                wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
                continue
            wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 500000000\r\n\r\n")
            wire.sock.settimeout(60)
            while True:
                wire.send(bytes(100_000))
                sent[0] += 100_000

    front = appliance(upstream=upstream(play).url)
    client = connect(front, settings={INITIAL_WINDOW_SIZE: 50_000})
    client.conn.increment_flow_control_window(10_000_000)
    client.flush()
    stuck = [client.open("/big") for _ in range(5)]
    client.held.update(stuck)
    client.wait(lambda: all(client.streams[one].body for one in stuck), "the first pieces")
    for _ in range(50):
        assert client.get("/small").status == 200
    settled = sent[0]
    for _ in range(50):
        assert client.get("/small").status == 200
    assert sent[0] - settled < 5_000_000, "the upstream is held back"
    assert sent[0] < 50_000_000, "what was taken from it fits the buffers of the kernel and ours"


def test_an_upload_that_the_upstream_does_not_take_stalls_neither_its_siblings_nor_memory(
    appliance: StartAppliance, connect: Connect, upstream: StartUpstream
) -> None:
    over = threading.Event()

    def play(wire: Wire) -> None:
        while True:
            try:
                head = wire.read_head()
            except EOFError:
                return
            if head.startswith(b"POST"):
                over.wait(60)
                return
            wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    front = appliance(upstream=upstream(play).url)
    client = connect(front)
    upload = client.open(method="POST", end_stream=False)
    pushed = 0
    quiet_since = time.monotonic()
    while time.monotonic() - quiet_since < 1 and pushed < 100_000_000:
        room = min(client.conn.local_flow_control_window(upload), 16_384)
        if room > 0:
            client.conn.send_data(upload, bytes(room))
            client.flush()
            pushed += room
            quiet_since = time.monotonic()
        else:
            client.sock.settimeout(0.2)
            with contextlib.suppress(TimeoutError):
                client.read()
    assert pushed < 50_000_000, "the client is held back"
    for _ in range(20):
        assert client.get().status == 200
    over.set()


# -- fairness and the budget


def test_a_greedy_client_with_a_hundred_streams_does_not_starve_another(
    appliance: StartAppliance, connect: Connect, upstream: StartUpstream
) -> None:
    served: list[str] = []
    step = threading.Semaphore(0)

    def play(wire: Wire) -> None:
        while True:
            try:
                path = wire.read_head().split(b" ")[1].decode()
            except EOFError:
                return
            served.append(path)
            assert step.acquire(timeout=30)
            wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    front = appliance({"max_upstream_connections": 2, "upstream_queue_timeout_secs": 60}, upstream=upstream(play).url)
    greedy = connect(front, source="127.0.0.2")
    streams = [greedy.open(f"/greedy/{number}") for number in range(100)]
    wait_until(lambda: totals(front, "upstream_queued") == 98, "the rest to wait")
    modest = connect(front, source="127.0.0.4")
    stream = modest.open("/modest")
    wait_until(lambda: totals(front, "upstream_queued") == 99, "the modest one to wait too")
    assert front.status()["totals"]["upstream_open"] == 2
    for _ in range(101):
        step.release()
    assert modest.finish(stream).status == 200
    assert served.index("/modest") <= 5, f"it had to wait for more than a round: {served[:20]}"
    for one in streams:
        assert greedy.finish(one, 30).status == 200
    assert totals(front, "upstream_open") <= 2


def test_status_and_metrics_show_connections_and_streams(
    appliance: StartAppliance, connect: Connect, upstream: StartUpstream
) -> None:
    go = threading.Event()
    front = appliance(upstream=upstream(holding(go)).url)
    client = connect(front)
    streams = [client.open() for _ in range(3)]
    wait_until(lambda: totals(front, "http2_streams_open") == 3, "the streams to be told")
    worker = front.status()["workers"][0]
    assert (worker["http2_connections"], worker["http2_streams"], worker["connections"]) == (1, 3, 1)
    metrics = front.health("/metrics")[1].decode()
    assert "reverse_proxy_http2_open_connections 1" in metrics
    assert "reverse_proxy_http2_open_streams 3" in metrics
    assert "reverse_proxy_http2_streams_total 3" in metrics
    go.set()
    for one in streams:
        assert client.finish(one).status == 200
    wait_until(lambda: totals(front, "http2_streams_open") == 0, "no stream to be open")
    client.close()
    wait_until(lambda: totals(front, "http2_open") == 0, "no connection to be open")


# -- the end


def test_a_drain_lets_streams_end_and_takes_no_request_in_vain(
    appliance: StartAppliance, connect: Connect, upstream: StartUpstream
) -> None:
    go = threading.Event()
    front = appliance(upstream=upstream(holding(go)).url)
    client, idle = connect(front), connect(front)
    stream = client.open("/under-way")
    wait_until(lambda: totals(front, "requests_active") == 1, "the request to be under way")
    assert front.process is not None
    front.process.send_signal(signal.SIGTERM)
    client.wait(lambda: client.goaways, "GOAWAY")
    assert int.from_bytes(client.goaways[0].payload[:4], "big") == 2**31 - 1, "the first step refuses nothing"
    client.wait(lambda: len(client.goaways) == 2, "the second GOAWAY")
    assert int.from_bytes(client.goaways[1].payload[:4], "big") == stream
    idle.read_to_end()
    assert [one.code for one in idle.goaways] == [NO_ERROR, NO_ERROR]
    go.set()
    answer = client.finish(stream)
    assert (answer.status, bytes(answer.body)) == (200, b"ok")
    client.read_to_end()
    assert front.process.wait(20) == 0
    assert "drain.cut" not in "\n".join(front.event_lines())


def test_a_client_that_answers_no_ping_is_told_the_end_all_the_same(
    appliance: StartAppliance, upstream: StartUpstream
) -> None:
    front = appliance(upstream=upstream().url)
    with front.connect(alpn=("h2",)) as wire:
        wire.send(PREFACE + settings())
        wait_until(lambda: totals(front, "http2_open") == 1, "the connection to be open")
        assert front.process is not None
        front.process.send_signal(signal.SIGTERM)
        goaways = [one for one in split_frames(wire.read_to_end()) if one.kind == GOAWAY]
    assert [int.from_bytes(one.payload[:4], "big") for one in goaways] == [2**31 - 1, 0]
    assert front.process.wait(20) == 0


def test_a_client_that_reads_the_end_and_stays_does_not_hold_the_drain(
    appliance: StartAppliance, connect: Connect, upstream: StartUpstream
) -> None:
    """What the proxy sent last is acknowledged after it was sent: that is no reason to linger twice."""
    front = appliance(upstream=upstream().url)
    client = connect(front)
    assert client.get().status == 200
    assert front.process is not None
    front.process.send_signal(signal.SIGTERM)
    client.read_to_end()
    ended_at = time.monotonic()
    assert front.process.wait(30) == 0
    assert time.monotonic() - ended_at < 1.8 * LINGER_SECS


def test_a_reload_sends_clients_to_the_new_configuration(
    appliance: StartAppliance, connect: Connect, upstream: StartUpstream
) -> None:
    go = threading.Event()
    old, new = upstream(holding(go, b"old")), upstream(answering(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nnew"))
    front = appliance(upstream=old.url)
    client = connect(front)
    stream = client.open()
    wait_until(lambda: totals(front, "requests_active") == 1, "the request to be under way")
    front.path.write_text(front.path.read_text().replace(old.url, new.url))
    done = cli("reload", "--config", str(front.path))
    assert done.returncode == 0, done.stderr
    client.wait(lambda: len(client.goaways) == 2, "both steps of GOAWAY")
    go.set()
    assert bytes(client.finish(stream).body) == b"old"
    client.read_to_end()
    again = connect(front)
    assert bytes(again.get().body) == b"new"


def test_a_worker_that_is_killed_frees_everything(
    appliance: StartAppliance, connect: Connect, upstream: StartUpstream
) -> None:
    go = threading.Event()
    front = appliance({"max_connections": 2}, upstream=upstream(holding(go)).url)
    client = connect(front)
    for _ in range(10):
        client.open()
    wait_until(lambda: totals(front, "http2_streams_open") == 10, "the streams to be open")
    (worker,) = front.workers
    os.kill(worker, signal.SIGKILL)
    client.read_to_end()
    wait_until(lambda: front.workers not in ((), (worker,)) and front.ready(), "the successor", 20)
    go.set()
    again = connect(front)
    assert again.get().status == 200
    assert totals(front, "connections_open") == 1


def test_an_idle_connection_gives_way_and_one_with_a_stream_does_not(
    appliance: StartAppliance, connect: Connect, upstream: StartUpstream
) -> None:
    go = threading.Event()
    front = appliance({"max_connections": 2, "eviction_grace_secs": 0.1}, upstream=upstream(holding(go)).url)
    go.set()
    idle = connect(front)
    assert idle.get().status == 200
    go.clear()
    busy = connect(front)
    stream = busy.open()
    wait_until(lambda: totals(front, "requests_active") == 1, "the request to be under way")
    third = connect(front)
    idle.read_to_end()
    assert [one.code for one in idle.goaways] == [NO_ERROR]
    go.set()
    assert third.get().status == 200
    assert busy.finish(stream).status == 200
    assert totals(front, "evicted_idle") == 1


@pytest.mark.parametrize("parts", [1, 2], ids=["begun", "ended"])
def test_the_longest_idle_gives_way_though_it_pings_in_two_parts(
    appliance: StartAppliance, connect: Connect, upstream: StartUpstream, parts: int
) -> None:
    front = appliance({"max_connections": 5, "eviction_grace_secs": 60}, upstream=upstream().url)
    older, younger = [connect(front) for _ in range(2)], [connect(front) for _ in range(2)]
    witness = connect(front)
    for client in older + younger:
        assert client.get().status == 200
    for part in (SPLIT_PING[:5], SPLIT_PING[5:])[:parts]:
        for client in older:
            client.send(part)
        assert witness.get().status == 200  # the worker has read the part too by then
    late = [connect(front) for _ in range(2)]
    for client in late:
        assert client.get().status == 200
    for client in older:
        client.read_to_end()
    for client in younger:
        assert client.get().status == 200
    assert totals(front, "evicted_idle") == 2


def test_memory_a_connection_is_bounded(appliance: StartAppliance, connect: Connect, upstream: StartUpstream) -> None:
    """A hundred streams whose clients read nothing: what is held is the codec's bound and no more."""
    go = threading.Event()
    go.set()
    front = appliance({"write_timeout_secs": 60}, upstream=upstream(holding(go, bytes(BIG))).url)
    (worker,) = front.workers
    client = connect(front, settings={INITIAL_WINDOW_SIZE: 0})
    before = resident_kb(worker)
    for _ in range(100):
        client.held.add(client.open())
    client.wait(lambda: sum(one.status == 200 for one in client.streams.values()) == 100, "all heads", 30)
    grown = resident_kb(worker) - before
    assert grown < 10 * 12_000, f"{grown} KB for one connection"


def resident_kb(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise AssertionError(f"no process {pid}")
