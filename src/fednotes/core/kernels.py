"""Weighted sums in float64 of float32 values, in one pass over memory; and dropout.

Torch makes a float64 copy of each summand and takes about twice as long, which showed
in every round. Each step is one IEEE product, sum or quotient, so the bits are NumPy's.

How numba compiles this package's kernels: nopython, without the GIL, ahead of the first
call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numba
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}

# Parts of kernels. They must stand in the file of the kernel that calls them: numba's
# cache looks at that file alone to see what changed. `contract` allows a fused
# multiply-add; `reassoc` lets a sum run in vector lanes (in an order that depends on
# the length alone).
part = numba.njit(fastmath={"contract"}, **_OPTIONS)
reduction = numba.njit(fastmath={"contract", "reassoc"}, **_OPTIONS)


class Kernel:
    """A function that is compiled, or loaded, when it is first called: a command that
    does not call it does not wait for it."""

    def __init__(
        self, function: Callable[..., Any], signatures: Sequence[str], **options: Any
    ):
        self._function, self._signatures, self._options = function, signatures, options
        self._made: Callable[..., Any] | None = None

    def compiled(self) -> Callable[..., Any]:
        """numba caches beside the source file, or in the user's cache directory where
        that is read-only; where neither can be written (or the disk is full) nothing is
        cached."""
        if self._made is None:
            names = self._function.__globals__
            # a kernel that this one calls
            for name in self._function.__code__.co_names:
                if isinstance(names.get(name), Kernel):
                    names[name] = names[name].compiled()
            try:
                make = numba.njit([*self._signatures], cache=True, **self._options)
                self._made = make(self._function)
            except (RuntimeError, OSError):
                self._made = numba.njit([*self._signatures], **self._options)(
                    self._function
                )
        made: Callable[..., Any] = self._made
        return made

    def __call__(self, *given: Any) -> Any:
        return self.compiled()(*given)


def kernel(
    *signatures: str, fused: bool = True
) -> Callable[[Callable[..., Any]], Kernel]:
    """Compile for these signatures, at the first call, or load what an earlier process
    compiled.

    fused: a product and the sum after it may round once; False keeps NumPy's bits.
    """
    options = _OPTIONS | ({"fastmath": {"contract"}} if fused else {})
    return lambda function: Kernel(function, signatures, **options)


BLOCK = 2**15  # numbers of a sum that stay in the cache while every summand is added

Singles = NDArray[np.float32]


def weighted_sum(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Σ weight · value in float64, added in the order given. All of one shape."""
    if not all(map(_simple, values)):
        total = values[0].to(torch.float64) * weights[0]
        for value, weight in zip(values[1:], weights[1:], strict=True):
            total += value.to(torch.float64) * weight
        return total
    total = torch.empty_like(values[0], dtype=torch.float64)
    sums = total.view(-1).numpy()
    arrays = [value.view(-1).numpy() for value in values]
    for start in range(0, sums.size, BLOCK):
        part = slice(start, start + BLOCK)
        _times(sums[part], arrays[0][part], weights[0])
        for array, weight in zip(arrays[1:], weights[1:], strict=True):
            _add(sums[part], array[part], weight)
    return total


def quotient(total: Tensor, weight: float, dtype: torch.dtype) -> Tensor:
    """total / weight, cast once."""
    if dtype is not torch.float32 or not _simple(total):
        return (total / weight).to(dtype)
    result = torch.empty_like(total, dtype=dtype)
    _divide(result.view(-1).numpy(), total.view(-1).numpy(), weight)
    return result


def _simple(value: Tensor) -> bool:
    wanted = value.dtype in (torch.float32, torch.float64)
    return wanted and value.is_cpu and value.is_contiguous()


@kernel("void(f8[::1], f4[::1], f8)", "void(f8[::1], f8[::1], f8)", fused=False)
def _times(product: Floats, value: Singles | Floats, weight: float) -> None:
    for i in range(value.size):
        product[i] = np.float64(value[i]) * weight


@kernel("void(f8[::1], f4[::1], f8)", "void(f8[::1], f8[::1], f8)", fused=False)
def _add(total: Floats, value: Singles | Floats, weight: float) -> None:
    for i in range(value.size):
        total[i] += np.float64(value[i]) * weight


@kernel("void(f4[::1], f8[::1], f8)", fused=False)
def _divide(result: Singles, total: Floats, weight: float) -> None:
    for i in range(total.size):
        result[i] = total[i] / weight


def dropout(x: Tensor, rate: float, training: bool) -> Tensor:
    """Each value zero with probability `rate` (to 16 bits), else scaled to keep the
    mean.

    On CPU a seed is drawn from torch's global generator and expanded by a compiled
    counter
    generator: eight times as fast as F.dropout there, and replayed by torch.manual_seed
        too.
    """
    if not training or rate == 0.0:
        return x
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return F.dropout(x, rate)
    seed = int(torch.empty((), dtype=torch.int64).random_())
    return cast(Tensor, _Dropout.apply(x, rate, seed))  # type: ignore[no-untyped-call]


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float, seed: int) -> Tensor:
        x = x.detach().contiguous()
        out, mask = torch.empty_like(x), torch.empty_like(x)
        limit = round(rate * 65536)
        scale = np.float32(65536.0 / (65536 - limit))
        flat = (x.view(-1).numpy(), out.view(-1).numpy(), mask.view(-1).numpy())
        _drop(*flat, np.uint64(limit), scale, np.uint64(seed))
        ctx.save_for_backward(mask)  # 0 or 1 / kept
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] * ctx.saved_tensors[0], None, None


@kernel("void(f4[::1], f4[::1], f4[::1], u8, f4, u8)")
def _drop(
    x: Singles,
    out: Singles,
    mask: Singles,
    limit: np.uint64,
    scale: np.float32,
    seed: np.uint64,
) -> None:
    """SplitMix64 (Steele et al. 2014) of a counter; each 64-bit number serves four
    values."""
    n = x.shape[0]
    zero = np.float32(0.0)
    quarter = (n + 3) // 4
    low = np.uint64(0xFFFF)
    for j in range(quarter):
        z = seed + np.uint64(j + 1) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
        for part in range(4):
            i = part * quarter + j
            if i < n:
                m = scale if ((z >> np.uint64(16 * part)) & low) >= limit else zero
                mask[i] = m
                out[i] = x[i] * m
