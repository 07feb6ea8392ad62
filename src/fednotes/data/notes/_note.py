"""A note, and a stream of notes that counts omitted records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

Key = tuple[str, ...]  # identifies a patient, or a note without a patient

# Reasons for omitting a record; keys of `NoteStream.counts`.
EMPTY = "without text"
MISTAKEN = "marked as errors"
OTHER = "of another category"
SHARED = "that share a sentence with an excluded corpus"


@dataclass(frozen=True, slots=True)
class Note:
    """One note.

    Attributes:
        id: The note's id, unique within its source if the file's ids are.
        text: The text.
        patient: The patient's id; None if unknown.
        category: The category, such as "Discharge summary"; None if unknown.
        source: The origin: the name of the file or folder, or a name from the caller.
        visit: The stay or encounter; None if unknown.
        own_id: The id in the file; None if it has none.
    """

    id: str
    text: str = field(repr=False)
    patient: str | None = field(repr=False)
    category: str | None
    source: str
    visit: str | None = field(default=None, repr=False)
    own_id: str | None = None


def make_patient_key(note: Note) -> Key:
    """Return the key of a note's patient, or of the note if its patient is unknown."""
    if note.patient is not None:
        return ("patient", note.patient)
    return ("note", note.source, note.id)


class NoteStream(Iterator[Note]):
    """A stream of notes.

    Attributes:
        counts: The number of "notes" so far, and of omitted records by reason.
    """

    def __init__(self, notes: Iterator[Note], counts: Counter[str]) -> None:
        self.counts = counts
        self._notes = notes

    def __next__(self) -> Note:
        return next(self._notes)


def describe_left_out(counts: Mapping[str, int]) -> str:
    """Return the numbers of omitted records by reason, in words; "" if none."""
    return ", ".join(
        f"{counts[why]:,} {why}"
        for why in (EMPTY, MISTAKEN, OTHER, SHARED)
        if counts.get(why)
    )
