"""Reading of notes from text files, JSON lines and FHIR resources."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fednotes.core import bounds
from fednotes.core.errors import DataError
from fednotes.core.parsing import JsonError, parse_json
from fednotes.data import encodings
from fednotes.data.formats import fhir
from fednotes.data.formats.files import locating_errors, open_text, read_bounded_lines
from fednotes.data.formats.json_files import find_text_key, parse_json_line, read_json
from fednotes.data.notes._note import Note
from fednotes.data.notes._settings import (
    COMMON_KEYS,
    ReadSettings,
    find_first_value,
    remove_suffixes,
)


def read_text_file(settings: ReadSettings, path: Path) -> Note:
    """Return a text file as a note.

    Its id is its path within the folder, without the suffix.
    """
    with open_text(path, settings.encoding, newline="") as file:
        text = file.read(bounds.NOTE + 1)
    name = Path(remove_suffixes(path))
    if isinstance(settings.root, Path) and path != settings.root:
        name = path.relative_to(settings.root).parent / name
    with locating_errors(path):
        text = settings.finish_text(text)
    return Note(
        id=name.as_posix(),
        text=text,
        patient=None,
        category=None,
        source=settings.source,
    )


def read_json_lines(settings: ReadSettings, path: Path) -> Iterator[Note | None]:
    """Yield the notes of a JSONL file.

    Keys are `text`, `id`, `patient`, `category` and similar ones. None stands for a
    record that an annotator rejected (Prodigy's "answer").
    """
    with open_text(path, settings.encoding) as file:
        for number, line in enumerate(read_bounded_lines(file, path), 1):
            if not line.strip():
                continue
            notes: list[Note | None] = []
            with settings.handling_errors("note", path, number):
                record = parse_json_line(line)
                key = find_text_key(record, *settings.list_text_keys())
                if key is None:
                    notes.append(None)
                else:
                    default_id = f"{remove_suffixes(path)}:{number}"
                    notes.append(_parse_record(settings, record, key, default_id))
            while notes:  # popped, so that only the caller has a reference to the note
                yield notes.pop()


def _parse_record(
    settings: ReadSettings, record: Mapping[str, Any], key: str, default_id: str
) -> Note:
    """Return the note of a JSON record whose text is at `key`.

    Raises:
        DataError: The record lacks the id that the user names, or has a bad text.
    """
    if settings.id_column and settings.id_column not in record:
        raise DataError(
            f"there is no key {settings.id_column!r} for the note's id: add it, or "
            "name another one"
        )
    own_id = find_first_value(record, settings.list_id_keys())
    return Note(
        id=own_id or default_id,
        text=settings.finish_text(record[key]),
        patient=find_first_value(record, COMMON_KEYS["patient"]),
        category=find_first_value(record, COMMON_KEYS["category"]),
        source=settings.source,
        visit=find_first_value(record, COMMON_KEYS["visit"]),
        own_id=own_id,
    )


def add_standard_keys(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON record with "id", "patient" and "visit" added.

    A missing key gets the value of a similar key, if there is one.
    """
    completed = dict(record)
    for name in ("id", "patient", "visit"):
        if completed.get(name) is None:
            value = find_first_value(record, COMMON_KEYS[name])
            if value:
                completed[name] = value
    return completed


def read_fhir(settings: ReadSettings, path: Path) -> Iterator[Note | None]:
    """Yield the notes of FHIR resources; resources of other types are ignored."""
    number = 0
    for line, value in _read_values(settings, path):
        for resource in fhir.list_resources(value):
            number += 1
            notes: list[Note] = []
            prefix = "" if line else f"resource {number}: "
            with settings.handling_errors("note", path, line, prefix):
                text = fhir.extract_text(resource)
                if text is not None:
                    facts = fhir.extract_facts(resource)
                    note = Note(
                        id=facts.id or f"{remove_suffixes(path)}:{number}",
                        text=settings.finish_text(text),
                        patient=facts.patient,
                        category=facts.category,
                        source=settings.source,
                        visit=facts.visit,
                        own_id=facts.id,
                    )
                    notes.append(note)
                    del note  # so that only the caller has a reference
            while notes:
                yield notes.pop()


def _read_values(settings: ReadSettings, path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the values of JSON lines with their line numbers.

    If the file is a single value, that value or each of its items is yielded with line
    0.
    """
    with open_text(path, settings.encoding) as file:
        first = next(
            (line for line in read_bounded_lines(file, path) if line.strip()), ""
        )
    try:
        parse_json(first, strict=False)
    except JsonError:
        with encodings.reading_as(settings.encoding):
            content = read_json(path)
        for value in content if isinstance(content, list) else [content]:
            yield 0, value
        return
    with open_text(path, settings.encoding) as file:
        for number, line in enumerate(read_bounded_lines(file, path), 1):
            if not line.strip():
                continue
            values: list[Any] = []  # stays empty if the line's error is collected
            with settings.handling_errors("note", path, number):
                values.append(parse_json_line(line))
            # Outside of the context: it must not catch errors of the consumer.
            for value in values:
                yield number, value
