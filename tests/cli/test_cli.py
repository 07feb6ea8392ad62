"""Every command as a person gives it: 0, or 2 and one line on stderr; never a note's text."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import fednotes
from fednotes.cli import app
from fednotes.core.types import Document
from fednotes.data.formats import read
from fednotes.metrics.spans import SpanCounts
from fednotes.taggers.saving import load_model

NAME = "Zebulonovic"  # stands for what must never be shown
DRUGS = ("aspirin", "codeine", "heparin", "insulin")

JOB = """\
method = "fedner"
seed = 3
conditions = ["alone", "federated"]
[training]
epochs = 12
batch_size = 16
learning_rate = 0.02
personal_epochs = 1
[model]
tagger = "cnn-clstm-crf"
hashed_words = 50
word_dim = 4
char_dim = 4
char_filters = 6
cnn_filters = 8
lstm_units = 4
[sites.north]
train = "north.txt"
test = "north-test.txt"
[sites.south]
train = "south.txt"
test = "south-test.txt"
"""

Outcome = tuple[str, str]
Run = Callable[..., Outcome]


def conll(path: Path, numbers: range) -> None:
    """Sentences with one drug each and a word that no other sentence has."""
    rows = [
        f"{NAME}\tO\nn{n}\tO\ntook\tO\n{DRUGS[n % 4]}\tB-Drug\ntoday\tO\n.\tO\n\n" for n in numbers
    ]
    path.write_text("".join(rows), encoding="utf-8")


def write_job(folder: Path, text: str = JOB) -> Path:
    conll(folder / "north.txt", range(0, 40))
    conll(folder / "north-test.txt", range(100, 110))
    conll(folder / "south.txt", range(200, 230))
    conll(folder / "south-test.txt", range(300, 310))
    path = folder / "job.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def _torch_as_before() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Give a command; returns stdout and stderr."""

    def given(*arguments: object, code: int = 0) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["fednotes", *map(str, arguments)])
        capsys.readouterr()
        if code:
            with pytest.raises(SystemExit) as stopped:
                app.main()
            assert stopped.value.code == code
        else:
            app.main()
        caught = capsys.readouterr()
        return caught.out, caught.err

    return given


@pytest.fixture
def refused(run: Run) -> Callable[..., str]:
    """Give a command that must fail; returns its one line."""

    def given(*arguments: object) -> str:
        out, err = run(*arguments, code=2)
        lines = err.splitlines()
        assert len(lines) == 1, err
        assert lines[0].startswith("error: ")
        assert NAME not in out + err
        return lines[0]

    return given


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run, beside its job; tests only read it."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        arguments = ["simulate", str(write_job(folder)), "--out", str(folder / "run")]
        patch.setattr(sys, "argv", ["fednotes", *arguments])
        app.main()
    return folder / "run"


@pytest.fixture
def model(trained: Path) -> Path:
    return trained / "federated" / "sites" / "north" / "model"


# what goes wrong


