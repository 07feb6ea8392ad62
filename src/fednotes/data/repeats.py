"""Repeated and shared values of long streams, found in bounded memory.

    with Repeats() as sentences:
        for document in documents:
            sentences.add(sentence_keys(document))
        print(sentences.count())           # how many repeat an earlier one

    with SharedValues() as notes:
        for site in sites:
            notes.add(site.id, site.texts)
        print(notes.count_shared())        # {("mercy", "north"): 12}

Each value is stored as a 64-bit hash in a temporary database of SQLite. The database
stays in memory while it is smaller than its cache, and goes to a temporary file after
that. The file has no name, so that no other user can open it and nothing is left of it
when the process ends; the hashes are salted by Python anew in each process.
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

# Memory of a database in KiB. Sorting takes as much again.
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
    """A temporary database of hashes, which ends with its context."""

    def __init__(self, cache: int = CACHE) -> None:
        """Open an empty temporary database.

        Args:
            cache: Memory that the database may take, in KiB.
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
    """Values of a stream, of which some may repeat earlier ones.

    Two different values are taken for one if their 64-bit hashes are equal: among a
    hundred million values, with a probability of 0.0003.

    Attributes:
        total: The number of values so far.
    """

    def __init__(self, cache: int = CACHE) -> None:
        """Open an empty temporary database.

        Args:
            cache: Memory that the database may take, in KiB.
        """
        super().__init__(cache)
        self.total = 0

    def add(self, values: Iterable[str]) -> None:
        """Take in values.

        Raises:
            FednotesError: The temporary folder is full.
        """
        rows = [(hash(value),) for value in values]
        self.total += len(rows)
        with _on_scratch_disk():
            self._database.executemany("INSERT INTO seen (hash) VALUES (?)", rows)

    def add_at(self, value: str, file: int, line: int) -> None:
        """Take in a value with its place, for `places`.

        Args:
            value: The value.
            file: The number of its file.
            line: Its line in the file.

        Raises:
            FednotesError: The temporary folder is full.
        """
        self.total += 1
        with _on_scratch_disk():
            self._database.execute(
                "INSERT INTO seen VALUES (?, ?, ?)", (hash(value), file, line)
            )

    def distinct(self) -> int:
        """Return the number of different values.

        Raises:
            FednotesError: The temporary folder is full.
        """
        with _on_scratch_disk():
            (number,) = self._database.execute(_DISTINCT).fetchone()
        return int(number)

    def count(self) -> int:
        """Return how many values repeat an earlier one.

        Raises:
            FednotesError: The temporary folder is full.
        """
        return self.total - self.distinct()

    def places(self, limit: int) -> list[tuple[int, int]]:
        """Return where values repeat an earlier one, in the order of the stream.

        Args:
            limit: The number of places to return at most.

        Returns:
            The file and the line of each, as given to `add_at`.

        Raises:
            FednotesError: The temporary folder is full.
        """
        with _on_scratch_disk():
            rows: list[Any] = self._database.execute(
                _REPEATED_PLACES, (limit,)
            ).fetchall()
        return rows


class SharedValues(_HashDatabase):
    """Values of several streams, of which some may be in more than one.

    As in `Repeats`, two values are taken for one if their 64-bit hashes are equal.
    """

    def __init__(self, cache: int = CACHE) -> None:
        """Open an empty temporary database.

        Args:
            cache: Memory that the database may take, in KiB.
        """
        super().__init__(cache)
        self._streams: list[str] = []

    def add(self, stream: str, values: Iterable[str]) -> None:
        """Take in the values of a stream.

        Args:
            stream: Name of the stream.
            values: Its values, which may repeat.

        Raises:
            FednotesError: The temporary folder is full.
        """
        number = len(self._streams)
        self._streams.append(stream)
        with _on_scratch_disk():
            rows = ((hash(value), number) for value in values)
            self._database.executemany(_INSERT, rows)

    def count_distinct(self) -> dict[str, int]:
        """Return the number of different values of each stream, by its name.

        Raises:
            FednotesError: The temporary folder is full.
        """
        counts = Counter(
            stream for streams in self._streams_of_values() for stream in streams
        )
        return {name: counts[number] for number, name in enumerate(self._streams)}

    def count_shared(self) -> dict[tuple[str, str], int]:
        """Return how many different values each pair of streams has in common.

        Returns:
            The number by the names of two streams, in the order in which they were
            added. Pairs without such a value are left out.

        Raises:
            FednotesError: The temporary folder is full.
        """
        counts = Counter(
            pair
            for streams in self._streams_of_values()
            for pair in combinations(streams, 2)
        )
        return {
            (self._streams[one], self._streams[two]): counts[one, two]
            for one, two in sorted(counts)
        }

    def _streams_of_values(self) -> Iterator[list[int]]:
        """Yield the numbers of the streams that have it, for each different value."""
        with _on_scratch_disk():
            rows = self._database.execute(_FILES_BY_HASH)
            for _, group in groupby(rows, key=itemgetter(0)):
                yield [stream for _, stream in group]


def _open_database(cache: int) -> sqlite3.Connection:
    """Open an empty temporary database with the table `seen`.

    Args:
        cache: Memory that the database may take, in KiB.
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
def _on_scratch_disk() -> Iterator[None]:
    """Turn an error of the database into one that says what to do."""
    try:
        yield
    except sqlite3.Error as error:
        raise FednotesError(
            "the temporary folder cannot hold the hashes by which repeated text is "
            f"found ({error}): free some space, or set TMPDIR to a folder that has it"
        ) from error
