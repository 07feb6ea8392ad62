"""Random numbers derived from a seed and the names of their use.

    seed_of(7, "dropout", round, site)   # the same 63-bit number on every machine

Every round is therefore repeatable. Values that must be equal at all sites (initial
values, splits of a simulation's notes) are derived from the job's seed. Values that
shape a single site's update are derived from that site's `Draws`.
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
    """Return a NumPy generator seeded by `seed_of`."""
    return np.random.default_rng(seed_of(seed, *names))


@dataclass(frozen=True)
class Draws:
    """The source of all randomness in one site's updates.

    It covers batches, dropout, masks and packing. In a simulation, draws are derived
    from the job's seed, so that the simulation is repeatable. Between real sites, they
    are derived from a secret of the site: otherwise two jobs with the same seed would
    draw the same batches, and the difference between their sums would be the update of
    a site that takes part in only one of them.

    Attributes:
        seed: The seed. It is never shown, because it lets others repeat the draws.
        is_secret: Whether only this site knows the seed.
    """

    seed: int = field(repr=False)
    is_secret: bool = False

    @classmethod
    def of_secret(cls, secret: bytes) -> Draws:
        """Return the draws derived from a secret of the site."""
        return cls(int.from_bytes(secret, "big"), is_secret=True)

    def seed_of(self, *names: str | int) -> int:
        """Return a 63-bit seed for one use, suitable for `torch.manual_seed`."""
        return seed_of(self.seed, *names)

    def rng_of(self, *names: str | int) -> np.random.Generator:
        """Return a NumPy generator for one use."""
        return rng_of(self.seed, *names)
