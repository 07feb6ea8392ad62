"""Aggregation of the sites' updates, and the server's step.

The robust rules of aggregation limit the influence of a few hostile sites. x_1 … x_n
are the sites' changes of the parameters that they received, and f of them are hostile.
A rule assigns a factor to each change, or to each of the n sorted numbers in every
coordinate; the update is the sum of the products.

"norm-bound": min(1, B / |x_k|) / n (Sun et al. 2019, "Can you really backdoor federated
learning?"). B defaults to the median of all |x_k|.

"median": the middle of the sorted numbers. "trimmed-mean": the mean of all but the f
smallest and f largest (Yin et al. 2018, "Byzantine-robust distributed learning",
Definitions 1 and 2).

"krum": the x_k with the smallest Σ |x_k − x_j|² over its n − f − 2 nearest.
"multi-krum": the mean of the n − f best of these (Blanchard et al. 2017, section 4).

"reference": TS_k |x_0| / |x_k| / Σ TS, with TS_k = max(0, cos(x_k, x_0)). x_0 is the
change of a trusted site and is not added itself (Cao et al. 2021, FLTrust).

All rules count each site once. No rule depends on a site's number of notes, because the
site could misreport it.

A server's step takes the mean of the sites' parameters, or a rule's result in its
place:

    "average"    w + η Δ, with Δ = mean − w; FedAvg where η is 1 (McMahan et al. 2017)
    "nesterov"   v ← μ v + Δ;  w + η (Δ + μ v)  (Douillard et al. 2023, DiLoCo)
    "adam"       Reddi et al. 2021, "Adaptive federated optimization", Algorithm 2
    "yogi"       the same, with Yogi's second moment

Each takes Δ as the negative gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from fednotes.core.errors import ConfigError, TrainingError, suggest_name
from fednotes.core.federation import Federation, Option
from fednotes.core.numbers import NonNegativeFloat, NonNegativeInt
from fednotes.core.settings import FilledIn, checked
from fednotes.core.tensors import list_shapes
from fednotes.core.update import Tensors, Total, Update
from fednotes.training.site_sampling import SiteSampling

Kind = Literal["average", "nesterov", "adam", "yogi"]
Rule = Literal[
    "mean", "norm-bound", "median", "trimmed-mean", "krum", "multi-krum", "reference"
]

TINY = 1e-100  # replaces a length of zero


@checked(frozen=True)
class Aggregation(SiteSampling):
    """How the sites' updates are combined into one.

    Attributes:
        aggregation: Rule that combines the sites' updates. "mean" is the mean weighted
            by the sites' sizes; the server needs only a sum, which hides single
            updates. Every other rule inspects each site's update, counts each site
            once, and limits the influence of hostile sites (`training/server_steps.py`;
            docs/privacy.md, "Poisoning"): it needs secure_sum = false, and `[policy]
            individual_updates = true` at each site.
        hostile: f, the number of hostile sites to tolerate with aggregation =
            "trimmed-mean", "krum" or "multi-krum".
        norm_bound: B, the maximum L2 norm of a site's change with aggregation =
            "norm-bound"; 0 uses the median norm of a round's changes.
        reference: With aggregation = "reference": the site to whose update the others
            are compared. Its own update is not added. It should hold public or
            generated notes, because the server's staff may run it.
        sites: Number of sites; 0 if it is not known. A job fills it in.
    """

    aggregation: Rule = "mean"
    hostile: NonNegativeInt = 1
    norm_bound: NonNegativeFloat = 0.0
    reference: str = ""
    sites: FilledIn[int] = 0


C = TypeVar("C", bound=Aggregation)


def needs_each_update(config: Aggregation) -> bool:
    """Return whether the server looks at each site's update."""
    return config.aggregation != "mean"


