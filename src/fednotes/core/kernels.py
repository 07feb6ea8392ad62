"""Compiled kernels: weighted sums in float64, dropout, and their compilation by numba.

A weighted sum of float32 values takes one pass over memory. Torch would make a float64
copy of each summand, which takes about twice as long. Each step is one IEEE product,
sum or quotient, so the results equal NumPy's bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numba
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
Singles = NDArray[np.float32]
Ints = NDArray[np.int64]

_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}

# Decorators for functions that kernels call. Such a function must be defined in its
# kernel's file, because numba's cache only checks whether that file has changed.
# "contract" permits fused multiply-add; "reassoc" permits vectorised sums, in an order
# that depends only on the length.
part = numba.njit(fastmath={"contract"}, **_OPTIONS)
reduction = numba.njit(fastmath={"contract", "reassoc"}, **_OPTIONS)


_kernels: list[Kernel] = []  # of all modules that this process has imported


def compile_kernels() -> None:
    """Compile all kernels of the imported modules, or load them from the cache.

    A process whose answer times others observe or wait for should call this before it
    answers the first request. Compiling all kernels may take half a minute, but only
    after an installation.
    """
    for each in _kernels:
        each.compile()


class Kernel:
    """A function that is compiled or loaded from a cache on its first call.

    Commands that do not call it do not wait for the compiler.

    Args:
        function: The Python function.
        signatures: numba signatures of the argument types to compile for.
        options: Options of `numba.njit`.
    """

    def __init__(
        self, function: Callable[..., Any], signatures: Sequence[str], **options: Any
    ) -> None:
        self._function = function
        self._signatures = signatures
        self._options = options
        self._compiled: Callable[..., Any] | None = None
        _kernels.append(self)

    def compile(self) -> Callable[..., Any]:
        """Compile the function, or load it from the cache, once; return it.

        numba caches next to the source file, or in the user's cache directory if the
        source folder is read-only. If neither is writable, nothing is cached.
        """
        if self._compiled is None:
            self._compile_callees()
            try:
                compile_cached = numba.njit(
                    [*self._signatures], cache=True, **self._options
                )
                self._compiled = compile_cached(self._function)
            except (RuntimeError, OSError):
                compile_only = numba.njit([*self._signatures], **self._options)
                self._compiled = compile_only(self._function)
        compiled: Callable[..., Any] = self._compiled
        return compiled

    def _compile_callees(self) -> None:
        """Replace the kernels that this one calls by their compiled functions.

        numba can compile a call only to a function that it has compiled itself.
        """
        names = self._function.__globals__
        for name in self._function.__code__.co_names:
            if isinstance(names.get(name), Kernel):
                names[name] = names[name].compile()

    def __call__(self, *args: Any) -> Any:
        """Call the compiled function."""
        return self.compile()(*args)


def kernel(
    *signatures: str, fused: bool = True
) -> Callable[[Callable[..., Any]], Kernel]:
    """Return a decorator that makes a function a `Kernel`.

    Args:
        signatures: numba signatures of the argument types to compile for.
        fused: Whether a product and a following sum may be rounded only once (fused
            multiply-add); False gives the same bits as NumPy.
    """
    options = dict(_OPTIONS)
    if fused:
        options["fastmath"] = {"contract"}
    return lambda function: Kernel(function, signatures, **options)


class KernelByType:
    """A kernel for float32 and float64, each compiled when it is first called.

    Most programs call only one of them, and compiling takes seconds.

    Args:
        kernels: The kernel for each type of the first argument.
    """

    def __init__(self, kernels: Mapping[np.dtype[Any], Kernel]) -> None:
        self._kernels = kernels

    def __call__(self, first: Floats | Singles, *args: Any) -> Any:
        """Call the function that is compiled for the type of the first argument."""
        return self._kernels[first.dtype](first, *args)


def kernel_by_type(
    single: str, double: str
) -> Callable[[Callable[..., Any]], KernelByType]:
    """Return a decorator that makes a function a `KernelByType`.

    Args:
        single: numba signature of the argument types whose first is a float32 array.
        double: The same with a float64 array.
    """
    decorators: dict[np.dtype[Any], Callable[[Callable[..., Any]], Kernel]] = {
        np.dtype(np.float32): kernel(single),
        np.dtype(np.float64): kernel(double),
    }
    return lambda function: KernelByType(
        {dtype: decorate(function) for dtype, decorate in decorators.items()}
    )


BLOCK = 2**15  # elements per block, so that a block stays in the cache


def sum_weighted(
    values: Sequence[Tensor], weights: Sequence[float], start: Tensor | None = None
) -> Tensor:
    """Return Σ weight · value in float64, added in the given order.

    Args:
        values: Tensors of the same shape.
        weights: One weight for each tensor.
        start: An earlier sum, to which they are added; it is changed in place.
    """
    if not all(map(_is_plain, values)):
        return _sum_by_torch(values, weights, start)
    is_new = start is None
    total = start
    if total is None:
        total = torch.empty_like(values[0], dtype=torch.float64)
    sums = total.view(-1).numpy()
    arrays = [value.view(-1).numpy() for value in values]
    for begin in range(0, sums.size, BLOCK):
        part = slice(begin, begin + BLOCK)
        for index, (array, weight) in enumerate(zip(arrays, weights, strict=True)):
            put = _multiply if is_new and index == 0 else _add
            put(sums[part], array[part], weight)
    return total


def _sum_by_torch(
    values: Sequence[Tensor], weights: Sequence[float], total: Tensor | None
) -> Tensor:
    """Return the sum of `sum_weighted` for values that its kernels cannot read."""
    for value, weight in zip(values, weights, strict=True):
        if total is None:
            total = value.to(torch.float64) * weight
        else:
            total += value.to(torch.float64) * weight
    assert total is not None
    return total


def divide(total: Tensor, weight: float, dtype: torch.dtype) -> Tensor:
    """Return total / weight, cast once to `dtype`."""
    if dtype is not torch.float32 or not _is_plain(total):
        return (total / weight).to(dtype)
    result = torch.empty_like(total, dtype=dtype)
    _divide(result.view(-1).numpy(), total.view(-1).numpy(), weight)
    return result


def _is_plain(value: Tensor) -> bool:
    """Return whether the kernels can read a tensor: contiguous floats on the CPU."""
    is_float = value.dtype in (torch.float32, torch.float64)
    return is_float and value.is_cpu and value.is_contiguous()


@kernel("void(f8[::1], f4[::1], f8)", "void(f8[::1], f8[::1], f8)", fused=False)
def _multiply(product: Floats, value: Singles | Floats, weight: float) -> None:
    """Set product = value · weight."""
    for i in range(value.size):
        product[i] = np.float64(value[i]) * weight


@kernel("void(f8[::1], f4[::1], f8)", "void(f8[::1], f8[::1], f8)", fused=False)
def _add(total: Floats, value: Singles | Floats, weight: float) -> None:
    """Add value · weight to total."""
    for i in range(value.size):
        total[i] += np.float64(value[i]) * weight


@kernel("void(f4[::1], f8[::1], f8)", fused=False)
def _divide(result: Singles, total: Floats, weight: float) -> None:
    """Set result = total / weight."""
    for i in range(total.size):
        result[i] = total[i] / weight


def dropout(x: Tensor, rate: float, training: bool) -> Tensor:  # noqa: FBT001 - as torch
    """Set each value to zero with probability `rate`; scale others to keep the mean.

    On the CPU, a seed is drawn from torch's global generator and expanded by a compiled
    counter-based generator. This is eight times as fast as `F.dropout` and also
    reproducible with `torch.manual_seed`.

    Args:
        x: Values of any shape.
        rate: The probability, rounded to 16 bits.
        training: Whether to drop values at all.
    """
    if not training or rate == 0.0:
        return x
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return F.dropout(x, rate)
    seed = int(torch.empty((), dtype=torch.int64).random_())
    return cast(Tensor, _Dropout.apply(x, rate, seed))  # type: ignore[no-untyped-call]


class _Dropout(torch.autograd.Function):
    """Dropout and its derivative, which share one mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float, seed: int) -> Tensor:
        x = x.detach().contiguous()
        out = torch.empty_like(x)
        mask = torch.empty_like(x)
        limit = round(rate * 65536)
        scale = np.float32(65536.0 / (65536 - limit))
        flat = (x.view(-1).numpy(), out.view(-1).numpy(), mask.view(-1).numpy())
        _drop(*flat, np.uint64(limit), scale, np.uint64(seed))
        ctx.save_for_backward(mask)  # 0, or 1 / (1 - rate)
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
    """Drop values by SplitMix64 (Steele et al. 2014) of a counter.

    Each 64-bit random number decides four values.
    """
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
