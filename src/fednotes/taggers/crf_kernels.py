"""The CRF's recursions on a CPU, as compiled kernels with tensor interfaces.

The functions implement `crf.Recursions`. Emissions may be float32 or float64, and
everything is computed in float64. One thread does this, and no bit of a sentence's
result depends on other sentences, on padding or on thread settings.

Most work is done in `crf_lanes.py`, on eight sentences at a time. The recursions in log
space below compute log Z and the expected counts of sentences on which the scaled
algorithm there may lose precision.

Arguments of the kernels are emissions (batch, tokens, tags), lengths (batch,), start
and end (1, tags), transitions (tags, tags) [from, to], and gold (batch, tokens), the
tags whose counts are subtracted from the expected counts; empty for none.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# The kernels' types are those of their numba signatures.

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fednotes.core.kernels import kernel, kernel_by_type, part
from fednotes.taggers.crf import (
    CrfScores,
    require_allowed_tags,
    require_some_sequence,
)
from fednotes.taggers.crf_lanes import (
    SIGNATURES,
    compute_scaled_partition,
    write_best_tags,
)


def compute_partition(
    emissions: Tensor, lengths: Tensor, scores: CrfScores, *, with_counts: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Implement `crf.Recursions.compute_partition`."""
    inputs = _prepare_arrays(emissions.to(torch.float64), lengths, scores)
    log_z, unary, pairs, _ = _compute_counts(inputs, _NO_GOLD, with_counts=with_counts)
    return torch.from_numpy(log_z), unary, pairs


