"""Labelled patients to score a phenotyping model on: JSON lines, a table, the obesity challenge."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from fednotes.core.errors import DataError
from fednotes.core.parsing import JsonError, parse_json
from fednotes.data.cohort import ABSENT, PRESENT, QUESTIONABLE, UNLABELLED
from fednotes.data.concepts import by_patient
from fednotes.data.formats.files import open_file
from fednotes.data.label_table import read_labels
from fednotes.data.obesity import read_obesity

LABELS: Final = {"absent": ABSENT, "present": PRESENT, "questionable": QUESTIONABLE}
_NO_GOLD = "no JSON: expected one whole object a line, or --labels with a table beside the notes"

Gold = dict[str, dict[str, int]]  # patient → phenotype → label


def renamed(gold: Gold, label_map: Mapping[str, str]) -> tuple[Gold, tuple[str, ...], int]:
    """Labels under the model's names, and the names in the file's order.

    label_map: name in the file → the model's. Where two labels of a patient come to one name and
    differ, neither holds; the last value is how many such pairs there are.
    """
    made: Gold = {}
    names: dict[str, None] = {}
    clashes = 0
    for patient, of in gold.items():
        labels: dict[str, set[int]] = {}
        for name, label in of.items():
            labels.setdefault(label_map.get(name, name), set()).add(label)
        names |= dict.fromkeys(labels)
        made[patient] = {n: label for n, (label, *more) in labels.items() if not more}
        clashes += len(labels) - len(made[patient])
    return made, tuple(names), clashes


def read_gold(path: Path) -> tuple[dict[str, list[str]], Gold]:
    """Texts and labels by patient, of JSON lines or of a folder of the obesity challenge.

    Raises DataError naming file and line.
    """
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
    with open_file(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            patient, text, given = _line(path, number, line)
            notes.setdefault(patient, []).append(text)
            known = gold.setdefault(patient, {})
            for name, word in given.items():
                if not isinstance(word, str) or word not in LABELS:
                    expected = ", ".join(LABELS)
                    raise DataError.at(path, number, f"a label is none of {expected}")
                if known.setdefault(name, LABELS[word]) != LABELS[word]:
                    raise DataError.at(path, number, f"two different labels of one {name!r}")
    return notes, gold


def read_beside(
    notes: dict[str, list[str]], path: Path, labels: Path
) -> tuple[dict[str, list[str]], Gold, tuple[str, ...]]:
    """Texts of notes and labels of a table, of the patients who have both; and a line for each
    thing that is wrong in the table, or left out.

    notes: those of `path`. Raises what `read_labels` raises.
    """
    table = read_labels(labels)
    told = list(table.lines())
    gold = {patient: of for patient in notes if (of := table.of(patient))}
    if noteless := len(set(table.values) - set(notes)):
        told.append(f"{noteless} labelled patient(s) have no notes in {path}: left out")
    if bare := len(notes) - len(gold):
        told.append(f"{bare} patient(s) have notes and no label: left out")
    return {patient: notes[patient] for patient in gold}, gold, tuple(told)


def _line(path: Path, number: int, line: bytes) -> tuple[str, str, dict[str, Any]]:
    try:
        record = parse_json(line, strict=False)
    except JsonError as error:
        raise DataError.at(path, number, f"{_NO_GOLD} ({error})") from None
    values = [record.get(k) for k in ("patient", "text", "labels")] if type(record) is dict else []
    if not values or not isinstance(values[1], str) or not isinstance(values[2] or {}, dict):
        raise DataError.at(path, number, 'expected the keys "patient", "text" and "labels"')
    if not isinstance(values[0], str | int):
        raise DataError.at(path, number, 'the key "patient" is missing or no id')
    return str(values[0]), values[1], values[2] or {}
