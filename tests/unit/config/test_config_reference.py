"""What is generated from the schema is up to date and complete, and the examples are good configurations."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from proxy.config import reference
from proxy.config.json_schema import json_schema, resolved, tables, wanted
from proxy.config.load import load_settings, load_text
from proxy.config.reference_text import EXAMPLE, SECTIONS, TOP_LEVEL_GROUPS
from proxy.config.schema import Settings

ROOT = Path(__file__).parents[3]
EXAMPLE_FILE = ROOT / "deploy" / "config.example.toml"

# Tables with the keys of another, which are described there.
SAME_AS = {
    "sites.response_headers": "sites.request_headers",
    "sites.routes.request_headers": "sites.request_headers",
    "sites.routes.response_headers": "sites.request_headers",
    "sites.routes.upstream_tls": "sites.upstream_tls",
    "sites.rate_limits": "rate_limits",
    "sites.routes.rate_limits": "rate_limits",
}


def test_generated_files_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert reference.main(["--check"]) == 0, capsys.readouterr().err


def test_check_names_the_file_that_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "deploy").mkdir()
    assert reference.main(["--check"], str(tmp_path)) == 1
    assert reference.main([], str(tmp_path)) == 0
    assert reference.main(["--check"], str(tmp_path)) == 0
    capsys.readouterr()
    with open(tmp_path / "docs" / "configuration.md", "a", encoding="utf-8") as file:
        file.write("by hand\n")
    assert reference.main(["--check"], str(tmp_path)) == 1
    error = capsys.readouterr().err
    assert os.path.join("docs", "configuration.md") in error
    assert "schema.json" not in error


def test_every_key_is_described() -> None:
    for path, _, node in tables():
        for key, child in node["properties"].items():
            assert resolved(child).get("description"), f"{path}.{key} has no description"
            assert wanted(child), f"{path}.{key}"


def test_every_table_has_its_place_in_the_reference() -> None:
    nodes = {path: node for path, _, node in tables()}
    described = {path for path, _ in SECTIONS}
    assert described | set(SAME_AS) == set(nodes) - {""}
    for path, other in SAME_AS.items():
        assert nodes[path]["properties"] == nodes[other]["properties"]
    grouped = [key for _, keys in TOP_LEVEL_GROUPS for key in keys]
    top_tables = {path for path in nodes if path and "." not in path}
    assert sorted(grouped) == sorted(set(Settings.model_fields) - top_tables)


def test_reference_has_a_row_for_every_key() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", reference.markdown(), re.MULTILINE)
    keys = {key for _, _, node in tables() for key in node["properties"]}
    top_tables = {path for path, _, _ in tables() if path and "." not in path}
    assert keys - top_tables <= set(rows)
    assert "validation" not in reference.markdown()


def test_short_example_is_good() -> None:
    settings = load_text(EXAMPLE, file="example", base_dir=None)
    assert settings.max_connections == 800
    assert EXAMPLE in reference.markdown()


def test_example_file_is_good_and_complete() -> None:
    settings = load_settings(str(EXAMPLE_FILE))
    assert settings.listeners[0].certificates[0].key == str(ROOT / "deploy" / "tls" / "privkey.pem")
    data = tomllib.loads(EXAMPLE_FILE.read_text())
    assert list(schema_errors(data, json_schema(), "")) == []
    used = set(keys_of(data))
    missing = {key for _, _, node in tables() for key in node["properties"]} - used
    assert missing == set(), "keys without an example"


@pytest.mark.parametrize(
    "text",
    [
        "workers = 0",
        "workers = true",
        "unknown = 1",
        'max_connections = "all"',
        "write_timeout_secs = 0",
        "listeners = [{}]",
        'sites = [{ hosts = ["a"], balance = "random" }]',
        "sites = [{ hosts = [] }]",
        "sites = [{ hosts = ['a'], request_headers = { set = { A = 1 } } }]",
        "health = []",
    ],
)
def test_json_schema_refuses(text: str) -> None:
    assert list(schema_errors(tomllib.loads(text), json_schema(), ""))


def test_json_schema_knows_no_null() -> None:
    assert "null" not in reference.schema_text()


def schema_errors(value: Any, raw: dict[str, Any], where: str) -> Iterator[str]:
    """A validator of just the vocabulary that our schema uses; other words in it are an error."""
    node = resolved(raw)
    annotations = {"$schema", "$defs", "title", "description", "default", "examples"}
    checks = {"type", "enum", "const", "anyOf", "minimum", "maximum", "exclusiveMinimum", "minItems"}
    structure = {"properties", "additionalProperties", "required", "items"}
    assert set(node) <= annotations | checks | structure, f"{where}: unknown words in {node}"
    types: dict[str, type | tuple[type, ...]] = {
        "object": dict,
        "array": list,
        "string": str,
        "boolean": bool,
        "integer": int,
        "number": (int, float),
    }
    if "anyOf" in node:
        if all(list(schema_errors(value, choice, where)) for choice in node["anyOf"]):
            yield f"{where}: no choice fits"
        return
    kind = node.get("type")
    if kind and (not isinstance(value, types[kind]) or (kind in ("integer", "number") and isinstance(value, bool))):
        yield f"{where}: not {kind}"
        return
    if "enum" in node and value not in node["enum"]:
        yield f"{where}: not in enum"
    if "const" in node and value != node["const"]:
        yield f"{where}: not the constant"
    if value_below(value, node) or ("maximum" in node and value > node["maximum"]):
        yield f"{where}: out of range"
    if isinstance(value, list):
        if len(value) < node.get("minItems", 0):
            yield f"{where}: too short"
        for index, item in enumerate(value):
            yield from schema_errors(item, node["items"], f"{where}[{index}]")
    if isinstance(value, dict):
        properties, additional = node.get("properties", {}), node["additionalProperties"]
        yield from (f"{where}.{key}: missing" for key in node.get("required", ()) if key not in value)
        for key, item in value.items():
            child = properties.get(key, additional)
            if child is False:
                yield f"{where}.{key}: unknown"
            else:
                yield from schema_errors(item, child, f"{where}.{key}")


def value_below(value: Any, node: dict[str, Any]) -> bool:
    return ("minimum" in node and value < node["minimum"]) or (
        "exclusiveMinimum" in node and value <= node["exclusiveMinimum"]
    )


def keys_of(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from keys_of(item)
    elif isinstance(value, list):
        for item in value:
            yield from keys_of(item)
