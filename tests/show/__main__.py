"""``python -m tests.show``: runs the show and prints its table; exit code 1 when something failed."""

from __future__ import annotations

import sys

from tests.show.play import play


def main() -> int:
    """The exit code."""
    report = play()
    print(report.text())
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
