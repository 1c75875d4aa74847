"""TLS contexts: one base context a minimum version, certificates swapped in by server name; and the client side.

Session tickets are sealed with keys of the context that a handshake began with, whatever is swapped in later. So the
base contexts are made once, before the first fork, and kept for ever: resumption then works across workers and across
a reload of certificates. OpenSSL likewise keeps the protocol bounds and options of the first context, but takes ciphers
and ALPN from the one swapped in; all server contexts are therefore made alike.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import socket
import ssl
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from weakref import WeakKeyDictionary

from proxy.config.place import collected, faults_at, raise_together
from proxy.config.refusal import RefusedError
from proxy.config.schema import Listener, UpstreamTls
from proxy.errors import ConfigError, OperatorError
from proxy.tls.certificates import CertificateInfo, CertificateNames, LoadedCertificate, load_certificate
from proxy.tls.selfsigned import self_signed_certificate

TICKETS_A_HANDSHAKE: Final = 1
UPSTREAM_PROTOCOLS: Final = ["http/1.1"]

# TLS 1.2: forward secrecy and AEAD only. TLS 1.3 has nothing else.
SERVER_CIPHERS: Final = "@SECLEVEL=2:ECDHE+AESGCM:ECDHE+CHACHA20"

_VERSIONS: Final[Mapping[str, ssl.TLSVersion]] = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
_MAX_HOSTS_IN_WARNING: Final = 5
_WANTED_CA: Final = "a readable bundle of CAs in PEM"


@dataclass(frozen=True, slots=True)
class ListenerCertificates:
    """What a listener serves, read from files and checked: no contexts yet, so it can be handed to another process."""

    label: str
    minimum: str
    """The listener's min_tls_version."""
    protocols: tuple[str, ...]
    """What it offers by ALPN, in order of preference."""
    loaded: tuple[LoadedCertificate, ...]
    warnings: tuple[str, ...]
    """For the operator, one line each."""
    self_signed: bool


class _Table:
    """Contexts by server name, the first one for clients that name no server or an unknown one."""

    __slots__ = ("default", "exact", "names", "wildcards")

    def __init__(self, certificates: ListenerCertificates) -> None:
        minimum = _VERSIONS[certificates.minimum]
        self.exact: Final[dict[str, ssl.SSLContext]] = {}
        self.wildcards: Final[dict[str, ssl.SSLContext]] = {}
        self.names: Final[dict[ssl.SSLContext, CertificateNames]] = {}
        for certificate in certificates.loaded:
            context = _server_context(certificate, minimum, certificates.protocols, certificates.label)
            self.names[context] = certificate.names
            for name in certificate.names.exact:
                self.exact.setdefault(name.decode("ascii"), context)
            for parent in certificate.names.wildcards:
                self.wildcards.setdefault(parent.decode("ascii"), context)
        self.default: Final = next(iter(self.names))


class ListenerTls:
    """The TLS side of one listener, shared by all its connections. ``swap`` gives it other certificates.

    Constructing it raises ``ConfigError`` for a certificate that OpenSSL does not accept.
    """

    __slots__ = ("_certificates", "_names", "_table")

    def __init__(self, certificates: ListenerCertificates) -> None:
        self._certificates = certificates
        self._table = _Table(certificates)
        # Handshakes and connections in flight keep the context that they have got, and with it the names.
        self._names: Final[WeakKeyDictionary[ssl.SSLContext, CertificateNames]] = WeakKeyDictionary(self._table.names)

    @property
    def source(self) -> ListenerCertificates:
        """What it was made of."""
        return self._certificates

    @property
    def self_signed(self) -> bool:
        """Whether it serves a certificate made on the spot."""
        return self._certificates.self_signed

    @property
    def certificates(self) -> tuple[CertificateInfo, ...]:
        """What status shows of the certificates."""
        return tuple(certificate.info for certificate in self._certificates.loaded)

    @property
    def warnings(self) -> tuple[str, ...]:
        """For the operator, one line each."""
        return self._certificates.warnings

    def wrap(self, sock: socket.socket) -> ssl.SSLSocket:
        """Wrap an accepted socket, its handshake to be done. Raises OSError."""
        base = base_context(self._certificates.minimum)
        secured = base.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        secured.certificates = self._table  # type: ignore[attr-defined]  # for _choose
        return secured

    def swap(self, other: ListenerTls) -> None:
        """Serve what ``other`` serves, from the next connection on."""
        self._certificates, self._table = other._certificates, other._table
        self._names.update(other._table.names)

    def certificate_of(self, sock: ssl.SSLSocket) -> CertificateNames:
        """Return the names of the certificate that ``sock`` (of this listener, handshake done) was served with."""
        return self._names[sock.context]


