"""Who the children become, and what is said where they cannot."""

from __future__ import annotations

import os
import pwd

import pytest

from proxy.config.schema import Settings
from proxy.errors import ConfigError
from proxy.master.privileges import find_identity, ignored, plan_privileges

NOBODY = pwd.getpwnam("nobody")


def test_the_default_is_no_identity() -> None:
    assert find_identity(Settings()) is None
    assert ignored(Settings()) == ""
    assert not plan_privileges(Settings()).core_dumps


@pytest.mark.parametrize("user", ["nobody", NOBODY.pw_uid])
def test_a_user_brings_its_groups(user: str | int) -> None:
    found = find_identity(Settings(user=user))
    assert found is not None
    assert (found.name, found.uid, found.gid) == ("nobody", NOBODY.pw_uid, NOBODY.pw_gid)
    assert found.groups == tuple(os.getgrouplist("nobody", NOBODY.pw_gid))


def test_a_group_of_its_own() -> None:
    found = find_identity(Settings(user="nobody", group=0))
    assert found is not None
    assert found.gid == 0
    assert 0 in found.groups


def test_a_uid_without_a_name_needs_a_group() -> None:
    found = find_identity(Settings(user=4_000_001, group=4_000_002))
    assert found is not None
    assert (found.uid, found.gid, found.groups) == (4_000_001, 4_000_002, (4_000_002,))
    with pytest.raises(ConfigError, match="or name a group too"):
        find_identity(Settings(user=4_000_001))


def test_only_root_becomes_another(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(user="nobody")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert plan_privileges(settings).identity is None
    assert ignored(settings) == "user = 'nobody' is ignored: only root can become another user, and this is uid 1000"
    monkeypatch.setattr(os, "geteuid", lambda: NOBODY.pw_uid)
    assert ignored(settings) == "", "it is that user already"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert plan_privileges(settings).identity == find_identity(settings)
    assert ignored(settings) == ""
