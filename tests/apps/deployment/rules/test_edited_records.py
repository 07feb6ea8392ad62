"""Decisions and ledgers that somebody edited are refused with the remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fednotes.apps.deployment.rules.approval import Approvals
from fednotes.apps.deployment.rules.ledger import show
from fednotes.core.errors import ConfigError, DataError


def test_records_that_were_edited_by_hand(tmp_path: Path) -> None:
    site = Approvals(tmp_path)
    decision = {"fingerprint": "f", "decision": "approved", "by": 7, "when": "now"}
    site.path.write_text(json.dumps({"format": 1, "jobs": {}, "decisions": [decision]}))
    with pytest.raises(ConfigError, match="approve the site's jobs again"):
        site.decisions()
    ledger = tmp_path / "ledger.jsonl"
    ledger.write_text('{"seq":1,"round":"x","hash":"' + "0" * 64 + '"}\n')
    with pytest.raises(DataError, match="not a line of a ledger"):
        list(show(ledger))
