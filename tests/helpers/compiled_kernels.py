"""Compiles every kernel of the core when it is imported, or loads it from the cache.

A process that forks others imports this first. Otherwise each of these would compile
the kernels anew until one of them lives long enough to save them.
"""

from __future__ import annotations

from fednotes.core import kernels
from fednotes.core.kernels import Kernel, KernelByType
from fednotes.taggers import crf_kernels, layers
from fednotes.training import row_adam

for module in (kernels, crf_kernels, layers, row_adam):
    for value in [*vars(module).values()]:
        if isinstance(value, Kernel | KernelByType):
            value.compile()
