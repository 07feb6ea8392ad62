"""Updates made smaller that still add.

A server only ever sees a sum over sites, so sites must agree on a code before they
send. Each site keeps its change, measures the mean square of each tensor, and reports
these numbers. From their mean over sites follows one step size for each tensor. Sites
round their changes to whole steps, and pack several of these numbers as digits into
each integer of eight bytes, which is the size that a secure sum gives any number.

Digits must not carry when sites are added: a site weighs its change before it rounds,
so that the weights of K sites sum to K. What rounding left out is added to the site's
next change: error feedback (Seide et al. 2014; Karimireddy et al. 2019).
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

Compression = Literal["none", "packed"]
LEVELS = 12  # steps that a change of mean weight may have, in either direction
# Standard deviations that these steps span; what lies beyond is sent the next time.
RANGE = 4.0
EXACT = 2**52  # float64, in which sums are formed, is exact up to here
WORD_BYTES = 8
FLOAT_BYTES = 4


# A cycle: sites measure, a code is agreed on, sites encode, the server decodes.


def mean_squares(change: Tensors) -> dict[str, Tensor]:
    """Return the mean square of each tensor of a change, (1,) each."""
    return {
        name: value.flatten()[None].square().mean(1) for name, value in change.items()
    }


def step_sizes(means: Tensors) -> dict[str, Tensor]:
    """Return the step size of each tensor, (1,) each.

    Args:
        means: Weighted means over sites of what `mean_squares` returned.
    """
    return {name: RANGE / LEVELS * mean.sqrt() for name, mean in means.items()}


def require_step_sizes(steps: Tensors, change: Tensors) -> None:
    """Check that `step_sizes` can have returned these steps for such a change.

    Raises:
        RefusedError: It cannot.
    """
    for name in {**change, **steps}:
        if name not in change or name not in steps or not _is_step_size(steps[name]):
            raise RefusedError(
                f"the received step size of tensor {name!r} does not match this job: "
                "expected one finite number, not below zero, for each tensor that "
                "travels"
            )


def _is_step_size(step: Tensor) -> bool:
    has_form = step.dtype is torch.float32 and step.shape == (1,)
    return has_form and 0 <= float(step) < math.inf


def encode(
    change: Tensors, steps: Tensors, part: float = 1.0, sites: int = 1
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return a change in whole steps, and what of it is left for the next time.

    Args:
        change: The change, by name.
        steps: What `step_sizes` returned.
        part: The site's weight; the weights of all sites sum to `sites`.
        sites: Number of sites in the sum.

    Returns:
        What is sent: (words,) int64. And what is left, float32 of the tensors' shapes.
    """
    sent, left = {}, {}
    for name, value in change.items():
        step = steps[name].to(value.device)
        largest = math.ceil(LEVELS * part)
        levels = torch.where(step > 0, part * value / step, torch.zeros_like(value))
        levels = levels.round().clamp(-largest, largest)
        sent[name] = _pack(levels.flatten().long().cpu(), sites)
        left[name] = value - levels * step / part if part else value
    return sent, left


def encoded_shapes(like: Tensors, sites: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of what `encode` sends of changes of such tensors."""
    _, digits = _digits_of_word(sites)
    return {name: (_words(value, digits),) for name, value in like.items()}


def unpack_total(total: Total, like: Tensors, sites: int) -> Total:
    """Return the sum of what sites sent, with its digits separated.

    Args:
        total: The sum.
        like: Tensors of the shapes of the change.
        sites: Number of sites that the sum was encoded for.

    Raises:
        TrainingError: Another site is in the sum, so digits may have carried.
    """
    if total.metric("part") > sites * (1 + 1e-9):
        raise TrainingError(
            "a site sent a change in a code that it had no part in choosing"
        )
    tensors = dict(total.tensors)
    for name, value in like.items():
        numbers = _unpack(tensors[name], value.numel(), sites)
        tensors[name] = numbers.reshape(value.shape)
    return replace(total, tensors=tensors, weight=total.metric("part"))


def decode(
    means: Tensors, steps: Tensors, like: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the mean change, from the weighted means of what sites sent.

    Args:
        means: The means, by name.
        steps: What `step_sizes` returned.
        like: Tensors with the names of the change.
    """
    return {name: means[name] * steps[name] for name in like}


def count_bytes(
    tensors: Tensors, compression: Compression, sites: int
) -> tuple[int, int]:
    """Return the bytes of a cycle that a site sends, and receives as a code.

    The parameters that it receives are not counted.

    Args:
        tensors: What sites share.
        compression: The code.
        sites: Number of sites.
    """
    if compression == "none":
        return nbytes(tensors), 0
    _, digits = _digits_of_word(max(1, sites))
    words = sum(_words(value, digits) for value in tensors.values())
    steps = FLOAT_BYTES * len(tensors)
    return WORD_BYTES * words + steps, steps


# Digits in words.


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
