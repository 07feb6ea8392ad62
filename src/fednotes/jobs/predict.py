"""A saved model on new text: mentions in documents; phenotypes of patients, or their codes."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fednotes.core.errors import ConfigError, DataError, ModelError, nearest, within
from fednotes.core.store import write_out
from fednotes.core.types import Document
from fednotes.data.formats import FORMATS, examine, guess_format
from fednotes.data.formats.files import OnError, read_text, visible
from fednotes.data.notes import read_notes
from fednotes.data.tags import flatten, relabel, types_of
from fednotes.metrics.calibration import Calibration
from fednotes.metrics.classification import ClassCounts, rankings
from fednotes.metrics.spans import SpanCounts
from fednotes.patients.cohort import LABELS, PRESENT, UNLABELLED, Bags, Vectors
from fednotes.patients.concepts import by_patient
from fednotes.patients.features import Features, opened
from fednotes.patients.labels import read_beside, read_gold, read_texts, renamed
from fednotes.patients.phenotyper import Phenotyper, is_phenotyper, load_phenotyper
from fednotes.taggers.model import Model
from fednotes.taggers.saving import load_model

_NAME = 100  # characters of a path that a message shows
_text = partial(read_text, empty=True, exact=True)

# ---- what is read ----------------------------------------------------------------------------


def documents_of(
    name: str, text: str | None = None, on_error: OnError = "refuse"
) -> tuple[Document, ...]:
    """Documents from a corpus file or folder, plain text files, stdin (`-`), or the text given.

    Raises DataError for a path that does not exist, and for what cannot be read.
    """
    path = _source(name, text)
    if isinstance(path, Document):
        return (path,)
    try:
        format = guess_format(path)
    except DataError:
        files = visible(path) if path.is_dir() else [path]
        if not files or (path.is_dir() and any(file.suffix != ".txt" for file in files)):
            raise
        return tuple(Document(f.stem, _text(f)) for f in files)
    documents, problems = examine(path, format)
    problems.refuse(on_error, documents)
    # A text without an annotation file is a note too, though no gold without mentions.
    bare = (
        Document(f.relative_to(path).with_suffix("").as_posix(), _text(f)) for f in problems.without
    )
    return (*documents, *bare)


def notes_of(name: str, text: str | None = None) -> dict[str, list[str]]:
    """Texts by patient from a file or folder of notes, stdin, or the text given.

    Raises DataError as `documents_of`, and for a path without any note.
    """
    path = _source(name, text)
    if isinstance(path, Document):
        return {path.id: [path.text]}
    records = [path] if path.name.lower().endswith((".xml", ".xml.gz")) else []
    if path.is_dir():  # the obesity challenge's summaries, without its annotations
        records = [p for p in visible(path) if "patient_records" in p.name.lower()]
    notes = by_patient(read_texts(records) if records else read_notes(path))
    if not notes:
        raise DataError(f"{path}: no note here has any text")
    return notes


def _source(name: str, text: str | None) -> Path | Document:
    """The text given, or that of stdin, as a document; else a file or folder, never a text."""
    if text is not None:
        if name != "-":
            raise ConfigError("give a path or --text, not both")
        if not text.strip():
            raise DataError("--text: there is no text")
        return Document("text", _decoded("the text", os.fsencode(text)))
    if name == "-":
        return Document("stdin", _decoded("stdin", sys.stdin.buffer.read()))
    path = Path(name)
    try:
        exists = bool(name.strip()) and path.exists()
    except (OSError, ValueError):  # longer than a path may be
        exists = False
    if not exists:
        short = name if len(name) <= _NAME else f"{name[:_NAME]}…"
        raise DataError(f"{short}: no such file or folder; for text use --text or -")
    return path


def _decoded(source: str, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{source}: not UTF-8 at byte {error.start}: convert it first") from error


def _require_apart(name: str, out: Path | None) -> None:
    """Raises ConfigError where predictions would replace what is read, and its annotations."""
    if out is None or name == "-" or not out.exists():
        return
    path, to = Path(name).resolve(), out.resolve()
    read_from = path.parent if path.is_file() else path
    if to in (path, read_from) or (to.is_file() and path in to.parents):
        raise ConfigError(f"--out {out}: predictions would replace files of {name}: give another")


def _require_mapping(
    label_map: Mapping[str, str] | None,
    found: Sequence[str],
    known: Sequence[str],
    path: Path | str,
) -> Mapping[str, str]:
    """The mapping, {} if there is none. Raises ConfigError for what is no mapping, a label that is
    not there, or that becomes none of the model's."""
    if not isinstance(label_map, Mapping | None):
        raise ConfigError(
            f"label_map: expected a table of labels and new names, not {type(label_map).__name__}"
        )
    for old, new in (label_map or {}).items():
        if old not in found:
            near = nearest(old, found, "")
            raise ConfigError(
                f"--map {old}={new}: {path} has no label {old!r}, it has "
                f"{', '.join(found) or 'none'}{near and f'; {near}'}"
            )
        if new and new not in known:
            raise ConfigError(f"--map {old}={new}: the model has no {new!r}; {nearest(new, known)}")
    return label_map or {}


