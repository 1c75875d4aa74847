"""Passive health of a backend, and how one of a group is chosen: no sockets, and the clock is an argument."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from proxy.config.upstream_address import parse_upstream
from proxy.upstream.backend import Backend
from proxy.upstream.pool import UpstreamGroup


def backend(url: str = "http://192.0.2.1:80", max_fails: int = 3) -> Backend:
    return Backend(parse_upstream(url), max_fails=max_fails, fail_timeout_secs=10, tls=None, server_name=None)


@dataclass
class Options:
    upstreams: tuple[str, ...]
    balance: str = "round_robin"
    max_fails: int = 3
    fail_timeout_secs: float = 10.0
    upstream_connect_timeout_secs: float = 1.0
    write_timeout_secs: float = 1.0
    upstream_protocol: str = "http/1.1"


def group(count: int, balance: str = "round_robin") -> UpstreamGroup:
    return UpstreamGroup(Options(tuple(f"http://192.0.2.{n}:80" for n in range(1, count + 1)), balance), None, None)


def test_failures_in_a_row_eject() -> None:
    one = backend()
    assert [one.failed(now) for now in (0, 1, 2)] == [False, False, True]
    assert one.ejected_until == 12


def test_a_success_forgets_the_failures() -> None:
    one = backend()
    one.failed(0)
    one.failed(1)
    one.succeeded()
    assert [one.failed(now) for now in (2, 3, 4)] == [False, False, True]


def test_old_failures_are_forgotten() -> None:
    one = backend()
    one.failed(0)
    one.failed(1)
    assert [one.failed(now) for now in (12, 13, 14)] == [False, False, True]


def test_after_its_time_one_failure_ejects_again_and_one_success_clears() -> None:
    one = backend()
    for now in (0, 1, 2):
        one.failed(now)
    assert one.failed(20)
    assert one.ejected_until == 30
    one.succeeded()
    assert one.ejected_until == 0
    assert not one.failed(31)


def test_addresses_of_a_name_are_taken_in_turn() -> None:
    one = backend("http://git.example.org:3000")
    one.set_addresses(["192.0.2.1", "192.0.2.2"])

    def take() -> str:
        endpoint = one.next_endpoint()
        assert endpoint is not None
        return str(endpoint.address[0])

    taken = [take() for _ in range(4)]
    assert sorted(taken[:2]) == ["192.0.2.1", "192.0.2.2"]
    assert taken[:2] == taken[2:]
    one.set_addresses(["192.0.2.3"])
    assert [take(), take()] == ["192.0.2.3"] * 2


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("http://git.example.org:80", b"git.example.org"),
        ("http://git.example.org:3000", b"git.example.org:3000"),
        ("https://git.example.org:443", b"git.example.org"),
        ("https://git.example.org:80", b"git.example.org:80"),
        ("http://[2001:db8::1]:8080", b"[2001:db8::1]:8080"),
        ("unix:/run/up.sock", b"localhost"),
    ],
)
def test_the_host_of_a_backend(url: str, host: bytes) -> None:
    assert backend(url).host_header == host


def test_round_robin_leaves_out_what_is_ejected_or_was_tried() -> None:
    some = group(3)
    first, second, third = some.backends
    assert [some.choose(()) for _ in range(4)] == [first, second, third, first]
    second.ejected_until = float("inf")
    assert some.choose(()) is third
    assert some.choose((first,)) is third
    assert some.choose((first, third)) is None


def test_least_connections_prefers_the_fewest_and_takes_equals_in_turn() -> None:
    some = group(3, "least_connections")
    first, second, third = some.backends
    first.active, second.active, third.active = 2, 1, 1
    assert [some.choose(()) for _ in range(3)] == [second, third, second]
    second.ejected_until = third.ejected_until = float("inf")
    assert some.choose(()) is first


def test_a_lone_backend_is_never_left_out() -> None:
    some = group(1)
    (only,) = some.backends
    only.ejected_until = float("inf")
    assert some.choose(()) is only
    assert some.choose((only,)) is None
