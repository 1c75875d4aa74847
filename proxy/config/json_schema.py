"""The JSON Schema of the configuration file, and questions to it.

Editors complete the file by it, the reference is written from it, and messages take their "wanted" from it, so that
the three never differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Final

from pydantic.json_schema import GenerateJsonSchema

from proxy.config.schema import Settings

Node = dict[str, Any]
Loc = tuple[str | int, ...]

_REF_PREFIX: Final = "#/$defs/"
TOP_LEVEL: Final = ""
"""The table path of the file's top level."""


class _Generator(GenerateJsonSchema):
    """Leaves out the titles that pydantic makes of field names: ours name types."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


@cache
def json_schema() -> Node:
    """Return the JSON Schema (draft 2020-12) of the configuration file."""
    schema = _cleaned(Settings.model_json_schema(schema_generator=_Generator))
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "reverse-proxy configuration",
        **{key: value for key, value in schema.items() if key != "title"},
    }


def resolved(node: Node) -> Node:
    """Follow ``$ref``; what stands beside the reference wins."""
    while "$ref" in node:
        target = json_schema()["$defs"][node["$ref"].removeprefix(_REF_PREFIX)]
        node = {**target, **{key: value for key, value in node.items() if key != "$ref"}}
    return node


def node_at(loc: Loc) -> Node | None:
    """Return the node of a key's location, None if the schema has none."""
    node = resolved(json_schema())
    for part in loc:
        if isinstance(part, int):
            child = node.get("items")
        else:
            child = node.get("properties", {}).get(part)
            if child is None and isinstance(node.get("additionalProperties"), dict):
                child = node["additionalProperties"]
        if child is None:
            return None
        node = resolved(child)
    return node


def tables(node: Node | None = None, path: str = TOP_LEVEL, is_array: bool = False) -> Iterator[tuple[str, bool, Node]]:
    """Yield (dotted path, whether it is an array of tables, node) of each table with fixed keys, top level first."""
    node = resolved(json_schema()) if node is None else node
    yield path, is_array, node
    for key, raw in node.get("properties", {}).items():
        child = resolved(raw)
        items = resolved(child["items"]) if "items" in child else None
        inner = child if items is None else items
        if "properties" in inner:
            yield from tables(inner, f"{path}.{key}" if path else key, items is not None)


def header(path: str, is_array: bool) -> str:
    """Return how a table's header is written."""
    return f"[[{path}]]" if is_array else f"[{path}]"


def wanted(node: Node) -> str:
    """Say in words what a node takes: "an integer from 1 to 256"."""
    node = resolved(node)
    if "anyOf" in node:
        return " or ".join(wanted(choice) for choice in node["anyOf"])
    if "const" in node:
        return quoted(node["const"])
    if "enum" in node:
        return "one of " + ", ".join(map(quoted, node["enum"]))
    kind, title = node.get("type"), node.get("title")
    if kind in ("integer", "number"):
        return _number(node)
    if kind == "boolean":
        return "true or false"
    if kind == "array":
        return f"an array of {_plural(resolved(node['items']))}" + (", not empty" if node.get("minItems") else "")
    if kind == "object":
        return "a table"
    return f"a string ({title})" if title else "a string"


def quoted(value: object) -> str:
    """Return an allowed value as TOML."""
    return f'"{value}"' if isinstance(value, str) else str(value)


def _plural(item: Node) -> str:
    if item.get("type") == "object":
        return "tables"
    title = item.get("title")
    return f"strings ({title})" if title else "strings"


def _number(node: Node) -> str:
    unit = node.get("title")
    kind = f"a number of {unit}" if unit in ("seconds", "percent") else "an integer"
    low, high = node.get("minimum"), node.get("maximum")
    if "exclusiveMinimum" in node:
        return f"{kind} greater than {node['exclusiveMinimum']}, at most {high}"
    return f"{kind} from {low} to {high}"


def _cleaned(node: Any) -> Any:
    """Leave out null, which TOML does not have, and defaults of tables: their keys have their own."""
    if isinstance(node, list):
        return [_cleaned(item) for item in node]
    if not isinstance(node, dict):
        return node
    cleaned: Node = {
        key: _cleaned(value)
        for key, value in node.items()
        if not (key == "default" and (value is None or isinstance(value, dict)))
    }
    choices: Sequence[Node] = cleaned.get("anyOf", ())
    kept = [choice for choice in choices if choice.get("type") != "null"]
    if len(kept) == 1 and len(choices) > 1:
        del cleaned["anyOf"]
        cleaned = {**kept[0], **cleaned}
    elif len(kept) < len(choices):
        cleaned["anyOf"] = kept
    return cleaned
