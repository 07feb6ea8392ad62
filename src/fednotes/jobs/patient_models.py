"""Saved models of patients, which read a patient's notes and return findings.

An application brings such a model and decides what it finds. It registers the model's
class by an entry point in the group `fednotes.models`, under the name of the JSON file
that describes a saved model: a folder of a class that is registered as `phenotyper` has
a file `phenotyper.json`. A folder without such a file holds a model that finds
mentions.
"""

from __future__ import annotations

import reprlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, overload

from fednotes.core import plugins
from fednotes.core.errors import ConfigError, DataError
from fednotes.core.settings import path_of
from fednotes.core.types import Document
from fednotes.data.encodings import AUTO
from fednotes.jobs.evaluation import Evaluation

Text = str | Document
Patient = Text | Sequence[Text]  # one note, or all notes of a patient
Notes = Text | Sequence[Patient] | Mapping[str, Patient]


@dataclass(frozen=True)
class PatientFinding:
    """What a model finds in the notes of one patient.

    A patient whose notes cannot be used has neither probabilities nor labels.

    Attributes:
        patient: Name of the patient.
        probabilities: Probability of each phenotype, or of each billing code after
            stage 1 alone; None if the model has not learned it.
        labels: "present", "absent" or "questionable" for each phenotype.
        concepts: Number of mentions of concepts that the finding is based on; None if
            the model does not read concepts. A finding without any says nothing about
            the patient.
    """

    patient: str
    probabilities: Mapping[str, float | None]
    labels: Mapping[str, str | None]
    concepts: int | None = None


@dataclass(frozen=True, slots=True)
class PatientNote:
    """One note of a patient.

    Attributes:
        patient: Name of the patient.
        text: The note.
    """

    patient: str = field(repr=False)
    text: str = field(repr=False)


class PatientModel(ABC):
    """A model that finds phenotypes, or billing codes, in the notes of patients.

    Attributes:
        folder: Folder of the saved model; None if it was not read from one.
    """

    folder: Path | None = None

    @classmethod
    @abstractmethod
    def load(cls, folder: Path, device: str = "cpu", place: str | None = None) -> Self:
        """Read a saved model.

        Args:
            folder: The model's folder.
            device: As of torch.
            place: Where the model's dictionary or encoder is now, if it has moved.

        Raises:
            ModelError: The model is damaged, or its dictionary or encoder is not found.
        """

    @staticmethod
    @abstractmethod
    def described_types(facts: Mapping[str, Any]) -> Sequence[str]:
        """Return what a saved model predicts, from the content of its JSON file."""

    @staticmethod
    @abstractmethod
    def read_notes(
        name: str,
        text: str | None = None,
        *,
        format: str | None = None,
        column: str | None = None,
        encoding: str = AUTO,
    ) -> Iterable[PatientNote]:
        """Return the notes in a file or folder, read one at a time.

        The file is read again at each iteration. It is read once before this function
        returns, so that a damaged file is refused before the model reads a note.

        Args:
            name: A path, or `-` for stdin.
            text: A text in place of a path.
            format: Format of the notes; recognised if it is None.
            column: The column, or the key of JSON lines, that holds the text.
            encoding: Encoding of files without a byte-order mark that are not UTF-8.

        Raises:
            DataError: The file cannot be read, or has no note with any text.
        """

    @property
    @abstractmethod
    def types(self) -> tuple[str, ...]:
        """The phenotypes that it predicts; after stage 1 alone, the codes."""

    @property
    @abstractmethod
    def confidence(self) -> str:
        """What the probabilities are, in words."""

    @abstractmethod
    def find_in_stream(
        self, notes: Iterable[PatientNote], patients: Iterable[str] = ()
    ) -> list[PatientFinding]:
        """Return a finding for each patient, and hold one note at a time.

        Args:
            notes: The notes, in any order of patients.
            patients: Patients who come first, even if they have no notes. All others
                follow in the order of their first notes.
        """

    def find(self, notes: Mapping[str, Sequence[str]]) -> list[PatientFinding]:
        """Return a finding for each patient, in order.

        Args:
            notes: The texts of each patient's notes by the patient's name.
        """
        stream = (
            PatientNote(patient, text)
            for patient, texts in notes.items()
            for text in texts
        )
        return self.find_in_stream(stream, patients=notes)

    @abstractmethod
    def written(self, notes: Iterable[PatientNote], format: str) -> str:
        """Return the findings as a file, and hold one note at a time.

        Args:
            notes: The notes, in any order of patients.
            format: "jsonl" or "csv".
        """

    @abstractmethod
    def evaluate(
        self,
        path: Path,
        label_map: Mapping[str, str] | None = None,
        labels: Path | None = None,
        encoding: str = AUTO,
    ) -> Evaluation:
        """Return the scores of the model on labelled patients.

        Args:
            path: Labelled patients, or notes.
            label_map: New names for phenotypes of the files.
            labels: A table of labels for the notes.
            encoding: Encoding of files without a byte-order mark that are not UTF-8.

        Raises:
            ConfigError: The model predicts no phenotypes.
            DataError: The files cannot be read, or have no phenotype of the model.
        """

    def __repr__(self) -> str:
        return f"<PatientModel: {reprlib.repr([*self.types])}>"

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, notes: Text
    ) -> PatientFinding: ...
    @overload
    def __call__(
        self, notes: Sequence[Patient] | Mapping[str, Patient]
    ) -> list[PatientFinding]: ...

    def __call__(self, notes: Notes) -> PatientFinding | list[PatientFinding]:
        """Return what the model finds for one patient, or for several.

        Args:
            notes: One note of a patient; a sequence with a note, or a list of notes,
                for each patient; or the same by the patients' names: `model({"p1":
                ["first note", "second note"]})`.
        """
        if isinstance(notes, str) or not isinstance(notes, Iterable):
            return self({"1": [notes]})[0]
        if not isinstance(notes, Mapping):
            notes = {str(number): patient for number, patient in enumerate(notes, 1)}
        return self.find(
            {name: _texts_of(patient_notes) for name, patient_notes in notes.items()}
        )

    def predict_file(
        self,
        path: str | Path,
        *,
        format: str | None = None,
        column: str | None = None,
        encoding: str = AUTO,
    ) -> list[PatientFinding]:
        """Find the phenotypes of the patients whose notes are in a file or folder.

        One note is in memory at a time.

        Args:
            path: A table of notes, JSON lines, or a folder of texts. A note without a
                patient is a patient of its own.
            format: Format of the notes; recognised if it is None.
            column: The column, or the key of JSON lines, that holds the text.
            encoding: Encoding of files without a byte-order mark that are not UTF-8.

        Raises:
            DataError: The file cannot be read, or its format is not known.
            ConfigError: A parameter has an impossible value.
        """
        name = str(path_of(path, "a file or folder of notes"))
        notes = self.read_notes(name, format=format, column=column, encoding=encoding)
        return self.find_in_stream(notes)


