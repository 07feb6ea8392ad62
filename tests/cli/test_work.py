"""Long work is shown on stderr if it is a terminal, and not otherwise."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from tiny_jobs import corpus

from fednotes.cli.display import RichDisplay, WorkBar
from fednotes.cli.shared import WorkLines
from fednotes.core import work
from fednotes.core.work import count_items, reporting_to
from fednotes.data.formats import read

Run = Callable[..., tuple[str, str]]


def make_console() -> Console:
    """Return a console of a terminal that writes to memory."""
    return Console(file=StringIO(), force_terminal=True, width=100)


@pytest.fixture(autouse=True)
def _report_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "INTERVAL", 0.0)


def text_of(console: Console) -> str:
    """Return what was written to a console."""
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_a_bar_shows_the_outer_work_its_count_and_its_rate() -> None:
    console = make_console()
    with WorkBar(console, "loading") as bar, reporting_to(bar):
        for number in count_items(range(30), "reading notes", 30):
            list(count_items(range(5), "inner work"))
            if number == 20:
                bar._bar.refresh()
    shown = text_of(console)
    assert "reading notes" in shown
    assert "20  " in shown
    assert "/s" in shown
    assert "inner work" not in shown


def test_a_run_shows_work_only_between_its_parts(tmp_path: Path) -> None:
    corpus(tmp_path / "a.conll", "Drug", "north")
    console = make_console()
    with RichDisplay(console) as display:
        assert len(read(tmp_path / "a.conll")) > 0
        assert display._bar is None  # the work has ended, and its bar is gone
        display.features(1, 2)
        read(tmp_path / "a.conll")
        assert display._bar is not None  # still that of the features
        display.features(2, 2)
    shown = text_of(console)
    assert "reading documents" in shown
    assert "features of notes" in shown


def test_a_run_shows_the_rate_of_work_and_removes_the_line_afterwards() -> None:
    console = make_console()
    with RichDisplay(console) as display:
        for number in count_items(range(30), "reading notes"):
            if number == 20 and display._bar is not None:
                display._bar.refresh()
    shown = text_of(console)
    assert "20/?" in shown
    assert "/s" in shown
    assert shown.rstrip().endswith("\x1b[2K")  # the line is erased


def test_long_work_of_a_piped_command_prints_a_line_each_minute(
    capsys: pytest.CaptureFixture[str],
) -> None:
    seconds = [0.0]
    with reporting_to(WorkLines(now=lambda: seconds[0])):
        for _ in count_items(range(150), "reading notes", 150):
            seconds[0] += 1
            list(count_items(range(5), "inner work"))
    assert capsys.readouterr().err.splitlines() == [
        "reading notes: 60 of 150, 1.0/s",
        "reading notes: 120 of 150, 1.0/s",
    ]


def test_a_piped_command_shows_no_work(run: Run, tmp_path: Path) -> None:
    corpus(tmp_path / "a.conll", "Drug", "north")
    out, err = run("corpus", "stats", tmp_path / "a.conll", "--json")
    assert out.startswith("{")
    assert err == ""


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="pseudo-terminals are of POSIX")
def test_work_is_shown_in_a_terminal_and_stdout_holds_only_the_result(
    tmp_path: Path,
) -> None:
    corpus(tmp_path / "a.conll", "Drug", "north")
    words = ["convert", "a.conll", "b.jsonl", "--to", "jsonl", "--json"]
    ours, theirs = pty.openpty()
    ended = subprocess.run(
        [sys.executable, "-m", "fednotes", *words],
        cwd=tmp_path,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        check=True,
    )
    os.close(theirs)
    shown = os.read(ours, 100_000).decode()
    os.close(ours)
    assert ended.stdout.startswith("{")
    assert "\x1b" not in ended.stdout
    assert "comparing" in shown or "reading documents" in shown
