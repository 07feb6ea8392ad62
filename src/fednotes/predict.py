"""A saved model on new text: mentions in documents, or phenotypes of patients."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from fednotes.core.errors import ConfigError, DataError
from fednotes.core.store import write_text
from fednotes.core.types import Document
from fednotes.data.cohort import ABSENT, PRESENT, QUESTIONABLE, UNLABELLED, Bags, Vectors
from fednotes.data.concepts import by_patient
from fednotes.data.formats import FORMATS, guess_format, read
from fednotes.data.label_table import read_labels
from fednotes.data.notes import read_notes
from fednotes.data.obesity import read_obesity, read_texts
from fednotes.data.tags import flatten, relabel, types_of
from fednotes.display import number_of
from fednotes.metrics.classification import ClassCounts, rankings
from fednotes.metrics.spans import SpanCounts
from fednotes.models.phenotyper import Phenotyper, load_phenotyper
from fednotes.models.saving import load_model
from fednotes.patient_features import opened

_NAME = 100  # characters of a path that a message shows
_NO_GOLD = "no JSON: expected one whole object a line, or --labels with a table beside the notes"
_LABELS = {"absent": ABSENT, "present": PRESENT, "questionable": QUESTIONABLE}


def predict_text(
    model: Path,
    text: str,
    format: str,
    out: Path | None,
    device: str,
    backbone: str | None = None,
) -> None:
    """Predict and write. text: a path, `-` for stdin, or the text itself.

    backbone: where the frozen encoder is, if it has moved since the model was saved.

    Raises ConfigError where brat is asked for without a folder, DataError for a bad file.
    """
    if format == "csv":
        raise ConfigError("csv is for phenotypes of patients: mentions are jsonl, brat or conll")
    if format == "brat" and out is None:
        raise ConfigError("brat is a folder of files: give --out FOLDER")
    recogniser = load_model(model, device, backbone)
    predicted = recogniser.predict(documents_of(text))
    if out is not None:
        FORMATS[format].write(predicted, out)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "predictions"
        FORMATS[format].write(predicted, path)
        sys.stdout.write(path.read_text(encoding="utf-8"))


def documents_of(text: str) -> tuple[Document, ...]:
    """Documents from a corpus file or folder, plain text files, stdin or the text itself.

    Raises DataError for a single word that is no path, and for what cannot be read.
    """
    if text == "-":
        return (Document("stdin", _decoded("stdin", sys.stdin.buffer.read())),)
    path = _path(text)
    if path is None:
        return (Document("text", _decoded("the text", os.fsencode(text))),)
    try:
        format = guess_format(path)
    except DataError:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        if not files or (path.is_dir() and any(file.suffix != ".txt" for file in files)):
            raise
        return tuple(Document(f.stem, _decoded(str(f), f.read_bytes())) for f in files)
    return read(path, format)


def _path(text: str) -> Path | None:
    """The file or folder that is meant, or None for text. Raises DataError for a single word."""
    path = Path(text)
    try:
        exists = bool(text.strip()) and path.exists()
    except (OSError, ValueError):  # a text longer than a path may be
        exists = False
    if exists:
        return path
    if text.split() == [text]:  # rather a slip in a path than a note of one word
        name = text if len(text) <= _NAME else f"{text[:_NAME]}…"
        raise DataError(f"{name}: no such file; for text give more than one word or use -")
    return None


def _decoded(source: str, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{source}: not UTF-8 at byte {error.start}: convert it first") from error


def evaluate_path(
    model: Path,
    path: Path,
    format: str | None,
    device: str,
    label_map: Mapping[str, str] | None = None,
    backbone: str | None = None,
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Scores of a saved model on annotated documents, and the labels that it does not know.

    label_map: as in the job; unknown labels are left out of the scores. backbone: as in
    `predict_text`.
    Raises DataError if the file annotates none of the model's types.
    """
    recogniser = load_model(model, device, backbone)
    documents = relabel(read(path, format), label_map or {}, None)
    types, found = recogniser.tagset.types, types_of(documents)
    if not set(found) & set(types):
        raise DataError(
            f"{path} annotates {', '.join(found) or 'nothing'}, the model knows "
            f"{', '.join(types)}: no label is common; name them alike with --map OLD=NEW"
        )
    gold = tuple(
        replace(d, spans=flatten(d.spans, "outermost")[0]) for d in relabel(documents, {}, types)
    )
    scores = SpanCounts.of(gold, recogniser.predict(gold), types=types).scores()
    return scores, tuple(label for label in found if label not in types)


def score_table(scores: dict[str, Any]) -> Table:
    """Precision, recall and F1 in percent, all types together and one by one."""
    table = Table()
    for head in ("type", "mentions", "strict P", "R", "F1", "relaxed P", "R", "F1"):
        table.add_column(head, justify="left" if head == "type" else "right")
    for label, score in scores["by_type"].items():
        table.add_row(Text(label), str(score["support"]), *_numbers(score))
    table.add_section()
    support = sum(score["support"] for score in scores["by_type"].values())
    table.add_row("all", str(support), *_numbers(scores), style="bold")
    return table


