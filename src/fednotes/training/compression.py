"""Updates made smaller that still add.

A sum over sites is all that a server ever sees, so sites must agree on a code before
they send; each keeps its change until the code is agreed on:

    "packed"  told: mean squares of each tensor.   agreed: one step size for each tensor
    "top-k"   told: mean square of each block.     agreed: the blocks with the largest sums

"packed" rounds to whole steps and lays several numbers, as digits, into each integer of
eight bytes, which is what the masks of a secure sum make of any number. Digits must not
carry when sites are added: a site weighs its change before it rounds, so that the sum
of K sites' weights is K.

What a site could not send is added to its next change: error feedback (Seide et al.
2014; Karimireddy et al. 2019). Blocks of `BLOCK` neighbours in place of single numbers,
chosen by the sum and not by each site: no indices travel upwards, and the values add
under a secure sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from fednotes.core.errors import RefusedError, TrainingError
from fednotes.core.tensors import nbytes
from fednotes.core.update import Tensors, Total
from fednotes.training.sites import rising

Compression = Literal["none", "packed", "top-k"]
BLOCK = 64
LEVELS = 12  # steps that a change of mean weight may have, either sign
# standard deviations that they span; what lies beyond waits for its next turn
RANGE = 4.0
EXACT = 2**52  # float64, in which sums are formed, counts that far


def told(change: Tensors, compression: Compression) -> dict[str, Tensor]:
    """What a site says of its change: mean squares, (1,) or (blocks,) a tensor."""
    return {
        name: _rows(value, compression).square().mean(1)
        for name, value in change.items()
    }


def told_shapes(like: Tensors, compression: Compression) -> dict[str, tuple[int, ...]]:
    """Return the shapes of what `told` gives for changes of these tensors."""
    return {name: (len(_rows(value, compression)),) for name, value in like.items()}


def sent_shapes(
    code: Tensors, like: Tensors, compression: Compression, sites: int
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of what `encode` sends of changes of these tensors."""
    if compression != "packed":
        return {name: (len(chosen), BLOCK) for name, chosen in code.items()}
    _, digits = _base(sites)
    return {name: (-(-value.numel() // digits),) for name, value in like.items()}


def agreed(means: Tensors, compression: Compression, share: float) -> dict[str, Tensor]:
    """The code, from the weighted means of what sites told.

    packed: the step size of each tensor, (1,). top-k: the chosen blocks of each tensor,
    int32 in ascending order, together the `share` of all blocks with the largest means
    (one at least).
    """
    if compression == "packed":
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


def sizes(
    tensors: Tensors, compression: Compression, share: float, sites: int
) -> tuple[int, int]:
    """Bytes of a cycle: what a site sends, told and coded, and is sent beside the
    parameters."""
    if compression == "none":
        return nbytes(tensors), 0
    if compression == "packed":
        _, digits = _base(max(1, sites))
        words = sum(-(-value.numel() // digits) for value in tensors.values())
        return 8 * words + 4 * len(tensors), 4 * len(tensors)
    blocks = sum(len(_rows(value, compression)) for value in tensors.values())
    chosen = max(1, round(share * blocks))
    return 4 * blocks + 4 * BLOCK * chosen, 4 * chosen


def require_code(
    code: Tensors, change: Tensors, compression: Compression, share: float
) -> None:
    """Pass a code that `agreed` can have given for this change. Raises RefusedError."""
    parts = {name: len(_rows(value, compression)) for name, value in change.items()}
    dtype = torch.float32 if compression == "packed" else torch.int32
    right = code.keys() == parts.keys() and all(
        value.dtype is dtype and value.dim() == 1 for value in code.values()
    )
    if right and compression == "packed":
        right = all(
            len(step) == 1 and 0 <= float(step) < math.inf for step in code.values()
        )
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
    change: Tensors,
    code: Tensors,
    compression: Compression,
    part: float = 1.0,
    sites: int = 1,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A change in the agreed code, and what of it is left for the next time.

    part: the site's weight, of which all `sites` together have `sites`. Returns int64
    (words,), or float32 (chosen blocks, `BLOCK`); and float32 of the tensors' shapes.
    """
    sent, left = {}, {}
    for name, value in change.items():
        if compression == "packed":
            step, most = code[name].to(value.device), math.ceil(LEVELS * part)
            levels = torch.where(step > 0, part * value / step, torch.zeros_like(value))
            levels = levels.round().clamp(-most, most)
            sent[name] = _packed(levels.flatten().long().cpu(), sites)
            left[name] = value - levels * step / part if part else value
        else:
            blocks, chosen = (
                _rows(value, compression),
                code[name].long().to(value.device),
            )
            sent[name] = blocks[chosen].cpu()
            blocks = blocks.index_fill(0, chosen, 0.0)
            left[name] = blocks.flatten()[: value.numel()].reshape(value.shape)
    return sent, left


def opened(total: Total, like: Tensors, compression: Compression, sites: int) -> Total:
    """The sum of what sites sent, its digits told apart. sites: that it was coded for.

    Raises TrainingError where another site is in it, so that digits may have carried.
    """
    if compression != "packed":
        return total
    if total.metric("part") > sites * (1 + 1e-9):
        raise TrainingError("a site sent a change in a code that it had no part in")
    found = dict(total.tensors)
    for name, value in like.items():
        found[name] = _digits(found[name], value.numel(), sites).reshape(value.shape)
    return replace(total, tensors=found, weight=total.metric("part"))


def decode(
    means: Tensors, code: Tensors, like: Mapping[str, Tensor], compression: Compression
) -> dict[str, Tensor]:
    """The mean change, from the weighted means of what sites sent; float32 as `like`."""
    found = {}
    for name, value in like.items():
        if compression == "packed":
            found[name] = means[name] * code[name]
        else:
            blocks = torch.zeros_like(_rows(value, compression))
            blocks[code[name].long()] = means[name]
            found[name] = blocks.flatten()[: value.numel()].reshape(value.shape)
    return found


def _base(sites: int) -> tuple[int, int]:
    """How many values a sum of digits can have, zero in the middle, and digits in a
    word.

    A site's digit is at most `LEVELS` times its weight, rounded up.
    """
    base = 2 * (LEVELS + 1) * sites + 1
    digits = 1
    while base ** (digits + 1) <= EXACT:
        digits += 1
    return base, digits


def _packed(levels: Tensor, sites: int) -> Tensor:
    """(numbers,) → (words,) int64, Σ level_j base^j of neighbours j."""
    base, digits = _base(sites)
    rows = torch.nn.functional.pad(levels, (0, -len(levels) % digits)).view(-1, digits)
    return (rows * torch.tensor([base**j for j in range(digits)])).sum(1)


def _digits(words: Tensor, numbers: int, sites: int) -> Tensor:
    """(words,) a sum of words → (numbers,) float64, the sums of digits."""
    (base, digits), rest, found = _base(sites), words.round().long(), []
    for _ in range(digits):
        digit = (rest + base // 2) % base - base // 2
        rest = (rest - digit) // base
        found.append(digit)
    return torch.stack(found, 1).flatten()[:numbers].double()


def _rows(value: Tensor, compression: Compression) -> Tensor:
    """(1, numbers); or (blocks, BLOCK), the last one filled with zeros."""
    flat = value.flatten()
    if compression == "packed":
        return flat[None]
    return torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
