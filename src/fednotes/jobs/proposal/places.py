"""Find the sites in the paths that a user names.

a file                                        a site
a folder with files train, valid and test     a site with these parts
a folder with files of notes                  a site
a folder with folders such as train and dev   a site
one folder with folders of notes              a site for each of these folders
one folder with folders named by years        a site
a database                                    a site
NAME=PATH                                     a site with this name

Files beside the folders of sites are left out if they have no annotations, and a remark
names them. If they have annotations, too, an error asks which of them are sites.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from fednotes.core.databases import is_address
from fednotes.core.errors import ConfigError, DataError
from fednotes.core.types import RESERVED_SITE_NAMES
from fednotes.data.encodings import reading_as
from fednotes.data.formats import examine, guess_format
from fednotes.data.formats.files import remove_packed_suffix
from fednotes.data.formats.folders import list_files
from fednotes.data.notes import (
    NoteDatabase,
    NotePlace,
    make_note_place,
    require_database,
)
from fednotes.jobs import kinds
from fednotes.jobs.input_readers import find_note_format
from fednotes.jobs.proposal import folder_content
from fednotes.jobs.proposal.folder_content import FolderContent

_PART_WORDS = {
    "train": ("train", "training"),
    "valid": ("valid", "validation", "val", "dev", "devel", "development"),
    "test": ("test", "testing"),
}
_PARTS = {word: part for part, words in _PART_WORDS.items() for word in words}
# Texts beside the notes of a corpus that are not notes.
_ABOUT = {"readme", "license", "licence", "copying", "notice", "changelog"}
_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9_-]{0,63})=(.+)", re.DOTALL)
_MAX_NAME = 64
_DATABASE = "database"  # the site of a database without a name
_WHOLE = "path"  # the part of a site whose notes are split by the job


@dataclass(frozen=True)
class Place:
    """The location of one site's notes.

    Attributes:
        name: Name of the site, as a job allows it.
        root: The file or folder of all its notes, or their database.
        parts: Its files or folders by key of a job: "path" alone, or "train", "test"
            and perhaps "valid". A database has none.
    """

    name: str
    root: NotePlace
    parts: Mapping[str, Path]


@dataclass(frozen=True)
class Places:
    """The locations of all sites' notes.

    Attributes:
        sites: The location of each site's notes.
        remarks: What was left out, and other choices that a user may want to change.
    """

    sites: tuple[Place, ...]
    remarks: tuple[str, ...] = ()


def find_places(
    paths: Sequence[str | NoteDatabase] | Mapping[str, str | NoteDatabase],
    encoding: str,
    *,
    query: str = "",
    omop: str = "",
) -> Places:
    """Return the sites in files, folders and databases.

    Args:
        paths: Paths, and addresses of databases, possibly as "NAME=PATH"; or a mapping
            from names of sites to them.
        encoding: Encoding of files without a byte-order mark that are not UTF-8.
        query: As in `NoteDatabase`, for each address.
        omop: As in `NoteDatabase`, for each address.

    Raises:
        DataError: A path does not exist, a folder has nothing that can be read, or it
            is not clear which of its files and folders are sites.
        ConfigError: A name of a site is invalid or given twice.
    """
    named_paths: list[_NamedPath] = []
    places: list[Place] = []
    for name, path in _list_named_paths(paths):
        if isinstance(path, str) and not is_address(path):
            named_path = _parse_named_path(path, name)
            if not os.path.exists(named_path.path):
                raise DataError(f"{named_path.path}: no such file or folder")
            named_paths.append(named_path)
        else:
            database = make_note_place(path, query, omop)
            places.append(Place(name or _DATABASE, database, {}))
    has_no_database = not places
    if has_no_database:
        require_database([], query, omop)
    finder = _Finder(encoding)
    is_one_unnamed_path = len(named_paths) == 1 and not named_paths[0].name
    if is_one_unnamed_path and has_no_database:
        places = finder.find_sites_in(named_paths[0].path)
    elif named_paths:
        places = [*finder.find_sites_at(named_paths), *places]
    _require_distinct([place.name for place in places])
    return Places(tuple(places), tuple(finder.remarks))


class _NamedPath(NamedTuple):
    """A path that a user names.

    Attributes:
        name: The name that the user gives to its site; "" for none.
        path: The path.
    """

    name: str
    path: Path


def _list_named_paths(
    paths: Sequence[str | NoteDatabase] | Mapping[str, str | NoteDatabase],
) -> Iterator[tuple[str, str | NoteDatabase]]:
    """Yield the name of a site, "" for none, with its path or database.

    A path may still be "NAME=PATH".
    """
    if isinstance(paths, Mapping):
        yield from paths.items()
        return
    for path in paths:
        match = _NAMED.fullmatch(path) if isinstance(path, str) else None
        if match is not None and is_address(match[2]):
            yield match[1], match[2]
        else:
            yield "", path


def _parse_named_path(text: str, known_name: str) -> _NamedPath:
    """Return the name and the path of "NAME=PATH", or of a path without a name.

    Args:
        text: The path.
        known_name: The name, if the text is certainly a path alone; otherwise "".

    Raises:
        ConfigError: The name is not a valid name of a site.
    """
    if known_name:
        match = _NAMED.fullmatch(f"{known_name}={text}")
        if match is None:
            raise ConfigError(
                f"{known_name}: a site's name has letters, digits, - and _ only: "
                "choose another"
            )
        return _NamedPath(known_name, Path(text))
    if os.path.exists(text):
        return _NamedPath("", Path(text))
    match = _NAMED.fullmatch(text)
    if match is None:
        name, sign, _ = text.partition("=")
        if sign and os.sep not in name:
            raise ConfigError(
                f"{text}: a site's name has letters, digits, - and _ only: write "
                "NAME=PATH"
            )
        return _NamedPath("", Path(text))
    return _NamedPath(match[1], Path(match[2]))


@dataclass(frozen=True)
class _Finder:
    """Finds sites in paths.

    Attributes:
        encoding: As in `find_places`.
        remarks: As in `Places`, for all paths so far.
    """

    encoding: str
    remarks: list[str] = field(default_factory=list)

    def find_sites_at(self, named_paths: Sequence[_NamedPath]) -> list[Place]:
        """Return a site for each path, or one site if the paths are its parts."""
        paths = [named_path.path for named_path in named_paths]
        parents = {os.path.dirname(os.path.abspath(path)) for path in paths}
        has_names = any(named_path.name for named_path in named_paths)
        if len(parents) == 1 and not has_names:
            parts = _choose_parts(paths)
            if len(parts) == len(paths):
                root = paths[0].parent
                return [
                    Place(_make_site_name(Path(os.path.abspath(root))), root, parts)
                ]
        default_names = _make_distinct_names(
            [named_path.path for named_path in named_paths if not named_path.name]
        )
        places = []
        for name, path in named_paths:
            place_name = name or default_names[path]
            places.append(Place(place_name, path, self._find_parts(path)))
        return places

    def find_sites_in(self, path: Path) -> list[Place]:
        """Return the site at a path, or the sites in its subfolders.

        Raises:
            DataError: The folder has nothing that can be read, or it is not clear
                which of its files and folders are sites.
        """
        name = _make_site_name(Path(os.path.abspath(path)))
        site = Place(name, path, self._find_parts(path))
        if not path.is_dir() or _WHOLE not in site.parts:
            return [site]
        content = self._list_content(path)
        if not content.folders:
            if not self._has_notes(path):
                with reading_as(self.encoding):
                    guess_format(path)  # raises an error that says what was expected
            return [site]
        parts_of_folders = {_guess_part(folder) for folder in content.folders} - {""}
        if len(parts_of_folders) > 1:
            return [site]  # parts of one corpus, but not all three
        if self._is_one_site(content):
            return [site]

        self.remarks.extend(folder_content.describe_folders_left_out(content))
        self.remarks.extend(folder_content.describe_files_left_out(content))
        if len(content.folders) == 1:
            return self.find_sites_in(content.folders[0])
        names = _make_distinct_names(content.folders)
        return [
            Place(names[folder], folder, self._find_parts(folder))
            for folder in content.folders
        ]

    def _list_content(self, path: Path) -> FolderContent:
        """Return what a folder holds; its files only if it has folders of notes."""
        entries = _list_entries(path)
        has_notes = {
            folder: self._has_notes(folder, recursive=True)
            for folder in entries
            if folder.is_dir() and not folder.name.startswith("__")
        }
        # A folder of notes alone may have a great many files.
        files = list_files(path) if any(has_notes.values()) else []
        is_of_notes = {file: self._is_note_file(file) for file in files}
        return FolderContent(
            path=path,
            folders=tuple(folder for folder in has_notes if has_notes[folder]),
            empty_folders=tuple(
                folder for folder in has_notes if not has_notes[folder]
            ),
            links=_list_links(path),
            notes=tuple(file for file in files if is_of_notes[file]),
            other_files=tuple(
                file
                for file in files
                if not is_of_notes[file] and not _is_about_notes(file)
            ),
        )

    def _is_one_site(self, content: FolderContent) -> bool:
        """Return whether a folder with folders of notes is one site.

        Raises:
            DataError: Its files and its folders may both be sites.
        """
        has_annotated_folders = any(map(self._is_corpus_folder, content.folders))
        annotated_files = [file for file in content.notes if self._is_corpus_file(file)]
        is_by_years = content.has_folders_of_years
        if has_annotated_folders and annotated_files:
            if is_by_years or any(map(self._has_mentions, annotated_files)):
                raise folder_content.make_unclear_sites_error(content, annotated_files)
        elif annotated_files:
            self.remarks.append(folder_content.describe_unused_folders(content))
            return True
        if is_by_years:
            self.remarks.append(folder_content.describe_years(content))
            if has_annotated_folders:
                self.remarks.extend(folder_content.describe_files_left_out(content))
            return True
        if has_annotated_folders:
            return False
        if _has_labels(content.path):
            if len(content.folders) > 1:
                self.remarks.append(folder_content.describe_shared_labels(content))
            return True
        if content.notes and len(content.folders) > 1:
            raise folder_content.make_unclear_sites_error(content, content.notes)
        return bool(content.notes)

    def _find_parts(self, path: Path) -> dict[str, Path]:
        """Return the train, valid and test data of a folder, or the whole path."""
        if path.is_dir():
            entries = [
                entry
                for entry in _list_entries(path)
                if _guess_part(entry) and self._is_readable(entry)
            ]
            parts = _choose_parts(entries)
            if parts:
                return parts
        return {_WHOLE: path}

    def _is_readable(self, path: Path) -> bool:
        """Return whether a file or a folder holds notes."""
        if path.is_dir():
            return self._has_notes(path, recursive=True)
        return self._is_note_file(path)

    def _has_notes(self, folder: Path, *, recursive: bool = False) -> bool:
        """Return whether a folder has a file of notes."""
        files = list_files(folder, recursive=recursive)
        return any(map(self._is_note_file, files))

    def _is_note_file(self, file: Path) -> bool:
        """Return whether a file has a known format and is not about the notes."""
        if _is_about_notes(file):
            return False
        if self._is_corpus_file(file):
            return True
        try:
            find_note_format(file, None, None, self.encoding)
        except DataError:
            return False
        return True

    def _is_corpus_folder(self, folder: Path) -> bool:
        """Return whether a folder has a file in a format of annotated corpora."""
        files = list_files(folder, recursive=True)
        return any(map(self._is_corpus_file, files))

    def _is_corpus_file(self, file: Path) -> bool:
        """Return whether a file has a format of annotated corpora."""
        try:
            with reading_as(self.encoding):
                guess_format(file)
        except DataError:
            return False
        return True

    def _has_mentions(self, file: Path) -> bool:
        """Return whether a file has mentions, or cannot be read."""
        try:
            documents, _ = examine(file, None, self.encoding)
        except DataError:
            return True
        return any(document.spans for document in documents)


def _list_entries(folder: Path) -> list[Path]:
    """Return the files and folders in a folder, without hidden ones and links."""
    return [
        entry
        for entry in sorted(folder.iterdir())
        if not entry.name.startswith(".") and not entry.is_symlink()
    ]


def _list_links(folder: Path) -> tuple[Path, ...]:
    """Return the links in a folder that lead to folders."""
    return tuple(
        entry
        for entry in sorted(folder.iterdir())
        if entry.is_symlink() and entry.is_dir() and not entry.name.startswith(".")
    )


def _is_about_notes(file: Path) -> bool:
    """Return whether a file is a text about the notes, such as a licence."""
    return remove_packed_suffix(file).stem.casefold() in _ABOUT


def _has_labels(folder: Path) -> bool:
    """Return whether a folder has a table of its patients' labels."""
    return any(kind.find_labels(folder) is not None for kind in kinds.list_kinds())


