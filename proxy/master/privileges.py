"""What a child gives up before it does anything: the uid, every capability, new privileges, core dumps.

The order matters. Changing the uid clears the death signal and makes the process dumpable or not as the kernel likes,
so both are set after it (prctl(2)); the bounding set can only be emptied while CAP_SETPCAP is still there.
"""

from __future__ import annotations

import contextlib
import ctypes
import grp
import os
import pwd
import resource
import signal
from dataclasses import dataclass

import prctl

from proxy.config.place import faults_at
from proxy.config.schema import Settings
from proxy.errors import ConfigError

_LIBC = ctypes.CDLL(None, use_errno=True)
# python-prctl sets capabilities by name and so keeps those that are newer than it; these calls name none.
_PR_CAPBSET_DROP = 24
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_CAPABILITY_VERSION_3 = 0x20080522
_MAX_CAPABILITIES = 64


@dataclass(frozen=True, slots=True)
class Identity:
    """A user to become: ``groups`` are its supplementary groups, ``gid`` among them or not."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Privileges:
    """How little a child has. ``identity`` None: it stays who the master is."""

    identity: Identity | None = None
    core_dumps: bool = False


def plan_privileges(settings: Settings) -> Privileges:
    """What the children will have. Raises ConfigError for a user or group that this host does not know."""
    with faults_at("user" if settings.user is not None else "group"):
        identity = find_identity(settings)
    return Privileges(identity if os.geteuid() == 0 else None, settings.core_dumps)


def ignored(settings: Settings) -> str:
    """Why ``user`` and ``group`` have no effect; "" where they have one, or where nothing would change."""
    identity = find_identity(settings)
    uid = os.geteuid()
    if identity is None or uid in (0, identity.uid):
        return ""
    return f"user = {settings.user!r} is ignored: only root can become another user, and this is uid {uid}"


def find_identity(settings: Settings) -> Identity | None:
    """``user`` and ``group`` looked up. Raises ConfigError for what this host does not know."""
    if settings.user is None:
        return None
    user = settings.user
    try:
        entry = pwd.getpwnam(user) if isinstance(user, str) else pwd.getpwuid(user)
    except KeyError:
        entry = None
    if entry is None and (isinstance(user, str) or settings.group is None):
        hint = "" if isinstance(user, str) else ", or name a group too"
        raise ConfigError(f"user: this host knows no user {user!r}: make it, or name another{hint}") from None
    group = settings.group
    try:
        if isinstance(group, str):
            gid = grp.getgrnam(group).gr_gid
        elif group is not None:
            gid = group
        else:
            assert entry is not None
            gid = entry.pw_gid
    except KeyError:
        raise ConfigError(f"group: this host knows no group {group!r}: make it, or name another") from None
    if entry is None:
        return Identity(str(user), int(user), gid, (gid,))
    return Identity(entry.pw_name, entry.pw_uid, gid, tuple(os.getgrouplist(entry.pw_name, gid)))


def forbid_cores(settings: Settings) -> None:
    """In the master, before any key is read: no core file of it or of a child, unless asked for."""
    if not settings.core_dumps:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def drop(privileges: Privileges) -> None:
    """In the child: become the identity without any capability, and end with the master.

    Raises OSError when the identity cannot be taken: then nothing must go on.
    """
    for capability in range(_MAX_CAPABILITIES):
        # EINVAL: beyond the kernel's last one; EPERM: no CAP_SETPCAP, and then no_new_privs below is what holds.
        _LIBC.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    identity = privileges.identity
    if identity is not None:
        os.setgroups(identity.groups)
        os.setresgid(identity.gid, identity.gid, identity.gid)
        os.setresuid(identity.uid, identity.uid, identity.uid)
    _LIBC.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    _clear_capabilities()
    prctl.set_no_new_privs(1)
    prctl.set_pdeathsig(signal.SIGKILL)
    prctl.set_dumpable(privileges.core_dumps)


def own_new_file(path: str, mode: int, identity: Identity) -> None:
    """Make ``path``, owned by ``identity``, where nothing is there yet; what is there is left as it is.

    An ``O_EXCL`` open: what is given away is what was made here, and never what a link points to.
    """
    with contextlib.suppress(OSError):  # whoever opens it for good says what is wrong
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        try:
            os.fchown(fd, identity.uid, identity.gid)
        finally:
            os.close(fd)


def _clear_capabilities() -> None:
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    if _LIBC.capset(header, (ctypes.c_uint32 * 6)()):
        number = ctypes.get_errno()
        raise OSError(number, f"cannot drop capabilities: {os.strerror(number)}")
