"""Updates made smaller that still add.

A server only ever sees a sum over sites, so sites must agree on a code before they
send. Each site keeps its change until the code is agreed on:

    code       what sites measure            what is agreed
    "packed"   mean square of each tensor    one step size for each tensor
    "top-k"    mean square of each block     the blocks with the largest sums

"packed" rounds to whole steps, and packs several numbers as digits into each integer of
eight bytes, which is the size that a secure sum gives any number. Digits must not carry
when sites are added: a site weighs its change before it rounds, so that the weights of
K sites sum to K.

What a site could not send is added to its next change: error feedback (Seide et al.
2014; Karimireddy et al. 2019). "top-k" chooses blocks of `BLOCK` neighbours in place of
single numbers, by the sum and not by each site. So no indices travel upwards, and the
values add under a secure sum.
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
LEVELS = 12  # steps that a change of mean weight may have, in either direction
# Standard deviations that these steps span; what lies beyond is sent the next time.
RANGE = 4.0
EXACT = 2**52  # float64, in which sums are formed, is exact up to here
WORD_BYTES = 8
FLOAT_BYTES = 4


# A cycle: sites measure, a code is agreed on, sites encode, the server decodes.


def measure_changes(change: Tensors, compression: Compression) -> dict[str, Tensor]:
    """Return the mean squares that a site reports of its change.

    Returns:
        (1,) for each tensor with "packed", (blocks,) with "top-k".
    """
    return {
        name: _rows(value, compression).square().mean(1)
        for name, value in change.items()
    }


def measured_shapes(
    like: Tensors, compression: Compression
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of what `measure_changes` returns for such tensors."""
    return {name: (len(_rows(value, compression)),) for name, value in like.items()}


def agree_on_code(
    means: Tensors, compression: Compression, share: float
) -> dict[str, Tensor]:
    """Return the code that follows from the weighted means of what sites measured.

    Args:
        means: The means, by name.
        compression: "packed" or "top-k".
        share: With "top-k", the part of all blocks that is sent.

    Returns:
        With "packed", the step size of each tensor, (1,). With "top-k", the chosen
        blocks of each tensor, (n,) int32 in ascending order: together the `share` of
        all blocks that has the largest means, at least one.
    """
    if compression == "packed":
        return {name: RANGE / LEVELS * mean.sqrt() for name, mean in means.items()}

    all_means = torch.cat(list(means.values()))
    count = max(1, round(share * len(all_means)))
    largest = all_means.argsort(descending=True, stable=True)[:count]
    is_chosen = torch.zeros(len(all_means), dtype=torch.bool)
    is_chosen[largest] = True
    by_tensor = is_chosen.split([len(mean) for mean in means.values()])
    return {
        name: chosen.nonzero().flatten().to(torch.int32)
        for name, chosen in zip(means, by_tensor, strict=True)
    }


def require_code(
    code: Tensors, change: Tensors, compression: Compression, share: float
) -> None:
    """Check that `agree_on_code` can have returned a code for this change.

    Raises:
        RefusedError: It cannot.
    """
    blocks = {name: len(_rows(value, compression)) for name, value in change.items()}
    if not _is_code(code, blocks, compression, share):
        raise RefusedError(
            "the received code does not match this job: expected a step size for each "
            "tensor, or the job's share of all blocks, each once and in order"
        )


def _is_code(
    code: Tensors, blocks: Mapping[str, int], compression: Compression, share: float
) -> bool:
    if code.keys() != blocks.keys():
        return False
    dtype = torch.float32 if compression == "packed" else torch.int32
    if any(value.dtype is not dtype or value.dim() != 1 for value in code.values()):
        return False
    if compression == "packed":
        return all(
            len(step) == 1 and 0 <= float(step) < math.inf for step in code.values()
        )
    expected = max(1, round(share * sum(blocks.values())))
    return sum(map(len, code.values())) == expected and all(
        rising(chosen, blocks[name]) for name, chosen in code.items()
    )


