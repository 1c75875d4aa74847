"""What there is of the appliance on the host, as JSON on standard output. Standard library only; changes nothing.

Arguments: folder of installations, folder of configurations, configuration file, unit. The answer has the keys:

- ``tag``: architecture and Python, as the wheelhouse's folders are named; ``makes_venv``: whether this Python can;
- ``release``: the one that is linked, or empty; ``releases``: those that are installed completely;
- ``config_sha1``: of the configuration file, or empty; ``fresh``: whether one of the two folders is missing;
- ``unit_state``: ``active``, ``failed``, ... as the service manager says.
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


def main() -> None:
    install_dir, config_dir, config_file, unit = sys.argv[1:]
    current = Path(install_dir, "current")
    show = ["systemctl", "show", "--property=ActiveState", "--value", unit]
    answer = {
        "tag": f"{platform.machine()}-{(sys.implementation.cache_tag or '').replace('cpython-', 'cp')}",
        "makes_venv": all(importlib.util.find_spec(name) for name in ("ensurepip", "venv")),
        "release": Path(os.path.realpath(current)).name if current.is_symlink() else "",
        "releases": sorted(path.parent.name for path in Path(install_dir, "releases").glob("*/.complete")),
        "config_sha1": sha1_of(Path(config_file)),
        "fresh": not (Path(install_dir).is_dir() and Path(config_dir).is_dir()),
        "unit_state": subprocess.run(show, check=True, capture_output=True, text=True).stdout.strip(),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
