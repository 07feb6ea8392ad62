"""Predictions in worker processes: bytes, order, errors, kills and interrupts."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from every_kind import DOCUMENTS, KINDS, TAGS
from forked import Command
from tiny_taggers import MODEL, generated, save_three_words
from worker_runs import find_workers, is_running, wait_until

import fednotes as fn
from fednotes.core.errors import (
    DataError,
    ModelError,
    ParameterError,
    WorkerError,
)
from fednotes.core.types import Document, Span
from fednotes.jobs import mention_models
from fednotes.jobs.predict import predict
from fednotes.jobs.prediction_windows import Window, cut_windows
from fednotes.jobs.saved_models import LoadOptions, NoteSource, PredictionOutput
from fednotes.jobs.workers import dealing, predictions
from fednotes.jobs.workers.dealing import count_cores
from fednotes.jobs.workers.prediction_messages import (
    decode_notes,
    decode_spans,
    encode_notes,
    encode_spans,
)
from fednotes.jobs.workers.predictions import (
    MANY_NOTES,
    PredictionWorkers,
    choose_worker_devices,
    running_prediction_workers,
)
from fednotes.taggers.saving import build_model, read_model_config, save_model
from fednotes.taggers.tagger import TaggerConfig

TWO = LoadOptions(workers=2)
NOTES = 50
WINDOW = 4  # notes of a window
SHARD = 10  # notes of a file
MANY_SHORT = 1200  # notes of an input during which a process ends
# In JSON lines and NOTE_NLP, CoNLL, brat, Parquet.
MARKS_OF_MENTIONS = (b"confidence", b"\tB-", b"T1\t", b"PAR1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a light tagger with weights drawn at random."""
    path = tmp_path_factory.mktemp("saved") / "model"
    (site,) = generated(20, sites=1)
    save_model(build_model(MODEL, site.tags, seed=1), path)
    return path


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of notes of several lengths, with numbers as ids."""
    path = tmp_path_factory.mktemp("notes") / "notes.jsonl"
    write_notes(path, NOTES)
    return path


def write_notes(path: Path, number: int) -> None:
    """Write generated notes of several lengths, with the ids 1, 2 and so on."""
    (site,) = generated(20, sites=1)
    texts = [document.text for document in site.train]
    with path.open("w", encoding="utf-8") as file:
        for n in range(1, number + 1):
            text = " ".join(texts[n % len(texts)] for _ in range(1 + n % 3))
            record = {"id": str(n), "text": f"{text} É {n}.", "patient": f"p{n // 2}"}
            file.write(json.dumps(record) + "\n")


@pytest.fixture(scope="module")
def workers(folder: Path) -> Iterator[PredictionWorkers]:
    """Yield two workers that have loaded the model."""
    with running_prediction_workers(folder, LoadOptions(), ["cpu", "cpu"], "") as pool:
        yield pool


@pytest.fixture
def in_workers(workers: PredictionWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let predictions with `workers` use those that run already."""

    @contextmanager
    def use_running(*_: object) -> Iterator[PredictionWorkers]:
        yield workers

    monkeypatch.setattr(mention_models, "running_prediction_workers", use_running)


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mention_models, "FILE_BATCH", WINDOW)
    monkeypatch.setattr(predictions, "count_cores", lambda: 8)


