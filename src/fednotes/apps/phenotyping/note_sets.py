"""The notes of patients, whose texts are read from their source when they are needed.

A hospital's notes do not fit into memory, and a patient's notes may be anywhere in a
table. Therefore a table is read once to find its patients, and a digest of each one's
texts (`NoteSet.scan`). It is read again, one note at a time, when features are computed
of the notes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fednotes.core.errors import DataError
from fednotes.jobs.patient_models import PatientNote

_LENGTH_BYTES = 8  # of the length before each text in a digest


@dataclass(frozen=True)
class NotesOfPatient:
    """What is known about the notes of a patient without their texts.

    Attributes:
        notes: The number of notes.
        characters: The number of characters of all notes.
        digest: A digest of the texts, in their order.
    """

    notes: int
    characters: int
    digest: bytes = field(repr=False)


@dataclass(frozen=True, eq=False)
class NoteSet(Iterable[PatientNote]):
    """The notes of patients, read again from their source at each iteration.

    Attributes:
        by_patient: What is known about each patient's notes, in the order of the
            patients' first notes.
    """

    by_patient: Mapping[str, NotesOfPatient] = field(repr=False)
    _read: Callable[[], Iterator[PatientNote]] = field(repr=False)

    @classmethod
    def scan(
        cls,
        notes: Iterable[PatientNote],
        read: Callable[[], Iterator[PatientNote]],
        patients: Iterable[str] = (),
    ) -> NoteSet:
        """Read notes once, and return them as a set that does not hold their texts.

        Args:
            notes: The notes.
            read: Reads the same notes again.
            patients: Patients to list first, even if they have no notes.
        """
        scans = {patient: _Scan() for patient in patients}
        for note in notes:
            scans.setdefault(note.patient, _Scan()).add(note.text)
        by_patient = {patient: scan.summarise() for patient, scan in scans.items()}
        return cls(by_patient, read)

    @classmethod
    def of(cls, notes: NoteSet | Mapping[str, Sequence[str]]) -> NoteSet:
        """Return a set of notes unchanged, or the set of the texts of each patient."""
        if isinstance(notes, NoteSet):
            return notes
        texts = notes

        def read() -> Iterator[PatientNote]:
            for patient, own_texts in texts.items():
                for text in own_texts:
                    yield PatientNote(patient, text)

        return cls.scan(read(), read, texts)

    def __iter__(self) -> Iterator[PatientNote]:
        """Yield the notes, one at a time.

        Raises:
            DataError: The notes of the source have changed.
        """
        number = 0
        for note in self._read():
            number += 1
            if note.patient not in self.by_patient:
                raise _make_change_error()
            yield note
        if number != self.number:
            raise _make_change_error()

    @property
    def patients(self) -> tuple[str, ...]:
        """The patients, in the order of their first notes."""
        return tuple(self.by_patient)

    @property
    def number(self) -> int:
        """The number of notes."""
        return sum(each.notes for each in self.by_patient.values())

    @property
    def characters(self) -> int:
        """The number of characters of all notes."""
        return sum(each.characters for each in self.by_patient.values())

    def compute_digest(self) -> bytes:
        """Return a digest of the texts of all patients, without the patients' names."""
        state = hashlib.sha256()
        for each in self.by_patient.values():
            state.update(each.digest)
        return state.digest()

    def with_prefix(self, prefix: str) -> NoteSet:
        """Return the set with a prefix before the name of each patient."""

        def read() -> Iterator[PatientNote]:
            for note in self:
                yield PatientNote(f"{prefix}{note.patient}", note.text)

        by_patient = {
            f"{prefix}{patient}": each for patient, each in self.by_patient.items()
        }
        return NoteSet(by_patient, read)

    def combine(self, other: NoteSet) -> NoteSet:
        """Return the notes of this set and of another one with other patients."""

        def read() -> Iterator[PatientNote]:
            yield from self
            yield from other

        return NoteSet({**self.by_patient, **other.by_patient}, read)


class _Scan:
    """Takes down the notes of a patient while they are read."""

    def __init__(self) -> None:
        self._notes = 0
        self._characters = 0
        self._state: Any = hashlib.sha256()

    def add(self, text: str) -> None:
        """Add a note."""
        self._notes += 1
        self._characters += len(text)
        data = text.encode("utf-8", "surrogatepass")
        self._state.update(len(data).to_bytes(_LENGTH_BYTES, "little"))
        self._state.update(data)

    def summarise(self) -> NotesOfPatient:
        """Return what is known about the notes."""
        return NotesOfPatient(self._notes, self._characters, self._state.digest())


def _make_change_error() -> DataError:
    """Return the error for a source that has changed between two readings."""
    return DataError(
        "the notes have changed while they were read: start again when nothing writes "
        "to them"
    )
