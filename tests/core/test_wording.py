"""Sizes, durations and lists in readable form."""

from __future__ import annotations

import pytest

from fednotes.core.wording import format_duration, format_size, list_names


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (51_000_000, "51 MB"),
        (123_456_789, "123 MB"),
        (2.5e12, "2.5 TB"),
        (4e15, "4000 TB"),
    ],
)
def test_a_size_is_shown_with_three_digits_and_a_unit(
    count: float, expected: str
) -> None:
    assert format_size(count) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (3.21, "3.2 s"),
        (65, "1 min 05 s"),
        (3599, "59 min 59 s"),
        (3725, "1 h 02 min"),
        (7199, "2 h 00 min"),
        (90000, "25 h 00 min"),
    ],
)
def test_a_duration_is_shown_with_two_units(seconds: float, expected: str) -> None:
    assert format_duration(seconds) == expected


def test_a_long_list_of_names_ends_with_the_number_of_the_others() -> None:
    assert list_names([]) == ""
    assert list_names("abcdef") == "a, b, c, d, e, f"
    assert list_names("abcdefgh") == "a, b, c, d, e, f and 2 more"
    assert list_names("abc", limit=1) == "a and 2 more"
