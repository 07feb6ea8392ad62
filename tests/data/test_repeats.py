"""Repeated values of a stream: their number, places and memory."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from fednotes.data.repeats import CACHE, Repeats, SharedValues

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
        assert repeats.count_repeats() == 0

count(200_000)
before = peak()
count(1_600_000)
print(peak() - before)
"""
# The same with a tenth of the values in each of two streams; every fourth is shared.
SHARED_GROWTH = GROWTH.replace(
    GROWTH[GROWTH.index("def count") : GROWTH.index("count(200_000)")],
    """
from fednotes.data.repeats import SharedValues

def count(values):
    with SharedValues() as shared:
        shared.add("a", map(str, range(values)))
        shared.add("b", map(str, range(0, 4 * values, 4)))
        assert shared.count_shared() == {("a", "b"): values // 4}
""",
).replace("00_000)", "0_000)")
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
        repeats.count_repeats()
    except FednotesError as error:
        print(error)
"""


def output_of(program: str) -> str:
    pytest.importorskip("resource")
    completed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return completed.stdout


@pytest.mark.parametrize("cache", [CACHE, 64])
def test_distinct_values_are_counted_exactly(cache: int) -> None:
    rng = random.Random(1)
    values = [str(rng.randrange(3000)) for _ in range(20_000)]
    with Repeats(cache) as repeats:
        for start in range(0, len(values), 7):
            repeats.add(values[start : start + 7])
        assert repeats.total == len(values)
        assert repeats.count_distinct() == len(set(values))
        assert repeats.count_repeats() == len(values) - len(set(values))


def test_counting_does_not_end_the_stream() -> None:
    with Repeats() as repeats:
        assert repeats.count_repeats() == 0
        repeats.add(["a", "b"])
        assert repeats.count_repeats() == 0
        repeats.add(["a"])
        assert repeats.count_repeats() == 1


def test_places_of_repeated_values_are_listed_in_stream_order() -> None:
    rng = random.Random(2)
    earlier = set[str]()
    expected = []
    with Repeats() as repeats:
        for position in range(500):
            value = str(rng.randrange(100))
            place = (position // 200, rng.randrange(1000))
            repeats.add_at(value, *place)
            if value in earlier:
                expected.append(place)
            earlier.add(value)
        assert repeats.list_places(1000) == expected
        assert repeats.list_places(10) == expected[:10]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_values() -> None:
    """1.4 million more hashes of 8 bytes take 11 MiB in an array, and more than twice
    of it while they are sorted. The database and its sort take a cache each."""
    assert int(output_of(GROWTH)) < 4 * CACHE


@pytest.mark.parametrize("cache", [CACHE, 64])
def test_shared_values_are_counted_exactly(cache: int) -> None:
    rng = random.Random(3)
    streams = {
        name: [str(rng.randrange(start, start + 900)) for _ in range(2000)]
        for name, start in (("a", 0), ("b", 600), ("c", 1200), ("d", 5000))
    }
    with SharedValues(cache) as shared:
        for name, values in streams.items():
            shared.add(name, values)
        sizes = {name: len(set(values)) for name, values in streams.items()}
        assert shared.count_distinct() == sizes
        in_both = {
            (left_part, right_part): len(
                set(streams[left_part]) & set(streams[right_part])
            )
            for left_part, right_part in (("a", "b"), ("b", "c"))
        }
        assert shared.count_shared() == in_both


def test_empty_streams_share_nothing() -> None:
    with SharedValues() as shared:
        shared.add("a", [])
        shared.add("b", ["x"])
        assert shared.count_distinct() == {"a": 0, "b": 1}
        assert shared.count_shared() == {}


def test_memory_does_not_grow_with_the_number_of_shared_values() -> None:
    """280,000 more hashes would take 30 MiB in two sets of Python's integers."""
    assert int(output_of(SHARED_GROWTH)) < 4 * CACHE


def test_a_full_temporary_folder_is_an_error_with_a_remedy() -> None:
    assert "set TMPDIR to a folder" in output_of(FULL)
