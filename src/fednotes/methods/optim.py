"""Adam on named tensors, with a state that can be kept and restored to the bit."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fednotes.core.update import Tensors


class Adam:
    """`torch.optim.Adam` over named tensors (Kingma and Ba 2015).

    parameters: updated in place by `step`.
    """

    def __init__(self, parameters: Mapping[str, Tensor], learning_rate: float) -> None:
        self.parameters = dict(parameters)
        self._optimizer = (
            torch.optim.Adam(list(self.parameters.values()), lr=learning_rate, fused=True)
            if self.parameters
            else None
        )

    def step(self, gradients: Tensors | None = None) -> None:
        """One step along `gradients`, or along each parameter's own `.grad`."""
        if self._optimizer is None:
            return
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
        """Take the moments from what `state` gave; parameters without any start afresh."""
        if self._optimizer is None:
            return
        self._optimizer.state.clear()
        for name, parameter in self.parameters.items():
            found = {
                key: tensors[f"{prefix}.{key}.{name}"].to(
                    "cpu" if key == "step" else parameter.device
                )
                for key in ("step", "exp_avg", "exp_avg_sq")
                if f"{prefix}.{key}.{name}" in tensors
            }
            if found:
                self._optimizer.state[parameter] = found
