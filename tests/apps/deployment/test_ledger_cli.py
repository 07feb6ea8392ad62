"""Commands on a site's ledger: verification, noted ends, and display."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from kits import site_kit
from ledgers import MESSAGE, write_ledger
from typer.testing import CliRunner

from fednotes.apps.deployment.commands.ledger import ledger
from fednotes.apps.deployment.rules.ledger import Ledger, get_head_path
from fednotes.core.errors import ConfigError, FednotesError


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    write_ledger(Ledger.in_kit(tmp_path).path, 3)
    return site_kit(tmp_path)


def run_ledger(*words: str) -> str:
    """Return a command's output, or its error."""
    result = CliRunner().invoke(ledger, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize(
    ("command", "which"), [("show", "ledger"), ("verify", "ledger"), ("verify", "head")]
)
@pytest.mark.parametrize("kind", ["fifo", "/dev/zero"])
def test_a_fifo_or_device_in_place_of_a_ledger_is_refused_without_waiting(
    command: str, which: str, kind: str, kit: Path
) -> None:
    """A kit that somebody else has had may hold anything in its files' places."""
    path = (
        Ledger.in_kit(kit).path
        if which == "ledger"
        else get_head_path(Ledger.in_kit(kit).path)
    )
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(kind)
    with pytest.raises(FednotesError, match=r"cannot be read .*only files are read"):
        run_ledger(command, str(kit))


def test_the_printed_end_can_be_passed_back_to_verify(kit: Path) -> None:
    output = run_ledger("verify", str(kit))
    end = f"3:{Ledger.in_kit(kit).read_head().hash}"
    assert "3 lines, unbroken" in output
    assert output.splitlines()[-1] == (
        f"next: note {end} elsewhere; later: fednotes ledger verify {kit} --noted {end}"
    )
    Ledger.in_kit(kit).append(MESSAGE)
    later = run_ledger("verify", str(kit), "--noted", end)
    assert "the ledger contains the hash that was noted" in later
    assert f"next: note 4:{Ledger.in_kit(kit).read_head().hash} elsewhere" in later


def test_a_rewritten_history_is_detected(kit: Path) -> None:
    """Or taken away, with its head: without the noted end both look well."""
    end, path = f"3:{Ledger.in_kit(kit).read_head().hash}", Ledger.in_kit(kit).path
    for file in (path, get_head_path(path)):
        file.unlink()
    with pytest.raises(
        FednotesError, match="noted elsewhere, and the ledger ends before it"
    ):
        run_ledger("verify", str(kit), "--noted", end)
    for _ in range(4):
        Ledger(path).append(MESSAGE)
    assert "unbroken" in run_ledger("verify", str(kit))
    with pytest.raises(FednotesError, match=r":3: is not the line .*; keep both files"):
        run_ledger("verify", str(kit), "--noted", end)
    with pytest.raises(ConfigError, match="expected LINES:HASH"):
        run_ledger("verify", str(kit), "--noted", "3")


def test_the_last_lines_are_shown_and_all_of_them_as_json(kit: Path) -> None:
    """Read beside the file itself, line by line."""
    site_ledger = Ledger.in_kit(kit)
    site_ledger.append(
        replace(MESSAGE, run="run-2", round=7, refusal=True, bytes=12_345)
    )
    lines = [json.loads(line) for line in site_ledger.path.read_text().splitlines()]
    raw = run_ledger("show", str(kit), "--tail", "0", "--json")
    assert json.loads(raw) == lines
    verified = json.loads(run_ledger("verify", str(kit), "--json"))
    end = Ledger.in_kit(kit).read_head().hash
    assert verified == {"lines": 4, "hash": end, "notes": []}
    output = run_ledger("show", str(kit), "--tail", "2")
    assert output.index("run run-1") < output.index("run run-2")
    assert "12,345" in output
    assert (
        "refused: this site's rules kept the answer back; only the reason left"
        in output
    )
    assert "2 of 4 lines" in output
    assert lines[3]["sha256"][:8] in output
    assert "1 of 1 lines" in run_ledger(
        "show", str(kit), "--first-round", "3", "--last-round", "7"
    )
    assert re.search(r" 8 +[a-z]", output), "rounds count from 1"
    assert "0 of 0 lines" in run_ledger("show", str(kit), "--run", "run-9")
