"""The access log through the whole proxy: its fields, what cannot be forged, what is never in it, a full disk."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness import wait_until
from tests.harness.stage import Stage, open_stage

COMBINED = re.compile(
    r'(?P<remote>\S+) - - \[(?P<time>[^\]]+)\] "(?P<request>[^"]*)" (?P<status>\d+) (?P<bytes>\d+) '
    r'"(?P<referer>[^"]*)" "(?P<agent>[^"]*)" (?P<host>\S+) '
    r"(?P<duration>\S+) (?P<upstream>\S+) (?P<id>\S+) (?P<tls>\S+)"
)


@pytest.fixture(scope="module")
def theatre() -> Iterator[Stage]:
    with open_stage() as stage:
        yield stage


def line_of(stage: Stage, mark: str) -> str:
    """The one line that contains ``mark``; waits for it."""
    found: list[str] = []

    def look() -> bool:
        found[:] = [line for line in stage.appliance.access_lines() if mark in line]
        return bool(found)

    wait_until(look, f"a line with {mark}")
    assert len(found) == 1
    return found[0]


def fields(line: str) -> dict[str, str]:
    match = COMBINED.fullmatch(line)
    assert match, line
    return match.groupdict()


def test_the_fields_of_combined(stage: Stage) -> None:
    stage.ask(
        b"GET /combined?q=1 HTTP/1.1\r\nHost: www.example.org:8443\r\nReferer: https://example.org/\r\n"
        b"User-Agent: test/1.0 (a b)\r\n\r\n"
    )
    found = fields(line_of(stage, "/combined?q=1"))
    assert found["remote"] == "127.0.0.1"
    assert re.fullmatch(r"\d\d/\w{3}/\d{4}:\d\d:\d\d:\d\d \+0000", found["time"])
    assert found["request"] == "GET /combined?q=1 HTTP/1.1"
    assert (found["status"], found["bytes"]) == ("200", "2")
    assert (found["referer"], found["agent"]) == ("https://example.org/", "test/1.0 (a b)")
    assert (found["host"], found["tls"]) == ("www.example.org", "TLSv1.3")
    assert re.fullmatch(r"\d+\.\d{3}", found["duration"])
    assert re.fullmatch(r"\d+\.\d{3}", found["upstream"])
    assert found["id"].encode() in stage.reached()


def test_what_is_asked_for_is_logged_as_it_was_sent(stage: Stage) -> None:
    stage.ask(b"GET /as/%2e%2e/sent HTTP/1.1\r\nHost: a\r\n\r\n")
    assert fields(line_of(stage, "/as/%2e%2e/sent"))["request"] == "GET /as/%2e%2e/sent HTTP/1.1"


def test_the_bytes_are_those_of_the_body(stage: Stage) -> None:
    def play(wire: Any) -> None:
        wire.read_head()
        wire.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n5\r\nworld\r\n0\r\n\r\n")

    stage.play(play)
    stage.ask(b"GET /sized HTTP/1.1\r\nHost: a\r\n\r\n")
    assert fields(line_of(stage, "/sized"))["bytes"] == "10"


def test_a_response_of_the_proxys_own_has_no_upstream_time(stage: Stage) -> None:
    response = stage.ask(b"GET /%2f-own HTTP/1.1\r\nHost: a\r\n\r\n")
    found = fields(line_of(stage, "-own"))
    assert (found["status"], found["upstream"]) == ("400", "-")
    assert found["id"] == response.get("X-Request-Id")
    assert int(found["bytes"]) == len(response.body)


@pytest.mark.parametrize(
    ("value", "escaped"),
    [
        (b'quote " end', r"quote \x22 end"),
        (b"back\\slash", r"back\x5Cslash"),
        (b"escape \xc2\x9b1m", r"escape \xC2\x9B1m"),
        (b"latin \xe9", r"latin \xE9"),
        (b"tab\there", r"tab\x09here"),
    ],
)
def test_client_text_cannot_forge_a_line_or_a_terminal_escape(stage: Stage, value: bytes, escaped: str) -> None:
    mark = f"/forge-{value.hex()}"
    stage.ask(b"GET " + mark.encode() + b" HTTP/1.1\r\nHost: a\r\nUser-Agent: " + value + b"\r\n\r\n")
    assert fields(line_of(stage, mark))["agent"] == escaped


def test_secrets_are_never_logged(stage: Stage) -> None:
    stage.ask(
        b"GET /secret HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer hunter2\r\nCookie: session=hunter2\r\n"
        b"Proxy-Authorization: Basic hunter2\r\n\r\n"
    )
    line_of(stage, "/secret")
    assert not [line for line in stage.appliance.access_lines() if "hunter2" in line]
    assert not [line for line in stage.appliance.event_lines() if "hunter2" in line]


def test_a_client_that_left_is_499(stage: Stage) -> None:
    def play(wire: Any) -> None:
        wire.read_head()
        assert wire.at_end()

    stage.play(play)
    client = stage.client()
    client.send(b"GET /left HTTP/1.1\r\nHost: a\r\n\r\n")
    stage.upstream.next_wire()
    client.close()
    found = fields(line_of(stage, "/left"))
    assert (found["status"], found["bytes"], found["upstream"]) == ("499", "0", "-")


def test_a_response_that_was_cut_keeps_its_status_and_counts_what_was_sent(stage: Stage) -> None:
    def play(wire: Any) -> None:
        wire.read_head()
        wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhello")

    stage.play(play)
    client = stage.client()
    client.send(b"GET /cut HTTP/1.1\r\nHost: a\r\n\r\n")
    assert client.read_head()
    found = fields(line_of(stage, "/cut"))
    assert (found["status"], found["bytes"]) == ("200", "5")


def test_what_is_no_request_is_logged_with_its_status(stage: Stage) -> None:
    response = stage.ask(b"GET / HTTP/9.9\r\nHost: a\r\n\r\n")
    found = fields(line_of(stage, response.get("X-Request-Id") or "-"))
    assert (found["request"], found["status"], found["host"]) == ("-", "505", "-")


def test_json() -> None:
    with open_stage(
        lambda urls: {"access_log": {"format": "json"}, "sites": [{"hosts": ["*"], "upstreams": [urls[0]]}]}
    ) as stage:
        stage.ask(b'GET /json HTTP/1.1\r\nHost: a.example.org\r\nUser-Agent: "\xe9\\\tx\r\n\r\n')
        found = json.loads(line_of(stage, "/json"))
        assert found["user_agent"] == '"\xe9\\\tx'
        assert (found["status"], found["host"], found["tls"]) == (200, "a.example.org", "TLSv1.3")
        assert isinstance(found["duration_secs"], float)
        stage.strike()


def test_a_full_disk_does_not_stop_traffic() -> None:
    def configure(urls: Any) -> dict[str, Any]:
        return {"access_log": {"path": "/dev/full"}, "sites": [{"hosts": ["*"], "upstreams": [urls[0]]}]}

    with open_stage(configure) as stage:
        client = stage.client()
        for _ in range(100):
            assert client.request(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").status == 200
        wait_until(lambda: stage.counter("access_lines_dropped") == 100, "the lines to be counted as dropped")
        wait_until(lambda: any("No space left" in line for line in stage.appliance.event_lines()), "the report")
        assert len([line for line in stage.appliance.event_lines() if "No space left" in line]) <= 10
        assert client.request(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").status == 200
        stage.strike()
