"""Use a saved phenotyping model on notes: phenotypes of patients, or billing codes."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fednotes.apps.phenotyping.cohort import LABELS, PRESENT, UNLABELLED, Bags
from fednotes.apps.phenotyping.concepts import PatientInputs
from fednotes.apps.phenotyping.features import Features, load_features
from fednotes.apps.phenotyping.gold import (
    Gold,
    read_gold,
    read_gold_table,
    rename_labels,
)
from fednotes.apps.phenotyping.patient_notes import read_patient_notes
from fednotes.apps.phenotyping.phenotyper import Phenotyper
from fednotes.core.errors import (
    ConfigError,
    DataError,
    LabelError,
    ModelError,
    ParameterError,
    naming_place,
)
from fednotes.core.wording import format_count
from fednotes.data.encodings import AUTO, reading_as
from fednotes.data.notes import NotePlace
from fednotes.jobs.evaluation import Evaluation, check_label_map
from fednotes.jobs.inputs import name_of_notes
from fednotes.jobs.patient_models import ComputeFeatures, PatientNote
from fednotes.metrics.classification import ClassCounts, measure_rankings

_DECIMALS = 6  # digits of a probability after the decimal point
_LABEL_NAMES = {value: name for name, value in LABELS.items()}

Row = dict[str, Any]


@dataclass(frozen=True, eq=False)
class PatientReader:
    """A phenotyping model, and the dictionary or encoder that it reads notes with.

    Attributes:
        model: The model.
        features: Computes the model's inputs from notes.
    """

    model: Phenotyper
    features: Features

    @classmethod
    def load(
        cls, folder: Path, model: Phenotyper, place: str | None = None
    ) -> PatientReader:
        """Return a reader for a saved model.

        Args:
            folder: The model's folder, for messages.
            model: The model.
            place: New location of its dictionary or encoder, if it has moved.

        Raises:
            ModelError: The dictionary or encoder cannot be read, or is a different one.
        """
        with naming_place(str(folder), ModelError):
            return cls(model, load_features(model.space.recipe, place))

    def read(
        self,
        notes: Iterable[PatientNote],
        patients: Iterable[str] = (),
        compute: ComputeFeatures | None = None,
    ) -> PatientInputs:
        """Return each patient's inputs to the model, with one note in memory at a time.

        Args:
            notes: The notes, in any order of patients.
            patients: Patients to list first, even if they have no notes.
            compute: Computes the features of notes; in this process if it is None.
        """
        return self.features.make_from_stream(notes, patients, compute)

    def warn_about_empty_results(self, inputs: PatientInputs) -> None:
        """Print on stderr how many patients have no result, or an empty one."""
        left_out = inputs.counts["left_out"]
        if left_out:
            print(
                f"note: left out {format_count(left_out, 'patient')} with too many "
                "concepts",
                file=sys.stderr,
            )
        without = inputs.counts["without_features"]
        if without:
            nothing = "no concepts of the dictionary"
            if self.model.space.dense:
                nothing = "no words"
            print(
                f"note: found {nothing} in the notes of {without:,} of "
                f"{format_count(len(inputs.patients), 'patient')}, so the results "
                "say nothing about these patients",
                file=sys.stderr,
            )

    def predict_rows(self, inputs: PatientInputs) -> Iterator[Row]:
        """Yield the result of each patient.

        Args:
            inputs: The result of `read`.

        Yields:
            `patient`; `concepts`, the number of mentions in the patient's notes, unless
            the model reads vectors; `probabilities` of phenotypes being present, or of
            codes; and `labels`, if the model has phenotypes. Both are None for a
            phenotype that the model has not learned.
        """
        heads: list[Row] = [{"patient": patient} for patient in inputs.patients]
        if isinstance(inputs.values, Bags):
            sizes = inputs.values.sizes.tolist()
            for head, size in zip(heads, sizes, strict=True):
                head["concepts"] = size
        if self.model.phenotypes:
            predictions = self._predict_phenotypes(inputs)
        else:
            predictions = self._predict_codes(inputs)
        for head, prediction in zip(heads, predictions, strict=True):
            yield {**head, **prediction}

    def _predict_codes(self, inputs: PatientInputs) -> Iterator[Row]:
        """Yield the probabilities of each patient's codes."""
        names = self.model.code_names
        for row in self.model.predict_code_probabilities(inputs.values).tolist():
            probabilities = {
                name: round(probability, _DECIMALS)
                for name, probability in zip(names, row, strict=True)
            }
            yield {"probabilities": probabilities}

    def _predict_phenotypes(self, inputs: PatientInputs) -> Iterator[Row]:
        """Yield the probabilities and labels of each patient's phenotypes."""
        names = self.model.phenotypes
        predicted = self.model.predict(inputs.values)
        present = predicted.probabilities[:, :, PRESENT].tolist()
        for row, patient_classes in zip(
            present, predicted.classes.tolist(), strict=True
        ):
            labels = {
                name: _LABEL_NAMES.get(value)
                for name, value in zip(names, patient_classes, strict=True)
            }
            probabilities = {
                name: round(probability, _DECIMALS) if labels[name] else None
                for name, probability in zip(names, row, strict=True)
            }
            yield {"probabilities": probabilities, "labels": labels}

    def format_results(self, inputs: PatientInputs, format: str) -> str:
        """Return the results as JSON lines or CSV, and warn about empty ones.

        Args:
            inputs: The result of `read`.
            format: "jsonl"; or "csv", with a row for each patient and phenotype, or
                code if the model has no phenotypes.
        """
        self.warn_about_empty_results(inputs)
        rows = self.predict_rows(inputs)
        if format == "csv":
            return self._format_csv(rows)
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

    def _format_csv(self, rows: Iterable[Row]) -> str:
        """Return results as a table with a header."""
        has_labels = bool(self.model.phenotypes)
        has_concepts = not self.model.space.dense

        titles = ["patient", "phenotype" if has_labels else "code", "probability"]
        if has_labels:
            titles.append("label")
        if has_concepts:
            titles.append("concepts")

        buffer = io.StringIO()
        table = csv.writer(buffer, lineterminator="\n")
        table.writerow(titles)
        for row in rows:
            for name, probability in row["probabilities"].items():
                cells = [row["patient"], name, probability]
                if has_labels:
                    cells.append(row["labels"][name])
                if has_concepts:
                    cells.append(row["concepts"])
                table.writerow(cells)
        return buffer.getvalue()


