"""From a TOML file to ``Settings``, or to one ``ConfigError`` that tells everything that is wrong."""

from __future__ import annotations

import os
import re
import select
import stat
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from pydantic import ValidationError

from proxy.config.checks import Problem, conflicts
from proxy.config.explain import Option, problems, rendered, rendered_option
from proxy.config.json_schema import Loc
from proxy.config.locate import key_lines, line_of
from proxy.config.refusal import printable
from proxy.config.schema import Settings
from proxy.errors import ConfigError

_MAX_FILE_BYTES: Final = 4 * 1024 * 1024
_SHOWN_CHARS: Final = 60
_WRITER_WAIT_MS: Final = 1000
_UTF8_BOM: Final = b"\xef\xbb\xbf"
_UTF16_BOMS: Final = (b"\xff\xfe", b"\xfe\xff")
_POSITION: Final = re.compile(r" \(at (?:line ([0-9]+), column ([0-9]+)|end of document)\)$")
_SYNTAX_HINTS: Final = {
    "Invalid value": 'text stands in quotes ("0.0.0.0:443"), truth is true or false, a list ends with ]',
    "Invalid initial character for a key part": "a key has letters, digits, - and _; anything else stands in quotes",
    "Cannot overwrite a value": "the key is there twice",
    "Unclosed array": "a ] is missing",
    "Expected '=' after a key in a key/value pair": "each line is: key = value",
}
# Elements of these arrays are judged one by one: an error in one does not hide what is wrong with another.
_ARRAYS: Final = ("listeners", "sites")


