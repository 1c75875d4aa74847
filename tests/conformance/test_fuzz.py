"""Coverage-guided fuzzing for a bounded time, from the corpus that is kept; longer by ``python -m tests.fuzz``."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS

SECS = 8
FEWEST_RUNS = 100


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_nothing_is_found(target: str) -> None:
    command = [sys.executable, "-m", "tests.fuzz", target, "--secs", str(SECS), "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    runs = re.search(r"Done (\d+) runs", done.stderr)
    assert runs is not None, done.stderr[-4000:]
    assert int(runs[1]) >= FEWEST_RUNS, done.stderr[-4000:]


def test_a_fault_is_found(tmp_path: Path) -> None:
    """A target that breaks on one of its corpus's files ends with another exit code: the test above can fail."""
    code = (
        "import sys, atheris\n"
        "def target(data):\n    assert b'x' not in data\n"
        "atheris.Setup([sys.argv[0], '-runs=20000', '-seed=1', '-artifact_prefix=' + sys.argv[1]], target)\n"
        "atheris.Fuzz()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, f"{tmp_path}/"], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode != 0, done.stderr[-2000:]
