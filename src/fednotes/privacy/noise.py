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
        self._key, self._lots = key, 0
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
        found, self._left = self._left[:count], self._left[count:]
        return found


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
    """Return independent discrete Gaussians with s = 2^bits, (count,) (Algorithm 3)."""
    found, scale = np.empty(count, np.int64), 2**bits
    open_ = np.arange(count)
    while len(open_):
        value = _draw_laplace(stream, len(open_), bits)
        size = np.abs(value)
        near = size < FAR * scale
        away = np.where(near, size - scale, 0)  # with t = s, σ²/t is s
        # [canonne alg 3] exp(-(|y| - s)² / 2 s²)
        kept = near & _draw_exponential(stream, away * away, 2 * bits + 1)
        found[open_[kept]] = value[kept]
        open_ = open_[~kept]
    return found


def _draw_laplace(stream: Stream, count: int, bits: int) -> Whole:
    """Draw from P(y) ∝ exp(-|y| / s), (count,): Algorithm 2, t a power of two."""
    found = np.empty(count, np.int64)
    open_ = np.arange(count)
    while len(open_):
        # uniform, < s
        part = (stream.draw_words(len(open_)) >> np.uint64(64 - bits)).astype(np.int64)
        kept = _draw_exponential(stream, part, bits)  # [canonne alg 2] exp(-u / s)
        places, part = open_[kept], part[kept]
        whole = _draw_runs(stream, len(places))
        size = part + (whole << bits)  # [canonne alg 2]
        minus = (stream.draw_words(len(places)) >> np.uint64(63)).astype(bool)
        # Reject negative zero, or zero would be drawn twice as often.
        kept_too = ~(minus & (size == 0))  # [canonne alg 2]
        found[places[kept_too]] = np.where(minus, -size, size)[kept_too]
        again = np.ones(len(open_), bool)
        again[np.flatnonzero(kept)[kept_too]] = False
        open_ = open_[again]
    return found


def _draw_runs(stream: Stream, count: int) -> Whole:
    """Draw how often an event of probability exp(-1) precedes a failure, (count,)."""
    found = np.zeros(count, np.int64)
    going = np.arange(count)
    while len(going):
        going = going[_draw_fraction(stream, np.ones(len(going), np.int64), 0)]
        found[going] += 1
    return found


def _draw_exponential(stream: Stream, above: Whole, bits: int) -> Truth:
    """Return True with probability exp(-above / 2^bits), for nonnegative integers."""
    whole, rest = above >> bits, above & ((1 << bits) - 1)
    held = _draw_fraction(stream, rest, bits)
    going = np.flatnonzero(held & (whole > 0))
    left = whole[going]
    while len(going):  # one factor exp(-1) for each whole unit
        one = _draw_fraction(stream, np.ones(len(going), np.int64), 0)
        held[going[~one]] = False
        going, left = going[one], left[one] - 1
        going, left = going[left > 0], left[left > 0]
    return held


def _draw_fraction(stream: Stream, above: Whole, bits: int) -> Truth:
    """Return True with probability exp(-γ), where γ = above / 2^bits is at most 1.

    Algorithm 1: k increases as long as an event of probability γ / k occurs. It stops
        at an odd k with probability exp(-γ).
    """
    odd = np.ones(len(above), bool)
    going = np.arange(len(above))
    k = 1
    while len(going):
        held = (
            _draw_one_of(stream, k, len(going)) if k > 1 else np.ones(len(going), bool)
        )
        if bits:  # else γ = 1
            below = (stream.draw_words(len(going)) >> np.uint64(64 - bits)).astype(
                np.int64
            )
            # [canonne alg 1] a uniform number is below γ, and it is one of k
            held &= below < above[going]
        going = going[held]
        k += 1
        odd[going] = k % 2 == 1  # [canonne alg 1]
    return odd


def _draw_one_of(stream: Stream, k: int, count: int) -> Truth:
    """Return True with probability exactly 1 / k, (count,)."""
    most = np.uint64(2**64 // k * k - 1)
    words = stream.draw_words(count).copy()
    while len(beyond := np.flatnonzero(words > most)):
        words[beyond] = stream.draw_words(len(beyond))
    held: Truth = words % np.uint64(k) == 0
    return held
