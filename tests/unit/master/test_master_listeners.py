"""Listening sockets with real ports: the probe, one socket a slot, and what an operator reads when it fails."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from proxy.config.address import Address
from proxy.config.load import load_mapping
from proxy.errors import StartError
from proxy.master import listeners, port_owner
from proxy.master.listeners import bind, bind_exclusive, bound_address, plan_listeners, probe

ANY_PORT = Address("127.0.0.1", 0, socket.AF_INET)
SITE = {"hosts": ["*"], "upstreams": ["http://127.0.0.1:3000"]}


def test_each_slot_has_its_own_listening_socket_on_one_port() -> None:
    sockets = bind(ANY_PORT, 3)
    try:
        assert len({sock.fileno() for sock in sockets}) == 3
        assert len({sock.getsockname()[1] for sock in sockets}) == 1
        assert all(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) for sock in sockets)
        assert not any(sock.getblocking() for sock in sockets)
        assert str(bound_address(sockets[0])) == f"127.0.0.1:{sockets[0].getsockname()[1]}"
    finally:
        for sock in sockets:
            sock.close()


def test_the_probe_sees_an_owner_that_would_share_the_port() -> None:
    sockets = bind(ANY_PORT, 1)
    address = bound_address(sockets[0])
    with sockets[0], pytest.raises(StartError) as caught:
        probe([address])
    assert f"port {address.port} is in use by pid {os.getpid()} (" in str(caught.value)


def test_the_probe_sees_an_owner_on_every_address() -> None:
    wildcard = bind_exclusive(Address("0.0.0.0", 0, socket.AF_INET))
    with wildcard, pytest.raises(StartError, match=f"pid {os.getpid()}"):
        probe([Address("127.0.0.1", wildcard.getsockname()[1], socket.AF_INET)])


def test_a_free_port_passes_the_probe_and_stays_free() -> None:
    sock = bind_exclusive(ANY_PORT)
    address = bound_address(sock)
    sock.close()
    probe([address])
    bind_exclusive(address).close()


def test_connections_of_the_instance_before_do_not_block_a_restart() -> None:
    sock = bind_exclusive(ANY_PORT)
    address = bound_address(sock)
    with socket.create_connection((address.host, address.port)) as client:
        sock.setblocking(True)
        served, _ = sock.accept()
        served.close()  # the server closes first: its side stays in TIME_WAIT
        assert client.recv(1) == b""
    sock.close()
    probe([address])


def test_a_foreign_address_is_named() -> None:
    with pytest.raises(StartError, match=r"cannot listen on 192\.0\.2\.1:9: this host does not have that address"):
        probe([Address("192.0.2.1", 9, socket.AF_INET)])


def test_a_privileged_port_comes_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forbidden(socket.socket):
        def bind(self, address: object) -> None:
            raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket, "socket", Forbidden)
    with pytest.raises(StartError, match=r"CAP_NET_BIND_SERVICE.*ip_unprivileged_port_start.*higher port"):
        probe([Address("127.0.0.1", 80, socket.AF_INET)])


def test_ipv6_listeners_take_ipv6_only() -> None:
    if not listeners.ipv6_available():
        pytest.skip("this host has no IPv6")
    sock = bind_exclusive(Address("::", 0, socket.AF_INET6))
    with sock, bind_exclusive(Address("0.0.0.0", sock.getsockname()[1], socket.AF_INET)):
        assert sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY) == 1


def test_without_ipv6_only_the_default_addresses_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "ipv6_available", lambda: False)
    default = plan_listeners(load_mapping({"sites": [SITE]}, source="test"))
    assert [str(address) for address in default.addresses()] == ["0.0.0.0:443", "0.0.0.0:80", "127.0.0.1:9900"]
    assert [text.split()[0] for text in default.skipped] == ["[::]:443", "[::]:80"]
    named = plan_listeners(load_mapping({"sites": [SITE], "listeners": [{"address": "[::]:443"}]}, source="test"))
    assert str(named.https[0].address) == "[::]:443"


def test_what_is_off_is_not_listened_on() -> None:
    data = {"sites": [SITE], "redirect": {"enabled": False}, "health": {"enabled": False}}
    plan = plan_listeners(load_mapping(data, source="test"))
    assert (plan.redirect, plan.health) == ((), None)


def test_an_owner_that_is_gone_is_said_to_be_unknown() -> None:
    sock = bind_exclusive(ANY_PORT)
    port = sock.getsockname()[1]
    sock.close()
    assert "does not show" in port_owner.describe_owner(port)


def test_an_owner_of_another_user_is_named_by_uid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_owner, "_owners", lambda _inodes: [])
    sock = bind_exclusive(ANY_PORT)
    with sock:
        assert f"uid {os.geteuid()}" in port_owner.describe_owner(sock.getsockname()[1])


def test_no_terminal_escape_comes_out_of_a_command_line(tmp_path: Path) -> None:
    process = os.posix_spawn("/bin/sh", ["\x1b]0;evil\x07", "-c", "read line"], {}, setsigdef=[])
    try:
        shown = port_owner.command_of(process)
        assert "\x1b" not in shown
        assert "\x07" not in shown
    finally:
        os.kill(process, 9)
        os.waitpid(process, 0)


def test_a_fault_of_an_address_knows_its_key() -> None:
    addresses = [{"address": "127.0.0.1:9443"}, {"address": "192.0.2.1:9"}]
    settings = load_mapping({"listeners": addresses, "redirect": {"enabled": False}, "sites": [SITE]}, source="test")
    plan = plan_listeners(settings)
    with pytest.raises(StartError, match="this host does not have that address") as caught:
        probe([Address("192.0.2.1", 9, socket.AF_INET)], plan.keys)
    assert caught.value.key == ("listeners", 1, "address")
    assert plan.health not in plan.keys, "a default stands nowhere"
