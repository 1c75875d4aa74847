"""Networks and access lists: the most specific wins."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.limit.networks import Access, Networks, packed, prefix_of

NETWORKS = st.one_of(
    st.tuples(st.ip_addresses(v=4), st.integers(0, 32)), st.tuples(st.ip_addresses(v=6), st.integers(0, 128))
).map(lambda pair: ipaddress.ip_network(f"{pair[0]}/{pair[1]}", strict=False))


@given(st.lists(NETWORKS, max_size=20), st.ip_addresses(), st.integers(0, 20))
def test_the_longest_is_what_the_standard_library_finds(
    networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network],
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
    near: int,
) -> None:
    if networks and near < len(networks):
        address = networks[near][0]  # random addresses are hardly ever in any
    data = packed(str(address).encode())
    mapped = getattr(address, "ipv4_mapped", None)
    wanted = max((one.prefixlen for one in networks if (mapped or address) in one), default=-1)
    assert Networks(map(str, networks)).longest(data) == wanted


@pytest.mark.parametrize("text", [b"-", b"", b"localhost", b"1.2.3", b"1.2.3.4.5", b"::g", b"\xff"])
def test_what_is_no_address_is_in_no_network(text: bytes) -> None:
    assert packed(text) == b""
    assert not Access(["0.0.0.0/0", "::/0"], []).denies(text)
    assert prefix_of(text, 32, 64) == text


def test_what_an_address_counts_as() -> None:
    assert prefix_of(b"192.0.2.77", 24, 64) == packed(b"192.0.2.0")
    assert prefix_of(b"192.0.2.77", 32, 64) == packed(b"192.0.2.77")
    assert prefix_of(b"2001:db8:1:2:3:4:5:6", 32, 64) == packed(b"2001:db8:1:2::")
    assert prefix_of(b"::ffff:192.0.2.77", 32, 64) == packed(b"192.0.2.77")
    assert prefix_of(b"192.0.2.77", 0, 0) == bytes(4)


def test_the_most_specific_decides() -> None:
    access = Access(["192.0.2.0/24", "198.51.100.7/32"], ["192.0.2.7/32", "198.51.100.0/24"])
    assert access.denies(b"192.0.2.8")
    assert not access.denies(b"192.0.2.7")
    assert access.denies(b"198.51.100.7")
    assert not access.denies(b"198.51.100.8")
    assert not access.denies(b"203.0.113.1")


def test_on_a_tie_allow_wins() -> None:
    assert not Access(["192.0.2.7/32"], ["192.0.2.7/32"]).denies(b"192.0.2.7")


def test_only_some_may_come() -> None:
    access = Access(["0.0.0.0/0", "::/0"], ["2001:db8::/32"])
    assert access.denies(b"192.0.2.1")
    assert access.denies(b"2001:db9::1")
    assert not access.denies(b"2001:db8::1")
