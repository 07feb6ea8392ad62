"""Discrete Gaussian noise, exact, from a stream of secure random bits.

Clément Canonne, Gautam Kamath, Thomas Steinke (2020), "The discrete Gaussian for
differential privacy", Algorithms 1 to 3. P(x) ∝ exp(-x² / 2 s²) on whole numbers. Here
s = 2^26 always, and what noise is added to is laid on a grid that makes it the right
size: then every probability below is a fraction with a power of two below its line (and
k, of Algorithm 1), a comparison of whole numbers decides it, and no rounding of
floating-point numbers speaks of the data (Mironov 2012). All numbers are drawn at once,
and those that are rejected again.

The stream is ChaCha20 (RFC 8439, of `cryptography`, the extra "secure") under a key of
256 bits. NumPy's generators are none for secrets: from some of their numbers the others
follow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fednotes.core.update import Tensors
from fednotes.privacy.secure_sum.crypto import add_streams, need_cryptography, receipt

BITS = 26
SCALE: int = 2**BITS  # s, in units of the grid
# a candidate beyond so many s is rejected; an exact sampler keeps one in exp(480) of
# them
FAR = 32
MARGIN = 1 - 1e-9  # of a clip, for what float64 rounds
LOT = 2**14  # words that are drawn from the stream at a time, at least
Words = NDArray[np.uint64]
Whole = NDArray[np.int64]
Truth = NDArray[np.bool_]


class Stream:
    """Random words under a key of 32 bytes: the same key, the same words."""

    def __init__(self, key: bytes) -> None:
        need_cryptography()
        self._key, self._lots = key, 0
        self._left: Words = np.zeros(0, np.uint64)

    def words(self, count: int) -> Words:
        """So many independent words of 64 bits, none given twice."""
        if count > len(self._left):
            fresh = np.zeros(max(LOT, count), np.uint64)
            # Each lot has a key of its own: `add_streams` begins a stream at its start.
            add_streams(fresh, [(receipt(self._key, "lot", self._lots), 1)])
            self._lots += 1
            self._left = np.concatenate([self._left, fresh])
        found, self._left = self._left[:count], self._left[count:]
        return found


def chosen(stream: Stream, units: int, rate: float) -> Truth:
    """(units,) each with probability `rate`, to 2^-53 and never above it."""
    return (stream.words(units) >> 11) < int(rate * 2**53)  # [abadi lot]


def cut(
    gradient: Tensors, clip: float, grids: Mapping[str, float]
) -> dict[str, Tensor]:
    """A vector of all these tensors, at most `clip` long (L2), as whole numbers of each
    one's grid.

    It is cut towards zero, which lengthens no vector: so the length is at most `clip`
    in whole numbers too. Nothing where it is not finite: a refusal would tell of it.
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


def discrete_gaussian(stream: Stream, count: int, bits: int = BITS) -> Whole:
    """(count,) independent numbers, s = 2^bits, exact. Algorithm 3."""
    found, scale = np.empty(count, np.int64), 2**bits
    open_ = np.arange(count)
    while len(open_):
        value = _laplace(stream, len(open_), bits)
        size = np.abs(value)
        near = size < FAR * scale
        away = np.where(near, size - scale, 0)  # with t = s, σ²/t is s
        # [canonne alg 3] exp(-(|y| - s)² / 2 s²)
        kept = near & _exponential(stream, away * away, 2 * bits + 1)
        found[open_[kept]] = value[kept]
        open_ = open_[~kept]
    return found


def _laplace(stream: Stream, count: int, bits: int) -> Whole:
    """(count,) of P(y) ∝ exp(-|y| / s), Algorithm 2 with a power of two for t."""
    found = np.empty(count, np.int64)
    open_ = np.arange(count)
    while len(open_):
        # uniform, < s
        part = (stream.words(len(open_)) >> np.uint64(64 - bits)).astype(np.int64)
        kept = _exponential(stream, part, bits)  # [canonne alg 2] exp(-u / s)
        places, part = open_[kept], part[kept]
        whole = _runs(stream, len(places))
        size = part + (whole << bits)  # [canonne alg 2]
        minus = (stream.words(len(places)) >> np.uint64(63)).astype(bool)
        kept_too = ~(minus & (size == 0))  # [canonne alg 2] zero has no second sign
        found[places[kept_too]] = np.where(minus, -size, size)[kept_too]
        again = np.ones(len(open_), bool)
        again[np.flatnonzero(kept)[kept_too]] = False
        open_ = open_[again]
    return found


def _runs(stream: Stream, count: int) -> Whole:
    """(count,) how often exp(-1) holds before it fails."""
    found = np.zeros(count, np.int64)
    going = np.arange(count)
    while len(going):
        going = going[_fraction(stream, np.ones(len(going), np.int64), 0)]
        found[going] += 1
    return found


def _exponential(stream: Stream, above: Whole, bits: int) -> Truth:
    """True with probability exp(-above / 2^bits), for whole numbers that are not
    negative."""
    whole, rest = above >> bits, above & ((1 << bits) - 1)
    held = _fraction(stream, rest, bits)
    going = np.flatnonzero(held & (whole > 0))
    left = whole[going]
    while len(going):  # one exp(-1) for each whole one
        one = _fraction(stream, np.ones(len(going), np.int64), 0)
        held[going[~one]] = False
        going, left = going[one], left[one] - 1
        going, left = going[left > 0], left[left > 0]
    return held


def _fraction(stream: Stream, above: Whole, bits: int) -> Truth:
    """True with probability exp(-γ), γ = above / 2^bits at most 1. Algorithm 1: k
    counts up while γ / k holds; it ends at an odd k with that probability."""
    odd = np.ones(len(above), bool)
    going = np.arange(len(above))
    k = 1
    while len(going):
        held = _one_of(stream, k, len(going)) if k > 1 else np.ones(len(going), bool)
        if bits:  # else γ = 1
            below = (stream.words(len(going)) >> np.uint64(64 - bits)).astype(np.int64)
            # [canonne alg 1] a uniform number is below γ, and it is one of k
            held &= below < above[going]
        going = going[held]
        k += 1
        odd[going] = k % 2 == 1  # [canonne alg 1]
    return odd


def _one_of(stream: Stream, k: int, count: int) -> Truth:
    """(count,) True with probability 1 / k, exactly."""
    most = np.uint64(2**64 // k * k - 1)
    words = stream.words(count).copy()
    while len(beyond := np.flatnonzero(words > most)):
        words[beyond] = stream.words(len(beyond))
    held: Truth = words % np.uint64(k) == 0
    return held