def predict(
    model: Path,
    path: str,
    format: str,
    out: Path | None,
    device: str,
    place: str | None = None,
    *,
    text: str | None = None,
    on_error: OnError = "refuse",
    threshold: float = 0.0,
) -> None:
    """Predict mentions and write them; or phenotypes by patient, after stage 1 alone billing codes.

    path: a file or folder, or `-` for stdin; a note without a patient is a patient of its own, by
    its id. text: a text in place of it. place: where the model's frozen encoder, or dictionary, is
    now, if it has moved. on_error: as `formats.read`. threshold: as `confident` has it.

    Each patient's result says how many mentions of concepts it rests on ("concepts"), where the
    model reads concepts: without any it says nothing of the patient. Counts of patients without
    concepts or with too many go to stderr.

    Raises ConfigError for what is for models of the other kind, where brat is asked for without a
    folder, or `out` is what is read, DataError for bad files, ModelError.
    """
    patients = is_phenotyper(model)
    if patients and format not in ("jsonl", "csv"):
        raise ConfigError(f"phenotypes are written as jsonl or csv: {format} is for mentions")
    if patients and threshold:
        raise ConfigError("--threshold is for mentions; phenotypes have probabilities")
    if format == "csv" and not patients:
        raise ConfigError("csv is for phenotypes of patients: mentions are jsonl, brat or conll")
    if format == "brat" and out is None:
        raise ConfigError("brat is a folder of files: give --out FOLDER")
    _require_apart(path, out)
    with tempfile.TemporaryDirectory() as folder:
        made = out or Path(folder) / "predictions"
        if patients:
            reader = PatientReader.of(model, load_phenotyper(model, device), place)
            write_out(made, reader.written(notes_of(path, text), format))
        else:
            recogniser, calibration = load_model(model, device, place), Calibration.of(model)
            documents = documents_of(path, text, on_error)
            FORMATS[format].write(confident(recogniser, calibration, documents, threshold), made)
        if out is None:
            sys.stdout.write(made.read_bytes().decode())


# ---- mentions --------------------------------------------------------------------------------


def confident(
    recogniser: Model,
    calibration: Calibration | None,
    documents: Sequence[Document],
    threshold: float = 0.0,
) -> tuple[Document, ...]:
    """The documents with predicted spans and their confidences, calibrated where that is known.

    threshold: spans of less confidence are left out. Raises ConfigError for an impossible one.
    """
    if not (isinstance(threshold, int | float | np.number) and 0.0 <= threshold <= 1.0):
        raise ConfigError(f"threshold = {threshold!r}: a confidence is from 0 to 1")
    found = recogniser.predict(documents, confidence=True)
    found = calibration.on(found) if calibration else found
    return tuple(
        replace(d, spans=tuple(s for s in d.spans if (s.confidence or 0.0) >= threshold))
        for d in found
    )


def evaluate_documents(
    recogniser: Model,
    documents: tuple[Document, ...],
    path: str,
    label_map: Mapping[str, str] | None = None,
    *,
    types: Sequence[str] = (),
    skipped: str = "",
) -> Evaluation:
    """Scores of a model on annotated documents.

    Scored are the model's types that the documents annotate, for their silence about another
    says nothing; or `types`, which may be among those that they do not mention. path: how messages
    call the documents; skipped: what of it could not be used. label_map: as in the job; unknown
    labels are left out of the scores.
    Raises DataError if the file annotates none of the model's types, ConfigError for a label to
    map or a type that is not there.
    """
    gold, scored, found = gold_of(recogniser, documents, path, label_map, types)
    known = recogniser.tagset.types
    return Evaluation(
        SpanCounts.of(gold, recogniser.predict(gold), types=scored).scores(),
        tuple(label for label in found if label not in known),
        tuple(label for label in known if label not in scored and label not in found),
        tuple(label for label in known if label not in scored and label in found),
        skipped,
    )


def gold_of(
    recogniser: Model,
    documents: tuple[Document, ...],
    path: str,
    label_map: Mapping[str, str] | None = None,
    types: Sequence[str] = (),
) -> tuple[tuple[Document, ...], tuple[str, ...], tuple[str, ...]]:
    """Documents with flat spans of the model's types; the types that can be scored; and all labels
    that the documents have. Arguments and errors as of `evaluate_documents`."""
    known = recogniser.tagset.types
    label_map = _require_mapping(label_map, types_of(documents), known, path)
    documents = relabel(documents, label_map, None)
    found = types_of(documents)
    for label in types:
        if label not in known:
            raise ConfigError(f"--types: the model has no {label!r}; {nearest(label, known)}")
    scored = tuple(t for t in known if t in (types or found))
    if not scored:
        raise DataError(
            f"{path} annotates {', '.join(found) or 'nothing'}, the model knows "
            f"{', '.join(known)}: no label is common; name them alike with --map OLD=NEW"
        )
    gold = tuple(
        replace(d, spans=flatten(d.spans, "outermost")[0]) for d in relabel(documents, {}, known)
    )
    return gold, scored, found


