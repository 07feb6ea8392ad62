"""Reading of notes from a database, in the order of their ids."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from fednotes.core.databases import DatabaseAddress, is_address
from fednotes.core.errors import ConfigError, DataError, ParameterError
from fednotes.core.settings import require_path
from fednotes.data.notes._guessing import guess_table
from fednotes.data.notes._note import Note
from fednotes.data.notes._settings import TABLES, ReadSettings
from fednotes.data.notes._tables import (
    Columns,
    find_columns,
    find_first_filled,
    is_marked_as_error,
)

if TYPE_CHECKING:
    from sqlalchemy import Connection

# Where notes are. Its `str()` names it in messages.
NotePlace: TypeAlias = "Path | NoteDatabase"
# Rows of PostgreSQL that are in memory at a time. SQLite's rows are read one by one,
# because a view can make rows of up to `bounds.LINE` from a small file. There is no
# server, so this costs no exchanges.
BATCH = 256
_CURSOR = "fednotes_notes"  # the name of the server's cursor
DEFAULT_TABLE = "note"  # the table of notes in OMOP's common data model
_TABLE = re.compile(r"(?:[A-Za-z_][\w$]*\.)?[A-Za-z_][\w$]*")


@dataclass(frozen=True)
class NoteDatabase:
    """Notes in a database, which is only read.

    `str()` gives the address as the user wrote it; it never has a password.

    Attributes:
        address: The database: a URL without a password, such as
            "postgresql+psycopg://user@host/database" or "sqlite:///notes.db", or
            "env:NAME" for an environment variable that holds one.
        query: A SELECT whose columns are those of a table of notes, among them the
            notes' ids. If empty, `omop` is read.
        omop: The NOTE table of OMOP's common data model, such as "cdm.note"; "note" if
            both are empty.

    Raises:
        ConfigError: An attribute is impossible.
    """

    address: str
    query: str = field(default="", repr=False)
    omop: str = ""

    def __post_init__(self) -> None:
        DatabaseAddress(self.address)
        if self.query and self.omop:
            raise ConfigError(
                "give either `query` or `omop` to read notes from a database, not both"
            )
        if self.omop and not _TABLE.fullmatch(self.omop):
            raise ConfigError(
                f"omop = {self.omop!r} is not the name of a table: write note or "
                "SCHEMA.note"
            )

    def __str__(self) -> str:
        return self.address

    def resolve_from(self, folder: Path) -> NoteDatabase:
        """Return the database with an absolute path, if it is a SQLite file.

        Args:
            folder: The folder that a relative path starts from.
        """
        address = DatabaseAddress(self.address).resolve_from(folder)
        return replace(self, address=address.text)

    def count_notes(self) -> int:
        """Return the number of rows; they are not read.

        Raises:
            ConfigError: As `DatabaseAddress.connect`.
            DataError: The database cannot be read.
        """
        address = DatabaseAddress(self.address)
        with address.connect() as connection, address.reading_answers():
            statement = f"SELECT count(*) FROM {self._write_selection(connection)}"
            with _selecting(connection, statement, str(self)) as selection:
                ((number,),) = selection.rows
                return int(number)

    def require_readable(
        self, column: str | None = None, id_column: str | None = None
    ) -> None:
        """Raise an error unless the database has the columns of notes.

        Args:
            column: The column of the text, if the user names it.
            id_column: The column of the notes' ids, if the user names it.
        """
        settings = ReadSettings(self, "", "", column=column, id_column=id_column)
        address = DatabaseAddress(self.address)
        with address.connect() as connection, address.reading_answers():
            self._find_columns(settings, connection)

    def read_notes(self, settings: ReadSettings) -> Iterator[Note | None]:
        """Yield the notes in the order of their ids; None for those marked as errors.

        Rows come in batches from a cursor of the server, or one by one from SQLite, so
        memory is bounded.

        Args:
            settings: How notes are read.

        Raises:
            ConfigError: As `DatabaseAddress.connect`.
            DataError: The database cannot be read, or a row cannot be used.
        """
        address = DatabaseAddress(self.address)
        with address.connect() as connection, address.reading_answers():
            columns = self._find_columns(settings, connection)
            statement = self._write_statement(connection, columns)
            with _selecting(connection, statement, str(self)) as selection:
                yield from _parse_rows(
                    settings, str(self), selection.rows, columns.renumber()
                )

    def _write_statement(self, connection: Connection, columns: _NoteColumns) -> str:
        """Return the SELECT of the needed columns, in the order of the notes' ids."""
        quote = connection.dialect.identifier_preparer.quote_identifier
        names = ", ".join(quote(columns.names[at]) for at in columns.needed)
        order = quote(columns.names[columns.places["id"][0]])
        return (
            f"SELECT {names} FROM {self._write_selection(connection)} ORDER BY {order}"
        )

    def _write_selection(self, connection: Connection) -> str:
        """Return the part of a statement after FROM: the query, or the table."""
        if self.query:
            return f"({self.query.strip().rstrip(';')}\n) AS notes"
        quote = connection.dialect.identifier_preparer.quote
        return ".".join(map(quote, (self.omop or DEFAULT_TABLE).split(".")))

    def _find_columns(
        self, settings: ReadSettings, connection: Connection
    ) -> _NoteColumns:
        """Return the columns of the notes' fields.

        Raises:
            DataError: There is no such table, or it lacks a column.
        """
        statement = f"SELECT * FROM {self._write_selection(connection)} LIMIT 0"
        with _selecting(connection, statement, str(self)) as selection:
            names = selection.names
        header = [name.strip().lower() for name in names]
        format = guess_table(header, settings.column) if self.query else "omop"
        table = TABLES.get(format, TABLES["csv"])
        columns = find_columns(settings, str(self), header, table, line=0)
        for name in ("id", "text"):
            if not columns[name]:
                raise DataError(
                    f"{self}: the query has no column for the notes' {name}: add one, "
                    f"such as SELECT … AS {table[name][0]}"
                )
        return _NoteColumns(names, columns)


