"""Adam for parameters whose gradients are sparse: only the rows of a batch move."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from fednotes.core.kernels import kernel
from fednotes.core.tensors import require_like

BETA1, BETA2 = 0.9, 0.999


class RowAdam:
    """Adam; if a parameter's gradient is sparse, only the rows in it move.

    With dense gradients it is `torch.optim.Adam`, with sparse ones
    `torch.optim.SparseAdam` (one step count for all rows). It is an `Optimizer` whose
    state has the names of `Adam`'s.

    Args:
        parameters: The parameters that `step` changes in place, by name.
        learning_rate: The learning rate.
        clip: Largest norm of all gradients together (`torch.nn.utils.clip_grad_norm_`
            does not accept sparse ones); 0 does not clip.
        eps: ε of Adam.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        learning_rate: float = 1e-3,
        clip: float = 0.0,
        eps: float = 1e-8,
    ) -> None:
        self.parameters = dict(parameters)
        self._rate = learning_rate
        self._clip = clip
        self._eps = eps
        self._steps = dict.fromkeys(self.parameters, 0)
        self._moments: dict[str, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def step(
        self,
        gradients: Mapping[str, Tensor] | None = None,
        *,
        rate: float | None = None,
    ) -> None:
        """Take a step and clear the gradients.

        Args:
            gradients: The gradient of each parameter by name. By default each
                parameter's `.grad`.
            rate: The learning rate of this step; None takes the optimizer's.
        """
        moving: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            gradient = parameter.grad if gradients is None else gradients[name]
            parameter.grad = None
            if gradient is None:
                continue
            if gradient.is_sparse:
                gradient = gradient.coalesce()
                if not gradient.values().numel():
                    continue  # a batch of patients without concepts touches no row
            moving[name] = gradient

        factor = self._compute_clip_factor(moving.values())
        for name, gradient in moving.items():
            if name not in self._moments:
                like = self.parameters[name]
                self._moments[name] = (torch.zeros_like(like), torch.zeros_like(like))
            self._steps[name] += 1
            self._move_parameter(
                name, gradient, factor, self._rate if rate is None else rate
            )

    def _compute_clip_factor(self, gradients: Iterable[Tensor]) -> float:
        """Return the factor that limits the norm of all gradients to `clip`."""
        if not self._clip:
            return 1.0
        values = [g.values() if g.is_sparse else g for g in gradients]
        norm = math.sqrt(sum(float(v.double().square().sum()) for v in values))
        return min(1.0, self._clip / (norm + 1e-6))

    def _move_parameter(
        self, name: str, gradient: Tensor, factor: float, rate: float
    ) -> None:
        """Move a parameter, or only the rows in its sparse gradient.

        Args:
            name: The parameter's name.
            gradient: The parameter's gradient.
            factor: Factor of the gradient, at most 1.
            rate: The learning rate.
        """
        parameter = self.parameters[name]
        first, second = self._moments[name]
        steps = self._steps[name]
        size = rate / (1 - BETA1**steps)
        root = 1 / math.sqrt(1 - BETA2**steps)
        eps = self._eps
        rows: Tensor | slice = slice(None)
        if gradient.is_sparse:
            rows = gradient.indices()[0]
            gradient = gradient.values()
            eps = eps * root  # where SparseAdam adds it
        if factor < 1:
            gradient = gradient * factor
        if _fits_kernel(parameter, first, second, gradient):
            numbers = np.arange(len(parameter))
            if isinstance(rows, Tensor):
                numbers = rows.numpy()
            tables = [
                value.detach().view(len(value), -1).numpy()
                for value in (parameter, first, second, gradient)
            ]
            constants = (BETA1, BETA2, 1 - BETA1, 1 - BETA2, size, root, eps)
            _move_rows(*tables, numbers, *map(np.float32, constants))
            return

        new_first = first[rows] * BETA1 + gradient * (1 - BETA1)
        new_second = second[rows] * BETA2 + gradient * gradient * (1 - BETA2)
        first[rows] = new_first
        second[rows] = new_second
        parameter[rows] -= size * new_first / (new_second.sqrt() * root + eps)

    def state(self, prefix: str = "adam") -> dict[str, Tensor]:
        """Return moments and step counts as `adam.exp_avg.<parameter>` and so on."""
        tensors: dict[str, Tensor] = {}
        for name, (first, second) in self._moments.items():
            tensors[f"{prefix}.step.{name}"] = torch.tensor(float(self._steps[name]))
            tensors[f"{prefix}.exp_avg.{name}"] = first
            tensors[f"{prefix}.exp_avg_sq.{name}"] = second
        return tensors

    def restore(self, tensors: Mapping[str, Tensor], prefix: str = "adam") -> None:
        """Restore moments from `state`; parameters without moments start afresh.

        Raises:
            TrainingError: Moments do not match their parameter.
        """
        self._moments = {}
        self._steps = dict.fromkeys(self.parameters, 0)
        for name, parameter in self.parameters.items():
            keys = [f"{prefix}.{moment}.{name}" for moment in ("exp_avg", "exp_avg_sq")]
            if keys[0] not in tensors:
                continue
            moments = {key: tensors[key] for key in keys}
            require_like(dict.fromkeys(keys, parameter), moments)
            first, second = (
                moments[key].to(parameter.device, copy=True) for key in keys
            )
            self._moments[name] = (first, second)
            self._steps[name] = int(tensors[f"{prefix}.step.{name}"])


def _fits_kernel(*values: Tensor) -> bool:
    """Return whether tensors are contiguous float32 on the CPU."""
    return all(
        value.is_cpu and value.dtype == torch.float32 and value.is_contiguous()
        for value in values
    )


@kernel(
    "void(f4[:,::1], f4[:,::1], f4[:,::1], f4[:,::1], i8[::1], "
    "f4, f4, f4, f4, f4, f4, f4)"
)
def _move_rows(  # noqa: PLR0913 - a kernel has no objects
    table, first, second, grad, rows, beta1, beta2, rest1, rest2, size, root, eps
):
    """Take a step of Adam with some rows of a table, in place.

    Args:
        table: (all rows, columns) the parameter.
        first: Its first moments, of the same shape.
        second: Its second moments, of the same shape.
        grad: (rows, columns) the gradient of the rows.
        rows: (rows,) their indices in the table.
        beta1: Decay of the first moments.
        beta2: Decay of the second moments.
        rest1: 1 - beta1.
        rest2: 1 - beta2.
        size: Learning rate, corrected for the bias of the first moments.
        root: Factor of the root, which corrects the bias of the second moments.
        eps: ε.
    """
    for k in range(rows.shape[0]):
        row = rows[k]
        for column in range(table.shape[1]):
            g = grad[k, column]
            m = beta1 * first[row, column] + rest1 * g
            v = beta2 * second[row, column] + rest2 * g * g
            first[row, column] = m
            second[row, column] = v
            table[row, column] -= size * m / (np.sqrt(v) * root + eps)
