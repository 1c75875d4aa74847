"""From pydantic's errors to the operator's language."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from proxy.config.checks import Problem
from proxy.config.json_schema import Loc, header, node_at, tables, wanted
from proxy.config.refusal import RefusedError, printable, shown

_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]{1,80}")
# pydantic marks the key of a mapping, as opposed to its value, by this last part.
_KEY_MARK: Final = "[key]"
_UNITS: Final = re.compile(r"([0-9]+)(?:\.0)? ?(ms|s|sec|secs|m|min|h|d|k|kb|kib|m|mb|mib|g|gb|gib)", re.IGNORECASE)
_UNIT_IN_KEY: Final = re.compile(r"_(?:secs|bytes|percent)")
# As other proxies have it: 10/s, 10r/s, 600 requests per minute.
_RATE: Final = re.compile(
    r"([1-9][0-9]{0,5}) ?(?:r|reqs?|requests?)? ?(?:/|per) ?(s|secs?|seconds?|m|mins?|minutes?|h|hours?|d|days?)",
    re.IGNORECASE,
)
_RATE_SECS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


@dataclass(frozen=True, slots=True)
class Option:
    """What an operator typed: ``--listen`` and its value."""

    name: str
    typed: str
    hint: str = ""
    """What to do about the value if it is refused; empty for what would be said of a configuration file."""


def problems(error: ValidationError) -> Iterator[Problem]:
    """Yield the ``Problem`` or several of each of pydantic's errors, in none of its words."""
    for details in error.errors(include_url=False):
        # pydantic also calls an array too short whose elements were all refused, each with its own error.
        if details["type"] != "too_short" or not details["input"]:
            problem = _problem(details)
            yield problem
            cause = details.get("ctx", {}).get("error")
            for more in cause.also if isinstance(cause, RefusedError) else ():
                yield Problem(problem.loc, more.found, more.wanted, more.hint)


def key_path(loc: Loc) -> str:
    """Return a location as text: ``sites[0].hosts[1]``."""
    text = ""
    for part in loc:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            key = part if _BARE_KEY.fullmatch(part) else shown(part)
            text += f".{key}" if text else key
    return text


def rendered(problem: Problem, file: str, lines: Mapping[Loc, int], line: int | None) -> str:
    """Return the one line of a problem: ``FILE:LINE: key.path: found X; wanted Y; hint``."""
    where = printable(file) if line is None else f"{printable(file)}:{line}"
    hint = problem.hint
    if problem.other is not None:
        other_line = lines.get(problem.other)
        at = " (by default)" if other_line is None else f" (line {other_line})"
        also = f"see {key_path(problem.other)}{at}"
        hint = f"{also}; {hint}" if hint else also
    if not problem.wanted:
        table = key_path(problem.loc[:-1])
        return f"{where}: {table}: {problem.found}" if table else f"{where}: {problem.found}"
    parts = (f"found {problem.found}", f"wanted {problem.wanted}", hint)
    return f"{where}: {key_path(problem.loc)}: " + "; ".join(part for part in parts if part)


def rendered_option(problem: Problem, source: str, options: Mapping[Loc, Option]) -> str:
    """As ``rendered``, where a command line stands for the file: the option is named, with its value as typed."""
    option = options.get(problem.loc)
    if option is None:
        return rendered(problem, source, {}, None)
    other = None if problem.other is None else options.get(problem.other)
    if other is None:
        parts = (f"found {shown(option.typed)}", f"wanted {problem.wanted}", option.hint or problem.hint)
    else:
        parts = (f"found {problem.found}", f"wanted {problem.wanted}", f"see {other.name} {other.typed}")
    return f"{printable(source)}: {option.name}: " + "; ".join(part for part in parts if part)


def _problem(details: ErrorDetails) -> Problem:
    kind = details["type"]
    loc: Loc = details["loc"]
    if loc and loc[-1] == _KEY_MARK:
        loc = loc[:-1]
    value = details["input"]
    if kind == "extra_forbidden":
        return Problem(loc, _unknown_key(loc), "")
    node = node_at(loc)
    wants = "another value" if node is None else wanted(node)
    if kind == "missing":
        return Problem(loc, "nothing", wants, f"the key {shown(loc[-1])} is required")
    cause = details.get("ctx", {}).get("error")
    if isinstance(cause, RefusedError):
        return Problem(loc, cause.found, cause.wanted, cause.hint)
    if kind == "too_short":
        return Problem(loc, "an empty array", wants, "leave the key out to have the default or the site's value")
    # What stands in a header field may be a secret.
    found = "a value that is no string" if loc[-2:-1] == ("set",) else shown(value)
    return Problem(loc, found, wants, _hint(loc, node or {}, value))