class _NoteColumns(NamedTuple):
    """The columns of a query.

    Attributes:
        names: Their names.
        places: The places of each field of a note among them, the best one first.
    """

    names: Sequence[str]
    places: Columns

    @property
    def needed(self) -> list[int]:
        """The places of all columns that a note needs."""
        return sorted({place for each in self.places.values() for place in each})

    def renumber(self) -> Columns:
        """Return the places of the fields among the needed columns."""
        place_of = {column: place for place, column in enumerate(self.needed)}
        return {
            name: [place_of[column] for column in each]
            for name, each in self.places.items()
        }


class _Selection(NamedTuple):
    """The result of a SELECT.

    Attributes:
        names: The names of its columns.
        rows: Its rows, which are read in batches.
    """

    names: Sequence[str]
    rows: Iterable[Sequence[Any]]


@contextmanager
def _selecting(
    connection: Connection, statement: str, where: str
) -> Iterator[_Selection]:
    """Yield the result of a statement as it is written: "%" or ":" is no parameter.

    A cursor of the server takes one SELECT only.

    Args:
        connection: The connection.
        statement: The statement.
        where: The database, for messages.
    """
    if connection.dialect.name == "sqlite":
        options = {"no_parameters": True, "stream_results": True, "yield_per": 1}
        with connection.exec_driver_sql(statement, execution_options=options) as result:
            yield _Selection(tuple(result.keys()), result)
        return
    driver: Any = connection.connection.driver_connection
    with driver.cursor(_CURSOR) as cursor:
        cursor.execute(statement)
        names = tuple(column.name for column in cursor.description or ())
        yield _Selection(names, _fetch_rows(connection, len(names), where))


def _fetch_rows(
    connection: Connection, columns: int, where: str
) -> Iterator[Sequence[Any]]:
    """Yield the rows of the server's cursor.

    psycopg's `ServerCursor` would parse them with the types of the columns that the
    server announced. If a false server then sends more columns, it reads beyond the end
    of a list, and the process crashes.

    Args:
        connection: The connection.
        columns: The number of columns that the server announced.
        where: The database, for messages.

    Raises:
        DataError: The server sends another number of columns.
    """
    statement = f"FETCH FORWARD {BATCH} FROM {_CURSOR}"
    options = {"no_parameters": True}
    while True:
        result = connection.exec_driver_sql(statement, execution_options=options)
        if len(result.keys()) != columns:
            raise DataError(
                f"{where}: the database sends columns that it did not announce: check "
                "that this is the right server"
            )
        rows = result.fetchall()
        if not rows:
            return
        yield from rows


