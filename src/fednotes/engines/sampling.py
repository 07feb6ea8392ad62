"""The sites of a round, where a job draws some of its sites for each round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fednotes.core.seeds import Draws


@dataclass(frozen=True)
class RoundSampling:
    """How the sites of a round are drawn: uniformly, and without replacement.

    The sites of a round depend only on the draws and the round's number, so a resumed
    run has the same ones.

    Attributes:
        sites_per_round: Number of sites that are drawn for a round.
        draws: Source of the draws. In a simulation, they follow from the job's seed.
            Between real sites, they follow from a secret of the server, because
            otherwise each site could compute in which rounds the others take part.
        for_all_sites: The tasks of a round that all sites run; see `MethodSite`.
    """

    sites_per_round: int
    draws: Draws
    for_all_sites: frozenset[str]

    def draw_sites(self, round: int, sites: Sequence[str]) -> tuple[str, ...]:
        """Return the sites of a round, in the fixed order.

        Args:
            round: The round's number.
            sites: All sites, in the fixed order.
        """
        rng = self.draws.rng_of("sites of a round", round)
        places = rng.choice(len(sites), self.sites_per_round, replace=False)
        return tuple(sites[place] for place in sorted(places.tolist()))
