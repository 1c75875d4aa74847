"""Where in the configuration file a fault is that only shows beyond the file: a certificate, a log, the budget."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

from proxy.config.locate import Loc, key_lines, line_of
from proxy.config.refusal import printable
from proxy.errors import OperatorError


@contextlib.contextmanager
def faults_at(*key: str | int) -> Iterator[None]:
    """Faults that are raised inside belong to ``key``, unless they know their place better."""
    try:
        yield
    except OperatorError as error:
        for one in (error, *error.others):
            one.key = one.key or key
        raise


@contextlib.contextmanager
def faults_under(*key: str | int) -> Iterator[None]:
    """Faults that are raised inside belong under ``key``: their own key is relative to it."""
    try:
        yield
    except OperatorError as error:
        for one in (error, *error.others):
            one.key = (*key, *one.key)
        raise


@contextlib.contextmanager
def collected(faults: list[OperatorError]) -> Iterator[None]:
    """Faults that are raised inside are put into ``faults``, so that what comes after it is judged too."""
    try:
        yield
    except OperatorError as error:
        faults += [error, *error.others]
        error.others = ()


def raise_together(faults: Sequence[OperatorError]) -> None:
    """Raise the first of ``faults``, the further ones as its ``others``; nothing where there is none."""
    if faults:
        faults[0].others = tuple(faults[1:])
        raise faults[0]


def told(error: OperatorError, path: str) -> list[str]:
    """The text of ``error``, and of each that was found with it, with its place in the file ``path``."""
    return [place_of(one, path) + str(one) for one in (error, *error.others)]


def place_of(error: OperatorError, path: str) -> str:
    """``FILE:LINE: key: `` for a fault that knows its key, else an empty text; the line where it can be known."""
    if not error.key:
        return ""
    line = None
    if os.path.isfile(path):  # a pipe has been read to its end, and opening it again may wait for ever
        with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
            line = line_of(key_lines(file.read()), error.key)
    where = printable(path) if line is None else f"{printable(path)}:{line}"
    name = _dotted(error.key)
    return f"{where}: " if str(error).startswith(name) else f"{where}: {name}: "


@contextlib.contextmanager
def faults_in(path: str) -> Iterator[None]:
    """Faults that are raised inside get their place in the configuration file ``path`` before their message."""
    try:
        yield
    except OperatorError as error:
        error.args = ("\n".join(told(error, path)),)
        error.key, error.others = (), ()
        raise


def _dotted(key: Loc) -> str:
    text = ""
    for part in key:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
