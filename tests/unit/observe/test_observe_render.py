from __future__ import annotations

import json
import re

from hypothesis import given
from hypothesis import strategies as st

from proxy.observe.merge import Line
from proxy.observe.record import LEVELS
from proxy.observe.render import as_json, as_text
from proxy.observe.timestamps import common_log_time, rfc3339_ms

any_text = st.text(st.characters(exclude_categories=()), max_size=30)
lines = st.builds(
    Line,
    level=st.sampled_from(list(LEVELS)),
    signature=any_text,
    fields=st.dictionaries(any_text, any_text | st.integers() | st.floats(allow_nan=False), max_size=5),
    message=any_text,
    trace=any_text,
)
TIME = "2026-11-29T22:00:00.123Z"


def test_the_text_form() -> None:
    line = Line("error", "accept.emfile", {"listener": "0.0.0.0:443", "backoff_ms": 1000}, 'no "fd"', "Trace\n  x")
    assert as_text(line, TIME) == (
        b"2026-11-29T22:00:00.123Z ERROR accept.emfile listener=0.0.0.0:443 backoff_ms=1000"
        b' msg="no \\"fd\\"" trace="Trace\\n  x"\n'
    )


def test_the_names_of_the_log_win_over_fields() -> None:
    line = Line("error", "a.b", {"time": "never", "event": "other", "x": 1}, "m")
    assert json.loads(as_json(line, TIME)) == {"time": TIME, "level": "error", "event": "a.b", "message": "m", "x": 1}


@given(lines)
def test_one_record_is_one_line_of_printable_ascii(line: Line) -> None:
    for render in (as_text, as_json):
        assert re.fullmatch(rb"[ -~]+\n", render(line, TIME))


@given(lines)
def test_every_value_comes_back(line: Line) -> None:
    got = json.loads(as_json(line, TIME))
    assert (got["event"], got["message"]) == (line.signature, line.message)
    message = re.search(r' msg=("(?:[^"\\]|\\.)*"|[^" \n]+)', as_text(line._replace(fields={}), TIME).decode())
    assert message is not None
    text = message[1]
    assert (json.loads(text) if text.startswith('"') else text) == line.message


def test_times_are_utc_and_need_no_locale() -> None:
    assert common_log_time(1_796_000_400) == "30/Nov/2026:01:00:00 +0000"
    assert rfc3339_ms(1_796_000_400.1239) == "2026-11-30T01:00:00.123Z"
