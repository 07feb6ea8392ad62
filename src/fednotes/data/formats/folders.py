"""Search for the files of a corpus in a folder, without leaving the folder.

Links that lead out of the folder, FIFOs, sockets and devices are refused. Hidden files
are ignored, and links to folders are not followed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from fednotes.core.errors import ConfigError, DataError
from fednotes.core.parsing import NotAFile, is_within, require_file


def find_corpus_files(
    path: Path, accepts: Callable[[Path], bool], name: str, *, recursive: bool = False
) -> list[Path]:
    """Return the files of one format: `path` itself, or those in this folder.

    Other files (a README, a licence) are ignored.

    Args:
        path: A file or a folder.
        accepts: Whether a file has the format.
        name: The format's name, for the message.
        recursive: Whether to search subfolders even if the folder itself contains files
            of the format.

    Raises:
        DataError: There is no such path, or no file has the format.
    """
    if not os.path.exists(path):
        raise DataError(f"{path}: no such file or folder")
    if not path.is_dir():
        return [path]
    files: list[Path] = []
    if not recursive:
        files = [file for file in list_files(path) if accepts(file)]
    if not files:
        files = [file for file in list_files(path, recursive=True) if accepts(file)]
    if not files:
        raise DataError(f"{path}: no file in this folder looks like {name}")
    return files


def list_files(
    folder: Path, *, recursive: bool = False, name_contains: str = ""
) -> list[Path]:
    """Return the visible files of a folder in a fixed order.

    Args:
        folder: The folder.
        recursive: Whether to search subfolders as well.
        name_contains: A lower-case part of the files' names. Other files are not
            examined.

    Raises:
        DataError: A link leads out of the folder, something is not a file, or folders
            are nested too deep.
    """
    try:
        paths = sorted(folder.rglob("*") if recursive else folder.iterdir())
        return [
            path
            for path in paths
            if name_contains in path.name.lower()
            and not _is_hidden(path, folder)
            and is_corpus_file(path, folder)
        ]
    except OSError as error:
        raise DataError(
            f"{error.filename or folder}: cannot read: {error.strerror}"
        ) from None
    except RecursionError:
        raise DataError(
            f"{folder}: its folders are nested too deep: move the files further up"
        ) from None


def _is_hidden(path: Path, folder: Path) -> bool:
    """Return whether a path, or a folder between it and `folder`, is hidden."""
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def is_corpus_file(path: Path, folder: Path) -> bool:
    """Return whether a path in a corpus's folder is a file.

    The folder itself may be a link, since the user specified it.

    Args:
        path: A path in the folder. No folder in between is a link.
        folder: The folder.

    Raises:
        DataError: It is a link that leads out of the folder, or a FIFO, socket or
            device.
        OSError: It cannot be examined.
    """
    if path.is_symlink():
        _require_within(path, (folder,))
    return _is_file(path)


def find_file(name: str, folders: Iterable[Path], corpus: Path) -> Path | None:
    """Return the first file with this name in one of the folders, or None.

    The folders may be links, and may be in the corpus or next to it.

    Args:
        name: The name.
        folders: The folders.
        corpus: The folder of the corpus.

    Raises:
        DataError: With all links resolved, the file is neither within the corpus nor
            within the parent of its folder, or it is not a file.
    """
    for folder in folders:
        path = folder / name
        if os.path.lexists(path):
            _require_within(path, (corpus, folder.parent))
            if _is_file(path):
                return path
    return None


def _require_within(path: Path, folders: Sequence[Path]) -> None:
    """Raise DataError if a path, with links resolved, is in none of the folders."""
    if not is_within(path, folders):
        raise DataError.at(
            path,
            0,
            f"a link that leads out of {folders[-1]}: put a copy of its target there",
        )


def _is_file(path: Path) -> bool:
    """Return whether a path is a file; False for a folder or a broken link.

    Raises:
        DataError: It is a FIFO, a socket or a device.
        OSError: It cannot be examined.
    """
    if not path.exists():
        return False
    mode = path.stat().st_mode
    try:
        require_file(mode)
    except NotAFile as error:
        raise DataError.at(path, 0, str(error.strerror)) from None
    return stat.S_ISREG(mode)


def name_paths(paths: Sequence[Path]) -> dict[str, Path]:
    """Return paths by their last part, or by the whole path if last parts repeat.

    Raises:
        ConfigError: A path is given twice.
    """
    names = [os.path.basename(os.path.abspath(path)) for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    by_name = dict(zip(names, paths, strict=True))
    if len(by_name) < len(paths):
        raise ConfigError("a path is given twice: give each path once")
    return by_name


def make_mixed_formats_error(folder: Path, counts: Mapping[str, int]) -> DataError:
    """Return the error for a folder with files of several formats.

    Args:
        folder: The folder.
        counts: The number of files of each format.
    """
    listed = ", ".join(
        f"{name} ({number} files)" for name, number in sorted(counts.items())
    )
    return DataError(
        f"{folder}: the folder mixes formats: {listed}; choose one of them"
    )
