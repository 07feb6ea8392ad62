"""Settings for reading notes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fednotes.core import bounds
from fednotes.core.errors import DataError
from fednotes.core.parsing import read_shipped_table
from fednotes.data import encodings
from fednotes.data.formats.files import remove_packed_suffix
from fednotes.data.formats.problems import Problems

if TYPE_CHECKING:
    from fednotes.data.notes._database import NoteDatabase

# The table columns of each format. "csv" has those of any other table, which are also
# the keys of JSON records.
TABLES: Final[Mapping[str, Any]] = read_shipped_table("data/notes/tables.toml")
COMMON_KEYS: Final[Mapping[str, Any]] = TABLES["csv"]
FORMATS: Final = (*TABLES, "jsonl", "fhir", "parquet", "text")


@dataclass(frozen=True)
class ReadSettings:
    """How the files of one path are read.

    Attributes:
        root: The path, or the database.
        format: One of `FORMATS`.
        source: As in `Note`.
        column: As in `read_notes`.
        id_column: As in `read_notes`.
        needs_category: Whether the category must be known.
        encoding: The user-specified encoding.
        problems: As in `read_notes`.
        exact: Whether to keep line ends unchanged.
    """

    root: Path | NoteDatabase
    format: str
    source: str
    column: str | None = None
    id_column: str | None = None
    needs_category: bool = False
    encoding: str = encodings.AUTO
    problems: Problems | None = None
    exact: bool = False

    def list_text_keys(self) -> Sequence[str]:
        """Return the possible keys of the text of a record whose table is unknown."""
        return (self.column,) if self.column else COMMON_KEYS["text"]

    def list_id_keys(self) -> Sequence[str]:
        """Return the possible keys of the id of a record whose table is unknown."""
        return (self.id_column,) if self.id_column else COMMON_KEYS["id"]

    def finish_text(self, raw: str) -> str:
        r"""Return a note's text, with line endings converted to `\n`, unless `exact`.

        Raises:
            DataError: The text has more than `bounds.NOTE` characters.
        """
        if len(raw) > bounds.NOTE:
            raise DataError(
                f"the note has more than {bounds.NOTE:,} characters: split it"
            )
        if self.exact or "\r" not in raw:
            return raw
        return raw.replace("\r\n", "\n").replace("\r", "\n")

    @contextmanager
    def handling_errors(
        self, kind: str, path: Path | str, line: int = 0, prefix: str = ""
    ) -> Iterator[None]:
        """Collect a DataError raised in the context, or raise it with its place.

        It is collected if `problems` is set.

        Args:
            kind: The kind of item that is left out because of the error.
            path: The file or database, if the error names none.
            line: The line, if the error names none; 0 is the whole file.
            prefix: Prefix of the message of an error that names no file.
        """
        if self.problems is not None:
            with self.problems.collecting(kind, path, line, prefix):
                yield
            return
        try:
            yield
        except DataError as error:
            if error.problems:
                raise error from None
            raise DataError.at(path, line, f"{prefix}{error}") from None


def remove_suffixes(path: Path) -> str:
    """Return the name of a file without its suffixes of format and packing."""
    name = remove_packed_suffix(path).name
    return name.rpartition(".")[0] or path.name


def find_first_value(record: Mapping[str, Any], keys: Sequence[str]) -> str | None:
    """Return the first value of some keys that is not empty, as text; else None."""
    for key in keys:
        value = record.get(key)
        if isinstance(value, str | int):
            text = str(value).strip()
            if text:
                return text
    return None
