"""Which line of a TOML text a key is on.

``tomllib`` tells no positions, so this reads the text a second time: only keys, brackets and the ends of strings. The
text must be one that ``tomllib`` has accepted; anything else gives wrong lines, but never an exception.
"""

from __future__ import annotations

import contextlib
import re
import tomllib
from collections.abc import Mapping
from typing import Final

Loc = tuple[str | int, ...]

_BLANK: Final = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
_SPACE: Final = re.compile(r"[ \t]*")
_KEY_PART: Final = re.compile(r"""[A-Za-z0-9_-]+|"(?:[^"\\\n]|\\.)*"|'[^'\n]*'""")
_STRING: Final = re.compile(r'''"""(?:[^\\]|\\.)*?"{3,5}|\'\'\'.*?'{3,5}|"(?:[^"\\\n]|\\.)*"|'[^'\n]*\'''', re.DOTALL)
_SCALAR: Final = re.compile(r"[^,\]}#\n]*")


def key_lines(text: str) -> Mapping[Loc, int]:
    """Return the line, counted from 1, of each key, table and array element of ``text``.

    A location is made of keys and indices: ``("sites", 0, "hosts", 1)``.
    """
    scanner = _Scanner(text.replace("\r\n", "\n"))
    with contextlib.suppress(RecursionError, _LostError):
        scanner.document()
    return scanner.lines


def line_of(lines: Mapping[Loc, int], loc: Loc) -> int | None:
    """Return the line of ``loc``, else of the nearest table around it; None at the top level."""
    for length in range(len(loc), 0, -1):
        line = lines.get(loc[:length])
        if line is not None:
            return line
    return None


class _LostError(Exception):
    """The text is not what was expected: what has been found so far stands."""


class _Scanner:
    def __init__(self, text: str) -> None:
        self._text: Final = text
        self._at = 0
        self._line = 1
        self._line_at = 0
        self._last_index: Final[dict[Loc, int]] = {}
        self.lines: Final[dict[Loc, int]] = {}

    def document(self) -> None:
        table: Loc = ()
        while True:
            self._skip(_BLANK)
            if self._at >= len(self._text):
                return
            if self._peek("[["):
                table = self._header(2)
            elif self._peek("["):
                table = self._header(1)
            else:
                self._key_and_value(table)

    def _header(self, brackets: int) -> Loc:
        line = self._current_line()
        self._at += brackets
        keys = self._keys()
        self._expect("]" * brackets)
        loc: Loc = ()
        for position, key in enumerate(keys):
            loc = (*loc, key)
            self.lines.setdefault(loc, line)
            if brackets == 2 and position == len(keys) - 1:
                self._last_index[loc] = self._last_index.get(loc, -1) + 1
            if loc in self._last_index:
                loc = (*loc, self._last_index[loc])
                self.lines.setdefault(loc, line)
        return loc

    def _key_and_value(self, table: Loc) -> None:
        line = self._current_line()
        loc = table
        for key in self._keys():
            loc = (*loc, key)
            self.lines.setdefault(loc, line)
        self._expect("=")
        self._skip(_SPACE)
        self._value(loc)

    def _keys(self) -> list[str]:
        keys: list[str] = []
        while True:
            self._skip(_SPACE)
            match = _KEY_PART.match(self._text, self._at)
            if match is None:
                raise _LostError
            self._at = match.end()
            keys.append(_plain_key(match[0]))
            self._skip(_SPACE)
            if not self._peek("."):
                return keys
            self._at += 1

    def _value(self, loc: Loc) -> None:
        if self._peek("["):
            self._at += 1
            index = 0
            while not self._closed("]"):
                self.lines[(*loc, index)] = self._current_line()
                self._value((*loc, index))
                self._comma("]")
                index += 1
        elif self._peek("{"):
            self._at += 1
            while not self._closed("}"):
                self._key_and_value(loc)
                self._comma("}")
        else:
            is_string = self._text[self._at : self._at + 1] in ('"', "'")
            match = (_STRING if is_string else _SCALAR).match(self._text, self._at)
            if match is None or match.end() == self._at:
                raise _LostError
            self._at = match.end()

    def _closed(self, bracket: str) -> bool:
        self._skip(_BLANK)
        if self._peek(bracket):
            self._at += 1
            return True
        return False

    def _comma(self, bracket: str) -> None:
        self._skip(_BLANK)
        if not self._peek(bracket):
            self._expect(",")

    def _peek(self, what: str) -> bool:
        return self._text.startswith(what, self._at)

    def _expect(self, what: str) -> None:
        if not self._peek(what):
            raise _LostError
        self._at += len(what)

    def _skip(self, pattern: re.Pattern[str]) -> None:
        match = pattern.match(self._text, self._at)
        if match is not None:
            self._at = match.end()

    def _current_line(self) -> int:
        self._line += self._text.count("\n", self._line_at, self._at)
        self._line_at = self._at
        return self._line


def _plain_key(raw: str) -> str:
    if raw[0] == "'":
        return raw[1:-1]
    if raw[0] != '"':
        return raw
    try:
        return next(iter(tomllib.loads(f"{raw} = 0")))
    except tomllib.TOMLDecodeError:
        raise _LostError from None
