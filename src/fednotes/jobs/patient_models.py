"""Saved models of patients, which read a patient's notes and return findings.

An application provides such a model and decides what it finds. It registers the model's
class by an entry point in the group `fednotes.models`, under the name of the JSON file
that describes a saved model: a folder of a class that is registered as `phenotyper` has
a file `phenotyper.json`. `jobs/models.py` finds the class by this file.
"""

from __future__ import annotations

import reprlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, ClassVar, Self, overload

import torch

from fednotes.core.errors import ConfigError, ParameterError
from fednotes.core.store import write_out
from fednotes.core.types import Document
from fednotes.data.encodings import AUTO
from fednotes.data.formats.problems import is_refused
from fednotes.data.notes import NoteDatabase, NotePlace, make_note_place
from fednotes.jobs.evaluation import Evaluation
from fednotes.jobs.inputs import name_of_notes
from fednotes.jobs.patient_reviews import ReviewedPatients
from fednotes.jobs.prediction_windows import FILE_BATCH, cut_windows
from fednotes.jobs.saved_models import (
    Counted,
    EvaluationOptions,
    JudgedConfidences,
    LoadOptions,
    ModelDescription,
    ModelInput,
    NoteFeatures,
    NoteSource,
    PredictionOutput,
)
from fednotes.jobs.texts import Text, to_document
from fednotes.jobs.workers.dealing import AUTO as AUTO_WORKERS
from fednotes.jobs.workers.predictions import (
    FEWER_WORKERS,
    MANY_NOTES,
    choose_worker_devices,
    running_prediction_workers,
)

Patient = Text | Sequence[Text]  # one note, or all notes of a patient
Notes = Text | Sequence[Patient] | Mapping[str, Patient]