def _guess_part(path: Path) -> str:
    """Return the part that a name such as "train_corpus.txt" means, or ""."""
    words = re.split(r"[^a-z]+", path.name.split(".")[0].lower())
    parts = {_PARTS[word] for word in words if word in _PARTS}
    return parts.pop() if len(parts) == 1 else ""


def _choose_parts(entries: Iterable[Path]) -> dict[str, Path]:
    """Return train, valid and test among files and folders; {} if ambiguous.

    A name without further words, such as "train.csv", is preferred to "train_meta.csv".
    """
    entries_by_part: dict[str, list[Path]] = {}
    for entry in entries:
        part = _guess_part(entry)
        if part:
            entries_by_part.setdefault(part, []).append(entry)
    parts: dict[str, Path] = {}
    for part in _PART_WORDS:
        candidates = entries_by_part.get(part, [])
        plain_names = [
            path for path in candidates if path.name.split(".")[0].lower() in _PARTS
        ]
        candidates = plain_names or candidates
        if len(candidates) > 1:
            return {}
        for candidate in candidates:
            parts[part] = candidate
    has_needed_parts = {"train", "test"} <= parts.keys()
    return parts if has_needed_parts else {}


# ---- names ---------------------------------------------------------------------------


def _make_site_name(path: Path) -> str:
    """Return a name that a job allows for the site of a path."""
    name = path.name.split(".")[0] if path.suffix else path.name
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-_")[:_MAX_NAME]
    if name.lower() in RESERVED_SITE_NAMES:
        return f"{name}-site"
    return name or "site"


