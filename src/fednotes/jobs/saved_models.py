"""Define the interface of all saved models, whatever they read and find.

A saved model is a folder, and `jobs/models.py` finds the class of the model in it. Each
class contains what differs between models: `MentionModel` (`jobs/mention_models.py`)
finds mentions in documents, and a `PatientModel` (`jobs/patient_models.py`) finds
phenotypes of patients. All other code uses the protocol and never checks the class.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, TypeVar

import numpy as np

from fednotes.core.errors import ParameterError
from fednotes.core.types import Document
from fednotes.data.encodings import AUTO
from fednotes.data.formats.problems import OnError
from fednotes.data.notes import NoteDatabase
from fednotes.jobs.evaluation import Evaluation

T = TypeVar("T")

# What a model of patients reads of one note, as JSON values: the concepts that it
# mentions, or a vector. It is empty if the model reads nothing.
NoteFeatures = Sequence[float]
# What one prediction covers: a document, or a patient with all notes.
ModelInput = Literal["documents", "patients"]


@dataclass(frozen=True)
class LoadOptions:
    """How a saved model is loaded.

    Attributes:
        device: Device to compute on, as torch names it.
        backbone: New location of the model's frozen encoder, if it has moved.
        dictionary: New location of the dictionary or encoder that a phenotyping model
            reads notes with, if it has moved.
        calibrated: Whether to use a calibration in the model's folder.
        workers: Number of processes that predict at the same time, if the class of
            models has them; "auto" uses the free cores, or GPUs, for many notes.
    """

    device: str = "cpu"
    backbone: str | None = None
    dictionary: str | None = None
    calibrated: bool = True
    workers: int | Literal["auto"] = 1


@dataclass(frozen=True)
class NoteSource:
    """The notes that a model reads.

    Attributes:
        path: A file or folder, a database, or "-" for stdin.
        text: A text instead of a path.
        format: Format of the notes; recognised if it is None.
        column: The column, or the key of JSON lines, that holds the text.
        id_column: The column, or the key of JSON lines, with the notes' ids.
        encoding: Encoding of files without a byte-order mark that are not UTF-8, such
            as "cp1252".
        on_error: "skip" leaves out unusable data, if the model allows it.
    """

    path: str | NoteDatabase = "-"
    text: str | None = field(default=None, repr=False)
    format: str | None = None
    column: str | None = None
    id_column: str | None = None
    encoding: str = AUTO
    on_error: OnError = "refuse"


@dataclass(frozen=True)
class PredictionOutput:
    """Where and how predictions are written.

    Attributes:
        path: A file, or a folder of brat or of shards; None writes to stdout, or to
            `database`.
        to: The format: "jsonl", "csv", "parquet", "omop", "omop-parquet", "brat" or
            "conll" for mentions; "jsonl" or "csv" for patients.
        threshold: Mentions with a lower confidence are left out.
        shard: The number of notes in each file of a folder of shards, or in each
            transaction of a database; 0 writes one file.
        resume: Whether to continue predictions of an earlier command in a folder of
            shards or a database.
        overwrite: Whether to replace a file, or files in a folder of brat.
        database: The address of a database, for the format "omop".
        table: The table NOTE_NLP of the database, perhaps with a schema.
    """

    path: Path | None = None
    to: str = "jsonl"
    threshold: float = 0.0
    shard: int = 0
    resume: bool = False
    overwrite: bool = False
    database: str = ""
    table: str = ""

    @property
    def is_in_batches(self) -> bool:
        """Whether predictions are stored in batches, and can be resumed."""
        return bool(self.shard or self.database)

    def require_possible(self) -> None:
        """Raise ParameterError if the attributes exclude each other."""
        if self.shard < 0:
            raise ParameterError(
                f"`shard` = {self.shard}: expected a number of notes, at least 1"
            )
        if self.database and self.to != "omop":
            raise ParameterError(
                f"`to` = {self.to!r}: a database takes rows of OMOP's NOTE_NLP: set "
                '`to` to "omop", or name a file or folder in `out`'
            )
        if self.table and not self.database:
            raise ParameterError(
                "`out_table` is a table of a database: give its address in `out`, such "
                "as env:RESULTS_DB, or leave it out"
            )
        if self.resume and not self.is_in_batches:
            raise ParameterError(
                "`resume` continues a folder of shards or a database: give `shard`, as "
                "in the first command, or a database in `out`"
            )
        if self.overwrite and self.is_in_batches:
            raise ParameterError(
                "`overwrite` replaces one file or a folder of brat, but not a folder "
                "of shards or rows of a database: name another `out`, or set `resume` "
                "to continue"
            )
        if self.shard and self.path is None and not self.database:
            raise ParameterError(
                "`shard` writes a folder of files: give the folder in `out`"
            )


class Counted(Iterator[T]):
    """Items that are counted while they are read.

    Args:
        items: The items.

    Attributes:
        number: The number of items so far.
    """

    def __init__(self, items: Iterable[T]) -> None:
        self._items = iter(items)
        self.number = 0

    def __next__(self) -> T:
        """Return the next item."""
        item = next(self._items)
        self.number += 1
        return item


@dataclass(frozen=True)
class EvaluationOptions:
    """How a model is scored; a class of models rejects options that it lacks.

    Attributes:
        types: The entity types to score; by default all types of the model that the
            documents annotate.
        label_map: New names of the documents' labels.
        labels: A table of the patients' labels.
        format: Format of the documents; recognised if it is None.
        on_error: "skip" leaves out what cannot be used.
        encoding: Encoding of files without a byte-order mark that are not UTF-8.
    """

    types: Sequence[str] = ()
    label_map: Mapping[str, str] | None = None
    labels: Path | None = None
    format: str | None = None
    on_error: OnError = "refuse"
    encoding: str = AUTO


class JudgedConfidences(NamedTuple):
    """The confidences of predictions, and which of these are right.

    Attributes:
        confidences: (predictions,) confidences from 0 to 1.
        is_right: (predictions,) bool.
        owners: (predictions,) index of the document.
    """

    confidences: np.ndarray
    is_right: np.ndarray
    owners: np.ndarray


@dataclass(frozen=True)
class ModelDescription:
    """What a model's card says about its class of models.

    Attributes:
        task: The task in Hugging Face's terms.
        labels: What the model predicts.
        summary: What it does, in a sentence without its final part.
        limits: Sentences on what its predictions do not mean.
    """

    task: str
    labels: tuple[str, ...]
    summary: str
    limits: tuple[str, ...] = ()


class SavedModel(Protocol):
    """A saved model, loaded for use.

    Attributes:
        reads: What one prediction covers.
        folder: Folder of the model; None if it was not loaded from one.
    """

    reads: ClassVar[ModelInput]
    folder: Path | None

    @classmethod
    def load(cls, folder: Path, options: LoadOptions) -> Self:
        """Load the model in a folder.

        Raises:
            ParameterError: An option does not apply to this class of models.
            ModelError: The model is damaged, or the encoder or dictionary that it reads
                notes with is not found.
            MissingExtra: A package is missing.
        """

    @classmethod
    def describe(cls, facts: Mapping[str, Any]) -> ModelDescription:
        """Describe a model by the content of its JSON file, which may be damaged."""

    @classmethod
    def write_predictions(
        cls,
        folder: Path,
        source: NoteSource,
        output: PredictionOutput,
        options: LoadOptions,
    ) -> int:
        """Predict with the model in a folder and write the predictions.

        Notes that cannot be read at all are refused before the model is loaded. They
        are read one at a time, or one batch at a time. An output file appears once it
        is complete.

        Returns:
            The number of notes that were read.

        Raises:
            ConfigError: An option does not apply to this class of models.
            DataError: The notes cannot be read.
            ModelError: The model cannot be loaded.
        """

    @property
    def types(self) -> tuple[str, ...]:
        """What the model predicts: entity types, phenotypes or codes."""

    @property
    def confidence(self) -> str:
        """Description of the model's confidences or probabilities."""

    def __call__(self, inputs: list[Any], /) -> Sequence[Any]:
        """Return one prediction for each input."""

    def predict_file(
        self,
        path: str | Path | NoteDatabase,
        *,
        format: str | None = None,
        column: str | None = None,
        id_column: str | None = None,
        encoding: str = AUTO,
    ) -> Iterable[Any]:
        """Return the predictions for the notes in a file, a folder or a database.

        Args:
            path: The file, folder or database.
            format: Format of the notes; recognised if it is None.
            column: The column, or the key of JSON lines, that holds the text.
            id_column: The column, or the key of JSON lines, with the notes' ids.
            encoding: Encoding of files without a byte-order mark that are not UTF-8.

        Raises:
            DataError: The file cannot be read, or its format is not known.
            ConfigError: A parameter has an impossible value.
        """

    def evaluate(
        self,
        documents: str | Path | NoteDatabase | Sequence[Document],
        options: EvaluationOptions | None = None,
    ) -> Evaluation:
        """Score the model.

        Args:
            documents: Annotated documents or labelled patients, or a file or folder of
                them. The notes of labelled patients may be in a database.
            options: How the model is scored; the defaults if None.

        Raises:
            ConfigError: An option does not apply to this class of models.
            DataError: The documents cannot be read, or have none of the model's labels.
        """

    def judge_confidences(
        self,
        documents: str | Path | Sequence[Document],
        label_map: Mapping[str, str] | None,
        encoding: str,
    ) -> JudgedConfidences:
        """Return the model's confidences in annotated documents, and which are right.

        Args:
            documents: Annotated documents, or a file or folder of them.
            label_map: New names of the documents' labels.
            encoding: Encoding of files without a byte-order mark that are not UTF-8.

        Raises:
            ConfigError: The model is not calibrated on documents.
            DataError: The documents have none of the model's labels.
        """
