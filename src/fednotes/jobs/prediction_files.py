"""Write documents with predicted mentions to files and to stdout."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import IO

from fednotes.core.errors import DataError, FednotesError
from fednotes.core.store import (
    follow_links,
    locking_folder,
    make_temporary_path,
    streaming_out,
)
from fednotes.core.types import Document
from fednotes.data.formats import FORMATS
from fednotes.jobs.prediction_writers import FileFacts, open_writer


def write_documents(
    documents: Iterable[Document],
    out: Path | None,
    format: str,
    types: Sequence[str] = (),
) -> None:
    """Write predictions into a file, one by one.

    Args:
        documents: The documents with their predicted mentions.
        out: The file, which appears once it is complete; None writes to stdout.
        format: One of `SUFFIXES` of `prediction_writers`.
        types: The entity types of the model.
    """
    facts = FileFacts(types, date.today().isoformat())
    with _opening_output(out) as file, open_writer(format, file, facts) as writer:
        for document in documents:
            writer.add(document)


@contextmanager
def _opening_output(out: Path | None) -> Iterator[IO[bytes]]:
    """Yield a file that appears when the context ends; without `out`, yield stdout."""
    if out is not None:
        with streaming_out(out) as file:
            yield file
        return
    sys.stdout.flush()
    yield sys.stdout.buffer
    sys.stdout.buffer.flush()


def write_conll(documents: Sequence[Document], out: Path | None) -> None:
    """Write predictions as CoNLL in the layout in which the documents were read.

    Args:
        documents: The documents with their predicted mentions.
        out: A file; None writes to stdout.
    """
    if out is not None:
        FORMATS["conll"].write(documents, out)
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "predictions")
        FORMATS["conll"].write(documents, file)
        sys.stdout.write(file.read_bytes().decode())


def write_brat(documents: Iterable[Document], out: Path) -> None:
    """Write predictions as brat's pairs of files into a folder.

    The files are written beside the folder, and moved into it once all are complete. If
    several documents have the same id, the later ones are named `id~2`, `id~3` and so
    on.

    Raises:
        DataError: `out` is a file.
        FednotesError: The folder cannot be written, or another user has put a link
            there.
    """
    if out.exists() and not out.is_dir():
        raise DataError(
            f"`out` {out} is a file, but brat needs a folder: name another `out`"
        )
    stage = make_temporary_path(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        target = follow_links(out)
        with locking_folder(stage, mode=0o777):
            FORMATS["brat"].write(_make_ids_distinct(documents), stage)
            if target.exists():
                _move_files(stage, target)
            else:
                os.rename(stage, target)
    except OSError as error:
        raise FednotesError(
            f"{out}: cannot be written ({error.strerror or error})"
        ) from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _make_ids_distinct(documents: Iterable[Document]) -> Iterator[Document]:
    """Yield the documents, and append a number to an id that was used before."""
    occurrences: Counter[str] = Counter()
    for document in documents:
        name = document.id
        while occurrences[name]:
            occurrences[document.id] += 1
            name = f"{document.id}~{occurrences[document.id]}"
        occurrences[name] += 1
        yield document if name == document.id else replace(document, id=name)


def _move_files(stage: Path, out: Path) -> None:
    """Move all files of a folder to the same relative paths in another one.

    Raises:
        PermissionError: Another user has put a link in place of a folder.
        OSError: A file cannot be moved.
    """
    for file in sorted(stage.rglob("*")):
        place = out / file.relative_to(stage)
        if file.is_dir():
            place.mkdir(exist_ok=True)
            _require_own_link(place)
        else:
            os.replace(file, place)


def _require_own_link(folder: Path) -> None:
    """Refuse a folder that is a link of another user, who chose where it leads."""
    status = os.lstat(folder)
    if stat.S_ISLNK(status.st_mode) and status.st_uid not in (0, os.geteuid()):
        raise PermissionError(
            errno.EPERM,
            f"another user of this machine has put a link at {folder}: write to a "
            "folder of your own",
        )
