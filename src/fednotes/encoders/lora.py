"""LoRA: low-rank changes of a frozen model's weights (Hu et al. 2021).

Each chosen linear map becomes W + (scale / rank) · B A. B starts as zero, so that the first
step is the frozen model's, bit for bit. W is never touched: the change is added to the map's
output while `applied` is open, so models that share one frozen encoder do not meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fednotes.core.errors import ConfigError
from fednotes.core.tensors import seeded

CHANGED = "query value q v q_lin v_lin q_proj v_proj query_proj value_proj".split()


class LoRA(nn.Module):
    """Changes of the query and value projections of every self-attention of an encoder.

    down: (maps, rank, inputs), A. up: (maps, outputs, rank), B. Initial values come from the
    seed alone. Raises ConfigError for an encoder whose projections are not to be found or
    differ in size.
    """

    def __init__(self, model: nn.Module, rank: int = 8, alpha: float = 16.0, seed: int = 0) -> None:
        super().__init__()
        maps = targets(model)
        outputs, inputs = maps[0].weight.shape
        self.scale = alpha / rank
        with seeded(seed, "lora"):
            down = (torch.rand(len(maps), rank, inputs) * 2 - 1) / inputs**0.5
        self.down = nn.Parameter(down)
        self.up = nn.Parameter(torch.zeros(len(maps), outputs, rank))

    @contextmanager
    def applied(self, maps: Sequence[nn.Linear]) -> Iterator[None]:
        """While open, these maps (in the order of `targets`) compute with their changes.

        For one forward pass at a time: it changes what the shared modules do.
        """
        with ExitStack() as stack:
            for linear, down, up in zip(maps, self.down, self.up, strict=True):
                hook = linear.register_forward_hook(_change(down, up, self.scale))
                stack.callback(hook.remove)
            yield


def targets(model: nn.Module) -> list[nn.Linear]:
    """The query and value projections, bottom to top. Raises ConfigError as `LoRA` does."""
    maps = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.rsplit(".", 1)[-1] in CHANGED
    ]
    if not maps or len({tuple(linear.weight.shape) for linear in maps}) > 1:
        kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        raise ConfigError(
            f'tuning = "lora": cannot change an encoder of the kind {kind!r} (no query and '
            "value projections of one size); BERT's and RoBERTa's can be"
        )
    return maps


def _change(down: Tensor, up: Tensor, scale: float) -> Any:
    def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + scale * F.linear(F.linear(inputs[0], down), up)

    return hook
