"""Databases by SQLAlchemy: their addresses, connections and errors.

    address = DatabaseAddress("env:NOTES_DB")
    with address.connect() as connection:           # a read-only transaction
        ...

An address is a URL without a password, or `env:NAME`: the name of an environment
variable that holds the URL. So a password is in no job, record, message or history of
commands. No message repeats a URL, or what a database says, which may quote a text.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import parse_qsl, quote, urlsplit

from fednotes.core import bounds
from fednotes.core.errors import ConfigError, DataError, FednotesError, needs

if TYPE_CHECKING:
    import sqlite3

    from sqlalchemy import Connection, Engine

EXTRA: Final = "database"
# A path may be "C:/notes", so the name of a scheme has at least two letters. A `Path`
# merges two slashes into one, and a password must be recognised there too.
_ADDRESS = re.compile(r"env:|[A-Za-z][A-Za-z0-9+.-]+:/")
_VARIABLE = re.compile(r"env:([A-Za-z_][A-Za-z0-9_]*)")
_DRIVERS: Final = {
    "sqlite": "sqlite",
    "sqlite+pysqlite": "sqlite",
    "postgresql": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
    "postgres": "postgresql+psycopg",
}
_EXAMPLES = (
    "postgresql+psycopg://user@host/database, sqlite:///notes.db, or env:NAME for an "
    "environment variable that holds such an address"
)
_PASSWORD = re.compile(r"(:/{1,2}[^\s/:@]*:)\S+@")
_RELATIVE_FILE = re.compile(r"(?i)sqlite(?:\+pysqlite)?:///(?!/)")
_CONNECT_SECONDS = 30
# Steps of SQLite's virtual machine between two checks of their number.
_STEPS_BETWEEN_CHECKS = 1_000_000
# The steps that reading a SQLite file may take: a billion take about half a minute, and
# a table takes a few for each of its bytes.
_MIN_STEPS = 10**9
_STEPS_PER_BYTE = 1000
_SQLSTATE = re.compile("[0-9A-Z]{5}")
_READ_ONLY_SESSION = "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY"


class _Cause(NamedTuple):
    """A cause of errors, and its remedy.

    Attributes:
        codes: A pattern of the beginnings of PostgreSQL's codes of such errors.
        words: A pattern of words in the messages of errors without a code.
        text: What is wrong.
        remedy: What a person can do.
    """

    codes: str
    words: str
    text: str
    remedy: str


_CAUSES = (
    _Cause(
        "",
        "not support SSL|SSL error|certificate|authentication method requirement",
        "the server does not prove itself as the address requires",
        "check sslmode, sslrootcert and require_auth in the address, and that this is "
        "the right server",
    ),
    _Cause(
        "28",
        "password authentication failed|no password supplied|authentication",
        "the database rejects the user or the password",
        "check the user and the password, in the variable of env:NAME or in ~/.pgpass",
    ),
    _Cause(
        "",
        'role "',
        "there is no such user",
        "check the user in the address",
    ),
    _Cause(
        "3D000",
        'database "',
        "there is no such database",
        "check the name of the database in the address",
    ),
    _Cause(
        "",
        "translate host name|resolve|could not find host",
        "the host is unknown",
        "check the host in the address",
    ),
    _Cause(
        "",
        "connection refused|no such file or directory|timeout|timed out|unreachable",
        "no server answers",
        "check the host and the port in the address, and that the server runs",
    ),
    _Cause(
        "",
        "connection option",
        "the address has an option that PostgreSQL does not know",
        "check what follows the question mark in the address",
    ),
    _Cause(
        "",
        "unable to open",
        "the file cannot be opened",
        "check the path of the database's file and its permissions",
    ),
    _Cause(
        "42P01",
        "no such table",
        "there is no such table",
        "check the name of the table, with its schema",
    ),
    _Cause(
        "3F000",
        "unknown database",
        "there is no such schema",
        "check the schema of the table",
    ),
    _Cause(
        "42703",
        "no such column",
        "there is no such column",
        "check the columns of the query",
    ),
    _Cause(
        "42501",
        "not authorized",
        "the user may not use this table",
        "ask the database's administrators for the right",
    ),
    _Cause(
        "42|0A000",
        "syntax error|incomplete input|one statement|unrecognized token",
        "the query is not one SELECT that this database understands",
        "try the query in the database's client",
    ),
    _Cause(
        "25006",
        "readonly database",
        "the connection is read-only, but the query writes",
        "give a query that only reads",
    ),
    _Cause(
        "23505",
        "UNIQUE constraint",
        "a row with the same key exists",
        "end other programs that write into this table, and try again",
    ),
    _Cause(
        "22001",
        "",
        "a value is longer than its column",
        "create the table with the columns of OMOP CDM 5.4",
    ),
    _Cause(
        "23",
        "constraint failed",
        "the table refuses a row",
        "create the table with the columns of OMOP CDM 5.4",
    ),
    _Cause(
        "55P03|40P01|40001",
        "database is locked",
        "another program uses the table",
        "try again when it has ended",
    ),
    _Cause(
        "57014|57P0|08",
        "closed the connection|connection is lost|terminat",
        "the connection ended",
        "check that the server runs, and try again",
    ),
    _Cause(
        "22021|22P05",
        "could not decode",
        "a text is not in the database's encoding",
        "correct the text, or leave it out in a query",
    ),
    _Cause(
        "22",
        "",
        "a value cannot be converted or computed",
        "check the casts and the arithmetic of the query",
    ),
    _Cause(
        "",
        "interrupted",
        "a view or the query computes far more than the file holds",
        "name a table instead of a view, or simplify the query",
    ),
    _Cause(
        "",
        "string or blob too big",
        "a value is longer than a note may be",
        "exclude such rows by a query",
    ),
    _Cause(
        "",
        "not a database|malformed",
        "the file is not a SQLite database",
        "check the path of the database's file",
    ),
)


def is_address(text: str | os.PathLike[str]) -> bool:
    """Return whether a place of notes is the address of a database, not a path."""
    return _ADDRESS.match(os.fspath(text)) is not None


@dataclass(frozen=True)
class DatabaseAddress:
    """The address of a database; `str()` gives it as the user wrote it.

    Attributes:
        text: A URL without a password, or `env:NAME`.

    Raises:
        ConfigError: The text is no address, has a password, or names a database that
            fednotes does not support.
    """

    text: str

    def __post_init__(self) -> None:
        if self.text.startswith("env:"):
            if not _VARIABLE.fullmatch(self.text):
                raise ConfigError(
                    "the address of a database begins with env: but names no "
                    "environment variable: write env:NAME"
                )
            return
        if _has_password(self.text):
            raise ConfigError(
                "the address of a database has a password: put the address into an "
                "environment variable, and give env: and the variable's name"
            )
        _require_known_scheme(self.text, "the address of a database")

    def __str__(self) -> str:
        return self.text

    @contextmanager
    def connect(self, *, writes: bool = False) -> Iterator[Connection]:
        """Yield a connection; it has begun a read-only transaction unless it writes.

        Args:
            writes: Whether the connection may write. Its user then begins and commits
                the transactions.

        Raises:
            ConfigError: The variable of the address is not set, or holds no address.
            DataError: The database cannot be reached, or refuses a statement.
            MissingExtra: The packages of the extra `database` are missing.
        """
        with needs("sqlalchemy", EXTRA):
            import sqlalchemy as sa
        engine = self._make_engine(writes=writes)
        try:
            with (
                self._naming_errors("connect to the database"),
                self.reading_answers(),
            ):
                connection = self._open_connection(engine)
                is_postgresql = engine.dialect.name == "postgresql"
                if is_postgresql and not writes:
                    # The session's later transactions are read-only, and so is the
                    # first one, which begins after the commit.
                    connection.execute(sa.text(_READ_ONLY_SESSION))
                    connection.commit()
                    connection.execute(sa.text("SET TRANSACTION READ ONLY"))
            try:
                with self._naming_errors("use the database"):
                    yield connection
            finally:
                with self._naming_errors("use the database"):
                    connection.close()
        finally:
            engine.dispose()

    def _open_connection(self, engine: Engine) -> Connection:
        """Return a connection of an engine.

        Raises:
            DataError: A part of the address cannot be encoded, as a host of 300
                letters.
        """
        try:
            return engine.connect()
        except UnicodeError:
            raise DataError(
                f"{self}: cannot connect to the database: a part of the address cannot "
                "be encoded: check the host, the user and the name of the database"
            ) from None

    @contextmanager
    def _naming_errors(self, action: str) -> Iterator[None]:
        """Turn errors of the driver into a DataError of this module's own words.

        Args:
            action: What failed, for the message, such as "connect to the database".

        Raises:
            DataError: The driver raised an error.
        """
        try:
            yield
        except _list_driver_errors() as error:
            message = _describe_cause(error)
            raise DataError(f"{self}: cannot {action}: {message}") from None

    @contextmanager
    def reading_answers(self) -> Iterator[None]:
        """Turn errors of Python that an answer of the server causes into a DataError.

        A server can send anything in place of its version, a number or a date. The
        driver then raises various errors, whose messages may quote a note.

        Raises:
            DataError: An answer cannot be read.
        """
        try:
            yield
        except (FednotesError, MemoryError):
            raise
        except _list_driver_errors():
            raise
        except Exception as error:
            raise DataError(
                f"{self}: an answer of the database cannot be read "
                f"({type(error).__name__}): check that this is a PostgreSQL server, "
                "its encoding and DateStyle, or convert values to text in a query"
            ) from None

    def _make_engine(self, *, writes: bool) -> Engine:
        """Return an engine that keeps no connection and shows no parameters."""
        import sqlite3

        import sqlalchemy as sa
        from sqlalchemy.exc import ArgumentError
        from sqlalchemy.pool import NullPool

        text = self._read_url()
        scheme, _, remainder = text.partition("://")
        driver = _DRIVERS[scheme.lower()]
        try:
            url = sa.make_url(f"{driver}://{remainder}")
        except (ArgumentError, ValueError):
            raise ConfigError(
                f"{self}: this is not the address of a database: write {_EXAMPLES}"
            ) from None
        if driver == "sqlite":
            path = self._require_file(url.database, may_be_new=writes)
            mode = "rwc" if writes else "ro"

            def open_file() -> sqlite3.Connection:
                """Open the SQLite file."""
                connection = sqlite3.connect(
                    f"file:{quote(path)}?mode={mode}", uri=True
                )
                if not writes:
                    _limit_computation(connection, os.path.getsize(path))
                return connection

            return sa.create_engine(
                "sqlite://",
                creator=open_file,
                poolclass=NullPool,
                hide_parameters=True,
            )
        with needs("psycopg", EXTRA):
            import psycopg  # noqa: F401 - SQLAlchemy imports it by its name
        return sa.create_engine(
            url,
            poolclass=NullPool,
            hide_parameters=True,
            connect_args={
                "application_name": "fednotes",
                "connect_timeout": _CONNECT_SECONDS,
            },
        )

    def _require_file(self, path: str | None, *, may_be_new: bool) -> str:
        """Return the absolute path of SQLite's file.

        Args:
            path: The path in the address.
            may_be_new: Whether the file is created if its folder exists.

        Raises:
            DataError: There is no such file.
        """
        is_new = path and may_be_new and Path(path).absolute().parent.is_dir()
        if not path or not (is_new or Path(path).is_file()):
            raise DataError(
                f"{self}: there is no such SQLite file: write sqlite:///notes.db for a "
                "file in this folder, or sqlite:////data/notes.db"
            )
        return os.path.abspath(path)

    def _read_url(self) -> str:
        """Return the URL, read from the environment if the address says so.

        Raises:
            ConfigError: The variable is not set, or holds no address.
        """
        match = _VARIABLE.fullmatch(self.text)
        if match is None:
            return self.text
        value = os.environ.get(match[1], "").strip()
        if not value:
            raise ConfigError(
                f"the environment variable {match[1]} is not set: set it to the "
                "address of a database, such as "
                "postgresql+psycopg://user:password@host/database"
            )
        _require_known_scheme(value, f"the environment variable {match[1]}")
        return value

    def is_sqlite(self) -> bool:
        """Return whether the database is a SQLite file.

        Raises:
            ConfigError: The variable of the address is not set.
        """
        return self._read_url().lower().startswith("sqlite")

    def resolve_from(self, folder: Path) -> DatabaseAddress:
        """Return the address with an absolute path, if it is a SQLite file.

        Args:
            folder: The folder that a relative path starts from.
        """
        prefix = _RELATIVE_FILE.match(self.text)
        if prefix is None:
            return self
        path = os.path.abspath(folder / self.text[prefix.end() :])
        return DatabaseAddress(f"{prefix[0]}{path}")

    def relative_to(self, folder: Path) -> DatabaseAddress:
        """Return the address with a path as seen from `folder`, if it is a SQLite file.

        This is the inverse of `resolve_from`, for a path that is relative to the
        current folder.
        """
        prefix = _RELATIVE_FILE.match(self.text)
        if prefix is None:
            return self
        path = os.path.relpath(self.text[prefix.end() :], folder)
        return DatabaseAddress(f"{prefix[0]}{path}")


def _limit_computation(connection: sqlite3.Connection, file_bytes: int) -> None:
    """Limit the memory and the time that the views of a SQLite file can take.

    A file of a few kilobytes may have a view of texts of a gigabyte, or of endlessly
    many rows, which SQLite would sort into temporary files until the disk is full.

    Args:
        connection: A connection that only reads.
        file_bytes: Size of the file.
    """
    import sqlite3

    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, bounds.LINE)
    steps_left = max(_MIN_STEPS, _STEPS_PER_BYTE * file_bytes)

    def is_too_much() -> bool:
        """Count the steps since the last call, and return whether to stop."""
        nonlocal steps_left
        steps_left -= _STEPS_BETWEEN_CHECKS
        return steps_left < 0

    connection.set_progress_handler(is_too_much, _STEPS_BETWEEN_CHECKS)


def hide_passwords(text: str) -> str:
    """Return a message with "***" in place of the passwords of addresses in it."""
    return _PASSWORD.sub(r"\1***@", text)


def _has_password(text: str) -> bool:
    """Return whether a URL has a password, even if it is not a valid URL.

    A password may stand before the host, as in `postgresql://USER:PASSWORD@HOST` or
    `postgresql:/USER:PASSWORD@HOST`, or in an option, as in `?password=PASSWORD`. If in
    doubt, the answer is yes.
    """
    if text.lower().startswith("sqlite"):
        return False  # a file needs none, and its path may contain ":" and "@"

    after_scheme = text.split(":/", 1)[-1]
    # A password may contain "@", so the host begins after the last one.
    user_and_password, at_sign, _ = after_scheme.rpartition("@")
    if at_sign and ":" in user_and_password:
        return True

    try:
        options = parse_qsl(urlsplit(text).query, keep_blank_values=True)
    except ValueError:
        return True  # the options cannot be read, so one of them may be a password
    return any("passw" in name.lower() for name, _ in options)


def _require_known_scheme(text: str, where: str) -> None:
    """Raise ConfigError unless a URL names a supported database; it is not shown."""
    scheme, sign, _ = text.partition("://")
    if not sign or scheme.lower() not in _DRIVERS:
        raise ConfigError(f"{where} is not one that fednotes reads: write {_EXAMPLES}")


def _list_driver_errors() -> tuple[type[Exception], ...]:
    """Return the classes of errors of SQLAlchemy and, if it is in use, psycopg."""
    from sqlalchemy.exc import SQLAlchemyError

    psycopg = sys.modules.get("psycopg")
    return (SQLAlchemyError,) if psycopg is None else (SQLAlchemyError, psycopg.Error)


def _describe_cause(error: Exception) -> str:
    """Return the cause of an error and a remedy, in words of this module only.

    PostgreSQL's errors are recognised by their codes, others by their messages.
    """
    original = getattr(error, "orig", error)
    code = getattr(original, "sqlstate", None) or ""
    if not _SQLSTATE.fullmatch(code):  # a server can send any text as a code
        code = ""
    for cause in _CAUSES:
        if code:
            is_cause = cause.codes and re.match(cause.codes, code)
        else:
            is_cause = cause.words and re.search(cause.words, str(original), re.I)
        if is_cause:
            return f"{cause.text}: {cause.remedy}"
    name = code or type(original or error).__name__
    return f"it refused with the error {name}: look it up in the database's manual"
