"""What stands where a file of ours should be: nothing is waited for, and one line says it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from fednotes.core.errors import ConfigError, DataError, ModelError
from fednotes.core.parsing import read_json
from fednotes.core.settings import read_toml
from fednotes.core.tensors import load_state
from fednotes.data.formats.files import open_file
from fednotes.rules.approval import Approvals
from fednotes.rules.ledger import show


@pytest.fixture(autouse=True)
def _no_waiting() -> Iterator[None]:
    signal.alarm(10)  # a FIFO that is opened as a file is waited for, for ever
    yield
    signal.alarm(0)


def test_a_fifo_is_named_and_not_waited_for(tmp_path: Path) -> None:
    fifo = tmp_path / "manifest.json"
    os.mkfifo(fifo)
    with pytest.raises(OSError, match="a FIFO, and only files are read"):
        read_json(fifo)
    with pytest.raises(ConfigError, match="a FIFO, and only files"):
        read_toml(fifo)
    with pytest.raises(ModelError, match="a FIFO"):
        load_state(tmp_path)
    with pytest.raises(DataError, match=r"manifest.json: a FIFO, and only files are read"):
        open_file(fifo)
    with pytest.raises(ConfigError, match="is a folder"):
        read_toml(tmp_path)


def test_a_toml_file_that_takes_for_ever_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    for text in (".".join(["a"] * 20_000) + " = 1", "#" * (2**20 + 1)):
        path.write_text(text)
        with pytest.raises(ConfigError, match="too large for a file that a person wrote"):
            read_toml(path)


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
