"""``python -m tests.bench``: run the proxies in turn on the same work and print the tables."""

from __future__ import annotations

import argparse
import resource
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.bench import packages, report
from tests.bench.peers import KINDS, REPOSITORY, NotRunnableError, Stage, running
from tests.bench.processes import ended_by_signals
from tests.bench.work import FULL, QUICK, WORKS, FailedError, Scale, probe

_DOCUMENT = REPOSITORY / "docs" / "performance.md"
_NGINX_LOG_OPTIONS = " buffer=64k flush=1s"
_MAX_ROUNDS = 20


def _names(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """An argument type: names out of ``known``, separated by commas, each once."""

    def parse(text: str) -> tuple[str, ...]:
        chosen = tuple(dict.fromkeys(name for name in text.split(",") if name))
        strangers = [name for name in chosen if name not in known]
        if strangers or not chosen:
            raise argparse.ArgumentTypeError(f"{text!r}: choose from {','.join(known)}")
        return chosen

    return parse


def _rounds(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MAX_ROUNDS:
        raise argparse.ArgumentTypeError(f"{text!r}: 1 to {_MAX_ROUNDS}")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    every_peer, every_work = tuple(KINDS), tuple(WORKS)
    parser.add_argument("--peers", type=_names(every_peer), default=every_peer, help=",".join(every_peer))
    parser.add_argument("--work", type=_names(every_work), default=every_work, help=",".join(every_work))
    parser.add_argument("--rounds", type=_rounds, help="times each is measured (3; with --quick 1)")
    parser.add_argument("--quick", action="store_true", help="little work, for trying out: figures are rough")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/performance.md too")
    parser.add_argument(
        "--nginx-log-unbuffered", action="store_true", help="nginx's default, one write a line, not 64 KB or 1 s"
    )
    return parser


def _raise_descriptor_limit() -> None:
    """Idle connections need a descriptor each in the client, up to two in a proxy; children inherit the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _measure(results: report.Results, stage: Stage, work: str, name: str, scale: Scale) -> None:
    """One proxy, one kind of work; a failure is kept in the results and does not end the run."""
    kind = WORKS[work]
    try:
        with running(name, stage) as peer:
            seen = probe(peer)
            results.negotiated[name] = f"{seen['version']} {seen['cipher']}"
            one = kind.measure(peer, stage, scale)
    except (NotRunnableError, FailedError) as exc:
        results.failures.append(f"{name}, {kind.title}: {exc}")
        print(f"  {name:8} {work:10} FAILED: {exc}", file=sys.stderr, flush=True)
        return
    results.add(work, name, one)
    print(f"  {name:8} {work:10} {report.main_figure(work, one):9.2f} {kind.unit}", file=sys.stderr, flush=True)


def _run(results: report.Results, options: argparse.Namespace, scale: Scale, rounds: int) -> None:
    log_options = "" if options.nginx_log_unbuffered else _NGINX_LOG_OPTIONS
    with (
        tempfile.TemporaryDirectory(prefix="proxy-bench-") as directory,
        Stage.set_up(Path(directory), nginx_log_options=log_options) as stage,
    ):
        for number in range(rounds):
            print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
            # each round begins with another proxy, so that none always follows the same one
            first = number % len(options.peers)
            for work in options.work:
                for name in (*options.peers[first:], *options.peers[:first]):
                    _measure(results, stage, work, name, scale)
                    results.note_load()


def main() -> int:
    """0 when everything was measured, 1 when something was not, 2 when the bench cannot run at all."""
    options = _parser().parse_args()
    scale, rounds = (QUICK, options.rounds or 1) if options.quick else (FULL, options.rounds or 3)
    if not packages.install(packages.missing(("nginx", "wrk", "h2load", "openssl", *options.peers))):
        return 2
    _raise_descriptor_limit()
    results = report.Results()
    results.note_load()
    try:
        with ended_by_signals():
            _run(results, options, scale, rounds)
    except NotRunnableError as exc:
        print(f"the upstream: {exc}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: every process is ended", file=sys.stderr)
        return 130
    command = shlex.join(["python", "-m", "tests.bench", *sys.argv[1:]])
    body = "\n\n".join(
        (report.conditions(command, results, options.peers, scale, rounds), report.tables(results, options.peers))
    )
    print(body)
    if options.write:
        report.write(_DOCUMENT, body)
    return 1 if results.failures else 0


if __name__ == "__main__":
    sys.exit(main())
