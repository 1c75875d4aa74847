"""The descriptor budget: the incident's values, the properties, and the text an operator reads."""

from __future__ import annotations

import ast
import json
import resource
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy import budget
from proxy.budget import Inputs, Limits, Verdict, calculate, parse_limits, shares, to_dict, to_text

INCIDENT = Inputs(workers=1, max_connections=1024)
# By hand: 1024 clients + 1024 upstreams + 64 redirect + 1 refused + 4 listeners + 2 logs + 2 channel + 64 reserve.
INCIDENT_NEED = 2185

inputs_strategy = st.builds(
    Inputs,
    workers=st.integers(1, 64),
    max_connections=st.integers(1, 100_000),
    max_upstream_connections=st.none() | st.integers(1, 50_000),
    https_listeners=st.integers(1, 8),
    redirect_listeners=st.integers(1, 8),
    redirect_cap=st.integers(64, 512),
    health_cap=st.integers(1, 256),
    admin_cap=st.integers(1, 64),
)


def accepted(inputs: Inputs, limit: int) -> bool:
    return calculate(inputs, Limits(limit, limit)).verdict is Verdict.FITS


def test_the_incident_is_refused_with_the_arithmetic_and_both_ways_out() -> None:
    result = calculate(INCIDENT, Limits(1024, 1024))
    assert result.verdict is Verdict.REFUSED
    (reason,) = result.refusals
    assert reason == (
        f"max_connections = 1024 needs {INCIDENT_NEED} descriptors in a worker, the limit is 1024 (soft) / 1024 (hard):"
        " set LimitNOFILE=3072, or max_connections to at most 443"
    )


def test_the_incidents_container_is_raised_because_its_hard_limit_allows() -> None:
    result = calculate(INCIDENT, Limits(1024, 519_288))
    assert result.verdict is Verdict.RAISE
    assert result.raise_to == INCIDENT_NEED
    assert not result.warnings
    assert "raising the soft limit from 1024 to 2185" in to_text(result)


def test_the_limit_that_is_suggested_is_enough() -> None:
    suggested = calculate(INCIDENT, Limits(1024, 1024)).limit_nofile
    assert accepted(INCIDENT, suggested)


def test_exactly_the_need_fits_and_one_less_does_not() -> None:
    assert accepted(INCIDENT, INCIDENT_NEED)
    assert not accepted(INCIDENT, INCIDENT_NEED - 1)


@pytest.mark.parametrize("limits", [Limits(None, None), Limits(1024, None)])
def test_unlimited_is_never_refused(limits: Limits) -> None:
    result = calculate(INCIDENT, limits)
    assert result.verdict is (Verdict.SKIPPED if limits.soft is None else Verdict.RAISE)


@pytest.mark.parametrize(
    ("inputs", "key"),
    [
        (Inputs(workers=4, max_connections=3), "max_connections = 3"),
        (Inputs(workers=4, max_connections=8, max_upstream_connections=3), "max_upstream_connections = 3"),
        (Inputs(workers=4, max_connections=8, redirect_cap=3), "redirect.max_connections = 3"),
    ],
)
def test_a_cap_below_the_workers_is_refused_even_without_a_limit(inputs: Inputs, key: str) -> None:
    result = calculate(inputs, Limits(None, None))
    assert result.verdict is Verdict.REFUSED
    assert [reason for reason in result.refusals if reason.startswith(key) and "workers = 4" in reason]


def test_a_redirect_that_is_off_needs_no_permits() -> None:
    off = Inputs(workers=4, max_connections=8, redirect_cap=0, redirect_listeners=0)
    assert calculate(off, Limits(None, None)).verdict is Verdict.SKIPPED


@pytest.mark.parametrize(("limit", "warned"), [(1024, True), (1025, False)])
def test_a_default_limit_is_warned_about_even_when_it_fits(limit: int, warned: bool) -> None:
    result = calculate(Inputs(workers=1, max_connections=100), Limits(limit, 4096))
    assert result.verdict is Verdict.FITS
    assert bool(result.warnings) is warned


def test_a_raise_to_a_still_low_limit_is_warned_about() -> None:
    result = calculate(Inputs(workers=1, max_connections=100), Limits(128, 1024))
    assert result.verdict is Verdict.RAISE
    assert result.warnings


