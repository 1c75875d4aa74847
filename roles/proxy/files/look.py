"""What there is of the appliance on the host, as JSON on standard output. Standard library only; changes nothing.

Arguments: folder of installations, folder of configurations, configuration file, unit, the unit's drop-in. The answer
has the keys:

- ``tag``: architecture and Python, as the wheelhouse's folders are named; ``makes_venv``: whether this Python can;
- ``release``: the one that is linked, or empty; ``releases``: those that are installed completely;
  ``kept``: the folders of releases, complete or not; ``configured``: those of them that keep a configuration;
- ``previous``: the release that a rollback leads to, or empty; ``previous_config``: whether its configuration is there;
- ``config_sha1``: of the configuration file, or empty; ``fresh``: whether one of the two folders is missing;
- ``folders``: those of the first two, and that of releases, that are root's with mode 0755;
- ``unit_text``: the unit and its drop-in; ``unit_state``: ``active``, ``failed``, ... as the service manager says.

Exits with the service manager's complaint where it gives no answer.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
from pathlib import Path


def sha1_of(path: Path) -> str:
    """Ansible's own checksum of a file; empty where there is none."""
    return hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest() if path.is_file() else ""


def target_of(link: Path) -> str:
    """The release behind a link; empty where there is no link."""
    return Path(os.path.realpath(link)).name if link.is_symlink() else ""


def is_roots(folder: Path) -> bool:
    if not folder.is_dir() or folder.is_symlink():
        return False
    about = folder.stat()
    return (about.st_uid, about.st_gid, about.st_mode & 0o7777) == (0, 0, 0o755)


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def state_of(unit: str) -> str:
    command = ["systemctl", "show", "--property=ActiveState", "--value", unit]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except OSError as error:
        sys.exit(f"systemctl: {error.strerror}")
    except subprocess.CalledProcessError as error:
        sys.exit(f"systemctl: {error.stderr.strip() or f'it ended with {error.returncode}'}")


def main() -> None:
    install_dir, config_dir, config_file, unit, drop_in = sys.argv[1:]
    releases = Path(install_dir, "releases")
    answer = {
        "tag": f"{platform.machine()}-{(sys.implementation.cache_tag or '').replace('cpython-', 'cp')}",
        "makes_venv": all(importlib.util.find_spec(name) for name in ("ensurepip", "venv")),
        "release": target_of(Path(install_dir, "current")),
        "releases": sorted(path.parent.name for path in releases.glob("*/.complete")),
        "kept": sorted(path.name for path in releases.glob("*") if path.is_dir()),
        "configured": sorted(path.parent.name for path in releases.glob("*/config.toml")),
        "previous": target_of(Path(install_dir, "previous")),
        "previous_config": Path(install_dir, "previous.toml").is_file(),
        "config_sha1": sha1_of(Path(config_file)),
        "fresh": not (Path(install_dir).is_dir() and Path(config_dir).is_dir()),
        "folders": [str(path) for path in (Path(install_dir), releases, Path(config_dir)) if is_roots(path)],
        "unit_text": text_of(Path("/etc/systemd/system", unit)) + text_of(Path(drop_in)),
        "unit_state": state_of(unit),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