class _Draft(NamedTuple):
    """What remains of a configuration without its unacceptable parts."""

    settings: Settings
    kept: Mapping[str, list[int]]
    """For each of ``_ARRAYS``: the original indices of the elements that remain."""


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A configuration file that can be read again (a reload): call it for its settings. ``path`` is absolute."""

    path: str
    read: Callable[[str], Settings]

    def __call__(self) -> Settings:
        """Raises ``ConfigError``, as ``load_settings`` does."""
        return self.read(self.path)


def load_settings(path: str) -> Settings:
    """Read the configuration file ``path``. Raises ``ConfigError`` with all errors, one a line."""
    try:
        # Without waiting: opening a FIFO would last until somebody writes to it.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            is_fifo = stat.S_ISFIFO(os.fstat(file.fileno()).st_mode)
            first = _first_of_fifo(file.fileno(), path) if is_fifo else b""
            os.set_blocking(file.fileno(), True)
            data = first + file.read(_MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{printable(path)}: there is no such file; name the configuration with --config") from None
    except IsADirectoryError:
        raise ConfigError(f"{printable(path)}: found a directory; wanted a TOML file") from None
    except PermissionError:
        raise ConfigError(
            f"{printable(path)}: permission denied for user {os.geteuid()}; wanted a readable file"
        ) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "not a usable path"
        raise ConfigError(f"{printable(path)}: cannot be read: {reason}") from None
    if len(data) > _MAX_FILE_BYTES:
        raise ConfigError(f"{printable(path)}: found more than {_MAX_FILE_BYTES} bytes; wanted a configuration file")
    return load_text(_decoded(data, path), file=path, base_dir=os.path.dirname(os.path.abspath(path)))


def _first_of_fifo(pipe: int, path: str) -> bytes:
    """What comes first from ``pipe``, which is non-blocking; nothing where a writer has not begun, or has ended.

    The writer of a shell's pipe is there before the command, that of a named one may come at the same time. Raises
    ``ConfigError`` when there is none after a moment.
    """
    waiting = select.poll()
    waiting.register(pipe, select.POLLIN)
    if waiting.poll(_WRITER_WAIT_MS):
        return b""
    try:
        first = os.read(pipe, 1)
    except BlockingIOError:  # there is one, with nothing to read yet
        return b""
    if not first:
        raise ConfigError(f"{printable(path)}: found a FIFO that nobody writes to; wanted a TOML file")
    return first


def admin_socket_in(path: str) -> str:
    """Where the instance of the configuration file ``path`` can be asked, also when the file has other faults.

    Raises ``ConfigError`` when it cannot be read that far.
    """
    try:
        return load_settings(path).admin.socket
    except ConfigError:
        if not os.path.isfile(path):  # a pipe has been read to its end
            raise
        try:
            with open(path, "rb") as file:
                found = tomllib.load(file)["admin"]["socket"]
        except (OSError, ValueError, KeyError, TypeError):
            found = None
        if not isinstance(found, str) or not os.path.isabs(found):
            raise
        return found


def load_text(text: str, *, file: str, base_dir: str | None) -> Settings:
    """Read TOML. ``file`` is the name in messages, ``base_dir`` the folder that relative files are taken from.

    Raises ``ConfigError`` with all errors, one a line.
    """
    return _settings(_parsed(text, file), text, file, base_dir)


def load_mapping(
    data: Mapping[str, Any],
    *,
    source: str,
    base_dir: str | None = None,
    options: Mapping[Loc, Option] = MappingProxyType({}),
) -> Settings:
    """Judge settings that stand in no file, such as a command line's; ``source`` is their name in messages.

    ``options`` are what was typed for the values at these places. Raises ``ConfigError`` with all errors, one a line.
    """
    return _settings(dict(data), "", source, base_dir, options)


def _decoded(data: bytes, path: str) -> str:
    name = printable(path)
    if data.startswith(_UTF8_BOM):
        raise ConfigError(f"{name}:1: found a byte order mark; wanted UTF-8 without one; save the file without BOM")
    if data.startswith(_UTF16_BOMS):
        raise ConfigError(f"{name}:1: found UTF-16; wanted UTF-8; save the file in that encoding")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{name}:{line}: found the byte 0x{data[error.start]:02x}, which is not UTF-8; wanted UTF-8; "
            "save the file in that encoding"
        ) from None


def _parsed(text: str, file: str) -> dict[str, Any]:
    name = printable(file)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"{name}: found arrays or tables nested too deeply; wanted a configuration") from None
    except ValueError as error:
        # Python 3.14 has the position in attributes, earlier ones only in the text.
        message = str(error)
        match = _POSITION.search(message)
        if match is None:
            # An integer beyond the interpreter's limit of digits is the one that comes without a position.
            raise ConfigError(f"{name}: not TOML: a value that cannot be read, such as a too long number") from None
        reason = message[: match.start()]
        line = match[1] or str(text.count("\n") + 1)
        column = f":{match[2]}" if match[2] else ""
        hint = next((hint for start, hint in _SYNTAX_HINTS.items() if reason.startswith(start)), "")
        # The key alone: a value may be a secret.
        said = text.split("\n")[int(line) - 1].partition("=")[0].strip()[:_SHOWN_CHARS]
        found = f" at `{printable(said)}`" if said else ""
        raise ConfigError(
            f"{name}:{line}{column}: not TOML: {printable(reason)}{found}" + (f"; {hint}" if hint else "")
        ) from None


def _settings(
    data: dict[str, Any],
    text: str,
    file: str,
    base_dir: str | None,
    options: Mapping[Loc, Option] = MappingProxyType({}),
) -> Settings:
    frozen = {key: _frozen(value) for key, value in data.items()}
    found: list[Problem] = []
    draft: _Draft | None
    try:
        draft = _Draft(_validated(frozen, base_dir), {})
    except ValidationError as error:
        found.extend(problems(error))
        draft = _remainder(frozen, found, base_dir)
    if draft is not None:
        refused = [problem.loc for problem in found]
        across = (_original(problem, draft.kept) for problem in conflicts(draft.settings))
        found.extend(problem for problem in across if not _is_below(refused, problem.lacks))
    if not frozen.get("sites"):
        found.extend(_no_sites(found))
    if draft is not None and not found:
        return draft.settings
    if options:
        raise ConfigError("\n".join(dict.fromkeys(rendered_option(problem, file, options) for problem in found)))
    lines = key_lines(text)
    placed = [(line_of(lines, problem.loc), problem) for problem in found]
    placed.sort(key=lambda item: item[0] or 0)
    raise ConfigError("\n".join(dict.fromkeys(rendered(problem, file, lines, line) for line, problem in placed)))


def _validated(data: Mapping[str, Any], base_dir: str | None) -> Settings:
    # Strict: a number is no string, true is no number.
    return Settings.model_validate(data, strict=True, context={"base_dir": base_dir})


def _frozen(value: Any) -> Any:
    """Make arrays tuples: in strict mode pydantic takes nothing else for them."""
    if isinstance(value, list | tuple):
        return tuple(_frozen(item) for item in value)
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    return value


def _remainder(data: dict[str, Any], found: list[Problem], base_dir: str | None) -> _Draft | None:
    """Leave out the parts that ``found`` names, so that what concerns several tables is judged in the same run."""
    bad = {problem.loc[:2] if problem.loc[0] in _ARRAYS else problem.loc[:1] for problem in found if problem.loc}
    rest = {key: value for key, value in data.items() if (key,) not in bad}
    kept: dict[str, list[int]] = {}
    for key in _ARRAYS:
        if isinstance(rest.get(key), tuple):
            kept[key] = [index for index in range(len(rest[key])) if (key, index) not in bad]
            rest[key] = tuple(rest[key][index] for index in kept[key])
    try:
        return _Draft(_validated(rest, base_dir), kept)
    except ValidationError:
        return None


def _original(problem: Problem, kept: Mapping[str, list[int]]) -> Problem:
    def mapped(loc: Loc) -> Loc:
        if len(loc) > 1 and isinstance(loc[0], str) and isinstance(loc[1], int) and kept.get(loc[0]):
            return (loc[0], kept[loc[0]][loc[1]], *loc[2:])
        return loc

    other = None if problem.other is None else mapped(problem.other)
    lacks = None if problem.lacks is None else mapped(problem.lacks)
    return Problem(mapped(problem.loc), problem.found, problem.wanted, problem.hint, other, lacks)


def _is_below(locs: list[Loc], key: Loc | None) -> bool:
    """Whether one of ``locs`` is ``key`` or a part of it."""
    return key is not None and any(loc[: len(key)] == key for loc in locs)


def _no_sites(found: list[Problem]) -> list[Problem]:
    if any(problem.loc[:1] == ("sites",) for problem in found):
        return []
    return [
        Problem(
            ("sites",),
            "none",
            "at least one site",
            'such as [[sites]] with hosts = ["git.example.org"] and upstreams = ["http://127.0.0.1:3000"]',
        )
    ]