# ---- scores --------------------------------------------------------------------------


def evaluate_patients(
    reader: PatientReader,
    path: NotePlace,
    label_map: Mapping[str, str] | None = None,
    labels: Path | None = None,
    encoding: str = AUTO,
) -> Evaluation:
    """Return the scores of a phenotyping model on labelled patients.

    Args:
        reader: The model.
        path: As in `read_labelled`.
        label_map: As in `read_labelled`.
        labels: As in `read_labelled`.
        encoding: As in `read_labelled`.

    Raises:
        ConfigError: The model predicts no phenotypes.
        DataError: The files cannot be read, or contain none of the model's phenotypes.
    """
    labelled = read_labelled(reader, path, label_map, labels, encoding)
    model = reader.model
    scores = _score_predictions(model, _require_classes(model), labelled)
    unknown = tuple(name for name in labelled.names if name not in model.phenotypes)
    return Evaluation(scores, unknown)


class LabelledPatients(NamedTuple):
    """Patients with their labels.

    Attributes:
        inputs: The model's inputs of each patient.
        labels: (patients, phenotypes) int8 labels of the model's phenotypes.
        names: The names of all labels in the files.
    """

    inputs: PatientInputs
    labels: np.ndarray
    names: tuple[str, ...]


def read_labelled(
    reader: PatientReader,
    path: NotePlace,
    label_map: Mapping[str, str] | None = None,
    labels: Path | None = None,
    encoding: str = AUTO,
) -> LabelledPatients:
    """Read labelled patients.

    Problems with the labels, and patients who are left out, are printed on stderr.

    Args:
        reader: The model.
        path: A folder of the i2b2 2008 obesity challenge (intuitive judgments), or JSON
            lines with "patient", "text" and "labels" ({name: "present" | "absent" |
            "questionable"}), possibly several per patient. With `labels`: notes, as in
            `predict`; they may be in a database.
        label_map: Name in the files to the model's name. If two different labels of a
            patient get the same name, neither is used.
        labels: A table of labels for the notes (`labels.py`).
        encoding: Encoding of files without a byte-order mark that are not UTF-8.

    Raises:
        ConfigError: The model predicts no phenotypes, or notes in a database have no
            table of labels.
        DataError: The files cannot be read, or contain none of the model's phenotypes.
    """
    model = reader.model
    _require_classes(model)
    notes: Iterable[PatientNote]
    with reading_as(encoding):
        if labels is not None:
            patient_notes = read_patient_notes(name_of_notes(path), encoding=encoding)
            patients = patient_notes.list_patients()
            gold = _read_labels_and_report(patients, path, labels)
            notes = patient_notes
        elif isinstance(path, Path):
            notes, gold = read_gold(path)
        else:
            raise ParameterError(
                f"{path}: the notes of a database need a table of labels: give `labels`"
            )
    gold, names = _rename_labels(
        gold, label_map, model.phenotypes, place=str(labels or path)
    )

    inputs = reader.read(note for note in notes if note.patient in gold)
    reader.warn_about_empty_results(inputs)
    rows = [
        [gold[patient].get(name, UNLABELLED) for name in model.phenotypes]
        for patient in inputs.patients
    ]
    shape = (len(inputs.patients), len(model.phenotypes))
    return LabelledPatients(inputs, np.array(rows, np.int8).reshape(shape), names)


