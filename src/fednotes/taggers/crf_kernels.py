"""The CRF's recursions on a CPU, as compiled kernels with tensor interfaces.

The functions implement `crf.Recursions`. Emissions may be float32 or float64; all
results are float64. One thread computes them, and no bit of a sentence's result depends
on other sentences, on padding or on thread settings.

log Z and the expected counts come from the scaled algorithm in `crf_scaled.py`, or from
the recursions in log space below for sentences on which the former is not precise.

Arguments of the kernels are emissions (batch, tokens, tags), lengths (batch,), start
and end (1, tags), transitions (tags, tags) [from, to].
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# The kernels' types are those of their numba signatures.

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fednotes.core.kernels import kernel, part
from fednotes.taggers.crf import Scores
from fednotes.taggers.crf_scaled import partition_scaled


def partition(
    emissions: Tensor, lengths: Tensor, scores: Scores, *, with_counts: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Implement `crf.Recursions.partition`."""
    batch, tokens, tags = emissions.shape
    log_z = _empty(batch)
    unary = _empty(0, 0, 0)
    pairs = _empty(0, 0, 0)
    if with_counts:
        unary = _empty(batch, tokens, tags)
        pairs = _empty(batch, tags, tags)
    inputs = _arrays(emissions, lengths, scores)
    outputs = log_z.numpy(), unary.numpy(), pairs.numpy()
    fits = np.empty(batch, np.bool_)
    if partition_scaled(*inputs, with_counts, *outputs, fits):
        _partition_in_log_space(*inputs, with_counts, *outputs, fits)
    return log_z, unary, pairs


def path_score(
    emissions: Tensor, lengths: Tensor, scores: Scores, tags: Tensor
) -> tuple[Tensor, tuple[int, int]]:
    """Implement `crf.Recursions.path_score`."""
    score = _empty(len(emissions))
    arrays = _arrays(emissions, lengths, scores)
    first_wrong = _path_score(*arrays, tags.contiguous().numpy(), score.numpy())
    return score, first_wrong


def subtract_path(unary: Tensor, pairs: Tensor, tags: Tensor, lengths: Tensor) -> None:
    """Implement `crf.Recursions.subtract_path`."""
    _subtract_path(
        unary.numpy(),
        pairs.numpy(),
        tags.contiguous().numpy(),
        lengths.contiguous().numpy(),
    )


