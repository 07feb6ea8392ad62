"""A saved model on new text: mentions in documents, which are read and written one by
one."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from fednotes.core.errors import (
    ConfigError,
    DataError,
    FednotesError,
    ParameterError,
    nearest,
)
from fednotes.core.store import locked_folder, stream_out, temporary_path, write_out
from fednotes.core.types import Document
from fednotes.data.encodings import AUTO
from fednotes.data.formats import FORMATS
from fednotes.data.formats.jsonl import to_json, to_record
from fednotes.data.formats.problems import OnError
from fednotes.data.tags import flatten, relabel, types_of
from fednotes.jobs.evaluation import Evaluation, require_mapping
from fednotes.jobs.inputs import Inputs, inputs_of
from fednotes.jobs.patient_models import kind_of
from fednotes.metrics.calibration import Calibration
from fednotes.metrics.spans import SpanCounts
from fednotes.taggers.model import Model
from fednotes.taggers.saving import load_model

# Documents that a model reads together: enough to fill its batches with sentences of
# like length.
_DOCUMENTS, _CHARACTERS = 256, 1 << 19


def predict(
    model: Path,
    path: str,
    format: str,
    out: Path | None,
    device: str,
    place: str | None = None,
    *,
    text: str | None = None,
    on_error: OnError = "refuse",
    threshold: float = 0.0,
    read_as: str | None = None,
    column: str | None = None,
    encoding: str = AUTO,
) -> None:
    """Predict mentions and write them; or phenotypes by patient, or billing codes.

    Notes are read, and mentions written, one batch after the other. A model of patients
    reads one note at a time and keeps what it needs of each patient. `out` appears when
    all of it is written.

    Args:
        model: A saved model's folder.
        path: A file or folder, or `-` for stdin. For a model of patients, a note
            without a patient is a patient of its own, by its id.
        format: How predictions are written: "jsonl", "brat" or "conll"; of patients
            "jsonl", "csv".
        out: A file, or a folder of brat; None writes to stdout.
        device: As of torch.
        place: Where the model's frozen encoder, or dictionary, is now, if it has moved.
        text: A text in place of a path.
        on_error: As of `inputs_of`.
        threshold: As of `confident`.
        read_as: The format of what is read, as of `inputs_of`.
        column: As of `inputs_of`.
        encoding: As of `inputs_of`.

    Raises:
        ConfigError: A parameter is for models of the other kind, brat has no folder, or
            `out` is what is read.
        DataError: A file cannot be read.
        ModelError: The folder holds no model that can be read.
    """
    patient_model = kind_of(model)
    if patient_model and format not in ("jsonl", "csv"):
        raise ConfigError(
            f"phenotypes are written as jsonl or csv: {format} is for mentions"
        )
    if patient_model and threshold:
        raise ParameterError(
            "`threshold` is for mentions; phenotypes have probabilities"
        )
    if format == "csv" and not patient_model:
        raise ConfigError(
            "csv is for phenotypes of patients: mentions are jsonl, brat or conll"
        )
    if format == "brat" and out is None:
        raise ParameterError("brat is a folder of files: name the folder in `out`")
    _require_apart(path, out)
    if patient_model:
        notes = patient_model.read_notes(
            path, text, format=read_as, column=column, encoding=encoding
        )
        written = patient_model.load(model, device, place).written(notes, format)
        if out is None:
            sys.stdout.write(written)
        else:
            write_out(out, written)
        return
    recogniser, calibration = load_model(model, device, place), Calibration.of(model)
    inputs = inputs_of(
        path, text, on_error, format=read_as, column=column, encoding=encoding
    )
    inputs.require_readable()
    found = confident_stream(recogniser, calibration, inputs, threshold)
    if format == "brat" and out is not None:
        write_brat(found, out)
    elif format == "conll" and inputs.is_held:
        write_conll(tuple(found), out)
    else:
        write_documents(found, out, format)
    _tell_left_out(inputs)


def _tell_left_out(inputs: Inputs) -> None:
    """Say on stderr what of the input has no predictions."""
    if left := str(inputs.problems):
        print(f"note: left out of {inputs.where}: {left}", file=sys.stderr)


def _require_apart(name: str, out: Path | None) -> None:
    """Raises ConfigError where predictions would replace what is read, and its
    annotations."""
    if out is None or name == "-" or not out.exists():
        return
    path, to = Path(name).resolve(), out.resolve()
    read_from = path.parent if path.is_file() else path
    if to in (path, read_from) or (to.is_file() and path in to.parents):
        raise ParameterError(
            f"`out` {out}: predictions would replace files of {name}: give another"
        )


# ---- how predictions are written -----------------------------------------------------


def write_documents(
    documents: Iterable[Document], out: Path | None, format: str
) -> None:
    """Write predictions as JSON lines or CoNLL, each as it comes.

    Args:
        documents: The documents with their predicted mentions.
        out: A file, which is there whole in the end or not at all; None is stdout.
        format: "jsonl" or "conll".
    """
    with _opened_out(out) as file:
        if format == "jsonl":
            for document in documents:
                file.write(prediction_line(document).encode("utf-8"))
        else:
            for lines in FORMATS["conll"].document_lines(documents):
                file.write("".join(f"{line}\n" for line in lines).encode("utf-8"))


def write_conll(documents: Sequence[Document], out: Path | None) -> None:
    """Write predictions as CoNLL in the layout in which the documents were read."""
    if out is not None:
        FORMATS["conll"].write(documents, out)
        return
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "predictions")
        FORMATS["conll"].write(documents, made)
        sys.stdout.write(made.read_bytes().decode())


@contextmanager
def _opened_out(out: Path | None) -> Iterator[IO[bytes]]:
    if out is not None:
        with stream_out(out) as file:
            yield file
        return
    sys.stdout.flush()
    yield sys.stdout.buffer
    sys.stdout.buffer.flush()


def prediction_line(document: Document) -> str:
    """Return a document as a JSON line: the project's form, with "visit" beside
    "patient"."""
    visit = document.meta.get("visit")
    if visit is None:
        return f"{to_json(document, to_record(document))}\n"
    meta = {name: value for name, value in document.meta.items() if name != "visit"}
    value: dict[str, Any] = to_record(replace(document, meta=meta))
    return f"{to_json(document, {**value, 'visit': visit})}\n"


def write_brat(documents: Iterable[Document], out: Path) -> None:
    """Write predictions as brat's pairs of files, into a folder.

    They are written beside it and moved there when all are whole. Of several documents
    of one id the later ones are called `id~2`, `id~3` and so on.

    Raises:
        FednotesError: The folder cannot be written.
    """
    brat = FORMATS["brat"]
    if out.exists() and not out.is_dir():
        raise DataError(f"{out}: brat needs a folder and this is a file")
    stage = temporary_path(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with locked_folder(stage, mode=0o777):
            brat.write(_distinct(documents), stage)
            if out.exists():
                _move_files(stage, out)
            else:
                os.rename(stage, out)
    except OSError as error:
        raise FednotesError(
            f"{out}: cannot be written ({error.strerror or error})"
        ) from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _distinct(documents: Iterable[Document]) -> Iterator[Document]:
    """The documents with ids of their own."""
    seen: Counter[str] = Counter()
    for document in documents:
        name = document.id
        while seen[name]:
            seen[document.id] += 1
            name = f"{document.id}~{seen[document.id]}"
        seen[name] += 1
        yield document if name == document.id else replace(document, id=name)


def _move_files(stage: Path, out: Path) -> None:
    for file in sorted(stage.rglob("*")):
        place = out / file.relative_to(stage)
        if file.is_dir():
            place.mkdir(exist_ok=True)
        else:
            os.replace(file, place)


# ---- mentions ------------------------------------------------------------------------


def confident(
    recogniser: Model,
    calibration: Calibration | None,
    documents: Sequence[Document],
    threshold: float = 0.0,
) -> tuple[Document, ...]:
    """The documents with predicted spans and their confidences, calibrated where that
    is known.

    threshold: spans of less confidence are left out. Raises ConfigError for an
        impossible one.
    """
    if not (isinstance(threshold, int | float | np.number) and 0.0 <= threshold <= 1.0):
        raise ConfigError(f"threshold = {threshold!r}: a confidence is from 0 to 1")
    found = recogniser.predict(documents, confidence=True)
    found = calibration.on(found) if calibration else found
    return tuple(
        replace(
            d, spans=tuple(s for s in d.spans if (s.confidence or 0.0) >= threshold)
        )
        for d in found
    )


def confident_stream(
    recogniser: Model,
    calibration: Calibration | None,
    documents: Iterable[Document],
    threshold: float = 0.0,
    most: int = _DOCUMENTS,
) -> Iterator[Document]:
    """Yield each document with its predicted spans, in order, as `confident` finds
    them.

    Args:
        recogniser: The model.
        calibration: Of its confidences.
        documents: They are taken as they are needed: at most `most`, and few of long
            ones.
        threshold: Spans of less confidence are left out.
        most: Documents that are held, and read together, at a time.
    """
    # refused here, not at the first one
    confident(recogniser, calibration, [], threshold)
    return _predicted(recogniser, calibration, iter(documents), threshold, most)


def _predicted(
    recogniser: Model,
    calibration: Calibration | None,
    documents: Iterator[Document],
    threshold: float,
    most: int,
) -> Iterator[Document]:
    window: list[Document] = []
    held = 0
    for document in documents:
        window.append(document)
        held += len(document.text)
        if len(window) >= most or held >= _CHARACTERS:
            yield from confident(recogniser, calibration, window, threshold)
            window, held = [], 0
    if window:
        yield from confident(recogniser, calibration, window, threshold)


def evaluate_documents(
    recogniser: Model,
    documents: tuple[Document, ...],
    path: str,
    label_map: Mapping[str, str] | None = None,
    *,
    types: Sequence[str] = (),
    skipped: str = "",
) -> Evaluation:
    """Scores of a model on annotated documents.

    Scored are the model's types that the documents annotate, for their silence about
    another says nothing; or `types`, which may be among those that they do not mention.
    path: how messages call the documents; skipped: what of it could not be used.
    label_map: as in the job; unknown labels are left out of the scores.
    Raises DataError if the file annotates none of the model's types, ConfigError for a
    label to map or a type that is not there.
    """
    gold, scored, found = gold_of(recogniser, documents, path, label_map, types)
    known = recogniser.tagset.types
    return Evaluation(
        SpanCounts.of(gold, recogniser.predict(gold), types=scored).scores(),
        tuple(label for label in found if label not in known),
        tuple(label for label in known if label not in scored and label not in found),
        tuple(label for label in known if label not in scored and label in found),
        skipped,
    )


def gold_of(
    recogniser: Model,
    documents: tuple[Document, ...],
    path: str,
    label_map: Mapping[str, str] | None = None,
    types: Sequence[str] = (),
) -> tuple[tuple[Document, ...], tuple[str, ...], tuple[str, ...]]:
    """Documents with flat spans of the model's types; the types that can be scored; and
    all labels that the documents have. Arguments and errors as of `evaluate_documents`.
    """
    known = recogniser.tagset.types
    label_map = require_mapping(label_map, types_of(documents), known, path)
    documents = relabel(documents, label_map, None)
    found = types_of(documents)
    for label in types:
        if label not in known:
            raise ParameterError(
                f"`types`: the model has no {label!r}; {nearest(label, known)}"
            )
    scored = tuple(t for t in known if t in (types or found))
    if not scored:
        raise DataError(
            f"{path} annotates {', '.join(found) or 'nothing'}, the model knows "
            f"{', '.join(known)}: no label is common; rename labels by label_map "
            "(on the command line --map OLD=NEW)"
        )
    gold = tuple(
        replace(d, spans=flatten(d.spans, "outermost")[0])
        for d in relabel(documents, {}, known)
    )
    return gold, scored, found
