"""Tables for people: none is wider than the terminal, and nothing of them is lost there."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from proxy.master.tables import table

COLUMNS = ("worker", "pid", "state", "connections", "permits", "upstream", "tunnels", "requests", "descriptors")
ROW = ("0", "11373", "ready", "0", "0 of 400", "0", "0", None, "20 of 20000")


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 160])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None)
    console.print(table(COLUMNS, 3, [ROW, ROW]))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    text = " ".join(out.getvalue().split())
    assert text.count("11373") == 2
    assert text.count("20 of 20000") == 2
    assert "…" not in text
    assert ("┃" in text) == (width >= 100)
