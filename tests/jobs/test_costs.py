"""What a run costs: bytes before it starts, time from its first rounds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rich.console import Console

from fednotes.cli import display as module
from fednotes.cli.display import Pace, RichDisplay
from fednotes.engines.rounds import RoundResult
from fednotes.jobs.job_file import parse_job
from fednotes.jobs.simulate import LARGE, Traffic, simulate

TAGGER = {
    "tagger": "cnn-clstm-crf", "hashed_words": 64, "word_dim": 4, "char_dim": 4,
    "char_filters": 6, "cnn_filters": 8, "lstm_units": 4,
}  # fmt: skip
JOBS: dict[str, dict[str, Any]] = {
    "fedner": {"training": {"epochs": 3, "batch_size": 24, "evaluate_every": 2, "patience": 9}},
    "distill": {"training": {"unannotated": "marginal", "weighting": False, "rounds": 3}},
}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """A run chooses deterministic algorithms for its process."""
    yield
    torch.use_deterministic_algorithms(False)


class Told(RichDisplay):
    """Keeps what it was told of the cost."""

    def cost(self, traffic: Traffic) -> None:
        self.told = traffic
        super().cost(traffic)


@pytest.mark.parametrize("method", sorted(JOBS))
def test_the_estimate_is_what_is_sent(method: str, tmp_path: Path) -> None:
    """Against the engine's own count of all sites, which has counts and options besides."""
    table = {
        "method": method, "seed": 1, "conditions": ["federated"], "model": TAGGER,
        "synthetic": {"sites": 3, "sentences": 30}, **JOBS[method],
    }  # fmt: skip
    display = Told(Console(quiet=True))
    summary = simulate(
        parse_job(table, "tiny", tmp_path, "tiny.toml"), tmp_path / "run", display=display
    )
    assert summary.conditions["federated"]["rounds"] == display.told.rounds
    assert 3 * display.told.up == pytest.approx(summary.bytes_up, rel=0.05)
    assert 3 * display.told.down == pytest.approx(summary.bytes_down, rel=0.05)
    assert 3 * display.told.up <= summary.bytes_up
    assert 3 * display.told.down <= summary.bytes_down


def result(round: int, seconds: float) -> RoundResult:
    return RoundResult(round, {}, 3, 0, 0, seconds, False)


def test_the_pace_of_the_first_rounds() -> None:
    """The first round is a start-up's; from 3 s to 9 s two rounds: 3 s each, 96 more of 100."""
    pace = Pace(100)
    assert [pace.left(result(n, s)) for n, s in ((0, 2.0), (1, 3.0), (2, 6.9))] == [None] * 3
    assert pace.left(result(3, 8.0)) == pytest.approx(96 * 6.0 / 3)
    assert pace.left(result(4, 14.0)) == pytest.approx(95 * 12.0 / 4)
    assert Pace(0).left(result(9, 99.0)) is None


@pytest.mark.parametrize(("ask", "total", "asked"), [
    (True, LARGE + 2, 1), (True, LARGE, 0), (False, LARGE + 2, 0)
])  # fmt: skip
def test_much_is_asked_about(
    ask: bool, total: float, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is asked where there is nobody, and the line is told in any case."""
    questions: list[str] = []

    def confirm(text: str, abort: bool) -> None:
        questions.append(text)
        raise typer.Abort

    monkeypatch.setattr(module.typer, "confirm", confirm)
    console = Console(record=True, width=200)
    traffic = Traffic(10, int(total) // 2, int(total) // 2)
    if asked:
        with pytest.raises(typer.Abort):
            RichDisplay(console, ask=ask).cost(traffic)
    else:
        RichDisplay(console, ask=ask).cost(traffic)
    assert len(questions) == asked
    assert "at most 10 rounds, in each about 500 MB up and 500 MB down a site: 10 GB a site" in (
        console.export_text()
    )