def _make_distinct_names(paths: Sequence[Path]) -> dict[Path, str]:
    """Return a name for the site of each path.

    The name is the last part in which all paths differ: "siteA/notes" and "siteB/notes"
    are siteA and siteB.

    Raises:
        ConfigError: A path is given twice.
    """
    ancestors = [Path(os.path.abspath(path)) for path in paths]
    if len(set(ancestors)) < len(ancestors):
        raise ConfigError("a path is given twice: give each path once")
    depth = min((len(path.parts) for path in ancestors), default=0)
    for _ in range(depth):
        names = [_make_site_name(ancestor) for ancestor in ancestors]
        are_distinct = len({name.lower() for name in names}) == len(names)
        if are_distinct:
            return dict(zip(paths, names, strict=True))
        ancestors = [ancestor.parent for ancestor in ancestors]
    return {path: f"site{number}" for number, path in enumerate(paths, 1)}


def _require_distinct(names: Sequence[str]) -> None:
    """Raise ConfigError if two sites have the same name, ignoring case."""
    lowered = [name.lower() for name in names]
    for name in names:
        if lowered.count(name.lower()) > 1 or name.lower() in RESERVED_SITE_NAMES:
            raise ConfigError(
                f"the site name {name!r} is taken: choose the names yourself, as in "
                "mercy=PATH"
            )
