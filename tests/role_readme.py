"""The README.md of each role, from its meta/argument_specs.yml: ``python -m tests.role_readme [--check]``."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

ROLES = Path(__file__).resolve().parents[1] / "roles"
_MARKUP = re.compile(r"([OVC])\(((?:[^()]|\([^()]*\))*)\)")
_NAMELESS = "none"


def roles() -> Sequence[str]:
    return sorted(path.parent.parent.name for path in ROLES.glob("*/meta/argument_specs.yml"))


def specification(role: str) -> Mapping[str, Any]:
    """The entry point ``main`` of a role."""
    text = (ROLES / role / "meta" / "argument_specs.yml").read_text(encoding="utf-8")
    entry: dict[str, Any] = yaml.safe_load(text)["argument_specs"]["main"]
    return entry


def prose(text: str | Sequence[str]) -> str:
    """A description: Ansible's markup for options, values and code becomes code."""
    joined = text if isinstance(text, str) else " ".join(text)
    return _MARKUP.sub(lambda found: f"`{found[2]}`", " ".join(joined.split()))


def shown(value: object) -> str:
    """A default, as one writes it in an inventory."""
    if value is None:
        return _NAMELESS
    if isinstance(value, str):
        return f"`{value}`" if value else '`""`'
    return (
        f"`{yaml.safe_dump(value, default_flow_style=True, width=1000).strip().removesuffix('...').strip()}`".replace(
            "\n", ""
        )
    )


def kind(option: Mapping[str, Any]) -> str:
    said = str(option.get("type", "str"))
    if "elements" in option:
        said += f" of {option['elements']}"
    if "choices" in option:
        said += ": " + ", ".join(shown(choice) for choice in option["choices"])
    return said


def rows(options: Mapping[str, Mapping[str, Any]], prefix: str = "") -> Iterator[str]:
    for name, option in options.items():
        default = "needed" if option.get("required") else shown(option["default"]) if "default" in option else ""
        cells = (f"`{prefix}{name}`", kind(option), default, prose(option["description"]))
        yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"
        yield from rows(option.get("options", {}), f"{prefix}{name}[].")


def readme(role: str) -> str:
    entry = specification(role)
    return "\n".join(
        [
            "<!-- Generated from meta/argument_specs.yml by `python -m tests.role_readme`: edit there. -->",
            "",
            f"# Role {role}",
            "",
            f"{prose(entry['short_description'])}.",
            "",
            prose(entry["description"]),
            "",
            "| variable | type | default | what |",
            "| --- | --- | --- | --- |",
            *rows(entry["options"]),
            "",
        ]
    )


def main(arguments: Sequence[str]) -> int:
    stale = []
    for role in roles():
        path = ROLES / role / "README.md"
        text = readme(role)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(role)
            if "--check" not in arguments:
                path.write_text(text, encoding="utf-8")
    if "--check" in arguments and stale:
        names = ", ".join(stale)
        print(
            f"README.md of {names} differs from its argument_specs.yml: run python -m tests.role_readme",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
