from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.observe.merge import MAX_SIGNATURES, Line, LineBudget, Merger
from proxy.observe.record import Record


def record(signature: str = "accept.emfile", occurrences: int = 1, **more: object) -> Record:
    known: dict[str, object] = {"source": "worker-0", "level": "error", "message": "m", "fields": {}, "trace": ""}
    return Record(signature=signature, occurrences=occurrences, **{**known, **more})  # type: ignore[arg-type]


class Play:
    """A merger, its clock, and what it said."""

    def __init__(self, max_lines_per_minute: int = 120, level: str = "info") -> None:
        self.merger = Merger(max_lines_per_minute, level)
        self.now = 1000.0
        self.said: list[tuple[float, Line]] = []

    def add(self, *records: Record) -> None:
        for one in records:
            line = self.merger.add(one, self.now)
            if line is not None:
                self.said.append((self.now - 1000, line))

    def run(self, secs: int, *each_second: Record) -> None:
        """As real time goes: the counts of the second that has passed, then the timer."""
        for _ in range(secs):
            self.now += 1
            self.add(*each_second)
            self.said += [(self.now - 1000, line) for line in self.merger.tick(self.now)]

    def kinds(self) -> list[str]:
        return [kind(line) for _, line in self.said]

    def told(self, signature: str) -> int:
        """How many occurrences the lines account for."""
        total = 0
        for _, line in self.said:
            if line.signature == signature and "ended" not in line.fields:
                total += int(line.fields.get("suppressed", 1))
        return total


def kind(line: Line) -> str:
    for key in ("ended", "suppressed", "signatures"):
        if key in line.fields:
            return key
    return "whole"


def test_one_occurrence_is_one_line_with_everything_in_it() -> None:
    play = Play()
    play.add(record(fields={"listener": "0.0.0.0:443"}, trace="Traceback", message="no descriptor"))
    play.run(60)
    assert [line for _, line in play.said] == [
        Line(
            "error",
            "accept.emfile",
            {"source": "worker-0", "listener": "0.0.0.0:443"},
            "no descriptor",
            "Traceback",
        )
    ]


def test_a_storm_of_30_seconds_is_first_three_summaries_and_end() -> None:
    play = Play()
    storm = [record(source=f"worker-{n}", occurrences=70_000, fields={"backoff_ms": 1000}) for n in range(8)]
    play.add(*(one._replace(occurrences=1) for one in storm))
    play.run(31, *storm)  # the counts of the last instant come up to a second late
    play.run(60)
    assert play.kinds() == ["whole", "suppressed", "suppressed", "suppressed", "ended"]
    total = 8 + 31 * 8 * 70_000
    assert play.told("accept.emfile") == total
    _, summary = play.said[1]
    assert summary.fields["window_secs"] == 10
    assert summary.fields["backoff_ms"] == 1000
    assert summary.fields["processes"] == 8
    _, end = play.said[-1]
    assert end.fields == {"ended": "true", "count": total, "duration_secs": 31.0}
    assert play.merger.suppressed["accept.emfile"] == total - 1


def test_a_summary_has_the_latest_fields() -> None:
    play = Play()
    play.add(record(fields={"backoff_ms": 100}))
    play.run(1, record(fields={"backoff_ms": 200}))
    play.run(1, record(fields={"backoff_ms": 300}, message="later"))
    play.run(10)
    _, summary = play.said[1]
    assert (summary.fields["backoff_ms"], summary.message) == (300, "later")


def test_a_storm_that_begins_again_after_its_end_is_told_whole_again() -> None:
    play = Play()
    play.add(record(occurrences=2))
    play.run(40)
    play.add(record(trace="again"))
    assert play.kinds() == ["whole", "suppressed", "ended", "whole"]
    assert play.said[-1][1].trace == "again"


def test_a_count_that_comes_first_is_a_first_line_and_the_rest_is_told() -> None:
    """A control process that was restarted in the middle of a storm."""
    play = Play()
    play.add(record(occurrences=500))
    play.run(40)
    assert play.kinds() == ["whole", "suppressed", "ended"]
    assert play.told("accept.emfile") == 500


