"""Saved models that find mentions in documents.

`MentionModel` and `fednotes predict` find the same spans with the same confidences.
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self, overload

import numpy as np

from fednotes.core.errors import ConfigError, DataError, ParameterError
from fednotes.core.parsing import mapping
from fednotes.core.types import Document, Span
from fednotes.core.wording import list_names
from fednotes.core.work import working
from fednotes.data.encodings import AUTO
from fednotes.data.formats.problems import OnError
from fednotes.data.notes import NoteDatabase, place_of_notes
from fednotes.jobs.evaluation import Evaluation
from fednotes.jobs.gold_documents import prepare_gold, read_annotated
from fednotes.jobs.inputs import Inputs, name_of_notes, open_inputs
from fednotes.jobs.prediction_batches import write_batches
from fednotes.jobs.prediction_files import write_brat, write_conll, write_documents
from fednotes.jobs.prediction_sinks import describe_prediction, open_sink
from fednotes.jobs.prediction_writers import BINARY, SUFFIXES
from fednotes.jobs.saved_models import (
    Counted,
    EvaluationOptions,
    JudgedConfidences,
    LoadOptions,
    ModelDescription,
    ModelInput,
    NoteSource,
    PredictionOutput,
)
from fednotes.jobs.texts import Text, document_of
from fednotes.metrics.calibration import Calibration, judge_spans
from fednotes.metrics.spans import SpanCounts
from fednotes.taggers.model import Model
from fednotes.taggers.saving import load_model

# Number of documents that `MentionModel.stream` reads together.
BATCH = 32
# Numbers of documents and of characters that are read together from a file, enough to
# fill the model's batches with sentences of similar length.
FILE_BATCH = 256
MAX_CHARACTERS = 1 << 19

_LIMIT = (
    "A mention says that words name something, not that the patient has it. Negation "
    "and family history need other programs."
)


class MentionModel:
    """A model that finds mentions in documents.

    Attributes:
        model: The underlying model, as methods train it.
        calibration: Calibration of its confidences (`fednotes calibrate`); None for the
            model's own confidences.
        folder: Folder of the saved model; None if it was not loaded from one.
    """

    reads: ClassVar[ModelInput] = "documents"

    def __init__(
        self,
        model: Model,
        calibration: Calibration | None = None,
        folder: Path | None = None,
    ) -> None:
        self.model = model
        self.calibration = calibration
        self.folder = folder

    def __repr__(self) -> str:
        return f"<MentionModel {self.model.config.kind}: {reprlib.repr([*self.types])}>"

    @classmethod
    def load(cls, folder: Path, options: LoadOptions) -> Self:
        """Load the model in a folder; see `SavedModel.load`."""
        if options.dictionary is not None:
            raise ParameterError(
                f"`dictionary` applies only to phenotyping models, and {folder} is not "
                "one; leave it out"
            )
        model = load_model(folder, options.device, options.backbone)
        calibration = Calibration.of(folder) if options.calibrated else None
        return cls(model, calibration, folder)

    @classmethod
    def describe(cls, facts: Mapping[str, Any]) -> ModelDescription:
        """Describe a model by the content of its JSON file, which may be damaged."""
        labels = _described_labels(facts)
        types = "type" if len(labels) == 1 else "types"
        return ModelDescription(
            task="token-classification",
            labels=labels,
            summary=f"Finds mentions of {len(labels)} {types} in clinical text",
            limits=(_LIMIT,),
        )

    @property
    def types(self) -> tuple[str, ...]:
        """The entity types that the model predicts."""
        return self.model.tagset.types

    @property
    def confidence(self) -> str:
        """Description of the confidence of a span."""
        calibration = self.calibration or "not calibrated"
        return f"{self.model.confidence_meaning}; {calibration}"

    # ---- predictions

    @overload
    def __call__(  # type: ignore[overload-overlap]  # a text is an iterable of texts
        self, text: Text, threshold: float = 0.0
    ) -> Document: ...
    @overload
    def __call__(
        self, text: Iterable[Text], threshold: float = 0.0
    ) -> list[Document]: ...

    def __call__(
        self, text: Text | Iterable[Text], threshold: float = 0.0
    ) -> Document | list[Document]:
        """Return a document with the spans that the model finds; a list for several.

        Annotations in a document are ignored.

        Args:
            text: A text or document, or several of them.
            threshold: Spans of a lower confidence are left out.

        Raises:
            DataError: An item is not a text.
            ConfigError: The threshold is not between 0 and 1.
        """
        if isinstance(text, str | Document):
            _require_threshold(threshold)
            (predicted,) = self._find([document_of(text, 1)], threshold)
            return predicted
        return list(self.stream(text, threshold=threshold))

    def stream(
        self, texts: Iterable[Text], batch: int = BATCH, threshold: float = 0.0
    ) -> Iterator[Document]:
        """Yield each text with the spans that the model finds, in order.

        The texts are read as needed, and never all held in memory.

        Args:
            texts: Texts or documents.
            batch: Number of documents that are read together. Their sentences are
                grouped by length.
            threshold: Spans of a lower confidence are left out.

        Raises:
            DataError: An item is not a text.
            ConfigError: The batch is below 1, or the threshold not between 0 and 1.
        """
        if not isinstance(batch, int) or batch < 1:
            raise ConfigError(f"batch = {batch}: expected an integer of at least 1")
        if isinstance(texts, str | Document):
            raise ConfigError(
                "a stream takes several texts: give a list, or call the model for one "
                "text"
            )
        if isinstance(texts, bytes | Mapping) or not isinstance(texts, Iterable):
            raise DataError(f"expected texts or Documents, not {type(texts).__name__}")
        _require_threshold(threshold)
        documents = (document_of(text, number) for number, text in enumerate(texts, 1))
        return self._find_in_stream(documents, batch, threshold)

    def predict_file(
        self,
        path: str | Path | NoteDatabase,
        *,
        format: str | None = None,
        column: str | None = None,
        encoding: str = AUTO,
        on_error: OnError = "refuse",
        threshold: float = 0.0,
    ) -> Iterator[Document]:
        """Find the mentions in a table or database of notes, a corpus or texts.

        Notes are read as needed, one batch at a time. Unless `on_error` is "skip", the
        file is first read once, so that a damaged file is refused.

        Args:
            path: The file, folder or database.
            format: Format of the notes; recognised if it is None.
            column: The column, or the key of JSON lines, that holds the text.
            encoding: Encoding of files without a byte-order mark that are not UTF-8,
                such as "cp1252".
            on_error: "skip" leaves out what cannot be used.
            threshold: Spans of a lower confidence are left out.

        Returns:
            The documents, in order, with the notes' ids and patients. `meta` has
            "visit" and "category" where the table has these.

        Raises:
            DataError: The file cannot be read, or its format is not known.
            ConfigError: A parameter has an impossible value.
        """
        source = NoteSource(
            name_of_notes(path),
            format=format,
            column=column,
            encoding=encoding,
            on_error=on_error,
        )
        _require_threshold(threshold)
        inputs = _open_inputs(source)
        return self._find_in_stream(inputs, FILE_BATCH, threshold)

    @classmethod
    def write_predictions(
        cls,
        folder: Path,
        source: NoteSource,
        output: PredictionOutput,
        options: LoadOptions,
    ) -> int:
        """Write the mentions in notes; see `SavedModel.write_predictions`."""
        _require_threshold(output.threshold)
        _require_possible_output(output)
        inputs = _open_inputs(source)
        if output.is_in_batches:
            settings = describe_prediction(folder, source, output)
            with open_sink(output, settings) as make_sink:
                model = cls.load(folder, options)
                predict = partial(
                    model._find_in_windows,
                    batch=FILE_BATCH,
                    threshold=output.threshold,
                )
                sink = make_sink(types=model.types)
                write_batches(inputs, predict, sink, inputs.count())
                number = sink.progress.notes
        else:
            model = cls.load(folder, options)
            number = model._write_file(inputs, output)

        skipped = str(inputs.problems)
        if skipped:
            print(f"note: left out of {inputs.where}: {skipped}", file=sys.stderr)
        return number

    def _write_file(self, inputs: Inputs, output: PredictionOutput) -> int:
        """Write the mentions in notes into a file, a folder of brat or stdout.

        Returns:
            The number of notes.
        """
        documents = Counted(
            self._find_in_stream(inputs, FILE_BATCH, output.threshold, inputs.count())
        )
        if output.to == "brat" and output.path is not None:
            write_brat(documents, output.path)
        elif output.to == "conll" and inputs.is_held:
            write_conll(tuple(documents), output.path)
        else:
            write_documents(documents, output.path, output.to, self.types)
        return documents.number

    def _find_in_stream(
        self,
        documents: Iterable[Document],
        batch: int,
        threshold: float,
        total: int | None = None,
    ) -> Iterator[Document]:
        """Yield documents with predicted spans, and show how many are done.

        Args:
            documents: The documents.
            batch: As in `_find_in_windows`.
            threshold: Spans of a lower confidence are left out.
            total: The number of documents; None if it is unknown.
        """
        with working("predicting notes", total) as count:
            yield from count.each(self._find_in_windows(documents, batch, threshold))

    def _find_in_windows(
        self, documents: Iterable[Document], batch: int, threshold: float
    ) -> Iterator[Document]:
        """Yield documents with predicted spans; hold only a few in memory at a time.

        Args:
            documents: The documents.
            batch: Largest number of documents that are read together; fewer if they are
                long.
            threshold: Spans of a lower confidence are left out.
        """
        window: list[Document] = []
        characters = 0
        for document in documents:
            window.append(document)
            characters += len(document.text)
            if len(window) >= batch or characters >= MAX_CHARACTERS:
                yield from self._find(window, threshold)
                window = []
                characters = 0
        if window:
            yield from self._find(window, threshold)

    def _find(
        self, documents: Sequence[Document], threshold: float
    ) -> Iterator[Document]:
        """Yield documents with the predicted spans that reach a confidence."""
        predicted = self.model.predict(documents, confidence=True)
        if self.calibration is not None:
            predicted = self.calibration.on(predicted)
        for document in predicted:
            spans = tuple(
                span for span in document.spans if (span.confidence or 0.0) >= threshold
            )
            yield replace(document, spans=spans)

    def explain(self, document: Text, span: Span | tuple[int, int]) -> dict[str, float]:
        """Return the probability of each label for a stretch of words.

        These are the model's probabilities, before any calibration, that the words are
        a mention with exactly these boundaries. "O" has the probability that none of
        the words is in any mention. The remaining probability belongs to other
        boundaries.

        Args:
            document: The text.
            span: The span, or its half-open range of characters.

        Raises:
            DataError: The model reads no word in the span, or the words are in several
                sentences.
            ModelError: The model is a pointer network, which scores only its own
                output.
        """
        words = span if isinstance(span, Span) else Span(*span, label="")
        return self.model.alternatives(document_of(document, 1), words)

    # ---- scores

    def evaluate(
        self,
        documents: str | Path | NoteDatabase | Sequence[Document],
        options: EvaluationOptions | None = None,
    ) -> Evaluation:
        """Score the model on annotated documents; see `SavedModel.evaluate`."""
        options = options or EvaluationOptions()
        if isinstance(documents, str | Path | NoteDatabase):
            documents = _require_files(documents)
        if options.labels is not None:
            raise ParameterError(
                "`labels` applies only to phenotyping models, and "
                f"{self.folder or 'the model'} finds mentions; leave it out"
            )
        annotated = read_annotated(
            documents, options.format, options.on_error, options.encoding
        )
        gold = prepare_gold(annotated, self.types, options.label_map, options.types)
        predicted = self.model.predict(gold.documents)
        counts = SpanCounts.of(gold.documents, predicted, types=gold.scored)
        unscored = [label for label in self.types if label not in gold.scored]
        return Evaluation(
            counts.scores(),
            unknown=tuple(label for label in gold.labels if label not in self.types),
            not_annotated=tuple(
                label for label in unscored if label not in gold.labels
            ),
            not_requested=tuple(label for label in unscored if label in gold.labels),
            skipped=annotated.skipped,
        )

    def judge_confidences(
        self,
        documents: str | Path | Sequence[Document],
        label_map: Mapping[str, str] | None,
        encoding: str,
    ) -> JudgedConfidences:
        """Return confidences, and which are right; see `SavedModel`."""
        annotated = read_annotated(documents, encoding=encoding)
        gold = prepare_gold(annotated, self.types, label_map)
        predicted = self.model.predict(gold.documents, confidence=True)
        confidences, is_right, owners = judge_spans(
            gold.documents, predicted, gold.scored
        )
        if self.calibration is not None:
            confidences = self.calibration.values(confidences)
        return JudgedConfidences(confidences, is_right, owners)


def _require_threshold(threshold: float) -> None:
    """Raise ConfigError unless a threshold is a number between 0 and 1."""
    is_number = isinstance(threshold, int | float | np.number)
    if not (is_number and 0.0 <= threshold <= 1.0):
        raise ConfigError(f"threshold = {threshold!r}: expected 0 to 1")


def _require_files(place: str | Path | NoteDatabase) -> str | Path:
    """Return the path of annotated documents.

    Raises:
        ConfigError: It is a database.
    """
    if isinstance(place, NoteDatabase) or isinstance(
        place_of_notes(place), NoteDatabase
    ):
        raise ConfigError(
            f"{place}: notes in a database have no annotations to score against: "
            "give an annotated file or folder"
        )
    return place


def _require_possible_output(output: PredictionOutput) -> None:
    """Raise ParameterError unless mentions can be written as `output` says."""
    output.require_possible()
    formats = [*SUFFIXES, "brat"]
    if output.to not in formats:
        raise ParameterError(
            f"`to` = {output.to!r}: mentions are written as {list_names(formats)}; "
            "choose one of these"
        )
    if output.to == "brat" and output.path is None:
        raise ParameterError("brat is a folder of files: give the folder in `out`")
    if output.to == "brat" and output.shard:
        raise ParameterError(
            "brat has a file for each note, so it needs no `shard`: leave it out, or "
            "choose another `to`"
        )
    if output.to in BINARY and output.path is None:
        raise ParameterError(
            f"{output.to} is not a text: give the file to write in `out`"
        )


def _open_inputs(source: NoteSource) -> Inputs:
    """Return the documents of a source after checking it."""
    inputs = open_inputs(
        source.path,
        source.text,
        source.on_error,
        format=source.format,
        column=source.column,
        encoding=source.encoding,
    )
    inputs.require_readable()
    return inputs


def _described_labels(facts: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the entity types that a model's JSON file names; none if it is damaged."""
    if "id2label" in facts:
        tags = map(str, mapping(facts["id2label"]).values())
        names = [tag.partition("-")[2] for tag in tags if "-" in tag]
        return tuple(dict.fromkeys(names))
    types = mapping(facts.get("tagset")).get("types")
    return tuple(map(str, types)) if isinstance(types, list) else ()