def file_names() -> tuple[str, ...]:
    """Return the names of the JSON files that describe saved models of patients."""
    return tuple(f"{name}.json" for name in plugins.registered("models"))


def is_patient_model(folder: Path) -> bool:
    """Return whether a folder holds a model of patients. Nothing is imported for it."""
    return any((folder / name).is_file() for name in file_names())


def kind_of(folder: Path) -> type[PatientModel] | None:
    """Return the class of the patient model in a folder; None if the folder holds none.

    Raises:
        ConfigError: The class cannot be loaded.
    """
    for name, entry in plugins.registered("models").items():
        if (folder / f"{name}.json").is_file():
            kind: type[Any] = plugins.load(entry, type)
            if not issubclass(kind, PatientModel):
                raise ConfigError(
                    f"{entry.value} is not a subclass of PatientModel: update or "
                    "uninstall the package that registers it"
                )
            return kind
    return None


def _texts_of(notes: Patient) -> list[str]:
    """Return the texts of a patient's notes.

    Raises:
        DataError: A note is no text.
    """
    if isinstance(notes, str) or not isinstance(notes, Iterable):
        return [document_of(notes, 1).text]
    return [document_of(note, 1).text for note in notes]


def document_of(text: Text, number: int) -> Document:
    """Return a text as a document whose id is its place in the input.

    Args:
        text: The text; a document is returned as it is.
        number: The place, counted from 1.

    Raises:
        DataError: It is no text.
    """
    if isinstance(text, Document):
        _require_text(text.text)
        return text
    return Document(str(number), _require_text(text))


def _require_text(text: str) -> str:
    """Return a text, and raise DataError for another type or half a character."""
    if not isinstance(text, str):
        raise DataError(f"expected a text or a Document, not {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"half a character at {error.start} of a text: decode the text again"
        ) from error
    return text
