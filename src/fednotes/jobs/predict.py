"""A saved model on new text: mentions in documents (`predict_patients.py`: phenotypes)."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fednotes.core.errors import ConfigError, DataError, nearest
from fednotes.core.types import Document
from fednotes.data.formats import FORMATS, examine, guess_format, read
from fednotes.data.formats.files import OnError, open_file, visible
from fednotes.data.tags import flatten, relabel, types_of
from fednotes.metrics.spans import SpanCounts
from fednotes.taggers.saving import load_model

_NAME = 100  # characters of a path that a message shows


def predict_text(
    model: Path,
    path: str,
    format: str,
    out: Path | None,
    device: str,
    backbone: str | None = None,
    *,
    text: str | None = None,
    on_error: OnError = "refuse",
) -> None:
    """Predict and write.

    path: a file or folder, or `-` for stdin. text: a text in place of it. backbone: where the
    frozen encoder is, if it has moved since the model was saved. on_error: as `formats.read`.

    Raises ConfigError where brat is asked for without a folder, or `out` is what is read, DataError
    for a bad file.
    """
    if format == "csv":
        raise ConfigError("csv is for phenotypes of patients: mentions are jsonl, brat or conll")
    if format == "brat" and out is None:
        raise ConfigError("brat is a folder of files: give --out FOLDER")
    if out is not None:
        require_apart(path, out)
    recogniser = load_model(model, device, backbone)
    predicted = recogniser.predict(documents_of(path, text, on_error))
    if out is not None:
        FORMATS[format].write(predicted, out)
        return
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "predictions"
        FORMATS[format].write(predicted, made)
        sys.stdout.write(made.read_text(encoding="utf-8"))


def documents_of(
    name: str, text: str | None = None, on_error: OnError = "refuse"
) -> tuple[Document, ...]:
    """Documents from a corpus file or folder, plain text files, stdin (`-`), or the text given.

    Raises DataError for a path that does not exist, and for what cannot be read.
    """
    if text is not None:
        return (given(name, text),)
    if name == "-":
        return (Document("stdin", _decoded("stdin", sys.stdin.buffer.read())),)
    path = existing(name)
    try:
        format = guess_format(path)
    except DataError:
        files = visible(path) if path.is_dir() else [path]
        if not files or (path.is_dir() and any(file.suffix != ".txt" for file in files)):
            raise
        return tuple(Document(f.stem, _decoded(str(f), _bytes(f))) for f in files)
    return read(path, format, on_error)


def given(name: str, text: str) -> Document:
    if name != "-":
        raise ConfigError("give a path or --text, not both")
    if not text.strip():
        raise DataError("--text: there is no text")
    return Document("text", _decoded("the text", os.fsencode(text)))


def existing(text: str) -> Path:
    """The file or folder that is meant: never a text. Raises DataError where there is none."""
    path = Path(text)
    try:
        exists = bool(text.strip()) and path.exists()
    except (OSError, ValueError):  # longer than a path may be
        exists = False
    if not exists:
        name = text if len(text) <= _NAME else f"{text[:_NAME]}…"
        raise DataError(f"{name}: no such file or folder; for text use --text or -")
    return path


def require_apart(name: str, out: Path) -> None:
    """Raises ConfigError where predictions would replace what is read, and its annotations."""
    if name == "-" or not out.exists():
        return
    path, to = Path(name).resolve(), out.resolve()
    read_from = path.parent if path.is_file() else path
    if to in (path, read_from) or (to.is_file() and path in to.parents):
        raise ConfigError(f"--out {out}: predictions would replace files of {name}: give another")


def _bytes(path: Path) -> bytes:
    with open_file(path) as file:
        return file.read()


def _decoded(source: str, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{source}: not UTF-8 at byte {error.start}: convert it first") from error


def evaluate_path(
    model: Path,
    path: Path,
    format: str | None,
    device: str,
    label_map: Mapping[str, str] | None = None,
    backbone: str | None = None,
    *,
    types: Sequence[str] = (),
    on_error: OnError = "refuse",
) -> Evaluation:
    """Scores of a saved model on annotated documents.

    Scored are the model's types that the documents annotate, for their silence about another
    says nothing; or `types`, which may be among those that they do not mention.
    label_map: as in the job; unknown labels are left out of the scores. backbone, on_error: as
    in `predict_text`.
    Raises DataError if the file annotates none of the model's types, ConfigError for a label to
    map or a type that is not there.
    """
    recogniser = load_model(model, device, backbone)
    documents, problems = examine(path, format)
    if on_error == "refuse" or not documents:
        problems.refuse()
    known = recogniser.tagset.types
    require_mapping(label_map or {}, types_of(documents), known, path)
    documents = relabel(documents, label_map or {}, None)
    found = types_of(documents)
    for label in types:
        if label not in known:
            raise ConfigError(f"--types: the model has no {label!r}; {nearest(label, known)}")
    scored = tuple(t for t in known if t in (types or found))
    if not scored:
        raise DataError(
            f"{path} annotates {', '.join(found) or 'nothing'}, the model knows "
            f"{', '.join(known)}: no label is common; name them alike with --map OLD=NEW"
        )
    gold = tuple(
        replace(d, spans=flatten(d.spans, "outermost")[0]) for d in relabel(documents, {}, known)
    )
    return Evaluation(
        SpanCounts.of(gold, recogniser.predict(gold), types=scored).scores(),
        tuple(label for label in found if label not in known),
        tuple(label for label in known if label not in scored and label not in found),
        tuple(label for label in known if label not in scored and label in found),
        str(problems),
    )


@dataclass(frozen=True)
class Evaluation:
    """Scores of mentions, and what was not scored.

    unknown: labels of the documents that the model lacks. silent: types of the model that the
    documents do not annotate. left: types that they do, but that were not asked for. skipped:
    what of the documents could not be used.
    """

    scores: dict[str, Any]
    unknown: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    skipped: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The scores, and what was not scored, for JSON."""
        rest = {"unknown": self.unknown, "not_annotated": self.silent, "not_asked": self.left}
        return {**self.scores, "not_scored": {k: list(v) for k, v in rest.items()}}

    def told(self) -> Iterator[str]:
        """What was not scored, a line each."""
        if self.unknown:
            names = ", ".join(self.unknown)
            yield f"the model has no {names}: left out (--map OLD=NEW)"
        if self.silent:
            names = ", ".join(self.silent)
            yield f"not annotated here, so not scored: {names} (--types scores them all the same)"
        if self.skipped:
            yield f"left out of the documents: {self.skipped}"


def require_mapping(
    label_map: Mapping[str, str], found: Sequence[str], known: Sequence[str], path: Path
) -> None:
    """Raises ConfigError for a label that is not there, or that becomes none of the model's."""
    for old, new in label_map.items():
        if old not in found:
            near = nearest(old, found)
            near = f"; {near}" if near.startswith("did") else ""
            raise ConfigError(
                f"--map {old}={new}: {path} has no label {old!r}, it has "
                f"{', '.join(found) or 'none'}{near}"
            )
        if new and new not in known:
            raise ConfigError(f"--map {old}={new}: the model has no {new!r}; {nearest(new, known)}")
