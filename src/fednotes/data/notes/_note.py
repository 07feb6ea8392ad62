"""One note, and a stream of notes that counts what was left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

Key = tuple[str, ...]  # of a patient, or of a note without a patient

# Why a record is left out; keys of `NoteStream.counts`.
EMPTY = "without text"
MISTAKEN = "marked as errors"
OTHER = "of another category"
SHARED = "that share a sentence with an excluded corpus"


@dataclass(frozen=True, slots=True)
class Note:
    """One note.

    Attributes:
        id: Its id, unique within its source if the file's own ids are.
        text: Its text.
        patient: Whose note it is.
        category: "Discharge summary" and the like.
        source: Where it comes from: the name of the file or folder that was read, or
            what the caller said.
        visit: The stay or encounter that it belongs to.
        own_id: The id that the file itself gives; None if it gives none.
    """

    id: str
    text: str = field(repr=False)
    patient: str | None = field(repr=False)
    category: str | None
    source: str
    visit: str | None = field(default=None, repr=False)
    own_id: str | None = None


def patient_of(note: Note) -> Key:
    """Return whose note it is; without a patient, the note counts as one of its own."""
    if note.patient is not None:
        return ("patient", note.patient)
    return ("note", note.source, note.id)


class NoteStream(Iterator[Note]):
    """Notes, one by one.

    Attributes:
        counts: The number of "notes" so far, and of records that were left out, by why.
    """

    def __init__(self, notes: Iterator[Note], counts: Counter[str]) -> None:
        self.counts = counts
        self._notes = notes

    def __next__(self) -> Note:
        return next(self._notes)


def describe_left_out(counts: Mapping[str, int]) -> str:
    """Return what was left out and why, for people; "" if nothing was."""
    return ", ".join(
        f"{counts[why]:,} {why}"
        for why in (EMPTY, MISTAKEN, OTHER, SHARED)
        if counts.get(why)
    )
