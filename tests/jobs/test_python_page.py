"""The Python blocks of docs/python.md run one after the other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from applications import FUNCTIONS, has_app

import fednotes as fn

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


@pytest.mark.slow
def test_the_blocks_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one namespace, in a folder of their own.

    A block that calls a function of a deleted application is left out. Every public
    function is named in the page.
    """
    text = PAGE.read_text("utf-8")
    monkeypatch.chdir(tmp_path)
    blocks = list(
        re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    )
    assert len(blocks) > 5
    space: dict[str, object] = {}
    for block in blocks:
        called = set(re.findall(r"\bfn\.(\w+)\(", block[1]))
        if any(not has_app(FUNCTIONS[name]) for name in called & FUNCTIONS.keys()):
            continue
        line = text.count("\n", 0, block.start(1))
        # its own lines in errors
        exec(compile("\n" * line + block[1], str(PAGE), "exec"), space)
    assert "discharge federated" in capsys.readouterr().out
    public = [name for name in dir(fn) if not name.startswith("_")]
    assert [name for name in public if not re.search(rf"\bfn\.{name}\b", text)] == []
