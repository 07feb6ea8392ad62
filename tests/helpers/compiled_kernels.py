"""Compiles every kernel of the core when it is imported, or loads it from the cache.

A process that forks others imports this first. Otherwise each of these would compile
the kernels anew until one of them lives long enough to save them.
"""

from __future__ import annotations

import fednotes.taggers.crf_kernels
import fednotes.taggers.layers
import fednotes.training.row_adam  # noqa: F401
from fednotes.core.kernels import compile_kernels

compile_kernels()
