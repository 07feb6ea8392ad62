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

In `secagg_chain`, keys and shares of the next exchange ride on the last two replies, so that
an exchange without faults has two messages a site.

What the paper calls      here
  s_sk, s_pk, c_sk, c_pk    masking and sharing key, fresh for each exchange
  b                         the self mask's seed
  U1, U2, U3, U4            who sent keys, shares (the roster), an update (survivors), shares back
  t                         threshold

**What holds.** Against a server that follows the protocol and is curious, alone or with up to
t - 1 sites: it learns the sum over the survivors (and what the colluding sites know), and
every message before that is uniform noise to it. A drop-out reveals nothing: the server
rebuilds the pair masks of who dropped out, and self masks stay on. With fewer than t
survivors no site answers, and nothing is revealed. What a recovery opens is one exchange's.

**A server that lies.** Let c sites collude with it. `threshold` must be over n / 2, and
should be over (n + c) / 2. Then no site's self mask *and* masking key can both be rebuilt,
because a site gives one of the two for each other site, for one list, once. A site shows each
other site by a receipt (HMAC under their X25519 secret) which roster and layout it masked for,
and gives nothing for a survivor whose receipt is not its own: without that, a server could
show one site a short roster and strip all its masks. Different lists of survivors to
different sites can open a sum of fewer than t sites (of at least n(2t - n) / t, if c = 0);
`confirmed=True` costs one small message more and rules that out: sites first tell each other
the list, and open nothing unless t of them saw the same. `engines.secure` has it wherever
`needs_confirmation` says so.

All this stands on authentic keys: who can put its own key in a site's place reads what that
site's peers send. So give each site an `Identity`, whose key the server does not hold
(deployed sites have `engines.identity.CertificateIdentity`): keys are then signed, and a site
refuses others. Sites that collude with the server see the sum minus their own part: with
n - 2 others in it nothing can hide two sites' sum, with n - 1 not even the last one's.

**What does not hold.** The sum itself is no secret, and may say much (see docs/privacy.md). A
site that sends wrong numbers within the range is not stopped. A site that sends wrong shares,
receipts or masks can spoil an exchange (it is noticed), but not read it. Wrong shares of one
or two sites are passed over where enough others answer; with t = n none can be spared.
"""

from __future__ import annotations

from fednotes.core.errors import ConfigError
from fednotes.privacy.secure_sum.chain import ServerChain, SiteChain
from fednotes.privacy.secure_sum.fixed_point import Layout, Limits
from fednotes.privacy.secure_sum.masks import Ed25519Identity, Identity, joined
from fednotes.privacy.secure_sum.messages import (
    ConfirmMessage,
    KeysMessage,
    MaskedMessage,
    SharesMessage,
    UnmaskMessage,
    UnmaskRequest,
    from_wire,
    to_wire,
)
from fednotes.privacy.secure_sum.server import SecureServer
from fednotes.privacy.secure_sum.site import SecureSite, default_threshold

__all__ = [
    "ConfirmMessage",
    "Ed25519Identity",
    "Identity",
    "KeysMessage",
    "Layout",
    "Limits",
    "MaskedMessage",
    "SecureServer",
    "SecureSite",
    "ServerChain",
    "SharesMessage",
    "SiteChain",
    "UnmaskMessage",
    "UnmaskRequest",
    "default_threshold",
    "from_wire",
    "joined",
    "least_in_sum",
    "needs_confirmation",
    "to_wire",
]


def needs_confirmation(sites: int, threshold: int) -> bool:
    """Whether `threshold` is the least of a lying server's sums only with `confirmed=True`.

    With t = n sites take one list, that of all of them, so there is nothing to compare. With
    any smaller t two sites may be shown two lists: see `least_in_sum`.
    """
    return threshold < sites


def least_in_sum(sites: int, threshold: int, *, confirmed: bool) -> int:
    """The fewest honest sites whose sum a lying server can open, if no site colludes with it.

    Each of n sites names at least t survivors, once. For a sum of k sites alone, each of the
    other n - k must be called dropped by t sites, so named by n - t at most; n sites name
    n(t - k) of these at least. Hence n(t - k) ≤ (n - k)(n - t), that is k ≥ n(2t - n) / t.
    """
    if not sites < 2 * threshold <= 2 * sites:
        raise ConfigError("the threshold must be over half of the sites")
    return threshold if confirmed else -(-sites * (2 * threshold - sites) // threshold)
