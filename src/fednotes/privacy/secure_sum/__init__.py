"""The secure sum: the server learns the sum over sites, but no site's values.

The protocol is that of Bonawitz et al., "Practical Secure Aggregation for
Privacy-Preserving Machine Learning", CCS 2017, for a known list of 3 to 250 sites.
This package does not send messages.

    site                                server
    keys()                      →       add_keys        public keys of this exchange
    shares(keys)                →       add_shares      sealed shares for the others
    masked(boxes, update)       →       add_masked      x + self mask + Σ ± pair masks
    confirm(request)            →       add_confirm     only with confirmed=True
    unmask(request)             →       add_unmask      shares of a mask or a key
                                        total()         Σ x of the survivors

In `SiteChain` and `ServerChain`, the last two replies also carry the keys and shares of
the next exchange. An exchange without faults then takes only two messages to each site.

Symbols of the paper:

    s_sk, s_pk, c_sk, c_pk    masking key and sharing key, new for each exchange
    b                         seed of the self mask
    U1                        sites that sent keys
    U2                        sites that sent shares: the roster
    U3                        sites that sent an update: the survivors
    U4                        sites that returned shares
    t                         threshold

docs/privacy.md describes against whom the protocol protects and its limits. Its
conditions:

- `threshold` must be over n / 2. If c sites collude with a dishonest server, it should
  be over (n + c) / 2. A site reveals one of two shares for each other site, for only
  one list, so nobody can rebuild both the self mask *and* the masking key of a site.
  Receipts (HMAC under an X25519 secret) prove to each pair of sites that they masked
  for the same roster and layout.
- A server that sends different lists of survivors to different sites can open a sum of
  fewer than t sites (of at least n(2t - n) / t, if c = 0). `confirmed=True` prevents
  this with one additional small message: sites open nothing unless t of them received
  the same list. With t = n there is nothing to compare.
- The keys must be authentic: give each site an `Identity` whose key the server does not
  hold.
- A site that sends wrong shares, receipts or masks can make an exchange fail, which is
detected, but cannot read it. Wrong shares of one or two sites are left out if enough
others answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fednotes.core.errors import ConfigError
from fednotes.privacy.secure_sum import crypto

FEWEST_SITES = 3
MOST_SITES = 250


class Parties:
    """The sites of a secure sum, and how many of them must take part.

    The values must be equal at the server and at all sites.

    Args:
        sites: The sites' names, in the fixed order.
        threshold: Minimum number of survivors in a sum, more than half of the sites; by
            default just over half.
        confirmed: Whether sites open nothing until `threshold` of them have confirmed
            the same list of survivors; by default only if a sum may leave sites out.

    Raises:
        ConfigError: The list of sites or the threshold would not protect anyone.
        MissingExtra: `cryptography` is not installed.
    """

    def __init__(
        self,
        sites: Sequence[str],
        threshold: int | None = None,
        confirmed: bool | None = None,  # noqa: FBT001 - as in job files
    ) -> None:
        crypto.need_cryptography()
        least = len(sites) // 2 + 1  # with fewer, a dishonest server could learn parts
        threshold = least if threshold is None else threshold
        if len(set(sites)) != len(sites):
            raise ConfigError(
                "secure sum: the list of sites contains a site twice: list each site "
                "once"
            )
        if not FEWEST_SITES <= len(sites) <= MOST_SITES:
            raise ConfigError(
                f"secure sum: it needs {FEWEST_SITES} to {MOST_SITES} sites, not "
                f"{len(sites)} (with two sites, each could subtract its own part from "
                "the sum)"
            )
        if not least <= threshold <= len(sites):
            raise ConfigError(
                f"secure sum: a threshold of {threshold} of {len(sites)} sites; it "
                f"must be from {least} (over half, otherwise a dishonest server can "
                f"learn single sites' values) to {len(sites)}"
            )
        self.sites = tuple(sites)
        self.threshold = threshold
        self.confirmed = threshold < len(sites) if confirmed is None else confirmed

    def compute_exchange_digest(self, context: bytes) -> bytes:
        """Return the digest that all messages of an exchange contain.

        Parties whose context, sites or threshold differ have different digests.
        """
        terms = (self.threshold, int(self.confirmed), len(self.sites))
        return crypto.hash_parts(context, *terms, *self.sites)

    def sort_sites(self, sites: Iterable[str]) -> tuple[str, ...]:
        """Return some of the sites in the fixed order."""
        wanted = set(sites)
        return tuple(site for site in self.sites if site in wanted)

    def find_point(self, site: str) -> int:
        """Return the point at which polynomials are evaluated for a site's share."""
        return self.sites.index(site) + 1
