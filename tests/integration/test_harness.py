"""What the tests themselves stand on."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

from tests.conftest import StartAppliance
from tests.harness import RawUpstream, Wire

PIECE = bytes(50_000)
COUNT = 20_000
REQUEST = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % (COUNT * len(PIECE))
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % COUNT

TWO_TESTS = """
import threading
from tests.harness import connect_tcp

def test_that_fails(upstream):
    held = [connect_tcp(upstream().port) for _ in range(3)]
    thread = threading.Thread(target=held[0].read_head)
    thread.start()
    assert not held

def test_beside_it():
    assert threading.active_count() == 1
"""
ROOT = Path(__file__).parents[2]


def count_pieces(wire: Wire) -> None:
    """Answers with one byte for each piece, so that the client waits for most of them."""
    wire.read_head()
    wire.send(HEAD)
    for _ in range(COUNT):
        wire.read_exactly(len(PIECE))
        wire.send(b".")


def test_one_thread_sends_over_tls_while_another_reads(appliance: StartAppliance) -> None:
    """OpenSSL allows one call at a time to a connection; two at once ended in SSLEOFError now and then."""
    with RawUpstream(count_pieces) as upstream, appliance({}, upstream=upstream.url).connect() as client:
        client.send(REQUEST)

        def send() -> None:
            for _ in range(COUNT):
                client.send(PIECE)

        sender = threading.Thread(target=send)
        sender.start()
        try:
            client.read_head()
            assert all(client.read_exactly(1) == b"." for _ in range(COUNT))
        finally:
            client.close()
            sender.join()


def test_what_a_failed_test_left_open_does_not_fail_the_next_one(tmp_path: Path) -> None:
    (tmp_path / "test_two.py").write_text(TWO_TESTS)
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-p", "tests.conftest", "-q"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [*command, str(tmp_path)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert "test_two.py::test_that_fails - assert not" in ran.stdout, ran.stdout
    assert "::test_beside_it" not in ran.stdout, ran.stdout
    assert "1 passed" in ran.stdout, ran.stdout
