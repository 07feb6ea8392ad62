"""The words of tables as a terminal shows them."""

from __future__ import annotations

import io
import re

from rich.console import Console
from rich.table import Table


def cells_of(table: Table | None, width: int = 200) -> list[list[str]]:
    """Return the words of each row that has any."""
    assert table is not None
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    rows = [
        re.sub(r"[^\w.,/–… %-]", " ", line).split()
        for line in out.getvalue().splitlines()
    ]
    return [row for row in rows if row]


def row_of(table: Table | None, name: str) -> list[str]:
    return next(r[1:] for r in cells_of(table) if r[0] == name)
