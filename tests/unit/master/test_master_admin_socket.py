"""The admin socket's file: its mode, a stale one, a live one, something else in its place."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.errors import ConfigError, StartError
from proxy.master.admin_socket import bind_admin_socket, identity


@pytest.fixture
def path() -> Iterator[str]:
    # A Unix socket's path is at most 107 bytes, which pytest's folders may exceed.
    with tempfile.TemporaryDirectory(prefix="rp-") as folder:
        yield f"{folder}/made/admin.sock"


def test_only_the_owner_may_use_it_whatever_the_umask(path: str) -> None:
    before = os.umask(0)
    try:
        with bind_admin_socket(path):
            assert stat.S_IMODE(os.lstat(path).st_mode) == 0o600
        assert os.umask(0) == 0, "the umask must be as it was"
    finally:
        os.umask(before)


def test_a_stale_one_is_replaced(path: str) -> None:
    bind_admin_socket(path).close()
    stale = identity(path)
    with bind_admin_socket(path), socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
    assert stale is not None


def test_a_live_one_that_does_not_say_its_pid_is_respected(path: str) -> None:
    with bind_admin_socket(path):
        before = identity(path)
        with pytest.raises(StartError, match="another instance answers on the admin socket"):
            bind_admin_socket(path)
        assert identity(path) == before


def test_a_live_one_with_a_full_backlog_is_respected(path: str) -> None:
    Path(path).parent.mkdir()
    with socket.socket(socket.AF_UNIX) as full, socket.socket(socket.AF_UNIX) as first:
        full.bind(path)
        full.listen(0)
        first.connect(path)
        with pytest.raises(StartError, match="in use"):
            bind_admin_socket(path)
    assert identity(path) is not None


def test_another_file_is_never_removed(path: str) -> None:
    Path(path).parent.mkdir()
    Path(path).write_text("precious")
    with pytest.raises(ConfigError, match="another kind of file is there; choose another path") as caught:
        bind_admin_socket(path)
    assert caught.value.key == ("admin", "socket")
    assert Path(path).read_text() == "precious"


def test_a_folder_that_cannot_be_made_is_an_operators_fault(path: str) -> None:
    parent = Path(path).parent
    parent.write_text("a file")
    with pytest.raises(StartError, match="cannot make the admin socket"):
        bind_admin_socket(path)
