"""What the units of a site with differential privacy add to its answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from fednotes.core.tensors import copy_tensors
from fednotes.privacy import training

COMPANY = 4  # units whose sums are compared


@dataclass(frozen=True)
class Moved:
    """What units move.

    Attributes:
        shared: What leaves, in whole numbers.
        private: What moves private layers, as it is.
        length: The norm of both together.
    """

    shared: dict[str, Tensor]
    private: dict[str, Tensor]
    length: float


def sum_units(site: Any, units: Sequence[int]) -> Moved:
    """Return what these units alone move in the second answer of a new site, without noise.

    The first answer is of no unit and to other parameters, for what a method keeps of
    these.
    """
    start = site.state()
    shared = copy_tensors(site.site.shared)
    draws: list[Sequence[int]] = [(), units]
    picked = lambda stream, count, rate: np.isin(np.arange(count), draws.pop(0))  # noqa: E731
    zeros = lambda stream, count: np.zeros(count, np.int64)  # noqa: E731
    private: dict[str, Tensor] = {}
    with (
        mock.patch.object(training, "draw_units", picked),
        mock.patch.object(training, "draw_discrete_gaussian", zeros),
    ):
        site.noisy_gradients({n: 3 * v for n, v in shared.items()}, round=0)
        with mock.patch.object(site._adam, "step", private.update):
            answer = dict(site.noisy_gradients(shared, round=1).tensors)
    site.restore(start)
    grids, number = site._grids, site._config.batch_size
    private_values = {
        name: v.double() * number for name, v in private.items() if v is not None
    }
    squares = [float((v.double() * grids[n]).square().sum()) for n, v in answer.items()]
    squares += [float(value.square().sum()) for value in private_values.values()]
    return Moved(answer, private_values, math.sqrt(sum(squares)))


def find_units(site: Any) -> dict[int, Moved]:
    """Return the first units that move an answer, each with what it moves alone."""
    alone = ((unit, sum_units(site, [unit])) for unit in range(len(site.units)))
    moving = ((unit, moved) for unit, moved in alone if moved.length > 0)
    return dict(islice(moving, COMPANY))


def answer_with_noise(site: Any) -> dict[str, Tensor]:
    """Return a site's answer in a round in which no unit is drawn."""
    nobody = lambda stream, count, rate: np.zeros(count, bool)  # noqa: E731
    with mock.patch.object(training, "draw_units", nobody):
        answer = site.noisy_gradients(copy_tensors(site.site.shared), round=0)
    assert (answer.weight, dict(answer.metrics)) == (1.0, {})
    tensors: dict[str, Tensor] = dict(answer.tensors)
    assert all(value.dtype == torch.int64 for value in tensors.values())
    return tensors
