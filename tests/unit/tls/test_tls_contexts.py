"""Real handshakes: the certificate a name gets, what is negotiated, resumption, verification of upstreams."""

from __future__ import annotations

import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from proxy.config.schema import UpstreamTls
from proxy.errors import ConfigError
from proxy.tls.contexts import ListenerTls, upstream_trust
from tests.unit.tls.pki import TIMEOUT_SECS, Authority, Served, listener_tls, server, visit


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def two_names(authority: Authority) -> ListenerTls:
    return listener_tls(
        authority.issue("first.example.org", "192.0.2.1"),
        authority.issue("second.example.org", "*.wild.example.org"),
    )


def s_client(port: int, *arguments: str | bytes) -> str:
    result = subprocess.run(
        ["openssl", "s_client", "-connect", f"127.0.0.1:{port}", *arguments],
        input=b"bye\n",
        capture_output=True,
        timeout=TIMEOUT_SECS,
    )
    return (result.stdout + result.stderr).decode("ascii", "replace")


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("first.example.org", True),
        ("FIRST.example.ORG", True),
        ("second.example.org", False),
        ("Second.Example.org", False),
        ("a.wild.example.org", False),
        ("a.b.wild.example.org", True),
        ("wild.example.org", True),
        ("unknown.example.com", True),
        ("xn--bcher-kva.example.org", True),
        ("x", True),
        (None, True),
    ],
)
def test_the_name_chooses_the_certificate(two_names: ListenerTls, name: str | None, first: bool) -> None:
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE
    with server(two_names) as (port, seen):
        visit(port, client, name)
    served = seen[0]
    assert isinstance(served, Served), served
    assert served.covered(b"first.example.org") is first
    assert served.covered(b"192.0.2.1") is first
    assert served.covered(b"second.example.org") is not first


@pytest.mark.parametrize("name", ["first.example.org", "second.example.org", "a.wild.example.org"])
def test_clients_accept_what_is_served(authority: Authority, two_names: ListenerTls, name: str) -> None:
    client = authority.client()
    client.set_alpn_protocols(["h2", "http/1.1"])
    with server(two_names) as (port, seen):
        visit(port, client, name)
    assert isinstance(seen[0], Served), seen
    assert (seen[0].version, seen[0].alpn) == ("TLSv1.3", "h2")


@pytest.mark.parametrize("name", [b"\xff.example.org", b"b\xc3\xbccher.example.org", b"a..b", b"."])
def test_a_name_outside_the_grammar_ends_its_own_handshake_at_most(
    two_names: ListenerTls, name: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    # CPython decodes the name before our callback runs, and hands a failure to the hook: the process that serves
    # must have set one, else each such client writes a traceback to stderr.
    unraisable: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: unraisable.append(found.exc_type))
    with server(two_names) as (port, seen):
        s_client(port, "-servername", name)
        s_client(port, "-servername", "second.example.org")
    assert len(seen) == 2
    if name.isascii():
        assert isinstance(seen[0], Served)
        assert seen[0].covered(b"first.example.org")
    else:
        assert isinstance(seen[0], ssl.SSLError)
    assert isinstance(seen[1], Served)
    assert unraisable == ([] if name.isascii() else [UnicodeDecodeError])


@pytest.mark.parametrize("name", ["first.example.org", "second.example.org"])
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_sessions_resume(authority: Authority, two_names: ListenerTls, name: str, version: ssl.TLSVersion) -> None:
    client = authority.client()
    client.minimum_version = client.maximum_version = version
    with server(two_names) as (port, seen):
        session = visit(port, client, name)
        visit(port, client, name, session)
    assert all(isinstance(served, Served) for served in seen), seen
    assert [served.reused for served in seen if isinstance(served, Served)] == [False, True]
    # The certificate on record is the right one without one having been sent.
    assert isinstance(seen[1], Served)
    assert seen[1].covered(name.encode())


@pytest.mark.parametrize("name", ["first.example.org", "second.example.org"])
def test_openssl_resumes_tls12(two_names: ListenerTls, name: str) -> None:
    with server(two_names) as (port, _):
        output = s_client(port, "-tls1_2", "-reconnect", "-servername", name)
    assert output.count("Reused, TLSv1.2") == 5, output


@pytest.mark.parametrize("name", ["first.example.org", "second.example.org"])
def test_openssl_resumes_tls13(two_names: ListenerTls, name: str, tmp_path: Path) -> None:
    session = str(tmp_path / "session.pem")
    with server(two_names) as (port, _):
        first = s_client(port, "-tls1_3", "-servername", name, "-sess_out", session, "-ign_eof")
        second = s_client(port, "-tls1_3", "-servername", name, "-sess_in", session, "-ign_eof")
    assert "New, TLSv1.3" in first, first
    assert "Reused, TLSv1.3" in second, second


def test_a_session_outlives_the_fork(authority: Authority, two_names: ListenerTls) -> None:
    """Two server threads stand for two workers: neither has state but the context."""
    client = authority.client()
    with server(two_names) as (port, _):
        session = visit(port, client, "second.example.org")
    with server(two_names) as (port, seen):
        visit(port, client, "second.example.org", session)
    assert isinstance(seen[0], Served)
    assert seen[0].reused


