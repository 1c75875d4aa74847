"""``make wheelhouse``: nothing but what the lock says, and each wheel pinned. Scenarios install from it on hosts."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scenarios.conftest import ROOT

MADE_HERE = {"python_prctl", "reverse_proxy"}
MAKE_SECS = 900


@pytest.fixture(scope="module")
def wheelhouse() -> Path:
    """For the Python that runs the tests."""
    subprocess.run([str(ROOT / ".ci/wheelhouse")], check=True, timeout=MAKE_SECS)
    (folder,) = ROOT.glob(f"build/wheelhouse/*-cp{sys.version_info[0]}{sys.version_info[1]}")
    return folder


@pytest.mark.timeout(MAKE_SECS)
def test_every_wheel_is_pinned_and_is_of_the_lock(wheelhouse: Path) -> None:
    rows = (wheelhouse / "requirements.txt").read_text()
    pinned = {row[1]: row[2] for row in re.finditer(r"^(\S+)==\S+ --hash=sha256:([0-9a-f]{64})$", rows, re.MULTILINE)}
    assert len(pinned) == len(rows.splitlines())
    lock = (ROOT / "requirements/runtime.txt").read_text()
    wheels = {path.name.split("-")[0]: path for path in wheelhouse.glob("*.whl")}
    assert wheels.keys() == pinned.keys()
    for name, path in wheels.items():
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        assert digest == pinned[name]
        assert (f"sha256:{digest}" in lock) == (name not in MADE_HERE), name
    locked = {name.replace("-", "_") for name in re.findall(r"^([a-z0-9-]+)==", lock, re.MULTILINE)}
    assert locked == wheels.keys() - {"reverse_proxy"}


@pytest.mark.timeout(MAKE_SECS)
def test_nothing_is_made_again_when_nothing_has_changed(wheelhouse: Path) -> None:
    def made() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in wheelhouse.iterdir()}

    ours = next(wheelhouse.glob("reverse_proxy-*.whl")).read_bytes()
    before = made()
    subprocess.run([str(ROOT / ".ci/wheelhouse")], check=True, timeout=MAKE_SECS)
    assert made() == before
    # A wheel made anew from the same files is the same, so hosts keep their release.
    (wheelhouse / ".stamp").write_text((wheelhouse / ".stamp").read_text().split()[0] + " other\n")
    subprocess.run([str(ROOT / ".ci/wheelhouse")], check=True, timeout=MAKE_SECS)
    assert next(wheelhouse.glob("reverse_proxy-*.whl")).read_bytes() == ours
