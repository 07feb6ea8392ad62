"""Repeated values of a stream: their number and places, and the memory they take."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from fednotes.data.repeats import CACHE, Repeats

# Prints by how much the peak of resident memory grows, in KiB, while so many different
# values are added and counted. Linux gives the peak in KiB, macOS in bytes.
GROWTH = """
import resource, sys
from fednotes.data.repeats import Repeats

def peak():
    unit = 1024 if sys.platform == "darwin" else 1
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // unit

def count(values):
    with Repeats() as repeats:
        for start in range(0, values, 1000):
            repeats.add(map(str, range(start, start + 1000)))
        assert repeats.count() == 0

count(200_000)
before = peak()
count(1_600_000)
print(peak() - before)
"""
# Adds values until the limit of a file's size is reached, and prints the error.
FULL = """
import resource
from fednotes.core.errors import FednotesError
from fednotes.data.repeats import Repeats

resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
with Repeats(cache=64) as repeats:
    try:
        for start in range(0, 1_000_000, 1000):
            repeats.add(map(str, range(start, start + 1000)))
        repeats.count()
    except FednotesError as error:
        print(error)
"""


def output_of(program: str) -> str:
    pytest.importorskip("resource")
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.mark.parametrize("cache", [CACHE, 64])
def test_repeats_are_counted_as_a_set_counts_them(cache: int) -> None:
    rng = random.Random(1)
    values = [str(rng.randrange(3000)) for _ in range(20_000)]
    with Repeats(cache) as repeats:
        for start in range(0, len(values), 7):
            repeats.add(values[start : start + 7])
        assert repeats.total == len(values)
        assert repeats.distinct() == len(set(values))
        assert repeats.count() == len(values) - len(set(values))


def test_counting_does_not_end_the_stream() -> None:
    with Repeats() as repeats:
        assert repeats.count() == 0
        repeats.add(["a", "b"])
        assert repeats.count() == 0
        repeats.add(["a"])
        assert repeats.count() == 1


def test_places_are_those_of_later_values_in_the_order_of_the_stream() -> None:
    rng = random.Random(2)
    seen = set[str]()
    expected = []
    with Repeats() as repeats:
        for position in range(500):
            value = str(rng.randrange(100))
            place = (position // 200, rng.randrange(1000))
            repeats.add_at(value, *place)
            if value in seen:
                expected.append(place)
            seen.add(value)
        assert repeats.places(1000) == expected
        assert repeats.places(10) == expected[:10]


def test_memory_does_not_grow_with_the_number_of_values() -> None:
    """1.4 million more hashes of 8 bytes take 11 MiB in an array, and more than twice
    of it while they are sorted. The database and its sort take a cache each."""
    assert int(output_of(GROWTH)) < 4 * CACHE


def test_a_full_temporary_folder_is_an_error_with_a_remedy() -> None:
    assert "set TMPDIR to a folder" in output_of(FULL)
