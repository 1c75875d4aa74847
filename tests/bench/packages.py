"""The Debian packages the bench needs."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

_TOOLS = {
    **{name: name for name in ("nginx", "haproxy", "caddy", "wrk", "openssl")},
    "h2load": "nghttp2-client",
}
"""Package by command."""
_POLICY = Path("/usr/sbin/policy-rc.d")
_INSTALL_TIMEOUT_SECS = 600


def missing(commands: Iterable[str]) -> list[str]:
    """Packages of those commands that are not on the path."""
    search = os.pathsep.join((os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"))
    os.environ["PATH"] = search  # nginx and haproxy are in sbin, which a user's path may lack
    return sorted({_TOOLS[command] for command in commands if command in _TOOLS and not shutil.which(command)})


def install(packages: list[str]) -> bool:
    """Install them with apt-get when root (without starting their services); whether they are there now."""
    if not packages:
        return True
    wanted = " ".join(packages)
    if os.geteuid() or not shutil.which("apt-get"):
        print(f"The bench needs {wanted}: apt-get install {wanted}", file=sys.stderr)
        return False
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with _no_services():
        for words in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
            run = subprocess.run(
                ["apt-get", "-q", *words],
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_INSTALL_TIMEOUT_SECS,
                check=False,
            )
            if run.returncode:
                print(f"apt-get {' '.join(words)} failed:\n{run.stderr[-2000:]}", file=sys.stderr)
                return False
    return True


@contextlib.contextmanager
def _no_services() -> Iterator[None]:
    """Debian starts a service as it is installed unless a policy forbids it (invoke-rc.d(8))."""
    if _POLICY.exists():
        yield
        return
    _POLICY.write_text("#!/bin/sh\nexit 101\n")
    _POLICY.chmod(0o755)
    try:
        yield
    finally:
        _POLICY.unlink(missing_ok=True)
