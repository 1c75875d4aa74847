"""File-descriptor arithmetic: the proof that no process of the appliance can run out of descriptors.

Everything here is a pure function of its arguments, but for :func:`process_limits`, the one reader of this process's
limits. Only the standard library is imported, and nothing of this package, so that a deployment tool can run this
file alone and judge a host before anything is installed on it: ``python3 budget.py < question.json`` (:func:`main`).

An exchange holds two descriptors, the client's and the upstream's: a budget that counts only clients moves EMFILE from
``accept`` to ``connect``.
"""

from __future__ import annotations

import enum
import json
import re
import resource
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TextIO

RESERVE = 64
"""Descriptors kept free in each process: standard streams, epoll, timers, DNS, files opened for a moment."""
HANDOVER = 1
"""A worker's one socket over its permits: the connection that is being refused or handed over."""
LOGS = 2
"""Access log and event log."""
CHANNELS = 2
"""Both ends of the event channel."""
GENERATIONS = 2
"""During a reload the old and the new listening sockets are open together."""
LOW_LIMIT = 1024
"""The default soft limit of many container engines and of systemd: a limit nobody chose. Warned about."""
LIMIT_STEP = 1024
"""A suggested LimitNOFILE is rounded up to a multiple of this."""
UNLIMITED_AS = 1_048_576
"""What ``"auto"`` takes an unlimited limit for: the default of the kernel's fs.nr_open."""
MAX_WORKERS = 256
MAX_CONNECTIONS = 1_000_000
"""The largest counts that a configuration may name."""
_ADDRESS = "a string (IP address and port)"
_SHOWN_CHARACTERS = 80
_EXACT = 1e15
"""Floats below it show each of their digits."""
_WITH_UNIT = re.compile(r"[0-9]+(?:\.0)? ?(?:ms|s|sec|secs|m|min|h|d|k|kb|kib|m|mb|mib|g|gb|gib)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the budget depends on.

    ``max_connections``: client connections of the whole appliance, or ``"auto"`` for the largest number that fits.
    ``max_upstream_connections``: None means equal to ``max_connections``.
    ``https_listeners``, ``redirect_listeners``: addresses, each of which has one socket a worker.
    ``redirect_cap``, ``health_cap``, ``admin_cap``: connections of the small listeners, for the whole appliance.
    ``control_listeners``: sockets of the control process (health and admin).
    """

    workers: int
    max_connections: int | Literal["auto"]
    max_upstream_connections: int | None = None
    https_listeners: int = 2
    redirect_listeners: int = 2
    redirect_cap: int = 64
    health_cap: int = 32
    admin_cap: int = 8
    control_listeners: int = 2
    logs: int = LOGS


@dataclass(frozen=True, slots=True)
class Limits:
    """RLIMIT_NOFILE, in descriptors; None stands for unlimited."""

    soft: int | None
    hard: int | None

    def __str__(self) -> str:
        return f"{_limit_text(self.soft)} (soft) / {_limit_text(self.hard)} (hard)"


@dataclass(frozen=True, slots=True)
class ProcessBudget:
    """One process's worst case: ``items`` are (label, descriptors)."""

    name: str
    items: tuple[tuple[str, int], ...]

    @property
    def total(self) -> int:
        return sum(count for _, count in self.items)


class Verdict(enum.Enum):
    FITS = "fits"
    RAISE = "fits after raising the soft limit"
    REFUSED = "refused"
    SKIPPED = "skipped: the limit is unlimited"


@dataclass(frozen=True, slots=True)
class Budget:
    """The result.

    ``max_connections``, ``max_upstream_connections``: resolved numbers (``"auto"`` and None replaced).
    ``needed``: descriptors of the process that needs most.
    ``raise_to``: the soft limit to set before start, when the verdict is RAISE.
    ``largest``: the largest ``max_connections`` that fits under the hard limit; None when none does or no limit is set.
    ``limit_nofile``: a LimitNOFILE that would do for these inputs.
    ``refusals``: why it was refused, one sentence each.
    """

    inputs: Inputs
    limits: Limits
    max_connections: int
    max_upstream_connections: int
    processes: tuple[ProcessBudget, ...]
    verdict: Verdict
    raise_to: int | None
    largest: int | None
    limit_nofile: int
    refusals: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def needed(self) -> int:
        return max(process.total for process in self.processes)


def process_limits() -> Limits:
    """This process's own RLIMIT_NOFILE."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Limits(_finite(soft), _finite(hard))


def parse_limits(text: str) -> Limits:
    """Limits from ``SOFT`` or ``SOFT:HARD``, each a positive number or ``unlimited``; HARD is SOFT where not given.

    Raises ValueError with the reason.
    """
    soft_text, colon, hard_text = text.partition(":")
    soft = _parse_limit(soft_text)
    hard = _parse_limit(hard_text) if colon else soft
    if hard is not None and (soft is None or soft > hard):
        raise ValueError(f"the soft limit {_limit_text(soft)} is above the hard limit {hard}")
    return Limits(soft, hard)


def shares(total: int, slots: int) -> tuple[int, ...]:
    """``total`` split over ``slots`` exactly: parts that add up to it and differ by one at most, larger ones first."""
    part, rest = divmod(total, slots)
    return (part + 1,) * rest + (part,) * (slots - rest)


def calculate(inputs: Inputs, limits: Limits) -> Budget:
    """Judge ``inputs`` under ``limits``. Never raises for a budget that does not fit: the verdict says so."""
    ceiling = limits.soft if limits.soft is None else limits.hard
    largest = None if ceiling is None else _largest(inputs, ceiling)
    if inputs.max_connections == "auto":
        fitting = largest if ceiling is not None else _largest(inputs, UNLIMITED_AS)
        clients = inputs.workers if fitting is None else fitting
    else:
        clients = inputs.max_connections
    upstreams = clients if inputs.max_upstream_connections is None else inputs.max_upstream_connections
    processes = tuple(_processes(inputs, clients, upstreams))
    needed = max(process.total for process in processes)
    limit_nofile = -(-needed // LIMIT_STEP) * LIMIT_STEP

    refusals = list(_below_workers(inputs, clients, upstreams))
    raise_to = None
    if limits.soft is None:
        verdict = Verdict.SKIPPED
    elif needed <= limits.soft:
        verdict = Verdict.FITS
    elif limits.hard is None or needed <= limits.hard:
        verdict, raise_to = Verdict.RAISE, needed
    else:
        verdict = Verdict.REFUSED
        refusals.append(_refusal(inputs, limits, clients, processes, largest, limit_nofile))
    if refusals:
        verdict, raise_to = Verdict.REFUSED, None

    effective = limits.soft if raise_to is None else raise_to
    warnings = []
    if verdict is not Verdict.REFUSED and effective is not None and effective <= LOW_LIMIT:
        warnings.append(
            f"the descriptor limit is {effective}, a default of container engines and service managers rather than a"
            f" choice: set LimitNOFILE={max(8192, limit_nofile)} (systemd) or ulimits (compose)"
        )
    return Budget(
        inputs=inputs,
        limits=limits,
        max_connections=clients,
        max_upstream_connections=upstreams,
        processes=processes,
        verdict=verdict,
        raise_to=raise_to,
        largest=largest,
        limit_nofile=limit_nofile,
        refusals=tuple(refusals),
        warnings=tuple(warnings),
    )


def to_text(budget: Budget) -> str:
    """The arithmetic as an aligned table with the verdict, lines separated by line feeds, for a terminal."""
    rows: list[tuple[str, str, str]] = []
    for name, process in _grouped(budget.processes):
        head = name
        for label, count in process.items:
            rows.append((head, label, str(count)))
            head = ""
        rows.append(("", "total", str(process.total)))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [f"file descriptors: limit {budget.limits}"]
    lines += [f"  {name:<{widths[0]}}  {label:<{widths[1]}}  {count:>{widths[2]}}" for name, label, count in rows]
    lines.append(verdict_text(budget))
    if budget.largest is not None:
        under = f"the hard limit {_limit_text(budget.limits.hard)}"
        lines.append(f"largest max_connections under {under}: {budget.largest}")
    lines += [f"refused: {reason}" for reason in budget.refusals]
    lines += [f"warning: {warning}" for warning in budget.warnings]
    return "\n".join(lines)


def arithmetic(budget: Budget) -> str:
    """One line: what the process that needs most consists of."""
    process = max(budget.processes, key=lambda process: process.total)
    parts = " + ".join(f"{count} {label}" for label, count in process.items if count)
    return f"{process.name} = {parts} = {process.total}"


def verdict_text(budget: Budget) -> str:
    """One line: what the budget needs and how it ends."""
    needs = f"max_connections = {budget.max_connections} needs {budget.needed} descriptors"
    if budget.raise_to is not None:
        return f"{needs}: fits after raising the soft limit from {budget.limits.soft} to {budget.raise_to}"
    return f"{needs}: {budget.verdict.value}"


def to_dict(budget: Budget) -> Mapping[str, object]:
    """The same for programs: only numbers, strings, lists, dictionaries and None."""
    return {
        "limits": {"soft": budget.limits.soft, "hard": budget.limits.hard},
        "max_connections": budget.max_connections,
        "max_upstream_connections": budget.max_upstream_connections,
        "processes": [
            {
                "name": process.name,
                "items": [{"label": label, "descriptors": count} for label, count in process.items],
                "total": process.total,
            }
            for process in budget.processes
        ],
        "needed": budget.needed,
        "verdict": budget.verdict.name.lower(),
        "raise_to": budget.raise_to,
        "largest_max_connections": budget.largest,
        "limit_nofile": budget.limit_nofile,
        "refusals": list(budget.refusals),
        "warnings": list(budget.warnings),
    }


def _processes(inputs: Inputs, clients: int, upstreams: int) -> Iterator[ProcessBudget]:
    addresses = inputs.https_listeners + inputs.redirect_listeners
    common = (("logs", inputs.logs), ("event channel", CHANNELS), ("reserve", RESERVE))
    split = zip(
        shares(clients, inputs.workers),
        shares(upstreams, inputs.workers),
        shares(inputs.redirect_cap, inputs.workers),
        strict=True,
    )
    for slot, (client_share, upstream_share, redirect_share) in enumerate(split):
        yield ProcessBudget(
            f"worker {slot}",
            (
                (f"client connections (share of {clients})", client_share),
                (f"upstream connections (share of {upstreams})", upstream_share),
                (f"redirect connections (share of {inputs.redirect_cap})", redirect_share),
                ("connection being refused or handed over", HANDOVER),
                ("listening sockets", addresses),
                *common,
            ),
        )
    yield ProcessBudget(
        "control",
        (
            ("health connections", inputs.health_cap),
            ("admin connections", inputs.admin_cap),
            ("listening sockets", inputs.control_listeners),
            *common,
        ),
    )
    yield ProcessBudget(
        "master",
        (
            (
                f"listening sockets ({inputs.workers} x {addresses}, old and new)",
                GENERATIONS * inputs.workers * addresses,
            ),
            ("control's listening sockets", inputs.control_listeners),
            *common,
        ),
    )


def _largest(inputs: Inputs, ceiling: int) -> int | None:
    """The largest max_connections under a limit of ``ceiling``; None when no number from ``workers`` up fits.

    Slot 0 has the largest share of everything, so it decides.
    """
    workers = inputs.workers
    fixed = inputs.max_upstream_connections
    worker, *_, control, master = _processes(inputs, 0, fixed or 0)
    left = ceiling - worker.total
    largest = workers * (left // 2 if fixed is None else left)
    if largest < workers or max(control.total, master.total) > ceiling:
        return None
    return largest


def _below_workers(inputs: Inputs, clients: int, upstreams: int) -> Iterator[str]:
    """A worker without a permit would never accept, and the clients queued on its socket would wait for ever."""
    caps = (
        ("max_connections", clients, True),
        ("max_upstream_connections", upstreams, inputs.max_upstream_connections is not None),
        ("redirect.max_connections", inputs.redirect_cap, inputs.redirect_listeners > 0),
    )
    for name, value, counts in caps:
        if counts and value < inputs.workers:
            yield (
                f"{name} = {value} is below workers = {inputs.workers}, so some worker would have none:"
                f" set {name} to at least {inputs.workers}, or workers to at most {max(value, 1)}"
            )


def _refusal(
    inputs: Inputs,
    limits: Limits,
    clients: int,
    processes: tuple[ProcessBudget, ...],
    largest: int | None,
    limit_nofile: int,
) -> str:
    most = max(processes, key=lambda process: process.total)
    what = f"max_connections = {clients}" if most.name.startswith("worker") else f"workers = {inputs.workers}"
    where = "a worker" if most.name.startswith("worker") else f"the {most.name} process"
    advice = f"set LimitNOFILE={limit_nofile}"
    if largest is not None:
        advice += f", or max_connections to at most {largest}"
    else:
        advice += "; no max_connections fits under the limit as it is"
    return f"{what} needs {most.total} descriptors in {where}, the limit is {limits}: {advice}"


def _grouped(processes: tuple[ProcessBudget, ...]) -> Iterator[tuple[str, ProcessBudget]]:
    """Processes with equal items (workers with equal shares) under one name."""
    groups: dict[tuple[tuple[str, int], ...], list[ProcessBudget]] = {}
    for process in processes:
        groups.setdefault(process.items, []).append(process)
    for group in groups.values():
        first, last = group[0].name, group[-1].name
        name = first if len(group) == 1 else f"{first} to {last.rpartition(' ')[2]}, each"
        yield name, group[0]


def _parse_limit(text: str) -> int | None:
    if text == "unlimited":
        return None
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise ValueError(f"{text!r} is not a number of descriptors: give a positive number or 'unlimited'")
    return int(text)


def _limit_text(limit: int | None) -> str:
    return "unlimited" if limit is None else str(limit)


def _finite(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


class ConfigurationError(ValueError):
    """Values that the budget cannot count with: ``faults`` has all of them, a line each as the daemon words it."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = tuple(faults)


def inputs_of(settings: Mapping[str, Any], *, processors: int, ipv6: bool) -> Inputs:
    """What the budget of a configuration depends on, with the defaults of docs/configuration.md where a key is missing.

    ``settings`` is a parsed configuration file. ``processors`` is what ``workers = "auto"`` comes to on the host;
    ``ipv6`` whether the host has it, since the default IPv6 addresses are skipped where it has not.
    Raises ConfigurationError with every value that the budget cannot count with, and with sites and addresses that have
    the wrong shape, so that a deployment tool may look them up afterwards; the rest is not judged.
    """
    top = _Table(settings, "", [])
    addresses = 2 if ipv6 else 1
    workers = top.count_or_auto("workers", 1, MAX_WORKERS)
    clients = top.count_or_auto("max_connections", 1024, MAX_CONNECTIONS)
    upstreams = top.count("max_upstream_connections", 0) if "max_upstream_connections" in settings else None
    listeners = top.tables("listeners")
    for listener in listeners:
        listener.address("address", required=True)
    top.tables("sites")
    redirect, health, admin = (top.table(name) for name in ("redirect", "health", "admin"))
    redirecting, redirect_cap = redirect.flag("enabled"), redirect.count("max_connections", 64)
    redirect_addresses = redirect.addresses(addresses)
    health.address("address")
    healthy, health_cap = health.flag("enabled"), health.count("max_connections", 32)
    admin_cap = admin.count("max_connections", 8)
    if top.faults:
        raise ConfigurationError(top.faults)
    return Inputs(
        workers=processors if workers == "auto" else workers,
        max_connections=clients,
        max_upstream_connections=upstreams,
        https_listeners=len(listeners) or addresses,
        redirect_listeners=redirect_addresses if redirecting else 0,
        redirect_cap=redirect_cap if redirecting else 0,
        health_cap=health_cap if healthy else 0,
        admin_cap=admin_cap,
        control_listeners=2 if healthy else 1,
    )


def answer(question: Mapping[str, Any]) -> Mapping[str, object]:
    """Judge a configuration for another host, from what was found there.

    ``question``: ``configuration`` (the text of the TOML file), ``limits`` (as for :func:`parse_limits`),
    ``processors`` and ``ipv6`` (as for :func:`inputs_of`), and where wanted ``file``, the configuration's name in what
    is said of it. The answer is that of :func:`to_dict`, and ``text``, the same for people, and ``arithmetic``. A
    configuration with values that cannot be counted with has ``faults`` alone, a line each; else they are empty.
    Raises ValueError, KeyError or TypeError for a question that is none.
    """
    settings = tomllib.loads(question["configuration"])
    processors, limits = question["processors"], parse_limits(str(question["limits"]))
    if type(processors) is not int or processors < 1:
        raise ValueError(f"processors: found {_shown(processors)}; wanted a positive whole number")
    try:
        inputs = inputs_of(settings, processors=processors, ipv6=bool(question["ipv6"]))
    except ConfigurationError as error:
        file = question.get("file", "configuration")
        return {"faults": [f"{file}: {fault}" for fault in error.faults]}
    budget = calculate(inputs, limits)
    return {
        "faults": [],
        **to_dict(budget),
        "workers": inputs.workers,
        "text": to_text(budget),
        "arithmetic": arithmetic(budget),
    }


def main(asked: TextIO, answered: TextIO, complaints: TextIO) -> int:
    """A question as JSON in, its answer as JSON out. Returns the exit code: 0 fits, 2 refused or not understood."""
    try:
        result = answer(json.load(asked))
    except (ValueError, KeyError, TypeError) as error:
        reason = f"it lacks the key {error}" if isinstance(error, KeyError) else str(error)
        print(f"budget: the question cannot be answered: {reason}", file=complaints)
        return 2
    print(json.dumps(result, indent=2), file=answered)
    return 2 if result["faults"] or result["refusals"] else 0


class _Table:
    """A table of a configuration: gives the values of its keys, and notes what is wrong with them in ``faults``.

    A value that is wrong is replaced by one that can be worked with. The words are those of the daemon, whose own
    judgement is not at hand where this file is alone; a test compares the two.
    """

    def __init__(self, values: Mapping[str, Any], name: str, faults: list[str]) -> None:
        self._values = values
        self._name = name
        self.faults = faults

    def table(self, key: str) -> _Table:
        value = self._values.get(key, {})
        if isinstance(value, dict):
            return _Table(value, key, self.faults)
        name = key.partition("[")[0]
        self._refuse(key, "a table", f"write [{name}] with single brackets" if isinstance(value, list) else "")
        return _Table({}, key, self.faults)

    def tables(self, key: str) -> list[_Table]:
        """Those of an array of them, without what is none."""
        value = self._values.get(key, [])
        if isinstance(value, list):
            parts = self._parts(key, value)
            given = {name: parts.table(name) for name in parts._values}
            return [table for name, table in given.items() if isinstance(parts._values[name], dict)]
        hint = ""
        if isinstance(value, dict) or key == "listeners":
            hint = f"write [[{key}]] with two brackets"
            if not isinstance(value, dict):
                hint += f", below it address = {_shown(value)}"
        elif isinstance(value, str):
            hint = f"write [{_shown(value)}] with brackets"
        self._refuse(key, "an array of tables", hint)
        return []

    def address(self, key: str, *, required: bool = False) -> None:
        """Only whether it is a string: the daemon judges what is in it."""
        if key not in self._values:
            if required:
                self._refuse(key, _ADDRESS, f"the key {_shown(key)} is required")
        elif not isinstance(value := self._values[key], str):
            self._refuse(key, _ADDRESS, "" if isinstance(value, dict | list) else "write the value in quotes")

    def addresses(self, default: int) -> int:
        """How many there are."""
        value = self._values.get("addresses")
        if "addresses" not in self._values:
            return default
        if isinstance(value, list) and value:
            parts = self._parts("addresses", value)
            for name in parts._values:
                parts.address(name)
            return len(value)
        hint = f"write [{_shown(value)}] with brackets" if isinstance(value, str) else ""
        if isinstance(value, dict):
            hint = f"write [[{self._name}.addresses]] with two brackets"
        elif value == []:
            hint = "leave the key out to have the default or the site's value"
        self._refuse("addresses", "an array of strings (IP address and port), not empty", hint)
        return default

    def flag(self, key: str) -> bool:
        value = self._values.get(key, True)
        if isinstance(value, bool):
            return value
        self._refuse(key, "true or false", "write true or false without quotes" if isinstance(value, str) else "")
        return True

    def count(self, key: str, default: int) -> int:
        value = self._values.get(key, default)
        if type(value) is int and 1 <= value <= MAX_CONNECTIONS:
            return value
        hint = _plain_number(value)
        if isinstance(value, int | float) and value == 0 and not isinstance(value, bool):
            hint = "0 does not switch it off; leave the key out to have the default"
        elif isinstance(value, str) and _WITH_UNIT.fullmatch(value):
            hint = "write a plain number"
        self._refuse(key, f"an integer from 1 to {MAX_CONNECTIONS}", hint)
        return default

    def count_or_auto(self, key: str, default: int, most: int) -> int | Literal["auto"]:
        value = self._values.get(key, default)
        if value == "auto":
            return "auto"
        if type(value) is int and 1 <= value <= most:
            return value
        self._refuse(key, f'an integer from 1 to {most}, or "auto"', _plain_number(value))
        return default

    def _parts(self, key: str, array: Sequence[Any]) -> _Table:
        """The values of an array, by the names that they have in what is said of them."""
        return _Table({f"{key}[{index}]": value for index, value in enumerate(array)}, self._name, self.faults)

    def _refuse(self, key: str, wanted: str, hint: str) -> None:
        found = "nothing"
        if key in self._values:
            value = self._values[key]
            found = "an empty array" if value == [] and key == "addresses" else _shown(value)
        name = f"{self._name}.{key}" if self._name else key
        self.faults.append(f"{name}: found {found}; wanted {wanted}" + (f"; {hint}" if hint else ""))


def _plain_number(value: object) -> str:
    if isinstance(value, str) and re.fullmatch("[0-9]+", value):
        return f"write {value} without quotes"
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        return f"write {value:.0f}"
    return ""


def _shown(value: object) -> str:
    """A value as it would be written in TOML, on one line of bounded length."""
    if isinstance(value, str):
        short = value if len(value) <= _SHOWN_CHARACTERS else value[:_SHOWN_CHARACTERS] + "..."
        return json.dumps(short).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        # str() of a very long integer is refused by the interpreter itself.
        return str(value) if value.bit_length() < 256 else "an integer of too many digits"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return f"an array of {len(value)}"
    return f"a date or time ({value})"


if __name__ == "__main__":
    sys.exit(main(sys.stdin, sys.stdout, sys.stderr))
