"""What a server makes of the sites' updates: one update of them all, and a step of its
own.

Rules that a few hostile sites cannot move far. With the sites' changes x_1 … x_n of
what they were sent, f of them hostile, a rule gives each a factor, or in every
coordinate each of the n sorted numbers one; the update is the sum of the products:

    "norm-bound"    min(1, B / |x_k|) / n   (Sun et al. 2019, "Can you really backdoor federated
                    learning?"); B is the median of all |x_k| where none is given
    "median"        the middle of the sorted numbers   (Yin et al. 2018, "Byzantine-robust
    "trimmed-mean"  all but the f least and f greatest   distributed learning", Definitions 1, 2)
    "krum"          the x_k with the least Σ |x_k − x_j|² over its n − f − 2 nearest
    "multi-krum"    the mean of the n − f best of these   (Blanchard et al. 2017, section 4)
    "reference"     TS_k |x_0| / |x_k| / Σ TS, with TS_k = max(0, cos(x_k, x_0)): x_0 is the change
                    of a site that is trusted, and is not added itself   (Cao et al. 2021, FLTrust)

All count each site once: how many notes a site has is its own word, and so no rule's.

A server's step takes the mean of the sites' parameters, or what a rule gives in its
place:

    "average"    w + η Δ, with Δ = mean − w; FedAvg where η is 1 (McMahan et al. 2017)
    "nesterov"   v ← μ v + Δ;  w + η (Δ + μ v)   (Douillard et al. 2023, DiLoCo's outer step)
    "adam"       Reddi et al. 2021, "Adaptive federated optimization", Algorithm 2
    "yogi"       the same, with Yogi's second moment

Each takes Δ as the negative gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from fednotes.core.errors import ConfigError, TrainingError, nearest
from fednotes.core.federation import Federation, Option
from fednotes.core.settings import checked
from fednotes.core.tensors import shapes_of
from fednotes.core.update import Tensors, Total, Update
from fednotes.training.sites import Number, Size

Kind = Literal["average", "nesterov", "adam", "yogi"]
Rule = Literal[
    "mean", "norm-bound", "median", "trimmed-mean", "krum", "multi-krum", "reference"
]

TINY = 1e-100  # in place of a length of zero


@checked(frozen=True)
class Aggregation:
    """How one update is made of the sites' updates.

    Attributes:
        aggregation: "mean" is the mean weighted by the sites' sizes, a sum that hides
            the single updates. Every other rule looks at each site's update and counts
            each site once (`server_steps.py`; docs/privacy.md, "Poisoning"): it needs
            secure_sum = false, and `[policy] individual_updates = true` at each site.
        hostile: f, the number of hostile sites that "trimmed-mean", "krum" and
            "multi-krum" assume.
        norm_bound: B of "norm-bound"; 0 takes the median length of a round's changes.
        reference: The site of "reference": other updates are compared with its update,
            which is not added. It should hold public or generated notes, as the
            server's own staff may run it.
        sites: Number of sites; 0 if it is not known. A job fills it in.
    """

    aggregation: Rule = "mean"
    hostile: Number = 1
    norm_bound: Size = 0.0
    reference: str = ""
    sites: int = 0


C = TypeVar("C", bound=Aggregation)


def by_each(config: Aggregation) -> bool:
    """Whether the server looks at each site's update."""
    return config.aggregation != "mean"


def for_names(config: C, sites: Sequence[str], **found: Any) -> C:
    """The settings for these sites.

    Raises ConfigError where the rule cannot be had of them.
    """
    if config.aggregation == "reference" and config.reference not in sites:
        raise ConfigError(
            f"reference = {config.reference!r}: a site of the job; "
            f"{nearest(config.reference, sites)}"
        )
    if len(sites) < (least := least_sites(config)):
        raise ConfigError(f"{_least(config, least)}, the job has {len(sites)}")
    return replace(config, sites=len(sites), **found)


def least_sites(config: Aggregation) -> int:
    """The fewest sites that the rule can be computed of."""
    twice = 2 * config.hostile
    least = {
        "median": 3,
        "trimmed-mean": twice + 1,
        "krum": twice + 3,
        "multi-krum": twice + 3,
    }
    return least.get(config.aggregation, 2 if config.aggregation == "reference" else 1)