def fill_in_sites(config: C, sites: Sequence[str], **values: Any) -> C:
    """Return the settings with the number of these sites.

    Args:
        config: The settings.
        sites: The sites' names.
        **values: Further values to set.

    Raises:
        ConfigError: These sites, or those of a round, are too few for the rule, or lack
            its reference.
    """
    drawn = config.sites_per_round
    if config.aggregation == "reference" and drawn is not None:
        raise ConfigError(
            f'aggregation = "reference" needs the site {config.reference!r} in each '
            f"round, but sites_per_round = {drawn} draws the sites: leave "
            "sites_per_round out, or choose another rule"
        )
    if config.aggregation == "reference" and config.reference not in sites:
        raise ConfigError(
            f"reference = {config.reference!r}: expected a site of the job: "
            f"{suggest_name(config.reference, sites)}"
        )
    least = count_least_sites(config)
    if drawn is not None and drawn < least:
        raise ConfigError(
            f"{_describe_least(config, least)} in each round, but sites_per_round = "
            f"{drawn}: raise it, or leave it out"
        )
    if len(sites) < least:
        raise ConfigError(
            f"{_describe_least(config, least)}, but the job has only {len(sites)}"
        )
    return replace(config, sites=len(sites), **values)


def count_least_sites(config: Aggregation) -> int:
    """Return the minimum number of sites for the rule."""
    least: dict[Rule, int] = {
        "mean": 1,
        "norm-bound": 1,
        "median": 3,
        "trimmed-mean": 2 * config.hostile + 1,
        "krum": 2 * config.hostile + 3,
        "multi-krum": 2 * config.hostile + 3,
        "reference": 2,
    }
    return least[config.aggregation]


def _describe_least(config: Aggregation, least: int) -> str:
    """Describe how many sites the rule needs, and the settings that require them."""
    settings = f'aggregation = "{config.aggregation}"'
    if config.aggregation not in ("median", "reference"):
        settings += f", hostile = {config.hostile}"
    return f"{settings}: needs {least} sites"


def sum_or_combine(
    federation: Federation,
    config: Aggregation,
    task: str,
    tensors: Tensors,
    start: Tensors,
    **options: Option,
) -> Total:
    """Run a task at the sites, and combine their updates by the aggregation rule.

    Integer tensors are summed under every rule.

    Args:
        federation: The sites.
        config: The rule.
        task: The task that sites run.
        tensors: The tensors to send to the sites.
        start: Those sent tensors that sites return changed.
        **options: Options of the task.

    Returns:
        The sum of the updates with "mean"; with any other rule, a total whose mean is
        the rule's result.

    Raises:
        TrainingError: Too few sites for the rule have trained, or the reference has
            not.
    """
    if not needs_each_update(config):
        return federation.sum(task, tensors, **options)

    updates = federation.each(task, tensors, **options)
    total = Total.of(updates.values())  # this compares names and shapes
    if start:
        total.require(list_shapes(start))
    trained = {site: update for site, update in updates.items() if update.weight > 0}
    least = count_least_sites(config)
    if len(trained) < least:
        raise TrainingError(
            f"{_describe_least(config, least)}, and {len(trained)} have trained in "
            "this round"
        )
    if config.aggregation == "reference" and config.reference not in trained:
        raise TrainingError(
            f"reference = {config.reference!r}: this site did not train in this round: "
            "resume when it is there"
        )
    combined = {
        name: value * total.weight
        for name, value in _combine(config, trained, start).items()
    }
    tensors = {**total.tensors, **combined}
    return replace(total, tensors=tensors, included=tuple(updates))


def _combine(
    config: Aggregation, updates: Mapping[str, Update], start: Tensors
) -> dict[str, Tensor]:
    """Return the start plus the combined changes of the sites, in float64.

    A robust rule gives factors, by which the changes are multiplied and summed. The
    median and the trimmed mean sort each coordinate by itself. The other rules have one
    factor for each site.
    """
    first = next(iter(updates.values()))
    names = [name for name, value in first.tensors.items() if value.is_floating_point()]
    needs_sorting = config.aggregation in ("median", "trimmed-mean")
    if needs_sorting:
        factors = _weigh_sorted_numbers(config, len(updates))
    else:
        # One tensor after another: all sites' changes take much memory together.
        changes = (_stack_changes(name, updates.values(), start) for name in names)
        factors = _weigh_sites(config, [*updates], changes)

    combined = {}
    for name in names:
        change = _stack_changes(name, updates.values(), start)
        ordered = change.sort(0).values if needs_sorting else change
        combined[name] = (factors @ ordered).reshape(first.tensors[name].shape)
        if name in start:
            combined[name] += start[name].double()
    return combined


