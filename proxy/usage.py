"""Command lines that are wrong in a way that people often are: told with the line that was meant."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from proxy.errors import ConfigError

_ALONE: Final = frozenset({"-h", "--help", "--version"})
# What a bare word after a command is, where the command has no words of its own.
_WORD_IS: Final[Mapping[str, str | None]] = {"serve": "--to", "demo": None}
_ELSE: Final = "--config"
_HAVE_WORDS: Final = frozenset({"log-level", "why"})
_FILE_SUFFIX: Final = ".toml"


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
        close = difflib.get_close_matches(first, commands, n=1, cutoff=0.7)
        hint = f"did you mean {close[0]}?" if close else _such_as(program, commands)
        raise ConfigError(f"unknown command {first!r}: {hint}")
    word = rest[0] if rest and not rest[0].startswith("-") else None
    option = _WORD_IS.get(first, _ELSE)
    if word is None or option is None or (first in _HAVE_WORDS and not word.endswith(_FILE_SUFFIX)):
        return
    meant = shlex.join([program, first, option, word, *rest[1:]])
    raise ConfigError(f"found {word!r} where an option belongs; did you mean {option} {shlex.quote(word)}? {meant}")


def _such_as(program: str, commands: Collection[str]) -> str:
    return f"{program} COMMAND [OPTIONS], with one of {', '.join(commands)}; {program} COMMAND --help tells the options"
