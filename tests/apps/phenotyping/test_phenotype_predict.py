"""`predict` and `evaluate` on phenotyping models, and a whole run by commands.

Classifiers are set by hand: a disease is present where the notes name it.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from patient_files import save_model
from sklearn.metrics import f1_score, roc_auc_score

from fednotes.api import evaluate
from fednotes.apps.phenotyping.classifiers import LinearSVMs
from fednotes.apps.phenotyping.cohort import FeatureSpace, Vectors
from fednotes.apps.phenotyping.concepts import PatientInputs
from fednotes.apps.phenotyping.features import ConceptsConfig, build_features
from fednotes.apps.phenotyping.phenotyper import Phenotyper
from fednotes.cli import app
from fednotes.core.errors import DataError
from fednotes.jobs.patient_models import PatientNote
from fednotes.jobs.predict import predict
from fednotes.jobs.saved_models import NoteSource, PredictionOutput

NAME = "Zebulonovic"  # stands for what must never be shown
TERMS = ("asthma", "gout", "hypertension")
Run = Callable[..., tuple[str, str]]


@pytest.fixture
def run(run_cli: Callable[..., tuple[int, str, str]]) -> Run:
    """Give a command; returns stdout and stderr."""

    def run_command(*arguments: object, code: int = 0) -> tuple[str, str]:
        ended, out, err = run_cli(*arguments)
        assert ended == code
        assert NAME not in err
        return out, err

    return run_command


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(
        tmp_path_factory.mktemp("model") / "model", "synthetic", Path(), *TERMS
    )


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def labels_of(text: str) -> dict[str, list[str]]:
    """Return the diseases that are present, by patient."""
    return {
        each["patient"]: [
            name for name, label in each["labels"].items() if label == "present"
        ]
        for each in lines(text)
    }


TABLE = [
    {"patient": "p1", "text": f"{NAME} has asthma."},
    {"patient": "p2", "text": "No evidence of gout. Known hypertension."},
    {"patient": "p1", "text": "Known gout."},
    {"patient": "p3", "text": "Seen today."},
]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "notes.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in TABLE), encoding="utf-8")
    return path


def test_notes_of_a_patient_are_predicted_together(
    run: Run, model: Path, table: Path
) -> None:
    """A negated mention is none; a patient without concepts has a result and is
    counted."""
    out, err = run("predict", model, table)
    assert labels_of(out) == {
        "p1": ["asthma", "gout"],
        "p2": ["hypertension"],
        "p3": [],
    }
    assert "no concepts of the dictionary in the notes of 1 of 3 patients" in err
    assert {each["patient"]: each["concepts"] for each in lines(out)} == {
        "p1": 2,
        "p2": 1,
        "p3": 0,
    }
    for each in lines(out):
        for name, p in each["probabilities"].items():
            assert (p > 0.5) == (each["labels"][name] == "present")


def test_predict_reads_text_stdin_files_and_folders(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "History of asthma, gout."
    assert labels_of(run("predict", model, "--text", text)[0]) == {
        "text": ["asthma", "gout"]
    }
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert labels_of(run("predict", model, "-")[0]) == {"stdin": ["asthma", "gout"]}
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "a.txt").write_text(text)
    (folder / "b.txt").write_text("Known hypertension.")
    labels_by_patient = labels_of(run("predict", model, folder)[0])
    assert labels_by_patient == {"a": ["asthma", "gout"], "b": ["hypertension"]}
    assert labels_of(run("predict", model, folder / "a.txt")[0]) == {
        "a": ["asthma", "gout"]
    }


def test_csv_has_a_row_for_each_patient_and_phenotype(
    run: Run, model: Path, table: Path, tmp_path: Path
) -> None:
    run("predict", model, table, "--to", "csv", "--out", tmp_path / "out.csv")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out.csv").read_text("utf-8"))))
    expected = [
        (
            each["patient"],
            name,
            each["labels"][name],
            each["probabilities"][name],
            each["concepts"],
        )
        for each in lines(run("predict", model, table)[0])
        for name in TERMS
    ]
    assert [
        (
            r["patient"],
            r["phenotype"],
            r["label"],
            float(r["probability"]),
            int(r["concepts"]),
        )
        for r in rows
    ] == expected
    assert {r["concepts"] for r in rows if r["patient"] == "p3"} == {"0"}


def test_predictions_from_vectors_have_no_concepts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Features are a stub's, two numbers a patient."""
    space = FeatureSpace(2, dense=True, recipe={"kind": "text"})
    svms = LinearSVMs([(0, 1)], 2)
    Phenotyper(space, phenotypes=("gout",), svms=svms).save(tmp_path / "m")

    class Stub:
        def make_from_stream(
            self, notes: Iterable[PatientNote], patients: Iterable[str], compute: object
        ) -> PatientInputs:
            names = tuple(dict.fromkeys([*patients, *(note.patient for note in notes)]))
            vectors = Vectors(np.ones((len(names), 2), np.float32))
            return PatientInputs(names, vectors, {"left_out": 0, "without_features": 0})

    monkeypatch.setattr(
        "fednotes.apps.phenotyping.predict.load_features", lambda recipe, place: Stub()
    )
    predict(tmp_path / "m", NoteSource("-", text="Known gout."))
    (finding,) = lines(capsys.readouterr().out)
    assert finding.keys() == {"patient", "probabilities", "labels"}
    predict(
        tmp_path / "m",
        NoteSource("-", text="Known gout."),
        PredictionOutput(to="csv"),
    )
    assert capsys.readouterr().out.startswith("patient,phenotype,probability,label\n")


