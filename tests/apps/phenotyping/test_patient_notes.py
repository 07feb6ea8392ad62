"""Notes of patients are read one at a time, and predictions do not depend on it.

Memory is the peak of `tracemalloc` for the same patients with short and with long
notes: it must not grow with the text.
"""

from __future__ import annotations

import csv
import json
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
from patient_files import save_model

from fednotes.apps.phenotyping import patient_notes
from fednotes.apps.phenotyping.cohort import Bags, FeatureSpace, Vectors
from fednotes.apps.phenotyping.concepts import Matcher, group_by_patient
from fednotes.apps.phenotyping.context import Option
from fednotes.apps.phenotyping.features import (
    ConceptFeatures,
    ConceptsConfig,
    TextFeatures,
    build_features,
)
from fednotes.apps.phenotyping.model import PhenotypeModel
from fednotes.apps.phenotyping.patient_notes import read_patient_notes
from fednotes.apps.phenotyping.synthetic import build_synthetic_dictionary
from fednotes.core.errors import DataError
from fednotes.data.notes import Note, read_notes
from fednotes.data.text import Passage
from fednotes.jobs.patient_models import PatientNote
from fednotes.jobs.predict import predict
from fednotes.jobs.saved_models import EvaluationOptions, LoadOptions, NoteSource