def test_lifecycle_events_of_every_worker_have_a_line_of_their_own() -> None:
    play = Play()
    play.add(*(record("worker.ready", source=f"worker-{n}", level="info") for n in range(8)))
    play.run(60)
    assert play.kinds() == ["whole"] * 8


def test_a_flood_at_info_level_is_bounded_too() -> None:
    play = Play()
    play.run(30, *[record("worker.ready", level="info")] * 1000)
    play.run(60)
    assert play.kinds().count("whole") == 16
    assert play.told("worker.ready") == 30_000


def test_below_the_level_nothing_is_said_but_all_is_counted() -> None:
    play = Play(level="warning")
    play.add(record("worker.ready", level="info", occurrences=3))
    play.run(60)
    assert play.said == []
    assert play.merger.occurrences == {"worker.ready": 3} == play.merger.suppressed


def test_signatures_are_bounded_and_what_is_over_is_counted_together() -> None:
    play = Play(max_lines_per_minute=10_000)
    play.add(*(record(f"loop.{n}") for n in range(MAX_SIGNATURES + 50)))
    assert len(play.merger.occurrences) == MAX_SIGNATURES + 1
    assert play.merger.occurrences["events.overflow"] == 50


def test_the_budget_bounds_the_lines_and_tells_what_it_denied() -> None:
    play = Play(max_lines_per_minute=10)
    play.add(*(record(f"s{n:02}") for n in range(30)))
    assert len(play.said) == 9
    play.run(300)
    denied = [(at, line) for at, line in play.said if kind(line) == "signatures"]
    assert sum(int(line.fields["lines"]) for _, line in denied) == play.merger.budget.lines_denied == 21
    assert {play.told(f"s{n:02}") for n in range(30)} == {1}
    assert any("s09:" in str(line.fields["signatures"]) and "others" in line.fields for _, line in denied)


def test_the_last_lines_tell_what_no_timer_will() -> None:
    play = Play(max_lines_per_minute=3)
    play.add(record("a", occurrences=5), record("b"), record("c"))
    last = play.merger.finish(play.now)
    assert [(line.signature, kind(line)) for line in last] == [("events.suppressed", "signatures")]
    assert play.merger.finish(play.now) == []


def test_where_the_budget_is_short_every_storm_has_its_turn() -> None:
    play = Play(max_lines_per_minute=4)
    play.run(600, *(record(f"s{n}") for n in range(12)))
    lines = [sum(line.signature == f"s{n}" for _, line in play.said) for n in range(12)]
    assert sum(lines) >= 27
    assert max(lines) - min(lines) <= 2, lines


steps = st.lists(
    st.tuples(st.sampled_from("abcdef"), st.integers(1, 1000), st.integers(0, 25), st.sampled_from(["error", "info"])),
    max_size=60,
)


@given(steps, st.integers(2, 40))
def test_over_any_course_of_events_lines_are_bounded_and_counts_exact(
    course: list[tuple[str, int, int, str]], max_lines: int
) -> None:
    play = Play(max_lines_per_minute=max_lines)
    wanted: dict[str, int] = {}
    for signature, occurrences, pause, level in course:
        name = f"{level}.{signature}"
        wanted[name] = wanted.get(name, 0) + occurrences
        play.add(record(name, occurrences, level=level))
        play.run(pause)
    # What waits for room needs its time: of few lines a minute, one tells what was left out.
    play.run(1200 + 3600 // (max_lines - 1))
    for at, _ in play.said:
        assert sum(at <= other < at + 60 for other, _ in play.said) <= max_lines
    assert {name: play.told(name) for name in wanted} == wanted == play.merger.occurrences
    play.said.clear()
    play.run(120)
    assert play.said == []


def test_a_budget_of_one_line_is_a_line() -> None:
    budget = LineBudget(1)
    assert [budget.take(0.0), budget.take(59.9), budget.take(60.0)] == [True, False, True]
