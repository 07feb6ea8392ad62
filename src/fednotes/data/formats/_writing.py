"""Writing of documents in any format, and measurement of what would be lost."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from fednotes.core.errors import (
    ConfigError,
    DataError,
    FednotesError,
    NamesParameters,
    suggest_name,
)
from fednotes.core.store import locking_folder, make_temporary_path, sync_folder
from fednotes.core.types import Document
from fednotes.core.work import working
from fednotes.data.formats import _registry
from fednotes.data.formats._comparison import count_differences
from fednotes.data.formats._reading import examine
from fednotes.data.formats.choices import choosing, extract_format_name


class LossyError(DataError, NamesParameters):
    """A format cannot represent everything in the documents.

    Attributes:
        lost: Counts of what would be lost, by kind.
    """

    def __init__(self, format: str, lost: Counter[str]) -> None:
        listed = "; ".join(
            f"{kind}: {number:,}" for kind, number in sorted(lost.items())
        )
        super().__init__(
            f"the format {format} cannot represent: {listed}; nothing was "
            "written: choose another format, or set `allow_loss`"
        )
        self.lost = lost


def write(
    documents: Sequence[Document],
    path: str | os.PathLike[str],
    format: str,
    *,
    allow_loss: bool = False,
    ignored: Counter[str] | None = None,
) -> Counter[str]:
    """Write documents to a new file or folder, completely or not at all.

    They are written next to the destination and read back. They are moved there only if
    they are unchanged, or if `allow_loss` is set.

    Args:
        documents: The documents.
        path: The new file or folder.
        format: A format that can be written.
        allow_loss: Whether to write even if something is lost.
        ignored: Counts of what the documents' reader ignored, by kind; they count as
            lost.

    Returns:
        Counts of what was lost, by kind.

    Raises:
        LossyError: Something would be lost, and `allow_loss` is false.
        ConfigError: The format cannot be written.
        FednotesError: The path exists, or it cannot be written.
    """
    path = Path(path)
    if os.path.lexists(path):
        raise FednotesError(f"{path} already exists: choose a new file or folder")
    stage = make_temporary_path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locking_folder(stage, mode=0o700):
            lost = count_losses(documents, format, stage / path.name)
            lost += ignored or Counter()
            if lost and not allow_loss:
                raise LossyError(format, lost)
            os.rename(stage / path.name, path)
            sync_folder(path.parent)
    except OSError as error:
        raise FednotesError(
            f"{path}: cannot be written ({error.strerror or error})"
        ) from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return lost


def count_losses(
    documents: Sequence[Document], format: str, path: Path | None = None
) -> Counter[str]:
    """Count what a format cannot represent of documents, by kind.

    The documents are written, read back and compared.

    Args:
        documents: The documents.
        format: A format that can be written.
        path: Where they are written and remain; None is a temporary folder.

    Raises:
        ConfigError: The format cannot be written.
        DataError: The meta of a document does not have the format's structure.
    """
    writable = _registry.list_writable_formats()
    name = extract_format_name(format)
    if name not in writable:
        raise ConfigError(
            f"format {name!r} cannot be written: {suggest_name(name, writable)}"
        )
    if path is None:
        with TemporaryDirectory() as folder:
            return count_losses(documents, format, Path(folder, "documents"))
    module = _registry.find_format(format)
    try:
        with choosing(format), working("writing"):
            module.write(documents, path)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        raise DataError(
            f"a document's meta has a value that {format} cannot store under its name: "
            "remove the value"
        ) from None
    documents_again: tuple[Document, ...] = ()
    with suppress(DataError):  # some formats cannot read an empty corpus
        documents_again, _ = examine(path, format)
    return count_differences(documents, documents_again)
