"""``python -m tests.bench.balance``: how evenly the kernel spreads connections over the workers' sockets."""

from __future__ import annotations

import argparse
import resource
import socket
import ssl
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from tests.bench.processes import ended_by_signals
from tests.harness import Appliance, RawUpstream, Wire

_TIMEOUT_SECS = 60.0
_REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


def spread(workers: int, connections: int) -> list[int]:
    """Open TLS connections, one request each, all held at the end: how many each worker has.

    :raises AssertionError: when a request was not answered or a connection not held
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="proxy-balance-")))
        upstream = stack.enter_context(RawUpstream())
        # Room for all of them in each worker, so that the kernel decides and not the permits.
        config = {
            "workers": workers,
            "max_connections": workers * connections,
            "max_upstream_connections": 64,
            "connection_idle_timeout_secs": 600,
        }
        one = Appliance(folder, config, upstream=upstream.url)
        stack.callback(one.forget)
        stack.callback(one.kill)
        one.start()
        context = ssl._create_unverified_context()
        for _ in range(connections):
            plain = socket.create_connection(("127.0.0.1", one.port), _TIMEOUT_SECS)
            client = stack.enter_context(Wire(context.wrap_socket(plain), _TIMEOUT_SECS))
            status = client.request(_REQUEST).status
            assert status == 200, f"answered {status}"
        held = [int(worker["permits_held"]) for worker in one.status()["workers"]]
    assert sum(held) == connections, f"{held} of {connections} are held"
    return held


def main() -> int:
    """Print one line a round and the median of most loaded over least loaded."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.balance", description=__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--connections", type=int, default=2_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    ratios = []
    with ended_by_signals():
        for number in range(options.rounds):
            held = spread(options.workers, options.connections)
            ratios.append(max(held) / min(held))
            print(f"round {number + 1}: {' '.join(map(str, held))}, most over least {ratios[-1]:.2f}", flush=True)
    print(f"median {statistics.median(ratios):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