def test_job_is_missing(refused: Callable[..., str], tmp_path: Path) -> None:
    line = refused("simulate", tmp_path / "no.toml", "--out", tmp_path / "run")
    assert "no.toml: no such job file" in line
    assert "did you mean 'demo'?" in refused("simulate", "demmo", "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_unknown_key(refused: Callable[..., str], tmp_path: Path) -> None:
    path = write_job(tmp_path, JOB.replace("epochs = 12", "epocs = 12"))
    line = refused("simulate", path, "--out", tmp_path / "run")
    assert "unknown key 'epocs'" in line
    assert "did you mean 'epochs'?" in line


def test_wrong_columns(run: Run, refused: Callable[..., str], tmp_path: Path) -> None:
    path = write_job(tmp_path)
    with (tmp_path / "south.txt").open("a", encoding="utf-8") as file:
        file.write(f"{NAME}\tNN\tO\textra\n")
    number = 30 * 7 + 1
    out, err = run("check", path, code=1)
    assert f"south.txt:{number}: 4 columns" in out
    assert err == "problems: 1 (line 1)\n"
    assert f"south.txt:{number}: " in refused("simulate", path, "--out", tmp_path / "run")


def test_truncated_brat_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(f"{NAME} took aspirin.", encoding="utf-8")
    (tmp_path / "a.ann").write_text(f"T1\tDrug 17 24\taspirin\nT2\tName 0 1\t{NAME}\nT3\tDr\n")
    out, err = run("check", tmp_path, code=1)
    assert "a.ann:2: T2 at 0:1 is not what the text holds there" in out
    assert "a.ann:3: no whole brat annotation" in out
    assert err == "problems: 2 (line 1, mention 1)\n"
    assert NAME not in out


def test_unknown_type(refused: Callable[..., str], tmp_path: Path) -> None:
    path = write_job(tmp_path, JOB + 'types = ["Drugg"]\n')
    line = refused("simulate", path, "--out", tmp_path / "run")
    assert "'south'" in line
    assert "did you mean 'Drug'?" in line


def test_empty_site_file(run: Run, refused: Callable[..., str], tmp_path: Path) -> None:
    path = write_job(tmp_path)
    (tmp_path / "south.txt").write_text("", encoding="utf-8")
    assert "south.txt: the file is empty" in run("check", path, code=1)[0]
    assert "south.txt" in refused("simulate", path, "--out", tmp_path / "run")


def test_missing_files(refused: Callable[..., str], tmp_path: Path, model: Path) -> None:
    assert "nowhere.txt: no such file" in refused("check", tmp_path / "nowhere.txt")
    assert "nowhere.txt: no such file" in refused("evaluate", model, tmp_path / "nowhere.txt")
    assert "nowhere.txt: no such file" in refused("predict", model, tmp_path / "nowhere.txt")
    assert "nowhere.txt" in refused("corpus", "stats", tmp_path / "nowhere.txt")
    assert "no model here" in refused("predict", tmp_path / "nomodel", "--text", "He took aspirin.")
    assert "no summary.json" in refused("report", tmp_path)
    assert "not the folder of a run" in refused("compare", tmp_path, tmp_path)
    line = refused("reproduce", "fedner-tabel2", "--out", tmp_path / "r")
    assert "did you mean 'fedner-table2'?" in line


def test_nan_in_a_saved_model(refused: Callable[..., str], tmp_path: Path, model: Path) -> None:
    """With the right checksum, so that only the values themselves tell."""
    tensors = load_file(model / "tagger.safetensors")
    name = sorted(tensors)[0]
    tensors[name].view(-1)[0] = float("nan")
    save_file(tensors, tmp_path / "tagger.safetensors")
    facts = json.loads((model / "tagger.json").read_text(encoding="utf-8"))
    content = (tmp_path / "tagger.safetensors").read_bytes()
    assert "SHA-256" in _with_facts(refused, tmp_path, facts)
    facts["sha256"] = hashlib.sha256(content).hexdigest()
    line = _with_facts(refused, tmp_path, facts)
    assert f"parameter {name!r} is not finite" in line


def _with_facts(refused: Callable[..., str], folder: Path, facts: dict[str, Any]) -> str:
    (folder / "tagger.json").write_text(json.dumps(facts), encoding="utf-8")
    return refused("predict", folder, "--text", f"{NAME} took aspirin.")


@pytest.mark.parametrize("device", ["cuda:9", "gpu", "meta"])
def test_device(refused: Callable[..., str], tmp_path: Path, device: str) -> None:
    path = write_job(tmp_path)
    line = refused("simulate", path, "--out", tmp_path / "run", "--device", device)
    assert f"--device {device}: not available" in line


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("training.epochs", "expected KEY=VALUE"),
        ("training.epochs=many", "expected a whole number"),
        ("training.epoch=3", "did you mean 'epochs'?"),
        ("seed.x=3", "'seed' is not a table"),
        ("model.tagger=cnn-cfr", "did you mean 'cnn-crf'?"),
    ],
)
def test_bad_set(refused: Callable[..., str], tmp_path: Path, setting: str, told: str) -> None:
    path = write_job(tmp_path)
    assert told in refused("simulate", path, "--out", tmp_path / "run", "--set", setting)


