"""``python -m tests.simulation``: the table of docs/performance.md, in a minute."""

from __future__ import annotations

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
    print("| " + " | ".join(COLUMNS) + " |")
    print("| " + " | ".join("---" for _ in COLUMNS) + " |")
    for load in LOADS:
        for name, setup in POLICIES.items():
            result = play(load, setup)
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