def test_phenotypes_that_were_never_learnt_are_null(
    tmp_path: Path, model: Path, capsys: Any
) -> None:
    """A disease without classes; and stage 1 alone, which gives codes."""
    space = build_features(ConceptsConfig(dictionary="synthetic"), Path()).space
    idf = np.ones(space.width)
    svms = LinearSVMs([(), (0,)], space.width)
    never = Phenotyper(space, idf=idf, phenotypes=("a", "b"), svms=svms)
    never.save(tmp_path / "never")
    predict(tmp_path / "never", NoteSource("-", text="Known asthma today."))
    (finding,) = lines(capsys.readouterr().out)
    assert finding["labels"] == {"a": None, "b": "absent"}
    assert finding["probabilities"] == {"a": None, "b": 0.0}


def test_wrong_options_are_refused_in_one_line(
    run: Run, model: Path, tmp_path: Path
) -> None:
    message = "phenotypes are written as jsonl or csv"
    assert (
        message
        in run("predict", model, "--text", "Known asthma.", "--to", "brat", code=2)[1]
    )
    assert (
        "nowhere.txt: no such file" in run("predict", model, "nowhere.txt", code=2)[1]
    )
    other_dictionary = tmp_path / "other.csv"
    other_dictionary.write_text("id,term\n1,asthma\n", encoding="utf-8")
    err = run(
        "predict",
        model,
        "--text",
        "Known asthma.",
        "--dictionary",
        other_dictionary,
        code=2,
    )[1]
    assert f"{model}: the dictionary" in err
    assert "is not the one that the model was trained with" in err
    assert "give the path of the same file with --dictionary" in err
    err = run(
        "predict",
        tmp_path,
        "--text",
        "Known asthma.",
        "--dictionary",
        other_dictionary,
        code=2,
    )[1]
    assert f"{tmp_path}: no model here" in err


# evaluate


def gold(path: Path, number: int = 30) -> tuple[np.ndarray, np.ndarray]:
    """Write invented patients whose notes name other diseases than their labels.

    Returns both as matrices.
    """
    rng = np.random.default_rng(2)
    labels, named = rng.integers(2, size=(2, number, 3))
    rows = []
    for patient in range(number):
        mentioned = [
            term for term, yes in zip(TERMS, named[patient], strict=True) if yes
        ]
        words = ("absent", "present")
        patient_labels = {
            t: words[x] for t, x in zip(TERMS, labels[patient], strict=True)
        }
        patient_labels["Zoster"] = "present"
        text = " ".join(f"Known {term}." for term in mentioned) or "Nothing."
        rows.append({"patient": patient, "text": text, "labels": patient_labels})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return labels, named


def test_evaluate_equals_scikit_learn(run: Run, model: Path, tmp_path: Path) -> None:
    labels, named = gold(tmp_path / "gold.jsonl")
    out, err = run("evaluate", model, tmp_path / "gold.jsonl", "--json")
    scores = json.loads(out)
    assert "left out Zoster, which the model does not have" in err
    each = []
    for column, term in enumerate(TERMS):
        term_scores = scores["by_output"][term]
        each.append(f1_score(labels[:, column], named[:, column], average="macro"))
        assert term_scores["macro"]["f1"] == pytest.approx(each[-1])
        assert (
            0
            <= term_scores["auroc"]["low"]
            <= term_scores["auroc"]["value"]
            <= term_scores["auroc"]["high"]
        )
        # TF-IDF's length 1
        ranks = named / np.sqrt(np.maximum(1, named.sum(1, keepdims=True)))
        area = roc_auc_score(labels[:, column], ranks[:, column])
        assert term_scores["auroc"]["value"] == pytest.approx(area)
    assert scores["macro"]["f1"] == pytest.approx(np.mean(each))
    printed = run("evaluate", model, tmp_path / "gold.jsonl")[0]
    assert f"{100 * np.mean(each):.1f}" in printed
    assert f" {100 * scores['ranking']['auroc']['value']:.1f} " in printed


