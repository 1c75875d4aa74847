"""Writes docs/configuration.md and deploy/reverse-proxy.schema.json from the schema.

``python -m proxy.config.reference`` writes them, ``--check`` compares and exits with 1 when one is not up to date.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Final

from proxy.config.json_schema import Node, header, json_schema, quoted, resolved, tables
from proxy.config.reference_text import INHERITED, INTRODUCTION, KEYS, SECTIONS, SEMANTICS, TOP_LEVEL_GROUPS
from proxy.config.schema import INHERITED_DEFAULTS, RouteOptions, Settings

_ROOT: Final = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_GENERATED: Final = "<!-- Generated from proxy/config by `python -m proxy.config.reference`: edit there. -->\n"
_TABLE_HEAD: Final = "| key | type | default | notes |\n| --- | --- | --- | --- |\n"
_MAX_INT64: Final = 2**63 - 1
# What sites and routes have in common gets one table.
_SHARED: Final = tuple(RouteOptions.model_fields)
_SHARED_BY: Final = ("sites", "sites.routes")
# What a key without a default of its own means when it is left out.
_LEFT_OUT: Final = {
    "max_upstream_connections": "as `max_connections`",
    "redirect.https_port": "the first listener's",
    "sites.upstream_tls.ca": "the system's",
    "sites.upstream_tls.server_name": "the upstream's host",
    "sites.upstreams": "none",
    "sites.max_request_body_bytes": "unlimited",
    "sites.max_upstream_requests": "any number",
    "sites.rate_limits": "none",
    "rate_limits.burst": "as `requests`",
}
_KINDS: Final = {"string": "string", "boolean": "true or false", "object": "table"}


def markdown() -> str:
    """Return the text of docs/configuration.md."""
    nodes = {path: (is_array, node) for path, is_array, node in tables()}
    parts = [_GENERATED + "\n" + INTRODUCTION, SEMANTICS, KEYS]
    _, top = nodes[""]
    parts.extend(f"### {title}\n\n{_table(top, keys, '')}" for title, keys in TOP_LEVEL_GROUPS)
    for path, text in SECTIONS:
        is_array, node = nodes[path]
        if path == "sites.request_headers":
            parts.append(f"{INHERITED}\n{_table(nodes['sites'][1], _SHARED, 'sites')}")
        keys = [key for key in node["properties"] if path not in _SHARED_BY or key not in _SHARED]
        intro = f"### `{header(path, is_array)}`\n" if text is None else text
        parts.append(f"{intro}\n{_description(node)}\n\n{_table(node, keys, path)}")
    return "\n".join(parts)


def schema_text() -> str:
    """Return the text of deploy/reverse-proxy.schema.json."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


def generated_files() -> Mapping[str, str]:
    """Return each generated file, relative to the root of the repository, with its text."""
    return {
        os.path.join("docs", "configuration.md"): markdown(),
        os.path.join("deploy", "reverse-proxy.schema.json"): schema_text(),
    }


def main(arguments: Iterable[str] | None = None, root: str = _ROOT) -> int:
    """Write the files, or compare them. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m proxy.config.reference", description=main.__doc__)
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 naming what is not up to date")
    options = parser.parse_args(None if arguments is None else list(arguments))
    stale = [name for name, text in generated_files().items() if _read(os.path.join(root, name)) != text]
    if options.check:
        for name in stale:
            print(f"{name} is not up to date: run python -m proxy.config.reference", file=sys.stderr)
        return 1 if stale else 0
    for name in stale:
        with open(os.path.join(root, name), "w", encoding="utf-8") as file:
            file.write(generated_files()[name])
        print(f"{name} written")
    return 0


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        return None


def _table(table: Node, keys: Iterable[str], path: str) -> str:
    rows = (
        f"| `{key}` | {_type(node)} | {_default(key, node, table, path)} | {_notes(node)} |\n"
        for key in keys
        for node in (resolved(table["properties"][key]),)
    )
    return _TABLE_HEAD + "".join(rows)


def _description(node: Node) -> str:
    """Return the table's own text: the key that refers to it has a shorter one."""
    definitions = json_schema()["$defs"].values()
    own = next((item for item in definitions if item["properties"] == node["properties"]), node)
    return str(own["description"])


def _type(node: Node) -> str:
    node = resolved(node)
    if "anyOf" in node:
        return " or ".join(_type(choice) for choice in node["anyOf"])
    if "const" in node:
        return f"`{quoted(node['const'])}`"
    if "enum" in node:
        return ", ".join(f"`{quoted(value)}`" for value in node["enum"])
    kind = node["type"]
    if kind == "number":
        return str(node.get("title", "seconds"))
    if kind == "integer":
        low, high = node["minimum"], node["maximum"]
        return f"integer, at least {low}" if high == _MAX_INT64 else f"integer, {low} to {high}"
    if kind == "array":
        return f"array: {_type(node['items'])}"
    if isinstance(node.get("additionalProperties"), dict):
        return "table: field value by field name"
    return str(node.get("title", _KINDS[kind])) if kind == "string" else _KINDS[kind]


def _default(key: str, node: Node, table: Node, path: str) -> str:
    if key in table.get("required", ()):
        return "required"
    left_out = _LEFT_OUT.get(f"{path}.{key}" if path else key)
    if left_out is not None:
        return left_out
    if path in _SHARED_BY and key in INHERITED_DEFAULTS:
        return _code(INHERITED_DEFAULTS[key])
    if path in _SHARED_BY and key in Settings.model_fields:
        return "the top level's"
    return _code(node["default"]) if "default" in node else "none"


def _code(value: object) -> str:
    if isinstance(value, bool):
        return "`true`" if value else "`false`"
    if isinstance(value, float):
        return f"`{value:g}`"
    if isinstance(value, list | tuple):
        return "`" + json.dumps(list(value)) + "`" if value else "none"
    if isinstance(value, dict):
        return "none"
    return f"`{quoted(value)}`"


def _notes(node: Node) -> str:
    return str(node["description"]).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
