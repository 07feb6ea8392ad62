"""Edited decisions and ledgers are refused with a remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ledgers import write_ledger

from fednotes.apps.deployment.rules.approval import Approvals
from fednotes.apps.deployment.rules.ledger import read_ledger_lines
from fednotes.core.errors import ConfigError, DataError


def test_records_edited_by_hand_are_refused_with_a_remedy(tmp_path: Path) -> None:
    site = Approvals(tmp_path)
    decision = {"fingerprint": "f", "decision": "approved", "by": 7, "when": "now"}
    site.path.write_text(json.dumps({"format": 1, "jobs": {}, "decisions": [decision]}))
    with pytest.raises(ConfigError, match="approve the site's jobs again"):
        site.read_decisions()


@pytest.mark.parametrize(
    "change",
    [
        {"round": "x"},
        {"sha256": None},
        {"run": 1},
        {"bytes": 1.5},
        {"tensors": [1]},
        {"time": "\x1b[31m2026"},
        {"masked": []},
    ],
    ids=lambda change: next(iter(change)),
)
def test_an_edited_line_of_a_ledger_is_refused_by_its_number(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    path = tmp_path / "ledger.jsonl"
    write_ledger(path, 2)
    first, second = path.read_bytes().splitlines(keepends=True)
    edited = {**json.loads(second), **change}
    path.write_bytes(first + json.dumps(edited, separators=(",", ":")).encode() + b"\n")
    with pytest.raises(DataError, match=r"ledger\.jsonl:2: not a line of a ledger"):
        list(read_ledger_lines(path))
