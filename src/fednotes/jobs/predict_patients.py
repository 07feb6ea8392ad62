"""A saved phenotyping model on new text: phenotypes of patients, or their billing codes."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fednotes.core.errors import ConfigError, DataError, ModelError
from fednotes.core.store import write_out
from fednotes.data.formats.files import visible
from fednotes.data.notes import read_notes
from fednotes.jobs.predict import documents_of, existing, given, require_apart, require_mapping
from fednotes.metrics.classification import ClassCounts, rankings
from fednotes.patients.cohort import LABELS, PRESENT, UNLABELLED, Bags, Vectors
from fednotes.patients.concepts import by_patient
from fednotes.patients.features import opened
from fednotes.patients.labels import read_beside, read_gold, read_texts, renamed
from fednotes.patients.phenotyper import Phenotyper, load_phenotyper


def predict_patients(
    model: Path,
    path: str,
    format: str,
    out: Path | None,
    device: str,
    place: str | None = None,
    *,
    text: str | None = None,
) -> None:
    """Predict phenotypes by patient and write them; after stage 1 alone, billing codes.

    Each patient's result says how many mentions of concepts it rests on ("concepts"), where the
    model reads concepts: without any it says nothing of the patient.

    path, text: as in `predict_text`; a note without a patient is a patient of its own, by its id.
    place: where the model's dictionary, or encoder, is now, if it has moved.
    Counts of patients without concepts or with too many go to stderr.

    Raises ConfigError for a format of mentions, DataError for bad files, ModelError.
    """
    if format not in ("jsonl", "csv"):
        raise ConfigError(f"phenotypes are written as jsonl or csv: {format} is for mentions")
    if out is not None:
        require_apart(path, out)
    phenotyper = load_phenotyper(model, device)
    patients, inputs = _read_patients(model, phenotyper, notes_of(path, text), place)
    results = _results(phenotyper, patients, inputs)
    if format == "csv":
        what = "phenotype" if phenotyper.phenotypes else "code"
        written = _csv(results, what, isinstance(inputs, Bags))
    else:
        written = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in results)
    if out is not None:
        write_out(out, written)
    else:
        sys.stdout.write(written)


def notes_of(name: str, text: str | None = None) -> dict[str, list[str]]:
    """Texts by patient from a file or folder of notes, stdin, or the text given.

    Raises DataError as `documents_of`, and for a path without any note.
    """
    if name == "-":
        return {document.id: [document.text] for document in documents_of(name, text)}
    if text is not None:
        given(name, text)
    path = existing(name)
    records = [path] if path.name.lower().endswith((".xml", ".xml.gz")) else []
    if path.is_dir():  # the obesity challenge's summaries, without its annotations
        records = [p for p in visible(path) if "patient_records" in p.name.lower()]
    notes = by_patient(read_texts(records) if records else read_notes(path))
    if not notes:
        raise DataError(f"{path}: no note here has any text")
    return notes


def _read_patients(
    folder: Path, model: Phenotyper, notes: Mapping[str, Sequence[str]], place: str | None
) -> tuple[tuple[str, ...], Bags | Vectors]:
    """What the model sees of each patient; those who are left out are told on stderr.

    Raises ModelError that names the model's folder.
    """
    try:
        features = opened(model.space.recipe, place)
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from error
    made = features.make(notes, None, None)
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
    """{"patient", "concepts", "probabilities": of present, "labels"}; None if never learnt.

    concepts: mentions found in the patient's notes; left out for vectors of text.
    """
    heads: list[dict[str, Any]] = [{"patient": patient} for patient in patients]
    if isinstance(inputs, Bags):
        for head, found in zip(heads, inputs.sizes.tolist(), strict=True):
            head["concepts"] = found
    if not model.phenotypes:
        for head, row in zip(heads, model.code_probabilities(inputs), strict=True):
            named = zip(model.code_names, row.tolist(), strict=True)
            yield {**head, "probabilities": {code: round(p, 6) for code, p in named}}
        return
    words = {value: word for word, value in LABELS.items()}
    chances, classes = model.probabilities(inputs)[:, :, PRESENT], model.classes(inputs)
    for head, row, own in zip(heads, chances.tolist(), classes.tolist(), strict=True):
        labels = {name: words.get(c) for name, c in zip(model.phenotypes, own, strict=True)}
        named = zip(model.phenotypes, row, strict=True)
        yield {
            **head,
            "probabilities": {n: round(p, 6) if labels[n] else None for n, p in named},
            "labels": labels,
        }


def _csv(results: Iterator[dict[str, Any]], what: str, counted: bool) -> str:
    """A row for each patient and phenotype (or code), with a heading.

    counted: whether results have "concepts", the last column.
    """
    buffer = io.StringIO()
    table = csv.writer(buffer, lineterminator="\n")
    labelled = what == "phenotype"
    last = ["concepts"] if counted else []
    table.writerow(["patient", what, "probability", *(["label"] if labelled else []), *last])
    for each in results:
        for name, p in each["probabilities"].items():
            label = [each["labels"][name]] if labelled else []
            table.writerow([each["patient"], name, p, *label, *(each[key] for key in last)])
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
    them (`patients/labels.py`); what is wrong in it goes to stderr. label_map, place: as in
    `evaluate_path`, `predict_patients`; where two labels of a patient come to the same phenotype
    and differ, neither holds, and how many there are goes to stderr.
    Raises DataError if no phenotype is in common.
    """
    phenotyper = load_phenotyper(model, device)
    if phenotyper.machines is None:
        raise ConfigError(f"{model} ends with stage 1: it predicts codes, no phenotypes to score")
    if labels is None:
        notes, gold = read_gold(path)
    else:
        notes, gold, told = read_beside(notes_of(str(path)), path, labels)
        for line in told:
            print(f"note: {line}", file=sys.stderr)
        if not gold:
            raise DataError(
                f"{labels}: no patient with notes in {path} is labelled: are ids the same?"
            )
    before = tuple(dict.fromkeys(name for own in gold.values() for name in own))
    require_mapping(label_map or {}, before, phenotyper.phenotypes, labels or path)
    gold, found, clashes = renamed(gold, label_map or {})
    if clashes:
        print(
            f"note: {clashes} pair(s) of patient and phenotype have two different labels after "
            "--map: neither holds",
            file=sys.stderr,
        )
    if not set(found) & set(phenotyper.phenotypes):
        raise DataError(
            f"{labels or path} labels {', '.join(found) or 'nothing'}, the model knows "
            f"{', '.join(phenotyper.phenotypes)}: name them alike with --map OLD=NEW"
        )
    patients, inputs = _read_patients(model, phenotyper, notes, place)
    names = phenotyper.phenotypes
    rows = [[gold[p].get(n, UNLABELLED) for n in names] for p in patients]
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
