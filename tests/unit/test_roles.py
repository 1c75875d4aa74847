"""Roles say one thing in one way: defaults, argument specifications, README."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from proxy.config.load import load_mapping
from tests.role_readme import ROLES, main, prose, readme, roles, specification

NAMES = sorted(path.name for path in ROLES.iterdir() if (path / "tasks").is_dir())


def defaults(role: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROLES / role / "defaults" / "main.yml").read_text(encoding="utf-8"))
    return loaded


def test_every_role_is_specified() -> None:
    assert NAMES
    assert list(roles()) == NAMES


@pytest.mark.parametrize("role", NAMES)
def test_the_defaults_are_those_of_the_specification(role: str) -> None:
    options = specification(role)["options"]
    assert {name: option["default"] for name, option in options.items() if "default" in option} == defaults(role)
    assert [name for name, option in options.items() if "default" not in option and not option.get("required")] == []


@pytest.mark.parametrize("role", NAMES)
def test_variables_carry_the_name_of_their_role(role: str) -> None:
    assert [name for name in defaults(role) if not name.startswith(f"{role}_")] == []


@pytest.mark.parametrize("role", NAMES)
def test_every_option_says_what_it_is_for(role: str) -> None:
    def judge(name: str, option: dict[str, Any]) -> None:
        assert prose(option["description"]).endswith("."), name
        assert "type" in option, name
        for inner, its in option.get("options", {}).items():
            judge(f"{name}.{inner}", its)

    for name, option in specification(role)["options"].items():
        judge(name, option)


@pytest.mark.parametrize("role", NAMES)
def test_fallbacks_are_the_other_roles_defaults(role: str) -> None:
    """``ulimits_nofile | default(8192)``: said again for a role that runs alone, and so compared here."""
    for name, value in defaults(role).items():
        found = re.fullmatch(r"\{\{ (([a-z]+)_[a-z_]+) \| default\((.*)\) \}\}", str(value))
        if found is None or found[2] == role:
            continue
        theirs = defaults(found[2])[found[1]]
        if found[3].startswith("role_path ~ "):
            assert f"{{{{ role_path }}}}{found[3].removeprefix('role_path ~ ')[1:-1]}" == theirs, name
        else:
            assert yaml.safe_load(found[3]) == theirs, name


def test_readmes_are_generated_from_the_specifications(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().err


def test_a_stale_readme_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    meta = tmp_path / "one" / "meta"
    meta.mkdir(parents=True)
    (meta / "argument_specs.yml").write_text(
        "argument_specs: {main: {short_description: One, description: [It is V(one).], options: {one_x: {type: list,"
        " elements: str, default: [a, b], description: A | B.}}}}"
    )
    monkeypatch.setattr("tests.role_readme.ROLES", tmp_path)
    assert main(["--check"]) == 1
    assert "README.md of one differs" in capsys.readouterr().err
    assert main([]) == 0
    assert main(["--check"]) == 0
    assert "| `one_x` | list of str | `[a, b]` | A &#124; B. |" in readme("one")
    assert "It is `one`." in readme("one")


def test_the_inventory_to_copy_has_a_configuration_that_is_accepted() -> None:
    text = (ROLES.parent / "playbooks/inventory/example/group_vars/proxies.yml").read_text(encoding="utf-8")
    variables = yaml.safe_load(text)
    settings = load_mapping(variables["proxy_config"], source="example")
    installed = {certificate["dest"] for certificate in variables["proxy_certificates"]}
    assert {file for one in settings.listeners[0].certificates for file in (one.chain, one.key)} == installed
    known = {name for role in roles() for name in specification(role)["options"]}
    assert set(variables) <= known
