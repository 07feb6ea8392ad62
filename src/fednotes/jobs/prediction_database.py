"""Write predictions into the table NOTE_NLP of a database, in batches.

The rows of a batch and the record of the notes that are done are in one transaction.
The record is a row of the table `fednotes_progress`, in the schema of NOTE_NLP. Both
tables are created if they do not exist.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from fednotes.core.databases import DatabaseAddress
from fednotes.core.errors import DataError, ParameterError
from fednotes.core.types import Document
from fednotes.data.formats.omop import NLP_COLUMNS, list_nlp_rows
from fednotes.jobs.prediction_batches import (
    MakeSink,
    PredictionProgress,
    Sink,
    require_same_settings,
    warn_of_new_predictions,
)
from fednotes.jobs.prediction_writers import convert_nlp_row

if TYPE_CHECKING:
    from sqlalchemy import Connection, Table

DEFAULT_TABLE = "note_nlp"
PROGRESS_TABLE = "fednotes_progress"
BATCH = 1000  # notes of a transaction
_TABLE = re.compile(r"(?:([A-Za-z_][\w$]*)\.)?([A-Za-z_][\w$]*)")
# Lengths of NOTE_NLP's columns of text in the CDM 5.4.
_LENGTHS = {
    "snippet": 250,
    "offset": 50,
    "lexical_variant": 250,
    "nlp_system": 250,
    "term_exists": 1,
    "term_temporal": 50,
    "term_modifiers": 2000,
}
_MAX_ID = 2**62  # far below the largest number of a database
_PROGRESS = TypeAdapter(PredictionProgress)
_REQUIRED = ("note_nlp_id", "note_id", "lexical_variant", "nlp_date")


@dataclass(frozen=True)
class _Tables:
    """The tables of predictions.

    Attributes:
        nlp: NOTE_NLP.
        progress: The records of the notes that are done, by the name of `nlp`.
        name: The name of `nlp` in these records.
    """

    nlp: Table
    progress: Table
    name: str

    def read_record(self, connection: Connection) -> str | None:
        """Return the record of the table's predictions; None if there is none."""
        import sqlalchemy as sa

        columns = self.progress.c
        query = sa.select(columns.record).where(columns.table_name == self.name)
        record: str | None = connection.execute(query).scalar_one_or_none()
        return record

    def parse_record(self, record: str) -> PredictionProgress:
        """Return the progress that a record describes.

        Raises:
            DataError: The record is damaged.
        """
        try:
            return _PROGRESS.validate_json(record)
        except ValidationError:
            raise DataError(
                f"table {self.name}: its row of {PROGRESS_TABLE} cannot be read as a "
                "record of predictions: begin again with another `out_table`"
            ) from None

    def replace_record(
        self, connection: Connection, old_record: str | None, record: str
    ) -> None:
        """Replace the record of the table's predictions.

        Args:
            connection: A connection that has begun a transaction.
            old_record: The record that this process read or wrote last; None if there
                was none.
            record: The new record.

        Raises:
            DataError: Another process has changed the record since.
        """
        import sqlalchemy as sa

        columns = self.progress.c
        if old_record is None:
            # The primary key refuses a second row of this table.
            values = {"table_name": self.name, "record": record}
            connection.execute(sa.insert(self.progress).values(values))
            return
        is_unchanged = sa.and_(
            columns.table_name == self.name, columns.record == old_record
        )
        update = sa.update(self.progress).where(is_unchanged).values(record=record)
        if connection.execute(update).rowcount != 1:
            raise DataError(
                f"table {self.name}: another command writes predictions into this "
                "table, or its record was deleted; the last batch of this command was "
                "not written: end the other command, then give `resume`"
            )


def _define_tables(name: str) -> _Tables:
    """Return NOTE_NLP as the CDM 5.4 defines it, and the table of records."""
    import sqlalchemy as sa

    match = _TABLE.fullmatch(name)
    assert match is not None  # `opening_table` has checked it
    schema, table_name = match.groups()
    metadata = sa.MetaData(schema=schema)
    columns: list[sa.Column[Any]] = []
    for column in NLP_COLUMNS:
        type_: sa.types.TypeEngine[Any] = sa.Integer()
        if column in _LENGTHS:
            type_ = sa.String(_LENGTHS[column])
        elif column == "nlp_date":
            type_ = sa.Date()
        elif column == "nlp_datetime":
            type_ = sa.DateTime()
        columns.append(
            sa.Column(
                column,
                type_,
                primary_key=column == "note_nlp_id",
                autoincrement=False,
                nullable=column not in _REQUIRED,
            )
        )
    nlp = sa.Table(table_name, metadata, *columns)
    progress = sa.Table(
        PROGRESS_TABLE,
        metadata,
        sa.Column("table_name", sa.String(128), primary_key=True),
        sa.Column("record", sa.Text(), nullable=False),
    )
    return _Tables(nlp, progress, table_name)


