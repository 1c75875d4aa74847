"""Certificates from files: what they are for, whether they can be served, and what to tell the operator if not.

A file is read once and everything is decided from what was read, so a renewal that happens meanwhile cannot make the
key in use and the names on record those of different certificates.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
import itertools
import os
import stat
from dataclasses import dataclass
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from proxy.config.place import collected, raise_together
from proxy.errors import ConfigError, OperatorError

# Larger than any real chain, small enough that a wrong path (a device, a log) does no harm.
MAX_PEM_BYTES: Final = 1 << 20

_PARSE_ERRORS: Final = (ValueError, UnsupportedAlgorithm)


class CertificateNames:
    """The names that a certificate is valid for (RFC 9525 section 6)."""

    __slots__ = ("_addresses", "_exact", "_wildcards")

    def __init__(self, dns_names: tuple[str, ...], addresses: tuple[str, ...] = ()) -> None:
        lower = [name.lower().removesuffix(".").encode("ascii", "ignore") for name in dns_names]
        # An address counts only as iPAddress, never as a DNS name that looks like one (RFC 9525 section 6.4).
        self._exact: Final = frozenset(name for name in lower if b"*" not in name and not _address(name))
        self._wildcards: Final = frozenset(
            name[2:] for name in lower if name.startswith(b"*.") and b"*" not in name[2:] and name[2:]
        )
        self._addresses: Final = frozenset(ipaddress.ip_address(address) for address in addresses)

    @property
    def exact(self) -> frozenset[bytes]:
        """DNS names in lower case, wildcards apart."""
        return self._exact

    @property
    def wildcards(self) -> frozenset[bytes]:
        """``example.org`` for each ``*.example.org``; a ``*`` elsewhere matches nothing (RFC 9525 section 6.3)."""
        return self._wildcards

    def covers(self, host: bytes) -> bool:
        """Tell whether the certificate is valid for ``host``: lower case, no port, an address without brackets.

        A wildcard stands for exactly one label. ``*.example.org`` itself is covered by the same wildcard.
        """
        if host in self._exact:
            return True
        address = _address(host)
        if address is not None:
            return address in self._addresses
        label, dot, parent = host.partition(b".")
        return bool(label and dot) and parent in self._wildcards


@dataclass(frozen=True, slots=True)
class CertificateInfo:
    """What status shows of a served certificate."""

    names: tuple[str, ...]
    """DNS names and addresses, as in the certificate."""
    not_after: dt.datetime
    """The end of its validity, UTC."""
    path: str
    """The chain's file."""


@dataclass(frozen=True, slots=True)
class LoadedCertificate:
    """A chain and its key, checked against each other."""

    info: CertificateInfo
    names: CertificateNames
    pem: bytes
    """The key and the chain, as OpenSSL reads them."""
    warnings: tuple[str, ...]


def load_certificate(chain_path: str, key_path: str, *, label: str, now: dt.datetime) -> LoadedCertificate:
    """Read and check a certificate chain (leaf first) and its unencrypted key, both PEM.

    ``label`` names the listener in messages, ``now`` is aware. Raises ``ConfigError`` when they cannot be served;
    what clients would merely complain about (validity, file mode, chain links) is in ``warnings``.
    """
    chain_where = f"{label}: certificate chain {chain_path!r}"
    key_where = f"{label}: key {key_path!r}"
    faults: list[OperatorError] = []
    with collected(faults):
        chain = _parse_chain(_read(chain_path, chain_where)[0], chain_where)
    with collected(faults):
        key_pem, key_mode = _read(key_path, key_where)
        key = parse_key(key_pem, key_where)
    raise_together(faults)
    _check_leaf(chain, key, chain_where, key_path)
    warnings = [*_validity_warnings(chain[0], chain_where, now), *_link_warnings(chain, chain_where)]
    if key_mode & stat.S_IRWXO:
        warnings.append(f"{key_where} has mode {key_mode:04o}, open to every user of this host: chmod o-rwx it")
    try:
        return assemble(chain, key, chain_path, tuple(warnings))
    except ValueError as error:
        raise ConfigError(f"{chain_where}: its extensions are malformed ({error}): issue it anew") from error


def assemble(
    chain: list[x509.Certificate], key: PrivateKeyTypes, path: str, warnings: tuple[str, ...] = ()
) -> LoadedCertificate:
    """Join a chain and its key that are known to fit."""
    dns_names, addresses = subject_names(chain[0])
    return LoadedCertificate(
        info=CertificateInfo(dns_names + addresses, chain[0].not_valid_after_utc, path),
        names=CertificateNames(dns_names, addresses),
        # Written anew, since a file may hold further blocks that OpenSSL would take for the key or the leaf.
        pem=key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        + b"".join(certificate.public_bytes(Encoding.PEM) for certificate in chain),
        warnings=warnings,
    )


