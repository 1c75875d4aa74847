"""The certificate made on the spot: its names, when it is made anew, and who may read its key."""

from __future__ import annotations

import datetime as dt
import multiprocessing
import os
import ssl
import stat
from pathlib import Path

import pytest
from cryptography import x509

from proxy.config.schema import Listener
from proxy.errors import ConfigError, StartError
from proxy.tls.contexts import ListenerTls, load_certificates, make_base_contexts
from proxy.tls.selfsigned import CERTIFICATE_FILE, FOLDER, PAIR_FILE, self_signed_certificate
from tests.unit.tls.pki import DAY, NOW, Served, server, visit

HOSTS = ("git.example.org", "*.wild.example.org", "*", "192.0.2.1", "2001:db8::1", "localhost")
TIMEOUT_SECS = 30


def pair(state_dir: Path) -> Path:
    return state_dir / FOLDER / PAIR_FILE


def make(
    state_dir: Path, hosts: tuple[str, ...] = HOSTS, now: dt.datetime = NOW, *, store: bool = True
) -> x509.Certificate:
    loaded = self_signed_certificate(str(state_dir), hosts, label="listener [::]:443", now=now, store=store)
    return x509.load_pem_x509_certificate(loaded.pem)


def listener_tls(state_dir: Path) -> ListenerTls:
    make_base_contexts()
    return ListenerTls(
        load_certificates(
            Listener(address="127.0.0.1:8443"), label="listener", site_hosts=HOSTS, state_dir=str(state_dir)
        )
    )


def test_names_validity_and_purpose(tmp_path: Path) -> None:
    certificate = make(tmp_path)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["git.example.org", "*.wild.example.org", "localhost"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == [
        "192.0.2.1",
        "2001:db8::1",
        "127.0.0.1",
        "::1",
    ]
    assert certificate.not_valid_before_utc < NOW
    assert certificate.not_valid_after_utc - certificate.not_valid_before_utc <= 397 * DAY
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_only_its_owner_may_read_it(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        make(tmp_path)
    finally:
        os.umask(umask)
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode) for path in [tmp_path / FOLDER, *(tmp_path / FOLDER).iterdir()]
    }
    assert modes == {FOLDER: 0o700, PAIR_FILE: 0o600, CERTIFICATE_FILE: 0o600}


def test_clients_can_trust_it(tmp_path: Path) -> None:
    tls = listener_tls(tmp_path)
    assert tls.self_signed
    assert tls.warnings == ()
    client = ssl.create_default_context(cafile=str(tmp_path / FOLDER / CERTIFICATE_FILE))
    with server(tls) as (port, seen):
        for name in ("localhost", "127.0.0.1", "::1", "git.example.org", "a.wild.example.org"):
            visit(port, client, name)
    assert len(seen) == 5
    for served in seen:
        assert isinstance(served, Served)
        assert served.covered(b"git.example.org")


def test_it_is_kept(tmp_path: Path) -> None:
    first = make(tmp_path)
    assert make(tmp_path) == first
    assert make(tmp_path, tuple(reversed(HOSTS))) == first
    assert make(tmp_path, now=NOW + 366 * DAY) == first


def test_it_is_made_anew_before_it_expires(tmp_path: Path) -> None:
    first = make(tmp_path)
    assert make(tmp_path, now=NOW + 367 * DAY) != first


def test_it_is_made_anew_when_the_clock_went_back(tmp_path: Path) -> None:
    first = make(tmp_path)
    assert make(tmp_path, now=NOW - 2 * DAY) != first


def test_it_is_made_anew_for_other_names(tmp_path: Path) -> None:
    first = make(tmp_path)
    second = make(tmp_path, (*HOSTS, "more.example.org"))
    assert second != first
    assert make(tmp_path) not in (first, second)


@pytest.mark.parametrize("content", [b"", b"garbage", b"half"])
def test_what_cannot_be_used_is_replaced(tmp_path: Path, content: bytes) -> None:
    first = make(tmp_path)
    whole = pair(tmp_path).read_bytes()
    pair(tmp_path).write_bytes(whole[: len(whole) // 2] if content == b"half" else content)
    assert make(tmp_path) != first
    assert b"BEGIN PRIVATE KEY" in pair(tmp_path).read_bytes()


def test_a_key_that_others_could_have_read_is_replaced(tmp_path: Path) -> None:
    first = make(tmp_path)
    pair(tmp_path).chmod(0o644)
    assert make(tmp_path) != first
    assert stat.S_IMODE(pair(tmp_path).stat().st_mode) == 0o600


def test_a_folder_open_to_others_is_closed(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir(mode=0o755)
    make(tmp_path)
    assert stat.S_IMODE((tmp_path / FOLDER).stat().st_mode) == 0o700


def test_a_mere_check_writes_nothing(tmp_path: Path) -> None:
    state_dir = tmp_path / "absent"
    make(state_dir, store=False)
    assert not state_dir.exists()
    kept = make(tmp_path)
    assert make(tmp_path, store=False) == kept


@pytest.mark.parametrize("obstacle", ["file", "symlink"])
def test_a_folder_that_cannot_be_used(tmp_path: Path, obstacle: str) -> None:
    if obstacle == "file":
        (tmp_path / FOLDER).write_bytes(b"")
    else:
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / FOLDER).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StartError) as caught:
        make(tmp_path)
    message = str(caught.value)
    assert message.startswith("listener [::]:443 has no certificates")
    assert str(tmp_path / FOLDER) in message
    assert "set state_dir to a folder" in message


def test_a_host_that_no_certificate_can_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot stand in a self-signed certificate"):
        make(tmp_path, ("b\xfccher.example.org",))


def _make_many(state_dir: Path, hosts: tuple[str, ...]) -> None:
    for _ in range(20):
        listener = Listener(address="127.0.0.1:8443")
        tls = load_certificates(listener, label="listener", site_hosts=hosts, state_dir=str(state_dir))
        assert tls.self_signed


def test_processes_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Two want different names, so that each load finds the other's work and replaces it."""
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=_make_many, args=(tmp_path, (f"{name}.example.org",))) for name in ("a", "b")]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(TIMEOUT_SECS)
        assert [process.exitcode for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert sorted(path.name for path in (tmp_path / FOLDER).iterdir()) == [CERTIFICATE_FILE, PAIR_FILE]
    trusted = x509.load_pem_x509_certificate((tmp_path / FOLDER / CERTIFICATE_FILE).read_bytes())
    assert trusted == x509.load_pem_x509_certificate(pair(tmp_path).read_bytes())
