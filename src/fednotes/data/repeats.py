"""Repeated values of a long stream, found in bounded memory.

    with Repeats() as sentences:
        for document in documents:
            sentences.add(sentence_keys(document))
        print(sentences.count())           # how many repeat an earlier one

Each value is stored as a 64-bit hash in a temporary database of SQLite. The database
stays in memory while it is smaller than its cache, and goes to a temporary file after
that. The file has no name, so that no other user can open it and nothing is left of it
when the process ends; the hashes are salted by Python anew in each process.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Self

from fednotes.core.errors import FednotesError

# Memory of a database in KiB. Sorting takes as much again.
CACHE: Final = 2048

_SETTINGS: Final = (
    "PRAGMA journal_mode = OFF",  # nothing is ever rolled back
    "PRAGMA synchronous = OFF",  # nothing must outlive the process
    "PRAGMA temp_store = FILE",  # sort on disk, not in memory
)
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


class Repeats:
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
        self.total = 0
        # A generator that holds the database may be closed by another thread.
        self._database = sqlite3.connect(
            "", isolation_level=None, check_same_thread=False
        )
        for setting in _SETTINGS:
            self._database.execute(setting)
        self._database.execute(f"PRAGMA cache_size = -{cache}")
        self._database.execute(
            "CREATE TABLE seen (hash INTEGER, file INTEGER, line INTEGER)"
        )
        self._database.execute("BEGIN")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Delete the database."""
        self._database.close()

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
