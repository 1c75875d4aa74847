from __future__ import annotations

import os
import subprocess
import sys

from proxy.master.family import descends_from


def test_parents_are_followed_up() -> None:
    script = "import os, time; child = os.fork(); print(child or '', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        grandchild = int(next(line for line in process.stdout if line.strip()))
        try:
            assert descends_from(process.pid, os.getpid())
            assert descends_from(grandchild, os.getpid())
            assert descends_from(grandchild, process.pid)
            assert not descends_from(process.pid, grandchild)
            assert not descends_from(os.getpid(), process.pid)
        finally:
            process.kill()
            os.kill(grandchild, 9)


def test_a_process_is_of_its_own_family() -> None:
    assert descends_from(os.getpid(), os.getpid())


def test_who_has_gone_is_not_let_in() -> None:
    process = subprocess.Popen(["/bin/true"])
    process.wait()
    assert descends_from(process.pid, os.getppid())
