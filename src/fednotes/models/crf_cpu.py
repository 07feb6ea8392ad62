"""The CRF's recursions on CPU: tensors in, tensors out, compiled kernels within.

Same functions, arguments and results as `crf_torch`; emissions and scores are float64 here.
Importing this module compiles the kernels (once per machine) or loads them from numba's cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fednotes.core.compiled import Floats, Ints, kernel
from fednotes.models import crf_numba
from fednotes.models.crf_numba import INPUTS


def _empty(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float64)


def _arrays(
    emissions: Tensor, lengths: Tensor, start: Tensor, transitions: Tensor, end: Tensor
) -> list[Any]:
    """What the kernels take first: contiguous, start and end as (1, tags)."""
    tensors = (emissions, lengths, start[None], transitions, end[None])
    return [t.contiguous().numpy() for t in tensors]


def partition(
    emissions: Tensor,
    lengths: Tensor,
    start: Tensor,
    transitions: Tensor,
    end: Tensor,
    gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """log Z (batch,), posteriors (batch, tokens, tags), transition counts (batch, tags, tags)."""
    batch, tokens, tags = emissions.shape
    log_z = _empty(batch)
    unary, pairs = _empty(0, 0, 0), _empty(0, 0, 0)
    if gradient:
        unary, pairs = _empty(batch, tokens, tags), _empty(batch, tags, tags)
    arrays = _arrays(emissions, lengths, start, transitions, end)
    crf_numba.partition(*arrays, gradient, log_z.numpy(), unary.numpy(), pairs.numpy())
    return log_z, unary, pairs


def path_score(
    emissions: Tensor,
    lengths: Tensor,
    start: Tensor,
    transitions: Tensor,
    end: Tensor,
    tags: Tensor,
) -> tuple[Tensor, tuple[int, int]]:
    """Score of the given tags (batch,); (sentence, position) of the first bad tag or (-1, -1)."""
    score = _empty(len(emissions))
    arrays = _arrays(emissions, lengths, start, transitions, end)
    return score, _path_score(*arrays, tags.contiguous().numpy(), score.numpy())


def subtract_path(unary: Tensor, pairs: Tensor, tags: Tensor, lengths: Tensor) -> None:
    """Turn posteriors into gradients of the loss: take away the counts of the given tags."""
    arrays = (t.contiguous().numpy() for t in (tags, lengths))
    _subtract_path(unary.numpy(), pairs.numpy(), *arrays)


def weigh(
    unary: Tensor, pairs: Tensor, lengths: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of emissions (batch, tokens, tags), start, transitions and end."""
    tags = unary.shape[2]
    outputs = torch.empty_like(unary), _empty(tags), _empty(tags, tags), _empty(tags)
    inputs = unary, pairs, lengths.contiguous(), weights.to(torch.float64).contiguous()
    _weigh(*(t.numpy() for t in (*inputs, *outputs)))
    return outputs


def viterbi(
    emissions: Tensor, lengths: Tensor, start: Tensor, transitions: Tensor, end: Tensor
) -> tuple[Tensor, int]:
    """Highest-scoring tags (batch, tokens); and the first sentence that has none, or -1."""
    best = torch.empty(emissions.shape[:2], dtype=torch.int64)
    arrays = _arrays(emissions, lengths, start, transitions, end)
    return best, _viterbi(*arrays, best.numpy())


# ---- kernels ---------------------------------------------------------------------------------


@kernel(f"UniTuple(int64, 2)({INPUTS}, int64[:, ::1], float64[::1])")
def _path_score(
    emissions: Floats,
    lengths: Ints,
    start: Floats,
    transitions: Floats,
    end: Floats,
    tags: Ints,
    score: Floats,
) -> tuple[int, int]:
    """score (batch,) <- score of the given tags; (sentence, position) of the first tag that is
    no tag or that the constraints forbid, (-1, -1) when there is none."""
    for n in range(emissions.shape[0]):
        score[n] = 0.0
        for t in range(lengths[n]):
            tag = tags[n, t]
            if tag < 0 or tag >= emissions.shape[2]:
                return n, t
            step = start[0, tag] if t == 0 else transitions[tags[n, t - 1], tag]
            if t == lengths[n] - 1:
                step += end[0, tag]
            if step == -np.inf:
                return n, t
            score[n] += step + emissions[n, t, tag]
    return -1, -1


@kernel("void(float64[:, :, ::1], float64[:, :, ::1], int64[:, ::1], int64[::1])")
def _subtract_path(unary: Floats, pairs: Floats, tags: Ints, lengths: Ints) -> None:
    """Turn posteriors into gradients of the loss: take away the counts of the given tags."""
    for n in range(unary.shape[0]):
        for t in range(lengths[n]):
            unary[n, t, tags[n, t]] -= 1.0
            if t > 0:
                pairs[n, tags[n, t - 1], tags[n, t]] -= 1.0


@kernel(
    "void(float64[:, :, ::1], float64[:, :, ::1], int64[::1], float64[::1],"
    " float64[:, :, ::1], float64[::1], float64[:, ::1], float64[::1])"
)
def _weigh(
    unary: Floats,
    pairs: Floats,
    lengths: Ints,
    weights: Floats,
    emissions: Floats,
    start: Floats,
    transitions: Floats,
    end: Floats,
) -> None:
    """Gradients of emissions (weights[n] unary[n]) and of start, transitions and end (weighted
    sums in the order of the batch)."""
    batch, tokens, tags = unary.shape
    start[:], transitions[:], end[:] = 0.0, 0.0, 0.0
    for n in range(batch):
        weight = weights[n]
        for t in range(tokens):
            for j in range(tags):
                emissions[n, t, j] = weight * unary[n, t, j]
        for j in range(tags):
            start[j] += emissions[n, 0, j]
            end[j] += emissions[n, lengths[n] - 1, j]
        for i in range(tags):
            for j in range(tags):
                transitions[i, j] += weight * pairs[n, i, j]


@kernel(f"int64({INPUTS}, int64[:, ::1])")
def _viterbi(
    emissions: Floats, lengths: Ints, start: Floats, transitions: Floats, end: Floats, best: Ints
) -> int:
    """best (batch, tokens) <- highest-scoring tags, 0 behind a sentence's end, the lower tag on a
    tie. Gives the first sentence that has none (nothing allowed, or not finite), or -1.

    The forward pass keeps maxima only; the way back finds the predecessor again, T per token.
    """
    batch, tokens, tags = emissions.shape
    score = np.empty((tokens, tags))
    for n in range(batch):
        length = lengths[n]
        for t in range(length):
            for j in range(tags):
                score[t, j] = start[0, j] if t == 0 else -np.inf
            if t > 0:
                for i in range(tags):
                    before = score[t - 1, i]
                    for j in range(tags):
                        value = before + transitions[i, j]
                        score[t, j] = value if value > score[t, j] else score[t, j]
            for j in range(tags):
                score[t, j] += emissions[n, t, j]
                if not emissions[n, t, j] < np.inf:
                    return n
        for t in range(tokens - 1, -1, -1):
            tag, top = 0, -np.inf
            if t < length:
                for i in range(tags):
                    step = end[0, i] if t == length - 1 else transitions[i, best[n, t + 1]]
                    if score[t, i] + step > top:
                        tag, top = i, score[t, i] + step
                if top == -np.inf:
                    return n
            best[n, t] = tag
    return -1
