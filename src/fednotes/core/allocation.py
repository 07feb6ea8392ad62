"""A bound on the memory that a saved model's description can claim.

A model is built from the sizes in its description before its tensors are read. A
damaged or forged description could claim more memory than the machine has, so memory is
bounded by the actual content of the folder. The number of tensors is also bounded,
because a million layers of one number take little memory but hours to build.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fednotes.core.errors import ModelError

# For frozen parts, which are not in the folder: 4 GiB of float32.
SPARE_ELEMENTS = 2**30
# About a thousand Transformer layers; models in use have at most a hundred.
MAX_TENSORS = 20_000
_BY_SIZE = (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.full)
_BY_EXAMPLE = (torch.empty_like, torch.zeros_like, torch.ones_like, torch.randn_like)


class OversizedModelError(ModelError):
    """A description claims far more memory than the tensors in its folder need."""


class _AllocationLimit(TorchFunctionMode):
    """Count the tensors that torch's factory functions create, and their elements."""

    def __init__(self, limit: int) -> None:
        """Start at zero; `limit` is the maximum number of elements."""
        super().__init__()
        self._limit = limit
        self._elements = 0
        self._tensors = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        self._tensors += func in _BY_SIZE or func in _BY_EXAMPLE
        if self._tensors > MAX_TENSORS:
            raise OversizedModelError(
                f"describes a model of over {MAX_TENSORS:,} tensors, more than any "
                "model in use: it is damaged or was tampered with; copy the folder "
                "again"
            )
        self._elements += _count_elements(func, args, options)
        if self._elements > self._limit:
            raise OversizedModelError(
                f"describes a model of over {self._limit:,} values, far more than the "
                "folder holds: it is damaged or was tampered with; copy the folder "
                "again"
            )
        return func(*args, **options)


@contextmanager
def limiting_allocation(stored: int) -> Iterator[None]:
    """Limit the tensors created in the context, and their elements in memory.

    Args:
        stored: Number of elements of the tensors in the folder.

    Raises:
        OversizedModelError: The context allocates far more elements than `stored`, or
            creates more than `MAX_TENSORS` tensors.
    """
    with _AllocationLimit(stored + SPARE_ELEMENTS):
        yield


def _count_elements(
    func: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]
) -> int:
    """Return the number of elements that a torch factory call allocates."""
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
