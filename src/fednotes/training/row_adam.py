"""Adam for parameters whose gradients are sparse: only the rows of a batch move."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from fednotes.core.kernels import kernel
from fednotes.core.tensors import require_like


class RowAdam:
    """Adam; of a parameter whose gradient is sparse, only the rows in it move.

    Dense gradients: `torch.optim.Adam`; sparse ones: `torch.optim.SparseAdam` (one
    count of steps for all rows). parameters: name → parameter, changed in place. An
    `Optimizer` with the names of Adam's state. clip: the most that the norm of all
    gradients may be (`torch.nn.utils.clip_grad_norm_` takes no sparse ones); 0 does not
    clip.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        learning_rate: float = 1e-3,
        clip: float = 0.0,
        eps: float = 1e-8,
    ) -> None:
        self.parameters, self._rate = dict(parameters), learning_rate
        self._clip, self._eps = clip, eps
        self._steps = dict.fromkeys(self.parameters, 0)
        self._moments: dict[str, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def step(
        self,
        gradients: Mapping[str, Tensor] | None = None,
        *,
        rate: float | None = None,
    ) -> None:
        """One step along `gradients`, or along each parameter's own `.grad`, which is
        then gone."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            grad = parameter.grad if gradients is None else gradients[name]
            parameter.grad = None
            if grad is not None:
                grad = grad.coalesce() if grad.is_sparse else grad
                # no row is touched by a batch of patients without concepts
                if not grad.is_sparse or grad.values().numel():
                    found[name] = grad
        share = self._share(found.values())
        for name, grad in found.items():
            if name not in self._moments:
                like = self.parameters[name]
                self._moments[name] = (torch.zeros_like(like), torch.zeros_like(like))
            self._steps[name] += 1
            self._move(name, grad, share, self._rate if rate is None else rate)

    def _share(self, gradients: Iterable[Tensor]) -> float:
        """What all gradients are multiplied by so that their norm is at most `clip`."""
        if not self._clip:
            return 1.0
        values = [g.values() if g.is_sparse else g for g in gradients]
        norm = math.sqrt(sum(float(v.double().square().sum()) for v in values))
        return min(1.0, self._clip / (norm + 1e-6))

    def _move(self, name: str, grad: Tensor, share: float, rate: float) -> None:
        parameter, (first, second) = self.parameters[name], self._moments[name]
        b1, b2, t = 0.9, 0.999, self._steps[name]
        size, root, eps = rate / (1 - b1**t), 1 / math.sqrt(1 - b2**t), self._eps
        rows: Tensor | slice = slice(None)
        if grad.is_sparse:  # eps where SparseAdam has it
            rows, grad, eps = grad.indices()[0], grad.values(), eps * root
        if share < 1:
            grad = grad * share
        values = (parameter, first, second, grad)
        if all(
            v.is_cpu and v.dtype == torch.float32 and v.is_contiguous() for v in values
        ):
            whole = (
                np.arange(len(parameter)) if isinstance(rows, slice) else rows.numpy()
            )
            flat = [v.detach().view(len(v), -1).numpy() for v in values]
            _adam(
                *flat,
                whole,
                *map(np.float32, (b1, b2, 1 - b1, 1 - b2, size, root, eps)),
            )
            return
        first[rows] = m = first[rows] * b1 + grad * (1 - b1)
        second[rows] = v = second[rows] * b2 + grad * grad * (1 - b2)
        parameter[rows] -= size * m / (v.sqrt() * root + eps)

    def state(self, prefix: str = "adam") -> dict[str, Tensor]:
        """The moments and step counts: names `adam.exp_avg.<parameter>` and so on."""
        found: dict[str, Tensor] = {}
        for name, (first, second) in self._moments.items():
            found[f"{prefix}.step.{name}"] = torch.tensor(float(self._steps[name]))
            found[f"{prefix}.exp_avg.{name}"] = first
            found[f"{prefix}.exp_avg_sq.{name}"] = second
        return found

    def restore(self, tensors: Mapping[str, Tensor], prefix: str = "adam") -> None:
        """Take the moments from what `state` gave; parameters without any start afresh."""
        self._moments = {}
        self._steps = dict.fromkeys(self.parameters, 0)
        for name, parameter in self.parameters.items():
            keys = [f"{prefix}.{moment}.{name}" for moment in ("exp_avg", "exp_avg_sq")]
            if keys[0] in tensors:
                require_like(
                    dict.fromkeys(keys, parameter), {k: tensors[k] for k in keys}
                )
                first, second = (
                    tensors[k].to(parameter.device, copy=True) for k in keys
                )
                self._moments[name] = (first, second)
                self._steps[name] = int(tensors[f"{prefix}.step.{name}"])


@kernel(
    "void(f4[:,::1], f4[:,::1], f4[:,::1], f4[:,::1], i8[::1], f4, f4, f4, f4, f4, f4, f4)"
)
def _adam(table, first, second, grad, rows, b1, b2, c1, c2, size, root, eps):
    for k in range(rows.shape[0]):
        row = rows[k]
        for d in range(table.shape[1]):
            g = grad[k, d]
            m = b1 * first[row, d] + c1 * g
            v = b2 * second[row, d] + c2 * g * g
            first[row, d] = m
            second[row, d] = v
            table[row, d] -= size * m / (np.sqrt(v) * root + eps)
