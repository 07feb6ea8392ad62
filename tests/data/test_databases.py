"""Notes in SQLite and PostgreSQL: columns, bad rows, and what no message repeats."""

from __future__ import annotations

import socket
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing, suppress
from pathlib import Path

import pytest
from false_postgresql import Answers, false_server
from note_databases import NOTE_COLUMNS, NOTE_DDL, fill_sqlite, note_row
from postgres import PASSWORD, Postgres

from fednotes.core import bounds
from fednotes.core.databases import DatabaseAddress, is_address
from fednotes.core.errors import ConfigError, DataError, FednotesError, MissingExtra
from fednotes.data.formats.problems import Problems
from fednotes.data.notes import Note, NoteDatabase, read_notes

pytest.importorskip("sqlalchemy")

SECRET = "pa55-w0rd"
TEXT = "Gave aspirin 100 % of days: see \\d:\\d and :name."
ROWS = [note_row(number, f"{number} {TEXT}", 7 + number % 2) for number in (12, 3, 1)]


@pytest.fixture
def address(tmp_path: Path) -> str:
    return fill_sqlite(tmp_path / "notes.db", ROWS)


def facts(note: Note) -> tuple[object, ...]:
    return note.id, note.patient, note.visit, note.category, note.text


# ---- what is read --------------------------------------------------------------------


def test_the_note_table_of_omop_is_read_in_the_order_of_the_ids(address: str) -> None:
    expected = [
        (str(number), str(7 + number % 2), "70", "Letter", f"{number} {TEXT}")
        for number in (1, 3, 12)
    ]
    assert [facts(note) for note in read_notes(NoteDatabase(address))] == expected
    assert [facts(note) for note in read_notes(address)] == expected
    assert NoteDatabase(address).count_notes() == 3


def test_a_query_selects_columns_as_in_a_table_of_notes(address: str) -> None:
    query = (
        "SELECT note_id AS id, note_text AS body, person_id AS patient -- letters\n"
        "FROM note WHERE note_text LIKE '%100 \\%%' ESCAPE '\\' "
        "AND note_text LIKE '%:name%';"
    )
    database = NoteDatabase(address, query)
    notes = list(read_notes(database, column="body"))
    assert [note.id for note in notes] == ["1", "3", "12"]
    assert notes[0].text == f"1 {TEXT}"
    assert notes[0].patient == "8"
    assert database.count_notes() == 3


def test_the_ids_of_a_database_come_from_the_column_that_the_user_names(
    address: str,
) -> None:
    query = "SELECT note_id AS nr, note_text AS text FROM note"
    database = NoteDatabase(address, query)
    database.require_readable(id_column="nr")
    notes = list(read_notes(database, id_column="nr"))
    assert [note.id for note in notes] == ["1", "3", "12"]
    with pytest.raises(DataError, match="no column 'key' for the notes' ids"):
        database.require_readable(id_column="key")


def test_the_options_for_categories_and_exact_text_apply_to_a_database(
    tmp_path: Path,
) -> None:
    rows = [note_row(number, f"a\r\nb {number}") for number in (1, 3)]
    rows.append(note_row(12, "a\r\nb 12", title="Nursing "))
    address = fill_sqlite(tmp_path / "notes.db", rows)
    (note,) = read_notes(address, categories=["nursing"])
    assert note.text == "a\nb 12"
    assert [note.text[1:3] for note in read_notes(address, exact=True)] == ["\r\n"] * 3


def test_unusable_rows_are_reported_with_their_numbers(
    tmp_path: Path,
) -> None:
    with closing(sqlite3.connect(tmp_path / "notes.db")) as connection, connection:
        connection.execute("CREATE TABLE letters (id, text)")
        rows = [(1, "a"), (1, "b"), (2, b"bytes"), (None, "d"), (3, "e"), (4, None)]
        connection.executemany("INSERT INTO letters VALUES (?, ?)", rows)
    address = f"sqlite:///{tmp_path}/notes.db"
    database = NoteDatabase(address, "SELECT * FROM letters")
    problems = Problems()
    notes = list(read_notes(database, problems=problems, exact=True))
    assert [note.text for note in notes] == ["a", "e", ""]
    messages = [problem.message for problem in problems.listed]
    assert [message.split(":")[0] for message in messages] == [
        "row 1",
        "row 3",
        "row 4",
    ]
    assert "no id" in messages[0]
    assert "same note id" in messages[1]
    assert "neither text nor a number" in messages[2]
    with pytest.raises(DataError, match="row 1: the note has no id"):
        list(read_notes(database))