def test_too_many_workers_name_the_master() -> None:
    result = calculate(Inputs(workers=64, max_connections=64), Limits(256, 256))
    assert result.largest is None
    assert "workers = 64 needs" in result.refusals[0]
    assert "the master process" in result.refusals[0]


@given(st.integers(0, 1_000_000), st.integers(1, 1024))
def test_shares_add_up_and_differ_by_one_at_most(total: int, slots: int) -> None:
    parts = shares(total, slots)
    assert len(parts) == slots
    assert sum(parts) == total
    assert max(parts) - min(parts) <= 1


@given(inputs_strategy, st.integers(1, 300_000))
def test_the_largest_reported_fits_and_one_more_does_not(inputs: Inputs, limit: int) -> None:
    largest = calculate(inputs, Limits(limit, limit)).largest
    if inputs.max_upstream_connections is not None and inputs.max_upstream_connections < inputs.workers:
        inputs = replace(inputs, max_upstream_connections=inputs.workers)
        largest = calculate(inputs, Limits(limit, limit)).largest
    if largest is None:
        assert not accepted(replace(inputs, max_connections=inputs.workers), limit)
    else:
        assert accepted(replace(inputs, max_connections=largest), limit)
        assert not accepted(replace(inputs, max_connections=largest + 1), limit)


@given(inputs_strategy, st.integers(1, 300_000))
def test_auto_is_the_largest(inputs: Inputs, limit: int) -> None:
    auto = calculate(replace(inputs, max_connections="auto"), Limits(limit, limit))
    if auto.largest is None:
        assert auto.verdict is Verdict.REFUSED
    else:
        assert auto.max_connections == auto.largest
    if inputs.max_upstream_connections is None:
        assert auto.max_upstream_connections == auto.max_connections


@given(inputs_strategy, st.integers(1, 5000), st.integers(0, 300_000))
def test_the_verdict_follows_from_the_totals(inputs: Inputs, soft: int, more: int) -> None:
    result = calculate(inputs, Limits(soft, soft + more))
    assert result.needed == max(sum(count for _, count in process.items) for process in result.processes)
    if result.verdict is Verdict.FITS:
        assert result.needed <= soft
    elif result.verdict is Verdict.RAISE:
        assert result.raise_to == result.needed
        assert soft < result.needed <= soft + more
    else:
        assert result.refusals
    assert result.limit_nofile >= result.needed


def test_auto_under_no_limit_is_bounded() -> None:
    result = calculate(Inputs(workers=1, max_connections="auto"), Limits(None, None))
    assert result.needed <= budget.UNLIMITED_AS


def test_the_text_is_aligned_and_groups_equal_workers() -> None:
    text = to_text(calculate(Inputs(workers=4, max_connections=801), Limits(8192, 8192)))
    lines = text.splitlines()
    assert lines[0] == "file descriptors: limit 8192 (soft) / 8192 (hard)"
    table = [line for line in lines if line.startswith("  ")]
    assert len({len(line) for line in table}) == 1
    assert "  worker 0 " in text
    assert "worker 1 to 3, each" in text
    assert text.count("total") == 4


def test_the_dictionary_is_json() -> None:
    shown = json.loads(json.dumps(to_dict(calculate(INCIDENT, Limits(1024, 519_288)))))
    assert shown["verdict"] == "raise"
    assert shown["raise_to"] == INCIDENT_NEED
    assert shown["processes"][0]["total"] == INCIDENT_NEED


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("1024", Limits(1024, 1024)),
        ("1024:519288", Limits(1024, 519_288)),
        ("unlimited", Limits(None, None)),
        ("1024:unlimited", Limits(1024, None)),
    ],
)
def test_limits_are_read(text: str, limits: Limits) -> None:
    assert parse_limits(text) == limits


@pytest.mark.parametrize(
    "text", ["", ":", "1024:", ":1024", "0", "-1", "1e3", "1_024", "٣", "unlimited:1024", "2048:1024"]
)
def test_malformed_limits_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_limits(text)


def test_the_reader_reads_this_process() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = budget.process_limits()
    assert (shown.soft, shown.hard) == tuple(None if n == resource.RLIM_INFINITY else n for n in (soft, hard))


def test_only_the_standard_library_is_imported() -> None:
    names = set()
    for node in ast.walk(ast.parse(Path(budget.__file__).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names.add((node.module or "").partition(".")[0])
    assert names <= sys.stdlib_module_names