def _numbers(score: dict[str, Any]) -> list[str]:
    return [
        f"{100 * score[kind][key]:.1f}"
        for kind in ("strict", "relaxed")
        for key in ("precision", "recall", "f1")
    ]


# phenotypes of patients


def predict_patients(
    model: Path, text: str, format: str, out: Path | None, device: str, place: str | None = None
) -> None:
    """Predict phenotypes by patient and write them; after stage 1 alone, billing codes.

    text: as in `predict_text`; a note without a patient is a patient of its own, by its id.
    place: where the model's dictionary, or encoder, is now, if it has moved.
    Counts of patients without concepts or with too many go to stderr.

    Raises ConfigError for a format of mentions, DataError for bad files, ModelError.
    """
    if format not in ("jsonl", "csv"):
        raise ConfigError(f"phenotypes are written as jsonl or csv: {format} is for mentions")
    phenotyper = load_phenotyper(model, device)
    patients, inputs = _read_patients(phenotyper, notes_of(text), place)
    results = _results(phenotyper, patients, inputs)
    if format == "csv":
        written = _csv(results, "phenotype" if phenotyper.phenotypes else "code")
    else:
        written = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in results)
    if out is not None:
        write_text(out, written)
    else:
        sys.stdout.write(written)


def notes_of(text: str) -> dict[str, list[str]]:
    """Texts by patient from a file or folder of notes, stdin or the text itself.

    Raises DataError as `documents_of`, and for a path without any note.
    """
    path = None if text == "-" else _path(text)
    if path is None:
        return {document.id: [document.text] for document in documents_of(text)}
    records = [path] if path.name.lower().endswith((".xml", ".xml.gz")) else []
    if path.is_dir():  # the obesity challenge's summaries, without its annotations
        records = sorted(p for p in path.iterdir() if "patient_records" in p.name.lower())
    notes = by_patient(read_texts(records) if records else read_notes(path))
    if not notes:
        raise DataError(f"{path}: no note here has any text")
    return notes


def _read_patients(
    model: Phenotyper, notes: Mapping[str, Sequence[str]], place: str | None
) -> tuple[tuple[str, ...], Bags | Vectors]:
    """What the model sees of each patient; those who are left out are told on stderr."""
    made = opened(model.space.recipe, place).make(notes, None, None)
    left_out, without = made.counts["left_out"], made.counts["without"]
    if left_out:
        print(f"note: {left_out} patient(s) left out: too many concepts", file=sys.stderr)
    if without:
        found = "no word" if model.space.dense else "no concept of the dictionary"
        print(
            f"note: {without} of {len(made.patients)} patient(s) have {found} in their notes: "
            "their results say nothing of them",
            file=sys.stderr,
        )
    return made.patients, made.values


def _results(
    model: Phenotyper, patients: Sequence[str], inputs: Bags | Vectors
) -> Iterator[dict[str, Any]]:
    """{"patient", "probabilities": of present, "labels"}; None for what was never learnt."""
    if not model.phenotypes:
        for patient, row in zip(patients, model.code_probabilities(inputs), strict=True):
            named = zip(model.code_names, row.tolist(), strict=True)
            yield {"patient": patient, "probabilities": {code: round(p, 6) for code, p in named}}
        return
    words = {value: word for word, value in _LABELS.items()}
    chances, classes = model.probabilities(inputs)[:, :, PRESENT], model.classes(inputs)
    for patient, row, given in zip(patients, chances.tolist(), classes.tolist(), strict=True):
        labels = {name: words.get(c) for name, c in zip(model.phenotypes, given, strict=True)}
        named = zip(model.phenotypes, row, strict=True)
        yield {
            "patient": patient,
            "probabilities": {n: round(p, 6) if labels[n] else None for n, p in named},
            "labels": labels,
        }


def _csv(results: Iterator[dict[str, Any]], what: str) -> str:
    """A row for each patient and phenotype (or code), with a heading."""
    buffer = io.StringIO()
    table = csv.writer(buffer, lineterminator="\n")
    labelled = what == "phenotype"
    table.writerow(["patient", what, "probability", *(["label"] if labelled else [])])
    for each in results:
        for name, p in each["probabilities"].items():
            label = [each["labels"][name]] if labelled else []
            table.writerow([each["patient"], name, p, *label])
    return buffer.getvalue()


