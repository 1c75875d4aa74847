"""The errors an operator can cause, and the exit codes they end with.

A leaf: every package may import it.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_RUNTIME = 1
EXIT_USAGE = 2


class OperatorError(Exception):
    """A fault the operator can mend; the message says what was found, what was needed and what to do.

    The command line prints the message without a traceback and exits with ``exit_code``. ``key`` is the place in the
    configuration that is at fault, such as ``("listeners", 0, "certificates", 1)``; empty where the message tells it,
    or where there is none. ``others`` are faults that were found with it, each with its own key.
    """

    exit_code = EXIT_RUNTIME
    key: tuple[str | int, ...] = ()
    others: tuple[OperatorError, ...] = ()


class ConfigError(OperatorError):
    """The configuration (or the command line) is not acceptable. Exit code 2."""

    exit_code = EXIT_USAGE


class StartError(OperatorError):
    """The configuration is good but this host cannot run it now (port taken, no permission). Exit code 1."""

    exit_code = EXIT_RUNTIME
