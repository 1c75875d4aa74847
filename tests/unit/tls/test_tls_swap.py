"""Other certificates for a listener that serves: new connections get them, sessions and open connections live on."""

from __future__ import annotations

import pickle
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from proxy.config.schema import UpstreamTls
from proxy.errors import ConfigError
from proxy.tls.contexts import ListenerTls, upstream_trust
from proxy.worker.generation import renewed_trust
from tests.unit.tls.pki import Authority, listener_tls, server, visit


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("minimum", ["1.2", "1.3"])
def test_sessions_outlive_a_swap(authority: Authority, version: ssl.TLSVersion, minimum: str) -> None:
    tls = listener_tls(authority.issue("a.example.org"), minimum=minimum)
    client = authority.client()
    client.maximum_version = client.minimum_version = version
    with server(tls) as (port, seen):
        if minimum == "1.3" and version is ssl.TLSVersion.TLSv1_2:
            with pytest.raises(ssl.SSLError):
                visit(port, client, "a.example.org")
            return
        session = visit(port, client, "a.example.org")
        tls.swap(listener_tls(authority.issue("a.example.org"), minimum=minimum))
        visit(port, client, "a.example.org", session)
    assert [one.reused for one in seen if not isinstance(one, OSError)] == [False, True]


def test_new_connections_get_the_new_certificate(authority: Authority) -> None:
    tls = listener_tls(authority.issue("a.example.org"))
    with server(tls) as (port, seen):
        visit(port, authority.client(), "a.example.org")
        tls.swap(listener_tls(authority.issue("b.example.org")))
        visit(port, authority.client(), "b.example.org")
        with pytest.raises(ssl.SSLCertVerificationError):
            visit(port, authority.client(), "a.example.org")
    first, second = (one for one in seen[:2] if not isinstance(one, OSError))
    assert first.covered(b"a.example.org")
    assert not first.covered(b"b.example.org")
    assert second.covered(b"b.example.org")
    assert tls.certificates[0].names == ("b.example.org",)


def test_a_connection_keeps_the_names_of_its_own_certificate(authority: Authority) -> None:
    tls = listener_tls(authority.issue("a.example.org"))
    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.settimeout(20)
    with ThreadPoolExecutor(1) as pool, theirs, tls.wrap(ours) as secured:
        tls.swap(listener_tls(authority.issue("b.example.org")))
        client = pool.submit(authority.client().wrap_socket, theirs, server_hostname="a.example.org")
        secured.do_handshake()
        covers = tls.certificate_of(secured).covers
        client.result(20).close()
    assert covers(b"a.example.org")
    assert not covers(b"b.example.org")


def test_certificates_travel_to_another_process(authority: Authority) -> None:
    source = listener_tls(authority.issue("a.example.org")).source
    tls = ListenerTls(pickle.loads(pickle.dumps(source)))
    with server(tls) as (port, _seen):
        visit(port, authority.client(), "a.example.org")


def test_trust_is_kept_where_the_file_is_the_same(authority: Authority, tmp_path: Path) -> None:
    options = UpstreamTls(ca=authority.ca_file)
    known = {options: upstream_trust(options)}
    assert renewed_trust({options: known[options].ca}, known) == known
    (tmp_path / "other").mkdir()
    other = Authority(tmp_path / "other")
    renewed = renewed_trust({options: Path(other.ca_file).read_bytes()}, known)
    assert renewed[options].context is not known[options].context
    with pytest.raises(ConfigError, match="found no certificate"):
        renewed_trust({options: b"nothing"}, known)