def _stack_changes(name: str, updates: Iterable[Update], start: Tensors) -> Tensor:
    """Return the sites' changes of a tensor, (sites, numbers)."""
    values = torch.stack([each.tensors[name].double().flatten() for each in updates])
    if name not in start:
        return values
    return values - start[name].double().flatten()


def _weigh_sorted_numbers(config: Aggregation, sites: int) -> Tensor:
    """Return the rule's factors of the sites' numbers in ascending order, (sites,)."""
    cut = config.hostile
    if config.aggregation == "median":
        cut = (sites - 1) // 2
    return weigh_middle(sites, cut)


def _weigh_sites(
    config: Aggregation, names: list[str], changes: Iterable[Tensor]
) -> Tensor:
    """Return a rule's factor for each site's change, (sites,).

    A rule that weighs each change as a whole needs only the inner products of the
    changes. These are summed over the tensors, so that only one tensor's changes are in
    memory at a time.

    Args:
        config: The rule, which is neither "median" nor "trimmed-mean".
        names: The sites' names.
        changes: For each tensor, the sites' changes of it, (sites, numbers).
    """
    sites = len(names)
    products = torch.zeros(sites, sites, dtype=torch.float64)
    for change in changes:
        products += change @ change.T
    if config.aggregation == "norm-bound":
        return weigh_by_norm_bound(products, config.norm_bound)
    if config.aggregation == "krum":
        return weigh_nearest(products, config.hostile, 1)
    if config.aggregation == "multi-krum":
        return weigh_nearest(products, config.hostile, sites - config.hostile)
    return weigh_by_reference(products, names.index(config.reference))


def weigh_middle(sites: int, cut: int) -> Tensor:
    """Return the factors of sorted numbers for a trimmed mean, (sites,).

    If all but one or two numbers are cut, it is the median.

    Args:
        sites: The number of numbers.
        cut: How many of the smallest and of the largest numbers are dropped.
    """
    factors = torch.zeros(sites, dtype=torch.float64)
    factors[cut : sites - cut] = 1 / (sites - 2 * cut)  # [robust trimmed]
    return factors