def test_wrong_options(refused: Callable[..., str], tmp_path: Path, model: Path) -> None:
    refused("simulate", "demo")  # no --out
    refused("predict", model, "text", "--format", "xml")
    refused("no-such-command")
    assert "--out FOLDER" in refused("predict", model, "--text", "He took it.", "--format", "brat")


def test_full_disk(
    refused: Callable[..., str], trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier summary stays whole when the new one cannot be put in its place."""
    before = (trained / "summary.json").read_bytes()
    put = os.replace

    def full(source: Any, target: Any) -> None:
        if Path(target).name == "summary.json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        put(source, target)

    monkeypatch.setattr("fednotes.core.store.os.replace", full)
    job = trained.parent / "job.toml"
    line = refused("simulate", job, "--out", trained, "--resume")
    assert "summary.json" in line
    assert os.strerror(errno.ENOSPC) in line
    assert (trained / "summary.json").read_bytes() == before
    assert not [path for path in trained.iterdir() if path.name.endswith(".tmp")]


# what goes right


def spans_of(document: Document) -> list[tuple[int, int, str]]:
    return [(span.start, span.end, span.label) for span in document.spans]


TEXT = f"{NAME} n5 took codeine today ."


@pytest.fixture
def expected(model: Path) -> list[tuple[int, int, str]]:
    """What the tagger itself says of TEXT: the one drug, which it learnt from 70 sentences."""
    found = spans_of(load_model(model).predict((Document("x", TEXT),))[0])
    start = TEXT.index("codeine")
    assert found == [(start, start + len("codeine"), "Drug")]
    return found


def test_predict_text(
    run: Run,
    model: Path,
    tmp_path: Path,
    expected: list[tuple[int, int, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same mentions from the text, a file and stdin, and in every format."""
    note = tmp_path / "note.txt"
    note.write_text(TEXT, encoding="utf-8")
    stdin = io.TextIOWrapper(io.BytesIO(TEXT.encode()), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", stdin)
    for source in (["--text", TEXT], [note], ["-"]):
        out, err = run("predict", model, *source)
        (tmp_path / "shown.jsonl").write_text(out, encoding="utf-8")
        (document,) = read(tmp_path / "shown.jsonl", "jsonl")
        assert err == ""
        assert document.text == TEXT
        assert spans_of(document) == expected


def test_predict_formats(
    run: Run, model: Path, tmp_path: Path, expected: list[tuple[int, int, str]]
) -> None:
    rows = run("predict", model, "--text", TEXT, "--format", "conll")[0].strip().splitlines()
    tagged = [row.split() for row in rows if row and not row.startswith("#")]
    assert [(r[0], r[-1]) for r in tagged if r[-1] != "O"] == [("codeine", "B-Drug")]
    assert [r[0] for r in tagged] == TEXT.split()
    run("predict", model, "--text", TEXT, "--format", "brat", "--out", tmp_path / "brat")
    (ann,) = (tmp_path / "brat").glob("*.ann")
    start, end, label = expected[0]
    assert ann.read_text(encoding="utf-8") == f"T1\t{label} {start} {end}\tcodeine\n"
    run("predict", model, "--text", TEXT, "--out", tmp_path / "new.jsonl")
    assert spans_of(read(tmp_path / "new.jsonl")[0]) == expected


def test_predictions_never_replace_what_is_read(
    run: Run, refused: Callable[..., str], model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "a.txt").write_text(TEXT, encoding="utf-8")
    (folder / "a.ann").write_text(f"T1\tADE 0 1\t{TEXT[0]}\n")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for source, out, format in (
        (folder, folder, "brat"),
        (folder / "a.txt", folder, "brat"),
        (folder / "a.txt", folder / "a.txt", "jsonl"),
        (folder, folder / "a.ann", "conll"),
    ):
        told = refused("predict", model, source, "--out", out, "--format", format)
        assert "would replace files of" in told
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    run("predict", model, folder, "--out", tmp_path / "new", "--format", "brat")
    run("predict", model, folder, "--out", tmp_path / "new", "--format", "brat")  # its own again
    assert "names no type" in refused("evaluate", model, folder, "--types", ",")


def test_evaluate(run: Run, trained: Path, model: Path) -> None:
    """The numbers of --json are those counted here from the tagger's own predictions."""
    gold = read(trained.parent / "north-test.txt")
    predicted = load_model(model).predict(gold)
    right = sum(len(set(g.spans) & set(p.spans)) for g, p in zip(gold, predicted, strict=True))
    out, err = run("evaluate", model, trained.parent / "north-test.txt", "--json")
    scores = json.loads(out)
    assert err == ""
    assert right > 0
    assert scores["strict"]["recall"] == pytest.approx(right / 10)
    assert scores["strict"]["precision"] == pytest.approx(
        right / sum(len(p.spans) for p in predicted)
    )
    assert scores.pop("not_scored") == {"unknown": [], "not_annotated": [], "not_asked": []}
    assert scores == json.loads(json.dumps(SpanCounts.of(gold, predicted).scores()))
    shown = run("evaluate", model, trained.parent / "north-test.txt")[0]
    assert "Drug" in shown
    assert f"{100 * scores['strict']['f1']:.1f}" in shown


def two_types(path: Path) -> Path:
    """The test data of a site, with a type that the model lacks."""
    rows = "".join(
        f"n{n}\tO\ntook\tO\n{DRUGS[n % 4]}\tB-Medicine\nat\tO\nnight\tB-Time\n\n" for n in range(12)
    )
    path.write_text(rows, encoding="utf-8")
    return path


def test_evaluate_maps_what_is_there(
    run: Run, refused: Callable[..., str], model: Path, tmp_path: Path
) -> None:
    """A slip in --map is refused, with the labels that there are and the nearest right one."""
    path = two_types(tmp_path / "gold.txt")
    err = refused("evaluate", model, path, "--map", "Medicin=Drug")
    assert "has no label 'Medicin', it has Medicine, Time; did you mean 'Medicine'?" in err
    err = refused("evaluate", model, path, "--map", "Medicine=Drugg")
    assert "the model has no 'Drugg'; did you mean 'Drug'?" in err
    twice = ("--map", "Medicine=Drug", "--map", "Medicine=")
    assert "each OLD once" in refused("evaluate", model, path, *twice)
    err = refused("evaluate", model, path, "--map", "Medicine=Drug", "--types", "Durg")
    assert "--types: the model has no 'Durg'; did you mean 'Drug'?" in err
    out, err = run("evaluate", model, path, "--map", "Medicine=Drug", "--json")
    assert err == "note: the model has no Time: left out (--map OLD=NEW)\n"
    assert json.loads(out)["not_scored"]["unknown"] == ["Time"]


def test_evaluate_without_a_common_label(
    refused: Callable[..., str], model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "other.txt"
    path.write_text(f"{NAME}\tB-Person\nslept\tO\n", encoding="utf-8")
    assert "no label is common" in refused("evaluate", model, path)


def test_check_shows_no_text(run: Run, trained: Path) -> None:
    for target in (trained.parent / "north.txt", trained.parent / "job.toml"):
        out, err = run("check", target)
        assert "mentions" in out
        assert not any(word in out + err for word in (NAME, *DRUGS))


def test_check_finds_what_cannot_be_trained_on(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "bare.txt"
    path.write_text(f"{NAME}\tO\nslept\tO\n", encoding="utf-8")
    out, err = run("check", path, "--format", "conll", code=1)
    assert "nothing is annotated" in out
    assert err == "problems: 1 (no_mentions 1)\n"


def test_corpus_stats(run: Run, trained: Path) -> None:
    """40 and 30 sentences of 6 tokens with one mention each; all four names at both sites."""
    files = [trained.parent / "north.txt", trained.parent / "south.txt"]
    stats = json.loads(run("corpus", "stats", *files, "--json")[0])
    keys = ("site", "sentences", "tokens", "mentions", "entities", "forms")
    assert [tuple(site[key] for key in keys) for site in stats["sites"]] == [
        ("north.txt", 40, 240, 40, {"Drug": 40}, 4),
        ("south.txt", 30, 180, 30, {"Drug": 30}, 4),
    ]
    assert stats["overlapping"] == 4
    out = run("corpus", "stats", *files)[0]
    assert "240" in out
    assert NAME not in out


def test_corpus_list(run: Run) -> None:
    out = run("corpus", "list")[0]
    for name in ("cadec", "psytar", "bc5cdr", "ncbi-disease", "n2c2-2018"):
        assert f"\n{name}  " in f"\n{out}"


@pytest.mark.parametrize("format", ["conll", "brat", "jsonl"])
def test_corpus_synthesise(
    run: Run, refused: Callable[..., str], tmp_path: Path, format: str
) -> None:
    out = tmp_path / "made"
    arguments = ("corpus", "synthesise", out, "--sites", 2, "--sentences", 10, "--format", format)
    assert "2 sites" in run(*arguments)[0]
    folders = sorted(path for path in out.iterdir())
    assert [path.name for path in folders] == ["discharge", "reports"]
    for folder in folders:
        train = next(folder.glob("train*"))
        assert any(document.spans for document in read(train))
    assert "not an empty folder" in refused(*arguments)


def test_report(run: Run, trained: Path, tmp_path: Path) -> None:
    run("report", trained, "--out", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>")
    assert "north" in page
    assert NAME not in page


def test_compare(run: Run, trained: Path, refused: Callable[..., str]) -> None:
    out = run("compare", trained, trained, "--samples", 50)[0]
    summary = json.loads((trained / "summary.json").read_text(encoding="utf-8"))
    for site in ("north", "south"):
        (row,) = (line for line in out.splitlines() if site in line)
        for condition in ("federated", "alone"):
            f1 = summary["sites"][site][condition]["strict"]["f1"]
            assert f"{100 * f1:.1f}" in row
    assert "no pooled model" in refused("compare", trained, trained, "--condition", "pooled")
    assert "did you mean 'alone'?" in refused("compare", trained, trained, "--against", "alon")


def test_run_holds_no_text(trained: Path) -> None:
    """Nothing that a run writes has a word of a note in it."""
    for path in trained.rglob("*"):
        if path.is_file():
            assert NAME.encode() not in path.read_bytes(), path


def test_cache_clear(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDNOTES_CACHE", str(tmp_path))
    (tmp_path / "features").mkdir()
    kept, gone = tmp_path / "features" / "mine.txt", tmp_path / "features" / f"{'0' * 64}.npy"
    kept.write_text("mine", encoding="utf-8")
    gone.write_bytes(bytes(2_500_000))
    assert run("cache", "clear")[0] == f"2.5 MB freed in {tmp_path}\n"
    assert kept.exists()
    assert not gone.exists()


def test_the_package_is_the_command() -> None:
    """`python -m fednotes` where the console script is not on the path."""
    told = subprocess.run(
        [sys.executable, "-m", "fednotes", "--version"], capture_output=True, text=True, check=True
    )
    assert told.stdout == f"fednotes {fednotes.__version__}\n"
