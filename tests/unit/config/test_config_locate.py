"""Lines of keys, in everything that TOML allows to stand around them."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.config.locate import key_lines, line_of

DOCUMENT = '''\
# comment with [brackets] and a = 1
top = "# no comment [not.a.table]"
dotted.key."quoted.part" = 1

[table] # [[no]]
a = """
b = 1 # inside a string
[[sites]]
""\\" still inside"""
c = \'\'\'
[x]
it's\'\'\'\'
d = 'C:\\'
e = [ # comment ]
  "one, ]", # two
  "two",
  { f = 1, g.h = [1, 2] },
  [
    3, 4 ],
]
date = 1979-05-27 07:32:00
[table.sub]
i = 1
[[sites]]
hosts = ["a"]
  [[sites.routes]]
  path = "/1"
  [[sites.routes]]
  path = "/2"
[sites.request_headers]
set = { "X-A" = "}", 'X-B' = '#' }
[[sites]]
hosts = ["b",
"c"]
[[sites.routes]]
path = "/3"
'''

EXPECTED = {
    ("top",): 2,
    ("dotted", "key", "quoted.part"): 3,
    ("table",): 5,
    ("table", "a"): 6,
    ("table", "c"): 10,
    ("table", "d"): 13,
    ("table", "e"): 14,
    ("table", "e", 0): 15,
    ("table", "e", 1): 16,
    ("table", "e", 2, "f"): 17,
    ("table", "e", 2, "g", "h", 1): 17,
    ("table", "e", 3): 18,
    ("table", "e", 3, 0): 19,
    ("table", "date"): 21,
    ("table", "sub", "i"): 23,
    ("sites",): 24,
    ("sites", 0): 24,
    ("sites", 0, "hosts", 0): 25,
    ("sites", 0, "routes", 0): 26,
    ("sites", 0, "routes", 1, "path"): 29,
    ("sites", 0, "request_headers", "set", "X-A"): 31,
    ("sites", 0, "request_headers", "set", "X-B"): 31,
    ("sites", 1): 32,
    ("sites", 1, "hosts", 0): 33,
    ("sites", 1, "hosts", 1): 34,
    ("sites", 1, "routes", 0, "path"): 36,
}


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_document(newline: str) -> None:
    lines = key_lines(DOCUMENT.replace("\n", newline))
    assert {loc: lines.get(loc) for loc in EXPECTED} == EXPECTED


def test_every_key_that_tomllib_finds_has_a_line() -> None:
    assert set(key_lines(DOCUMENT)) == set(locations(tomllib.loads(DOCUMENT)))


def test_nearest_table_around() -> None:
    lines = key_lines(DOCUMENT)
    assert line_of(lines, ("sites", 1, "upstreams", 0)) == 32
    assert line_of(lines, ("sites", 0, "hosts", 0, "deeper")) == 25
    assert line_of(lines, ("nowhere",)) is None


@pytest.mark.parametrize(
    ("text", "loc", "line"),
    [
        ("a = 1\n[b]\n\n\nc = 1", ("b", "c"), 5),
        ("[ a . b ]\nc = 1", ("a", "b", "c"), 2),
        ('["a.b"]\n"\\u0063" = 1', ("a.b", "c"), 2),
        ("[[a]]\n[a.b]\nc = 1\n[[a]]\n[a.b]\nc = 1", ("a", 1, "b", "c"), 6),
        ("[[a.b]]\nc = 1", ("a", "b", 0, "c"), 2),
        ("[[a]]\n[[a.b]]\n[[a.b]]\n[[a]]\n[[a.b]]\nc=1", ("a", 1, "b", 0, "c"), 6),
        ("a = []\nb = {}\nc = [[], [{}]]\nd = 1", ("d",), 4),
        ('a = ""\nb = \'\'\nc = """"""\nd = 1', ("d",), 4),
        ('a = """"quoted""""\nb = 1', ("b",), 2),
        ("a = [1, 2,\n\n3,]\nb = 1", ("a", 2), 3),
        ("a = -inf # = [\nb = 1", ("b",), 2),
    ],
)
def test_line(text: str, loc: tuple[str | int, ...], line: int) -> None:
    tomllib.loads(text)
    assert key_lines(text)[loc] == line


KEYS = st.sampled_from(["a", "b-c", "1", '"q. ]"', "'l#'", "a.b", '"\\""'])
SCALARS = st.sampled_from(
    ['"x"', "'#'", "1", "true", "1.5e3", '"""\n[a]\n"""', "'''\nb = 1\n'''", "2026-11-29T22:00:00Z", '"\\"]"']
)
VALUES = st.recursive(
    SCALARS,
    lambda values: st.one_of(
        st.lists(values, max_size=3).map(lambda items: "[" + ", # ]\n ".join(items) + "]"),
        values.map(lambda value: f"{{ k.l = {value} }}"),
    ),
    max_leaves=6,
)
STATEMENTS = st.one_of(
    st.tuples(KEYS, VALUES).map(lambda pair: f"{pair[0]} = {pair[1]}"),
    KEYS.map(lambda key: f"[{key}]"),
    KEYS.map(lambda key: f"[[{key}]]"),
    st.just("# comment = ["),
)


@given(st.lists(STATEMENTS, max_size=12))
def test_agrees_with_tomllib_on_what_keys_there_are(statements: list[str]) -> None:
    text = "\n".join(statements)
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return
    lines = key_lines(text)
    assert set(lines) == set(locations(data))
    assert all(1 <= line <= text.count("\n") + 1 for line in lines.values())


@given(st.text(alphabet="ab.=[]{}\"'#\n\\ ,1"))
def test_never_fails(text: str) -> None:
    key_lines(text)


def test_deep_nesting_does_not_fail() -> None:
    assert key_lines("a = 1\nb = " + "[" * 100_000)[("a",)] == 1


def locations(value: Any, loc: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    if isinstance(value, dict):
        items: list[tuple[str | int, Any]] = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    else:
        return []
    return [found for key, item in items for found in [(*loc, key), *locations(item, (*loc, key))]]
