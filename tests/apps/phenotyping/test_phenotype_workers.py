"""Phenotyping in worker processes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from patient_files import save_model
from worker_runs import check_same_files, find_workers, is_running

import fednotes as fn
from fednotes.apps.phenotyping.model import PhenotypeModel
from fednotes.core.errors import DataError, WorkerError
from fednotes.jobs import patient_models
from fednotes.jobs.job_file import parse_job
from fednotes.jobs.patient_models import PatientNote
from fednotes.jobs.predict import predict
from fednotes.jobs.saved_models import LoadOptions, NoteSource, PredictionOutput
from fednotes.jobs.workers import dealing, pool, predictions
from fednotes.jobs.workers.predictions import (
    PredictionWorkers,
    running_prediction_workers,
)

TABLE = {
    "method": "phenotype",
    "seed": 2,
    "synthetic": {"sites": 3, "patients": 60},
    "training": {
        "minimum": 2,
        "min_patients": 0,
        "cycles": 2,
        "classifier_cycles": 2,
    },
    "model": {"network": {"embedding": 8, "hidden": 8}},
}


@pytest.mark.slow
def test_a_run_in_workers_writes_the_files_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "count_cores", lambda: 8)
    job = parse_job(TABLE, "job", tmp_path, "job.toml")
    check_same_files(job, tmp_path)


# ---- predictions ---------------------------------------------------------------------

TERMS = ("asthma", "gout", "hypertension")
MOST = 12  # concepts of a patient
WINDOW = 4  # notes of a window
NOTES = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model that leaves out patients with many concepts."""
    place = tmp_path_factory.mktemp("saved") / "model"
    return save_model(place, "synthetic", Path(), *TERMS, most=MOST)


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return notes of patients that lie apart; one patient has too many concepts."""
    path = tmp_path_factory.mktemp("notes") / "notes.jsonl"
    write_notes(path, NOTES)
    return path


def write_notes(path: Path, number: int) -> None:
    """Write notes; every third is of the same patient, and the others of 30."""
    with path.open("w", encoding="utf-8") as file:
        for n in range(number):
            patient = "many" if n % 3 == 0 else f"p{n * 7 % 30}"
            text = f"Known {TERMS[n % 2]}. No {TERMS[2]}. É {n}."
            if n % 5 == 0:
                text = "Seen today."
            file.write(json.dumps({"id": n, "patient": patient, "text": text}) + "\n")


@pytest.fixture(scope="module")
def workers(folder: Path) -> Iterator[PredictionWorkers]:
    """Yield two workers that have loaded the model."""
    with running_prediction_workers(folder, LoadOptions(), ["cpu", "cpu"], "") as pool:
        yield pool


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patient_models, "FILE_BATCH", WINDOW)
    monkeypatch.setattr(predictions, "count_cores", lambda: 8)


@pytest.fixture
def started(workers: PredictionWorkers, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let predictions use workers that run; list the numbers that they asked for."""
    numbers: list[int] = []

    @contextmanager
    def use_running(
        folder: Path, options: LoadOptions, devices: list[str], remedy: str
    ) -> Iterator[PredictionWorkers]:
        numbers.append(len(devices))
        yield workers

    monkeypatch.setattr(patient_models, "running_prediction_workers", use_running)
    return numbers


@pytest.mark.slow
@pytest.mark.parametrize("to", ["jsonl", "csv"])
def test_findings_from_workers_equal_those_of_one_process(
    to: str, folder: Path, notes: Path, started: list[int], tmp_path: Path, capsys: Any
) -> None:
    contents = []
    for number in (1, 2):
        out = tmp_path / str(number)
        options = LoadOptions(workers=number)
        output = PredictionOutput(out, to)
        assert predict(folder, NoteSource(str(notes)), output, options) == NOTES
        contents.append((out.read_bytes(), capsys.readouterr().err))
    assert contents[0] == contents[1]
    assert started == [2]
    content, printed = contents[0]
    assert b"p7" in content
    assert b"many" not in content
    assert "left out 1 patient with too many concepts" in printed


def test_a_model_loaded_with_workers_finds_what_one_without_finds(
    folder: Path, notes: Path, started: list[int]
) -> None:
    expected = fn.load(folder).predict_file(notes)
    model = fn.load(folder, workers=2)
    assert model.predict_file(notes) == expected
    assert started == [2]
    model(["Known gout.", "Known asthma."])
    assert started == [2]  # a call computes in this process


def test_automatic_workers_start_after_many_notes(
    folder: Path, notes: Path, started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dealing, "count_free_cores", lambda: 3)
    expected = fn.load(folder).predict_file(notes)
    auto = fn.load(folder, workers="auto")
    for many, numbers in ((NOTES, []), (NOTES // 4, [3])):
        monkeypatch.setattr(patient_models, "MANY_NOTES", many)
        monkeypatch.setattr(predictions, "MANY_NOTES", many)
        assert auto.predict_file(notes) == expected
        assert started == numbers


def test_a_model_that_searches_for_concepts_has_a_worker_on_each_core(
    folder: Path, notes: Path, started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own threads do not count, because only the encoder of other models uses them."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    fn.load(folder, workers=8).predict_file(notes)
    assert started == [8]


def test_an_error_of_the_notes_is_that_of_one_process(
    folder: Path, started: list[int], tmp_path: Path
) -> None:
    path = tmp_path / "notes.jsonl"
    write_notes(path, 30)
    with path.open("a", encoding="utf-8") as file:
        file.write('{"id": "31"')
    messages = []
    for number in (1, 2):
        with pytest.raises(DataError) as raised:
            predict(
                folder,
                NoteSource(str(path)),
                PredictionOutput(tmp_path / "out"),
                LoadOptions(workers=number),
            )
        messages.append(str(raised.value))
    assert messages[0] == messages[1]
    assert "notes.jsonl:31" in messages[0]
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_killed_worker_is_one_error_and_leaves_no_file(
    folder: Path, notes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = find_workers(os.getpid())
    processes: list[int] = []
    read = PhenotypeModel.read_notes

    def kill_after_some_notes(source: NoteSource) -> Iterator[PatientNote]:
        for number, note in enumerate(read(source)):
            if number == NOTES // 2:
                workers = find_workers(os.getpid())
                processes.extend(each for each in workers if each not in others)
                os.kill(processes[0], signal.SIGKILL)
            yield note

    monkeypatch.setattr(PhenotypeModel, "read_notes", kill_after_some_notes)
    out = tmp_path / "out.jsonl"
    message = (
        r"worker process [12], which predicted notes, was ended by SIGKILL \(the system "
        r"does this when memory runs out\): give fewer `workers` if memory is short"
    )
    with pytest.raises(WorkerError, match=message):
        predict(
            folder,
            NoteSource(str(notes)),
            PredictionOutput(out),
            LoadOptions(workers=2),
        )
    assert len(processes) == 2
    assert not any(map(is_running, processes))
    assert not out.exists()
