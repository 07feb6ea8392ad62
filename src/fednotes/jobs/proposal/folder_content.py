"""Describe what a folder of sites holds beside the sites: remarks and errors."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fednotes.core.cleaning import NAME, clean_to_one_line
from fednotes.core.errors import DataError
from fednotes.core.wording import list_names

# Files that may be meant as data of a site, even if they are not read as notes.
_DATA_SUFFIXES = {
    *(".csv", ".tsv", ".xls", ".xlsx", ".parquet", ".json", ".jsonl", ".xml"),
    *(".doc", ".docx", ".pdf", ".rtf", ".txt", ".gz", ".zip"),
}
_YEAR = re.compile(r"(19|20)\d\d([-_]?\d\d){0,2}")  # "2019", "2019-05", "20190531"
_MAX_NAMED = 5  # files or folders that a message names


@dataclass(frozen=True)
class FolderContent:
    """The visible files and folders in a folder that has folders of notes.

    Attributes:
        path: The folder.
        folders: Its folders with notes.
        empty_folders: Its folders without notes.
        links: Its links to folders, which are not followed.
        notes: Its files of notes.
        other_files: Its other files, without those that are about the notes.
    """

    path: Path
    folders: tuple[Path, ...]
    empty_folders: tuple[Path, ...]
    links: tuple[Path, ...]
    notes: tuple[Path, ...]
    other_files: tuple[Path, ...]

    @property
    def has_folders_of_years(self) -> bool:
        """Whether there are several folders of notes, all named by a year or date."""
        are_years = all(_YEAR.fullmatch(folder.name) for folder in self.folders)
        return are_years and len(self.folders) > 1


def describe_folders_left_out(content: FolderContent) -> Iterator[str]:
    """Yield a remark on folders that are not sites because they have no notes."""
    if content.empty_folders:
        names = join_file_names(content.empty_folders)
        remark = (
            f"{content.path}: {names} {_has(content.empty_folders)} no notes that "
            f"fednotes can read, so {_it_was(content.empty_folders)} left out"
        )
        if len(content.folders) == 1:
            remark += f", and {content.folders[0].name} is the only site"
        yield remark
    if content.links:
        yield (
            f"{content.path}: {join_file_names(content.links)} "
            f"{_was(content.links)} left out, because links to folders are not "
            "followed: give the folders themselves as further paths"
        )


def describe_files_left_out(content: FolderContent) -> Iterator[str]:
    """Yield a remark on files beside the folders of sites that are not read."""
    if content.notes:
        yield (
            f"{content.path}: {join_file_names(content.notes)} "
            f"{_has(content.notes)} no annotations and {_was(content.notes)} left out"
        )
    data_files = [
        file for file in content.other_files if file.suffix.lower() in _DATA_SUFFIXES
    ]
    if data_files:
        yield (
            f"{content.path}: {join_file_names(data_files)} {_was(data_files)} "
            "left out, because a site's files must be in its folder"
        )


def describe_unused_folders(content: FolderContent) -> str:
    """Return a remark on folders without annotations beside annotated files."""
    return (
        f"{content.path}: the annotated files in it are one site, and "
        f"{join_file_names(content.folders)} {_was(content.folders)} left out: "
        "no annotations"
    )


def describe_years(content: FolderContent) -> str:
    """Return the remark that folders of years are one site."""
    return (
        f"{content.path}: one site, because its folders are years "
        f"({join_file_names(content.folders)}); if each of them is a site, run "
        f"`{_format_init_command(content)}`"
    )


def describe_shared_labels(content: FolderContent) -> str:
    """Return the remark that folders with one table of labels are one site."""
    return (
        f"{content.path}: one site, because the table of labels in it is for the "
        f"patients of all its folders ({join_file_names(content.folders)}); to "
        "make each folder a site, put a table of labels into each"
    )


def make_unclear_sites_error(
    content: FolderContent, files: Sequence[Path]
) -> DataError:
    """Return the error for a folder whose files and folders may both be sites.

    Args:
        content: What the folder holds.
        files: Those of its files that may be notes of a site.
    """
    return DataError(
        f"{content.path}: it is not clear what the sites are, because there are notes "
        f"in its folders ({join_file_names(content.folders)}) and beside them "
        f"({join_file_names(files)}): run `{_format_init_command(content)}` for the "
        "folders alone, or move the files into a folder"
    )


def join_file_names(paths: Sequence[Path]) -> str:
    """Return the names of files or folders on one line, sanitised."""
    return list_names(
        [clean_to_one_line(path.name, NAME) for path in paths], _MAX_NAMED
    )


def _format_init_command(content: FolderContent) -> str:
    """Return the command that reads each folder as a site."""
    paths = [
        shlex.quote(clean_to_one_line(str(path), None)) for path in content.folders
    ]
    if len(paths) > _MAX_NAMED:
        paths = [f"{shlex.quote(clean_to_one_line(str(content.path), None))}/*/"]
    return f"fednotes init {' '.join(paths)}"


def _has(paths: Sequence[Path]) -> str:
    """Return the verb that fits one path or several."""
    return "has" if len(paths) == 1 else "have"


def _was(paths: Sequence[Path]) -> str:
    """Return the verb that fits one path or several."""
    return "was" if len(paths) == 1 else "were"


def _it_was(paths: Sequence[Path]) -> str:
    """Return the pronoun and the verb that fit one path or several."""
    return "it was" if len(paths) == 1 else "they were"
