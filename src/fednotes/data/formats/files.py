"""What every reader and writer shares: text in and out of files, and ids."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from fednotes.core.errors import DataError
from fednotes.core.types import Document

_HEAD = 1 << 16  # bytes that are enough to tell a format


def read_text(path: Path, *, empty: bool = False, exact: bool = False) -> str:
    """A UTF-8 file's text, without byte-order mark and with `\\n` line ends.

    empty: whether a file without text is fine. exact: give the characters as they are.
    Raises DataError for a file that is missing, empty or not UTF-8.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: byte {error.start} is not UTF-8: convert the file, "
            "for example with `iconv -f latin1 -t utf-8`"
        ) from None
    except OSError as error:
        raise DataError(f"{path}: cannot read: {error.strerror}") from None
    if not empty and not text.strip("\ufeff \t\r\n"):
        raise DataError(f"{path}: the file is empty")
    return text if exact else text.removeprefix("\ufeff").replace("\r\n", "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all. Raises DataError where the disk refuses."""
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.")
        with os.fdopen(handle, "wb") as file:
            file.write(text.encode("utf-8"))
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except (OSError, UnicodeEncodeError) as error:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
        reason = getattr(error, "strerror", None) or "the text cannot be written as UTF-8"
        raise DataError(f"{path}: cannot write: {reason}") from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def head(path: Path) -> list[str]:
    """The first non-blank lines of a file, however it is encoded; none if unreadable."""
    try:
        with path.open("rb") as file:
            data = file.read(_HEAD)
    except OSError:
        return []
    lines = data.decode("utf-8", errors="replace").removeprefix("\ufeff").split("\n")
    if len(data) == _HEAD and len(lines) > 1:
        lines.pop()  # cut in its middle
    return [line.rstrip("\r") for line in lines if line.strip()]


def listing(
    path: Path, accepts: Callable[[Path], bool], name: str, below: bool = False
) -> list[Path]:
    """The files of one format: `path` itself if it is a file, else those in the folder.

    Only where none lies in the folder itself are the folders below it searched; with `below`
    always. Other files (a README, a licence) are passed over. Raises DataError where none is
    found.
    """
    if not os.path.exists(path):
        raise DataError(f"{path}: no such file or folder")
    if path.is_file():
        return [path]
    found = [] if below else [p for p in visible(path) if accepts(p)]
    found = found or [p for p in visible(path, True) if accepts(p)]
    if not found:
        raise DataError(f"{path}: no file in this folder looks like {name}")
    return found


def visible(folder: Path, below: bool = False) -> list[Path]:
    """Files of a folder in a fixed order, hidden ones left out."""
    paths = folder.rglob("*") if below else folder.iterdir()
    shown = (p for p in paths if not any(q.startswith(".") for q in p.relative_to(folder).parts))
    try:
        return sorted(p for p in shown if p.is_file())
    except OSError as error:
        raise DataError(f"{folder}: cannot read: {error.strerror}") from None


def unique(documents: Iterable[Document]) -> tuple[Document, ...]:
    """The documents, later ones of the same id renamed `id~2`, `id~3` …"""
    given = list(documents)
    taken = {document.id for document in given}
    seen: set[str] = set()
    result: list[Document] = []
    for document in given:
        if document.id in seen:
            number = 2
            while f"{document.id}~{number}" in taken:
                number += 1
            document = replace(document, id=f"{document.id}~{number}")
            taken.add(document.id)
        seen.add(document.id)
        result.append(document)
    return tuple(result)


def same_text(left: str, right: str) -> bool:
    """Whether two surface strings are equal but for runs of whitespace."""
    return left == right or left.split() == right.split()
