"""Predict in batches that a killed command neither loses nor writes twice.

A sink stores each batch together with the record of the notes that are done: a folder
of shards by renaming complete files (`FolderSink`), a database in one transaction
(`jobs/prediction_database.py`). A command that resumes reads the notes that are done
again, without predicting them, and refuses if they have changed.

A batch is predicted on its own, so a resumed command predicts the same batches as an
undisturbed one, and writes the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol

from annotated_types import Interval
from pydantic import AfterValidator, TypeAdapter, ValidationError

from fednotes.core.errors import (
    DataError,
    FednotesError,
    ParameterError,
    raising_os_errors_as,
)
from fednotes.core.parsing import read_regular
from fednotes.core.store import replacing, reserving_folder, write_json
from fednotes.core.types import Document
from fednotes.core.work import working
from fednotes.jobs.prediction_writers import SUFFIXES, FileFacts, open_writer

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_VERSION = 1

# Predicts notes one after another, each batch of this number apart from the others.
Predict = Callable[[Iterable[Document], int], Iterator[Document]]


def _require_date(text: str) -> str:
    """Return a text, or raise ValueError unless it is a date."""
    date.fromisoformat(text)
    return text


# What a record may hold, which a stranger may have written.
_Count = Annotated[int, Interval(ge=0, le=2**53)]
_Day = Annotated[str, AfterValidator(_require_date)]


@dataclass(frozen=True)
class PredictionProgress:
    """The record of the notes that are done.

    Attributes:
        settings: The model, the input and the options, as text by name.
        started: The date on which the first batch was begun, such as "2026-01-31".
        notes: The number of notes that are done: the first ones of the input.
        mentions: The number of their mentions.
        digest: A hash over the ids and texts of these notes, in their order.
        last_note: The id of the last of them.
        is_complete: Whether the input had no further note.
    """

    settings: Mapping[str, str]
    started: _Day = field(default_factory=lambda: date.today().isoformat())
    notes: _Count = 0
    mentions: _Count = 0
    digest: str = ""
    last_note: str = ""
    is_complete: bool = False

    def add_note(self, document: Document) -> PredictionProgress:
        """Return the record after one more note of the input."""
        return replace(
            self,
            notes=self.notes + 1,
            digest=extend_digest(self.digest, document),
            last_note=document.id,
        )


def extend_digest(digest: str, document: Document) -> str:
    """Return the hash of notes after one more note."""
    total = hashlib.sha256(digest.encode())
    for part in (document.id, document.text):
        data = part.encode("utf-8", "surrogatepass")
        total.update(len(data).to_bytes(8, "little") + data)
    return total.hexdigest()


def require_same_settings(
    where: str, stored: Mapping[str, str], current: Mapping[str, str]
) -> None:
    """Raise ParameterError unless predictions were begun with the current settings.

    Args:
        where: Where the predictions are.
        stored: The settings with which they were begun.
        current: The settings of this command.
    """
    changed = [
        name
        for name in {**stored, **current}
        if stored.get(name, "") != current.get(name, "")
    ]
    if not changed:
        return
    differences = [
        name
        if name in _HASHED
        else f"{name} {stored.get(name) or 'none'}, now {current.get(name) or 'none'}"
        for name in changed
    ]
    raise ParameterError(
        f"{where}: these predictions were begun with another {'; '.join(differences)}: "
        "repeat the first command with `resume`, or name another `out`"
    )


def warn_of_new_predictions(where: str) -> None:
    """Log that a command with `resume` begins with the first note.

    As with a run, it is not refused, so that a batch system can repeat one command.
    """
    logger.warning(
        "%s: there are no predictions to resume, so the command begins with the first "
        "note; if you expected predictions there, stop this command and check the name",
        where,
    )


_HASHED = ("model", "calibration")  # settings that are hashes, which say nothing


class MakeSink(Protocol):
    """Makes a sink, once the model is loaded."""

    def __call__(self, *, types: Sequence[str]) -> Sink:
        """Return the sink.

        Args:
            types: The entity types of the model.
        """


class Sink(ABC):
    """Stores predictions in batches.

    Attributes:
        size: The number of notes in a batch.
        progress: The record of the notes that are done.
    """

    def __init__(self, size: int, progress: PredictionProgress) -> None:
        self.size = size
        self.progress = progress

    @abstractmethod
    def write(
        self,
        documents: Iterable[Document],
        make_record: Callable[[int], PredictionProgress],
    ) -> None:
        """Store one batch together with the record that it is done.

        Args:
            documents: The documents with their predicted mentions.
            make_record: Returns the record that the batch is done, from the number of
                its mentions; it is called once the documents have been read.

        Raises:
            DataError: The sink cannot represent a document.
            FednotesError: The sink cannot be written.
        """

    @abstractmethod
    def complete(self) -> None:
        """Store that the input has no further note."""


def write_batches(
    notes: Iterable[Document], predict: Predict, sink: Sink, total: int | None
) -> None:
    """Predict the notes that are not yet done, and store them batch by batch.

    Args:
        notes: All notes of the input, in the order in which they were begun.
        predict: Yields notes with their predicted mentions, in order. It may read notes
            of later batches before they are needed.
        sink: Where they are stored.
        total: The number of notes; None if it is unknown.

    Raises:
        DataError: The notes that are done have changed.
        FednotesError: The sink cannot be written.
    """
    remaining = _skip_done(iter(notes), sink.progress)
    num_remaining = None if total is None else max(0, total - sink.progress.notes)
    with working("predicting notes", num_remaining) as count:
        predicted = count.each(predict(remaining, sink.size))
        while True:
            batch = _Batch(predicted, sink)
            if batch.is_empty:
                break
            sink.write(batch, batch.make_record)
    sink.complete()


class _Batch(Iterator[Document]):
    """The next predicted notes, which are recorded as they are read."""

    def __init__(self, notes: Iterator[Document], sink: Sink) -> None:
        first = list(islice(notes, 1))
        self.is_empty = not first
        self._notes = chain(first, islice(notes, sink.size - 1))
        self._progress = sink.progress

    def __next__(self) -> Document:
        document = next(self._notes)
        self._progress = self._progress.add_note(document)
        return document

    def make_record(self, mentions: int) -> PredictionProgress:
        """Return the record after the notes that were read.

        Args:
            mentions: The number of mentions in them.
        """
        return replace(self._progress, mentions=self._progress.mentions + mentions)


def _skip_done(
    notes: Iterator[Document], progress: PredictionProgress
) -> Iterator[Document]:
    """Return the notes that are not yet done.

    Raises:
        DataError: Those that are done are not the first notes of the input.
    """
    digest = ""
    number = 0
    with working("reading notes that are done", progress.notes) as count:
        for document in count.each(islice(notes, progress.notes)):
            digest = extend_digest(digest, document)
            number += 1
    if number < progress.notes or digest != progress.digest:
        raise DataError(
            f"the first {progress.notes:,} notes of the input are not those that were "
            "predicted before: begin again with another `out`, or give the same notes"
        )
    return notes


# ---- a folder of shards --------------------------------------------------------------


@dataclass(frozen=True)
class _Shard:
    """A complete file of predictions.

    Attributes:
        file: Its name.
        notes: The number of its notes.
        bytes: Its size.
    """

    file: str
    notes: int
    bytes: int


@dataclass(frozen=True)
class _Manifest:
    """The content of the manifest.

    Attributes:
        progress: The record of the notes that are done.
        shards: The complete files.
        version: The version of this format.
    """

    progress: PredictionProgress
    shards: tuple[_Shard, ...] = ()
    version: int = _VERSION


class FolderSink(Sink):
    """A folder with a file for each batch, and a manifest.

    A file appears once it is complete and on disk, and the manifest lists it
    afterwards. A file that the manifest does not list is written again.

    Args:
        folder: The folder, which this process holds.
        manifest: What is done.
        format: The format of the files, one of `SUFFIXES`.
        size: The number of notes in a file.
        types: The entity types of the model.
    """

    _adapter: ClassVar[TypeAdapter[_Manifest]] = TypeAdapter(_Manifest)

    def __init__(
        self,
        folder: Path,
        manifest: _Manifest,
        *,
        format: str,
        size: int,
        types: Sequence[str],
    ) -> None:
        super().__init__(size, manifest.progress)
        self._folder = folder
        self._manifest = manifest
        self._format = format
        self._types = types
        # A file of a process that is killed now is then known as one of these.
        self._replace_manifest(manifest.progress, manifest.shards)

    def write(
        self,
        documents: Iterable[Document],
        make_record: Callable[[int], PredictionProgress],
    ) -> None:
        """Write a file, and then the manifest."""
        shards = self._manifest.shards
        name = f"{_name_shard(len(shards))}.{SUFFIXES[self._format]}"
        path = self._folder / name
        next_mention = self.progress.mentions + 1
        facts = FileFacts(self._types, self.progress.started, next_mention)
        try:
            with (
                raising_os_errors_as(FednotesError, path),
                replacing(path) as file,
                open_writer(self._format, file, facts) as writer,
            ):
                for document in documents:
                    writer.add(document)
        except UnicodeEncodeError:
            raise DataError(
                f"{path}: a note has characters that UTF-8 cannot encode: correct or "
                "leave out the note"
            ) from None
        shard = _Shard(name, writer.notes, path.stat().st_size)
        self._replace_manifest(make_record(writer.mentions), (*shards, shard))

    def complete(self) -> None:
        """Write into the manifest that no note is left."""
        self._replace_manifest(
            replace(self.progress, is_complete=True), self._manifest.shards
        )

    def _replace_manifest(
        self, progress: PredictionProgress, shards: tuple[_Shard, ...]
    ) -> None:
        """Write a manifest with this record and these files in place of the old one."""
        self._manifest = _Manifest(progress, shards)
        write_json(self._folder / MANIFEST, asdict(self._manifest))
        self.progress = progress

    @classmethod
    def read_manifest(cls, folder: Path) -> _Manifest | None:
        """Return the manifest of a folder; None if there is none.

        Raises:
            DataError: It is damaged, or a file that it lists is missing or changed.
        """
        path = folder / MANIFEST
        try:
            manifest = cls._adapter.validate_json(read_regular(path))
        except FileNotFoundError:
            return None
        except (ValidationError, OSError):
            raise DataError(
                f"{path}: cannot be read as a manifest of predictions: begin again in "
                "another folder"
            ) from None
        if manifest.version != _VERSION:
            raise DataError(
                f"{path}: written by another version of fednotes: resume with that one"
            )
        if sum(shard.notes for shard in manifest.shards) != manifest.progress.notes:
            raise DataError(
                f"{path}: the files that it lists do not contain the number of notes "
                "that it records, so it is damaged: begin again in another folder"
            )
        for number, shard in enumerate(manifest.shards):
            if shard.file.partition(".")[0] != _name_shard(number):
                raise DataError(
                    f"{path}: lists a file that predictions do not have: begin again "
                    "in another folder"
                )
            file = folder / shard.file
            if not file.is_file() or file.stat().st_size != shard.bytes:
                raise DataError(
                    f"{file}: missing or changed since it was written: begin again in "
                    "another folder"
                )
        return manifest


@contextmanager
def opening_folder(
    folder: Path,
    settings: Mapping[str, str],
    *,
    format: str,
    size: int,
    resume: bool,
) -> Iterator[MakeSink]:
    """Hold a folder of shards, and yield a function that makes its sink.

    The folder is checked before the model is loaded; the sink needs the model's types.

    Args:
        folder: The folder; it is created if it does not exist.
        settings: The model, the input and the options, as text by name.
        format: The format of the files, one of `SUFFIXES`.
        size: The number of notes in a file.
        resume: Whether to continue predictions in the folder.

    Raises:
        ParameterError: The folder is not empty and `resume` is not set, or its
            predictions were begun with other settings.
        DataError: The predictions in the folder are damaged.
        BusyError: Another process writes into the folder.
    """
    if folder.exists() and not folder.is_dir():
        raise ParameterError(
            f"`out` {folder} is a file, but shards need a folder: name another `out`"
        )
    with reserving_folder(folder):
        manifest = FolderSink.read_manifest(folder)
        if manifest is None:
            _require_empty(folder)
            manifest = _Manifest(PredictionProgress(settings))
            if resume:
                warn_of_new_predictions(str(folder))
        elif resume:
            require_same_settings(str(folder), manifest.progress.settings, settings)
        elif manifest.shards:
            raise ParameterError(
                f"`out` {folder} has predictions already: set `resume` to continue "
                "them, or name another folder"
            )
        else:
            # Earlier predictions ended before their first shard: nothing would be lost.
            manifest = _Manifest(PredictionProgress(settings))
        _remove_incomplete(folder, manifest)
        yield partial(FolderSink, folder, manifest, format=format, size=size)


def _name_shard(number: int) -> str:
    """Return the name of a file of predictions, without its suffix."""
    return f"part-{number:05d}"


def _require_empty(folder: Path) -> None:
    """Raise ParameterError if a folder has files that a killed start did not leave."""
    others = [
        name
        for name in os.listdir(folder)
        if name != "lock" and not name.startswith((".part-", ".manifest"))
    ]
    if others:
        raise ParameterError(
            f"`out` {folder} is not empty: name a new folder for the predictions"
        )


def _remove_incomplete(folder: Path, manifest: _Manifest) -> None:
    """Remove the files of a process that was killed before the manifest listed them."""
    listed = {shard.file for shard in manifest.shards}
    for path in [*folder.glob(".*.tmp"), *folder.glob("part-*")]:
        if path.name not in listed:
            with raising_os_errors_as(FednotesError, path, action="be removed"):
                path.unlink(missing_ok=True)


def describe_settings(values: Mapping[str, Any]) -> dict[str, str]:
    """Return settings as text, so that stored and current ones can be compared."""
    return {
        name: value if isinstance(value, str) else json.dumps(value, default=str)
        for name, value in values.items()
    }
