"""The dictionary of an inventory, rendered as TOML by Ansible itself, is read back as what it was."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = ROOT / "roles" / "proxy" / "templates" / "config.toml.j2"

ODD = {
    "text": 'quotes " and \\ and \t and é and \U0001f600 and \x7f and #',
    "no": False,
    "float": 0.5,
    "zero": 0,
    "empty": "",
    "nothing": [],
    "numbers": [1, 2],
    "mixed": [{"a": 1}, 2],
    "table": {"key with spaces": "x", "inner": {"deep": {"deeper": [1]}}},
    "none yet": {},
    "array": [{"x": 1, "inner": [{"y": [True]}, {"y": []}]}, {"x": 2, "inline": {"z": "}"}}],
}


def render(configuration: dict[str, Any], folder: Path) -> str:
    """What the role installs for ``configuration``."""
    variables = folder / "variables.json"
    variables.write_text(json.dumps({"given": configuration}), encoding="utf-8")
    target = folder / "config.toml"
    content = f"{{{{ lookup('ansible.builtin.template', '{TEMPLATE}', template_vars={{'configuration': given}}) }}}}"
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("ansible")),
            "localhost",
            "--module-name=ansible.builtin.copy",
            f"--args={json.dumps({'content': content, 'dest': str(target)})}",
            f"--extra-vars=@{variables}",
        ],
        capture_output=True,
        text=True,
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return target.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "configuration",
    [tomllib.loads((ROOT / "deploy" / "config.example.toml").read_text(encoding="utf-8")), ODD],
    ids=["every key", "odd values"],
)
def test_it_is_read_back_as_it_was(configuration: dict[str, Any], tmp_path: Path) -> None:
    text = render(configuration, tmp_path)
    assert tomllib.loads(text) == configuration, text


def test_what_is_none_is_left_out(tmp_path: Path) -> None:
    text = render({"max_connections": None, "sites": [{"hosts": ["example.org"], "balance": None}]}, tmp_path)
    assert tomllib.loads(text) == {"sites": [{"hosts": ["example.org"]}]}
