"""The tables of a run, and their place in docs/performance.md."""

from __future__ import annotations

import os
import platform
import ssl
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from tests.bench.peers import version_of
from tests.bench.work import WORKS, Measured, Scale

MARKS = {
    "bench": ("<!-- bench:begin (written by make bench) -->", "<!-- bench:end -->"),
    "overload": ("<!-- overload:begin (written by make bench-overload) -->", "<!-- overload:end -->"),
}
"""What stands before and after each text that is written into a document."""

_SOME = "{:.1f}"


@dataclass
class Results:
    """All measurements of a run: by work and peer, one for each round that went well."""

    measured: dict[str, dict[str, list[Measured]]] = field(default_factory=dict)
    negotiated: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)

    def add(self, work: str, peer: str, one: Measured) -> None:
        """Keep one round's measurement."""
        self.measured.setdefault(work, {}).setdefault(peer, []).append(one)

    def note_load(self) -> None:
        """Keep the machine's load average over the last minute."""
        self.loads.append(os.getloadavg()[0])


def main_figure(work: str, one: Measured) -> float:
    """The figure that ratios are taken of: memory each for idle connections, CPU for all else."""
    return one.anonymous_kb_each if work == "idle" else one.unit


def tables(results: Results, peers: Sequence[str]) -> str:
    """Every table as Markdown with its rows in the order of ``peers``, then ours against the goals."""
    parts = [
        _table(work, {peer: by_peer[peer] for peer in peers if peer in by_peer})
        for work, by_peer in results.measured.items()
    ]
    goals = _goals(results)
    if goals:
        parts.append(goals)
    if results.failures:
        reasons = (failure.splitlines()[0].rstrip(":") for failure in results.failures)
        parts.append("Not measured:\n\n" + "\n".join(f"- {reason}" for reason in reasons))
    return "\n\n".join(parts)


def conditions(command: str, results: Results, peers: Iterable[str], scale: Scale, rounds: int) -> str:
    """What a reader needs to judge or repeat the run, as a Markdown list."""
    versions = "; ".join(f"{peer}: {version_of(peer)}" for peer in peers)
    negotiated = "; ".join(f"{peer}: {what}" for peer, what in results.negotiated.items())
    loads = results.loads or [os.getloadavg()[0]]
    work = (
        f"{scale.wrk_secs} s of keep-alive requests, {scale.handshakes:,} handshakes, {scale.transfers} transfers of "
        f"100 MB each way, {scale.idle_connections:,} idle connections; HTTP/2: {scale.http2_requests:,} requests, "
        f"{scale.transfers} downloads of 100 MB"
    )
    lines = (
        f"Command: `{command}`",
        f"When: {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        f"Machine: {_cpu_model()}, {os.cpu_count()} CPUs, Linux {platform.release()}",
        f"Load average (1 min): {loads[0]:.2f} at the start, {max(loads):.2f} at most, the bench's own load included",
        f"Versions: {versions}; Python {platform.python_version()}, {ssl.OPENSSL_VERSION}",
        f"Negotiated: {negotiated}; X25519 (the only group offered), ECDSA P-256 certificate, no resumption",
        f"Rounds: {rounds}, the proxies in turn, freshly started for each work; figures are medians over the rounds",
        f"Work a round: {work}",
    )
    return "\n".join(f"- {line}" for line in lines)


def write(path: Path, body: str, *, marks: str = "bench") -> None:
    """Put ``body`` between the markers of a document.

    :raises ValueError: when the document lacks them
    """
    text = path.read_text("utf-8")
    first, last = MARKS[marks]
    head, begin, rest = text.partition(first)
    _, end, tail = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"{path} has no lines {first!r} and {last!r}")
    path.write_text(f"{head}{first}\n\n{body}\n\n{last}{tail}", "utf-8")


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


def _ratio(work: str, by_peer: Mapping[str, Sequence[Measured]], peer: str, other: str) -> float | None:
    """Of the medians."""
    if peer not in by_peer or other not in by_peer:
        return None
    base = _median(main_figure(work, one) for one in by_peer[other])
    return _median(main_figure(work, one) for one in by_peer[peer]) / base if base > 0 else None


def _table(work: str, by_peer: Mapping[str, Sequence[Measured]]) -> str:
    kind = WORKS[work]
    others = [other for other in ("nginx", "caddy") if other in by_peer]
    cpu_work = work != "idle"
    digits = "{:.2f}" if kind.unit == "s/GB" else _SOME
    if cpu_work:
        p99 = "slowest, ms" if kind.unit == "s/GB" else "p99, ms"
        columns = [f"CPU, {kind.unit}", "user", "system", "least", kind.rate, p99, "RSS, MB", "PSS, MB"]
    else:
        columns = [f"growth, {kind.unit}", "least", f"growth of RSS, {kind.unit}", "RSS, MB", "PSS, MB"]
    rows = []
    for peer, rounds in by_peer.items():
        figures = [main_figure(work, one) for one in rounds]
        if cpu_work:
            cells = [
                digits.format(_median(figures)),
                digits.format(_median(one.user for one in rounds)),
                digits.format(_median(one.system for one in rounds)),
                digits.format(min(figures)),
                f"{_median(one.per_second for one in rounds):,.0f}",
                _SOME.format(_median(one.p99_ms for one in rounds)),
            ]
        else:
            cells = [
                digits.format(_median(figures)),
                digits.format(min(figures)),
                digits.format(_median(one.rss_kb_each for one in rounds)),
            ]
        cells.append(_SOME.format(_median(one.rss_mb for one in rounds)))
        cells.append(_SOME.format(_median(one.pss_mb for one in rounds)))
        ratios = [_ratio(work, by_peer, peer, other) for other in others]
        cells += ["-" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        rows.append([peer, *cells])
    header = ["proxy", *columns, *(f"x {other}" for other in others)]
    return f"### {kind.title}\n\n{_markdown(header, rows)}{_remarks(by_peer)}"


def _remarks(by_peer: Mapping[str, Sequence[Measured]]) -> str:
    """What would make the comparison unfair, where there was any: see ``Measured.notes``."""
    said = []
    for peer, rounds in by_peer.items():
        worst = {key: max(one.notes.get(key, 0) for one in rounds) for key in rounds[0].notes}
        said += [f"{peer}: {count:,} {key}" for key, count in worst.items() if count > 0]
    return "\n\nRemarks: " + "; ".join(said) if said else ""


def _goals(results: Results) -> str:
    rows = []
    for work, by_peer in results.measured.items():
        for other, goal in WORKS[work].goals.items():
            ratio = _ratio(work, by_peer, "ours", other)
            if ratio is not None:
                rows.append([WORKS[work].title, other, f"{goal}", f"{ratio:.2f}", "yes" if ratio <= goal else "no"])
    if not rows:
        return ""
    return "### Against the goals\n\n" + _markdown(["work", "beside", "goal: at most", "measured", "reached"], rows)


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[place]) for line in (header, *rows)) for place in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return "\n".join([line(header), line(["-" * width for width in widths]), *(line(row) for row in rows)])


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