@dataclass(frozen=True)
class Evaluation:
    """Scores of mentions, and what was not scored.

    unknown: labels of the documents that the model lacks. silent: types of the model that the
    documents do not annotate. left: types that they do, but that were not asked for. skipped:
    what of the documents could not be used.
    """

    scores: dict[str, Any]
    unknown: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    skipped: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The scores, and what was not scored, for JSON."""
        rest = {"unknown": self.unknown, "not_annotated": self.silent, "not_asked": self.left}
        return {**self.scores, "not_scored": {k: list(v) for k, v in rest.items()}}

    def told(self) -> Iterator[str]:
        """What was not scored, a line each."""
        if self.unknown:
            names = ", ".join(self.unknown)
            yield f"the model has no {names}: left out (--map OLD=NEW)"
        if self.silent:
            names = ", ".join(self.silent)
            yield f"not annotated here, so not scored: {names} (--types scores them all the same)"
        if self.skipped:
            yield f"left out of the documents: {self.skipped}"


# ---- phenotypes of patients, or their billing codes --------------------------------------------


@dataclass(frozen=True, eq=False)
class PatientReader:
    """A phenotyping model, and what it reads notes with."""

    model: Phenotyper
    features: Features

    @classmethod
    def of(cls, folder: Path, model: Phenotyper, place: str | None = None) -> PatientReader:
        """place: where its dictionary, or encoder, is now. Raises ModelError naming the folder."""
        with within(str(folder), ModelError):
            return cls(model, opened(model.space.recipe, place))

    def read(
        self, notes: Mapping[str, Sequence[str]], told: bool = True
    ) -> tuple[tuple[str, ...], Bags | Vectors]:
        """What the model sees of each patient; told: those who are left out, on stderr."""
        made = self.features.make(notes, None, None)
        left_out, without = made.counts["left_out"], made.counts["without"]
        if told and left_out:
            print(f"note: {left_out} patient(s) left out: too many concepts", file=sys.stderr)
        if told and without:
            found = "no word" if self.model.space.dense else "no concept of the dictionary"
            print(
                f"note: {without} of {len(made.patients)} patient(s) have {found} in their notes: "
                "their results say nothing of them",
                file=sys.stderr,
            )
        return made.patients, made.values

    def results(
        self, notes: Mapping[str, Sequence[str]], told: bool = True
    ) -> Iterator[dict[str, Any]]:
        """{"patient", "concepts", "probabilities": of present, "labels"}; None if never learnt.

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

    def written(self, notes: Mapping[str, Sequence[str]], format: str) -> str:
        """The results as JSON lines; as csv a row for each patient and phenotype (or code, where
        none is labelled), with a heading."""
        results = self.results(notes)
        if format != "csv":
            return "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in results)
        buffer = io.StringIO()
        table = csv.writer(buffer, lineterminator="\n")
        labelled = bool(self.model.phenotypes)
        what = ["phenotype", "probability", "label"] if labelled else ["code", "probability"]
        last = [] if self.model.space.dense else ["concepts"]
        table.writerow(["patient", *what, *last])
        for each in results:
            for name, p in each["probabilities"].items():
                label = [each["labels"][name]] if labelled else []
                table.writerow([each["patient"], name, p, *label, *(each[key] for key in last)])
        return buffer.getvalue()


def evaluate_patients(
    reader: PatientReader,
    path: Path,
    label_map: Mapping[str, str] | None = None,
    labels: Path | None = None,
) -> Evaluation:
    """Scores of a phenotyping model on labelled patients, and the phenotypes it does not know.

    path: a folder of the i2b2 2008 obesity challenge (intuitive judgments), or JSON lines with
    "patient", "text" and "labels" ({name: "present" | "absent" | "questionable"}), several lines
    a patient if need be; or, with `labels`, notes as in `predict`. labels: a table of
    them (`patients/labels.py`); what is wrong in it goes to stderr. label_map: as in
    `evaluate_documents`; where two labels of a patient come to the same phenotype
    and differ, neither holds, and how many there are goes to stderr.
    Raises DataError if no phenotype is in common.
    """
    phenotyper = reader.model
    if phenotyper.machines is None:
        raise ConfigError("the model ends with stage 1: it predicts codes, no phenotypes to score")
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
    label_map = _require_mapping(label_map, before, phenotyper.phenotypes, labels or path)
    gold, found, clashes = renamed(gold, label_map)
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
    counts = ClassCounts.of(truth, phenotyper.classes(inputs), names, phenotyper.machines.classes)
    ranked = rankings(truth, phenotyper.probabilities(inputs)[:, :, PRESENT], names)
    scores = counts.scores()
    by_output = {
        name: {**of, **{area: ranked["by_output"][name][area] for area in ("auroc", "auprc")}}
        for name, of in scores["by_output"].items()
    }
    unknown = tuple(name for name in found if name not in names)
    scores = {**scores, "ranking": ranked["macro"], "by_output": by_output}
    return Evaluation(scores, unknown)
