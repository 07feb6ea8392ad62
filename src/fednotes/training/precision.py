"""The precision of matrix products in training.

Parameters, optimizers and sums stay in float32; with "bfloat16", the operands of matrix
products are rounded to bfloat16 (8 significant bits).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Literal

import torch

from fednotes.core.errors import ConfigError

# "auto" is "bfloat16" where the processor has instructions for it, else "float32".
Precision = Literal["float32", "bfloat16", "auto"]


def setting_precision(
    precision: Precision, device: torch.device
) -> AbstractContextManager[None]:
    """Return a context that sets the precision of matrix products."""
    is_lower = precision == "bfloat16" or (precision == "auto" and has_bfloat16(device))
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=is_lower)


def has_bfloat16(device: torch.device) -> bool:
    """Return whether bfloat16 matrix products run natively, not emulated."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    get_capabilities = getattr(torch.cpu, "get_capabilities", None)  # not in torch 2.6
    if get_capabilities is None:
        return False
    capabilities = get_capabilities()
    return bool(capabilities.get("amx_bf16") or capabilities.get("avx512_bf16"))


def list_precision_warnings(precision: str, device: torch.device) -> tuple[str, ...]:
    """Return a warning if bfloat16 is chosen where a processor has to emulate it.

    Args:
        precision: The precision that the job sets; "" if it sets none.
        device: The device that trains.
    """
    if precision != "bfloat16" or has_bfloat16(device):
        return ()
    return (
        'precision = "bfloat16" is slower than float32 here, because this processor '
        'has no instructions for it: set it to "auto" to use bfloat16 only where it '
        "is faster",
    )


def require_float32(precision: Precision) -> None:
    """Check that a run with differential privacy has no lower precision.

    Raises:
        ConfigError: The precision is lower. The gradients of single units are computed
            in float32.
    """
    if precision != "float32":
        raise ConfigError(
            f'precision = "{precision}" does not work with [privacy], which computes '
            "the gradients of single units in float32: remove precision, or set it to "
            '"float32"'
        )