def encode(
    change: Tensors,
    code: Tensors,
    compression: Compression,
    part: float = 1.0,
    sites: int = 1,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return a change in the agreed code, and what of it is left for the next time.

    Args:
        change: The change, by name.
        code: What `agree_on_code` returned.
        compression: "packed" or "top-k".
        part: The site's weight; the weights of all sites sum to `sites`.
        sites: Number of sites in the sum.

    Returns:
        What is sent: (words,) int64, or (chosen blocks, `BLOCK`) float32. And what is
        left, float32 of the tensors' shapes.
    """
    sent, left = {}, {}
    for name, value in change.items():
        if compression == "packed":
            step = code[name].to(value.device)
            largest = math.ceil(LEVELS * part)
            levels = torch.where(step > 0, part * value / step, torch.zeros_like(value))
            levels = levels.round().clamp(-largest, largest)
            sent[name] = _pack(levels.flatten().long().cpu(), sites)
            left[name] = value - levels * step / part if part else value
        else:
            blocks = _rows(value, compression)
            chosen = code[name].long().to(value.device)
            sent[name] = blocks[chosen].cpu()
            unsent = blocks.index_fill(0, chosen, 0.0)
            left[name] = _from_blocks(unsent, value)
    return sent, left


def encoded_shapes(
    code: Tensors, like: Tensors, compression: Compression, sites: int
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of what `encode` sends of changes of such tensors."""
    if compression != "packed":
        return {name: (len(chosen), BLOCK) for name, chosen in code.items()}
    _, digits = _digits_of_word(sites)
    return {name: (_words(value, digits),) for name, value in like.items()}


def unpack_total(
    total: Total, like: Tensors, compression: Compression, sites: int
) -> Total:
    """Return the sum of what sites sent, with its digits separated.

    Args:
        total: The sum.
        like: Tensors of the shapes of the change.
        compression: "packed" or "top-k", which needs no unpacking.
        sites: Number of sites that the sum was encoded for.

    Raises:
        TrainingError: Another site is in the sum, so digits may have carried.
    """
    if compression != "packed":
        return total
    if total.metric("part") > sites * (1 + 1e-9):
        raise TrainingError("a site sent a change in a code that it had no part in")
    tensors = dict(total.tensors)
    for name, value in like.items():
        numbers = _unpack(tensors[name], value.numel(), sites)
        tensors[name] = numbers.reshape(value.shape)
    return replace(total, tensors=tensors, weight=total.metric("part"))


def decode(
    means: Tensors, code: Tensors, like: Mapping[str, Tensor], compression: Compression
) -> dict[str, Tensor]:
    """Return the mean change, from the weighted means of what sites sent.

    Args:
        means: The means, by name.
        code: What `agree_on_code` returned.
        like: Tensors of the shapes of the change.
        compression: "packed" or "top-k".
    """
    change = {}
    for name, value in like.items():
        if compression == "packed":
            change[name] = means[name] * code[name]
        else:
            blocks = torch.zeros_like(_rows(value, compression))
            blocks[code[name].long()] = means[name]
            change[name] = _from_blocks(blocks, value)
    return change


def count_bytes(
    tensors: Tensors, compression: Compression, share: float, sites: int
) -> tuple[int, int]:
    """Return the bytes of a cycle that a site sends, and receives as a code.

    The parameters that it receives are not counted.

    Args:
        tensors: What sites share.
        compression: The code.
        share: With "top-k", the part of all blocks that is sent.
        sites: Number of sites.
    """
    if compression == "none":
        return nbytes(tensors), 0
    if compression == "packed":
        _, digits = _digits_of_word(max(1, sites))
        words = sum(_words(value, digits) for value in tensors.values())
        steps = FLOAT_BYTES * len(tensors)
        return WORD_BYTES * words + steps, steps
    blocks = sum(len(_rows(value, compression)) for value in tensors.values())
    chosen = max(1, round(share * blocks))
    return FLOAT_BYTES * (blocks + BLOCK * chosen), FLOAT_BYTES * chosen


# Digits in words, and blocks of tensors.


def _digits_of_word(sites: int) -> tuple[int, int]:
    """Return how many values a sum of digits can have, and the digits of a word.

    Zero is in the middle of the values. A site's digit is at most `LEVELS` times its
    weight, rounded up.
    """
    base = 2 * (LEVELS + 1) * sites + 1
    digits = 1
    while base ** (digits + 1) <= EXACT:
        digits += 1
    return base, digits


def _words(value: Tensor, digits: int) -> int:
    """Return how many words a tensor's numbers take."""
    return -(-value.numel() // digits)


def _pack(levels: Tensor, sites: int) -> Tensor:
    """Return (words,) int64: Σ level_j base^j of neighbours j, of levels (numbers,)."""
    base, digits = _digits_of_word(sites)
    padded = torch.nn.functional.pad(levels, (0, -len(levels) % digits))
    powers = torch.tensor([base**place for place in range(digits)])
    return (padded.view(-1, digits) * powers).sum(1)


def _unpack(words: Tensor, numbers: int, sites: int) -> Tensor:
    """Return the sums of digits, (numbers,) float64, of a sum of words, (words,)."""
    base, digits = _digits_of_word(sites)
    left = words.round().long()
    by_place = []
    for _ in range(digits):
        digit = (left + base // 2) % base - base // 2
        left = (left - digit) // base
        by_place.append(digit)
    return torch.stack(by_place, 1).flatten()[:numbers].double()


def _rows(value: Tensor, compression: Compression) -> Tensor:
    """Return (1, numbers) with "packed"; else (blocks, BLOCK), padded with zeros."""
    flat = value.flatten()
    if compression == "packed":
        return flat[None]
    return torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)


def _from_blocks(blocks: Tensor, like: Tensor) -> Tensor:
    """Return the numbers of blocks, (blocks, BLOCK), in the shape of a tensor."""
    return blocks.flatten()[: like.numel()].reshape(like.shape)
