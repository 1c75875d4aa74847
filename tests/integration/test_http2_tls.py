"""TLS under HTTP/2 (RFC 9113 section 9.2): suites, renegotiation and compression of TLS 1.2; sessions with ALPN."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import ssl
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.harness import Wire
from tests.harness.http2_wire import Http2Wire
from tests.harness.stage import Stage, open_stage
from tests.unit.tls.pki import Authority

ECDSA, RSA = "ecdsa.example.org", "rsa.example.org"
VERSIONS = [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3]
SETTINGS_FRAME = b"\x04\x00\x00\x00\x00\x00"
REQUEST = b"GET / HTTP/1.1\r\nHost: %b\r\nConnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def theatre(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    authority = Authority(tmp_path_factory.mktemp("pki"))
    leaf, key = authority.leaf(RSA, key=rsa.generate_private_key(public_exponent=65537, key_size=2048))
    certificates = [authority.issue(ECDSA), authority.write(leaf, authority.issuer, key=key)]

    def configure(urls: Sequence[str]) -> dict[str, Any]:
        return {
            "workers": 2,
            "listeners": [{"address": "127.0.0.1:0", "certificates": certificates}],
            "sites": [{"hosts": [ECDSA, RSA], "upstreams": [urls[0]]}],
        }

    with open_stage(configure) as stage:
        yield stage


def client_context(version: ssl.TLSVersion, ciphers: str | None = None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = context.maximum_version = version
    if ciphers is not None:
        context.set_ciphers(ciphers)
    return context


def shake(stage: Stage, context: ssl.SSLContext, host: str, session: ssl.SSLSession | None = None) -> ssl.SSLSocket:
    """Raises ssl.SSLError when there is nothing to agree on."""
    raw = socket.create_connection(("127.0.0.1", stage.appliance.port), 10)
    try:
        return context.wrap_socket(raw, server_hostname=host, session=session)
    except BaseException:
        with contextlib.suppress(OSError):
            raw.close()
        raise


# -- TLS 1.2 (section 9.2)

SUITES = {
    "ECDHE-ECDSA-AES128-GCM-SHA256": ECDSA,
    "ECDHE-ECDSA-AES256-GCM-SHA384": ECDSA,
    "ECDHE-ECDSA-CHACHA20-POLY1305": ECDSA,
    "ECDHE-RSA-AES128-GCM-SHA256": RSA,  # section 9.2.2: a server must have it
    "ECDHE-RSA-AES256-GCM-SHA384": RSA,
    "ECDHE-RSA-CHACHA20-POLY1305": RSA,
}


@pytest.mark.parametrize("suite", SUITES)
def test_9_2_2_http2_over_suites_of_tls_1_2_that_it_allows(stage: Stage, suite: str) -> None:
    host = SUITES[suite]
    context = client_context(ssl.TLSVersion.TLSv1_2, suite)
    context.set_alpn_protocols(["h2", "http/1.1"])
    with contextlib.closing(Http2Wire(Wire(shake(stage, context, host)))) as client:
        agreed = client.sock.cipher()
        assert agreed is not None
        assert (agreed[0], client.sock.version(), client.sock.selected_alpn_protocol()) == (suite, "TLSv1.2", "h2")
        assert client.sock.compression() is None  # section 9.2.1
        assert client.get(host=host).status == 200


# Appendix A has them: no forward secrecy, or no AEAD.
FORBIDDEN = [
    *("AES128-SHA", "AES256-SHA256", "AES128-GCM-SHA256", "AES256-GCM-SHA384"),
    *("ECDHE-RSA-AES128-SHA", "ECDHE-RSA-AES128-SHA256", "ECDHE-RSA-AES256-SHA384"),
    *("ECDHE-ECDSA-AES128-SHA", "ECDHE-ECDSA-AES256-SHA384", "DHE-RSA-AES128-SHA256"),
]


@pytest.mark.parametrize("protocols", [["h2"], ["h2", "http/1.1"]])
@pytest.mark.parametrize("suite", FORBIDDEN)
def test_9_2_2_suites_that_http2_forbids_are_never_agreed_on(stage: Stage, suite: str, protocols: list[str]) -> None:
    """There is no connection then, so none to be ended with INADEQUATE_SECURITY."""
    context = client_context(ssl.TLSVersion.TLSv1_2, f"{suite}:@SECLEVEL=0")
    context.set_alpn_protocols(protocols)
    for host in (ECDSA, RSA):
        with pytest.raises(ssl.SSLError) as refused:
            shake(stage, context, host)
        assert refused.value.reason == "SSLV3_ALERT_HANDSHAKE_FAILURE"


def test_9_2_2_a_forbidden_suite_first_is_passed_over(stage: Stage) -> None:
    context = client_context(ssl.TLSVersion.TLSv1_2, "AES128-SHA:ECDHE-RSA-AES128-SHA:ECDHE-RSA-AES128-GCM-SHA256")
    context.set_alpn_protocols(["h2"])
    with shake(stage, context, RSA) as sock:
        agreed = sock.cipher()
        assert agreed is not None
        assert (agreed[0], sock.selected_alpn_protocol()) == ("ECDHE-RSA-AES128-GCM-SHA256", "h2")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1])
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_9_2_older_versions_are_refused(stage: Stage, version: ssl.TLSVersion) -> None:
    context = client_context(version, "ALL:@SECLEVEL=0")
    context.set_alpn_protocols(["h2"])
    with pytest.raises(ssl.SSLError):
        shake(stage, context, RSA)


def test_9_2_1_renegotiation_is_refused(stage: Stage) -> None:
    command = ["openssl", "s_client", "-connect", f"127.0.0.1:{stage.appliance.port}", "-servername", RSA]
    with subprocess.Popen(
        [*command, "-tls1_2", "-alpn", "h2"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as asking:
        assert asking.stdin is not None
        assert asking.stdout is not None
        assert asking.stderr is not None
        shown = b""
        # Our SETTINGS would be no part of a handshake either: they come first.
        while SETTINGS_FRAME not in shown and (more := os.read(asking.stdout.fileno(), 65_536)):
            shown += more
        assert b"ALPN protocol: h2" in shown
        asking.stdin.write(b"R\n")
        asking.stdin.flush()
        complaint = asking.stderr.read()
        assert asking.wait(30) != 0
    assert b"RENEGOTIATING" in complaint
    assert b"no renegotiation" in complaint


# -- sessions and ALPN


class Visit(NamedTuple):
    """What a connection was."""

    resumed: bool
    alpn: str | None
    status: int
    session: ssl.SSLSession | None


def visit(stage: Stage, context: ssl.SSLContext, offer: tuple[str, ...], session: ssl.SSLSession | None) -> Visit:
    """One request over a connection that offers ``offer``."""
    if offer:
        context.set_alpn_protocols(list(offer))
    sock = shake(stage, context, ECDSA, session)
    alpn = sock.selected_alpn_protocol()
    with Wire(sock) as wire:
        # A ticket of TLS 1.3 is read along with what is read first.
        if alpn == "h2":
            status = Http2Wire(wire).get(host=ECDSA).status
        else:
            status = wire.request(REQUEST % ECDSA.encode()).status
        return Visit(bool(sock.session_reused), alpn, status, sock.session)


OFFERS: list[tuple[str, ...]] = [("h2", "http/1.1"), ("http/1.1",), ("h2",)]


@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.name)
@pytest.mark.parametrize(("first", "second"), list(itertools.product(OFFERS, OFFERS)))
def test_a_session_resumes_whatever_protocol_is_agreed_on(
    stage: Stage, version: ssl.TLSVersion, first: tuple[str, ...], second: tuple[str, ...]
) -> None:
    """RFC 7301 section 3.1: ALPN is agreed on anew in each connection, a resumed session keeps nothing of it."""
    context = client_context(version)
    before = visit(stage, context, first, None)
    assert (before.resumed, before.alpn, before.status) == (False, first[0], 200)
    for _ in range(6):  # both workers have been met
        after = visit(stage, context, second, before.session)
        assert (after.resumed, after.alpn, after.status) == (True, second[0], 200)


@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.name)
def test_a_session_without_alpn_resumes_with_http2(stage: Stage, version: ssl.TLSVersion) -> None:
    context = client_context(version)
    before = visit(stage, context, (), None)
    assert (before.resumed, before.alpn, before.status) == (False, None, 200)
    after = visit(stage, context, ("h2",), before.session)
    assert (after.resumed, after.alpn, after.status) == (True, "h2", 200)


def test_openssl_resumes_http2(stage: Stage, tmp_path: Path) -> None:
    """A client other than Python's, with the preface of HTTP/2 behind the handshake."""
    ticket = str(tmp_path / "ticket")
    command = ["openssl", "s_client", "-connect", f"127.0.0.1:{stage.appliance.port}", "-servername", ECDSA]

    def told(*options: str) -> str:
        preface = (
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)) + bytes((0, 0, 8, 7)) + bytes(13)
        )
        return subprocess.run(
            [*command, "-tls1_3", "-alpn", "h2", "-ign_eof", *options],
            input=preface,
            capture_output=True,
            timeout=30,
            check=False,
        ).stdout.decode("latin-1")

    first = told("-sess_out", ticket)
    assert "\nNew, TLSv1.3" in first
    assert "ALPN protocol: h2" in first
    again = told("-sess_in", ticket)
    assert "\nReused, TLSv1.3" in again
    assert "ALPN protocol: h2" in again
