"""Compressed updates that can still be summed.

A server only sees sums over sites, so sites must agree on a code before they send. Each
site stores its change and reports the mean square of each tensor. The mean over sites
gives one step size per tensor. Sites round their changes to whole steps and pack
several of these integers as digits into each integer of eight bytes, the size of any
number in a secure sum.

Digits must not carry when sites are summed. Therefore a site weights its change before
rounding, with weights that sum to K over K sites. The rounding error is added to the
site's next change: error feedback (Seide et al. 2014; Karimireddy et al. 2019).
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
LEVELS = 12  # maximum steps of a change of mean weight, in either direction
# Standard deviations that these steps span; the excess is sent the next time.
RANGE = 4.0
EXACT = 2**52  # float64, in which sums are formed, is exact up to here
WORD_BYTES = 8
FLOAT_BYTES = 4


# In a cycle, sites measure their changes and agree on a code. They encode, the server
# decodes.


def compute_mean_squares(change: Tensors) -> dict[str, Tensor]:
    """Return the mean square of each tensor of a change, (1,) each."""
    return {
        name: value.flatten()[None].square().mean(1) for name, value in change.items()
    }


def choose_step_sizes(means: Tensors) -> dict[str, Tensor]:
    """Return the step size of each tensor, (1,) each.

    Args:
        means: Weighted means over sites of what `compute_mean_squares` returned.
    """
    return {name: RANGE / LEVELS * mean.sqrt() for name, mean in means.items()}


def require_step_sizes(steps: Tensors, change: Tensors) -> None:
    """Check that `choose_step_sizes` could have returned these steps for a change.

    Raises:
        RefusedError: It could not.
    """
    for name in {**change, **steps}:
        if name not in change or name not in steps or not _is_step_size(steps[name]):
            raise RefusedError(
                f"the received step size of tensor {name!r} does not match this job: "
                "expected one finite number, not below zero, for each tensor that "
                "is sent"
            )


def _is_step_size(step: Tensor) -> bool:
    """Return whether a tensor is a step size: finite, at least 0, (1,) float32."""
    has_form = step.dtype is torch.float32 and step.shape == (1,)
    return has_form and 0 <= float(step) < math.inf


def encode_change(
    change: Tensors, steps: Tensors, part: float = 1.0, sites: int = 1
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return a change in whole steps, and the remainder for the next time.

    Args:
        change: The change, by name.
        steps: The result of `choose_step_sizes`.
        part: The site's weight; the weights of all sites sum to `sites`.
        sites: Number of sites in the sum.

    Returns:
        The tensors to send, (words,) int64, and the remainder, float32 with the shapes
        of the change.
    """
    sent = {}
    left = {}
    for name, value in change.items():
        step = steps[name].to(value.device)
        largest = math.ceil(LEVELS * part)
        levels = torch.where(step > 0, part * value / step, torch.zeros_like(value))
        levels = levels.round().clamp(-largest, largest)
        sent[name] = _pack(levels.flatten().long().cpu(), sites)
        left[name] = value - levels * step / part if part else value
    return sent, left


def list_encoded_shapes(like: Tensors, sites: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes that `encode_change` sends for changes like these tensors."""
    _, digits = _choose_digits(sites)
    return {name: (_count_words(value, digits),) for name, value in like.items()}


def unpack_total(total: Total, like: Tensors, sites: int) -> Total:
    """Return the sum of encoded changes, with its digits separated.

    Args:
        total: The sum.
        like: Tensors with the shapes of the change.
        sites: Number of sites for which the sum was encoded.

    Raises:
        TrainingError: Another site is in the sum, so digits may have carried.
    """
    if total.metric("part") > sites * (1 + 1e-9):
        raise TrainingError(
            "a site that took no part in choosing the encoding sent an update in it"
        )
    tensors = dict(total.tensors)
    for name, value in like.items():
        numbers = _unpack(tensors[name], value.numel(), sites)
        tensors[name] = numbers.reshape(value.shape)
    return replace(total, tensors=tensors, weight=total.metric("part"))


def decode_change(
    means: Tensors, steps: Tensors, like: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the mean change, from the weighted means of encoded changes.

    Args:
        means: The means, by name.
        steps: The result of `choose_step_sizes`.
        like: Tensors with the names of the change.
    """
    return {name: means[name] * steps[name] for name in like}


def count_bytes(
    tensors: Tensors, compression: Compression, sites: int
) -> tuple[int, int]:
    """Return the bytes per cycle that a site sends, and receives as step sizes.

    Received parameters are not counted.

    Args:
        tensors: The shared parameters.
        compression: The code.
        sites: Number of sites.
    """
    if compression == "none":
        return nbytes(tensors), 0
    _, digits = _choose_digits(max(1, sites))
    words = sum(_count_words(value, digits) for value in tensors.values())
    steps = FLOAT_BYTES * len(tensors)
    return WORD_BYTES * words + steps, steps


# Packing of digits into words.


def _choose_digits(sites: int) -> tuple[int, int]:
    """Choose the base of the digits and the number of digits in a word.

    The base is the number of values that a summed digit can have. Values are symmetric
    around zero. A site's digit is at most `LEVELS` times its weight, rounded up.
    """
    base = 2 * (LEVELS + 1) * sites + 1
    digits = 1
    while base ** (digits + 1) <= EXACT:
        digits += 1
    return base, digits


def _count_words(value: Tensor, digits: int) -> int:
    """Return the number of words that a tensor takes, at `digits` numbers a word."""
    return -(-value.numel() // digits)


def _pack(levels: Tensor, sites: int) -> Tensor:
    """Pack levels, (numbers,), into words Σ level_j base^j, (words,) int64."""
    base, digits = _choose_digits(sites)
    padded = torch.nn.functional.pad(levels, (0, -len(levels) % digits))
    powers = torch.tensor([base**place for place in range(digits)])
    return (padded.view(-1, digits) * powers).sum(1)


def _unpack(words: Tensor, numbers: int, sites: int) -> Tensor:
    """Unpack a sum of words, (words,), into sums of digits, (numbers,) float64."""
    base, digits = _choose_digits(sites)
    left = words.round().long()
    by_place = []
    for _ in range(digits):
        digit = (left + base // 2) % base - base // 2
        left = (left - digit) // base
        by_place.append(digit)
    return torch.stack(by_place, 1).flatten()[:numbers].double()
