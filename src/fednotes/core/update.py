"""A site's update, and the sum of all sites' updates.

An `Update` holds the means over a site's examples and their weight. Weight · mean is
computed only when the sum is formed, in float64. There, a float32 value times an
integer weight below 2^29 is exact, so the mean over one site equals that site's value
bit for bit, and a number takes only four bytes in a message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fednotes.core.errors import TrainingError
from fednotes.core.kernels import divide, sum_weighted
from fednotes.core.stored_tensors import StoredTensors

Tensors = Mapping[str, Tensor]
GROUP_SIZE = 8  # updates in memory that are added in one pass over it
_SAME_VERSION = "all sites must run the same job with the same version of fednotes"


@dataclass(frozen=True, slots=True)
class Update:
    """The tensors and counts that a site sends in one round.

    Attributes:
        tensors: Means over the site's examples, by name.
        weight: The number of examples (sentences, notes or patients) in the means.
        metrics: Counts that are summed over sites without weights.
    """

    tensors: Tensors = field(default_factory=dict)
    weight: float = 1.0
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether it has no number of the site, as `Update()`."""
        return not self.tensors and not self.metrics and self.weight == 1.0


@dataclass(frozen=True, slots=True)
class Total:
    """A sum over sites.

    Attributes:
        tensors: Σ weight · value in float64, by name.
        weight: Σ weight.
        metrics: The sums of the sites' metrics.
        sites: The number of updates in the sum.
        included: The names of the sites in the sum, if the engine knows them.
    """

    tensors: Tensors
    weight: float
    metrics: Mapping[str, float]
    sites: int = 1
    included: tuple[str, ...] = ()

    @classmethod
    def of(cls, updates: Iterable[Update]) -> Total:
        """Add updates in the given order.

        Raises:
            TrainingError: Two updates have different tensors or shapes.
        """
        sums: dict[str, Tensor] = {}
        metrics: dict[str, float] = {}
        weight = 0.0
        sites = 0
        for group in _split_into_groups(updates):
            if not sites:
                sums = _add_weighted(group)
            else:
                _add_weighted(group, sums)
            for update in group:
                for name, number in update.metrics.items():
                    metrics[name] = metrics.get(name, 0.0) + float(number)
                weight += update.weight
            sites += len(group)
        return cls(sums, weight, metrics, sites)

    def metric(self, name: str) -> float:
        """Return the sum of one metric.

        Raises:
            TrainingError: No site reported the metric.
        """
        require_metrics(self.metrics, name)
        return self.metrics[name]

    def require(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Check that the sites returned the tensors that the server expects.

        Args:
            shapes: The shape of each tensor by its name.

        Raises:
            TrainingError: A tensor is missing, unknown or has another shape.
        """
        if odd := sorted(self.tensors.keys() ^ shapes.keys()):
            what = "not expected" if odd[0] in self.tensors else "missing"
            raise TrainingError(
                f"tensor {odd[0]!r} is {what} in the sites' updates: {_SAME_VERSION}"
            )
        for name, shape in shapes.items():
            returned = tuple(self.tensors[name].shape)
            if returned != tuple(shape):
                raise TrainingError(
                    f"the sites returned tensor {name!r} with shape {returned}, "
                    f"expected {tuple(shape)}: {_SAME_VERSION}"
                )

    def mean(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """Return Σ weight · value / Σ weight, cast once to `dtype`.

        Raises:
            TrainingError: The weights sum to zero.
        """
        if self.weight <= 0:
            raise TrainingError(
                "the sites' weights sum to zero: no site has any training data"
            )
        return {
            name: divide(value, self.weight, dtype)
            for name, value in self.tensors.items()
        }


def require_metrics(metrics: Mapping[str, float], *names: str) -> None:
    """Check that at least one site reported each of these metrics.

    Raises:
        TrainingError: A metric is missing; the message names the first one.
    """
    for name in names:
        if name not in metrics:
            raise TrainingError(f"no site reported the count {name!r}: {_SAME_VERSION}")


def compute_contribution(update: Update) -> dict[str, Tensor]:
    """Return what an update adds to a sum: weight · value in float64.

    `Total.of` computes the same bits, so a site that subtracts this from a sum with its
    update gets the sum of the others.
    """
    return _add_weighted((update,))


def _split_into_groups(updates: Iterable[Update]) -> Iterator[list[Update]]:
    """Yield updates in groups that are added together.

    An update whose tensors are in a file is a group of its own, so that only one of
    them is in memory at a time.
    """
    group: list[Update] = []
    for update in updates:
        is_stored = isinstance(update.tensors, StoredTensors)
        if group and (is_stored or len(group) == GROUP_SIZE):
            yield group
            group = []
        group.append(update)
        if is_stored:
            yield group
            group = []
    if group:
        yield group


def _add_weighted(
    updates: Sequence[Update], sums: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return Σ weight · value in float64, added in the order of the updates.

    Args:
        updates: One or more updates.
        sums: Earlier sums, to which they are added; these are changed in place.
    """
    first, *others = updates
    expected = first.tensors if sums is None else sums
    for update in others if sums is None else updates:
        _require_same_tensors(expected, update.tensors)
    weights = [update.weight for update in updates]
    earlier = sums or {}
    return {
        name: sum_weighted(
            [update.tensors[name].detach() for update in updates],
            weights,
            earlier.get(name),
        )
        for name in expected
    }


def _require_same_tensors(left: Tensors, right: Tensors) -> None:
    """Raise TrainingError unless tensors have the same names and shapes."""
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
                f"{tuple(right[name].shape)} at another: a layer that depends on a "
                "site's tag set cannot be shared unless the tag sets agree"
            )
