"""Randomness named by what it is for, so that any round replays.

seed_of(7, "dropout", round, site)   the same 63-bit number on every machine

What all sites must have alike (initial values, splits of a simulation's notes) follows
from the job's seed. What shapes an update of one site alone follows from that site's
`Draws`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np


def seed_of(seed: int, *names: str | int) -> int:
    """A 63-bit seed derived from the job's seed and the names of its use (SHA-256)."""
    text = "\x1f".join([str(seed), *(f"{type(n).__name__}:{n}" for n in names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def rng_of(seed: int, *names: str | int) -> np.random.Generator:
    """A NumPy generator seeded by `seed_of`."""
    return np.random.default_rng(seed_of(seed, *names))


@dataclass(frozen=True)
class Draws:
    """The source of all draws that shape what one site sends: batches, dropout, masks,
    packing.

    A simulation makes it of the job's seed, so that it can be repeated. Between real
    sites it is made of a secret of the site. Two jobs with the same seed would
    otherwise draw the same batches at the same sites, and the difference of their sums
    would be the update of the one site that is in one job alone.

    seed: never shown, for whoever knows it can repeat the draws. is_secret: whether
    nobody else knows it.
    """

    seed: int = field(repr=False)
    is_secret: bool = False

    @classmethod
    def of_secret(cls, secret: bytes) -> Draws:
        """Return the draws that follow from a secret of the site."""
        return cls(int.from_bytes(secret, "big"), is_secret=True)

    def seed_of(self, *names: str | int) -> int:
        """Return a 63-bit seed for the use of these names, such as `torch.manual_seed`
        takes."""
        return seed_of(self.seed, *names)

    def rng_of(self, *names: str | int) -> np.random.Generator:
        """Return a NumPy generator for the use of these names."""
        return rng_of(self.seed, *names)
