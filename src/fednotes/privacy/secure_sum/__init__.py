"""The secure sum: the server learns Σ over sites, and no site's own numbers.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning",
CCS 2017, for a known list of 3 to 50 sites. Pure protocol: nothing here sends anything.

    site                                server
    keys()                      →       add_keys        public keys of this exchange
    shares(keys)                →       add_shares      sealed shares for each other site
    masked(boxes, update)       →       add_masked      x + self mask + Σ ± pair masks
    confirm(request)            →       add_confirm     only with confirmed=True
    unmask(request)             →       add_unmask      shares: self masks or keys, never both
                                        total()         Σ x of the survivors

In `SiteChain` and `ServerChain`, keys and shares of the next exchange ride on the last
two replies, so that an exchange without faults has two messages a site.

What the paper calls      here
  s_sk, s_pk, c_sk, c_pk    masking and sharing key, fresh for each exchange
  b                         the self mask's seed
  U1, U2, U3, U4            who sent keys, shares (the roster), an update (survivors), shares back
  t                         threshold

docs/privacy.md says against whom it holds and what it does not give. The conditions:

- `threshold` must be over n / 2, and where c sites collude with a server that lies
  should be over (n + c) / 2: a site gives one of two shares for each other site, for
  one list, once, so no site's self mask *and* masking key can both be rebuilt. Receipts
  (HMAC under an X25519 secret) show each pair of sites that they masked for the same
  roster and layout.
- Different lists of survivors to different sites can open a sum of fewer than t sites
  (of at least n(2t - n) / t, if c = 0). `confirmed=True` rules that out, for one small
  message more: sites open nothing unless t of them saw the same list. With t = n there
  is nothing to compare.
- All stands on authentic keys: give each site an `Identity`, whose key the server does
    not hold.
- Who sends wrong shares, receipts or masks can spoil an exchange (it is noticed), but
  not read it. Wrong shares of one or two sites are passed over where enough others
  answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fednotes.core.errors import ConfigError
from fednotes.privacy.secure_sum import crypto

FEWEST_SITES, MOST_SITES = 3, 250


class Parties:
    """Who may be in a secure sum and how many must be: equal at the server and all
    sites.

    sites: their names, in the fixed order. threshold: how many survivors a sum must
    have, over half of the sites; None: just over half. confirmed: sites open nothing
    before `threshold` of them confirmed the same list of survivors; None: wherever a
    sum may leave sites out.

    Raises ConfigError for a list of sites or a threshold that protect nobody,
    MissingExtra without `cryptography`.
    """

    def __init__(
        self,
        sites: Sequence[str],
        threshold: int | None = None,
        confirmed: bool | None = None,
    ) -> None:
        crypto.need_cryptography()
        least = len(sites) // 2 + 1  # that a lying server cannot get around
        threshold = least if threshold is None else threshold
        if len(set(sites)) != len(sites):
            raise ConfigError("secure sum: a site is listed twice")
        if not FEWEST_SITES <= len(sites) <= MOST_SITES:
            raise ConfigError(
                f"secure sum: {len(sites)} sites; it takes {FEWEST_SITES} to {MOST_SITES} "
                "(of two sites, each could take its own part out of the sum)"
            )
        if not least <= threshold <= len(sites):
            raise ConfigError(
                f"secure sum: a threshold of {threshold} of {len(sites)} sites; it must be from "
                f"{least} (over half, or a lying server learns single sites' numbers) to "
                f"{len(sites)}"
            )
        self.sites, self.threshold = tuple(sites), threshold
        self.confirmed = threshold < len(sites) if confirmed is None else confirmed

    def exchange(self, context: bytes) -> bytes:
        """What all messages of an exchange carry; who differs in any of it does not
        meet."""
        terms = (self.threshold, int(self.confirmed), len(self.sites))
        return crypto.digest(context, *terms, *self.sites)

    def in_order(self, sites: Iterable[str]) -> tuple[str, ...]:
        """Some of the sites."""
        wanted = set(sites)
        return tuple(site for site in self.sites if site in wanted)

    def point(self, site: str) -> int:
        """Where the polynomials of secrets are evaluated for a site's share."""
        return self.sites.index(site) + 1
