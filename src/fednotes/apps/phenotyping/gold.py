"""The labels for scoring a saved model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from fednotes.apps.phenotyping.cohort import LABELS
from fednotes.apps.phenotyping.labels import read_labels
from fednotes.apps.phenotyping.obesity import read_obesity
from fednotes.apps.phenotyping.patient_notes import StreamedPatientNotes
from fednotes.core.errors import DataError
from fednotes.core.parsing import JsonError, parse_json
from fednotes.core.wording import format_count
from fednotes.data.encodings import get_user_encoding
from fednotes.data.formats.files import open_text, read_bounded_lines
from fednotes.data.notes import NotePlace
from fednotes.jobs.patient_models import PatientNote

Gold = dict[str, dict[str, int]]  # labels by patient and phenotype

_NOT_JSON: Final = (
    "not JSON: expected one complete object per line, or a table of "
    "labels beside the notes (labels)"
)


class RenamedLabels(NamedTuple):
    """Labels whose phenotypes were renamed.

    Attributes:
        gold: The labels.
        names: The new names, in the order of the file.
        num_conflicts: The number of pairs of patient and phenotype that lost their
            label, because two phenotypes got the same name and had different labels.
    """

    gold: Gold
    names: tuple[str, ...]
    num_conflicts: int


def rename_labels(gold: Gold, label_map: Mapping[str, str]) -> RenamedLabels:
    """Rename phenotypes to the model's names.

    Args:
        gold: The labels.
        label_map: Name in the file to the model's name.
    """
    renamed: Gold = {}
    names: dict[str, None] = {}
    num_conflicts = 0
    for patient, labels in gold.items():
        candidates: dict[str, set[int]] = {}
        for name, label in labels.items():
            candidates.setdefault(label_map.get(name, name), set()).add(label)
        names |= dict.fromkeys(candidates)
        renamed[patient] = {
            name: label for name, (label, *others) in candidates.items() if not others
        }
        num_conflicts += len(candidates) - len(renamed[patient])
    return RenamedLabels(renamed, tuple(names), num_conflicts)


def read_gold(path: Path) -> tuple[StreamedPatientNotes, Gold]:
    """Read labelled patients from JSON lines, or from the folder of the challenge.

    Returns:
        The notes and the labels of each patient. JSON lines are read again, one at a
        time, whenever the notes are iterated over.

    Raises:
        DataError: The file cannot be read; the message names file and line.
    """
    return _read_challenge(path) if path.is_dir() else _read_json_lines(path)


def _read_challenge(folder: Path) -> tuple[StreamedPatientNotes, Gold]:
    """Read the summaries of the obesity challenge in a folder, and their labels."""
    summaries, labels = read_obesity(folder)
    gold = {note.id: labels.get_labels(note.id) for note in summaries}
    notes = [PatientNote(note.id, note.text) for note in summaries]
    return StreamedPatientNotes(lambda: iter(notes)), gold


def _read_json_lines(path: Path) -> tuple[StreamedPatientNotes, Gold]:
    """Read the labels of all patients in JSON lines; the notes are read later."""
    gold: Gold = {}
    encoding = get_user_encoding()
    for record in _read_records(path, encoding):
        patient_labels = gold.setdefault(record.patient, {})
        for name, word in record.labels.items():
            if not isinstance(word, str) or word not in LABELS:
                expected = ", ".join(LABELS)
                raise DataError.at(
                    path, record.line, f"a label is not one of {expected}"
                )
            if patient_labels.setdefault(name, LABELS[word]) != LABELS[word]:
                raise DataError.at(
                    path, record.line, f"two different labels for one {name!r}"
                )

    def read_again() -> Iterator[PatientNote]:
        for record in _read_records(path, encoding):
            yield PatientNote(record.patient, record.text)

    return StreamedPatientNotes(read_again), gold


class _Record(NamedTuple):
    """A note in JSON lines, with its line, its patient and labels."""

    line: int
    patient: str
    text: str
    labels: dict[str, Any]


def _read_records(path: Path, encoding: str) -> Iterator[_Record]:
    """Yield the notes in JSON lines, one by one.

    Raises:
        DataError: The file cannot be read, or a line is not a valid note.
    """
    with open_text(path, encoding) as file:
        for number, line in enumerate(read_bounded_lines(file, path), 1):
            if line.strip():
                yield _parse_record(path, number, line)


def _parse_record(path: Path, number: int, line: str) -> _Record:
    """Return the note in a line.

    Raises:
        DataError: The line is not a JSON object, or has other keys or values.
    """
    try:
        record = parse_json(line, strict=False)
    except JsonError as error:
        raise DataError.at(path, number, f"{_NOT_JSON} ({error})") from None
    if not isinstance(record, dict):
        record = {}
    text = record.get("text")
    labels = record.get("labels") or {}
    if not isinstance(text, str) or not isinstance(labels, dict):
        raise DataError.at(
            path, number, 'expected the keys "patient", "text" and "labels"'
        )
    patient = record.get("patient")
    if not isinstance(patient, str | int):
        raise DataError.at(path, number, 'the key "patient" is missing or not an id')
    return _Record(number, str(patient), text, labels)


def read_gold_table(
    patients: Sequence[str], place: NotePlace, labels: Path
) -> tuple[Gold, tuple[str, ...]]:
    """Read the labels of patients from a table.

    Args:
        patients: The patients who have notes, each once.
        place: Where their notes are, for messages.
        labels: The table of labels.

    Returns:
        The labels of the patients who have both notes and labels; and messages about
        problems in the table and about excluded patients.

    Raises:
        DataError: As in `read_labels`.
    """
    table = read_labels(labels)
    messages = list(table.list_messages())
    gold: Gold = {}
    for patient in patients:
        patient_labels = table.get_labels(patient)
        if patient_labels:
            gold[patient] = patient_labels
    without_notes = len(set(table.values) - set(patients))
    if without_notes:
        messages.append(
            f"left out {format_count(without_notes, 'labelled patient')} without notes "
            f"in {place}"
        )
    without_labels = len(patients) - len(gold)
    if without_labels:
        messages.append(
            f"left out {format_count(without_labels, 'patient')} with notes but no "
            "labels"
        )
    return gold, tuple(messages)