def base_context(minimum: str) -> ssl.SSLContext:
    """The context with which every handshake of the listeners with this min_tls_version begins.

    Session tickets are sealed with its keys whatever is swapped in, so it is made once, before the first fork
    (``make_base_contexts``), and kept for ever.
    """
    return _BASES[minimum]


def make_base_contexts() -> None:
    """Make the base contexts; in the master, before it forks (idempotent)."""
    for minimum, version in _VERSIONS.items():
        if minimum not in _BASES:
            _BASES[minimum] = context = _bare_server_context(version)
            context.sni_callback = _choose


_BASES: Final[dict[str, ssl.SSLContext]] = {}


def _choose(sslobj: ssl.SSLObject, server_name: str | None, _base: ssl.SSLContext) -> None:
    # Runs inside the handshake, without a server name too; an exception here would be an alert to the client and a
    # traceback on stderr.
    table: _Table = sslobj.certificates  # type: ignore[attr-defined]
    context = table.default
    if server_name is not None:
        name = server_name.lower()
        context = table.exact.get(name) or table.wildcards.get(name.partition(".")[2]) or context
    sslobj.context = context


def load_certificates(
    listener: Listener, *, label: str, site_hosts: Sequence[str], state_dir: str, store: bool = True
) -> ListenerCertificates:
    """Load a listener's certificates, the first one for clients that name no server or an unknown one.

    Without certificates, a self-signed one is taken from ``state_dir`` or made there; with ``store`` false (a mere
    check) nothing is written. Raises ``ConfigError`` for what cannot be served, ``StartError`` for a state folder
    that cannot be written.
    """
    now = dt.datetime.now(dt.UTC)
    if listener.certificates:
        loaded = []
        faults: list[OperatorError] = []
        for number, certificate in enumerate(listener.certificates):
            with collected(faults), faults_at("certificates", number):
                loaded.append(load_certificate(certificate.chain, certificate.key, label=label, now=now))
        raise_together(faults)
    else:
        loaded = [self_signed_certificate(state_dir, site_hosts, label=label, now=now, store=store)]
    warnings = [warning for certificate in loaded for warning in certificate.warnings]
    warnings += _unused_warnings(loaded, label)
    warnings += _uncovered_warnings(loaded, site_hosts, label)
    return ListenerCertificates(
        label,
        listener.min_tls_version,
        listener.protocols,
        tuple(loaded),
        tuple(warnings),
        not listener.certificates,
    )


@dataclass(frozen=True, slots=True)
class UpstreamTrust:
    """What https upstreams are verified against: ``ca`` is the content of upstream_tls.ca, None for the system's."""

    ca: bytes | None
    context: ssl.SSLContext


def upstream_trust(options: UpstreamTls) -> UpstreamTrust:
    """Read ``options.ca`` and make the context of it.

    Raises ``ConfigError`` for what cannot be read or used, its key relative to the table of ``options``.
    """
    if options.ca is None:
        return UpstreamTrust(None, upstream_context(options, None))
    with faults_at("ca"):
        try:
            with open(options.ca, "rb") as file:
                ca = file.read()
        except OSError as error:
            reason = f"which user {os.geteuid()} cannot read ({error.strerror})"
            raise RefusedError(f"{options.ca!r}, {reason}", _WANTED_CA) from error
        return UpstreamTrust(ca, upstream_context(options, ca))


