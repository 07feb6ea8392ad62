"""How numba compiles this package's kernels: nopython, without the GIL, ahead of the first call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}

# Parts of kernels. They must stand in the file of the kernel that calls them: numba's cache
# looks at that file alone to see what changed. `contract` allows a fused multiply-add;
# `reassoc` lets a sum run in vector lanes (in an order that depends on the length alone).
part = numba.njit(fastmath={"contract"}, **_OPTIONS)
reduction = numba.njit(fastmath={"contract", "reassoc"}, **_OPTIONS)


def kernel(*signatures: str, fused: bool = True) -> Callable[[Callable[..., Any]], Any]:
    """Compile now for these signatures, or load what an earlier process compiled.

    fused: a product and the sum after it may round once; False keeps NumPy's bits.
    numba caches beside the source file, or in the user's cache directory where that is
    read-only; where neither can be written (or the disk is full) nothing is cached.
    """

    def compiled(function: Callable[..., Any]) -> Any:
        options = _OPTIONS | ({"fastmath": {"contract"}} if fused else {})
        try:
            return numba.njit([*signatures], cache=True, **options)(function)
        except (RuntimeError, OSError):
            return numba.njit([*signatures], **options)(function)

    return compiled
