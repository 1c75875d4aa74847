"""Asking the admin socket: what is said where nobody can be asked."""

from __future__ import annotations

import errno
import os

import pytest

from proxy.errors import StartError
from proxy.master import status_client


def test_who_may_not_ask_is_told_who_may(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:  # the test may run as root, whom no socket refuses
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(status_client, "_request", refuse)
    with pytest.raises(StartError, match=r"/run/x\.sock \(Permission denied: ask as its owner or as root\)"):
        status_client.fetch_status(["/run/x.sock"])
