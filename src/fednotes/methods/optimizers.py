"""Adam and RMSprop on named tensors, with a state that can be kept and restored to the bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from fednotes.core.tensors import require_like
from fednotes.core.update import Tensors


class Optimizer(Protocol):
    """What local training asks of an optimizer; `Adam` and `models.dan.RowAdam` are ones."""

    parameters: dict[str, Tensor]

    def step(self, gradients: Tensors | None = None, *, rate: float | None = None) -> None:
        """One step along `gradients`, or along each parameter's own `.grad`, which is then gone."""

    def state(self, prefix: str = "adam") -> dict[str, Tensor]:
        """What must be kept to go on."""

    def restore(self, tensors: Tensors, prefix: str = "adam") -> None:
        """Go on from what `state` gave."""


class Adam:
    """`torch.optim.Adam` over named tensors (Kingma and Ba 2015), updated in place by `step`.

    weight_decay: decoupled (AdamW; Loshchilov and Hutter 2019), of all but biases and
    normalisation layers (those with one dimension), as BERT's optimizer has it.
    """

    moments: ClassVar[tuple[str, ...]] = ("step", "exp_avg", "exp_avg_sq")

    def __init__(
        self, parameters: Mapping[str, Tensor], learning_rate: float, weight_decay: float = 0.0
    ) -> None:
        self.parameters, self._rate = dict(parameters), learning_rate
        values = list(self.parameters.values())
        self._optimizer = self._made(values, weight_decay) if values else None

    def _made(self, values: list[Tensor], weight_decay: float) -> torch.optim.Optimizer:
        if not weight_decay:
            return torch.optim.Adam(values, lr=self._rate, fused=True)
        groups = [
            {"params": [v for v in values if v.dim() > 1], "weight_decay": weight_decay},
            {"params": [v for v in values if v.dim() <= 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self._rate, fused=True)

    def step(self, gradients: Tensors | None = None, *, rate: float | None = None) -> None:
        """One step along `gradients`, or along each parameter's own `.grad`.

        rate: this step's learning rate, if it is not the one given first.
        """
        if self._optimizer is None:
            return
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate if rate is None else rate
        if gradients is not None:
            for name, parameter in self.parameters.items():
                parameter.grad = gradients[name]
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def state(self, prefix: str = "adam") -> dict[str, Tensor]:
        """The moments and step counts: names `adam.exp_avg.<parameter>` and so on."""
        if self._optimizer is None:
            return {}
        return {
            f"{prefix}.{key}.{name}": value
            for name, parameter in self.parameters.items()
            for key, value in self._optimizer.state.get(parameter, {}).items()
        }

    def restore(self, tensors: Tensors, prefix: str = "adam") -> None:
        """Take the moments from what `state` gave; parameters without any start afresh.

        Raises TrainingError for moments that do not fit their parameter.
        """
        if self._optimizer is None:
            return
        self._optimizer.state.clear()
        for name, parameter in self.parameters.items():
            names = {key: f"{prefix}.{key}.{name}" for key in self.moments}
            found = {
                key: tensors[full].to("cpu" if key == "step" else parameter.device)
                for key, full in names.items()
                if full in tensors
            }
            if found:
                like = dict.fromkeys(self.moments, parameter) | {"step": torch.zeros(())}
                require_like(like, found)
                self._optimizer.state[parameter] = found


class RMSprop(Adam):
    """RMSprop over named tensors (Tieleman and Hinton 2012), as Keras 2 has it.

    w ← w − rate · g / (√a + 1e-7) with a ← 0.9 a + 0.1 g²: `rho` and `epsilon` are Keras'.
    """

    moments = ("step", "square_avg")

    def _made(self, values: list[Tensor], weight_decay: float) -> torch.optim.Optimizer:
        # [phenotype rmsprop]
        return torch.optim.RMSprop(values, lr=self._rate, alpha=0.9, eps=1e-7)
