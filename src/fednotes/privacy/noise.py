"""Exact discrete Gaussian noise from a stream of secure random bits.

Clément Canonne, Gautam Kamath, Thomas Steinke (2020), "The discrete Gaussian for
differential privacy", Algorithms 1 to 3: P(x) ∝ exp(-x² / 2 s²) on integers. Here s is
always 2^26, and the data are put on a grid that scales the noise. Every probability is
then a fraction whose denominator is a power of two (times k in Algorithm 1), so integer
comparisons suffice. No rounding of floating-point numbers can reveal the data (Mironov
2012). All numbers are drawn at once; rejected ones are redrawn.

The stream is ChaCha20 (RFC 8439, from `cryptography`, the extra "secure") under a key
of 256 bits. NumPy's generators are not secure, because some of their numbers determine
the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fednotes.core.update import Tensors
from fednotes.privacy.secure_sum.crypto import (
    add_streams,
    compute_receipt,
    need_cryptography,
)

BITS = 26
SCALE: int = 2**BITS  # s, in units of the grid
# Candidates beyond this multiple of s are rejected; an exact sampler accepts one in
# exp(480).
FAR = 32
MARGIN = 1 - 1e-9  # factor of the clip that allows for float64 rounding
LOT = 2**14  # minimum number of words drawn from the stream at once
Words = NDArray[np.uint64]
Whole = NDArray[np.int64]
Truth = NDArray[np.bool_]


class Stream:
    """Random words derived from a key of 32 bytes."""

    def __init__(self, key: bytes) -> None:
        need_cryptography()
        self._key = key
        self._lots = 0
        self._left: Words = np.zeros(0, np.uint64)

    def draw_words(self, count: int) -> Words:
        """Return independent 64-bit words, each only once."""
        if count > len(self._left):
            fresh = np.zeros(max(LOT, count), np.uint64)
            # Each lot has its own key, because `add_streams` always starts at counter
            # 0.
            add_streams(fresh, [(compute_receipt(self._key, "lot", self._lots), 1)])
            self._lots += 1
            self._left = np.concatenate([self._left, fresh])
        words = self._left[:count]
        self._left = self._left[count:]
        return words


def draw_units(stream: Stream, units: int, rate: float) -> Truth:
    """Draw the units that take part, each with probability `rate`.

    The probability is exact to 2^-53 and never above `rate`.

    Returns:
        (units,) booleans.
    """
    return (stream.draw_words(units) >> 11) < int(rate * 2**53)  # [abadi lot]


def clip_to_grid(
    gradient: Tensors, clip: float, grids: Mapping[str, float]
) -> dict[str, Tensor]:
    """Clip a gradient and round it to the grids of its tensors.

    Values are rounded towards zero, which never lengthens a vector, so the norm is also
    at most `clip` on the grid.

    Args:
        gradient: Tensors that are clipped together, as one vector.
        clip: The maximum L2 norm.
        grids: The grid spacing of each tensor.

    Returns:
        Integers by name; empty if a value is not finite, because a refusal would reveal
        that.
    """
    exact = {
        name: value.detach().to_dense().double().cpu()
        for name, value in gradient.items()
    }
    norm = math.sqrt(sum(float(value.square().sum()) for value in exact.values()))
    if not math.isfinite(norm):
        return {}
    factor = min(1.0, clip * MARGIN / norm) if norm else 0.0  # [abadi clip]
    # [abadi clip]
    return {
        name: (value * (factor / grids[name])).long() for name, value in exact.items()
    }


def draw_discrete_gaussian(stream: Stream, count: int, bits: int = BITS) -> Whole:
    """Draw independent discrete Gaussians with s = 2^bits, (count,) (Algorithm 3)."""
    numbers = np.empty(count, np.int64)
    scale = 2**bits
    missing = np.arange(count)  # places without a number so far
    while len(missing):
        value = _draw_laplace(stream, len(missing), bits)
        size = np.abs(value)
        is_near = size < FAR * scale
        away = np.where(is_near, size - scale, 0)  # with t = s, σ²/t is s
        # [canonne alg 3] exp(-(|y| - s)² / 2 s²)
        is_accepted = is_near & _draw_exponential(stream, away * away, 2 * bits + 1)
        numbers[missing[is_accepted]] = value[is_accepted]
        missing = missing[~is_accepted]
    return numbers


def _draw_laplace(stream: Stream, count: int, bits: int) -> Whole:
    """Draw from P(y) ∝ exp(-|y| / s), (count,): Algorithm 2, t a power of two."""
    numbers = np.empty(count, np.int64)
    missing = np.arange(count)  # places without a number so far
    while len(missing):
        # uniform, < s
        words = stream.draw_words(len(missing)) >> np.uint64(64 - bits)
        part = words.astype(np.int64)
        # [canonne alg 2] exp(-u / s)
        has_part = _draw_exponential(stream, part, bits)
        places = missing[has_part]
        part = part[has_part]
        whole = _draw_runs(stream, len(places))
        size = part + (whole << bits)  # [canonne alg 2]
        is_negative = (stream.draw_words(len(places)) >> np.uint64(63)).astype(bool)
        # Reject negative zero, or zero would be drawn twice as often.
        is_accepted = ~(is_negative & (size == 0))  # [canonne alg 2]
        signed = np.where(is_negative, -size, size)
        numbers[places[is_accepted]] = signed[is_accepted]
        is_missing = np.ones(len(missing), bool)
        is_missing[np.flatnonzero(has_part)[is_accepted]] = False
        missing = missing[is_missing]
    return numbers


def _draw_runs(stream: Stream, count: int) -> Whole:
    """Draw how often an event of probability exp(-1) precedes a failure, (count,)."""
    runs = np.zeros(count, np.int64)
    running = np.arange(count)
    while len(running):
        running = running[_draw_fraction(stream, np.ones(len(running), np.int64), 0)]
        runs[running] += 1
    return runs


def _draw_exponential(stream: Stream, above: Whole, bits: int) -> Truth:
    """Draw True with probability exp(-above / 2^bits), for nonnegative integers."""
    whole = above >> bits
    remainder = above & ((1 << bits) - 1)
    is_true = _draw_fraction(stream, remainder, bits)
    running = np.flatnonzero(is_true & (whole > 0))
    units_left = whole[running]
    while len(running):  # one factor exp(-1) for each whole unit
        goes_on = _draw_fraction(stream, np.ones(len(running), np.int64), 0)
        is_true[running[~goes_on]] = False
        running = running[goes_on]
        units_left = units_left[goes_on] - 1
        has_units = units_left > 0
        running = running[has_units]
        units_left = units_left[has_units]
    return is_true


def _draw_fraction(stream: Stream, above: Whole, bits: int) -> Truth:
    """Draw True with probability exp(-γ), where γ = above / 2^bits is at most 1.

    Algorithm 1: k increases as long as an event of probability γ / k occurs. It stops
    at an odd k with probability exp(-γ).
    """
    is_odd = np.ones(len(above), bool)
    running = np.arange(len(above))
    k = 1
    while len(running):
        goes_on = np.ones(len(running), bool)
        if k > 1:
            goes_on = _draw_one_in(stream, k, len(running))
        if bits:  # else γ = 1
            words = stream.draw_words(len(running)) >> np.uint64(64 - bits)
            # [canonne alg 1] a uniform number is below γ, and it is one of k
            goes_on &= words.astype(np.int64) < above[running]
        running = running[goes_on]
        k += 1
        is_odd[running] = k % 2 == 1  # [canonne alg 1]
    return is_odd


def _draw_one_in(stream: Stream, k: int, count: int) -> Truth:
    """Draw True with probability exactly 1 / k, (count,)."""
    # Words above the largest multiple of k would make some remainders more frequent.
    largest = np.uint64(2**64 // k * k - 1)
    words = stream.draw_words(count).copy()
    while len(beyond := np.flatnonzero(words > largest)):
        words[beyond] = stream.draw_words(len(beyond))
    is_true: Truth = words % np.uint64(k) == 0
    return is_true
