"""``python -m tests.simulation``: the tables of docs/performance.md."""

from __future__ import annotations

import argparse

from tests.simulation.play import LOADS, POLICIES, play

COLUMNS = (
    "load",
    "policy",
    "requests",
    "served, %",
    "in the storm, %",
    "p99 there, s",
    "most held",
    "evicted",
    "cut",
    "CPU, s",
)


def main() -> None:
    """Print the table, a row as soon as it is known."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=main.__doc__)
    parser.add_argument("--part", type=int, default=1, metavar="N", help="only an N-th of the day, at the same rates")
    parser.add_argument("--load", type=int, nargs="*", choices=range(1, len(LOADS) + 1), help="only these, from 1 on")
    arguments = parser.parse_args()
    loads = [LOADS[number - 1] for number in arguments.load or range(1, len(LOADS) + 1)]
    print("| " + " | ".join(COLUMNS) + " |")
    print("| " + " | ".join("---" for _ in COLUMNS) + " |")
    for load in loads:
        for name, setup in POLICIES.items():
            result = play(load, setup, part=arguments.part)
            waits = sorted(result.storm.waits_secs)
            cells = (
                load.name,
                name,
                f"{result.all.wanted:,}",
                f"{result.all.percent:.2f}",
                f"{result.storm.percent:.1f}" if load.stallers else "",
                f"{waits[int(len(waits) * 0.99)]:.2f}" if waits else "",
                str(result.most_held),
                f"{result.evicted:,}",
                str(result.all.cut),
                f"{result.cpu_secs:.1f}",
            )
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