def _least(config: Aggregation, least: int) -> str:
    of = (
        ""
        if config.aggregation in ("median", "reference")
        else f", hostile = {config.hostile}"
    )
    return f'aggregation = "{config.aggregation}"{of}: takes {least} sites'


def gathered(
    federation: Federation,
    config: Aggregation,
    task: str,
    tensors: Tensors,
    start: Tensors,
    **options: Option,
) -> Total:
    """The sum of what sites return; by a rule, one whose mean is what the rule makes of
    them.

    start: what they were sent, as far as they return it changed. Whole numbers are
    added by any rule. Raises TrainingError where too few sites answer for the rule, or
    the reference does not.
    """
    if not by_each(config):
        return federation.sum(task, tensors, **options)
    updates = federation.each(task, tensors, **options)
    total = Total.of(updates.values())  # which compares names and shapes
    if start:
        total.require(shapes_of(start))
    trained = {site: update for site, update in updates.items() if update.weight > 0}
    if len(trained) < (least := least_sites(config)):
        raise TrainingError(
            f"{_least(config, least)}, {len(trained)} have trained in this round"
        )
    if config.aggregation == "reference" and config.reference not in trained:
        raise TrainingError(
            f"reference = {config.reference!r}: this site did not train in this round: resume when "
            "it is there"
        )
    made = {
        name: value * total.weight
        for name, value in _made(config, trained, start).items()
    }
    return replace(total, tensors={**total.tensors, **made}, included=tuple(updates))


def _made(
    config: Aggregation, updates: Mapping[str, Update], start: Tensors
) -> dict[str, Tensor]:
    """Start plus the changes by their factors, in float64."""
    sites, (first, *_) = len(updates), updates.values()
    names = [name for name, value in first.tensors.items() if value.is_floating_point()]

    def changes(name: str) -> Tensor:
        """(sites, numbers)"""
        own = torch.stack(
            [each.tensors[name].double().flatten() for each in updates.values()]
        )
        return own - start[name].double().flatten() if name in start else own

    if ranked := config.aggregation in ("median", "trimmed-mean"):
        cut = (sites - 1) // 2 if config.aggregation == "median" else config.hostile
        factors = middle(sites, cut)
    else:
        products = torch.zeros(sites, sites, dtype=torch.float64)
        for name in names:
            products += (own := changes(name)) @ own.T
        factors = {
            "norm-bound": lambda: bounded(products, config.norm_bound),
            "krum": lambda: nearest_others(products, config.hostile, 1),
            "multi-krum": lambda: nearest_others(
                products, config.hostile, sites - config.hostile
            ),
            "reference": lambda: trusted(products, [*updates].index(config.reference)),
        }[config.aggregation]()
    made = {}
    for name in names:
        own = changes(name)
        change = factors @ (own.sort(0).values if ranked else own)
        made[name] = change.reshape(first.tensors[name].shape)
        if name in start:
            made[name] += start[name].double()
    return made


def middle(sites: int, cut: int) -> Tensor:
    """(sites,) factors of sorted numbers: their mean without the `cut` least and
    greatest. Where all but one or two are cut it is the median."""
    factors = torch.zeros(sites, dtype=torch.float64)
    factors[cut : sites - cut] = 1 / (sites - 2 * cut)  # [robust trimmed]
    return factors


