from __future__ import annotations

import array
import errno
import fcntl
import os
import re
import shutil
import stat
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from proxy.errors import ConfigError, StartError
from proxy.observe import writer as writer_module
from proxy.observe.writer import LineWriter, check_path

KEY = "access_log.path"
WAIT_SECS = 20.0


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECS
    while not holds():
        assert time.monotonic() < deadline, f"not within {WAIT_SECS} s: {what}"
        time.sleep(0.005)


def unread_bytes(pipe: int) -> int:
    count = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, count)
    return count[0]


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RETRY_SECS", "CHECK_SECS", "GONE_SECS"):
        monkeypatch.setattr(writer_module, name, 0.02)


@pytest.fixture
def started() -> Iterator[Callable[..., LineWriter]]:
    writers: list[LineWriter] = []

    def start(path: str | Path, **options: int) -> LineWriter:
        one = LineWriter(str(path), key=KEY, **options)
        one.start()
        writers.append(one)
        return one

    yield start
    for one in writers:
        one.close(0)
    wait_until(lambda: all(one.close(1) for one in writers), "every writer's thread ends")


Start = Callable[..., LineWriter]


def numbered(count: int, length: int = 100) -> bytes:
    return b"".join(b"%06d %s\n" % (n, b"x" * (length - 8)) for n in range(count))


def test_lines_are_appended_and_the_file_is_not_for_everyone(tmp_path: Path, started: Start) -> None:
    path = tmp_path / "access.log"
    path.write_bytes(b"old\n")
    path.unlink()
    one = started(path)
    assert one.write(b"a\n", 1)
    assert one.write(b"b\nc\n", 2)
    assert one.close(WAIT_SECS)
    assert path.read_bytes() == b"a\nb\nc\n"
    assert stat.S_IMODE(path.stat().st_mode) & 0o137 == 0
    again = started(path)
    again.write(b"d\n", 1)
    assert again.close(WAIT_SECS)
    assert path.read_bytes() == b"a\nb\nc\nd\n"
    assert (one.lines_written, one.lines_dropped, one.queued_bytes) == (3, 0, 0)


def test_a_path_that_cannot_be_opened_is_told_at_once(tmp_path: Path) -> None:
    missing = tmp_path / "missing" / "a.log"
    with pytest.raises(StartError, match=rf'access_log.path = "{missing}" cannot be opened \(ENOENT: '):
        LineWriter(str(missing), key=KEY)
    with pytest.raises(StartError, match="EISDIR"):
        LineWriter(str(tmp_path), key=KEY)
    with pytest.raises(ConfigError, match='wanted "stdout", "stderr" or an absolute path'):
        LineWriter("relative.log", key=KEY)