def test_label_maps_rename_labels(model: Path, tmp_path: Path) -> None:
    row = {"patient": "p", "text": "Known gout.", "labels": {"GOUT": "present"}}
    path = tmp_path / "gold.jsonl"
    path.write_text(json.dumps(row), encoding="utf-8")
    with pytest.raises(
        DataError, match=r"labels for GOUT, but the model knows asthma.*`label_map`"
    ):
        evaluate(model, path)
    evaluation = evaluate(model, path, label_map={"GOUT": "gout"})
    assert (evaluation.scores["macro"]["f1"], evaluation.unknown) == (1.0, ())


def test_merged_labels_count_only_if_they_agree(
    run: Run, model: Path, tmp_path: Path
) -> None:
    """Of three patients one is labelled differently under the two names: it is no
    label."""
    path = tmp_path / "gold.jsonl"
    label_pairs = [("present", "present"), ("absent", "present"), ("absent", "absent")]
    rows = [
        {"patient": f"{NAME}{n}", "text": "Known gout." if n == 0 else "Well.",
         "labels": {"Foo": foo, "gout": gout}}
        for n, (foo, gout) in enumerate(label_pairs)
    ]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    out, err = run("evaluate", model, path, "--map", "Foo=gout", "--json")
    assert "renaming gives 1 pair of patient and phenotype two different labels" in err
    scores = json.loads(out)["by_output"]["gout"]
    assert [scores[name]["support"] for name in ("present", "absent")] == [1, 1]
    for order in (
        label_pairs,
        [pair[::-1] for pair in label_pairs],
    ):  # whichever name comes first
        for row, (foo, gout) in zip(rows, order, strict=True):
            row["labels"] = {"gout": gout, "Foo": foo}
        path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        assert (
            evaluate(model, path, label_map={"Foo": "gout"}).scores["macro"]["f1"]
            == 1.0
        )


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ("{", "gold.jsonl:2: not JSON"),
        ('{"patient": "p", "text": "x"}', None),
        ('{"patient": "p", "labels": {}}', 'gold.jsonl:2: expected the keys "patient"'),
        ('{"text": "x", "labels": {}}', 'gold.jsonl:2: the key "patient" is missing'),
        (
            '{"patient": "p", "text": "x", "labels": {"gout": "yes"}}',
            "gold.jsonl:2: a label is",
        ),
        (
            '{"patient": "p", "text": "x", "labels": {"gout": "absent"}}',
            "gold.jsonl:2: two different labels for one 'gout'",
        ),
    ],
)
def test_an_error_names_the_line_of_bad_labels(
    model: Path, tmp_path: Path, second: str, message: str | None
) -> None:
    first = {"patient": "p", "text": "Known gout.", "labels": {"gout": "present"}}
    path = tmp_path / "gold.jsonl"
    path.write_text(json.dumps(first) + "\n" + second + "\n", encoding="utf-8")
    if message is None:  # a further note of a patient needs no labels
        assert evaluate(model, path).scores["macro"]["f1"] == 1.0
        return
    with pytest.raises(DataError) as error:
        evaluate(model, path)
    assert message in str(error.value)


# a whole run

JOB = """\
title = "Tiny"
method = "phenotype"
conditions = ["alone", "federated"]
[synthetic]
sites = 2
patients = 60
[training]
cycles = 1
classifier_cycles = 2
minimum = 5
min_patients = 0
[model]
network = { embedding = 4, hidden = 4 }
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    folder = tmp_path_factory.mktemp("tiny")
    (folder / "job.toml").write_text(JOB, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        arguments = ["simulate", str(folder / "job.toml"), "--out", str(folder / "run")]
        patch.setattr(sys, "argv", ["fednotes", *arguments])
        app.main()
    torch.set_deterministic_debug_mode("default")
    return folder / "run"


@pytest.mark.slow
def test_a_job_is_checked_run_and_used_for_predictions(
    run: Run, tiny: Path, capsys: Any
) -> None:
    summary = json.loads((tiny / "summary.json").read_text(encoding="utf-8"))
    names = list(summary["mean"]["federated"]["by_output"])
    assert "Phenotypes" in (tiny / "report.html").read_text(encoding="utf-8")
    assert set(summary["micro"]) == {"alone", "federated"}
    out, _ = run("check", tiny.parent / "job.toml")
    assert all(word in out for word in ("without", "labelled", "test patients", *names))
    out, _ = run(
        "predict", tiny / "federated" / "model", "--text", "Known asthma and gout."
    )
    (finding,) = lines(out)
    assert list(finding["probabilities"]) == names
    out, _ = run("compare", tiny, tiny, "--samples", 20)
    for site in summary["sites"]:
        rows = [line for line in out.splitlines() if line.split()[:1] == [site]]
        assert rows
        assert not any("%" in row for row in rows)
    err = run("compare", tiny, tiny, "--metric", "relaxed", code=2)[1]
    assert "runs on patients are compared by macro F1" in err
