"""Black box: what a worker held when something ran out, in a file that is there whatever comes after.

One file a slot, made and opened in advance by the master: ``RECORDS`` records of ``RECORD_BYTES`` each, of which the
oldest is overwritten. A record is a line of JSON with spaces behind it, so the file as a whole is JSON lines. Its room
is allocated when it is made, and writing takes neither a descriptor nor a disk block.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Mapping
from typing import Any, Final

RECORD_BYTES: Final = 65_536
RECORDS: Final = 8
FILE_BYTES: Final = RECORD_BYTES * RECORDS
FOLDER: Final = "blackbox"
_NAME: Final = re.compile(r"worker-\d+\.jsonl")
_FOLDER_MODE: Final = 0o750
_FILE_MODE: Final = 0o640


def folder_of(state_dir: str) -> str:
    """Where the files of an instance are."""
    return os.path.join(state_dir, FOLDER)


def open_file(folder: str, slot: int) -> int:
    """A descriptor of the slot's file, which is made where it is missing. Raises OSError."""
    os.makedirs(folder, _FOLDER_MODE, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(os.path.join(folder, f"worker-{slot}.jsonl"), flags, _FILE_MODE)
    try:
        if os.fstat(descriptor).st_size < FILE_BYTES:
            os.posix_fallocate(descriptor, 0, FILE_BYTES)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class RecordFile:
    """The worker's side: a ring of records behind a descriptor that somebody has opened."""

    __slots__ = ("_descriptor",)

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, document: Mapping[str, Any]) -> None:
        """Write one record behind the newest that is there: during an upgrade two generations write into the file.

        What is too long loses the ends of its lists. Raises OSError.
        """
        there = _parsed(os.pread(self._descriptor, FILE_BYTES, 0))
        number = 1 + max((int(record.get("number", 0)) for record in there), default=0)
        data = fitted({"number": number, "time": time.time(), **document})
        os.pwrite(self._descriptor, data.ljust(RECORD_BYTES - 1) + b"\n", number % RECORDS * RECORD_BYTES)


def fitted(record: Mapping[str, Any]) -> bytes:
    """``record`` as JSON of less than RECORD_BYTES: where it is longer, its lists are halved until it is not."""
    document = dict(record)
    while True:
        data = json.dumps(document, separators=(",", ":"), default=str).encode("ascii")
        if len(data) < RECORD_BYTES:
            return data
        document["shortened"] = True
        lists = {key: value for key, value in document.items() if isinstance(value, list) and value}
        if not lists:
            return json.dumps({key: record.get(key) for key in ("number", "time", "cause")}).encode("ascii")[:1024]
        document |= {key: value[: len(value) // 2] for key, value in lists.items()}


def read_records(folder: str) -> list[dict[str, Any]]:
    """All records of all slots, the latest first; none where there is no folder. Raises OSError (no permission)."""
    found: list[dict[str, Any]] = []
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    for name in names:
        if _NAME.fullmatch(name):
            with open(os.path.join(folder, name), "rb") as file:
                found += _parsed(file.read(FILE_BYTES))
    found.sort(key=lambda record: -float(record.get("time", 0)))
    return found


def _parsed(data: bytes) -> list[dict[str, Any]]:
    """The records in a file; one that was being written when the host went down is left out."""
    records = []
    for at in range(0, len(data), RECORD_BYTES):
        line = data[at : at + RECORD_BYTES].strip(b" \n\0")
        if line:
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict):
                    records.append(record)
    return records
