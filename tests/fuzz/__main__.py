"""``python -m tests.fuzz TARGET [--secs 60] [--keep]``: exit code 0 when nothing was found.

Starts from the corpus below ``tests/fuzz/corpus/TARGET``; ``--keep`` adds to it what reaches new code. An input that
breaks a target is written to ``tests/fuzz/found``, and is tried again with ``--input FILE``.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["proxy"]):
    from tests.fuzz.targets import TARGETS

FOLDER = Path(__file__).parent
MAX_BYTES = 2048


def main() -> None:
    """Does not return: libFuzzer ends the process."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--secs", type=int, default=60, help="how long (60)")
    parser.add_argument("--seed", type=int, default=0, help="of the random choices; 0: another each time")
    parser.add_argument("--keep", action="store_true", help="add what is new to the corpus")
    parser.add_argument("--input", type=Path, help="try this file only")
    options = parser.parse_args()
    target = TARGETS[options.target]
    if options.input is not None:
        target(options.input.read_bytes())
        sys.exit(0)
    corpus, found = FOLDER / "corpus" / options.target, FOLDER / "found"
    found.mkdir(exist_ok=True)
    corpus.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix="rp-fuzz-"))
    folders = [str(corpus)] if options.keep else [str(fresh), str(corpus)]
    arguments = [
        f"-max_total_time={options.secs}",
        f"-max_len={MAX_BYTES}",
        f"-seed={options.seed}",
        f"-artifact_prefix={found}/{options.target}-",
        "-print_final_stats=1",
        "-timeout=10",
        f"-dict={FOLDER}/http.dict",
        *folders,
    ]
    atheris.Setup([sys.argv[0], *arguments], target)
    try:
        atheris.Fuzz()
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


if __name__ == "__main__":
    main()