def _format_cell(value: object) -> str:
    """Return a value of a row as text; "" for null.

    Raises:
        DataError: It is no text, number or date.
    """
    if value is None:
        return ""
    if isinstance(value, bytes | bytearray | memoryview | list | dict | tuple):
        raise DataError(
            "a value is neither text nor a number: convert it to text in a query"
        )
    return str(value)


def _parse_rows(
    settings: ReadSettings,
    where: str,
    rows: Iterable[Sequence[Any]],
    places: Columns,
) -> Iterator[Note | None]:
    """Yield the notes of rows in the order of their ids; None for mistakes.

    Args:
        settings: How notes are read.
        where: The database, for messages.
        rows: The rows.
        places: The places of the fields in a row.

    Raises:
        DataError: A row cannot be used.
    """
    previous_id: str | None = None
    for number, row in enumerate(rows, 1):
        notes: list[Note | None] = []
        with settings.handling_errors("note", where, 0, f"row {number}: "):
            cells = [_format_cell(value) for value in row]
            note_id = find_first_filled(cells, places["id"])
            if note_id is None:
                raise DataError(
                    "the note has no id: use a query that leaves such rows out"
                )
            if note_id == previous_id:
                raise DataError(
                    "the row before has the same note id: give a query with one row "
                    "for each note"
                )
            previous_id = note_id
            notes.append(_make_note(settings, cells, places, note_id))
        del row  # so that few texts are in memory at a time
        while notes:
            yield notes.pop()


def _make_note(
    settings: ReadSettings, cells: Sequence[str], places: Columns, note_id: str
) -> Note | None:
    """Return the note of a row; None if it is marked as an error."""
    if is_marked_as_error(cells, places):
        return None
    return Note(
        id=note_id,
        text=settings.finish_text(cells[places["text"][0]]),
        patient=find_first_filled(cells, places["patient"]),
        category=find_first_filled(cells, places["category"]),
        source=settings.source,
        visit=find_first_filled(cells, places["visit"]),
        own_id=note_id,
    )


def make_note_place(value: object, query: str = "", omop: str = "") -> NotePlace:
    """Return where notes are: a database, or a path.

    Args:
        value: A path, the address of a database, or a `NoteDatabase`.
        query: As in `NoteDatabase`, if the value is an address.
        omop: As in `NoteDatabase`, if the value is an address.

    Raises:
        ConfigError: The value is neither, or the address is impossible.
    """
    if isinstance(value, NoteDatabase):
        return value
    if isinstance(value, str | os.PathLike) and is_address(value):
        return NoteDatabase(os.fspath(value), query, omop)
    return require_path(value, "a file or folder of notes")


def require_places_of_notes(places: Iterable[str], query: str, omop: str) -> None:
    """Raise ConfigError unless a job can read notes at these places.

    Args:
        places: Paths and addresses of databases, as a job names them.
        query: As in `NoteDatabase`.
        omop: As in `NoteDatabase`.
    """
    addresses = [place for place in places if is_address(place)]
    for address in addresses:
        NoteDatabase(address, query, omop)
    if (query or omop) and not addresses:
        raise ConfigError(
            "query and omop need the address of a database, such as env:NOTES_DB: give "
            "one, or leave them out"
        )


def require_database(
    places: Iterable[str | os.PathLike[str]], query: str, omop: str
) -> None:
    """Raise ParameterError if `query` or `omop` is given for paths only."""
    if (query or omop) and not any(map(is_address, places)):
        name = "query" if query else "omop"
        raise ParameterError(
            f"`{name}` reads a database, but only files are given: give the address of "
            "a database, such as env:NOTES_DB, or leave it out"
        )