def evaluate_patients(
    model: Path,
    path: Path,
    device: str,
    label_map: Mapping[str, str] | None = None,
    place: str | None = None,
    labels: Path | None = None,
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Scores of a phenotyping model on labelled patients, and the phenotypes it does not know.

    path: a folder of the i2b2 2008 obesity challenge (intuitive judgments), or JSON lines with
    "patient", "text" and "labels" ({name: "present" | "absent" | "questionable"}), several lines
    a patient if need be; or, with `labels`, notes as in `predict_patients`. labels: a table of
    them (`data/label_table.py`); what is wrong in it goes to stderr. label_map, place: as in
    `evaluate_path`, `predict_patients`.
    Raises DataError if no phenotype is in common.
    """
    phenotyper = load_phenotyper(model, device)
    if phenotyper.machines is None:
        raise ConfigError(f"{model} ends with stage 1: it predicts codes, no phenotypes to score")
    notes, gold = _gold(path) if labels is None else _gold_beside(path, labels)
    renamed = {
        patient: {(label_map or {}).get(name, name): label for name, label in of.items()}
        for patient, of in gold.items()
    }
    found = tuple(dict.fromkeys(name for of in renamed.values() for name in of))
    if not set(found) & set(phenotyper.phenotypes):
        raise DataError(
            f"{labels or path} labels {', '.join(found) or 'nothing'}, the model knows "
            f"{', '.join(phenotyper.phenotypes)}: name them alike with --map OLD=NEW"
        )
    patients, inputs = _read_patients(phenotyper, notes, place)
    names = phenotyper.phenotypes
    rows = [[renamed[p].get(n, UNLABELLED) for n in names] for p in patients]
    truth = np.array(rows, np.int8).reshape(len(patients), len(names))
    counts = ClassCounts.of(truth, phenotyper.classes(inputs), names, phenotyper.machines.classes)
    ranked = rankings(truth, phenotyper.probabilities(inputs)[:, :, PRESENT], names)
    scores = counts.scores()
    by_output = {
        name: {**of, **{area: ranked["by_output"][name][area] for area in ("auroc", "auprc")}}
        for name, of in scores["by_output"].items()
    }
    unknown = tuple(name for name in found if name not in names)
    return {**scores, "ranking": ranked["macro"], "by_output": by_output}, unknown


Gold = dict[str, dict[str, int]]  # patient → phenotype → label


def _gold(path: Path) -> tuple[dict[str, list[str]], Gold]:
    """Texts and labels by patient. Raises DataError naming file and line."""
    if path.is_dir():
        read = read_obesity(path)
        labels = read.labels.tolist()
        gold = {
            note.id: {d: c for d, c in zip(read.diseases, row, strict=True) if c != UNLABELLED}
            for note, row in zip(read.notes, labels, strict=True)
        }
        return by_patient(read.notes), gold
    notes: dict[str, list[str]] = {}
    gold = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            patient, text, given = _gold_line(path, number, line)
            notes.setdefault(patient, []).append(text)
            known = gold.setdefault(patient, {})
            for name, word in given.items():
                if not isinstance(word, str) or word not in _LABELS:
                    expected = ", ".join(_LABELS)
                    raise DataError.at(path, number, f"a label is none of {expected}")
                if known.setdefault(name, _LABELS[word]) != _LABELS[word]:
                    raise DataError.at(path, number, f"two different labels of one {name!r}")
    return notes, gold


def _gold_beside(path: Path, labels: Path) -> tuple[dict[str, list[str]], Gold]:
    """Texts of notes and labels of a table, of the patients who have both."""
    notes, table = notes_of(str(path)), read_labels(labels)
    told = list(table.lines())
    gold = {patient: of for patient in notes if (of := table.of(patient))}
    if noteless := len(set(table.values) - set(notes)):
        told.append(f"{noteless} labelled patient(s) have no notes in {path}: left out")
    if bare := len(notes) - len(gold):
        told.append(f"{bare} patient(s) have notes and no label: left out")
    for line in told:
        print(f"note: {line}", file=sys.stderr)
    if not gold:
        raise DataError(f"{labels}: no patient with notes in {path} is labelled: are ids the same?")
    return {patient: notes[patient] for patient in gold}, gold


def _gold_line(path: Path, number: int, line: bytes) -> tuple[str, str, dict[str, Any]]:
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        raise DataError.at(path, number, _NO_GOLD) from None
    values = [record.get(k) for k in ("patient", "text", "labels")] if type(record) is dict else []
    if not values or not isinstance(values[1], str) or not isinstance(values[2] or {}, dict):
        raise DataError.at(path, number, 'expected the keys "patient", "text" and "labels"')
    if not isinstance(values[0], str | int):
        raise DataError.at(path, number, 'the key "patient" is missing or no id')
    return str(values[0]), values[1], values[2] or {}


def patient_score_table(scores: dict[str, Any]) -> Table:
    """Each disease: its patients, the mean over its classes in percent, AUROC; then the average."""
    table = Table()
    for head in ("phenotype", "present", "absent", "P", "R", "F1", "AUROC", "95 %"):
        table.add_column(head, justify="left" if head == "phenotype" else "right")
    for name, score in scores["by_output"].items():
        numbers = [str(score.get(kind, {}).get("support", 0)) for kind in ("present", "absent")]
        table.add_row(Text(name), *numbers, *_shares(score["macro"], score["auroc"]))
    table.add_section()
    table.add_row(
        "average", "", "", *_shares(scores["macro"], scores["ranking"]["auroc"]), style="bold"
    )
    return table


def _shares(macro: dict[str, Any], area: dict[str, Any]) -> list[str]:
    bounds = ""
    if area["low"] is not None:
        bounds = f"{area['low']:.2f}–{area['high']:.2f}"
    numbers = [number_of(macro[key]) for key in ("precision", "recall", "f1")]
    return [*numbers, number_of(area["value"], 1, 3), bounds]
