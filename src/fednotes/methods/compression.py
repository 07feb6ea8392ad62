"""Updates made smaller that still add.

A sum over sites is all that a server ever sees,
so sites must agree on a code before they send; each keeps its change until the code is agreed on:

    "int8"    told: mean squares of each tensor.   agreed: one step size for each tensor
    "top-k"   told: mean square of each block.     agreed: the blocks with the largest sums

The masks of a secure sum make eight bytes of every number: there "int8" sends no less than "none".

What a site could not send is added to its next change: error feedback (Seide et al. 2014;
Karimireddy et al. 2019). Blocks of `BLOCK` neighbours in place of single numbers, chosen by
the sum and not by each site: no indices travel upwards, and the values add under a secure sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from fednotes.core.errors import RefusedError
from fednotes.core.tensors import nbytes
from fednotes.core.update import Tensors
from fednotes.methods.sites import rising

Compression = Literal["none", "int8", "top-k"]
BLOCK = 64
LEVELS = 127
RANGE = 4.0  # standard deviations that eight bits span; what lies beyond waits for its next turn


def told(change: Tensors, compression: Compression) -> dict[str, Tensor]:
    """What a site says of its change: mean squares, (1,) or (blocks,) a tensor."""
    return {name: _rows(value, compression).square().mean(1) for name, value in change.items()}


def agreed(means: Tensors, compression: Compression, share: float) -> dict[str, Tensor]:
    """The code, from the weighted means of what sites told.

    int8: the step size of each tensor, (1,). top-k: the chosen blocks of each tensor, int32 in
    ascending order, together the `share` of all blocks with the largest means (one at least).
    """
    if compression == "int8":
        return {name: RANGE / LEVELS * mean.sqrt() for name, mean in means.items()}
    names = list(means)
    everything = torch.cat([means[name] for name in names])
    count = max(1, round(share * len(everything)))
    chosen = torch.zeros(len(everything), dtype=torch.bool)
    chosen[everything.argsort(descending=True, stable=True)[:count]] = True
    parts = chosen.split([len(means[name]) for name in names])
    return {
        name: part.nonzero().flatten().to(torch.int32)
        for name, part in zip(names, parts, strict=True)
    }


def sizes(tensors: Tensors, compression: Compression, share: float) -> tuple[int, int]:
    """Bytes of a cycle: what a site sends, told and coded, and is sent beside the parameters."""
    if compression == "none":
        return nbytes(tensors), 0
    if compression == "int8":
        return sum(value.numel() for value in tensors.values()) + 4 * len(tensors), 4 * len(tensors)
    blocks = sum(len(_rows(value, compression)) for value in tensors.values())
    chosen = max(1, round(share * blocks))
    return 4 * blocks + 4 * BLOCK * chosen, 4 * chosen


def require_code(code: Tensors, change: Tensors, compression: Compression, share: float) -> None:
    """Pass a code that `agreed` can have given for this change. Raises RefusedError."""
    parts = {name: len(_rows(value, compression)) for name, value in change.items()}
    dtype = torch.float32 if compression == "int8" else torch.int32
    right = code.keys() == parts.keys() and all(
        value.dtype is dtype and value.dim() == 1 for value in code.values()
    )
    if right and compression == "int8":
        right = all(len(step) == 1 and 0 <= float(step) < math.inf for step in code.values())
    elif right:
        wanted = max(1, round(share * sum(parts.values())))
        right = sum(map(len, code.values())) == wanted and all(
            rising(chosen, parts[name]) for name, chosen in code.items()
        )
    if not right:
        raise RefusedError(
            "the code for the changes is none of this job: a step size for each tensor, or the "
            "job's share of all blocks, each once and in order"
        )


def encode(
    change: Tensors, code: Tensors, compression: Compression
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A change in the agreed code, and what of it is left for the next time.

    Returns int8 of the tensor's shape, or float32 (chosen blocks, `BLOCK`); and float32 of the
    tensors' shapes. change = decode(sent) + left, up to rounding.
    """
    sent, left = {}, {}
    for name, value in change.items():
        if compression == "int8":
            step = code[name].to(value.device)
            levels = torch.where(step > 0, value / step, torch.zeros_like(value))
            sent[name] = levels.round().clamp(-LEVELS, LEVELS).to(torch.int8).cpu()
            left[name] = value - sent[name].to(value.device) * step
        else:
            blocks, chosen = _rows(value, compression), code[name].long().to(value.device)
            sent[name] = blocks[chosen].cpu()
            blocks = blocks.index_fill(0, chosen, 0.0)
            left[name] = blocks.flatten()[: value.numel()].reshape(value.shape)
    return sent, left


def decode(
    means: Tensors, code: Tensors, like: Mapping[str, Tensor], compression: Compression
) -> dict[str, Tensor]:
    """The mean change, from the weighted means of what sites sent; float32 as `like`."""
    found = {}
    for name, value in like.items():
        if compression == "int8":
            found[name] = means[name] * code[name]
        else:
            blocks = torch.zeros_like(_rows(value, compression))
            blocks[code[name].long()] = means[name]
            found[name] = blocks.flatten()[: value.numel()].reshape(value.shape)
    return found


def _rows(value: Tensor, compression: Compression) -> Tensor:
    """(1, numbers); or (blocks, BLOCK), the last one filled with zeros."""
    flat = value.flatten()
    if compression == "int8":
        return flat[None]
    return torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
