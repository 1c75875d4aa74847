"""The normal form of a path: what is kept, what is rewritten, what is refused."""

from __future__ import annotations

import posixpath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.route.path import PathError, normalize_path

PIECES = st.sampled_from(
    [
        b"/",
        b"/",
        b".",
        b"..",
        b"a",
        b"B~",
        b"%2e",
        b"%2E",
        b"%41",
        b"%c3%a9",
        b"%25",
        b"%20",
        b"?",
        b"%",
        b"%2f",
        b"\\",
        b";",
    ]
)
TARGETS = st.lists(PIECES, max_size=12).map(lambda pieces: b"/" + b"".join(pieces))


@pytest.mark.parametrize(
    "path",
    [
        b"/",
        b"*",
        b"/index.html",
        b"/a/b/",
        b"/a//b",
        b"//",
        b"/.git/config",
        b"/...",
        b"/a..b/..c",
        b"/;/..;/x",
        b"/?",
        b"/a?b=/../%zz%2f\\?c",
        b"/a?",
        b"/caf\xc3\xa9",
        b"/a%20b",
        b"/%C3%A9?x",
        b"/100%25",
        b"/%252F",
        b"/%3Fa?b",
    ],
)
def test_a_path_in_normal_form_is_the_same_object(path: bytes) -> None:
    assert normalize_path(path) is path


@pytest.mark.parametrize(
    ("path", "normal"),
    [
        (b"/a/b/c/./../../g", b"/a/g"),  # RFC 3986 section 5.2.4's own example
        (b"/.", b"/"),
        (b"/./", b"/"),
        (b"/a/..", b"/"),
        (b"/a/../", b"/"),
        (b"/a/b/..", b"/a/"),
        (b"/a/b/.", b"/a/b/"),
        (b"/a/%2e%2E/b", b"/b"),
        (b"/a/.%2e/b", b"/b"),
        (b"/%2e", b"/"),
        (b"/a//../b", b"/a/b"),
        (b"//../x", b"/x"),
        (b"/%7Euser/%61%2D%5f", b"/~user/a-_"),
        (b"/%c3%a9", b"/%C3%A9"),
        (b"/a/../b?q=%7e/../", b"/b?q=%7e/../"),
        (b"/a/..?", b"/?"),
        (b"/%0d%0a", b"/%0D%0A"),
    ],
)
def test_normal_form(path: bytes, normal: bytes) -> None:
    assert normalize_path(path) == normal


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        (b"/a%2fb", "encoded-slash"),
        (b"/a%2Fb?q", "encoded-slash"),
        (b"/a%5cb", "encoded-backslash"),
        (b"/a%5Cb", "encoded-backslash"),
        (b"/a%00", "encoded-nul"),
        (b"/a\\b", "raw-backslash"),
        (b"/..", "escapes-root"),
        (b"/../etc", "escapes-root"),
        (b"/a/../../b", "escapes-root"),
        (b"/%2e%2e/b", "escapes-root"),
        (b"/./..?q", "escapes-root"),
        (b"/%", "malformed-escape"),
        (b"/%4", "malformed-escape"),
        (b"/%zz", "malformed-escape"),
        (b"/%4g", "malformed-escape"),
        (b"/%+1", "malformed-escape"),
        (b"/%%41", "malformed-escape"),
        (b"/a\x00", "invalid-character"),
        (b"/a b", "invalid-character"),
        (b"/a\n", "invalid-character"),
        (b"/a#b", "invalid-character"),
        (b"/..\n", "invalid-character"),
        (b"", "not-absolute"),
        (b"a/b", "not-absolute"),
        (b"?q", "not-absolute"),
        (b"**", "not-absolute"),
        (b"*\n", "not-absolute"),
    ],
)
def test_refused(path: bytes, reason: str) -> None:
    with pytest.raises(PathError) as caught:
        normalize_path(path)
    assert caught.value.reason == reason


@given(TARGETS)
def test_what_is_let_through_is_normal_and_stays_so(path: bytes) -> None:
    try:
        normal = normalize_path(path)
    except PathError:
        return
    assert normalize_path(normal) == normal
    bare, mark, query = normal.partition(b"?")
    assert bare.startswith(b"/")
    assert not {b".", b".."} & set(bare.split(b"/"))
    assert (mark, query) == path.partition(b"?")[1:]


@given(st.lists(st.sampled_from(["a", "b", ".", "..", "%2e", "c.d"]), min_size=1, max_size=10))
def test_agrees_with_posixpath(segments: list[str]) -> None:
    """Where no segment is empty, an independent implementation of the same rule exists."""
    decoded = [segment.replace("%2e", ".") for segment in segments]
    depth = 0
    escapes = False
    for segment in decoded:
        depth += {"..": -1, ".": 0}.get(segment, 1)
        escapes = escapes or depth < 0
    path = ("/" + "/".join(segments)).encode()
    if escapes:
        with pytest.raises(PathError, match="escapes-root"):
            normalize_path(path)
        return
    expected = posixpath.normpath("/" + "/".join(decoded))
    assert normalize_path(path).rstrip(b"/").decode() == expected.rstrip("/")
