"""Command lines that are wrong in a way that people often are: told with the line that was meant."""

from __future__ import annotations

import difflib
import itertools
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from proxy.config.refusal import printable
from proxy.errors import ConfigError

_ALONE: Final = frozenset({"-h", "--help", "--version"})
# What a bare word after a command is, where the command has no words of its own.
_WORD_IS: Final[Mapping[str, str | None]] = {"serve": "--to", "demo": None}
_ELSE: Final = "--config"
_HAVE_WORDS: Final = frozenset({"log-level", "why"})
_FILE_SUFFIX: Final = ".toml"
_HELP: Final = frozenset({"-h", "--help"})
_NUMBER: Final = re.compile(r"-\.?[0-9]")
# What other programs call it, where a likeness of letters would lead astray.
_ELSEWHERE: Final[Mapping[str, str]] = {"start": "run", "test": "check", "validate": "check", "restart": "upgrade"}


def require_command_first(program: str, commands: Collection[str], arguments: Sequence[str]) -> None:
    """Judge the order of ``arguments``; their names and values are argparse's to judge.

    Raises ConfigError for options before the command, an unknown command, and a file without its option.
    """
    if not arguments or arguments[0] in _ALONE:
        return
    first, rest = arguments[0], arguments[1:]
    if first.startswith("-"):
        at = max((index for index, text in enumerate(arguments) if text in commands), default=None)
        if at is None:
            raise ConfigError(f"found {first} where the command belongs: {_such_as(program, commands)}")
        meant = shlex.join([program, arguments[at], *arguments[:at], *arguments[at + 1 :]])
        raise ConfigError(f"options stand after the command: {meant}")
    if first not in commands:
        known = _ELSEWHERE.get(first) or _closest(first, commands)
        hint = f"did you mean {known}?" if known else _such_as(program, commands)
        raise ConfigError(f"unknown command {first!r}: {hint}")
    word = rest[0] if rest and not rest[0].startswith("-") else None
    option = _WORD_IS.get(first, _ELSE)
    if word is None or option is None or (first in _HAVE_WORDS and not word.endswith(_FILE_SUFFIX)):
        return
    meant = shlex.join([program, first, option, word, *rest[1:]])
    raise ConfigError(f"found {word!r} where an option belongs; did you mean {option} {shlex.quote(word)}? {meant}")


def require_known_options(command: str, options: Collection[str], usage: str, words: Sequence[str]) -> None:
    """Judge the names of the options among ``words``, which follow ``command``. Raises ConfigError with ``usage``.

    argparse alone would miss the required option before it looked at the misspelt one.
    """
    if not _HELP.isdisjoint(words):
        return
    for word in itertools.takewhile(lambda word: word != "--", words):
        name = word.partition("=")[0]
        # As argparse has it: a dash alone, a negative number and what has a space in it are values.
        if len(word) > 1 and word.startswith("-") and not _NUMBER.match(word) and " " not in name:
            if name in options:
                continue
            meant = _closest(name, options)
            hint = f"did you mean {meant}?" if meant else f"{command} has {', '.join(sorted(options))}"
            raise ConfigError(f"unknown option {printable(name)} of {command}: {hint}\n{usage.rstrip()}")


def _closest(word: str, known: Collection[str]) -> str | None:
    return next(iter(difflib.get_close_matches(word, known, n=1, cutoff=0.7)), None)


def _such_as(program: str, commands: Collection[str]) -> str:
    return f"{program} COMMAND [OPTIONS], with one of {', '.join(commands)}; {program} COMMAND --help tells the options"
