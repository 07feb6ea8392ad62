"""Random numbers that follow from a seed and the name of their use.

    seed_of(7, "dropout", round, site)   # the same 63-bit number on every machine

Every round can therefore be repeated. What must be equal at all sites (initial values,
splits of a simulation's notes) follows from the job's seed. What shapes the update of a
single site follows from that site's `Draws`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np


def seed_of(seed: int, *names: str | int) -> int:
    """Return a 63-bit seed, derived by SHA-256 from a seed and the names of its use."""
    typed_names = [f"{type(name).__name__}:{name}" for name in names]
    text = "\x1f".join([str(seed), *typed_names])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def rng_of(seed: int, *names: str | int) -> np.random.Generator:
    """Return a NumPy generator that is seeded by `seed_of`."""
    return np.random.default_rng(seed_of(seed, *names))


@dataclass(frozen=True)
class Draws:
    """The source of all random draws that shape one site's updates.

    These are batches, dropout, masks and packing. In a simulation they follow from the
    job's seed, so that it can be repeated. Between real sites they follow from a secret
    of the site: otherwise two jobs with the same seed would draw the same batches, and
    the difference of their sums would be the update of a site that takes part in only
    one of them.

    Attributes:
        seed: The seed. It is never shown, because it lets others repeat the draws.
        is_secret: Whether only this site knows the seed.
    """

    seed: int = field(repr=False)
    is_secret: bool = False

    @classmethod
    def of_secret(cls, secret: bytes) -> Draws:
        """Return the draws that follow from a secret of the site."""
        return cls(int.from_bytes(secret, "big"), is_secret=True)

    def seed_of(self, *names: str | int) -> int:
        """Return a 63-bit seed for one use, as `torch.manual_seed` takes it."""
        return seed_of(self.seed, *names)

    def rng_of(self, *names: str | int) -> np.random.Generator:
        """Return a NumPy generator for one use."""
        return rng_of(self.seed, *names)
