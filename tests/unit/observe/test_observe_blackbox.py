"""The black box's file: a ring of bounded records, readable whatever happened to it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from proxy.observe.blackbox import (
    FILE_BYTES,
    RECORD_BYTES,
    RECORDS,
    RecordFile,
    fitted,
    open_file,
    read_records,
)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "state" / "blackbox")


def write(folder: str, count: int, slot: int = 0, **document: object) -> None:
    descriptor = open_file(folder, slot)
    try:
        file = RecordFile(descriptor)
        for _ in range(count):
            file.write({"cause": "accept.emfile", **document})
    finally:
        os.close(descriptor)


def test_the_last_ones_are_kept_over_restarts(folder: str) -> None:
    write(folder, 5)
    write(folder, RECORDS)
    found = read_records(folder)
    assert [record["number"] for record in found] == list(range(5 + RECORDS, 5, -1))
    assert os.stat(os.path.join(folder, "worker-0.jsonl")).st_size == FILE_BYTES


def test_the_slots_are_told_together(folder: str) -> None:
    write(folder, 1, 0, worker=0)
    write(folder, 1, 3, worker=3)
    assert [record["worker"] for record in read_records(folder)] == [3, 0]


def test_the_file_is_json_lines(folder: str) -> None:
    write(folder, RECORDS)
    text = Path(folder, "worker-0.jsonl").read_text()
    assert len([json.loads(line) for line in text.splitlines()]) == RECORDS


def test_what_is_too_long_is_shortened(folder: str) -> None:
    write(folder, 1, oldest=[{"client": "x" * 40}] * 10_000, clients=[["y", 1]] * 10)
    (record,) = read_records(folder)
    assert record["shortened"]
    assert 0 < len(record["oldest"]) < 10_000
    assert len(fitted({"number": 1, "time": 2.0, "cause": "a", "text": "z" * 2 * RECORD_BYTES})) < RECORD_BYTES


def test_a_torn_record_is_left_out(folder: str) -> None:
    write(folder, 3)
    with open(os.path.join(folder, "worker-0.jsonl"), "r+b") as file:
        file.seek(2 * RECORD_BYTES)
        file.write(b"{")
        file.seek(2 * RECORD_BYTES + 5)
        file.write(b"\xff")
    assert [record["number"] for record in read_records(folder)] == [3, 1]
    write(folder, 1)
    assert [record["number"] for record in read_records(folder)] == [4, 3, 1]


def test_nothing_is_there(folder: str) -> None:
    assert read_records(folder) == []
