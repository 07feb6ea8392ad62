"""A job's guarantee of differential privacy, and the ε that is spent.

The guarantee is (ε, δ)-differential privacy for data sets of one site that differ by
one added or removed unit. In each round, a unit takes part with probability q, all
gradients of a unit together are clipped to the norm C, and their sum leaves the site
with discrete Gaussian noise of σ C (`noise.py`, `training.py`).

Rounds compose by Rényi differential privacy of the Poisson-subsampled Gaussian
(Mironov, Talwar, Zhang 2019, "Rényi differential privacy of the sampled Gaussian
mechanism"), at integer orders only. There the moments are binomial sums of moments, and
those of the discrete Gaussian are no larger than those of the continuous one (Canonne,
Kamath, Steinke 2020). `dp-accounting` (the extra "privacy") converts Rényi to (ε, δ),
also following Canonne et al.
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple

from annotated_types import Ge, Interval

from fednotes.core.errors import ConfigError, needs
from fednotes.core.numbers import NonNegativeInt, PositiveInt
from fednotes.core.settings import checked
from fednotes.privacy.noise import SCALE

ORDERS = (*range(2, 33), 36, 40, 44, 48, 56, 64, 80, 96, 128, 192, 256, 512, 1024)
STEP = 1e-4  # computed noise is rounded up to a multiple, so that all machines agree
LEAST_NOISE = 0.1
MOST_NOISE = 1000.0
# Below about 1e-300, float64 rounds the grid of the noise and the factor of a clipped
# gradient to a few bits, so that a gradient could be longer than the noise allows for.
LEAST_CLIP = 1e-6
COUNTS = "noisy_counts"  # the task that publishes noisy counts
Unit = Literal["patient", "document", "sentence"]


@checked(frozen=True)
class Privacy:
    """Differential privacy of training, and what it guarantees (`docs/privacy.md`).

    Attributes:
        unit: Unit whose presence in the training data is hidden: all notes of a
            "patient", a "document", or a "sentence". A larger unit needs more noise for
            the same ε.
        epsilon: ε after all rounds, from which the noise is computed. A smaller ε
            protects more and costs accuracy. Give either `epsilon` or `noise`.
        noise: Noise multiplier σ: the standard deviation of the noise, divided by
            `clip`. ε is computed from it. Give either `noise` or `epsilon`.
        delta: δ, the probability with which the bound ε may fail. It should be far
            below 1 divided by the number of units at a site.
        clip: C, the maximum L2 norm of one unit's gradient over shared and private
            layers together; larger gradients are scaled down. The noise is proportional
            to it.
        rate: q, the probability with which a unit is drawn in a round. An epoch has 1 /
            q rounds, so a larger q means fewer rounds with more units each.
        where: Where the noise is added. "sum": each site adds a part of it, which
            protects the site as long as the server sees only sums (secure_sum). "site":
            each site adds all of it, and need not trust the server or other sites, at
            the cost of accuracy.
        colluding: With where = "sum": number of sites that may collude. Their noise is
            not counted, because they know it.
        counts: Noise multiplier σ of the counts that all sites together publish once:
            the standard deviation of their noise, divided by `counted`. They count the
            mentions in the validation notes that the last model predicts correctly and
            wrongly. In phenotyping, they count patients by code, concept and label,
            before training. 0 publishes no counts. ε includes them.
        counted: Maximum L2 norm of one unit's counts: the square root of the number of
            different things that are counted for a unit.
        averaged_rounds: Number of rounds at the end of training whose models are
            averaged into the final one. Averaging costs no ε. The mean has less noise
            than the last round's model. 1 takes the last round's model.
    """

    unit: Unit = "patient"
    epsilon: Annotated[float, Ge(0), Interval(le=100)] = 0.0
    noise: Annotated[float, Ge(0), Interval(le=MOST_NOISE)] = 0.0
    delta: Annotated[float, Interval(gt=0, lt=0.1)] = 1e-5
    clip: Annotated[float, Interval(ge=LEAST_CLIP, le=1e6)] = 1.0
    rate: Annotated[float, Interval(ge=1e-6, le=1)] = 0.05
    where: Literal["sum", "site"] = "sum"
    colluding: NonNegativeInt = 1
    counts: Annotated[float, Ge(0), Interval(le=MOST_NOISE)] = 0.0
    counted: Annotated[float, Interval(ge=LEAST_CLIP, le=1e6)] = 20.0
    averaged_rounds: PositiveInt = 1

    @property
    def epoch(self) -> int:
        """The number of rounds in which each unit is expected to take part once."""
        return math.ceil(1 / self.rate)

    def __post_init__(self) -> None:
        """Check the settings against each other.

        Raises:
            ConfigError: Both or neither of `epsilon` and `noise` are given, a noise is
                too small to hide anything, or `counts` does not fit the unit.
        """
        if bool(self.epsilon) == bool(self.noise):
            raise ConfigError(
                "give either epsilon (the guarantee) or noise (the multiplier σ)"
            )
        for name, value in (("noise", self.noise), ("counts", self.counts)):
            if value and value < LEAST_NOISE:
                raise ConfigError(
                    f"{name} = {value}: expected at least {LEAST_NOISE}, because less "
                    "noise hides nothing"
                )
        if self.counts and self.unit == "sentence":
            raise ConfigError(
                f"counts = {self.counts}: counts are of whole notes: set unit = "
                '"document" or "patient", or leave counts out'
            )


class Grids(NamedTuple):
    """The grid spacings on which gradients are integers.

    Attributes:
        shared: That of shared layers, for a site's share of the noise.
        private: That of private layers, for the full noise.
    """

    shared: float
    private: float


@dataclass(frozen=True)
class Promise:
    """A job's privacy guarantee, with every number on which it depends.

    Attributes:
        privacy: The settings.
        noise: σ of the noise in a sum, as a multiple of the clip.
        rounds: The maximum number of rounds that a site answers.
        shares: Number of sites whose noise counts in a sum; 1 if each site adds the
            full noise.
    """

    privacy: Privacy
    noise: float
    rounds: int
    shares: int

    @classmethod
    def of(
        cls, privacy: Privacy, rounds: int, sites: int, min_sites: int = 0
    ) -> Promise:
        """Return the guarantee of a job.

        Args:
            privacy: The settings.
            rounds: The maximum number of rounds.
            sites: Number of sites in the job.
            min_sites: Minimum number of sites in a sum; 0 means all.

        Raises:
            ConfigError: No noise suffices for the guarantee.
            MissingExtra: `dp-accounting` is not installed.
        """
        shares = 1
        if privacy.where == "sum" and sites > 1:
            threshold = max(min_sites or sites, sites // 2 + 1)
            shares = threshold - privacy.colluding  # [kairouz shares]
            # With a smaller threshold, a dishonest server and colluding sites could
            # open smaller sums.
            min_threshold = (sites + privacy.colluding) // 2 + 1
            if threshold < min_threshold:
                raise ConfigError(
                    f"colluding = {privacy.colluding}: a sum may cover only "
                    f"{threshold} of {sites} sites, too few if so many collude: set "
                    f"[federation] min_sites to at least {min_threshold} (of {sites}), "
                    'lower colluding, or set where = "site"'
                )
        noise = privacy.noise
        if not noise:
            noise = find_noise(
                privacy.epsilon,
                privacy.delta,
                privacy.rate,
                rounds,
                privacy.counts,
            )
        return cls(privacy, noise, rounds, shares)

    @property
    def site_noise(self) -> float:
        """σ of one site's noise, as a multiple of the clip."""
        return self.noise / math.sqrt(self.shares)  # [kairouz shares]

    @property
    def grids(self) -> Grids:
        """The grid spacings for a site's share of the noise and for the full noise."""
        return Grids(
            shared=self.site_noise * self.privacy.clip / SCALE,  # [abadi noise]
            private=self.noise * self.privacy.clip / SCALE,  # [abadi noise]
        )

    @property
    def count_grid(self) -> float:
        """The spacing of the grid on which a site's noisy counts are integers."""
        # [abadi counts]
        return (
            self.privacy.counts / math.sqrt(self.shares) * self.privacy.counted / SCALE
        )

    def compute_epsilon(self, rounds: int | None = None) -> float:
        """Return ε after some rounds (by default all), including the counts."""
        privacy = self.privacy
        if rounds is None:
            rounds = self.rounds
        return compute_epsilon(
            self.noise, privacy.delta, privacy.rate, rounds, privacy.counts
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the guarantee for a run's summary, as JSON values."""
        privacy = self.privacy
        return {
            "epsilon": self.compute_epsilon(),
            "delta": privacy.delta,
            "unit": privacy.unit,
            "noise": self.noise,
            "clip": privacy.clip,
            "rate": privacy.rate,
            "rounds": self.rounds,
            "where": privacy.where,
            "shares": self.shares,
            "counts": privacy.counts,
            "counted": privacy.counted,
        }

    def __str__(self) -> str:
        """Return the guarantee in one sentence, with ε rounded up."""
        privacy = self.privacy
        unit = privacy.unit
        adversary = "anybody" if self.shares == 1 else "whoever sees only sums"
        epsilon = math.ceil(100 * self.compute_epsilon() - 1e-9) / 100
        counts = ""
        if privacy.counts:
            counts = (
                f"; counts, once: σ = {privacy.counts:g}, of {privacy.counted:g} a "
                f"{unit}"
            )
        return (
            f"differential privacy for each {unit} of a site, against {adversary}: "
            f"ε = {epsilon:.2f} at δ = {privacy.delta:g} after {self.rounds:,} rounds "
            f"(σ = {self.noise:g}, C = {privacy.clip:g}, q = {privacy.rate:g}{counts})"
        )


@lru_cache(maxsize=256)
def compute_epsilon(
    noise: float, delta: float, rate: float, rounds: int, counts: float = 0.0
) -> float:
    """Return ε of rounds of the Poisson-subsampled Gaussian by Rényi accounting.

    Args:
        noise: The noise multiplier σ.
        delta: δ.
        rate: The probability that a unit takes part in a round.
        rounds: The number of rounds.
        counts: σ of one additional Gaussian mechanism on all units; 0 for none.
    """
    if not rounds:
        return 0.0
    with _importing_accounting() as (events, rdp):
        accountant = rdp.RdpAccountant(list(ORDERS))  # [mironov rdp]
        one_round = events.PoissonSampledDpEvent(rate, events.GaussianDpEvent(noise))
        accountant.compose(one_round, rounds)  # [mironov rdp]
        if counts:
            accountant.compose(events.GaussianDpEvent(counts))  # [mironov rdp]
        return float(accountant.get_epsilon(delta))  # [mironov rdp]


@lru_cache(maxsize=64)
def find_noise(
    epsilon: float, delta: float, rate: float, rounds: int, counts: float = 0.0
) -> float:
    """Return the smallest noise multiplier σ that ensures (ε, δ) over all rounds.

    Args:
        epsilon: ε.
        delta: δ.
        rate: The probability that a unit takes part in a round.
        rounds: The number of rounds.
        counts: σ of one additional Gaussian mechanism on all units; 0 for none.

    Returns:
        A multiple of `STEP`.

    Raises:
        ConfigError: No noise is sufficient.
    """
    # Bisect, in steps: `low` is not enough noise, and `high` is enough.
    low = math.floor(LEAST_NOISE / STEP)
    high = math.ceil(MOST_NOISE / STEP)
    if compute_epsilon(high * STEP, delta, rate, rounds, counts) > epsilon:
        counts_text = f" and counts = {counts:g}" if counts else ""
        raise ConfigError(
            f"epsilon = {epsilon:g}: no noise keeps it at delta = {delta:g} over "
            f"{rounds:,} rounds of rate {rate:g}{counts_text}: choose a larger "
            "epsilon, or train less"
        )
    while low + 1 < high:
        middle = (low + high) // 2
        if compute_epsilon(middle * STEP, delta, rate, rounds, counts) <= epsilon:
            high = middle
        else:
            low = middle
    return high * STEP


@contextmanager
def _importing_accounting() -> Iterator[tuple[Any, Any]]:
    """Yield the modules of `dp-accounting` for events and Rényi accounting.

    Raises:
        MissingExtra: The package is not installed.
    """
    load = importlib.import_module
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with needs("dp-accounting", "privacy"):
            events = load("dp_accounting.dp_event")
            rdp = load("dp_accounting.rdp.rdp_privacy_accountant")
        yield events, rdp
