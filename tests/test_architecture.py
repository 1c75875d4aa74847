"""Imports point down only: the contract stands in pyproject.toml, import-linter judges it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
LINT_IMPORTS = str(Path(sys.executable).with_name("lint-imports"))


def _lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [LINT_IMPORTS, "--no-cache", "--config", str(folder / "pyproject.toml")]
    return subprocess.run(
        command, cwd=folder, env={"PYTHONPATH": str(folder)}, capture_output=True, text=True, check=False
    )


def test_layers_hold() -> None:
    found = _lint(ROOT)
    assert found.returncode == 0, found.stdout + found.stderr


def test_an_import_that_points_up_is_found(tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "proxy", tmp_path / "proxy")
    with (tmp_path / "proxy" / "errors.py").open("a") as leaf:
        leaf.write("\nimport proxy.worker\n")
    found = _lint(tmp_path)
    assert found.returncode == 1, found.stdout + found.stderr
    assert "proxy.errors -> proxy.worker" in found.stdout