def weigh_by_norm_bound(products: Tensor, bound: float = 0.0) -> Tensor:
    """Return the factors that limit each change to a length, (sites,).

    Args:
        products: Inner products of the changes, (sites, sites).
        bound: The length; 0 takes the median length.
    """
    lengths = _compute_lengths(products)
    sites = len(lengths)
    if not bound:
        bound = float(weigh_middle(sites, (sites - 1) // 2) @ lengths.sort().values)
    return (bound / lengths).clamp_max(1.0) / sites  # [robust norm]


def weigh_nearest(products: Tensor, hostile: int, num_chosen: int) -> Tensor:
    """Return the factors of the changes closest to n − f − 2 others, (sites,).

    Args:
        products: Inner products of the changes, (sites, sites).
        hostile: f, the assumed number of hostile sites.
        num_chosen: Number of changes to average.
    """
    squares = products.diagonal()
    sites = len(products)
    distances = squares[:, None] + squares - 2 * products  # [robust krum]
    distances.fill_diagonal_(torch.inf)
    closest, _ = distances.sort(1)
    neighbours = sites - hostile - 2  # [robust krum]
    order = closest[:, :neighbours].sum(1).argsort(stable=True)
    factors = torch.zeros(sites, dtype=torch.float64)
    factors[order[:num_chosen]] = 1 / num_chosen  # [robust krum]
    return factors


def weigh_by_reference(products: Tensor, reference: int) -> Tensor:
    """Return factors from the angles to a trusted change, (sites,).

    All changes are scaled to the trusted change's length. All factors are zero if no
    change has a positive cosine with it.

    Args:
        products: Inner products of the changes, (sites, sites).
        reference: The index of the trusted change.
    """
    lengths = _compute_lengths(products)
    scores = (products[reference] / lengths).clamp_min(0.0)  # [robust trust]
    scores[reference] = 0.0  # [robust trust]
    scores /= scores.sum().clamp_min(TINY)  # [robust trust]
    return scores * lengths[reference] / lengths  # [robust trust]


def _compute_lengths(products: Tensor) -> Tensor:
    """Return the positive lengths of changes, (sites,), from their inner products."""
    return products.diagonal().sqrt().clamp_min(TINY)


class Average:
    """The server's step w + η Δ.

    Args:
        rate: η.

    Attributes:
        moments: State carried over to the next step, by name; empty here.
    """

    def __init__(self, rate: float = 1.0) -> None:
        self.rate = rate
        self.moments: dict[str, Tensor] = {}

    def __call__(
        self, weights: Mapping[str, Tensor], mean: Tensors
    ) -> dict[str, Tensor]:
        """Return the parameters that follow `weights`.

        Args:
            weights: The parameters from which sites started.
            mean: The mean of the parameters that they returned.
        """
        return {
            name: self._move(name, weight, mean[name])
            for name, weight in weights.items()
        }

    def _move(self, name: str, weight: Tensor, mean: Tensor) -> Tensor:
        """Return one parameter after the step; see `__call__`."""
        del name
        return mean if self.rate == 1 else weight + self.rate * (mean - weight)

    def _find_moment(self, name: str, start: Tensor) -> Tensor:
        """Return a moment; `start` before the first step."""
        return self.moments.get(name, start)


class Nesterov(Average):
    """Nesterov momentum.

    Args:
        rate: η.
        momentum: μ; with 0 the step is `Average`.
    """

    def __init__(self, rate: float, momentum: float) -> None:
        super().__init__(rate)
        self._momentum = momentum

    def _move(self, name: str, weight: Tensor, mean: Tensor) -> Tensor:
        change = mean - weight
        key = f"velocity.{name}"
        velocity = (
            self._momentum * self._find_moment(key, torch.zeros_like(weight)) + change
        )
        self.moments[key] = velocity
        return weight + self.rate * (change + self._momentum * velocity)


class Adaptive(Average):
    """FedAdam and FedYogi.

    Args:
        rate: η.
        betas: β1 and β2.
        adaptivity: τ; second moments start at its square.
        yogi: Whether to use Yogi's second moments.
    """

    def __init__(
        self,
        rate: float,
        betas: tuple[float, ...],
        adaptivity: float,
        *,
        yogi: bool = False,
    ) -> None:
        super().__init__(rate)
        self._betas = betas
        self._adaptivity = adaptivity
        self._yogi = yogi

    def _move(self, name: str, weight: Tensor, mean: Tensor) -> Tensor:
        beta1, beta2 = self._betas
        change = mean - weight  # Δ_t
        square = change.square()
        zero = torch.zeros_like(weight)
        first = beta1 * self._find_moment(f"first.{name}", zero) + (1 - beta1) * change
        second = self._find_moment(f"second.{name}", zero + self._adaptivity**2)
        if self._yogi:
            second = second - (1 - beta2) * square * (second - square).sign()
        else:
            second = beta2 * second + (1 - beta2) * square
        self.moments |= {f"first.{name}": first, f"second.{name}": second}
        return weight + self.rate * (first / (second.sqrt() + self._adaptivity))


def make_server_step(
    kind: Kind,
    rate: float,
    *,
    momentum: float,
    betas: tuple[float, ...],
    adaptivity: float,
) -> Average:
    """Return the server's step for the settings of `Averaging`.

    Args:
        kind: The kind of step.
        rate: η; 0 takes 1, and 1e-3 for "adam" and "yogi".
        momentum: μ of "nesterov".
        betas: β1 and β2 of "adam" and "yogi".
        adaptivity: τ of "adam" and "yogi".
    """
    if kind == "average":
        return Average(rate or 1.0)
    if kind == "nesterov":
        return Nesterov(rate or 1.0, momentum)
    return Adaptive(rate or 1e-3, betas, adaptivity, yogi=kind == "yogi")
