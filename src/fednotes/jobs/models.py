"""Saved models in use: text in, mentions with confidences out; notes in, phenotypes
out.

`fednotes.taggers.model.Model.predict` is what `fednotes predict` calls too: the same
spans.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import overload

from fednotes.core.errors import ConfigError, DataError
from fednotes.core.settings import path_of
from fednotes.core.types import Document, Span
from fednotes.data.encodings import AUTO
from fednotes.data.formats.problems import OnError
from fednotes.jobs.inputs import inputs_of
from fednotes.jobs.patient_models import (
    PatientFinding,
    PatientModel,
    Text,
    document_of,
    kind_of,
)
from fednotes.jobs.predict import confident, confident_stream
from fednotes.metrics.calibration import Calibration
from fednotes.taggers.model import Model
from fednotes.taggers.saving import load_model

__all__ = [
    "MentionModel",
    "PatientFinding",
    "PatientModel",
    "folder_of",
    "load",
]

BATCH = 32  # documents that are read together


def load(
    path: str | Path,
    device: str = "cpu",
    backbone: str | None = None,
    calibrated: bool = True,
) -> MentionModel | PatientModel:
    """A saved model of any kind, for use.

    backbone: where its frozen encoder, or the dictionary that it reads notes with, is
    now, if that has moved.
    calibrated: whether a calibration that is in its folder is used.
    Raises ConfigError for what is no path, ModelError for a folder that holds no model,
    or a damaged one, MissingExtra.
    """
    folder = folder_of(path)
    if patient_model := kind_of(folder):
        return patient_model.load(folder, device, backbone)
    calibration = Calibration.of(folder) if calibrated else None
    return MentionModel(load_model(folder, device, backbone), calibration, folder)


def folder_of(given: object, expected: str = "a model's folder") -> Path:
    """A path, or where an opened model was read.

    Raises ConfigError for what is neither.
    """
    known = given.folder if isinstance(given, MentionModel | PatientModel) else None
    return known or path_of(given, expected)


class MentionModel:
    """A model that finds mentions. model: what methods and `evaluate` work with.
    calibration: of its confidences, if it has one (`fednotes calibrate`). folder: where
    it was read."""

    def __init__(
        self,
        model: Model,
        calibration: Calibration | None = None,
        folder: Path | None = None,
    ) -> None:
        self.model, self.calibration, self.folder = model, calibration, folder

    def __repr__(self) -> str:
        return f"<MentionModel {self.model.config.kind}: {reprlib.repr([*self.types])}>"

    @property
    def types(self) -> tuple[str, ...]:
        """The labels that it predicts."""
        return self.model.tagset.types

    @property
    def confidence(self) -> str:
        """What the confidence of a span is, in words."""
        return (
            f"{self.model.confidence_meaning}; {self.calibration or 'not calibrated'}"
        )

    @overload
    def __call__(  # type: ignore[overload-overlap]  # a text is a list of texts, too
        self, text: Text, threshold: float = 0.0
    ) -> Document: ...
    @overload
    def __call__(
        self, text: Iterable[Text], threshold: float = 0.0
    ) -> list[Document]: ...

    def __call__(
        self, text: Text | Iterable[Text], threshold: float = 0.0
    ) -> Document | list[Document]:
        """The document with the spans that the model finds, in order; of several, a
        list.

        What is annotated in a document is not looked at. threshold: spans of less
        confidence are left out. Raises DataError for what is no text, ConfigError for
        an impossible threshold.
        """
        if isinstance(text, str | Document):
            return confident(
                self.model, self.calibration, [document_of(text, 1)], threshold
            )[0]
        return list(self.stream(text, threshold=threshold))

    def stream(
        self, texts: Iterable[Text], batch: int = BATCH, threshold: float = 0.0
    ) -> Iterator[Document]:
        """The same of one after the other, in their order, as they come; never all in
        memory.

        batch: documents that are read together, their sentences by like length.
        """
        if not isinstance(batch, int) or batch < 1:
            raise ConfigError(f"batch = {batch}: at least 1 document is read at a time")
        if isinstance(texts, str | Document):
            raise ConfigError(
                "a stream is of several texts: give a list, or call the model"
            )
        if isinstance(texts, bytes | Mapping) or not isinstance(texts, Iterable):
            raise DataError(f"expected texts or Documents, not {type(texts).__name__}")
        # refused here, not at the first one
        confident(self.model, self.calibration, [], threshold)
        return self._streamed(texts, batch, threshold)

    def _streamed(
        self, texts: Iterable[Text], batch: int, threshold: float
    ) -> Iterator[Document]:
        numbered = (document_of(text, number) for number, text in enumerate(texts, 1))
        yield from confident_stream(
            self.model, self.calibration, numbered, threshold, batch
        )

    def predict_file(
        self,
        path: str | Path,
        *,
        format: str | None = None,
        column: str | None = None,
        encoding: str = AUTO,
        on_error: OnError = "refuse",
        threshold: float = 0.0,
    ) -> Iterator[Document]:
        """Find the mentions in a file or folder: a table of notes, JSON lines, a
        corpus, texts.

        Notes are read as their documents are asked for, one batch at a time. The file
        is read once before, to refuse what is wrong with it, unless `on_error` is
        "skip".

        Args:
            path: The file or folder.
            format: Of what is read; recognised if it is None.
            column: The column, or the key of JSON lines, that holds the text.
            encoding: Of files without a byte-order mark that are not UTF-8, such as
                "cp1252".
            on_error: "skip" leaves out what cannot be used.
            threshold: Spans of less confidence are left out.

        Returns:
            The documents, in order, with the notes' ids and patients; `meta` has
            "visit" and "category" where the table has these.

        Raises:
            DataError: The file cannot be read, or its format is not known.
            ConfigError: A parameter is none of those that are possible.
        """
        name = str(path_of(path, "a file or folder of notes"))
        inputs = inputs_of(
            name, None, on_error, format=format, column=column, encoding=encoding
        )
        inputs.require_readable()
        return confident_stream(self.model, self.calibration, inputs, threshold)

    def explain(self, document: Text, span: Span | tuple[int, int]) -> dict[str, float]:
        """How probable the words of a span (or from one character to another) are as a
        mention of each label, with these boundaries; and "O": that none of them is in
        any mention. The rest of 1 is of other boundaries. These are the model's own
        numbers, before any calibration.

        Raises DataError where the model reads no word there, or reads its words apart;
        ModelError for a pointer network, which scores only what it writes.
        """
        asked = span if isinstance(span, Span) else Span(*span, label="")
        return self.model.alternatives(document_of(document, 1), asked)
