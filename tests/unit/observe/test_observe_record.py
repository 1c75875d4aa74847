from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.observe.record import (
    LEVELS,
    MAX_DATAGRAM_BYTES,
    MalformedRecordError,
    Record,
    clip,
    clip_front,
    decode,
    encode,
    format_trace,
)

any_text = st.text(st.characters(exclude_categories=()), max_size=40) | st.sampled_from(
    ["\U0001f600" * 9000, "\x00" * 9000, "x" * 9000]
)
values = any_text | st.integers() | st.floats()


@given(
    source=any_text,
    signature=any_text.filter(bool),
    occurrences=st.integers(1, 2**62),
    level=st.sampled_from([*LEVELS, "loud"]),
    message=any_text,
    fields=st.dictionaries(any_text, values, max_size=40),
    trace=any_text,
)
def test_whatever_is_reported_the_datagram_is_bounded_and_its_count_exact(
    source: str,
    signature: str,
    occurrences: int,
    level: str,
    message: str,
    fields: dict[str, str | int | float],
    trace: str,
) -> None:
    data = encode(Record(source, signature, occurrences, level, message, fields, trace))
    assert len(data) <= MAX_DATAGRAM_BYTES
    got = decode(data)
    assert got.occurrences == occurrences
    assert got.level == (level if level in LEVELS else "error")


def test_an_ordinary_record_comes_back_as_it_was() -> None:
    record = Record("worker-0", "accept.emfile", 3, "error", "no descriptor", {"backoff_ms": 1000, "a": 0.5}, "T\nx")
    assert decode(encode(record)) == record


@given(st.binary(max_size=200))
def test_no_datagram_raises_anything_but_malformed(data: bytes) -> None:
    with pytest.raises(MalformedRecordError):
        decode(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[" * 8000,
        b"[]",
        b"{}",
        b'["w","s",0,"error","m",{},""]',
        b'["w","s",true,"error","m",{},""]',
        b'["w","s",1.5,"error","m",{},""]',
        b'["w","",1,"error","m",{},""]',
        b'["w","s",1,"loud","m",{},""]',
        b'["w","s",1,"error",7,{},""]',
        b'["w","s",1,"error","m",[],""]',
        b'["w","s",1,"error","m",{"a":[]},""]',
        b'["w","s",1,"error","m",{"a":null},""]',
        b'["w","s",1,"error","' + b"m" * MAX_DATAGRAM_BYTES + b'",{},""]',
    ],
)
def test_malformed(data: bytes) -> None:
    with pytest.raises(MalformedRecordError):
        decode(data)


def test_a_cut_is_marked() -> None:
    assert clip("abcdef", 4) == "abcd[cut 2]"
    assert clip_front("abcdef", 4) == "[cut 2]cdef"
    assert clip("abcd", 4) == clip_front("abcd", 4) == "abcd"


def test_the_innermost_frames_and_the_error_are_kept_of_a_deep_traceback() -> None:
    def deep(n: int) -> None:
        if n == 0:
            raise ValueError("at the bottom")
        deep(n - 1)

    with pytest.raises(ValueError, match="bottom") as caught:
        deep(500)
    trace = format_trace(caught.value)
    assert trace.endswith("ValueError: at the bottom")
    assert len(trace) < 4096


def test_an_exception_that_cannot_be_formatted_is_named() -> None:
    class HostileError(Exception):
        @property
        def __cause__(self) -> BaseException | None:  # type: ignore[override]
            raise RuntimeError

    assert "HostileError" in format_trace(HostileError())