@dataclass(frozen=True)
class PatientFinding:
    """A model's finding about one patient.

    A patient whose notes cannot be used has neither probabilities nor labels.

    Attributes:
        patient: Name of the patient.
        probabilities: Probability of each phenotype, or of each billing code after
            stage 1 alone; None if the model has not learned it.
        labels: "present", "absent" or "questionable" for each phenotype.
        concepts: Number of mentions of concepts that the finding is based on; None if
            the model does not read concepts. A finding based on no mention says nothing
            about the patient.
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


# Yields notes with their features, in order; it may read notes before they are needed.
ComputeFeatures = Callable[
    [Iterable[PatientNote]], Iterator[tuple[PatientNote, NoteFeatures]]
]


def compute_features_here(
    compute_note_features: Callable[[str], NoteFeatures], notes: Iterable[PatientNote]
) -> Iterator[tuple[PatientNote, NoteFeatures]]:
    """Yield notes with their features, computed in this process.

    Args:
        compute_note_features: Returns the features of a text.
        notes: The notes.
    """
    for note in notes:
        yield note, compute_note_features(note.text)


class PatientModel(ABC):
    """A model that finds phenotypes, or billing codes, in the notes of patients.

    Attributes:
        uses_workers: Whether models of this class find phenotypes from what
            `compute_features` yields, and so in several processes.
        folder: Folder of the saved model; None if it was not loaded from one.
        options: How it was loaded; `compute_features` starts this number of workers.
    """

    reads: ClassVar[ModelInput] = "patients"
    uses_workers: ClassVar[bool] = False

    folder: Path | None = None
    options: LoadOptions = LoadOptions()

    def __repr__(self) -> str:
        return f"<PatientModel: {reprlib.repr([*self.types])}>"

    # ---- what an application defines

    @classmethod
    @abstractmethod
    def load(cls, folder: Path, options: LoadOptions) -> Self:
        """Load the model in a folder.

        Args:
            folder: The folder.
            options: How it is loaded. `dictionary`, or else `backbone`, is the new
                location of the model's dictionary or encoder.

        Raises:
            ModelError: The model is damaged, or its dictionary or encoder is not found.
        """

    @staticmethod
    @abstractmethod
    def described_types(facts: Mapping[str, Any]) -> Sequence[str]:
        """Return what a saved model predicts, from the content of its JSON file."""

    @staticmethod
    @abstractmethod
    def read_notes(source: NoteSource) -> Iterable[PatientNote]:
        """Return the notes in a file or folder, read one at a time.

        Each iteration reads the file again. Its first note is also read before this
        function returns, so that a file of another kind is refused before the model is
        loaded. Damage after it is refused when an iteration arrives there.

        Raises:
            DataError: The file cannot be read, or has no note with any text.
        """

    @property
    @abstractmethod
    def types(self) -> tuple[str, ...]:
        """The phenotypes that the model predicts; after stage 1 alone, the codes."""

    @property
    @abstractmethod
    def confidence(self) -> str:
        """Description of the model's probabilities."""

    @abstractmethod
    def find_in_stream(
        self,
        notes: Iterable[PatientNote],
        patients: Iterable[str] = (),
        compute: ComputeFeatures | None = None,
    ) -> list[PatientFinding]:
        """Return a finding for each patient, with one note in memory at a time.

        Args:
            notes: The notes, in any order of patients.
            patients: Patients to list first, even if they have no notes. All others
                follow in the order of their first notes.
            compute: Computes the features of notes; in this process if it is None.
        """

    @abstractmethod
    def format_findings(self, notes: Iterable[PatientNote], format: str) -> str:
        """Return the findings as a file's content, with one note in memory at a time.

        Args:
            notes: The notes, in any order of patients.
            format: "jsonl" or "csv".
        """

    @abstractmethod
    def evaluate_file(
        self,
        path: NotePlace,
        label_map: Mapping[str, str] | None = None,
        labels: Path | None = None,
        encoding: str = AUTO,
    ) -> Evaluation:
        """Score the model on labelled patients.

        Args:
            path: Labelled patients, or notes, which may be in a database.
            label_map: New names for phenotypes in the files.
            labels: A table of labels for the notes.
            encoding: Encoding of files without a byte-order mark that are not UTF-8.

        Raises:
            ConfigError: The model predicts no phenotypes.
            DataError: The files cannot be read, or contain none of the model's
                phenotypes.
        """

    def review_file(
        self,
        path: Path,  # noqa: ARG002 - of models that show their patients
        labels: Path | None = None,  # noqa: ARG002
        encoding: str = AUTO,  # noqa: ARG002
    ) -> ReviewedPatients:
        """Return labelled patients with the model's predictions, for the local web UI.

        Args:
            path: Labelled patients, or notes.
            labels: A table of labels for the notes.
            encoding: Encoding of files without a byte-order mark that are not UTF-8.

        Raises:
            ConfigError: The model does not show single patients, or predicts no
                phenotypes.
            DataError: The files cannot be read, or contain none of the model's
                phenotypes.
        """
        raise ConfigError(
            "this model does not show its predictions for single patients: use "
            "`fednotes evaluate`"
        )

    # ---- features of notes

    def compute_note_features(self, text: str) -> NoteFeatures:
        """Return what the model reads of one note; see `NoteFeatures`.

        It does not depend on other notes. A class of models that uses workers defines
        this.
        """
        raise NotImplementedError

    @property
    def feature_threads(self) -> int:
        """The number of threads with which `compute_note_features` computes."""
        return torch.get_num_threads()

    def compute_features(
        self, notes: Iterable[PatientNote]
    ) -> Iterator[tuple[PatientNote, NoteFeatures]]:
        """Yield notes with their features, in order.

        If the model was loaded with `workers`, they start with the first note and end
        with the last. With "auto", they start after many notes.

        Args:
            notes: The notes. With workers, some are read before they are needed.

        Raises:
            WorkerError: A worker has ended before its time.
        """
        compute_here = partial(compute_features_here, self.compute_note_features)
        stream = iter(notes)
        if self.options.workers == AUTO_WORKERS:
            yield from compute_here(islice(stream, MANY_NOTES))
            following = list(islice(stream, 1))
            if not following:
                return
            stream = chain(following, stream)

        devices: list[str] = []
        if self.folder is not None and self.options.workers != 1:
            devices = choose_worker_devices(
                self.folder, self.options, MANY_NOTES, self.feature_threads
            )
        if self.folder is None or len(devices) <= 1:
            yield from compute_here(stream)
            return
        with running_prediction_workers(
            self.folder, self.options, devices, FEWER_WORKERS
        ) as workers:
            yield from workers.compute_features(cut_windows(stream, FILE_BATCH))

    # ---- predictions

    @overload
    def __call__(  # type: ignore[overload-overlap]  # a text is a sequence of texts
        self, notes: Text
    ) -> PatientFinding: ...
    @overload
    def __call__(
        self, notes: Sequence[Patient] | Mapping[str, Patient]
    ) -> list[PatientFinding]: ...

    def __call__(self, notes: Notes) -> PatientFinding | list[PatientFinding]:
        """Return the model's finding for one patient, or its findings for several.

        Args:
            notes: One note of a patient; a sequence with a note, or a list of notes,
                for each patient; or the same by the patients' names: `model({"p1":
                ["first note", "second note"]})`.

        Raises:
            DataError: A note is not a text.
        """
        if isinstance(notes, str) or not isinstance(notes, Iterable):
            (finding,) = self({"1": [notes]})
            return finding
        if not isinstance(notes, Mapping):
            notes = {str(number): patient for number, patient in enumerate(notes, 1)}
        texts = {patient: _list_texts(each) for patient, each in notes.items()}
        return self.find(texts)

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

    def predict_file(
        self,
        path: str | Path | NoteDatabase,
        *,
        format: str | None = None,
        column: str | None = None,
        id_column: str | None = None,
        encoding: str = AUTO,
    ) -> list[PatientFinding]:
        """Find the phenotypes of patients from their notes in a file or database.

        One note is in memory at a time; with workers, a few hundred for each of them.

        Args:
            path: A table of notes, JSON lines, a folder of texts, or a database. A note
                without a patient is a patient of its own.
            format: Format of the notes; recognised if it is None.
            column: The column, or the key of JSON lines, that holds the text.
            id_column: The column, or the key of JSON lines, with the notes' ids.
            encoding: Encoding of files without a byte-order mark that are not UTF-8.

        Raises:
            DataError: The file cannot be read, or its format is not known.
            ConfigError: A parameter has an impossible value.
        """
        name = name_of_notes(path)
        source = NoteSource(
            name,
            format=format,
            column=column,
            id_column=id_column,
            encoding=encoding,
        )
        notes = self.read_notes(source)
        return self.find_in_stream(notes, compute=self.compute_features)

    @classmethod
    def write_predictions(
        cls,
        folder: Path,
        source: NoteSource,
        output: PredictionOutput,
        options: LoadOptions,
    ) -> int:
        """Write findings of patients; see `SavedModel.write_predictions`.

        A note without a patient is a patient of its own, named by the note's id.
        """
        if output.to not in ("jsonl", "csv"):
            raise ParameterError(
                f"`to` = {output.to!r}: phenotypes are written as jsonl or "
                "csv: choose one of these"
            )
        if output.threshold:
            raise ParameterError(
                "`threshold` applies only to mentions, but this model predicts "
                "phenotypes: leave it out"
            )
        if output.is_in_batches:
            raise ParameterError(
                "`shard` and databases take mentions, but this model predicts "
                "phenotypes, which need all notes of a patient: name a file in `out`"
            )
        if not cls.uses_workers:
            require_one_process(options)
        notes = Counted(cls.read_notes(source))
        text = cls.load(folder, options).format_findings(notes, output.to)
        if output.path is None:
            sys.stdout.write(text)
        else:
            write_out(output.path, text)
        return notes.number

    # ---- scores and description

    def evaluate(
        self,
        documents: str | Path | NoteDatabase | Sequence[Document],
        options: EvaluationOptions | None = None,
    ) -> Evaluation:
        """Score the model on labelled patients; see `SavedModel.evaluate`."""
        options = options or EvaluationOptions()
        for_mentions = {
            "format": bool(options.format),
            "types": bool(options.types),
            "on_error": not is_refused(options.on_error),
        }
        for parameter, is_set in for_mentions.items():
            if is_set:
                raise ParameterError(
                    f"`{parameter}` applies only to annotated text, but this model "
                    "scores labelled patients: leave it out"
                )
        if not isinstance(documents, str | Path | NoteDatabase):
            raise ConfigError(
                "expected the path of a file or folder of labelled patients"
            )
        place = make_note_place(documents)
        return self.evaluate_file(
            place, options.label_map, options.labels, options.encoding
        )

    def judge_confidences(
        self,
        documents: str | Path | Sequence[Document],  # noqa: ARG002 - of SavedModel
        label_map: Mapping[str, str] | None,  # noqa: ARG002 - of SavedModel
        encoding: str,  # noqa: ARG002 - of SavedModel
    ) -> JudgedConfidences:
        """Raise ConfigError, because phenotypes are calibrated during training."""
        raise ConfigError(
            f"{self.folder or 'the model'}: phenotypes of patients are calibrated in "
            "training ([training] calibrate = true), and those of representation = "
            '"attention" are not calibrated'
        )

    @classmethod
    def describe(cls, facts: Mapping[str, Any]) -> ModelDescription:
        """Describe a model by the content of its JSON file, which may be damaged."""
        labels = tuple(map(str, cls.described_types(facts)))
        return ModelDescription(
            task="text-classification",
            labels=labels,
            summary=(
                "Reads the notes of a patient and returns the probability of each of "
                f"{len(labels)} labels"
            ),
        )


def require_one_process(options: LoadOptions) -> None:
    """Raise ParameterError if a model that uses no workers is loaded for several."""
    if options.workers not in (1, AUTO_WORKERS):
        raise ParameterError(
            f"`workers` = {options.workers!r}: this class of models reads all notes in "
            "one process: leave `workers` out"
        )


def _list_texts(notes: Patient) -> list[str]:
    """Return the texts of a patient's notes.

    Raises:
        DataError: A note is not a text.
    """
    if isinstance(notes, str) or not isinstance(notes, Iterable):
        return [to_document(notes, 1).text]
    return [to_document(note, 1).text for note in notes]