def weigh(
    unary: Tensor, pairs: Tensor, lengths: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Implement `crf.Recursions.weigh`."""
    tags = unary.shape[2]
    if weights.dtype != torch.float32:
        weights = weights.to(torch.float64)
    of_emissions = torch.empty(unary.shape, dtype=weights.dtype)
    outputs = of_emissions, _empty(tags), _empty(tags, tags), _empty(tags)
    inputs = unary, pairs, lengths.contiguous(), weights.contiguous()
    _weigh(*(tensor.numpy() for tensor in (*inputs, *outputs)))
    return outputs


def viterbi(emissions: Tensor, lengths: Tensor, scores: Scores) -> tuple[Tensor, int]:
    """Implement `crf.Recursions.viterbi`."""
    best = torch.empty(emissions.shape[:2], dtype=torch.int64)
    failed = _viterbi(*_arrays(emissions, lengths, scores), best.numpy())
    return best, failed


def _empty(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float64)


def _arrays(emissions: Tensor, lengths: Tensor, scores: Scores) -> list[Any]:
    """Return the first arguments of the kernels, contiguous."""
    start, transitions, end = (score.contiguous().numpy() for score in scores)
    batch = (emissions.contiguous().numpy(), lengths.contiguous().numpy())
    return [*batch, start[None], transitions, end[None]]


# ---- kernels -------------------------------------------------------------------------

# Scores, and emissions of either type.
_SCORES = "float64[:, ::1], float64[:, ::1], float64[:, ::1]"
_SINGLE = f"float32[:, :, ::1], int64[::1], {_SCORES}"
_DOUBLE = f"float64[:, :, ::1], int64[::1], {_SCORES}"


@part
def _log_sum(left, t, right, i):
    """Return log Σ_j exp(left[t, j] + right[i, j]), -inf if all terms are."""
    tags, top, total = right.shape[1], -np.inf, 0.0
    for j in range(tags):
        top = max(top, left[t, j] + right[i, j])
    if top == -np.inf:
        for j in range(tags):
            total += left[t, j] + right[i, j]  # -inf, but NaN where a score is
        return total
    for j in range(tags):
        total += math.exp(left[t, j] + right[i, j] - top)
    return top + math.log(total)


@part
def _count_in_log_space(  # noqa: C901, PLR0913 - loops that numba compiles
    x, n, length, start, transitions, transitions_t, end, alpha, beta, after, gradient,
    unary, pairs,
):  # fmt: skip
    """Return log Z of one sentence and, with `gradient`, set its expected counts.

    It takes tags² exponentials a token. alpha, beta and after (tokens, tags) are
    scratch space. unary[n] and pairs[n] are set as in `_partition`, but not if log Z is
    -inf, which the caller refuses. All are NaN where an emission is NaN or +inf.
    """
    tags = x.shape[2]
    for t in range(length):
        for j in range(tags):
            if not x[n, t, j] < np.inf:
                if gradient:
                    unary[n, :length], pairs[n] = np.nan, np.nan
                return np.nan
    for t in range(length):
        for j in range(tags):
            arriving = (
                start[0, j] if t == 0 else _log_sum(alpha, t - 1, transitions_t, j)
            )
            alpha[t, j] = arriving + x[n, t, j]
    log_z = _log_sum(alpha, length - 1, end, 0)
    if not gradient or log_z == -np.inf:
        return log_z
    pairs[n] = 0.0
    for t in range(length - 1, -1, -1):
        for i in range(tags):
            beta[t, i] = (
                end[0, i] if t == length - 1 else _log_sum(after, t + 1, transitions, i)
            )
            after[t, i] = x[n, t, i] + beta[t, i]
            unary[n, t, i] = math.exp(alpha[t, i] + beta[t, i] - log_z)
            if t < length - 1:
                for j in range(tags):
                    path = alpha[t, i] + transitions[i, j] + after[t + 1, j]
                    pairs[n, i, j] += math.exp(path - log_z)
    return log_z


_COUNTS = "float64[::1], float64[:, :, ::1], float64[:, :, ::1]"


@kernel(
    f"void({_SINGLE}, b1, {_COUNTS}, b1[::1])",
    f"void({_DOUBLE}, b1, {_COUNTS}, b1[::1])",
)
def _partition_in_log_space(  # noqa: PLR0913 - the arrays of a compiled kernel
    emissions, lengths, start, transitions, end, gradient, log_z, unary, pairs, fits
):
    """Set the results of `crf_scaled.partition_scaled` where fits (batch,) is False.

    log_z is -inf if no sequence is allowed and NaN if an emission is NaN or +inf.
    """
    _, tokens, tags = emissions.shape
    transitions_t = transitions.T.copy()
    alpha, beta = np.empty((tokens, tags)), np.empty((tokens, tags))
    after = np.empty((tokens, tags))
    for n in range(lengths.size):
        if not fits[n]:
            log_z[n] = _count_in_log_space(
                emissions, n, lengths[n], start, transitions, transitions_t, end,
                alpha, beta, after, gradient, unary, pairs,
            )  # fmt: skip
            if gradient:
                unary[n, lengths[n] :] = 0.0


@kernel(
    f"UniTuple(int64, 2)({_SINGLE}, int64[:, ::1], float64[::1])",
    f"UniTuple(int64, 2)({_DOUBLE}, int64[:, ::1], float64[::1])",
)
def _path_score(emissions, lengths, start, transitions, end, tags, score):
    """Set score (batch,) to the score of given tags.

    Returns the sentence and position of the first tag that does not exist or is
    forbidden, or (-1, -1).
    """
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
def _subtract_path(unary, pairs, tags, lengths):
    """Subtract the counts of given tags from expected counts."""
    for n in range(unary.shape[0]):
        for t in range(lengths[n]):
            unary[n, t, tags[n, t]] -= 1.0
            if t > 0:
                pairs[n, tags[n, t - 1], tags[n, t]] -= 1.0


_GRADIENTS = "float64[::1], float64[:, ::1], float64[::1]"


@kernel(
    "void(float64[:, :, ::1], float64[:, :, ::1], int64[::1],"
    f" float32[::1], float32[:, :, ::1], {_GRADIENTS})",
    "void(float64[:, :, ::1], float64[:, :, ::1], int64[::1],"
    f" float64[::1], float64[:, :, ::1], {_GRADIENTS})",
)
def _weigh(  # noqa: PLR0913 - the arrays of a compiled kernel
    unary, pairs, lengths, weights, emissions, start, transitions, end
):
    """Set the gradients of emissions (weights[n] unary[n]), start, transitions and end.

    The last three are weighted sums in the order of the batch.
    """
    batch, tokens, tags = unary.shape
    start[:], transitions[:], end[:] = 0.0, 0.0, 0.0
    counts = unary.reshape(batch, tokens * tags)
    gradients = emissions.reshape(batch, tokens * tags)
    for n in range(batch):
        weight, last = np.float64(weights[n]), lengths[n] - 1
        for k in range(tokens * tags):
            gradients[n, k] = weight * counts[n, k]
        for j in range(tags):
            start[j] += weight * unary[n, 0, j]
            end[j] += weight * unary[n, last, j]
        for i in range(tags):
            for j in range(tags):
                transitions[i, j] += weight * pairs[n, i, j]


@kernel(f"int64({_SINGLE}, int64[:, ::1])", f"int64({_DOUBLE}, int64[:, ::1])")
def _viterbi(  # noqa: C901, PLR0912 - loops that numba compiles
    emissions, lengths, start, transitions, end, best
):
    """Set best (batch, tokens) to the tags with the highest score.

    Ties go to the lower tag; tags are 0 after a sentence's end. Returns the first
    sentence for which no sequence is allowed or an emission is not finite, or -1. The
    forward pass stores only the maxima; the backward pass recomputes the predecessors.
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
                    step = (
                        end[0, i] if t == length - 1 else transitions[i, best[n, t + 1]]
                    )
                    if score[t, i] + step > top:
                        tag, top = i, score[t, i] + step
                if top == -np.inf:
                    return n
            best[n, t] = tag
    return -1
