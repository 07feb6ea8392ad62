"""Read the notes that the table of a site in a job names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fednotes.data.notes import NotePlace, NoteStream, read_notes


class NotesTable(Protocol):
    """The keys of a site's table that say how its notes are read."""

    @property
    def format(self) -> str:
        """The format; guessed if empty."""

    @property
    def categories(self) -> tuple[str, ...]:
        """The categories to read; all if empty."""

    @property
    def column(self) -> str:
        """The column or JSON key that holds the text; that of the format if empty."""

    @property
    def encoding(self) -> str:
        """The encoding of files that are not UTF-8 and have no byte-order mark."""


def read_site_notes(
    places: Sequence[NotePlace], table: NotesTable, *, site: str
) -> NoteStream:
    """Return a stream of a site's notes, read on demand.

    Args:
        places: The files, folders and databases with the notes.
        table: The site's table.
        site: The site's name, which becomes the notes' `source`.

    Raises:
        ConfigError: A setting is impossible.
        DataError: A file cannot be used; some errors are raised only during iteration.
    """
    return read_notes(
        places,
        table.format,
        table.categories,
        column=table.column or None,
        source=site,
        encoding=table.encoding,
    )
