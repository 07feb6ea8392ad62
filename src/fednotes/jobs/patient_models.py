"""Saved models of patients: the notes of a patient in, findings out.

What such a model finds, and how, is the business of the application that brings it. It
registers its class by an entry point in the group `fednotes.models`, under the name of
the JSON file that describes a saved model: the folders of a class that is registered as
`phenotyper` have a file `phenotyper.json`. A folder without such a file holds a model
that finds mentions.
"""

from __future__ import annotations

import reprlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
    """What a model says of one patient.

    A patient whose notes cannot be used has neither probabilities nor labels.

    Attributes:
        patient: Name of the patient.
        probabilities: Probability of each phenotype, or of each billing code after
            stage 1 alone; None where the model has not learned it.
        labels: "present", "absent" or "questionable" for each phenotype.
        concepts: Number of mentions of concepts that the finding rests on, where the
            model reads concepts. Without any, it says nothing of the patient.
    """

    patient: str
    probabilities: Mapping[str, float | None]
    labels: Mapping[str, str | None]
    concepts: int | None = None


class PatientModel(ABC):
    """A model that finds phenotypes of patients, or their billing codes, in their
    notes.

    Attributes:
        folder: Where the model was read; None if it was not read from a folder.
    """

    folder: Path | None = None

    @classmethod
    @abstractmethod
    def load(cls, folder: Path, device: str = "cpu", place: str | None = None) -> Self:
        """Read a saved model.

        Args:
            folder: The model's folder.
            device: As of torch.
            place: Where the dictionary or encoder that it reads notes with is now, if
                it has moved.

        Raises:
            ModelError: The model is damaged, or what it reads notes with is not found.
        """

    @staticmethod
    @abstractmethod
    def described_types(facts: Mapping[str, Any]) -> Sequence[str]:
        """Return what a saved model predicts, by the facts of its JSON file."""

    @staticmethod
    @abstractmethod
    def read_notes(
        name: str,
        text: str | None = None,
        *,
        format: str | None = None,
        column: str | None = None,
        encoding: str = AUTO,
    ) -> dict[str, list[str]]:
        """Return the notes of each patient in a file or folder.

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
    def find(self, notes: Mapping[str, Sequence[str]]) -> list[PatientFinding]:
        """Return a finding for each patient, in order.

        Args:
            notes: The texts of each patient's notes by the patient's name.
        """

    @abstractmethod
    def written(self, notes: Mapping[str, Sequence[str]], format: str) -> str:
        """Return the findings as a file.

        Args:
            notes: The texts of each patient's notes by the patient's name.
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
        """Return what the model says of one patient, or of several.

        Args:
            notes: One note of a patient; a sequence with a note, or a list of notes,
                for each patient; or the same by the patients' names: `model({"p1":
                ["first note", "second note"]})`.
        """
        if isinstance(notes, str) or not isinstance(notes, Iterable):
            return self({"1": [notes]})[0]
        if not isinstance(notes, Mapping):
            notes = {str(number): own for number, own in enumerate(notes, 1)}
        given: dict[str, list[str]] = {}
        for patient, own in notes.items():
            if isinstance(own, str) or not isinstance(own, Iterable):
                texts: Sequence[Text] = [own]
            else:
                texts = own
            given[patient] = [document_of(text, 1).text for text in texts]
        return self.find(given)

    def predict_file(
        self,
        path: str | Path,
        *,
        format: str | None = None,
        column: str | None = None,
        encoding: str = AUTO,
    ) -> list[PatientFinding]:
        """Find the phenotypes of the patients whose notes a file or folder holds.

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
        return self.find(notes)


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
                    f"{entry.value} is not a subclass of PatientModel: update or uninstall "
                    "the package that registers it"
                )
            return kind
    return None


def document_of(text: Text, number: int) -> Document:
    """Return a text as a document, called by its place in the input.

    Raises:
        DataError: It is no text.
    """
    if isinstance(text, Document):
        _require_text(text.text)
        return text
    return Document(str(number), _require_text(text))


def _require_text(text: str) -> str:
    """Raises DataError for what is no text: of another type, or half a character."""
    if not isinstance(text, str):
        raise DataError(f"expected a text or a Document, not {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"half a character at {error.start} of a text: decode it anew"
        ) from error
    return text
