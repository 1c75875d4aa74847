"""An authority for tests, and both ends of a handshake."""

from __future__ import annotations

import contextlib
import datetime as dt
import ipaddress
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
)

from proxy.config.schema import Listener
from proxy.tls.contexts import ListenerTls, load_certificates, make_base_contexts

NOW = dt.datetime.now(dt.UTC)
DAY = dt.timedelta(days=1)
TIMEOUT_SECS = 20


def _key_usage(*, ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=ca,
        crl_sign=ca,
        encipher_only=False,
        decipher_only=False,
    )


KEY_USAGE_CA, KEY_USAGE_LEAF = _key_usage(ca=True), _key_usage(ca=False)

PrivateKey = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey


def key_pem(
    key: PrivateKey,
    form: PrivateFormat = PrivateFormat.PKCS8,
    encryption: KeySerializationEncryption | None = None,
) -> bytes:
    return key.private_bytes(Encoding.PEM, form, encryption or NoEncryption())


def encrypted_key_pem(key: PrivateKey, form: PrivateFormat) -> bytes:
    return key_pem(key, form, BestAvailableEncryption(b"secret"))


@dataclass
class Authority:
    """Issues into ``folder``: a root, and one intermediate that signs the leaves."""

    folder: Path
    serial: int = 0
    keys: dict[str, PrivateKey] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.root_key = ec.generate_private_key(ec.SECP256R1())
        self.root = self._sign("Test Root", self.root_key, "Test Root", self.root_key, ca=True)
        self.issuer_key = ec.generate_private_key(ec.SECP256R1())
        self.issuer = self._sign("Test Issuer", self.issuer_key, "Test Root", self.root_key, ca=True)
        self.ca_file = str(self.folder / "root.pem")
        Path(self.ca_file).write_bytes(self.root.public_bytes(Encoding.PEM))

    def _sign(
        self,
        subject: str,
        key: PrivateKey,
        issuer: str,
        issuer_key: PrivateKey,
        *,
        ca: bool = False,
        names: tuple[str, ...] = (),
        begin: dt.datetime = NOW - DAY,
        end: dt.datetime = NOW + 90 * DAY,
    ) -> x509.Certificate:
        def name(text: str) -> x509.Name:
            return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

        builder = (
            x509.CertificateBuilder()
            .subject_name(name(subject))
            .issuer_name(name(issuer))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(begin)
            .not_valid_after(end)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            # Python 3.13's default client insists on the next three (RFC 5280 section 4.2.1).
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
            .add_extension(KEY_USAGE_CA if ca else KEY_USAGE_LEAF, critical=True)
        )
        if names:
            general: list[x509.GeneralName] = []
            for text in names:
                try:
                    general.append(x509.IPAddress(ipaddress.ip_address(text)))
                except ValueError:
                    general.append(x509.DNSName(text))
            builder = builder.add_extension(x509.SubjectAlternativeName(general), critical=False)
        return builder.sign(issuer_key, hashes.SHA256())

    def leaf(
        self,
        *names: str,
        common_name: str = "ignored.example.org",
        begin: dt.datetime = NOW - DAY,
        end: dt.datetime = NOW + 90 * DAY,
        key: PrivateKey | None = None,
    ) -> tuple[x509.Certificate, PrivateKey]:
        key = key or ec.generate_private_key(ec.SECP256R1())
        leaf = self._sign(common_name, key, "Test Issuer", self.issuer_key, names=names, begin=begin, end=end)
        return leaf, key

    def write(self, *chain: x509.Certificate, key: PrivateKey | bytes) -> dict[str, str]:
        """Write the files; the answer is a ``certificates`` entry of a listener."""
        self.serial += 1
        paths = {"chain": str(self.folder / f"{self.serial}.pem"), "key": str(self.folder / f"{self.serial}.key")}
        Path(paths["chain"]).write_bytes(b"".join(link.public_bytes(Encoding.PEM) for link in chain))
        descriptor = os.open(paths["key"], os.O_WRONLY | os.O_CREAT, 0o600)
        with open(descriptor, "wb") as file:
            file.write(key if isinstance(key, bytes) else key_pem(key))
        return paths

    def issue(self, *names: str) -> dict[str, str]:
        leaf, key = self.leaf(*names)
        return self.write(leaf, self.issuer, key=key)

    def client(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.ca_file)


def listener_tls(*certificates: dict[str, str], minimum: str = "1.2", site_hosts: tuple[str, ...] = ()) -> ListenerTls:
    listener = Listener.model_validate(
        {"address": "127.0.0.1:8443", "certificates": certificates, "min_tls_version": minimum}
    )
    make_base_contexts()
    return ListenerTls(
        load_certificates(listener, label="listener 127.0.0.1:8443", site_hosts=site_hosts, state_dir="/nonexistent")
    )


@dataclass
class Served:
    """What the server saw of one connection."""

    version: str | None
    alpn: str | None
    reused: bool | None
    covered: Callable[[bytes], bool]


@contextlib.contextmanager
def server(tls: ListenerTls) -> Iterator[tuple[int, list[Served | OSError]]]:
    """Serve connections one after another on loopback; the answer to each is a line, then a clean close."""
    seen: list[Served | OSError] = []

    def serve(connection: socket.socket) -> None:
        with connection, tls.wrap(connection) as secured:
            secured.do_handshake()
            covered = tls.certificate_of(secured).covers
            seen.append(Served(secured.version(), secured.selected_alpn_protocol(), secured.session_reused, covered))
            secured.sendall(b"hello\n")
            with contextlib.suppress(OSError):  # the client may leave without a word
                secured.recv(100)
                secured.unwrap()

    def loop() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connection.settimeout(TIMEOUT_SECS)
            try:
                serve(connection)
            except OSError as error:
                seen.append(error)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=loop)
        thread.start()
        try:
            yield listener.getsockname()[1], seen
        finally:
            # close() alone leaves a blocked accept asleep
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(TIMEOUT_SECS)
            assert not thread.is_alive()


def visit(
    port: int, context: ssl.SSLContext, name: str | None, session: ssl.SSLSession | None = None
) -> ssl.SSLSession:
    """Connect, read the greeting (by then session tickets have come), leave; raises as ``ssl`` does."""
    with (
        socket.create_connection(("127.0.0.1", port), TIMEOUT_SECS) as plain,
        context.wrap_socket(plain, server_hostname=name, session=session) as secured,
    ):
        assert secured.recv(100) == b"hello\n"
        secured.sendall(b"bye\n")
        assert secured.session is not None
        return secured.session
