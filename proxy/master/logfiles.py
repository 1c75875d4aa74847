"""The log files, where those who write them are not the master: judged, and made, before they are opened.

A file that is not there yet is made by the master and given to the workers' user, at start and again before the logs
are opened anew; so a folder that only root may write to will do. A file that is there is left as it is.
"""

from __future__ import annotations

import os

from proxy.config.place import faults_at
from proxy.config.schema import Settings
from proxy.errors import ConfigError, StartError
from proxy.master.privileges import Privileges, drop, own_new_file
from proxy.observe.writer import FILE_MODE, check_path

_CANNOT_DROP = 128


def require_logs(settings: Settings, privileges: Privileges) -> None:
    """Raise ConfigError or StartError when a log could not be opened by those who write it. Creates nothing."""
    paths = _paths(settings)
    for key, path in paths.items():
        with faults_at(*key.split(".")):
            check_path(path, key=key)
    if os.geteuid() != 0:
        return
    refused = _refused(list(paths.values()), privileges)
    for key, path in paths.items():
        if path in refused:
            table, _, name = key.partition(".")
            who = f"user {privileges.identity.name}" if privileges.identity else "root without capabilities"
            with faults_at(table, name):
                raise ConfigError(
                    f'{key} = "{path}" is not writable by {who}, as workers are: give it to that user, with its folder'
                )


def make_logs(settings: Settings, privileges: Privileges) -> None:
    """Make the files that are missing, with the right owner. Raises nothing: opening them tells what is wrong."""
    if privileges.identity is not None:
        for path in _paths(settings).values():
            own_new_file(path, FILE_MODE, privileges.identity)


def _paths(settings: Settings) -> dict[str, str]:
    """The logs that are files, by their key."""
    paths = {"access_log.path": settings.access_log.path, "event_log.path": settings.event_log.path}
    return {key: path for key, path in paths.items() if path.startswith("/")}


def _refused(paths: list[str], privileges: Privileges) -> set[str]:
    """Those of ``paths`` that a child with ``privileges`` could not write to, asked in such a child."""
    pid = os.fork()
    if pid == 0:
        status = _CANNOT_DROP
        try:
            drop(privileges)
            status = sum(1 << place for place, path in enumerate(paths) if not _usable(path))
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status < 0 or status >= _CANNOT_DROP:
        who = privileges.identity.name if privileges.identity else "root"
        raise StartError(f"cannot give up privileges to run as {who}: is this root in a restricted container?")
    return {path for place, path in enumerate(paths) if status >> place & 1}


def _usable(path: str) -> bool:
    # One that is missing will be made by the master, in a folder that the writer must at least be able to search.
    return os.access(path, os.W_OK) if os.path.exists(path) else os.access(os.path.dirname(path), os.X_OK)
