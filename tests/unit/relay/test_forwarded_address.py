"""The client's address as balancers write it, so that nobody passes a deny list or a rate limit by a spelling."""

from __future__ import annotations

import pytest

from proxy.relay.forward import hop_address


@pytest.mark.parametrize(
    ("element", "address"),
    [
        (b"203.0.113.5", b"203.0.113.5"),
        (b"203.0.113.5:4711", b"203.0.113.5"),
        (b'"203.0.113.5"', b"203.0.113.5"),
        (b"2001:db8::1", b"2001:db8::1"),
        (b"2001:0DB8:0::1", b"2001:db8::1"),
        (b"[2001:db8::1]", b"2001:db8::1"),
        (b"[2001:db8::1]:4711", b"2001:db8::1"),
        (b'"[2001:db8::1]:4711"', b"2001:db8::1"),
        (b"fe80::1%eth0", b"fe80::1"),
        (b"[fe80::1%25eth0]:1", b"fe80::1"),
        (b"::ffff:203.0.113.5", b"203.0.113.5"),
        (b"[::ffff:203.0.113.5]:80", b"203.0.113.5"),
        (b"unknown", b""),
        (b"_hidden", b""),
        (b"....", b""),
        (b"dead:beef", b""),
        (b"999.1.1.1", b""),
        (b"203.0.113.5:port", b""),
        (b"", b""),
    ],
)
def test_one_address_is_one_address(element: bytes, address: bytes) -> None:
    assert hop_address(element) == address