def compute_path_loss(
    emissions: Tensor,
    lengths: Tensor,
    scores: CrfScores,
    tags: Tensor,
    *,
    with_counts: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Implement `crf.Recursions.compute_path_loss`."""
    inputs = _prepare_arrays(emissions, lengths, scores)
    gold = tags.contiguous().numpy()
    score = np.empty(len(gold))
    first_wrong = _write_path_scores(*inputs, gold, score)
    require_allowed_tags(tags, first_wrong)
    log_z, unary, pairs, impossible = _compute_counts(
        inputs, gold, with_counts=with_counts
    )
    require_some_sequence(impossible)
    losses = (log_z - score).astype(inputs[0].dtype)
    return torch.from_numpy(losses), unary, pairs


_NO_GOLD = np.empty((0, 0), np.int64)


def _compute_counts(
    inputs: list[Any], gold: NDArray[np.int64], *, with_counts: bool
) -> tuple[NDArray[np.float64], Tensor, Tensor, int]:
    """Return log Z, the expected counts less those of gold, and what is impossible.

    Args:
        inputs: The first arguments of the kernels.
        gold: (batch, tokens), or empty.
        with_counts: Whether to compute counts; they are empty otherwise.

    Returns:
        log Z (batch,); the counts (batch, tokens, tags), in the emissions' type, and
        (batch, tags, tags); the first sentence for which no sequence is allowed, or -1.
    """
    emissions = inputs[0]
    batch, _, tags = emissions.shape
    log_z = np.empty(batch)
    fits = np.empty(batch, np.bool_)
    unary = np.empty(emissions.shape if with_counts else (0, 0, 0), emissions.dtype)
    pairs = np.empty((batch, tags, tags) if with_counts else (0, 0, 0))
    arguments = (*inputs, gold, with_counts, log_z, unary, pairs, fits)
    impossible = -1
    if compute_scaled_partition(*arguments):
        impossible = _compute_partition_in_log_space(*arguments)
    return log_z, torch.from_numpy(unary), torch.from_numpy(pairs), impossible


def compute_path_score(
    emissions: Tensor, lengths: Tensor, scores: CrfScores, tags: Tensor
) -> tuple[Tensor, tuple[int, int]]:
    """Implement `crf.Recursions.compute_path_score`."""
    score = np.empty(len(emissions))
    arrays = _prepare_arrays(emissions, lengths, scores)
    first_wrong = _write_path_scores(*arrays, tags.contiguous().numpy(), score)
    return torch.from_numpy(score), first_wrong


def subtract_path(unary: Tensor, pairs: Tensor, tags: Tensor, lengths: Tensor) -> None:
    """Implement `crf.Recursions.subtract_path`."""
    _subtract_path(
        unary.numpy(),
        pairs.numpy(),
        tags.contiguous().numpy(),
        lengths.contiguous().numpy(),
    )


def weigh_gradients(
    unary: Tensor, pairs: Tensor, lengths: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Implement `crf.Recursions.weigh`."""
    tags = unary.shape[2]
    start = unary.new_empty(tags)
    end = unary.new_empty(tags)
    outputs = torch.empty_like(unary), start, unary.new_empty(tags, tags), end
    weights = weights.to(unary.dtype).contiguous()
    inputs = unary, pairs, lengths.contiguous(), weights
    _write_weighted_gradients(*(tensor.numpy() for tensor in (*inputs, *outputs)))
    return outputs


def find_best_tags(
    emissions: Tensor, lengths: Tensor, scores: CrfScores
) -> tuple[Tensor, int]:
    """Implement `crf.Recursions.find_best_tags`."""
    best = torch.empty(emissions.shape[:2], dtype=torch.int64)
    failed = write_best_tags(*_prepare_arrays(emissions, lengths, scores), best.numpy())
    return best, failed


def _prepare_arrays(emissions: Tensor, lengths: Tensor, scores: CrfScores) -> list[Any]:
    """Return the first arguments of the kernels, contiguous."""
    # NumPy converts small arrays in less time than torch.
    start, transitions, end = (
        np.ascontiguousarray(score.numpy(), np.float64) for score in scores
    )
    batch = (emissions.contiguous().numpy(), lengths.contiguous().numpy())
    return [*batch, start[None], transitions, end[None]]


# ---- kernels -------------------------------------------------------------------------

# Scores, and emissions of either type.
_SCORES = "float64[:, ::1], float64[:, ::1], float64[:, ::1]"
_SINGLE = f"float32[:, :, ::1], int64[::1], {_SCORES}"
_DOUBLE = f"float64[:, :, ::1], int64[::1], {_SCORES}"


@part
def _compute_log_sum(left, t, right, i):
    """Return log Σ_j exp(left[t, j] + right[i, j]), -inf if all terms are."""
    tags = right.shape[1]
    maximum = -np.inf
    total = 0.0
    for j in range(tags):
        maximum = max(maximum, left[t, j] + right[i, j])
    if maximum == -np.inf:
        for j in range(tags):
            total += left[t, j] + right[i, j]  # -inf, but NaN where a score is
        return total
    for j in range(tags):
        total += math.exp(left[t, j] + right[i, j] - maximum)
    return maximum + math.log(total)


@part
def _count_in_log_space(  # noqa: C901, PLR0912, PLR0913 - loops that numba compiles
    x, n, length, start, transitions, transitions_t, end, alpha, beta, after, gold,
    with_counts, unary, pairs,
):  # fmt: skip
    """Return log Z of one sentence and, with `with_counts`, set its counts.

    It takes tags² exponentials a token. alpha, beta and after (tokens, tags) are
    scratch space. unary[n] and pairs[n] are set as in
    `crf_lanes.compute_scaled_partition`, but not if log Z is -inf, which the caller
    refuses. All are NaN where an emission is NaN or +inf.
    """
    tags = x.shape[2]
    for t in range(length):
        for j in range(tags):
            if not x[n, t, j] < np.inf:
                if with_counts:
                    unary[n, :length] = np.nan
                    pairs[n] = np.nan
                return np.nan
    for t in range(length):
        for j in range(tags):
            arriving = (
                start[0, j]
                if t == 0
                else _compute_log_sum(alpha, t - 1, transitions_t, j)
            )
            alpha[t, j] = arriving + x[n, t, j]
    log_z = _compute_log_sum(alpha, length - 1, end, 0)
    if not with_counts or log_z == -np.inf:
        return log_z
    pairs[n] = 0.0
    for t in range(length - 1, -1, -1):
        for i in range(tags):
            beta[t, i] = (
                end[0, i]
                if t == length - 1
                else _compute_log_sum(after, t + 1, transitions, i)
            )
            after[t, i] = x[n, t, i] + beta[t, i]
            is_gold = gold.size > 0 and gold[n, t] == i
            posterior = math.exp(alpha[t, i] + beta[t, i] - log_z)
            unary[n, t, i] = posterior - 1.0 if is_gold else posterior
            if t < length - 1:
                for j in range(tags):
                    path = alpha[t, i] + transitions[i, j] + after[t + 1, j]
                    pairs[n, i, j] += math.exp(path - log_z)
    if gold.size:
        for t in range(1, length):
            pairs[n, gold[n, t - 1], gold[n, t]] -= 1.0
    return log_z


@kernel_by_type(*SIGNATURES)
def _compute_partition_in_log_space(  # noqa: PLR0913 - the arrays of a compiled kernel
    emissions, lengths, start, transitions, end, gold, with_counts, log_z, unary,
    pairs, fits,
):  # fmt: skip
    """Set what `crf_lanes.compute_scaled_partition` could not compute precisely.

    These are the results of the sentences for which fits (batch,) is False.
    log_z is -inf if no sequence is allowed and NaN if an emission is NaN or +inf.
    Returns the first sentence for which no sequence is allowed, or -1.
    """
    _, tokens, tags = emissions.shape
    transitions_t = transitions.T.copy()
    alpha = np.empty((tokens, tags))
    beta = np.empty((tokens, tags))
    after = np.empty((tokens, tags))
    impossible = -1
    for n in range(lengths.size):
        if not fits[n]:
            log_z[n] = _count_in_log_space(
                emissions, n, lengths[n], start, transitions, transitions_t, end,
                alpha, beta, after, gold, with_counts, unary, pairs,
            )  # fmt: skip
            if log_z[n] == -np.inf and impossible < 0:
                impossible = n
            if with_counts:
                unary[n, lengths[n] :] = 0.0
    return impossible


@kernel_by_type(
    f"UniTuple(int64, 2)({_SINGLE}, int64[:, ::1], float64[::1])",
    f"UniTuple(int64, 2)({_DOUBLE}, int64[:, ::1], float64[::1])",
)
def _write_path_scores(emissions, lengths, start, transitions, end, tags, score):
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


@kernel_by_type(
    "void(float32[:, :, ::1], float64[:, :, ::1], int64[::1], float32[::1],"
    " float32[:, :, ::1], float32[::1], float32[:, ::1], float32[::1])",
    "void(float64[:, :, ::1], float64[:, :, ::1], int64[::1], float64[::1],"
    " float64[:, :, ::1], float64[::1], float64[:, ::1], float64[::1])",
)
def _write_weighted_gradients(  # noqa: PLR0913 - the arrays of a compiled kernel
    unary, pairs, lengths, weights, emissions, start, transitions, end
):
    """Set the gradients of emissions (weights[n] unary[n]), start, transitions and end.

    The last three are weighted sums in the order of the batch, added in float64.
    """
    batch, tokens, tags = unary.shape
    at_start = np.zeros(tags)
    at_end = np.zeros(tags)
    steps = np.zeros((tags, tags))
    counts = unary.reshape(batch, tokens * tags)
    gradients = emissions.reshape(batch, tokens * tags)
    for n in range(batch):
        weight = np.float64(weights[n])
        last_place = lengths[n] - 1
        for k in range(tokens * tags):
            gradients[n, k] = weight * counts[n, k]
        for j in range(tags):
            at_start[j] += weight * unary[n, 0, j]
            at_end[j] += weight * unary[n, last_place, j]
        for i in range(tags):
            for j in range(tags):
                steps[i, j] += weight * pairs[n, i, j]
    for i in range(tags):
        start[i] = at_start[i]
        end[i] = at_end[i]
        for j in range(tags):
            transitions[i, j] = steps[i, j]
