"""Find the files of a corpus in a folder, without leaving it.

Links that lead out of the folder, FIFOs, sockets and devices are refused. Hidden files
are ignored, and links to folders are not followed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from fednotes.core.errors import ConfigError, DataError
from fednotes.core.parsing import NotAFile, require_file


def find_corpus_files(
    path: Path, accepts: Callable[[Path], bool], name: str, *, recursive: bool = False
) -> list[Path]:
    """Return the files of one format: `path` if it is a file, else those in the folder.

    Other files (a README, a licence) are ignored.

    Args:
        path: A file or a folder.
        accepts: Whether a file is of the format.
        name: The format's name, for the message.
        recursive: Also search the folders inside. Otherwise these are searched only if
            the folder itself has no file of the format.

    Raises:
        DataError: There is no such path, or no file of the format.
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
        recursive: Whether to search the folders inside, too.
        name_contains: What the names of the files contain, in lower case. Other files
            are not looked at.

    Raises:
        DataError: A link leads out of the folder, something is not a file, or folders
            are nested hundreds deep.
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
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def is_corpus_file(path: Path, folder: Path) -> bool:
    """Return whether a path in a corpus's folder is a file of it; False for a folder.

    The folder itself may be a link, since whoever named it knows where it leads.

    Args:
        path: A path in the folder. No folder between the two is a link.
        folder: The folder.

    Raises:
        DataError: It is a link that leads out of the folder, or not a file.
        OSError: It cannot be examined.
    """
    if path.is_symlink():
        _require_within(path, (folder,))
    return _is_file(path)


def find_file(name: str, folders: Iterable[Path], corpus: Path) -> Path | None:
    """Return the first file with this name in one of the folders, or None.

    The folders may be links, and lie in the corpus or beside its folder.

    Args:
        name: The name.
        folders: The folders.
        corpus: The folder of the corpus.

    Raises:
        DataError: The file is not within the corpus or the folder above its own, after
            all links, or it is not a file.
    """
    for folder in folders:
        path = folder / name
        if os.path.lexists(path):
            _require_within(path, (corpus, folder.parent))
            if _is_file(path):
                return path
    return None


def _require_within(path: Path, folders: Sequence[Path]) -> None:
    """Raise DataError if links lead from a path out of all of the folders."""
    target = Path(os.path.realpath(path))
    if not any(target.is_relative_to(os.path.realpath(folder)) for folder in folders):
        raise DataError.at(
            path,
            0,
            f"a link that leads out of {folders[-1]}: put a copy of its target there",
        )


def _is_file(path: Path) -> bool:
    """Return whether a path is a file; False for a folder, or a link to nothing.

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
    """Return paths by their last part, or by the whole path if two parts are equal.

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


def mixed_formats(folder: Path, counts: Mapping[str, int]) -> DataError:
    """Return the error for a folder with files of several formats.

    Args:
        folder: The folder.
        counts: The number of files of each format.
    """
    listed = ", ".join(
        f"{name} ({number} files)" for name, number in sorted(counts.items())
    )
    return DataError(f"{folder}: the folder mixes formats: {listed}; name one of them")
