"""Rounded counts, compared with values worked out by hand."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from fednotes.core.counts import round_array, round_count, round_counts, scale_sum

BY_HAND = [  # count, step, reported
    (0, 10, 0),
    (1, 10, 10),
    (4, 10, 10),
    (5, 10, 10),
    (10, 10, 10),
    (14, 10, 10),
    (15, 10, 20),
    (24, 10, 20),
    (25, 10, 30),
    (1_234, 10, 1_230),
    (0, 7, 0),
    (3, 7, 7),
    (10, 7, 7),
    (11, 7, 14),
    (49, 100, 100),
    (149, 100, 100),
    (150, 100, 200),
    (0, 1, 0),
    (1, 1, 1),
    (17, 1, 17),
]


@pytest.mark.parametrize(("count", "step", "reported"), BY_HAND)
def test_a_count_is_rounded_to_the_nearest_multiple_and_never_below_one_step(
    count: int, step: int, reported: int
) -> None:
    assert round_count(count, step) == reported
    assert round_counts({"mentions": float(count)}, step) == {
        "mentions": float(reported)
    }
    rounded = round_array(np.array([[count, 0.0]]), step)
    np.testing.assert_array_equal(rounded, [[reported, 0.0]])


def test_rounding_is_off_by_half_a_step_or_by_one_less_than_a_step() -> None:
    """Off by half a step at most, and by a step less one where there is less than half
    a step."""
    step = 10
    errors = np.array([round_count(n, step) - n for n in range(1_000)])
    assert np.abs(errors[5:]).max() == step / 2
    assert errors[1:5].tolist() == [9, 8, 7, 6]


def test_smaller_counts_are_never_reported_as_larger() -> None:
    """So no site reports more right mentions than mentions."""
    reported = [round_count(n, 10) for n in range(200)]
    assert reported == sorted(reported)


def test_scaling_a_sum_keeps_its_mean() -> None:
    """24 examples are reported as 20; float32 has 24 bits."""
    assert scale_sum(36.0, 24, 10) == 30.0
    assert scale_sum(1.0, 24, 10) / 20 == pytest.approx(1 / 24, rel=2**-24)
    assert scale_sum(0.0, 0, 10) == 0.0
    assert scale_sum(1 / 3, 24, 1) == 1 / 3


def test_the_last_bits_of_a_scaled_sum_do_not_reveal_the_exact_count() -> None:
    """A sum of a few float32 is a short number. Sent times 20 / 23 in all bits of a
    float64, it would be short again for whoever multiplies by 23 / 20, and for no other
    number."""

    def bits(value: float) -> int:
        mantissa = struct.unpack("<Q", struct.pack("<d", value))[0] & (2**52 - 1)
        return 52 - (mantissa & -mantissa).bit_length() + 1 if mantissa else 0

    total = sum(float(np.float32(x)) for x in np.random.default_rng(1).random(23))
    exact = total * (20 / 23)
    assert bits(total) < 35 < bits(exact)  # so the attack works on the product itself
    assert bits(scale_sum(total, 23, 10)) <= 23


@pytest.mark.parametrize("times", [2, 12, 100])
def test_a_multiple_of_a_count_reveals_no_more_than_the_count(times: int) -> None:
    """Such as 12 codes of each patient: 440 of 37 patients would be of no other number."""
    for count in range(1, 300):
        reported = round_count(times * count, 10, times)
        assert reported == times * round_count(count, 10)
        loss = scale_sum(times * count * 0.5, times * count, 10, times)
        assert loss / reported == 0.5
    # If some examples lack some of the numbers, few are not reported as none.
    assert round_count(1, 10, times) == 10 * times
    assert round_count(7, 1, times) == 7