def test_a_relative_sqlite_path_of_a_job_is_below_its_folder(tmp_path: Path) -> None:
    located = DatabaseAddress("sqlite:///data/notes.db").resolve_from(tmp_path)
    assert located.text == f"sqlite:///{tmp_path}/data/notes.db"
    assert located.resolve_from(Path("/other")) == located
    relative = DatabaseAddress("sqlite:///notes.db").relative_to(Path("jobs"))
    assert relative.text == "sqlite:///../notes.db"


@pytest.mark.parametrize(
    ("rows", "text", "message"),
    [
        (2, f"hex(zeroblob({bounds.LINE // 2 + 1}))", "longer than a note may be"),
        (10**12, "'rash'", "computes far more than the file holds"),
    ],
)
def test_a_view_that_takes_the_memory_or_the_disk_is_refused(
    tmp_path: Path, rows: int, text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite would sort the rows of an endless view until the disk is full."""
    monkeypatch.setattr("fednotes.core.databases._MIN_STEPS", 10**7)
    with closing(sqlite3.connect(tmp_path / "notes.db")) as connection, connection:
        connection.execute(
            "CREATE VIEW note AS WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT "
            f"i + 1 FROM n WHERE i < {rows}) SELECT i AS note_id, 7 AS person_id, "
            f"'2021-03-04' AS note_date, {text} AS note_text FROM n"
        )
    database = NoteDatabase(f"sqlite:///{tmp_path}/notes.db")
    with pytest.raises(DataError, match=message) as caught:
        list(read_notes(database))
    assert "\n" not in str(caught.value)


def test_memory_does_not_grow_with_the_number_of_rows(tmp_path: Path) -> None:
    import tracemalloc

    def measure(number: int) -> int:
        path = tmp_path / f"{number}.db"
        long_text = "word " * 2000
        rows = [
            (n, 7, "2021-03-04", 0, 0, "", long_text, 0, 0, 1) for n in range(number)
        ]
        address = fill_sqlite(path, rows)
        del rows
        tracemalloc.start()
        assert sum(1 for _ in read_notes(address)) == number
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    measure(10)  # imports
    assert measure(1200) < 1.3 * measure(400)


# ---- addresses and credentials -------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("env:NOTES_DB", True),
        ("sqlite:///notes.db", True),
        ("postgresql+psycopg://user@host/db", True),
        ("mysql://user:x@host/db", True),  # refused, and never shown as a path
        ("postgresql:/user:x@host/db", True),  # as `Path` writes it
        ("notes.csv", False),
        ("/data/notes", False),
        ("C:/notes", False),
        ("a=b/env:x", False),
        ("-", False),
    ],
)
def test_an_address_is_distinguished_from_a_path(text: str, expected: bool) -> None:
    assert is_address(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        f"postgresql+psycopg://user:{SECRET}@host/db",
        f"postgresql://user:{SECRET}/@b@host:5432/db",
        f"postgresql:/user:{SECRET}@host/db",
        f"postgresql://host/db?user=u&password={SECRET}",
        f"postgresql://host/db?sslpassword={SECRET}",
        f"mysql://user:{SECRET}@host/db",
    ],
)
def test_an_address_with_a_password_is_refused_without_showing_it(text: str) -> None:
    for function in (NoteDatabase, DatabaseAddress, read_notes):
        with pytest.raises(ConfigError, match="env:") as raised:
            function(text)
        assert SECRET not in str(raised.value)


def test_an_unsupported_database_is_refused_with_the_supported_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match=r"postgresql\+psycopg://"):
        NoteDatabase("mysql://host/db")
    monkeypatch.setenv("NOTES_DB", f"mysql://u:{SECRET}@host/db")
    with pytest.raises(ConfigError, match="variable NOTES_DB is not one") as raised:
        list(read_notes("env:NOTES_DB"))
    assert SECRET not in str(raised.value)
    monkeypatch.setenv("NOTES_DB", f"postgresql://u:{SECRET}@host:port/db")
    with pytest.raises(ConfigError, match="not the address of a database") as raised:
        list(read_notes("env:NOTES_DB"))
    assert SECRET not in str(raised.value)
    monkeypatch.delenv("NOTES_DB")
    with pytest.raises(ConfigError, match="NOTES_DB is not set"):
        list(read_notes("env:NOTES_DB"))
    with pytest.raises(ConfigError, match="write env:NAME"):
        NoteDatabase("env:not a name")


def test_query_omop_and_formats_exclude_each_other(address: str) -> None:
    with pytest.raises(ConfigError, match="either `query` or `omop`"):
        NoteDatabase(address, query="SELECT 1", omop="note")
    with pytest.raises(ConfigError, match="not the name of a table"):
        NoteDatabase(address, omop="note; DROP TABLE note")
    with pytest.raises(ConfigError, match="leave it out"):
        read_notes(address, "csv")


def test_an_error_about_a_missing_package_names_its_extra(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    with pytest.raises(MissingExtra, match=r"fednotes\[database\]"):
        list(read_notes(address))


def test_sqlalchemy_is_imported_only_when_a_database_is_read() -> None:
    code = (
        "import sys\n"
        "from fednotes.data.notes import NoteDatabase\n"
        "NoteDatabase('sqlite:///notes.db')\n"
        "assert not {'sqlalchemy', 'psycopg'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- what SQLite refuses -------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("SELECT id FROM nowhere", "no such table"),
        ("SELECT unheard FROM note", "no such column"),
        ("SELECT note_text FROM note", "column for the notes' id"),
        ("SELECT note_id FROM note", "no column 'text'"),
        ("SELECT FROM WHERE", "not one SELECT"),
        ("DELETE FROM note RETURNING note_id, note_text", "not one SELECT"),
        ("SELECT 1 AS id, 'a' AS text); DELETE FROM note; --", "not one SELECT"),
    ],
)
def test_an_invalid_query_is_refused_with_one_plain_message(
    address: str, query: str, message: str
) -> None:
    with pytest.raises(DataError, match=message) as raised:
        list(read_notes(NoteDatabase(address, query)))
    assert "aspirin" not in str(raised.value)
    assert NoteDatabase(address).count_notes() == 3


def test_a_missing_file_or_one_that_is_not_sqlite_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such SQLite file"):
        list(read_notes(f"sqlite:///{tmp_path}/missing.db"))
    assert not (tmp_path / "missing.db").exists()
    (tmp_path / "other.db").write_text("not a database " * 100, "utf-8")
    with pytest.raises(DataError, match="not a SQLite database"):
        list(read_notes(f"sqlite:///{tmp_path}/other.db"))


def test_a_text_that_is_not_utf8_is_not_quoted(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "notes.db")) as connection, connection:
        connection.execute("CREATE TABLE note (note_id, person_id, note_text)")
        bad = "CAST(X'617370697269ff6e' AS TEXT)"
        connection.execute(f"INSERT INTO note VALUES (1, 1, {bad})")
    with pytest.raises(DataError, match="encoding") as raised:
        list(read_notes(f"sqlite:///{tmp_path}/notes.db"))
    assert "aspiri" not in str(raised.value)
    assert raised.value.__suppress_context__


# ---- PostgreSQL ----------------------------------------------------------------------


def test_notes_of_postgresql_are_read_and_errors_are_in_plain_words(
    postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One test, because starting the server takes longer than all that it asserts."""
    import psycopg

    with psycopg.connect(postgres.url().replace("+psycopg", "")) as connection:
        connection.execute("CREATE SCHEMA cdm")
        connection.execute(NOTE_DDL.format(table="cdm.note"))
        connection.execute("CREATE SEQUENCE numbers")
        marks = ", ".join(["%s"] * 10)
        with connection.cursor() as cursor:
            insert = f"INSERT INTO cdm.note ({NOTE_COLUMNS}) VALUES ({marks})"
            cursor.executemany(insert, ROWS)
    monkeypatch.setenv("NOTES_DB", postgres.url())
    database = NoteDatabase("env:NOTES_DB", omop="cdm.note")
    expected = [
        (str(number), str(7 + number % 2), "70", "Letter", f"{number} {TEXT}")
        for number in (1, 3, 12)
    ]
    assert [facts(note) for note in read_notes(database)] == expected
    assert database.count_notes() == 3

    letters = "SELECT note_id, note_text FROM cdm.note"
    query = f"{letters} WHERE note_text LIKE '%100 \\%%' AND note_id::text < '2' -- x"
    notes = list(read_notes(NoteDatabase("env:NOTES_DB", query)))
    assert [note.id for note in notes] == ["1", "12"]

    refused = {
        "": "no such table",  # OMOP's table is in another schema
        "SELECT 1 FROM nowhere.note": "no such table",
        "SELECT unheard FROM cdm.note": "no such column",
        f"{letters} WHERE": "not one SELECT",
        "DELETE FROM cdm.note RETURNING note_id, note_text": "not one SELECT",
        "WITH gone AS (DELETE FROM cdm.note RETURNING note_id, note_text) "
        "SELECT * FROM gone": "not one SELECT",
        f"{letters}) AS q; COMMIT; DELETE FROM cdm.note; SELECT * FROM (SELECT 1": "not one SELECT",
        "SELECT note_id, note_text::int AS text FROM cdm.note": "cannot be converted",
        "SELECT nextval('numbers') AS note_id, 'a' AS text": "only read",
    }
    for query, message in refused.items():
        with pytest.raises(DataError, match=message) as raised:
            list(read_notes(NoteDatabase("env:NOTES_DB", query)))
        assert "aspirin" not in str(raised.value)
        assert PASSWORD not in str(raised.value)
    assert database.count_notes() == 3

    wrong = {
        postgres.url(password=SECRET): "the database rejects the user or the password",
        postgres.url(database="nowhere"): "no such database",
        f"postgresql://u:{SECRET}@/db?host=/nowhere": "no server answers",
        f"postgresql://u:{SECRET}@/db?host=/nowhere&optoin=1": "has an option",
    }
    for url, message in wrong.items():
        monkeypatch.setenv("NOTES_DB", url)
        with pytest.raises(FednotesError, match=message) as raised:
            list(read_notes("env:NOTES_DB"))
        assert SECRET not in str(raised.value)
        assert str(raised.value).startswith("env:NOTES_DB: ")
        assert raised.value.__suppress_context__


def test_a_host_that_cannot_be_encoded_is_refused_with_one_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("psycopg")
    host = "h" * 300
    monkeypatch.setenv("WARD_DB", f"postgresql://user:{SECRET}@{host}/notes")
    with pytest.raises(DataError, match="check the host, the user") as refused:
        next(iter(read_notes(NoteDatabase("env:WARD_DB"))))
    assert SECRET not in str(refused.value)
    assert host not in str(refused.value)


@pytest.mark.parametrize(
    "option", ["sslmode=verify-full", "sslmode=require", "require_auth=scram-sha-256"]
)
def test_a_server_that_does_not_prove_itself_gets_no_password(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no TLS, and asks for the password in the clear."""
    pytest.importorskip("psycopg")
    received: list[bytes] = []

    def answer(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        # The client may leave before the last reply.
        with connection, suppress(OSError):
            connection.settimeout(30)
            for reply in (b"N", b"R\0\0\0\x08\0\0\0\x03", b""):
                received.append(connection.recv(1000))
                connection.sendall(reply)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        port = listener.getsockname()[1]
        address = f"postgresql://reader:{SECRET}@127.0.0.1:{port}/notes?{option}"
        monkeypatch.setenv("WARD_DB", address)
        with pytest.raises(DataError, match="does not prove itself") as refused:
            next(iter(read_notes(NoteDatabase("env:WARD_DB"))))
        thread.join()
    assert SECRET.encode() not in b"".join(received)
    assert SECRET not in str(refused.value)


def test_notes_of_the_false_server_of_these_tests_are_read() -> None:
    pytest.importorskip("psycopg")
    with false_server(Answers()) as address:
        (note,) = read_notes(NoteDatabase(address, "SELECT 1"), column="note_text")
    assert (note.id, note.text) == ("1", "Took aspirin.")


@pytest.mark.parametrize("number", [1, 3, 400])
def test_a_server_that_sends_other_columns_than_announced_crashes_nothing(
    number: int,
) -> None:
    """psycopg would read beyond the end of a list, which ended the process."""
    pytest.importorskip("psycopg")
    names = tuple(f"c{place}" for place in range(number))
    answers = Answers(sent=names, row=names)
    program = (
        "import sys\n"
        "from fednotes.core.errors import DataError\n"
        "from fednotes.data.notes import NoteDatabase, read_notes\n"
        "try:\n"
        "    list(read_notes(NoteDatabase(sys.argv[1], 'SELECT 1')))\n"
        "except DataError as error:\n"
        "    print(error)\n"
    )
    with false_server(answers) as address:
        done = subprocess.run(
            [sys.executable, "-c", program, address],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert "sends columns that it did not announce" in done.stdout


BAD_ANSWERS = {
    "no version": Answers(version="Took aspirin."),
    "a number": Answers(types=(23,), row=("Took aspirin.", "x")),
    "a date": Answers(types=(1184,), row=("Took aspirin.", "x")),
    "a document": Answers(types=(114,), row=("[" * 100_000, "x")),
    "a code": Answers(code="Took aspirin."),
}


@pytest.mark.parametrize("answers", BAD_ANSWERS.values(), ids=BAD_ANSWERS.keys())
def test_an_answer_that_cannot_be_read_is_not_quoted(answers: Answers) -> None:
    pytest.importorskip("psycopg")
    with false_server(answers) as address:
        with pytest.raises(DataError) as caught:
            list(read_notes(NoteDatabase(address, "SELECT 1")))
        assert str(caught.value).startswith(f"{address}: ")
        assert "aspirin" not in str(caught.value)
