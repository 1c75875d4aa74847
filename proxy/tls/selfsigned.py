"""A certificate made on the spot, for a listener that has none: kept, so that a browser's exception outlives a restart.

Key and certificate are one file, replaced by a rename: whoever reads it, in whichever process, reads a pair that fits.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import fcntl
import ipaddress
import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from proxy.errors import ConfigError, StartError
from proxy.tls.certificates import MAX_PEM_BYTES, LoadedCertificate, assemble, parse_key, subject_names

FOLDER: Final = "selfsigned"
PAIR_FILE: Final = "key-and-certificate.pem"
CERTIFICATE_FILE: Final = "certificate.pem"
"""The certificate alone, for clients that shall trust it (``curl --cacert``)."""

LOCAL_NAMES: Final = ("localhost", "127.0.0.1", "::1")

# Browsers refuse more than 398 days (CA/Browser Forum baseline requirements, section 6.3.2).
VALIDITY: Final = dt.timedelta(days=397)
RENEW_BEFORE: Final = dt.timedelta(days=30)
# Clients whose clock is a little behind must not find it from the future.
BACKDATED: Final = dt.timedelta(hours=1)

_COMMON_NAME: Final = "reverse-proxy self-signed"


def self_signed_certificate(
    state_dir: str, hosts: Sequence[str], *, label: str, now: dt.datetime, store: bool = True
) -> LoadedCertificate:
    """Return the self-signed certificate for ``hosts`` and this machine's local names.

    The one in ``state_dir``/selfsigned is taken while its names are the same and it is valid for 30 days more, else a
    new one is made (ECDSA P-256) and, with ``store``, put there: folder mode 0700, file mode 0600 from the first
    moment on. Raises ``StartError`` when the folder cannot be used, ``ConfigError`` for a host that cannot stand in a
    certificate. ``now`` is aware.
    """
    names = _general_names(hosts, label)
    folder = os.path.join(state_dir, FOLDER)
    path = os.path.join(folder, PAIR_FILE)
    if not store:
        return _usable(path, names, now) or assemble(*_make(names, now), path)
    try:
        with _locked(folder):
            found = _usable(path, names, now)
            if found is not None:
                return found
            made = assemble(*_make(names, now), path)
            # The pair last: whoever is interrupted before it begins anew the next time.
            certificate = made.pem[made.pem.index(b"-----BEGIN CERTIFICATE") :]
            _replace(os.path.join(folder, CERTIFICATE_FILE), certificate)
            _replace(path, made.pem)
            return made
    except OSError as error:
        raise StartError(
            f"{label} has no certificates, and the folder for a self-signed one, {folder!r}, cannot be used by user "
            f"{os.geteuid()}: {error.strerror}; give the listener certificates, let that user write {state_dir!r}, or "
            "set state_dir to a folder that it can write"
        ) from error


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Make the folder, for its owner only, and let one process at a time in."""
    os.makedirs(folder, mode=0o700, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if stat.S_IMODE(os.fstat(descriptor).st_mode) != 0o700:
            os.fchmod(descriptor, 0o700)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace(path: str, content: bytes) -> None:
    # mkstemp creates with mode 0600, and a name that no other process has.
    descriptor, temporary = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".new-")
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _usable(path: str, names: list[x509.GeneralName], now: dt.datetime) -> LoadedCertificate | None:
    """Return the stored certificate, or None if there is none that can go on being used."""
    try:
        with open(path, "rb") as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                return None
            pem = file.read(MAX_PEM_BYTES)
        certificate = x509.load_pem_x509_certificate(pem)
        key = parse_key(pem, path)
        dns_names, addresses = subject_names(certificate)
    except (OSError, ValueError, ConfigError):
        return None
    if certificate.public_key() != key.public_key() or {*dns_names, *addresses} != {str(name.value) for name in names}:
        return None
    if not certificate.not_valid_before_utc <= now < certificate.not_valid_after_utc - RENEW_BEFORE:
        return None
    return assemble([certificate], key, path)


def _make(names: list[x509.GeneralName], now: dt.datetime) -> tuple[list[x509.Certificate], ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _COMMON_NAME)])
    begin = now - BACKDATED
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(begin + VALIDITY)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(identifier, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
        .sign(key, hashes.SHA256())
    )
    return [certificate], key


def _general_names(hosts: Sequence[str], label: str) -> list[x509.GeneralName]:
    """Return each name once; ``*`` (any host) cannot stand in a certificate."""
    wanted = dict.fromkeys(host.lower().strip("[]").removesuffix(".") for host in (*hosts, *LOCAL_NAMES) if host != "*")
    names: list[x509.GeneralName] = []
    for name in wanted:
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(name)))
        except ValueError:
            if not name or not name.isascii():
                raise ConfigError(
                    f"{label}: host {name!r} cannot stand in a self-signed certificate: write it as clients send it"
                ) from None
            names.append(x509.DNSName(name))
    return list(dict.fromkeys(names))
