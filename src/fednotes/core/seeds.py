"""Randomness named by what it is for, so that any round replays.

seed_of(7, "dropout", round, site)   the same 63-bit number on every machine
"""

from __future__ import annotations

import hashlib

import numpy as np


def seed_of(seed: int, *names: str | int) -> int:
    """A 63-bit seed derived from the job's seed and the names of its use (SHA-256)."""
    text = "\x1f".join([str(seed), *(f"{type(n).__name__}:{n}" for n in names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def rng_of(seed: int, *names: str | int) -> np.random.Generator:
    """A NumPy generator seeded by `seed_of`."""
    return np.random.default_rng(seed_of(seed, *names))
