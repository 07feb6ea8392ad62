"""Counting of repeated and shared values of long streams, in bounded memory.

    with Repeats() as sentences:
        for document in documents:
            sentences.add(list_sentence_keys(document))
        print(sentences.count_repeats())   # how many repeat an earlier one

    with SharedValues() as notes:
        for site in sites:
            notes.add(site.id, site.texts)
        print(notes.count_shared())        # {("mercy", "north"): 12}

Each value is stored as a 64-bit hash in a temporary database of SQLite. The database
stays in memory while it fits its cache and then moves to a temporary file. The file is
unnamed, so that other users cannot open it and nothing remains when the process ends;
Python salts the hashes differently in each process.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import combinations, groupby
from operator import itemgetter
from typing import Any, Final, Self

from fednotes.core.errors import FednotesError

# Memory of a database in KiB. Sorting takes the same amount again.
CACHE: Final = 2048

_SETTINGS: Final = (
    "PRAGMA journal_mode = OFF",  # nothing is ever rolled back
    "PRAGMA synchronous = OFF",  # nothing must outlive the process
    "PRAGMA temp_store = FILE",  # sort on disk, not in memory
)
_INSERT: Final = "INSERT INTO seen (hash, file) VALUES (?, ?)"
# A join would look up each hash in a table on disk; sorting them is much faster.
_FILES_BY_HASH: Final = "SELECT hash, file FROM seen GROUP BY hash, file"
_DISTINCT: Final = "SELECT COUNT(*) FROM (SELECT 1 FROM seen GROUP BY hash)"
_REPEATED_PLACES: Final = """
SELECT file, line
FROM (
    SELECT
        rowid AS position,
        file,
        line,
        ROW_NUMBER() OVER (PARTITION BY hash ORDER BY rowid) AS occurrence
    FROM seen
)
WHERE occurrence > 1
ORDER BY position
LIMIT ?
"""


class _HashDatabase:
    """A temporary database of hashes, deleted at the end of its context."""

    def __init__(self, cache: int = CACHE) -> None:
        """Open an empty temporary database.

        Args:
            cache: Memory limit of the database, in KiB.
        """
        self._database = _open_database(cache)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Delete the database."""
        self._database.close()


class Repeats(_HashDatabase):
    """The values of a stream, some of which may repeat earlier ones.

    Different values with equal 64-bit hashes count as the same: among a hundred million
    values, this has a probability of 0.0003.

    Attributes:
        total: The number of values so far.
    """

    def __init__(self, cache: int = CACHE) -> None:
        """Open an empty temporary database.

        Args:
            cache: Memory limit of the database, in KiB.
        """
        super().__init__(cache)
        self.total = 0

    def add(self, values: Iterable[str]) -> None:
        """Add values.

        Raises:
            FednotesError: The temporary folder is full.
        """
        rows = [(hash(value),) for value in values]
        self.total += len(rows)
        with _explaining_disk_errors():
            self._database.executemany("INSERT INTO seen (hash) VALUES (?)", rows)

    def add_at(self, value: str, file: int, line: int) -> None:
        """Add a value with its place, for `list_places`.

        Args:
            value: The value.
            file: The number of the value's file.
            line: The value's line in the file.

        Raises:
            FednotesError: The temporary folder is full.
        """
        self.total += 1
        with _explaining_disk_errors():
            self._database.execute(
                "INSERT INTO seen VALUES (?, ?, ?)", (hash(value), file, line)
            )

    def count_distinct(self) -> int:
        """Return the number of different values.

        Raises:
            FednotesError: The temporary folder is full.
        """
        with _explaining_disk_errors():
            (number,) = self._database.execute(_DISTINCT).fetchone()
        return int(number)

    def count_repeats(self) -> int:
        """Return the number of values that repeat an earlier one.

        Raises:
            FednotesError: The temporary folder is full.
        """
        return self.total - self.count_distinct()

    def list_places(self, limit: int) -> list[tuple[int, int]]:
        """Return the places of values that repeat an earlier one, in stream order.

        Args:
            limit: Maximum number of places.

        Returns:
            The file and the line of each, as given to `add_at`.

        Raises:
            FednotesError: The temporary folder is full.
        """
        with _explaining_disk_errors():
            rows: list[Any] = self._database.execute(
                _REPEATED_PLACES, (limit,)
            ).fetchall()
        return rows


class SharedValues(_HashDatabase):
    """The values of several streams, some of which may be in several streams.

    As in `Repeats`, different values with equal 64-bit hashes count as the same.
    """

    def __init__(self, cache: int = CACHE) -> None:
        """Open an empty temporary database.

        Args:
            cache: Memory limit of the database, in KiB.
        """
        super().__init__(cache)
        self._streams: list[str] = []

    def add(self, stream: str, values: Iterable[str]) -> None:
        """Add the values of a stream.

        Args:
            stream: Name of the stream.
            values: The values, which may repeat.

        Raises:
            FednotesError: The temporary folder is full.
        """
        number = len(self._streams)
        self._streams.append(stream)
        with _explaining_disk_errors():
            rows = ((hash(value), number) for value in values)
            self._database.executemany(_INSERT, rows)

    def count_distinct(self) -> dict[str, int]:
        """Return the number of distinct values of each stream, by name.

        Raises:
            FednotesError: The temporary folder is full.
        """
        counts = Counter(
            stream for streams in self._list_streams_by_value() for stream in streams
        )
        return {name: counts[number] for number, name in enumerate(self._streams)}

    def count_shared(self) -> dict[tuple[str, str], int]:
        """Return the number of distinct values that each pair of streams shares.

        Returns:
            The number by the names of two streams, in the order in which they were
            added. Pairs without shared values are left out.

        Raises:
            FednotesError: The temporary folder is full.
        """
        counts = Counter(
            pair
            for streams in self._list_streams_by_value()
            for pair in combinations(streams, 2)
        )
        return {
            (self._streams[one], self._streams[two]): counts[one, two]
            for one, two in sorted(counts)
        }

    def _list_streams_by_value(self) -> Iterator[list[int]]:
        """Yield, for each distinct value, the numbers of the streams that have it."""
        with _explaining_disk_errors():
            rows = self._database.execute(_FILES_BY_HASH)
            for _, group in groupby(rows, key=itemgetter(0)):
                yield [stream for _, stream in group]


def _open_database(cache: int) -> sqlite3.Connection:
    """Open an empty temporary database with the table `seen`.

    Args:
        cache: Memory limit of the database, in KiB.
    """
    # A generator that holds the database may be closed by another thread.
    database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
    for setting in _SETTINGS:
        database.execute(setting)
    database.execute(f"PRAGMA cache_size = -{cache}")
    database.execute("CREATE TABLE seen (hash INTEGER, file INTEGER, line INTEGER)")
    database.execute("BEGIN")
    return database


@contextmanager
def _explaining_disk_errors() -> Iterator[None]:
    """Turn an error of the database in the context into one with a remedy.

    Raises:
        FednotesError: The temporary folder is full.
    """
    try:
        yield
    except sqlite3.Error as error:
        raise FednotesError(
            "the temporary folder cannot hold the hashes by which repeated text is "
            f"found ({error}): free some space, or set TMPDIR to a folder with more"
        ) from error