@pytest.mark.parametrize("name", ["first.example.org", "second.example.org", "unknown.example.org"])
@pytest.mark.parametrize(("minimum", "accepted"), [("1.2", True), ("1.3", False)])
def test_minimum_version(authority: Authority, name: str, minimum: str, accepted: bool) -> None:
    tls = listener_tls(authority.issue("first.example.org"), authority.issue("second.example.org"), minimum=minimum)
    with server(tls) as (port, seen):
        output = s_client(port, "-tls1_2", "-servername", name)
        s_client(port, "-tls1_3", "-servername", name)
    assert isinstance(seen[0], Served) is accepted, output
    assert isinstance(seen[1], Served)


@pytest.mark.parametrize("arguments", [("-tls1_1",), ("-tls1_2", "-cipher", "AES128-SHA:@SECLEVEL=0")])
@pytest.mark.parametrize("name", ["first.example.org", "second.example.org"])
def test_old_protocols_and_ciphers_are_refused(two_names: ListenerTls, name: str, arguments: tuple[str, ...]) -> None:
    with server(two_names) as (port, seen):
        output = s_client(port, "-servername", name, *arguments)
    assert [type(served) for served in seen] == [ssl.SSLError], output


def test_a_rsa_certificate_beside_an_ec_one(authority: Authority) -> None:
    leaf, key = authority.leaf("rsa.example.org", key=rsa.generate_private_key(65537, 2048))
    tls = listener_tls(authority.issue("ec.example.org"), authority.write(leaf, authority.issuer, key=key))
    client = authority.client()
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    with server(tls) as (port, seen):
        for name in ("ec.example.org", "rsa.example.org"):
            visit(port, client, name)
    assert all(isinstance(served, Served) for served in seen), seen


def test_info_and_warnings(authority: Authority) -> None:
    first = authority.issue("first.example.org", "192.0.2.1", "*.first.example.org")
    tls = listener_tls(
        first,
        authority.issue("first.example.org"),
        site_hosts=("first.example.org", "a.first.example.org", "b.example.org"),
    )
    assert not tls.self_signed
    assert tls.certificates[0].names == ("first.example.org", "*.first.example.org", "192.0.2.1")
    assert tls.certificates[0].path == first["chain"]
    assert tls.certificates[0].not_after.tzinfo is not None
    never_served, uncovered = tls.warnings
    assert "is never served" in never_served
    assert "no certificate covers b.example.org:" in uncovered


def test_any_host_needs_no_cover(authority: Authority) -> None:
    assert listener_tls(authority.issue("first.example.org"), site_hosts=("*", "b.example.org")).warnings == ()


def test_a_weak_key_is_the_operators_to_mend(authority: Authority) -> None:
    leaf, key = authority.leaf("first.example.org", key=rsa.generate_private_key(65537, 1024))
    with pytest.raises(ConfigError, match=r"not accepted by OpenSSL \(EE_KEY_TOO_SMALL\)"):
        listener_tls(authority.write(leaf, authority.issuer, key=key))


def test_upstream_verifies_chain_and_name(authority: Authority) -> None:
    tls = listener_tls(authority.issue("origin.example.org", "127.0.0.1"))
    trusting = upstream_trust(UpstreamTls(ca=authority.ca_file)).context
    with server(tls) as (port, seen):
        visit(port, trusting, "origin.example.org")
        visit(port, trusting, "127.0.0.1")
        with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
            visit(port, trusting, "other.example.org")
        with pytest.raises(ssl.SSLCertVerificationError, match=r"self-signed|local issuer"):
            visit(port, upstream_trust(UpstreamTls()).context, "origin.example.org")
    assert [isinstance(served, Served) for served in seen[:2]] == [True, True]
    assert isinstance(seen[0], Served)
    assert seen[0].alpn == "http/1.1"


def test_upstream_tells_a_cut_stream_from_a_closed_one(authority: Authority) -> None:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate = authority.issue("origin.example.org")
    context.load_cert_chain(certificate["chain"], certificate["key"])
    origin = context.wrap_bio(incoming, outgoing, server_side=True)
    client = upstream_trust(UpstreamTls(ca=authority.ca_file)).context.wrap_bio(
        outgoing, incoming, server_hostname="origin.example.org"
    )
    for end in (client, origin, client, origin):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
    origin.write(b"half")
    outgoing.write_eof()
    assert client.read(100) == b"half"
    # Early 3.11 raises the plain kind, later ones SSLEOFError, which is one.
    with pytest.raises(ssl.SSLError, match=r"(?i)unexpected.eof|EOF occurred"):
        client.read(100)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), (b"", "found no certificate"), (b"garbage", "found no certificate")],
)
def test_upstream_ca_must_be_one(tmp_path: Path, content: bytes | None, message: str) -> None:
    ca = tmp_path / "ca.pem"
    if content is not None:
        ca.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        upstream_trust(UpstreamTls(ca=str(ca)))
    assert str(ca) in str(caught.value)


def test_upstream_without_a_trust_store_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))
    with pytest.raises(ConfigError, match="install ca-certificates"):
        upstream_trust(UpstreamTls())