def _hint(loc: Loc, node: Mapping[str, Any], value: object) -> str:
    kind = node.get("type")
    if rate := _rate_hint(loc, value):
        return rate
    if kind == "array" and isinstance(value, Mapping):
        return f"write [[{'.'.join(str(part) for part in loc if isinstance(part, str))}]] with two brackets"
    if kind == "array" and loc == ("listeners",):
        return f"write [[listeners]] with two brackets, below it address = {shown(value)}"
    if kind == "array" and isinstance(value, str):
        return f"write [{shown(value)}] with brackets"
    if kind == "object" and isinstance(value, tuple):
        return f"write [{'.'.join(str(part) for part in loc if isinstance(part, str))}] with single brackets"
    if kind in ("integer", "number"):
        return _number_hint(str(loc[-1]), kind, value)
    if kind == "boolean" and isinstance(value, str):
        return "write true or false without quotes"
    if kind == "string" and not isinstance(value, str | Mapping | tuple):
        return "write the value in quotes"
    if value == 0 and type(value) is int:
        return "leave the key out to have the default"
    return ""


def _rate_hint(loc: Loc, value: object) -> str:
    """What a rate in one string is in our keys; empty for anything else, and where no rate belongs."""
    match = _RATE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return ""
    keys = f"requests = {match[1]}, per_secs = {_RATE_SECS[match[2][0].lower()]}"
    if loc[-2:-1] == ("rate_limits",):
        return f"write {{ {keys} }}"
    return {"rate_limits": f"write [{{ {keys} }}]", "requests": f"write {keys}"}.get(str(loc[-1]), "")


def _number_hint(key: str, kind: str, value: object) -> str:
    if isinstance(value, str):
        if re.fullmatch(r"[0-9]+(?:\.[0-9]+)?", value):
            return f"write {value} without quotes"
        if _UNITS.fullmatch(value):
            return "write a plain number" + (": the unit is in the key's name" if _UNIT_IN_KEY.search(key) else "")
    if isinstance(value, int | float) and value == 0 and not isinstance(value, bool):
        return "0 does not switch it off; leave the key out to have the default"
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        return f"write {int(value)}" if abs(value) < 1e15 else ""
    return ""


def _unknown_key(loc: Loc) -> str:
    """Say that a key is unknown, what it might have been meant as, and where it would be valid."""
    key = str(loc[-1])
    parent = node_at(loc[:-1]) or {}
    name = key if _BARE_KEY.fullmatch(key) else shown(key)
    text = f"unknown key `{name}`"
    elsewhere = [_place(path, is_array) for path, is_array, node in tables() if key in node["properties"]]
    if elsewhere:
        here = (
            _place(".".join(part for part in loc[:-1] if isinstance(part, str)), isinstance(loc[-2], int))
            if (len(loc) > 1)
            else "the top level"
        )
        advice = f"it is not a key of {here}, but of {_listed(elsewhere)}"
        if "the top level" in elsewhere:
            advice += ": top-level keys stand before the first [table]"
        return f"{text}: {advice}"
    close = difflib.get_close_matches(key, parent.get("properties", ()), n=1)
    if close:
        return f"{text}: did you mean `{close[0]}`?"
    far = {
        candidate: _place(path, is_array)
        for path, is_array, node in reversed(list(tables()))
        for candidate in node["properties"]
    }
    distant = difflib.get_close_matches(key, far, n=1, cutoff=0.8)
    if distant:
        return f"{text}: did you mean `{distant[0]}` of {far[distant[0]]}?"
    return f"{text}: the keys here are {', '.join(parent.get('properties', ()))}"


def _place(path: str, is_array: bool) -> str:
    return header(path, is_array) if path else "the top level"


def _listed(places: list[str]) -> str:
    return places[0] if len(places) == 1 else f"{', '.join(places[:-1])} or {places[-1]}"
