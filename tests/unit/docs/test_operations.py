"""What docs/operations.md names is there: tests, metrics, keys and signatures of its table of faults, anchors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from proxy.config.schema import Settings

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "operations.md").read_text()
SOURCE = "\n".join(path.read_text() for path in sorted((ROOT / "proxy").rglob("*.py")))
TABLE = TEXT.partition("## What happens when ...")[2].partition("\n## ")[0]
ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in TABLE.splitlines() if line.startswith("| ")]
FAULTS = ROWS[2:]
MADE = {"accept.emfile", "accept.enfile", "accept.econnaborted", "worker.died", "upstream.connect_failed"}
"""Signatures that are put together; the tests of their rows read them."""


def named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_the_table_is_read() -> None:
    assert len(FAULTS) > 20
    assert {len(row) for row in FAULTS} == {6}


@pytest.mark.parametrize("row", FAULTS, ids=lambda row: row[0][:50])
def test_each_row_is_shown_by_a_test_that_exists(row: list[str]) -> None:
    tests = named(row[5])
    assert tests
    for name in tests:
        path, _, function = name.partition("::")
        file = ROOT / path if "/" in path else ROOT / "tests" / "integration" / path
        assert file.exists(), name
        assert re.search(rf"^def {function}\(", file.read_text(), re.MULTILINE), name


@pytest.mark.parametrize("row", FAULTS, ids=lambda row: row[0][:50])
def test_each_row_names_what_exists(row: list[str]) -> None:
    for metric in named(row[3]):
        name = metric.partition("{")[0].removesuffix("_total")
        assert f'"{name}"' in SOURCE or f'"{name}_total"' in SOURCE, metric
    for signature in named(row[2]):
        if re.fullmatch(r"[a-z_]+\.[a-z_]+", signature):
            assert signature in MADE or f'"{signature}"' in SOURCE, signature
    for key in named(row[0] + row[4]):
        if re.fullmatch(r"[a-z]+(_[a-z]+)+", key):
            assert key in Settings.model_fields or f"{key}:" in SOURCE, key


def test_links_lead_somewhere() -> None:
    """Anchors as code forges make them: lower case, words joined, punctuation left out."""
    for document in (*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"):
        for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
            if "://" in target:
                continue
            path, _, anchor = target.partition("#")
            file = (document.parent / path).resolve() if path else document
            assert file.exists(), f"{document.name}: {target}"
            if anchor and file.suffix == ".md":
                headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
                anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
                assert anchor in anchors, f"{document.name}: {target}"
