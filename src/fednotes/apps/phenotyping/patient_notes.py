"""Read the notes of patients one at a time.

A patient's notes may be anywhere in a table. They are not collected: the model receives
each note as it is read, so memory does not grow with the length or number of notes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fednotes.apps.phenotyping.concepts import make_patient_note
from fednotes.apps.phenotyping.obesity import stream_summaries
from fednotes.core.errors import DataError
from fednotes.core.types import Document
from fednotes.data.encodings import AUTO
from fednotes.data.formats.folders import list_files
from fednotes.data.notes import Note, NoteDatabase, read_notes
from fednotes.jobs.input_readers import find_note_format
from fednotes.jobs.inputs import find_source
from fednotes.jobs.patient_models import PatientNote


@dataclass(frozen=True)
class StreamedPatientNotes(Iterable[PatientNote]):
    """The notes of patients, read again from their source at each iteration."""

    _read: Callable[[], Iterator[PatientNote]] = field(repr=False)

    def __iter__(self) -> Iterator[PatientNote]:
        """Yield the notes, one at a time."""
        return self._read()

    def list_patients(self) -> tuple[str, ...]:
        """Return the names of the patients, in the order of their first notes.

        This reads all notes.
        """
        return tuple(dict.fromkeys(note.patient for note in self))


def read_patient_notes(
    place: str | NoteDatabase,
    text: str | None = None,
    *,
    format: str | None = None,
    column: str | None = None,
    id_column: str | None = None,
    encoding: str = AUTO,
) -> StreamedPatientNotes:
    """Return the notes of patients, which are read again whenever they are iterated.

    This function reads the first note, so a file without notes, or of another kind, is
    refused before a model is loaded. An iteration refuses what is damaged after it:
    reading millions of notes twice would take long, and the results of patients are
    written only after all notes are read.

    Args:
        place: A path, the address of a database, or `-` for stdin.
        text: A text, instead of `place`.
        format: Format of the notes, as in `read_notes`; recognised if it is None.
        column: The column, or the key of JSON lines, that contains the text.
        id_column: The column, or the key of JSON lines, with the notes' ids.
        encoding: Encoding of files without a byte-order mark that are not UTF-8.

    Raises:
        DataError: The file cannot be read, or has no note with any text.
    """
    source = find_source(place, text, encoding)
    if isinstance(source, Document):
        note = PatientNote(source.id, source.text)
        return StreamedPatientNotes(lambda: iter([note]))

    summaries: list[Path] = []
    found_format = format
    if isinstance(source, Path):
        summaries = _find_summary_files(source)
        if not summaries:
            found_format = find_note_format(source, format, column, encoding)

    def read() -> Iterator[PatientNote]:
        notes: Iterator[Note]
        if summaries:
            notes = stream_summaries(summaries)
        else:
            notes = read_notes(
                source,
                found_format,
                column=column,
                id_column=id_column,
                encoding=encoding,
            )
        return map(make_patient_note, notes)

    if next(read(), None) is None:
        raise DataError(f"{source}: contains no notes with text")
    return StreamedPatientNotes(read)


def _find_summary_files(path: Path) -> list[Path]:
    """Return the summaries of the obesity challenge at a path.

    Returns:
        The file itself, or the summary files in a folder, without those of judgments.
        Empty if the path has other notes.
    """
    if path.is_dir():
        return [
            file for file in list_files(path) if "patient_records" in file.name.lower()
        ]
    return [path] if path.name.lower().endswith((".xml", ".xml.gz")) else []