def test_a_fifo_that_nobody_reads_fails_instead_of_hanging(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(StartError, match="ENXIO"):
        LineWriter(str(tmp_path / "fifo"), key=KEY)


def test_checking_a_path_makes_nothing(tmp_path: Path) -> None:
    check_path("stdout", key=KEY)
    check_path(str(tmp_path / "new.log"), key=KEY)
    for path, what in [
        (tmp_path / "no" / "a.log", f"needs the folder {tmp_path}/no, which does not exist"),
        (tmp_path, "is a folder"),
        (Path("a.log"), "absolute path"),
    ]:
        with pytest.raises(ConfigError, match=re.escape(what)):
            check_path(str(path), key=KEY)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_drops_and_counts_and_the_thread_lives(started: Start) -> None:
    one = started("/dev/full")
    one.write(b"a\nb\n", 2)
    wait_until(lambda: one.lines_dropped == 2, "both lines are counted")
    assert one.fault == f"ENOSPC: {os.strerror(errno.ENOSPC)}"
    faults = one.faults
    wait_until(lambda: one.write(b"c\n", 1) and one.faults > faults, "it is tried again")
    assert one.close(WAIT_SECS)
    assert one.lines_written == 0


TORN = """
import os, resource, sys, time
from proxy.observe import writer
from proxy.observe.writer import LineWriter
writer.RETRY_SECS = 0.02
def wait(holds):
    while not holds():
        time.sleep(0.005)
def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
one = LineWriter(sys.argv[1], key="k")
one.start()
limit(250)
one.write(b"".join(b"%06d %s\\n" % (n, b"x" * 92) for n in range(6)), 6)
wait(lambda: one.faults == 1)
assert (one.lines_written, one.lines_dropped) == (2, 3), (one.lines_written, one.lines_dropped)
time.sleep(0.05)
limit(260)  # the rest of the third line does not fit either
one.write(b"lost\\n", 1)
wait(lambda: one.faults == 2)
limit(resource.RLIM_INFINITY)
time.sleep(0.05)
one.write(b"last\\n", 1)
assert one.close(20)
print(one.lines_written, one.lines_dropped)
"""


def test_a_line_that_was_cut_by_a_failure_is_completed_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    ran = subprocess.run([sys.executable, "-c", TORN, path], capture_output=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr.decode()
    assert path.read_bytes() == numbered(3) + b"last\n"
    assert ran.stdout.split() == [b"4", b"4"]


def test_a_pipe_that_nobody_reads_bounds_the_queue_and_ends_in_time(tmp_path: Path, started: Start) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        one = started(fifo, max_queued_bytes=200_000)
        accepted = sum(one.write(numbered(100), 100) for _ in range(100))
        assert 20 <= accepted < 100
        assert one.queued_bytes <= 200_000
        assert one.lines_dropped == (100 - accepted) * 100
        wait_until(lambda: unread_bytes(reader) > 50_000, "the pipe is full")
        assert not one.close(0)
        wait_until(lambda: one.close(1), "a thread in a blocked write gives up")
        assert one.lines_written + one.lines_dropped == 100 * 100
        got = os.read(reader, 1_000_000)
        assert len(got) >= one.lines_written * 100 > 0
        assert all(re.fullmatch(rb"\d{6} x{92}", line) for line in got.splitlines())
    finally:
        os.close(reader)


def test_a_reader_that_comes_back_is_written_to_again(tmp_path: Path, started: Start) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    one = started(fifo)
    os.close(reader)
    one.write(b"a\n", 1)
    wait_until(lambda: one.lines_dropped == 1, "the line is counted")
    assert one.fault.startswith("EPIPE")
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        wait_until(lambda: one.write(b"b\n", 1) and one.lines_written > 0, "written again")
        assert os.read(reader, 100).startswith(b"b\n")
    finally:
        os.close(reader)


def test_rotation(tmp_path: Path, started: Start) -> None:
    path = tmp_path / "a.log"
    one = started(path)
    one.write(b"before\n", 1)
    wait_until(lambda: one.lines_written == 1, "written")
    path.rename(tmp_path / "a.log.1")
    one.reopen()
    one.write(b"after\n", 1)
    assert one.close(WAIT_SECS)
    assert path.read_bytes() == b"after\n"
    assert (tmp_path / "a.log.1").read_bytes() == b"before\n"


def test_a_removed_folder_is_told_and_found_again(tmp_path: Path, started: Start) -> None:
    folder = tmp_path / "log"
    folder.mkdir()
    one = started(folder / "a.log")
    shutil.rmtree(folder)
    wait_until(lambda: one.write(b"x\n", 1) and one.faults > 0, "the failure is counted")
    assert one.fault.startswith("ENOENT")
    folder.mkdir()
    wait_until(lambda: one.write(b"back\n", 1) and (folder / "a.log").exists(), "a new file")
    assert one.close(WAIT_SECS)
    assert (folder / "a.log").read_bytes().endswith(b"back\n")


def test_a_failed_reopen_keeps_the_old_file(tmp_path: Path, started: Start) -> None:
    path = tmp_path / "a.log"
    one = started(path)
    path.rename(tmp_path / "a.log.1")
    path.mkdir()
    one.reopen()
    wait_until(lambda: one.faults == 1, "the failure is counted")
    one.write(b"meanwhile\n", 1)
    wait_until(lambda: (tmp_path / "a.log.1").read_bytes() == b"meanwhile\n", "the old file goes on")
    assert one.lines_dropped == 0
    path.rmdir()
    wait_until(lambda: one.write(b"x\n", 1) and path.exists(), "opened again")


BLOCKED = """
from proxy.observe.writer import LineWriter
one = LineWriter("stdout", key="k")
one.start()
for _ in range(100):
    one.write((b"x" * 99 + b"\\n") * 600, 600)
assert not one.close(0.2)
# The pipe takes 64 KB, if the thread has its turn.
assert one.lines_dropped >= 100 * 600 - (4 * 1024 * 1024 + 65_536) // 100, one.lines_dropped
"""


def test_a_process_whose_standard_output_is_blocked_ends() -> None:
    with subprocess.Popen([sys.executable, "-c", BLOCKED], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.wait(timeout=60) == 0, process.stderr and process.stderr.read().decode()
        finally:
            process.kill()


SHARED = """
import sys
from proxy.observe.writer import LineWriter
one = LineWriter("stdout", key="k")
one.start()
for _ in range(20):
    one.write((sys.argv[1].encode() * 70 + b"\\n") * 500, 500)
assert one.close(60)
"""


def test_lines_of_several_processes_on_one_pipe_do_not_mix() -> None:
    read_end, write_end = os.pipe()
    processes = [subprocess.Popen([sys.executable, "-c", SHARED, name], stdout=write_end) for name in "abc"]
    os.close(write_end)
    try:
        with open(read_end, "rb") as pipe:
            lines = pipe.read().split(b"\n")
        assert [process.wait(timeout=60) for process in processes] == [0, 0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert lines.pop() == b""
    assert {line: lines.count(line) for line in set(lines)} == {name * 70: 10_000 for name in (b"a", b"b", b"c")}
