"""Keys against overload and abuse: how often, how slowly and from where clients may come."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field, ValidationInfo

from proxy.config.model import Model, Network, Seconds
from proxy.config.names import normalize_network
from proxy.config.paths import resolve_file
from proxy.config.refusal import RefusedError, printable, shown

FILE_PREFIX: Final = "file:"
ALL: Final = "all"
EVERYBODY: Final = ("0.0.0.0/0", "::/0")
MAX_NETWORKS: Final = 100_000
_MAX_FILE_BYTES: Final = 4 * 1024 * 1024
_MAX_TOLD_LINES: Final = 10


def _network_or_file(text: str, info: ValidationInfo) -> str:
    if text.startswith(FILE_PREFIX):
        path = resolve_file(text.removeprefix(FILE_PREFIX), (info.context or {}).get("base_dir"))
        _networks_in(path)
        return FILE_PREFIX + path
    return text if text == ALL else normalize_network(text)


def _networks_in(path: str) -> list[str]:
    """The networks of a file, one a line; ``#`` begins a comment. Raises ``RefusedError`` with every bad line."""
    wanted = "a text file with a network a line"
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise RefusedError(shown(path), wanted, f"it cannot be read: {error.strerror}") from None
    if len(data) > _MAX_FILE_BYTES:
        raise RefusedError(f"{shown(path)} with more than {_MAX_FILE_BYTES} bytes", wanted)
    found: list[str] = []
    bad: list[RefusedError] = []
    for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
        text = line.partition("#")[0].strip()
        if text:
            try:
                found += EVERYBODY if text == ALL else (normalize_network(text),)
            except RefusedError as error:
                bad.append(RefusedError(f"{error.found} at {printable(path)}:{number}", error.wanted, error.hint))
    if bad:
        first, *others = bad[:_MAX_TOLD_LINES]
        if len(bad) > _MAX_TOLD_LINES:
            others.append(RefusedError(f"{len(bad) - _MAX_TOLD_LINES} more bad lines in {printable(path)}", wanted))
        raise RefusedError(first.found, first.wanted, first.hint, others)
    return found


def _expanded(networks: tuple[str, ...]) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for text in networks:
        if text.startswith(FILE_PREFIX):
            found |= dict.fromkeys(_networks_in(text.removeprefix(FILE_PREFIX)))
        else:
            found |= dict.fromkeys(EVERYBODY if text == ALL else (text,))
    if len(found) > MAX_NETWORKS:
        raise RefusedError(f"{len(found)} networks", f"at most {MAX_NETWORKS}")
    return tuple(found)


NetworkList = Annotated[
    tuple[
        Annotated[
            str,
            AfterValidator(_network_or_file),
            Field(title='IP address, network, "all", or "file:" and the path of a list'),
        ],
        ...,
    ],
    AfterValidator(_expanded),
]
"""Networks; files are replaced by what is in them when the configuration is read."""


class RateLimit(Model):
    """How many requests may come. What comes too fast is answered 429 with Retry-After."""

    requests: int = Field(
        ge=1, le=1_000_000, description="So many in `per_secs`, evenly: the next token comes after a part of it."
    )
    per_secs: Seconds = Field(1, description="The time that `requests` are for.")
    burst: int | None = Field(
        None, ge=1, le=1_000_000, description="So many may come at once after a pause. Left out: `requests`."
    )
    by: Literal["client", "all"] = Field(
        "client",
        description=(
            "`client`: each client has tokens of its own (an address, or a network by `client_prefix_ipv4` and "
            "`_ipv6`; behind `trusted_proxies` whom they name). `all`: all clients together."
        ),
    )
    exempt: tuple[Network, ...] = Field((), description="Clients that are not counted.", examples=[["192.0.2.0/24"]])
