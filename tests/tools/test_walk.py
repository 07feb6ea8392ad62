"""One note and one secure sum pass as few files as docs/architecture.md says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from walk import Walk, exchange, note, walk

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"


def told(name: str) -> list[int]:
    """The numbers that the page has of a walk: files, entries in all, of the file entered most."""
    row = rf"^{name} files=(\d+) entered=(\d+) most=(\d+)$"
    found = re.search(row, PAGE.read_text("utf-8"), re.MULTILINE)
    assert found is not None
    return [int(number) for number in found.groups()]


def require_short(made: Walk, name: str) -> None:
    """Raise a number of the page only with a reason; lower it where a walk became shorter."""
    entered = made.entered
    found = [len(entered), len(made.stops), max(entered.values())]
    assert all(now <= most for now, most in zip(found, told(name), strict=True)), entered


def test_one_note(tmp_path: Path) -> None:
    require_short(note(tmp_path), "note")


def test_one_secure_sum() -> None:
    pytest.importorskip("cryptography")
    require_short(exchange(), "exchange")


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
