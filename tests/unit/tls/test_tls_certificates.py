"""Names that a certificate covers, and what the operator is told about files that cannot be served."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PrivateFormat, load_pem_private_key

from proxy.errors import ConfigError
from proxy.tls.certificates import CertificateNames, LoadedCertificate, load_certificate, subject_names
from tests.unit.tls.pki import DAY, NOW, Authority, encrypted_key_pem, key_pem

TIMEOUT_SECS = 20
NOBODY = 65534


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def load(paths: dict[str, str]) -> LoadedCertificate:
    return load_certificate(paths["chain"], paths["key"], label="listener 0.0.0.0:443", now=NOW)


def refusal(paths: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        load(paths)
    message = str(caught.value)
    assert message.startswith("listener 0.0.0.0:443: "), message
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("host", "covered"),
    [
        (b"git.example.org", True),
        (b"upper.example.org", True),
        (b"a.wild.example.org", True),
        (b"xn--bcher-kva.wild.example.org", True),
        (b"a.b.wild.example.org", False),
        (b"wild.example.org", False),
        (b".wild.example.org", False),
        (b"*.wild.example.org", True),
        (b"example.org", False),
        (b"xgit.example.org", False),
        (b"foo.part.example.org", False),
        (b"a.b.inner.example.org", False),
        (b"anything", False),
        (b"", False),
        (b"192.0.2.1", True),
        (b"192.0.2.2", False),
        (b"192.0.2.3", False),  # only as a DNS name in the certificate
        (b"192.0.2", False),
        (b"2001:db8::1", True),
        (b"2001:db8:0:0::1", True),
        (b"2001:db8::2", False),
        (b"::ffff:192.0.2.1", False),
        (b"\xff.wild.example.org:", False),
        (b"host1", True),
    ],
)
def test_covers(host: bytes, covered: bool) -> None:
    names = CertificateNames(
        (
            "git.example.org",
            "UPPER.example.org.",
            "*.wild.example.org",
            "f*.part.example.org",
            "a.*.inner.example.org",
            "*",
            "*.",
            "192.0.2.3",
            "host1",
        ),
        ("192.0.2.1", "2001:db8::1"),
    )
    assert names.covers(host) is covered


def test_a_wildcard_covers_no_address() -> None:
    assert not CertificateNames(("*.0.2.1",)).covers(b"192.0.2.1")


def test_the_common_name_counts_only_alone(authority: Authority) -> None:
    with_names, _ = authority.leaf("a.example.org", "192.0.2.1", common_name="cn.example.org")
    without, _ = authority.leaf(common_name="cn.example.org")
    assert subject_names(with_names) == (("a.example.org",), ("192.0.2.1",))
    assert subject_names(without) == (("cn.example.org",), ())


def test_loaded(authority: Authority) -> None:
    loaded = load(authority.issue("a.example.org", "192.0.2.1"))
    assert loaded.info.names == ("a.example.org", "192.0.2.1")
    assert loaded.info.not_after == (NOW + 90 * DAY).replace(microsecond=0)
    assert loaded.names.covers(b"a.example.org")
    assert loaded.pem.count(b"BEGIN CERTIFICATE") == 2
    assert loaded.warnings == ()


@pytest.mark.parametrize("form", [PrivateFormat.PKCS8, PrivateFormat.TraditionalOpenSSL])
def test_an_encrypted_key_is_refused_without_a_prompt(authority: Authority, form: PrivateFormat) -> None:
    leaf, key = authority.leaf("a.example.org")
    paths = authority.write(leaf, key=encrypted_key_pem(key, form))
    message = refusal(paths)
    assert paths["key"] in message
    assert "is encrypted" in message
    assert "openssl pkey" in message


def test_openssl_key_forms_are_read(authority: Authority, tmp_path: Path) -> None:
    made = tmp_path / "key.pem"
    command = ["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-out", str(made)]
    result = subprocess.run(command, capture_output=True, timeout=TIMEOUT_SECS)
    assert result.returncode == 0, result.stderr
    assert b"EC PARAMETERS" in made.read_bytes()
    key = load_pem_private_key(made.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    leaf, _ = authority.leaf("a.example.org", key=key)
    assert load(authority.write(leaf, key=made.read_bytes())).names.covers(b"a.example.org")


def test_key_and_chain_in_one_file(authority: Authority) -> None:
    leaf, key = authority.leaf("a.example.org")
    paths = authority.write(leaf, key=key)
    with open(paths["key"], "ab") as file:
        file.write(leaf.public_bytes(Encoding.PEM))
    loaded = load({"chain": paths["key"], "key": paths["key"]})
    assert loaded.names.covers(b"a.example.org")
    assert loaded.pem.count(b"-----BEGIN") == 2


def test_a_foreign_key_is_refused(authority: Authority) -> None:
    leaf, _ = authority.leaf("a.example.org")
    _, other = authority.leaf("b.example.org")
    paths = authority.write(leaf, authority.issuer, key=other)
    message = refusal(paths)
    assert "do not belong together" in message
    assert paths["chain"] in message
    assert paths["key"] in message


def test_the_leaf_must_be_first(authority: Authority) -> None:
    leaf, key = authority.leaf("a.example.org")
    message = refusal(authority.write(authority.issuer, leaf, key=key))
    assert "wrong order: the key's own certificate is number 2 of 2, wanted first" in message


def test_a_gap_in_the_chain_is_a_warning(authority: Authority) -> None:
    leaf, key = authority.leaf("a.example.org")
    assert load(authority.write(leaf, authority.issuer, authority.root, key=key)).warnings == ()
    (warning,) = load(authority.write(leaf, authority.root, authority.issuer, key=key)).warnings
    assert "certificate 1 ('CN=ignored.example.org') was not issued by number 2 ('CN=Test Root')" in warning


@pytest.mark.parametrize(
    ("begin", "end", "message"),
    [(-9, -1, "expired at "), (1, 9, "is not valid before ")],
)
def test_validity_is_a_warning(authority: Authority, begin: int, end: int, message: str) -> None:
    leaf, key = authority.leaf("a.example.org", begin=NOW + begin * DAY, end=NOW + end * DAY)
    paths = authority.write(leaf, authority.issuer, key=key)
    (warning,) = load(paths).warnings
    assert message in warning
    assert paths["chain"] in warning


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, False), (0o644, True), (0o602, True)])
def test_a_key_open_to_everyone_is_a_warning(authority: Authority, mode: int, warned: bool) -> None:
    paths = authority.issue("a.example.org")
    os.chmod(paths["key"], mode)
    warnings = load(paths).warnings
    assert [f"has mode {mode:04o}" in warning for warning in warnings] == ([True] if warned else [])


def remove(path: str) -> None:
    os.unlink(path)


def replace_by_folder(path: str) -> None:
    os.unlink(path)
    os.mkdir(path)


def fill(content: bytes) -> Callable[[str], None]:
    def write(path: str) -> None:
        Path(path).write_bytes(content)

    return write


@pytest.mark.parametrize("which", ["chain", "key"])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (remove, "does not exist"),
        (replace_by_folder, "cannot be read: Is a directory"),
        (fill(b""), "found an empty file"),
        (fill(b"\n \n"), "found an empty file"),
        (fill(b"\x30\x82\x01\x00"), "looks like DER"),
        (fill(b"hello"), "no PEM block"),
        (fill(b"-----BEGIN NONSENSE-----\nAAAA\n-----END NONSENSE-----\n"), "'-----BEGIN NONSENSE-----'"),
        (fill(b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"), "'-----BEGIN CERTIFICATE-----'"),
        (fill(b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"), "'-----BEGIN PRIVATE KEY-----'"),
        (fill(b"-----BEGIN CERTIFICATE-----\nAAAA"), "'-----BEGIN CERTIFICATE-----'"),
        (fill(b"x" * (1 << 21)), "larger than 1048576 bytes"),
    ],
)
def test_a_file_that_is_not_one(authority: Authority, which: str, spoil: Callable[[str], None], message: str) -> None:
    paths = authority.issue("a.example.org")
    spoil(paths[which])
    found = refusal(paths)
    assert message in found
    assert paths[which] in found


def test_a_swapped_pair_of_paths(authority: Authority) -> None:
    paths = authority.issue("a.example.org")
    assert "found a damaged or unfit block '-----BEGIN PRIVATE KEY-----'" in refusal(
        {"chain": paths["key"], "key": paths["chain"]}
    )


@pytest.mark.parametrize("which", ["chain", "key"])
def test_no_permission(authority: Authority, which: str) -> None:
    """Run by root, who may read everything, the attempt is made by a child that gave its rights up."""
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders admit only their owner
        os.chmod(folder, 0o755)
        paths = {}
        for name, path in authority.issue("a.example.org").items():
            paths[name] = shutil.copy(path, folder)
            os.chmod(paths[name], 0o000 if name == which else 0o644)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                if os.geteuid() == 0:
                    os.setgroups([])
                    os.setgid(NOBODY)
                    os.setuid(NOBODY)
                message = refusal(paths)
                code = 0 if "permission denied" in message and paths[which] in message else 2
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_secrets_stay_out_of_messages(authority: Authority) -> None:
    leaf, key = authority.leaf("a.example.org")
    damaged = key_pem(key).replace(b"\nM", b"\n!", 1)
    message = refusal(authority.write(leaf, key=damaged))
    assert not any(line in message for line in damaged.decode().splitlines()[1:-1])