TERMS = ("asthma", "gout", "hypertension")
NOTES = [
    PatientNote("b", "Known asthma. No evidence of gout."),
    PatientNote("a", "Known gout, hypertension and gout."),
    PatientNote("b", "Known gout. Her mother had asthma."),
    PatientNote("c", "Seen today."),
    PatientNote("a", "Asthma is denied. Seen with hypertension."),
    PatientNote("a", "..."),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PhenotypeModel:
    folder = tmp_path_factory.mktemp("model") / "model"
    return PhenotypeModel.load(
        save_model(folder, "synthetic", Path(), *TERMS), LoadOptions()
    )


def write_csv(path: Path, rows: Sequence[Sequence[str]]) -> Path:
    """Write a table of patients and texts."""
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(["patient", "text"])
        table.writerows(rows)
    return path


def texts_by_patient(notes: Sequence[PatientNote]) -> dict[str, list[str]]:
    """Return all texts of each patient."""
    texts: dict[str, list[str]] = {}
    for note in notes:
        texts.setdefault(note.patient, []).append(note.text)
    return texts


# ---- predictions ---------------------------------------------------------------------


@pytest.mark.parametrize("context", get_args(Option))
@pytest.mark.parametrize("max_concepts", [2, 10_000])
def test_bags_of_a_stream_equal_those_of_all_texts_of_a_patient(
    context: Option, max_concepts: int
) -> None:
    matcher = Matcher(build_synthetic_dictionary(), context)
    space = FeatureSpace(matcher.vocabulary, dense=False, recipe={})
    features = ConceptFeatures(matcher, space, max_concepts)
    texts = {"no notes": [], **texts_by_patient(NOTES)}
    bags = {
        patient: matcher.make_bag(own_texts) for patient, own_texts in texts.items()
    }
    expected = {
        patient: bag.tolist()
        for patient, bag in bags.items()
        if len(bag) <= max_concepts
    }

    inputs = features.make_from_stream(iter(NOTES), ["no notes"])

    assert isinstance(inputs.values, Bags)
    bounds = inputs.values.offsets.tolist()
    concepts_by_patient = {
        patient: inputs.values.concepts[start:end].tolist()
        for patient, start, end in zip(
            inputs.patients, bounds[:-1], bounds[1:], strict=True
        )
    }
    assert list(concepts_by_patient.items()) == list(expected.items())
    assert inputs.counts["left_out"] == len(bags) - len(expected)
    assert ("a" in inputs.patients) == (max_concepts > 2)
    assert inputs.counts["without_features"] == 2

    none_left = ConceptFeatures(matcher, space, 0).make_from_stream(
        note for note in NOTES if bags[note.patient or note.id].size
    )
    assert none_left.counts["without_features"] == 0

    patient_features = features.make(texts)
    assert isinstance(patient_features.values, Bags)
    assert patient_features.patients == inputs.patients
    np.testing.assert_array_equal(
        patient_features.values.concepts, inputs.values.concepts
    )
    np.testing.assert_array_equal(
        patient_features.values.offsets, inputs.values.offsets
    )
    assert {
        name: patient_features.counts[name] for name in inputs.counts
    } == inputs.counts


def test_vectors_of_a_stream_equal_the_means_over_all_notes_of_a_patient() -> None:
    rng = np.random.default_rng(5)
    word_vectors: dict[str, np.ndarray] = {}

    def encode_words(words: Sequence[str]) -> np.ndarray:
        """Return a random (layers, dim) matrix for each word, the same for equal
        ones."""
        for word in words:
            if word not in word_vectors:
                word_vectors[word] = rng.normal(size=(3, 8)).astype(np.float32)
        return np.stack([word_vectors[word] for word in words])

    def encode(passages: Sequence[Passage]) -> np.ndarray:
        words = [word for passage in passages for word in passage.text.split()]
        return encode_words(words)

    encoder: Any = SimpleNamespace(encode=encode)
    space = FeatureSpace(24, dense=True, recipe={"fingerprint": "f"})
    features = TextFeatures(encoder, space)
    filler = " ".join(f"w{number}" for number in range(50))
    notes = [
        PatientNote("b" if number % 3 else "a", f"{filler} n{number}.")
        for number in range(200)
    ]
    notes.append(PatientNote("no word", " \n "))
    expected = []
    for own_texts in texts_by_patient(notes[:-1]).values():
        means = [
            encode_words(text.split()).astype(np.float64).mean(0).reshape(24)
            for text in own_texts
        ]
        expected.append(np.mean(means, axis=0))
    expected.append(np.zeros(24))

    inputs = features.make_from_stream(iter(notes), [])

    assert inputs.patients == ("a", "b", "no word")
    assert isinstance(inputs.values, Vectors)
    np.testing.assert_array_equal(inputs.values.values, np.float32(expected))
    assert inputs.counts == {"left_out": 0, "without_features": 1}
    patient_features = features.make(texts_by_patient(notes))
    assert isinstance(patient_features.values, Vectors)
    np.testing.assert_array_equal(inputs.values.values, patient_features.values.values)


def test_predictions_of_a_stream_equal_those_of_notes_in_memory(
    model: PhenotypeModel, tmp_path: Path
) -> None:
    rows = [[note.patient, note.text] for note in NOTES]
    path = write_csv(tmp_path / "notes.csv", [*rows, ["", "Known gout."]])
    inputs = model.reader.features.make(group_by_patient(read_notes(path)))
    expected = list(model.reader.predict_rows(inputs))

    formatted = model.format_findings(read_patient_notes(str(path)), "jsonl")

    assert [json.loads(line) for line in formatted.splitlines()] == expected
    assert [row["patient"] for row in expected[:3]] == ["b", "a", "c"]
    assert len(expected) == 4  # a note without a patient is a patient of its own
    findings = model.predict_file(path)
    assert [finding.patient for finding in findings] == [
        row["patient"] for row in expected
    ]
    assert [finding.probabilities for finding in findings] == [
        row["probabilities"] for row in expected
    ]


def test_a_patient_without_notes_keeps_its_position(model: PhenotypeModel) -> None:
    findings = model.find({"a": ["Known gout."], "b": [], "c": ["Known asthma."]})
    assert [(each.patient, each.concepts) for each in findings] == [
        ("a", 1),
        ("b", 0),
        ("c", 1),
    ]


def test_a_patient_with_too_many_concepts_has_an_empty_finding(
    tmp_path: Path,
) -> None:
    place = save_model(tmp_path / "model", "synthetic", Path(), *TERMS)
    model = PhenotypeModel.load(place, LoadOptions())
    config = ConceptsConfig(dictionary="synthetic", most=1)
    features = build_features(config, Path())
    reader = type(model.reader)(model.reader.model, features)
    findings = PhenotypeModel(reader).find(
        {"a": ["Known gout.", "Known asthma."], "b": ["Known gout."]}
    )
    assert [each.patient for each in findings] == ["a", "b"]
    assert (findings[0].labels, findings[0].concepts) == ({}, None)
    assert findings[1].labels["gout"] == "present"


# ---- files ---------------------------------------------------------------------------


def test_a_prediction_reads_each_note_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first note is also read before the model is loaded."""
    seen: list[str] = []

    def read(*arguments: Any, **options: Any) -> Iterator[Note]:
        for note in read_notes(*arguments, **options):
            seen.append(note.text)
            yield note

    monkeypatch.setattr(patient_notes, "read_notes", read)
    folder = save_model(tmp_path / "model", "synthetic", Path(), *TERMS)
    path = write_csv(tmp_path / "notes.csv", [[n.patient, n.text] for n in NOTES])
    assert predict(folder, NoteSource(str(path))) == len(NOTES)
    assert seen == [NOTES[0].text, *(note.text for note in NOTES)]


def test_notes_are_read_again_at_each_iteration(tmp_path: Path) -> None:
    rows = [[note.patient, note.text] for note in NOTES]
    notes = read_patient_notes(str(write_csv(tmp_path / "notes.csv", rows)))
    assert notes.list_patients() == ("b", "a", "c")
    assert list(notes) == list(notes) == NOTES


def test_a_file_without_any_text_is_refused(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "notes.csv", [["a", " "]])
    with pytest.raises(DataError, match="contains no notes with text"):
        read_patient_notes(str(path))


def test_the_repr_of_a_note_shows_no_text(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "notes.csv", [["Zebulon", "Known gout."]])
    notes = read_patient_notes(str(path))
    for text in (repr(notes), repr(list(notes))):
        assert "Zebulon" not in text
        assert "gout" not in text


# ---- memory --------------------------------------------------------------------------

PATIENTS = 20
NOTES_OF_A_PATIENT = 10
LONG = 40_000  # characters of a long note: 8 MB in all
ALLOWED_GROWTH = 2_000_000  # bytes: a few notes at a time, and the reader's buffers

Use = Callable[[PhenotypeModel, Path, Path], object]


def predict_file(model: PhenotypeModel, notes: Path, labels: Path) -> object:
    return model.predict_file(notes)


def write_predictions(model: PhenotypeModel, notes: Path, labels: Path) -> object:
    return model.format_findings(read_patient_notes(str(notes)), "jsonl")


def evaluate_with_table(model: PhenotypeModel, notes: Path, labels: Path) -> object:
    return model.evaluate(notes, EvaluationOptions(labels=labels))


def evaluate_json_lines(model: PhenotypeModel, notes: Path, labels: Path) -> object:
    return model.evaluate(notes)


def rows_of_notes(characters: int) -> Iterator[dict[str, Any]]:
    """Yield notes that name a disease and are as long as asked; patients alternate."""
    for number in range(PATIENTS * NOTES_OF_A_PATIENT):
        patient = number % PATIENTS
        disease = TERMS[patient % len(TERMS)]
        text = f"Known {disease}. " + "filler" * (characters // 6)
        labels = {disease: "present"}
        yield {"patient": f"p{patient}", "text": text, "labels": labels}


@pytest.mark.parametrize(
    "use", [predict_file, write_predictions, evaluate_with_table, evaluate_json_lines]
)
def test_memory_does_not_grow_with_the_text(
    model: PhenotypeModel, tmp_path: Path, use: Use
) -> None:
    labels = tmp_path / "labels.csv"
    pairs = [f"p{at},{TERMS[at % len(TERMS)]},present" for at in range(PATIENTS)]
    labels.write_text("\n".join(["patient,phenotype,label", *pairs]) + "\n")

    def peak(characters: int) -> int:
        """Return the bytes that Python holds at most while the model reads notes."""
        path = tmp_path / f"{characters}.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for row in rows_of_notes(characters):
                file.write(json.dumps(row) + "\n")
        tracemalloc.start()
        try:
            use(model, path, labels)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(60)  # whatever is loaded once
    growth = peak(LONG) - peak(60)
    assert growth < ALLOWED_GROWTH < PATIENTS * NOTES_OF_A_PATIENT * LONG / 3
