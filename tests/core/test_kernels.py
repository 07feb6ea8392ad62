"""When kernels are compiled, and for which types."""

from __future__ import annotations

from unittest import mock

import numpy as np

from fednotes.core import kernels
from fednotes.core.kernels import Kernel


def _double(values, out):  # type: ignore[no-untyped-def]
    for i in range(values.size):
        out[i] = 2.0 * values[i]


def test_a_kernel_is_compiled_only_for_the_type_with_which_it_is_called() -> None:
    decorate = kernels.kernel_by_type(
        "void(f4[::1], f8[::1])", "void(f8[::1], f8[::1])"
    )
    double = decorate(_double)
    compiled_signatures = []

    def compile_without_cache(kernel: Kernel) -> object:
        compiled_signatures.extend(kernel._signatures)
        return kernels.numba.njit([*kernel._signatures])(_double)

    with mock.patch.object(Kernel, "compile", compile_without_cache):
        for dtype, signature in (
            (np.float64, "void(f8[::1], f8[::1])"),
            (np.float32, "void(f4[::1], f8[::1])"),
        ):
            out = np.zeros(3)
            compiled_signatures.clear()
            double(np.array([1, 2, 3], dtype), out)
            assert out.tolist() == [2.0, 4.0, 6.0]
            assert compiled_signatures == [signature]


def test_all_kernels_can_be_compiled_in_advance() -> None:
    with (
        mock.patch.object(kernels, "_kernels", []),
        mock.patch.object(Kernel, "compile", autospec=True) as compiled,
    ):
        decorate = kernels.kernel_by_type("void(f4[::1])", "void(f8[::1])")
        decorate(_double)
        kernels.kernel("void(i8[::1])")(_double)
        kernels.compile_kernels()
    signatures = [kernel._signatures for ((kernel,), _) in compiled.call_args_list]
    assert signatures == [("void(f4[::1])",), ("void(f8[::1])",), ("void(i8[::1])",)]