def subject_names(certificate: x509.Certificate) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return DNS names and IP addresses of subjectAltName; the common name counts only where that is absent."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        common = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
        return tuple(str(attribute.value) for attribute in common), ()
    return (
        tuple(names.get_values_for_type(x509.DNSName)),
        tuple(str(address) for address in names.get_values_for_type(x509.IPAddress)),
    )


def parse_key(pem: bytes, where: str) -> PrivateKeyTypes:
    """Return the first private key in ``pem``. Raises ``ConfigError`` if it is encrypted, absent or unusable."""
    try:
        return serialization.load_pem_private_key(pem, password=None)
    except TypeError as error:
        raise ConfigError(
            f"{where} is encrypted, and a service has nobody to ask for the password: "
            "decrypt it once (openssl pkey -in KEY -out NEW, then chmod 600 NEW)"
        ) from error
    except _PARSE_ERRORS as error:
        raise ConfigError(
            f"{where}: found {_kind(pem)}, wanted one private key in PEM (-----BEGIN PRIVATE KEY-----): "
            "name the right file, or convert it with openssl pkey"
        ) from error


def _parse_chain(pem: bytes, where: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except _PARSE_ERRORS as error:
        raise ConfigError(
            f"{where}: found {_kind(pem)}, wanted certificates in PEM (-----BEGIN CERTIFICATE-----), the leaf first: "
            "name the right file, or convert it with openssl x509"
        ) from error


def _check_leaf(chain: list[x509.Certificate], key: PrivateKeyTypes, where: str, key_path: str) -> None:
    wanted = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    matching = [number for number, certificate in enumerate(chain, 1) if _public_key(certificate) == wanted]
    if not matching:
        raise ConfigError(
            f"{where} and key {key_path!r} do not belong together: none of its {len(chain)} certificate(s) "
            f"({chain[0].subject.rfc4514_string()!r} first) has that key: name the key that it was issued for"
        )
    if matching[0] != 1:
        raise ConfigError(
            f"{where} is in the wrong order: the key's own certificate is number {matching[0]} of {len(chain)}, "
            "wanted first: put the leaf first, then each issuer (RFC 8446 section 4.4.2)"
        )


def _public_key(certificate: x509.Certificate) -> bytes | None:
    """Return subjectPublicKeyInfo in DER; None for an algorithm that cannot be read, which is then not the key's."""
    try:
        return certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    except _PARSE_ERRORS:
        return None


def _validity_warnings(leaf: x509.Certificate, where: str, now: dt.datetime) -> list[str]:
    if now > leaf.not_valid_after_utc:
        return [f"{where} expired at {leaf.not_valid_after_utc:%Y-%m-%d %H:%M} UTC: clients refuse it, renew it"]
    if now < leaf.not_valid_before_utc:
        begin = f"{leaf.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
        return [f"{where} is not valid before {begin}: clients refuse it until then; is this host's clock right?"]
    return []


def _link_warnings(chain: list[x509.Certificate], where: str) -> list[str]:
    for number, (certificate, issuer) in enumerate(itertools.pairwise(chain), 1):
        try:
            certificate.verify_directly_issued_by(issuer)
        except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
            subjects = (certificate.subject.rfc4514_string(), issuer.subject.rfc4514_string())
            fault = f"certificate {number} ({subjects[0]!r}) was not issued by number {number + 1} ({subjects[1]!r})"
            return [f"{where}: {fault}: some clients find no way to their root"]
    return []


def _read(path: str, where: str) -> tuple[bytes, int]:
    """Return a file's content and its mode bits."""
    try:
        with open(path, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            pem = file.read(MAX_PEM_BYTES + 1)
    except FileNotFoundError as error:
        raise ConfigError(f"{where} does not exist: name the file, or issue the certificate first") from error
    except PermissionError as error:
        raise ConfigError(
            f"{where} cannot be read by user {os.geteuid()}: permission denied; "
            "let that user read the file and enter its folders"
        ) from error
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror}") from error
    if len(pem) > MAX_PEM_BYTES:
        raise ConfigError(f"{where} is larger than {MAX_PEM_BYTES} bytes: it is no PEM file of a certificate or key")
    return pem, mode


def _kind(content: bytes) -> str:
    """Say what a file seems to hold, never its content."""
    if not content.strip():
        return "an empty file"
    if content.startswith(b"0"):
        return "what looks like DER"
    begin = content.find(b"-----BEGIN ")
    if begin < 0:
        return "no PEM block"
    block = content[begin:].split(b"\n", 1)[0].strip().decode("ascii", "replace")
    return f"a damaged or unfit block {block[:60]!r}"


def _address(host: bytes) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    # An IPv4 address ends in a digit, an IPv6 address has a colon: most names are told apart without parsing.
    if not (host[-1:].isdigit() or b":" in host):
        return None
    try:
        return ipaddress.ip_address(host.decode("ascii", "replace"))
    except ValueError:
        return None
