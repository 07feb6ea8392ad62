"""What a server makes of the mean of the sites' parameters, its own optimizer.

    "average"    w + η Δ, with Δ = mean − w; FedAvg where η is 1 (McMahan et al. 2017)
    "nesterov"   v ← μ v + Δ;  w + η (Δ + μ v)   (Douillard et al. 2023, DiLoCo's outer step)
    "adam"       Reddi et al. 2021, "Adaptive federated optimization", Algorithm 2
    "yogi"       the same, with Yogi's second moment

Each takes Δ as the negative gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from fednotes.core.update import Tensors

Kind = Literal["average", "nesterov", "adam", "yogi"]


class Average:
    """w + η Δ. moments: by name, what the next step needs of earlier ones; none here."""

    def __init__(self, rate: float = 1.0) -> None:
        self.rate = rate
        self.moments: dict[str, Tensor] = {}

    def __call__(self, weights: Mapping[str, Tensor], mean: Tensors) -> dict[str, Tensor]:
        """The parameters that follow `weights`, from the mean of what sites made of them."""
        return {name: self._moved(name, weight, mean[name]) for name, weight in weights.items()}

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
    """FedAdam and FedYogi. betas: β1, β2. adaptivity: τ, whose square second moments start at."""

    def __init__(
        self, rate: float, betas: tuple[float, ...], adaptivity: float, yogi: bool = False
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
    """A server's step by the settings of `Averaging`. rate: 0 is 1, of adam and yogi 1e-3."""
    makes: dict[Kind, Callable[[], Average]] = {
        "average": lambda: Average(rate or 1.0),
        "nesterov": lambda: Nesterov(rate or 1.0, momentum),
        "adam": lambda: Adaptive(rate or 1e-3, betas, adaptivity),
        "yogi": lambda: Adaptive(rate or 1e-3, betas, adaptivity, yogi=True),
    }
    return makes[kind]()
