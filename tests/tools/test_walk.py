"""One note and one secure sum pass as few files as docs/architecture.md says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from walk import walk

ROOT = Path(__file__).parents[2]
ROW = r"^{name} files=(\d+) entered=(\d+) most=(\d+)$"


@pytest.mark.parametrize("name", ["note", "exchange"])
def test_a_walk_is_as_short_as_told(name: str) -> None:
    """Raise a number of the page only with a reason; lower it where a walk became shorter.

    In a process of its own: what an earlier test left in a cache would not be entered.
    """
    if name == "exchange":
        pytest.importorskip("cryptography")
    command = [sys.executable, str(ROOT / "tools" / "walk.py"), name]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    row = re.compile(ROW.format(name=name), re.MULTILINE)
    now, told = ([int(n) for n in row.findall(text)[0]] for text in (shown, page))
    assert all(a <= b for a, b in zip(now, told, strict=True)), shown


def test_a_loop_counts_once_and_a_call_that_is_open_is_not_left() -> None:
    """By hand: `parse_json` calls within its own file, and `clean` comes after it."""
    from fednotes.core.cleaning import clean
    from fednotes.core.parsing import parse_json

    def run() -> None:
        for _ in range(3):
            parse_json('{"a": [1, 2]}')
            clean("a")
        parse_json("1")

    assert walk(run).stops == ("core/parsing.py", "core/cleaning.py")