def bounded(products: Tensor, bound: float = 0.0) -> Tensor:
    """(sites,) factors that cut each change to a length. products: (sites, sites) of
    changes."""
    lengths = _lengths(products)
    most = bound or float(
        middle(len(lengths), (len(lengths) - 1) // 2) @ lengths.sort().values
    )
    return (most / lengths).clamp_max(1.0) / len(lengths)  # [robust norm]


def nearest_others(products: Tensor, hostile: int, chosen: int) -> Tensor:
    """(sites,) factors of the `chosen` changes that are nearest to n − f − 2 others."""
    squares, sites = products.diagonal(), len(products)
    distances = squares[:, None] + squares - 2 * products  # [robust krum]
    distances.fill_diagonal_(torch.inf)
    closest, _ = distances.sort(1)
    few = sites - hostile - 2  # [robust krum]
    order = closest[:, :few].sum(1).argsort(stable=True)
    factors = torch.zeros(sites, dtype=torch.float64)
    factors[order[:chosen]] = 1 / chosen  # [robust krum]
    return factors


def trusted(products: Tensor, reference: int) -> Tensor:
    """(sites,) factors by the angle to one change, whose length all get; zeros if none
    is near."""
    lengths = _lengths(products)
    scores = (products[reference] / lengths).clamp_min(0.0)  # [robust trust]
    scores[reference] = 0.0  # [robust trust]
    scores /= scores.sum().clamp_min(TINY)  # [robust trust]
    return scores * lengths[reference] / lengths  # [robust trust]


def _lengths(products: Tensor) -> Tensor:
    return products.diagonal().sqrt().clamp_min(TINY)


class Average:
    """w + η Δ. moments: by name, what the next step needs of earlier ones; none here."""

    def __init__(self, rate: float = 1.0) -> None:
        self.rate = rate
        self.moments: dict[str, Tensor] = {}

    def __call__(
        self, weights: Mapping[str, Tensor], mean: Tensors
    ) -> dict[str, Tensor]:
        """The parameters that follow `weights`, from the mean of what sites made of
        them."""
        return {
            name: self._moved(name, weight, mean[name])
            for name, weight in weights.items()
        }

    def _moved(self, name: str, weight: Tensor, mean: Tensor) -> Tensor:
        return mean if self.rate == 1 else weight + self.rate * (mean - weight)

    def _moment(self, name: str, start: Tensor) -> Tensor:
        return self.moments.get(name, start)


class Nesterov(Average):
    """Momentum that looks ahead. momentum: μ, of which 0 is the average."""

    def __init__(self, rate: float, momentum: float) -> None:
        super().__init__(rate)
        self._momentum = momentum

    def _moved(self, name: str, weight: Tensor, mean: Tensor) -> Tensor:
        change, key = mean - weight, f"velocity.{name}"
        velocity = self._momentum * self._moment(key, torch.zeros_like(weight)) + change
        self.moments[key] = velocity
        return weight + self.rate * (change + self._momentum * velocity)


class Adaptive(Average):
    """FedAdam and FedYogi. betas: β1, β2. adaptivity: τ, whose square second moments
    start at."""

    def __init__(
        self,
        rate: float,
        betas: tuple[float, ...],
        adaptivity: float,
        yogi: bool = False,
    ) -> None:
        super().__init__(rate)
        self._betas, self._adaptivity, self._yogi = betas, adaptivity, yogi

    def _moved(self, name: str, weight: Tensor, mean: Tensor) -> Tensor:
        (fast, slow), change = self._betas, mean - weight  # Δ_t
        zero, square = torch.zeros_like(weight), change.square()
        first = fast * self._moment(f"first.{name}", zero) + (1 - fast) * change
        second = self._moment(f"second.{name}", zero + self._adaptivity**2)
        if self._yogi:
            second = second - (1 - slow) * square * (second - square).sign()
        else:
            second = slow * second + (1 - slow) * square
        self.moments |= {f"first.{name}": first, f"second.{name}": second}
        return weight + self.rate * (first / (second.sqrt() + self._adaptivity))


def server_step(
    kind: Kind,
    rate: float,
    *,
    momentum: float,
    betas: tuple[float, ...],
    adaptivity: float,
) -> Average:
    """A server's step by the settings of `Averaging`. rate: 0 is 1, of adam and yogi
    1e-3."""
    makes: dict[Kind, Callable[[], Average]] = {
        "average": lambda: Average(rate or 1.0),
        "nesterov": lambda: Nesterov(rate or 1.0, momentum),
        "adam": lambda: Adaptive(rate or 1e-3, betas, adaptivity),
        "yogi": lambda: Adaptive(rate or 1e-3, betas, adaptivity, yogi=True),
    }
    return makes[kind]()