def upstream_context(
    options: UpstreamTls, ca: bytes | None, protocols: Sequence[str] = UPSTREAM_PROTOCOLS
) -> ssl.SSLContext:
    """Return a client-side context that verifies the chain and the host name (``server_hostname`` when wrapping).

    An end of stream without close_notify is an ``ssl.SSLError`` of OpenSSL's here: only so can a body that lasts until
    the close be known to be whole (RFC 9112 section 9.8).

    Raises ``ConfigError`` when there is nothing to verify against.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Python sets these two differently from version to version.
    context.options &= ~ssl.OP_IGNORE_UNEXPECTED_EOF
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.set_alpn_protocols(list(protocols))
    if ca is None:
        context.load_default_certs()
        if not context.cert_store_stats()["x509_ca"] and not _has_trust_folder():
            raise RefusedError(
                "no trust store on this system",
                "one to verify https:// upstreams with",
                "install ca-certificates, or set upstream_tls.ca",
            )
        return context
    try:
        with _as_path(ca) as path:
            context.load_verify_locations(cafile=path)
    except ssl.SSLError as error:
        raise RefusedError(f"no certificate in PEM in {options.ca!r} ({error.reason})", _WANTED_CA) from error
    return context


def _bare_server_context(minimum: ssl.TLSVersion) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = minimum
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION | ssl.OP_CIPHER_SERVER_PREFERENCE
    context.set_ciphers(SERVER_CIPHERS)
    # OpenSSL sends two; each costs a write and some 40 us of a handshake, and one does for a keep-alive client.
    context.num_tickets = TICKETS_A_HANDSHAKE
    return context


def _server_context(
    certificate: LoadedCertificate, minimum: ssl.TLSVersion, protocols: Sequence[str], label: str
) -> ssl.SSLContext:
    context = _bare_server_context(minimum)
    context.set_alpn_protocols(list(protocols))
    try:
        with _as_path(certificate.pem) as path:
            # An empty password: OpenSSL must never ask on the terminal.
            context.load_cert_chain(path, password="")
    except ssl.SSLError as error:
        raise ConfigError(
            f"{label}: certificate chain {certificate.info.path!r} is not accepted by OpenSSL ({error.reason}): "
            "issue one with an EC P-256 or RSA 2048 key, signed with SHA-256"
        ) from error
    return context


@contextlib.contextmanager
def _as_path(content: bytes) -> Iterator[str]:
    """Lend ``content`` a path, since ``load_cert_chain`` takes nothing else; it never reaches a disk."""
    descriptor = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _unused_warnings(loaded: Sequence[LoadedCertificate], label: str) -> Iterator[str]:
    seen: set[bytes] = set()
    for number, certificate in enumerate(loaded):
        names = certificate.names.exact | {b"*." + parent for parent in certificate.names.wildcards}
        if number and names <= seen:
            yield (
                f"{label}: certificate chain {certificate.info.path!r} is never served: "
                "certificates before it have all its names"
            )
        seen |= names


def _uncovered_warnings(loaded: Sequence[LoadedCertificate], site_hosts: Sequence[str], label: str) -> Iterator[str]:
    if "*" in site_hosts:
        # Then no request is misdirected (421), whatever the certificate says.
        return
    keys = {host: host.lower().strip("[]").removesuffix(".").encode("ascii", "replace") for host in site_hosts}
    missing = [host for host, key in keys.items() if not any(certificate.names.covers(key) for certificate in loaded)]
    if missing:
        shown = ", ".join(missing[:_MAX_HOSTS_IN_WARNING])
        more = len(missing) - _MAX_HOSTS_IN_WARNING
        tail = f" and {more} more" if more > 0 else ""
        yield f"{label}: no certificate covers {shown}{tail}: requests for these hosts get 421 on this listener"


def _has_trust_folder() -> bool:
    # OpenSSL reads a folder of CAs only when it verifies, so the store is still empty then.
    paths = ssl.get_default_verify_paths()
    try:
        return bool(os.listdir(os.environ.get(paths.openssl_capath_env, paths.openssl_capath)))
    except OSError:
        return False
