"""Memory that a description from outside may ask for.

A model's description names sizes, and a model is built before its tensors are read.
Whoever wrote the description could ask for more memory than the machine has; this
bounds it by what the folder really holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fednotes.core.errors import ModelError

# for parts that are frozen and so not in the folder: 4 GiB of float32
SPARE_ELEMENTS = 2**30
_BY_SIZE = (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.full)
_BY_EXAMPLE = (torch.empty_like, torch.zeros_like, torch.ones_like, torch.randn_like)


class OversizedModelError(ModelError):
    """A description asks for far more memory than its folder's tensors take."""


class _Bounded(TorchFunctionMode):
    """Counts the elements of the tensors that torch's factory functions are asked for."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most, self._asked = most, 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        self._asked += _elements(func, args, options)
        if self._asked > self._most:
            raise OversizedModelError(
                f"describes a model of over {self._most:,} numbers, far more than the folder "
                "holds: it is damaged or was tampered with; copy the folder again"
            )
        return func(*args, **options)


@contextmanager
def bounded_allocation(held: int) -> Iterator[None]:
    """Refuse to allocate far more tensor elements within the block than a folder holds.

    Args:
        held: Number of elements of the tensors in the folder.

    Raises:
        OversizedModelError: Within the block, once more is asked for.
    """
    with _Bounded(held + SPARE_ELEMENTS):
        yield


def _elements(
    func: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]
) -> int:
    """Return how many elements in memory a call of one of torch's factory functions
    asks for."""
    device = options.get("device")
    if func in _BY_EXAMPLE:
        example: torch.Tensor = args[0]
        is_virtual = str(device or example.device) == "meta"
        return 0 if is_virtual else example.numel()
    if func not in _BY_SIZE or str(device) == "meta":
        return 0
    size = options.get("size", args)
    if isinstance(size, Sequence) and size and isinstance(size[0], Sequence):
        size = size[0]
    sizes = [
        part for part in size if isinstance(part, int) and not isinstance(part, bool)
    ]
    return math.prod(sizes)
