"""A saved phenotyping model on new notes: phenotypes of patients, or their billing
codes."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fednotes.apps.phenotyping.cohort import LABELS, PRESENT, UNLABELLED, Bags, Vectors
from fednotes.apps.phenotyping.concepts import by_patient
from fednotes.apps.phenotyping.features import Features, load_features
from fednotes.apps.phenotyping.gold import read_gold, read_gold_table, rename_labels
from fednotes.apps.phenotyping.obesity import read_texts
from fednotes.apps.phenotyping.phenotyper import Phenotyper
from fednotes.core.errors import ConfigError, DataError, ModelError, within
from fednotes.core.types import Document
from fednotes.data.encodings import AUTO, reading_as
from fednotes.data.formats.folders import list_files
from fednotes.data.notes import read_notes
from fednotes.jobs.evaluation import Evaluation, require_mapping
from fednotes.jobs.inputs import require_notes, source_of
from fednotes.metrics.classification import ClassCounts, rankings


def notes_of(
    name: str,
    text: str | None = None,
    *,
    format: str | None = None,
    column: str | None = None,
    encoding: str = AUTO,
) -> dict[str, list[str]]:
    """Return the texts of each patient in a file or folder of notes, stdin, or the text
    given.

    A patient's notes may be anywhere in a table, so the texts of all patients are held.

    Args:
        name: A path, or `-` for stdin.
        text: A text in place of a path.
        format: As of `read_notes`.
        column: As of `read_notes`.
        encoding: As of `read_notes`.

    Raises:
        DataError: As `inputs.inputs_of`, or there is no note with any text.
    """
    path = source_of(name, text, encoding)
    if isinstance(path, Document):
        return {path.id: [path.text]}
    records = [path] if path.name.lower().endswith((".xml", ".xml.gz")) else []
    if path.is_dir():  # the obesity challenge's summaries, without its annotations
        records = [p for p in list_files(path) if "patient_records" in p.name.lower()]
    if records:
        notes = by_patient(read_texts(records))
    else:
        kind = require_notes(path, format, column, encoding)
        notes = by_patient(read_notes(path, kind, column=column, encoding=encoding))
    if not notes:
        raise DataError(f"{path}: no note here has any text")
    return notes


@dataclass(frozen=True, eq=False)
class PatientReader:
    """A phenotyping model, and what it reads notes with."""

    model: Phenotyper
    features: Features

    @classmethod
    def of(
        cls, folder: Path, model: Phenotyper, place: str | None = None
    ) -> PatientReader:
        """place: where its dictionary, or encoder, is now.

        Raises ModelError naming the folder.
        """
        with within(str(folder), ModelError):
            return cls(model, load_features(model.space.recipe, place))

    def read(
        self, notes: Mapping[str, Sequence[str]], told: bool = True
    ) -> tuple[tuple[str, ...], Bags | Vectors]:
        """What the model sees of each patient; told: those who are left out, on stderr."""
        made = self.features.make(notes, None, None)
        left_out, without = made.counts["left_out"], made.counts["without"]
        if told and left_out:
            print(
                f"note: {left_out} patient(s) left out: too many concepts",
                file=sys.stderr,
            )
        if told and without:
            found = (
                "no word" if self.model.space.dense else "no concept of the dictionary"
            )
            print(
                f"note: {without} of {len(made.patients)} patient(s) have {found} in their notes: "
                "their results say nothing of them",
                file=sys.stderr,
            )
        return made.patients, made.values

    def results(
        self, notes: Mapping[str, Sequence[str]], told: bool = True
    ) -> Iterator[dict[str, Any]]:
        """{"patient", "concepts", "probabilities": of present, "labels"}; None if never
        learnt.

        concepts: mentions found in the patient's notes; left out for vectors of text.
        """
        model = self.model
        patients, inputs = self.read(notes, told)
        heads: list[dict[str, Any]] = [{"patient": patient} for patient in patients]
        if isinstance(inputs, Bags):
            for head, found in zip(heads, inputs.sizes.tolist(), strict=True):
                head["concepts"] = found
        if not model.phenotypes:
            for head, row in zip(heads, model.code_probabilities(inputs), strict=True):
                named = zip(model.code_names, row.tolist(), strict=True)
                yield {
                    **head,
                    "probabilities": {code: round(p, 6) for code, p in named},
                }
            return
        words = {value: word for word, value in LABELS.items()}
        chances, classes = (
            model.probabilities(inputs)[:, :, PRESENT],
            model.classes(inputs),
        )
        for head, row, own in zip(
            heads, chances.tolist(), classes.tolist(), strict=True
        ):
            labels = {
                name: words.get(c)
                for name, c in zip(model.phenotypes, own, strict=True)
            }
            named = zip(model.phenotypes, row, strict=True)
            yield {
                **head,
                "probabilities": {
                    n: round(p, 6) if labels[n] else None for n, p in named
                },
                "labels": labels,
            }

    def written(self, notes: Mapping[str, Sequence[str]], format: str) -> str:
        """The results as JSON lines; as csv a row for each patient and phenotype (or
        code, where none is labelled), with a heading."""
        results = self.results(notes)
        if format != "csv":
            return "".join(
                json.dumps(each, ensure_ascii=False) + "\n" for each in results
            )
        buffer = io.StringIO()
        table = csv.writer(buffer, lineterminator="\n")
        labelled = bool(self.model.phenotypes)
        what = (
            ["phenotype", "probability", "label"]
            if labelled
            else ["code", "probability"]
        )
        last = [] if self.model.space.dense else ["concepts"]
        table.writerow(["patient", *what, *last])
        for each in results:
            for name, p in each["probabilities"].items():
                label = [each["labels"][name]] if labelled else []
                table.writerow(
                    [each["patient"], name, p, *label, *(each[key] for key in last)]
                )
        return buffer.getvalue()


def evaluate_patients(
    reader: PatientReader,
    path: Path,
    label_map: Mapping[str, str] | None = None,
    labels: Path | None = None,
    encoding: str = AUTO,
) -> Evaluation:
    """Scores of a phenotyping model on labelled patients, and the phenotypes it does
    not know.

    path: a folder of the i2b2 2008 obesity challenge (intuitive judgments), or JSON
    lines with "patient", "text" and "labels" ({name: "present" | "absent" |
    "questionable"}), several lines a patient if need be; or, with `labels`, notes as in
    `predict`. labels: a table of them (`apps/phenotyping/labels.py`); what is wrong in
    it goes to stderr. label_map: as in `evaluate_documents`; where two labels of a
    patient come to the same phenotype and differ, neither holds, and how many there are
    goes to stderr.
    Raises DataError if no phenotype is in common.
    """
    phenotyper = reader.model
    if phenotyper.machines is None:
        raise ConfigError(
            "the model ends with stage 1: it predicts codes, no phenotypes to score"
        )
    if labels is None:
        with reading_as(encoding):
            notes, gold = read_gold(path)
    else:
        with reading_as(encoding):
            notes, gold, told = read_gold_table(
                notes_of(str(path), encoding=encoding), path, labels
            )
        for line in told:
            print(f"note: {line}", file=sys.stderr)
        if not gold:
            raise DataError(
                f"{labels}: no patient with notes in {path} is labelled: are ids the same?"
            )
    before = tuple(dict.fromkeys(name for own in gold.values() for name in own))
    label_map = require_mapping(
        label_map, before, phenotyper.phenotypes, labels or path
    )
    gold, found, clashes = rename_labels(gold, label_map)
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
    patients, inputs = reader.read(notes)
    names = phenotyper.phenotypes
    rows = [[gold[p].get(n, UNLABELLED) for n in names] for p in patients]
    truth = np.array(rows, np.int8).reshape(len(patients), len(names))
    counts = ClassCounts.of(
        truth, phenotyper.classes(inputs), names, phenotyper.machines.classes
    )
    ranked = rankings(truth, phenotyper.probabilities(inputs)[:, :, PRESENT], names)
    scores = counts.scores()
    by_output = {
        name: {
            **of,
            **{area: ranked["by_output"][name][area] for area in ("auroc", "auprc")},
        }
        for name, of in scores["by_output"].items()
    }
    unknown = tuple(name for name in found if name not in names)
    scores = {**scores, "ranking": ranked["macro"], "by_output": by_output}
    return Evaluation(scores, unknown)