def _require_classes(model: Phenotyper) -> tuple[tuple[int, ...], ...]:
    """Return the classes of each phenotype that a model predicts.

    Raises:
        ConfigError: The model predicts no phenotypes.
    """
    classes = model.classes
    if classes is None:
        raise ConfigError(
            "the model predicts codes, so there are no phenotypes to score"
        )
    return classes


def _read_labels_and_report(
    patients: Sequence[str], path: NotePlace, labels: Path
) -> Gold:
    """Return the labels of patients with notes, and print problems with the table.

    Args:
        patients: The patients who have notes.
        path: Where their notes are.
        labels: The table of labels.

    Raises:
        DataError: The table cannot be read, or no patient is in both.
    """
    gold, messages = read_gold_table(patients, path, labels)
    for message in messages:
        print(f"note: {message}", file=sys.stderr)
    if not gold:
        raise DataError(
            f"{labels}: no patients with notes in {path} are labelled: check that both "
            "use the same patient ids"
        )
    return gold


def _rename_labels(
    gold: Gold,
    label_map: Mapping[str, str] | None,
    phenotypes: Sequence[str],
    *,
    place: str,
) -> tuple[Gold, tuple[str, ...]]:
    """Rename labels to the model's names.

    Args:
        gold: The labels.
        label_map: Name in the files to the model's name.
        phenotypes: The model's names.
        place: Location of the labels, for messages.

    Returns:
        The labels, and all their names.

    Raises:
        DataError: No label is one of the model's phenotypes.
    """
    original = tuple(dict.fromkeys(name for labels in gold.values() for name in labels))
    label_map = check_label_map(label_map, original, phenotypes, place)
    renamed, names, num_conflicts = rename_labels(gold, label_map)
    if num_conflicts:
        print(
            f"note: renaming gives {format_count(num_conflicts, 'pair')} of patient "
            "and phenotype two different labels: neither is used",
            file=sys.stderr,
        )
    if not set(names) & set(phenotypes):
        raise LabelError(
            f"{place} has labels for {', '.join(names) or 'nothing'}, but the model "
            f"knows {', '.join(phenotypes)}: rename them with `label_map`"
        )
    return renamed, names


def _score_predictions(
    model: Phenotyper,
    classes: tuple[tuple[int, ...], ...],
    labelled: LabelledPatients,
) -> dict[str, Any]:
    """Return the scores of a model's predictions, with the ranking of patients.

    Args:
        model: The model.
        classes: The classes of each phenotype.
        labelled: The patients.
    """
    names = model.phenotypes
    predicted = model.predict(labelled.inputs.values)
    counts = ClassCounts.of(labelled.labels, predicted.classes, names, classes=classes)
    present = predicted.probabilities[:, :, PRESENT]
    ranking = measure_rankings(labelled.labels, present, names)

    scores = counts.scores()
    by_output = {}
    for name, output_scores in scores["by_output"].items():
        areas = ranking["by_output"][name]
        by_output[name] = {
            **output_scores,
            "auroc": areas["auroc"],
            "auprc": areas["auprc"],
        }
    return {**scores, "ranking": ranking["macro"], "by_output": by_output}