def read_files(path: Path) -> dict[str, bytes]:
    """Return the files of a folder by name, or a single file."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return {file.name if path.is_dir() else "": file.read_bytes() for file in files}


# ---- bytes and order -----------------------------------------------------------------


@pytest.mark.usefixtures("in_workers")
@pytest.mark.parametrize("shard", [0, SHARD])
@pytest.mark.parametrize(
    "to", ["jsonl", "csv", "conll", "omop", "brat", "parquet", "omop-parquet"]
)
def test_files_from_workers_equal_those_of_one_process(
    to: str,
    shard: int,
    folder: Path,
    notes: Path,
    tmp_path: Path,
) -> None:
    if "parquet" in to:
        pytest.importorskip("pyarrow")
    if to == "brat" and shard:
        pytest.skip("brat has a file for each note, and no shards")
    source = NoteSource(str(notes))
    for name, options in (("one", LoadOptions()), ("two", TWO)):
        output = PredictionOutput(tmp_path / name, to, shard=shard)
        assert predict(folder, source, output, options) == NOTES
    expected = read_files(tmp_path / "one")
    assert read_files(tmp_path / "two") == expected
    assert len(expected) == (NOTES // SHARD + 1 if shard else len(expected))
    content = b"".join(expected.values())
    assert any(mark in content for mark in MARKS_OF_MENTIONS)


@pytest.mark.slow
@pytest.mark.usefixtures("in_workers")
def test_rows_from_workers_in_a_database_equal_those_of_one_process(
    folder: Path,
    notes: Path,
    tmp_path: Path,
) -> None:
    pytest.importorskip("sqlalchemy")
    rows = []
    for name, options in (("one", LoadOptions()), ("two", TWO)):
        database = f"sqlite:///{tmp_path}/{name}.db"
        output = PredictionOutput(to="omop", shard=SHARD, database=database)
        predict(folder, NoteSource(str(notes)), output, options)
        with closing(sqlite3.connect(tmp_path / f"{name}.db")) as connection:
            nlp = connection.execute("SELECT * FROM note_nlp ORDER BY 1").fetchall()
            done = connection.execute("SELECT * FROM fednotes_progress").fetchall()
            rows.append([*nlp, *done])
    assert rows[1] == rows[0]
    assert len(rows[0]) > NOTES


@pytest.mark.usefixtures("in_workers")
def test_a_stream_of_workers_keeps_the_order_and_every_field(
    folder: Path,
) -> None:
    documents = [
        Document(
            str(n),
            f"He took aspirin {n} times. {'No pain. ' * (n % 5)}",
            (Span(0, 2, "Old"),),
            patient=f"p{n}",
            meta={"visit": n, "of": object},
        )
        for n in range(30)
    ]
    one = fn.load(folder)
    two = fn.load(folder, workers=2)
    assert isinstance(one, fn.MentionModel)
    assert isinstance(two, fn.MentionModel)
    expected = list(one.stream(documents, batch=3))
    assert list(two.stream(iter(documents), batch=3)) == expected
    found = [span for document in expected for span in document.spans]
    again = [
        span for document in two.stream(documents, batch=3) for span in document.spans
    ]
    assert found
    # `==` of spans ignores confidences.
    assert [(s, s.confidence) for s in again] == [(s, s.confidence) for s in found]
    assert [type(span.confidence) for span in again] == [float] * len(found)


def test_few_windows_are_pending_at_a_time(workers: PredictionWorkers) -> None:
    """A generator counts the notes that were read and have no prediction yet."""
    notes_read = predicted = most_waiting = 0

    def read() -> Iterator[Document]:
        nonlocal notes_read, most_waiting
        for number in range(200):
            notes_read += 1
            most_waiting = max(most_waiting, notes_read - predicted)
            yield Document(str(number), "No pain today.")

    for _ in workers.predict_windows(cut_windows(read(), WINDOW), 0.0):
        predicted += 1
    assert (notes_read, predicted) == (200, 200)
    # Three windows for each of two workers, and one that the sink has begun.
    assert WINDOW < most_waiting <= 7 * WINDOW


def test_notes_before_an_error_of_the_input_are_predicted_first(
    workers: PredictionWorkers,
) -> None:
    def read() -> Iterator[Window]:
        for number in range(3):
            yield [Document(str(number), "No pain.")]
        raise DataError("the table is broken off")

    seen: list[str] = []
    predicted = workers.predict_windows(read(), 0.0)
    with pytest.raises(DataError, match="broken off"):
        seen.extend(document.id for document in predicted)
    assert seen == ["0", "1", "2"]


def test_windows_end_with_batches_and_hold_few_notes() -> None:
    documents = [Document(str(n), "x" * 10) for n in range(11)]

    def list_sizes(size: int, batch: int | None) -> list[int]:
        return [len(window) for window in cut_windows(documents, size, batch)]

    assert list_sizes(4, None) == [4, 4, 3]
    assert list_sizes(4, 5) == [4, 1, 4, 1, 1]
    assert list_sizes(4, 2) == [2, 2, 2, 2, 2, 1]
    assert list_sizes(100, None) == [11]


def test_notes_and_spans_are_passed_to_workers_and_back_unchanged() -> None:
    """Also characters outside the basic plane, halves of them, and all bits."""
    note = Document(
        "1", "\ud83d and \U0001f600 \x00\u2028", (), None, (), {}, ((0, 3), (4, 7))
    )
    spans = (
        Span(0, 3, "A", ((0, 1), (2, 3)), 0.1 + 0.2),
        Span(1, 2, "É", (), None),
        Span(1, 2, "B", (), 5e-324),
    )
    carried = json.loads(json.dumps(encode_notes([note])))
    assert decode_notes(carried) == [note]
    (values,) = json.loads(json.dumps(encode_spans([replace(note, spans=spans)])))
    assert decode_spans(values) == spans
    confidences = [span.confidence for span in decode_spans(values)]
    assert confidences == [0.1 + 0.2, None, 5e-324]


def test_the_number_of_threads_does_not_change_a_light_tagger() -> None:
    """It predicts with one thread, whatever torch would use elsewhere."""
    (site,) = generated(300, sites=1)
    config = TaggerConfig(
        hashed_words=2048,
        word_dim=32,
        char_dim=24,
        char_filters=64,
        cnn_filters=96,
        lstm_units=64,
    )
    model = fn.MentionModel(build_model(config, site.tags, seed=3))
    texts = [document.text for document in site.train]
    found: list[Any] = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            predicted = list(model.stream(texts, batch=256))
            spans = [span for document in predicted for span in document.spans]
            found.append([(span, span.confidence) for span in spans])
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1]


# ---- how many workers there are ------------------------------------------------------


def test_auto_starts_workers_for_many_notes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dealing, "count_free_cores", lambda: 3)
    auto = LoadOptions(workers="auto")

    def count(options: LoadOptions, notes: int | None) -> int:
        return len(choose_worker_devices(folder, options, notes))

    assert count(auto, MANY_NOTES) == 3
    assert [count(auto, notes) for notes in (None, 0, MANY_NOTES - 1)] == [1, 1, 1]
    assert [count(TWO, notes) for notes in (None, 0, 1, 2, 3)] == [2, 1, 1, 2, 2]
    assert count(LoadOptions(), MANY_NOTES) == 1


def test_impossible_numbers_of_workers_are_refused(folder: Path, notes: Path) -> None:
    numbers: list[Any] = [0, -1, True, 1.5, "all"]
    for number in numbers:
        with pytest.raises(ParameterError, match="a whole number of at least 1, or"):
            fn.load(folder, workers=number)
        with pytest.raises(ParameterError, match="a whole number of at least 1, or"):
            predict(folder, NoteSource(str(notes)), None, LoadOptions(workers=number))
    with pytest.raises(ParameterError, match=r"may use 8: set `workers` to at most 8"):
        choose_worker_devices(folder, LoadOptions(workers=9), None)
    with pytest.raises(ParameterError, match="distributes workers over all GPUs: set"):
        fn.load(folder, device="cuda:*")


def test_an_error_about_several_threads_names_the_environment_variable(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predictions, "_count_threads", lambda _: 8)
    message = (
        "`workers` = 2: this model predicts with 8 threads in each process, but this "
        "process may use 8 cores: set the environment variable OMP_NUM_THREADS=4, or "
        "give fewer `workers`"
    )
    with pytest.raises(ParameterError, match=message):
        choose_worker_devices(folder, TWO, None)


def test_workers_are_distributed_over_all_gpus(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    every_gpu = LoadOptions(device="cuda:*", workers=3)
    devices = ["cuda:0", "cuda:1", "cuda:0"]
    assert choose_worker_devices(folder, every_gpu, None) == devices
    automatic = replace(every_gpu, workers="auto")
    assert choose_worker_devices(folder, automatic, MANY_NOTES) == devices[:2]
    assert choose_worker_devices(folder, automatic, 5) == devices[:1]


def test_an_error_of_the_command_names_the_option_for_workers(
    folder: Path, notes: Path, run_cli: Any, tmp_path: Path
) -> None:
    words = ("predict", folder, notes, "--out", tmp_path / "out", "--workers")
    code, _, printed = run_cli(*words, "many")
    assert code == 2
    assert printed.startswith("error: --workers = 'many': expected a whole number")
    assert not (tmp_path / "out").exists()


# ---- errors and ends of processes ----------------------------------------------------


@pytest.mark.slow
def test_a_killed_worker_is_one_error_with_a_remedy(tmp_path: Path) -> None:
    folder = save_three_words(tmp_path / "model")
    model = fn.load(folder, workers=2)
    assert isinstance(model, fn.MentionModel)
    stream = model.stream((f"No pain {n}." for n in range(400)), batch=4)
    others = find_workers(os.getpid())
    next(stream)
    processes = [each for each in find_workers(os.getpid()) if each not in others]
    assert len(processes) == 2
    os.kill(processes[1], signal.SIGKILL)
    message = (
        r"worker process [12], which predicted notes, was ended by SIGKILL \(the system "
        r"does this when memory runs out\): give fewer `workers` if memory is short"
    )
    with pytest.raises(WorkerError, match=message):
        list(stream)
    assert not any(map(is_running, processes))


@pytest.fixture
def many_notes(tmp_path: Path) -> Path:
    """Return a file of short notes, which fill many files of predictions."""
    path = tmp_path / "notes.jsonl"
    lines = [
        json.dumps({"id": str(n), "text": f"No pain {n}."}) for n in range(MANY_SHORT)
    ]
    path.write_text("\n".join(lines), "utf-8")
    return path


@pytest.fixture
def three_words(tmp_path: Path) -> Path:
    """Return the folder of a model that computes little."""
    return save_three_words(tmp_path / "model")


def start_command(model: Path, notes: Path, *, largest_file: int = 0) -> Command:
    """Start a prediction with two workers into the files of a folder `out`."""
    words = ("predict", str(model), str(notes), "--out", "out")
    options = ("--workers", "2", "--shard", str(SHARD))
    return Command(notes.parent, *words, *options, largest_file=largest_file)


def wait_for_workers(command: Command, out: Path) -> list[int]:
    """Wait until a command has written files; return the ids of its workers."""
    wait_until((out / "part-00001.jsonl").exists)
    processes = find_workers(command.pid)
    assert len(processes) == 2
    return processes


def check_resumed(model: Path, notes: Path) -> None:
    """Resume a stopped prediction; compare its files with those of one process."""
    out = notes.with_name("out")
    manifest = json.loads((out / "manifest.json").read_text())
    assert 0 < manifest["progress"]["notes"] < MANY_SHORT
    source = NoteSource(str(notes))
    predict(model, source, PredictionOutput(out, shard=SHARD, resume=True))
    whole = PredictionOutput(notes.with_name("whole"), shard=SHARD)
    predict(model, source, whole)
    assert read_files(out) == read_files(notes.with_name("whole"))


needs_two_cores = pytest.mark.skipif(count_cores() < 2, reason="needs two cores")


@needs_two_cores
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_a_stopped_command_ends_its_workers_and_resumes_to_the_same_files(
    number: int, three_words: Path, many_notes: Path
) -> None:
    command = start_command(three_words, many_notes)
    processes = wait_for_workers(command, many_notes.with_name("out"))
    command.send(number)
    code, _ = command.wait()
    assert code == (-number if number == signal.SIGKILL else 128 + number)
    wait_until(lambda: not any(map(is_running, processes)), seconds=10)
    check_resumed(three_words, many_notes)


@pytest.mark.slow
@needs_two_cores
def test_a_killed_worker_ends_the_command_with_its_option_to_resume(
    three_words: Path, many_notes: Path
) -> None:
    command = start_command(three_words, many_notes)
    processes = wait_for_workers(command, many_notes.with_name("out"))
    os.kill(processes[0], signal.SIGKILL)
    code, printed = command.wait()
    assert code == 2
    assert "was ended by SIGKILL" in printed
    assert "give --resume to continue" in printed
    assert not any(map(is_running, processes))
    check_resumed(three_words, many_notes)


@pytest.mark.slow
@needs_two_cores
def test_a_full_disk_ends_the_workers(three_words: Path, many_notes: Path) -> None:
    """The manifest becomes too large."""
    command = start_command(three_words, many_notes, largest_file=5000)
    processes = wait_for_workers(command, many_notes.with_name("out"))
    code, printed = command.wait()
    assert code == 2
    assert "File too large" in printed
    assert not any(map(is_running, processes))
    check_resumed(three_words, many_notes)


@pytest.mark.slow
def test_an_error_in_loading_equals_that_of_one_process(
    folder: Path, notes: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "model"
    broken.mkdir()
    for file in folder.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    (broken / "tagger.safetensors").write_bytes(b"damaged")
    messages: list[str] = []
    for options in (LoadOptions(), TWO):
        with pytest.raises(ModelError) as raised:
            predict(broken, NoteSource(str(notes)), None, options)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


@pytest.mark.slow
def test_predictions_of_new_workers_equal_those_of_one_process(
    folder: Path, notes: Path, tmp_path: Path
) -> None:
    """All of `predict`, with processes of its own."""
    before = find_workers(os.getpid())
    for name, options in (("one", LoadOptions()), ("two", TWO)):
        output = PredictionOutput(tmp_path / name)
        assert predict(folder, NoteSource(str(notes)), output, options) == NOTES
    assert (tmp_path / "two").read_bytes() == (tmp_path / "one").read_bytes()
    assert find_workers(os.getpid()) == before


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_model_predicts_the_same_in_workers(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    small = KINDS[kind]
    settings = dict(small.settings)
    if small.backbone:
        settings[small.backbone_key] = str(request.getfixturevalue(small.backbone))
    model = build_model(read_model_config(settings), TAGS, seed=1)
    save_model(model, tmp_path / "model")
    documents = [*DOCUMENTS] * 3
    found = []
    for workers in (1, 2):
        loaded = fn.load(tmp_path / "model", workers=workers)
        assert isinstance(loaded, fn.MentionModel)
        predicted = list(loaded.stream(documents, batch=2))
        found.append(
            [(s, s.confidence) for document in predicted for s in document.spans]
        )
    assert found[0] == found[1]
