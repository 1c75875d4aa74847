"""Five hundred reloads in a row under load: nobody fails, and nothing grows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from tests.conftest import StartAppliance
from tests.harness import Appliance, RawUpstream, descriptor_count, wait_until
from tests.harness.reloading import reload

RELOADS = 500
WARM_UP = 150
"""Until caches and the allocator have what they want."""
WORKERS = 4
REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
REQUESTS_A_CONNECTION = 20
PAUSE_SECS = 0.01
MAX_GROWTH_KB = 6 * 1024
"""By 350 reloads. One generation kept is some 100 KB: 35 MB."""


def resident_kb(pid: int) -> int:
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1])


class Load:
    """Clients that ask, one request after another, on connections that last for some of them."""

    def __init__(self, one: Appliance) -> None:
        self._one = one
        self._stop = threading.Event()
        self.served = 0
        self.faults: list[str] = []
        self._threads = [threading.Thread(target=self._run) for _ in range(2)]

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with self._one.connect() as client:
                    for _ in range(REQUESTS_A_CONNECTION):
                        status = client.request(REQUEST).status
                        if status != 200:
                            self.faults.append(f"status {status}")
                        self.served += 1
                        if self._stop.wait(PAUSE_SECS):
                            break
            except (OSError, EOFError) as error:
                self.faults.append(repr(error))

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)


def test_five_hundred_reloads_under_load(appliance: StartAppliance, upstream: Callable[..., RawUpstream]) -> None:
    urls = [upstream().url for _ in range(2)]
    # What is held while the reloads go on must not idle out, however long they take here.
    wanted = {"workers": WORKERS, "max_connections": 100, "connection_idle_timeout_secs": 600}
    one = appliance(wanted, upstream=urls[0])
    family = (one.pid, one.control, *one.workers)
    access_logs = [one.config["access_log"], {"path": str(one.folder / "other.log")}]

    def change(number: int) -> dict[str, Any]:
        return {
            "max_connections": 100 + number % 7,
            "sites": [{"hosts": ["*"], "upstreams": [urls[number % 2]], "preserve_host": bool(number % 3)}],
            "access_log": access_logs[number // 10 % 2],
        }

    def measured() -> tuple[list[int], list[int]]:
        wait_until(lambda: one.status()["totals"]["connections_open"] == 0, "the clients have gone")
        wait_until(
            lambda: [worker["generations"] for worker in one.status()["workers"]] == [1] * WORKERS,
            "no old generation is left",
        )
        wait_until(lambda: one.status()["totals"]["upstream_open"] == one.status()["totals"]["upstream_idle"], "rest")
        return [descriptor_count(pid) for pid in family], [resident_kb(pid) for pid in family]

    with Load(one) as load:
        for number in range(WARM_UP):
            reload(one, **change(number))
    assert not load.faults
    descriptors, memory = measured()
    held = one.connect()
    assert held.request(REQUEST).status == 200
    with Load(one) as load:
        for number in range(WARM_UP, RELOADS):
            document = reload(one, **change(number))
            assert not document["warnings"], document
    assert not load.faults
    assert load.served > 100, "there was load"
    assert held.request(REQUEST).status == 200
    assert max(worker["generations"] for worker in one.status()["workers"]) >= 2
    held.close()
    wait_until(lambda: max(measured()[0]) <= max(descriptors) + 3, f"descriptors are flat: {descriptors}")
    now_descriptors, now_memory = measured()
    growth = [after - before for before, after in zip(memory, now_memory, strict=True)]
    print(f"served {load.served}, descriptors {descriptors} -> {now_descriptors}, KB {memory} -> {now_memory}")
    assert max(growth) < MAX_GROWTH_KB, f"memory of master, control, workers: {memory} -> {now_memory}"
    assert one.status()["generation"] == RELOADS + 1
    assert (one.pid, one.control, *one.workers) == family, "no process was replaced"
