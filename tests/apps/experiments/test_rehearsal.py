"""Runs that cannot start are found by building their sites and models beforehand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from applications import needs_app
from tiny_jobs import JOB, SITES, corpus

import fednotes as fn
from fednotes.apps.experiments.grid_runs import GridRun
from fednotes.apps.experiments.planning import Rehearsal
from fednotes.core.errors import DataError
from fednotes.jobs.job_file import parse_job

HEAD = """\
title = "Tiny"
base = "{base}"
{more}
[budget]
seeds = [1, 2]
[full]
seeds = [1]
[[runs]]
label = "plain"
conditions = ["federated"]
"""
ROW = """\
[[runs]]
label = "refused"
conditions = ["federated"]
set = ["{setting}"]
"""
ENCODER_JOB = """\
method = "{method}"
{more}
[model]
train = "all"
encoder = "{encoder}"
"""


def write_job(path: Path, text: str) -> Path:
    """Write a job of two sites and their corpora; return the file of the job."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(text + SITES, encoding="utf-8")
    corpus(path.parent / "north.conll", "DRUG", "asp")
    corpus(path.parent / "south.conll", "DRUG", "ibu")
    return path


def record_runs(experiment: Any, lines: list[str]) -> None:
    """Add a line for each run, and give it the only score of its table."""

    def summary(run: GridRun) -> dict[str, Any]:
        lines.append(f"ran: {run.row.label}")
        scores = {run.condition: {k: {"f1": 0.5} for k in ("strict", "relaxed")}}
        return {"sites": {"north": scores}, "mean": scores}

    experiment.summary = summary


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("model.word_vectors='absent.txt'", "absent.txt"),
        ("model.contextual='absent'", "absent"),
        ("sites.south.path='absent.conll'", "absent.conll"),
    ],
)
def test_a_row_that_cannot_start_is_named_before_any_run(
    rehearsed: Any, tmp_path: Path, setting: str, reason: str
) -> None:
    """Word vectors, an encoder or notes are missing. The other row runs."""
    job = write_job(tmp_path / "jobs" / "mine.toml", JOB)
    lines: list[str] = []
    record_runs(rehearsed, lines)
    grid = HEAD.format(base="real", more="") + ROW.format(setting=setting)
    table = rehearsed.table(grid, base=(str(job),), say=lines.append)
    assert lines[0].startswith("omitted: refused, federated: ")
    assert reason in lines[0]
    assert [line for line in lines if line.startswith("ran")] == ["ran: plain"] * 2
    assert [row["label"] for row in table["rows"]] == ["plain"]


def test_a_model_that_a_site_refuses_to_train_is_named_before_any_run(
    rehearsed: Any, tmp_path: Path, bert: Path
) -> None:
    """Too few steps are behind an update, which only a built site can tell."""
    training = "[training]\nmin_steps = 1000\nlength = 32"
    pretrain = ENCODER_JOB.format(method="pretrain", more=training, encoder=bert)
    finetune = ENCODER_JOB.format(
        method="finetune",
        more="[training]\nmin_steps = 0\nmin_tokens = 0",
        encoder=bert,
    )
    notes = write_job(tmp_path / "notes" / "notes.toml", pretrain)
    task = write_job(tmp_path / "task" / "task.toml", finetune)
    more = '[[before]]\nname = "central"\nbase = "pretrain"\ncondition = "pooled"'
    lines: list[str] = []
    record_runs(rehearsed, lines)
    rehearsed.write(
        HEAD.format(base="maccrobat", more=more)
        + ROW.format(setting="model.encoder={central}"),
        "bert",
    )
    rehearsed.table(base=(str(task), f"pretrain={notes}"), say=lines.append)
    assert lines[0].startswith(
        "omitted: refused, federated: it starts from the model 'central', which "
        "cannot be trained: "
    )
    assert "min_steps = 1000 are needed" in lines[0]
    assert [line for line in lines if line.startswith("ran")] == ["ran: plain"] * 2


def test_a_row_whose_codes_are_too_rare_is_named_before_any_run(
    rehearsed: Any,
) -> None:
    """Without stage 1, the other row needs no codes."""
    needs_app("phenotyping")
    patients = 'set = ["synthetic.patients=150"]'
    grid = HEAD.format(base="demo", more="").replace("[full]", f"{patients}\n[full]")
    grid += 'set = ["model.representation=none"]\n'
    rehearsed.write(grid + ROW.format(setting="training.minimum=1001"), "phenotype")
    lines: list[str] = []
    record_runs(rehearsed, lines)
    table = rehearsed.table(say=lines.append)
    assert lines[0].startswith(
        "omitted: refused, federated: no category of codes has 1001 patients"
    )
    assert [line for line in lines if line.startswith("ran")] == ["ran: plain"] * 2
    assert [row["label"] for row in table["rows"]] == ["plain"]


def test_missing_notes_for_comparing_attention_are_refused_before_any_run(
    rehearsed: Any, tmp_path: Path
) -> None:
    more = f'[attention]\nmodels = ["base=minilm"]\nnotes = ["{tmp_path}/absent"]'
    with pytest.raises(DataError, match="absent: no such file or folder of notes"):
        rehearsed.table(HEAD.format(base="real", more=more))
    assert rehearsed.executed == []


def test_jobs_that_read_the_same_notes_differently_share_no_data(
    bert: Path, tmp_path: Path
) -> None:
    """Only the representation differs: vectors of notes, or the words themselves."""
    needs_app("phenotyping")
    (tmp_path / "notes.csv").write_text(
        "patient,text\n" + "".join(f"p{n},asthma {n}\n" for n in range(10))
    )
    (tmp_path / "judged.csv").write_text(
        "patient,asthma\n" + "".join(f"p{n},{n % 2}\n" for n in range(10))
    )

    def make_job(model: dict[str, Any]) -> fn.Job:
        files = {"notes": "notes.csv", "labels": "judged.csv"}
        table = {
            "method": "phenotype",
            "sites": {"mercy": files, "harbour": files},
            "text": {"encoder": str(bert)},
            "model": model,
        }
        return parse_job(table, "tiny", tmp_path, "tiny")

    rehearsal = Rehearsal()
    vectors = make_job({"representation": "none"})
    words = make_job({"representation": "attention"})
    digests = [
        job.kind.fingerprint(rehearsal.load(job).data[0])
        for job in (vectors, words, vectors)
    ]
    assert digests[0] == digests[2] != digests[1]
    assert digests[1] == words.kind.fingerprint(Rehearsal().load(words).data[0])