class TableSink(Sink):
    """The table NOTE_NLP of a database.

    Args:
        connection: A connection that may write.
        tables: The tables.
        progress: The record of the notes that are done.
        record: The stored form of the newest record; None if there is none.
        size: The number of notes in a batch.
        types: The entity types of the model; the rows name their own.
    """

    def __init__(
        self,
        connection: Connection,
        tables: _Tables,
        progress: PredictionProgress,
        *,
        record: str | None,
        size: int,
        types: Sequence[str],  # noqa: ARG002 - of every sink
    ) -> None:
        super().__init__(size, progress)
        self._connection = connection
        self._tables = tables
        self._record = record

    def write(
        self,
        documents: Iterable[Document],
        make_record: Callable[[int], PredictionProgress],
    ) -> None:
        """Insert the rows of a batch and replace the record, in one transaction.

        If another process has written predictions meanwhile, nothing is written.
        """
        rows: list[dict[str, Any]] = []
        for document in documents:
            nlp_rows = list_nlp_rows(document, len(rows), self.progress.started)
            rows += map(convert_nlp_row, nlp_rows)
        progress = make_record(len(rows))
        record = json.dumps(asdict(progress))
        with self._connection.begin():
            first_id = self._find_free_id()
            for row in rows:
                row["note_nlp_id"] += first_id
            if rows:
                self._connection.execute(self._tables.nlp.insert(), rows)
            self._tables.replace_record(self._connection, self._record, record)
        self.progress = progress
        self._record = record

    def _find_free_id(self) -> int:
        """Return the id after the largest one, which no other program then uses.

        Raises:
            DataError: The largest one is not a number, or none is free after it.
        """
        import sqlalchemy as sa

        table = self._tables.nlp
        if self._connection.dialect.name == "postgresql":
            name = self._connection.dialect.identifier_preparer.format_table(table)
            lock = f"LOCK TABLE {name} IN SHARE ROW EXCLUSIVE MODE"
            self._connection.execute(sa.text(lock))
        largest = sa.select(sa.func.max(table.c.note_nlp_id))
        largest_id = _MAX_ID + 1
        with suppress(ArithmeticError, TypeError, ValueError):
            largest_id = int(self._connection.execute(largest).scalar_one() or 0)
        if largest_id > _MAX_ID:
            raise DataError(
                f"table {self._tables.name}: its largest note_nlp_id is not a number "
                f"up to {_MAX_ID:,}, so no id is free: name another `out_table`"
            )
        return largest_id + 1

    def complete(self) -> None:
        """Store that the input has no further note."""
        progress = replace(self.progress, is_complete=True)
        record = json.dumps(asdict(progress))
        with self._connection.begin():
            self._tables.replace_record(self._connection, self._record, record)
        self.progress = progress
        self._record = record


def require_table_name(name: str) -> None:
    """Raise ParameterError unless a text is a table's name, perhaps with a schema."""
    if not _TABLE.fullmatch(name):
        raise ParameterError(
            f"`out_table` {name!r} is not the name of a table: write note_nlp or "
            "SCHEMA.note_nlp"
        )


@contextmanager
def opening_table(
    address: DatabaseAddress,
    settings: Mapping[str, str],
    *,
    table: str,
    size: int,
    resume: bool,
) -> Iterator[MakeSink]:
    """Connect to a database, and yield a function that makes the sink of a table.

    Args:
        address: The database.
        settings: The model, the input and the options, as text by name.
        table: The name of NOTE_NLP, perhaps with a schema.
        size: The number of notes in a transaction.
        resume: Whether to continue predictions of an earlier command.

    Raises:
        ParameterError: The table has predictions that were interrupted, or complete
            ones of the same notes, and `resume` is not set; or with `resume`, they were
            begun with other settings.
        DataError: The database cannot be used.
        ConfigError: As `DatabaseAddress.connect`.
    """
    with address.connect(writes=True) as connection:
        tables = _define_tables(table)
        with connection.begin():
            tables.progress.metadata.create_all(connection)
            record = tables.read_record(connection)
        progress = None
        if record is not None:
            progress = _choose_progress(
                tables.parse_record(record),
                f"{address}, table {table}",
                settings,
                resume=resume,
            )
        elif resume:
            warn_of_new_predictions(f"{address}, table {table}")
        yield partial(
            TableSink,
            connection,
            tables,
            progress or PredictionProgress(settings),
            record=record,
            size=size,
        )


def _choose_progress(
    progress: PredictionProgress,
    where: str,
    settings: Mapping[str, str],
    *,
    resume: bool,
) -> PredictionProgress | None:
    """Return the record to continue; None to begin with other notes.

    Raises:
        ParameterError: As in `opening_table`.
    """
    if resume:
        require_same_settings(where, progress.settings, settings)
        return progress
    is_of_others = dict(progress.settings) != dict(settings)
    if progress.is_complete and is_of_others:
        return None
    state = "complete" if progress.is_complete else "interrupted"
    raise ParameterError(
        f"{where}: has {state} predictions by fednotes: set `resume` to continue them, "
        f"name another `out_table`, or delete their row of {PROGRESS_TABLE}"
    )
