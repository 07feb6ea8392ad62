"""Saved models that find mentions in documents.

`MentionModel` and `fednotes predict` find the same spans with the same confidences.
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self, overload

import numpy as np
import torch

from fednotes.core.errors import ConfigError, DataError, ParameterError
from fednotes.core.parsing import as_mapping
from fednotes.core.types import Document, Span
from fednotes.core.wording import list_names
from fednotes.core.work import working
from fednotes.data.encodings import AUTO
from fednotes.data.formats.problems import OnError
from fednotes.data.notes import NoteDatabase, make_note_place
from fednotes.jobs.evaluation import Evaluation
from fednotes.jobs.gold_documents import prepare_gold, read_annotated
from fednotes.jobs.inputs import Inputs, name_of_notes, open_inputs
from fednotes.jobs.prediction_batches import write_batches
from fednotes.jobs.prediction_files import write_brat, write_conll, write_documents
from fednotes.jobs.prediction_sinks import describe_prediction, open_sink
from fednotes.jobs.prediction_windows import (
    FILE_BATCH,
    Window,
    WindowPredictor,
    cut_windows,
)
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
from fednotes.jobs.texts import Text, to_document
from fednotes.jobs.workers.dealing import choose_devices
from fednotes.jobs.workers.predictions import (
    FEWER_WORKERS,
    choose_worker_devices,
    require_possible_workers,
    running_prediction_workers,
)
from fednotes.metrics.calibration import Calibration, judge_spans
from fednotes.metrics.spans import SpanCounts
from fednotes.taggers.model import Model
from fednotes.taggers.saving import load_model

# Number of documents that `MentionModel.stream` reads together.
BATCH = 32
# Remedy for a worker that has ended before its time.
_RESUME = f"give `resume` to continue, and {FEWER_WORKERS.removeprefix('give ')}"

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
        options: How it was loaded; `stream` and `predict_file` start this number of
            workers, which load the folder's model.
    """

    reads: ClassVar[ModelInput] = "documents"

    def __init__(
        self,
        model: Model,
        calibration: Calibration | None = None,
        folder: Path | None = None,
        options: LoadOptions | None = None,
    ) -> None:
        self.model = model
        self.calibration = calibration
        self.folder = folder
        self.options = options or LoadOptions()

    def __repr__(self) -> str:
        return f"<MentionModel {self.model.config.kind}: {reprlib.repr([*self.types])}>"

    @classmethod
    def load(cls, folder: Path, options: LoadOptions) -> Self:
        """Load the model in a folder; see `SavedModel.load`."""
        if options.dictionary is not None:
            raise ParameterError(
                f"`dictionary` applies only to phenotyping models, and {folder} is not "
                "one: leave it out"
            )
        require_possible_workers(options)
        (device,) = choose_devices(options.device, 1)
        model = load_model(folder, device, options.backbone)
        calibration = Calibration.read(folder) if options.calibrated else None
        return cls(model, calibration, folder, options)

    @classmethod
    def describe(cls, facts: Mapping[str, Any]) -> ModelDescription:
        """Describe a model by the content of its JSON file, which may be damaged."""
        labels = _read_labels(facts)
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
            (predicted,) = self._find_mentions([to_document(text, 1)], threshold)
            return predicted
        documents = _to_documents(text, BATCH, threshold)
        return list(self.predict_windows(cut_windows(documents, BATCH), threshold))

    def stream(
        self, texts: Iterable[Text], batch: int = BATCH, threshold: float = 0.0
    ) -> Iterator[Document]:
        """Yield each text with the spans that the model finds, in order.

        The texts are read as needed, and never all held in memory. If the model was
        loaded with `workers`, they start with the first document and end with the last.

        Args:
            texts: Texts or documents.
            batch: Number of documents that are read together. Their sentences are
                grouped by length.
            threshold: Spans of a lower confidence are left out.

        Raises:
            DataError: An item is not a text.
            ConfigError: The batch is below 1, or the threshold not between 0 and 1.
            WorkerError: A worker has ended before its time.
        """
        documents = _to_documents(texts, batch, threshold)
        total = len(texts) if isinstance(texts, Sized) else None
        return self._find_in_stream(documents, batch, threshold, total)

    def predict_file(
        self,
        path: str | Path | NoteDatabase,
        *,
        format: str | None = None,
        column: str | None = None,
        id_column: str | None = None,
        encoding: str = AUTO,
        on_error: OnError = "refuse",
        threshold: float = 0.0,
    ) -> Iterator[Document]:
        """Find the mentions in a table or database of notes, a corpus or texts.

        Notes are read as needed, one batch at a time. Unless `on_error` is "skip", the
        file is first read once, so that a damaged file is refused. Workers start as in
        `stream`.

        Args:
            path: The file, folder or database.
            format: Format of the notes; recognised if it is None.
            column: The column, or the key of JSON lines, that holds the text.
            id_column: The column, or the key of JSON lines, with the notes' ids.
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
            id_column=id_column,
            encoding=encoding,
            on_error=on_error,
        )
        _require_threshold(threshold)
        inputs = _open_inputs(source)
        return self._find_in_stream(inputs, FILE_BATCH, threshold, inputs.count())

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
            number = cls._write_in_batches(folder, inputs, source, output, options)
        else:
            number = cls._write_file(folder, inputs, output, options)

        skipped = str(inputs.problems)
        if skipped:
            print(f"note: left out of {inputs.where}: {skipped}", file=sys.stderr)
        return number

    @classmethod
    def _write_in_batches(
        cls,
        folder: Path,
        inputs: Inputs,
        source: NoteSource,
        output: PredictionOutput,
        options: LoadOptions,
    ) -> int:
        """Write the mentions in notes into a folder of shards or a database.

        Returns:
            The number of notes that are done.
        """
        total = inputs.count()
        settings = describe_prediction(folder, source, output)
        with (
            open_sink(output, settings) as make_sink,
            cls._opening_predictor(folder, options, total, _RESUME) as predictor,
        ):

            def predict(notes: Iterable[Document], batch: int) -> Iterator[Document]:
                windows = cut_windows(notes, FILE_BATCH, batch)
                return predictor.predict_windows(windows, output.threshold)

            sink = make_sink(types=predictor.types)
            write_batches(inputs, predict, sink, total)
            return sink.progress.notes

    @classmethod
    def _write_file(
        cls,
        folder: Path,
        inputs: Inputs,
        output: PredictionOutput,
        options: LoadOptions,
    ) -> int:
        """Write the mentions in notes into a file, a folder of brat or stdout.

        Returns:
            The number of notes.
        """
        total = inputs.count()
        with (
            cls._opening_predictor(folder, options, total, FEWER_WORKERS) as predictor,
            working("predicting notes", total) as count,
        ):
            windows = cut_windows(inputs, FILE_BATCH)
            predicted = predictor.predict_windows(windows, output.threshold)
            documents = Counted(count.each(predicted))
            if output.to == "brat" and output.path is not None:
                write_brat(documents, output.path)
            elif output.to == "conll" and inputs.holds_all_documents:
                write_conll(tuple(documents), output.path)
            else:
                write_documents(documents, output.path, output.to, predictor.types)
            return documents.number

    @classmethod
    @contextmanager
    def _opening_predictor(
        cls, folder: Path, options: LoadOptions, notes: int | None, remedy: str
    ) -> Iterator[WindowPredictor]:
        """Load a model here, or in workers that end with the context.

        Args:
            folder: Folder of the model.
            options: How it is loaded.
            notes: The number of notes; None if it is unknown.
            remedy: What to do if a worker ends before its time.
        """
        devices = choose_worker_devices(folder, options, notes)
        if len(devices) == 1:
            yield cls.load(folder, replace(options, device=devices[0]))
            return
        with running_prediction_workers(folder, options, devices, remedy) as workers:
            yield workers

    @contextmanager
    def _choosing_predictor(self, notes: int | None) -> Iterator[WindowPredictor]:
        """Yield this model, or workers that end with the context.

        Args:
            notes: The number of notes; None if it is unknown.
        """
        devices: list[str] = []
        if self.folder is not None and self.options.workers != 1:
            devices = choose_worker_devices(self.folder, self.options, notes)
        if self.folder is None or len(devices) <= 1:
            yield self
            return
        with running_prediction_workers(
            self.folder, self.options, devices, FEWER_WORKERS
        ) as workers:
            yield workers

    def _find_in_stream(
        self,
        documents: Iterable[Document],
        batch: int,
        threshold: float,
        total: int | None,
    ) -> Iterator[Document]:
        """Yield documents with predicted spans, and show how many are done.

        Args:
            documents: The documents.
            batch: Largest number of documents that are read together.
            threshold: Spans of a lower confidence are left out.
            total: The number of documents; None if it is unknown.
        """
        with (
            self._choosing_predictor(total) as predictor,
            working("predicting notes", total) as count,
        ):
            windows = cut_windows(documents, batch)
            yield from count.each(predictor.predict_windows(windows, threshold))

    def predict_windows(
        self, windows: Iterable[Window], threshold: float
    ) -> Iterator[Document]:
        """Yield the documents of windows with predicted spans; see `WindowPredictor`.

        One window is in memory at a time.
        """
        for window in windows:
            yield from self._find_mentions(window, threshold)

    def _find_mentions(
        self, documents: Window, threshold: float
    ) -> tuple[Document, ...]:
        """Return documents with the predicted spans of at least this confidence."""
        with _using_preferred_threads(self.model):
            predicted = self.model.predict(documents, confidence=True)
        if self.calibration is not None:
            predicted = tuple(self.calibration.apply_to(predicted))
        return tuple(
            replace(document, spans=_keep_sure_spans(document.spans, threshold))
            for document in predicted
        )

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
        return self.model.compute_alternatives(to_document(document, 1), words)

    # ---- scores

    def evaluate(
        self,
        documents: str | Path | NoteDatabase | Sequence[Document],
        options: EvaluationOptions | None = None,
    ) -> Evaluation:
        """Score the model on annotated documents; see `SavedModel.evaluate`."""
        options = options or EvaluationOptions()
        if isinstance(documents, str | Path | NoteDatabase):
            documents = _require_path(documents)
        if options.labels is not None:
            raise ParameterError(
                "`labels` applies only to phenotyping models, and "
                f"{self.folder or 'the model'} finds mentions: leave it out"
            )
        annotated = read_annotated(
            documents, options.format, options.on_error, options.encoding
        )
        gold = prepare_gold(
            annotated, self.model.tagset, options.label_map, options.types
        )
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
        gold = prepare_gold(annotated, self.model.tagset, label_map)
        predicted = self.model.predict(gold.documents, confidence=True)
        confidences, is_right, owners = judge_spans(
            gold.documents, predicted, gold.scored
        )
        if self.calibration is not None:
            confidences = self.calibration.apply(confidences)
        return JudgedConfidences(confidences, is_right, owners)


def _keep_sure_spans(spans: Iterable[Span], threshold: float) -> tuple[Span, ...]:
    """Return the spans whose confidence is at least `threshold`."""
    return tuple(span for span in spans if (span.confidence or 0.0) >= threshold)


@contextmanager
def _using_preferred_threads(model: Model) -> Iterator[None]:
    """Within the context, let torch compute with one thread if the model prefers it.

    The last bits of a confidence depend on the number of threads, so it follows from
    the model alone.
    """
    threads = torch.get_num_threads()
    if threads == 1 or not model.config.prefers_one_thread:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _to_documents(
    texts: Iterable[Text], batch: int, threshold: float
) -> Iterator[Document]:
    """Check the arguments of a stream; return its texts as documents, read as needed.

    Raises:
        DataError: There is no iterable of texts.
        ConfigError: As `MentionModel.stream`.
    """
    if not isinstance(batch, int) or batch < 1:
        raise ConfigError(f"batch = {batch}: expected an integer of at least 1")
    if isinstance(texts, str | Document):
        raise ConfigError(
            "a stream takes several texts: give a list, or call the model for one text"
        )
    if isinstance(texts, bytes | Mapping) or not isinstance(texts, Iterable):
        raise DataError(f"expected texts or Documents, not {type(texts).__name__}")
    _require_threshold(threshold)
    return (to_document(text, number) for number, text in enumerate(texts, 1))


def _require_threshold(threshold: float) -> None:
    """Raise ConfigError unless a threshold is a number between 0 and 1."""
    is_number = isinstance(threshold, int | float | np.number)
    if not (is_number and 0.0 <= threshold <= 1.0):
        raise ConfigError(f"threshold = {threshold!r}: expected a number from 0 to 1")


def _require_path(place: str | Path | NoteDatabase) -> str | Path:
    """Return the path of annotated documents.

    Raises:
        ConfigError: It is a database.
    """
    if isinstance(place, NoteDatabase) or isinstance(
        make_note_place(place), NoteDatabase
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
            f"`to` = {output.to!r}: mentions are written as {list_names(formats)}: "
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
    """Open the documents of a source, which is read once if it may be damaged."""
    inputs = open_inputs(
        source.path,
        source.text,
        source.on_error,
        format=source.format,
        column=source.column,
        id_column=source.id_column,
        encoding=source.encoding,
    )
    inputs.require_readable()
    return inputs


def _read_labels(facts: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the entity types that a model's JSON file names; none if it is damaged."""
    if "id2label" in facts:
        tags = map(str, as_mapping(facts["id2label"]).values())
        names = [tag.partition("-")[2] for tag in tags if "-" in tag]
        return tuple(dict.fromkeys(names))
    types = as_mapping(facts.get("tagset")).get("types")
    return tuple(map(str, types)) if isinstance(types, list) else ()
