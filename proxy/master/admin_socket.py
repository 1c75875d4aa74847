"""The admin socket's file: never wider than mode 0600, a stale one replaced, a live one respected."""

from __future__ import annotations

import os
import socket
import stat

from proxy.config.place import faults_at
from proxy.errors import ConfigError, StartError
from proxy.master.status_client import answering_pid

BACKLOG = 16
_OWNER_ONLY = 0o177  # umask: a socket file of mode 0600 from its first moment
_CONNECT_TIMEOUT_SECS = 1.0
_ANSWER_TIMEOUT_SECS = 1.0


def bind_admin_socket(path: str) -> socket.socket:
    """A listening, non-blocking Unix socket at ``path``, its folder made where missing.

    Raises ConfigError when a file of another kind is there, StartError when another process answers there or it cannot
    be made.
    """
    _clear_stale(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(_OWNER_ONLY)
    try:
        sock.bind(path)
    except OSError as error:
        sock.close()
        raise StartError(f"cannot make the admin socket {path}: {error.strerror or error}") from error
    finally:
        os.umask(before)
    sock.listen(BACKLOG)
    sock.setblocking(False)
    return sock


def require_socket_or_nothing(path: str) -> None:
    """Raise ConfigError, with its key, when what is at ``path`` is no socket. Creates and removes nothing."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return
    if not stat.S_ISSOCK(mode):
        with faults_at("admin", "socket"):
            raise ConfigError(f"{path} cannot be the admin socket: another kind of file is there; choose another path")


def identity(path: str) -> tuple[int, int] | None:
    """Device and inode of the file at ``path``, None without one: to remove at exit only what was made at start."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _clear_stale(path: str) -> None:
    try:
        os.makedirs(os.path.dirname(path) or ".", mode=0o755, exist_ok=True)
        os.lstat(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StartError(f"cannot make the admin socket {path}: {error.strerror}") from error
    require_socket_or_nothing(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(_CONNECT_TIMEOUT_SECS)
        try:
            client.connect(path)
        except ConnectionRefusedError:
            _unlink(path)
        except FileNotFoundError:
            return
        except OSError as error:  # a full backlog or a lack of permission: somebody lives there
            raise StartError(f"the admin socket {path} is in use: {error.strerror or error}") from error
        else:
            # SO_PEERCRED would name the process that called listen(2), which an upgrade has ended.
            pid = answering_pid(path, _ANSWER_TIMEOUT_SECS)
            who = "another instance" if pid is None else f"another instance (pid {pid})"
            raise StartError(f"{who} answers on the admin socket {path}: stop it first")


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError as error:
        raise StartError(f"cannot replace the stale admin socket {path}: {error.strerror}") from error
