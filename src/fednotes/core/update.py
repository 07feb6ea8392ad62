"""What a site adds to a sum, and the sum.

An `Update` holds a site's own mean values and its weight; the product is formed only
where the sum is taken, in float64. A float32 value times an integer weight below 2^29
is exact there, so the mean over one site is that site's value to the last bit, and the
wire carries four bytes a number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from fednotes.core.errors import TrainingError
from fednotes.core.kernels import quotient, weighted_sum

Tensors = Mapping[str, Tensor]
TOGETHER = 8  # updates that wait to be added in one pass over memory
_SAME_VERSION = "all sites must run the same job with the same version of fednotes"


@dataclass(frozen=True, slots=True)
class Update:
    """What leaves a site.

    tensors: the site's values (a mean over its examples), by name.
    weight: how much they count (a number of sentences, notes or patients).
    metrics: counts that add over sites (not multiplied by the weight).
    """

    tensors: Tensors = field(default_factory=dict)
    weight: float = 1.0
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Total:
    """A sum over sites: `tensors` = Σ weight · value in float64, `weight` = Σ weight.

    included: the names of the sites whose updates are in it, where the engine knows
        them.
    """

    tensors: Tensors
    weight: float
    metrics: Mapping[str, float]
    sites: int = 1
    included: tuple[str, ...] = ()

    @classmethod
    def of(cls, updates: Iterable[Update]) -> Total:
        """Add updates in the order given.

        Raises TrainingError if two updates name different tensors or shapes.
        """
        sums: Tensors = {}
        metrics: dict[str, float] = {}
        weight, sites = 0.0, 0
        coming = iter(updates)
        while group := tuple(islice(coming, TOGETHER)):
            sums = _sum((Update(sums), *group) if sites else group)
            for update in group:
                for name, number in update.metrics.items():
                    metrics[name] = metrics.get(name, 0.0) + float(number)
                weight += update.weight
            sites += len(group)
        return cls(sums, weight, metrics, sites)

    def metric(self, name: str) -> float:
        """Return the sum of one metric.

        Raises:
            TrainingError: No site reported it.
        """
        require_metrics(self.metrics, name)
        return self.metrics[name]

    def require(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Check that the sites returned the tensors that a server can go on with.

        Args:
            shapes: The shape of each tensor by its name.

        Raises:
            TrainingError: A tensor is missing, unknown or has another shape.
        """
        if odd := sorted(self.tensors.keys() ^ shapes.keys()):
            what = "not expected" if odd[0] in self.tensors else "missing"
            raise TrainingError(
                f"tensor {odd[0]!r} is {what} in what the sites returned: {_SAME_VERSION}"
            )
        for name, shape in shapes.items():
            if (found := tuple(self.tensors[name].shape)) != tuple(shape):
                raise TrainingError(
                    f"the sites returned tensor {name!r} with shape {found}, expected "
                    f"{tuple(shape)}: {_SAME_VERSION}"
                )

    def mean(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """Σ weight · value / Σ weight, cast once.

        Raises TrainingError if the weights sum to zero.
        """
        if self.weight <= 0:
            raise TrainingError(
                "the sites' weights sum to zero: no site has any training data"
            )
        return {
            name: quotient(value, self.weight, dtype)
            for name, value in self.tensors.items()
        }


def require_metrics(metrics: Mapping[str, float], *names: str) -> None:
    """Check that some site reported these metrics.

    Raises TrainingError, which names the first.
    """
    for name in names:
        if name not in metrics:
            raise TrainingError(f"no site reported the count {name!r}: {_SAME_VERSION}")


def contribution(update: Update) -> dict[str, Tensor]:
    """What an update adds to a sum: weight · value in float64, exactly as `Total.of`
    forms it.

    A site that subtracts this from a sum that includes it is left with the others'
    part.
    """
    return _sum((update,))


def _sum(updates: Sequence[Update]) -> dict[str, Tensor]:
    """Σ weight · value in float64, in the order of the updates."""
    first, *others = updates
    for update in others:
        _same_names(first.tensors, update.tensors)
    weights = [update.weight for update in updates]
    return {
        name: weighted_sum(
            [update.tensors[name].detach() for update in updates], weights
        )
        for name in first.tensors
    }


def _same_names(left: Tensors, right: Tensors) -> None:
    if left.keys() != right.keys():
        odd = sorted(left.keys() ^ right.keys())[0]
        raise TrainingError(
            f"the sites returned different tensors ({odd!r} is not in all): "
            "they must run the same model and the same private layers"
        )
    for name, value in left.items():
        if value.shape != right[name].shape:
            raise TrainingError(
                f"tensor {name!r} has shape {tuple(value.shape)} at one site and "
                f"{tuple(right[name].shape)} at another: a layer that depends on a site's "
                "tag set cannot be shared unless the tag sets agree"
            )
