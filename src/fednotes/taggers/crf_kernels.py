"""The CRF's recursions on a CPU, as compiled kernels with tensor interfaces.

The functions implement `crf.Recursions`; emissions and scores are float64. Sentences
are processed one after the other in one thread. Therefore no bit of a sentence's result
depends on other sentences, on padding or on thread settings.

log Z and the posteriors come from the scaled forward-backward algorithm (Rabiner 1989,
V.A) in exp space, which needs one `exp` per emission. It is used for a sentence only if
it provably loses no precision: every factor and every scaled message is either a
structural zero (forbidden) or so far above the smallest double that no product can
underflow. Relative to the maximum:

    message >= 1e-100, exp(transition) >= 1e-50, exp(emission) >= 1e-150

Otherwise (for example, with emissions some 230 apart) the sentence is recomputed in log
space.

Arguments of the kernels are emissions (batch, tokens, tags), lengths (batch,), start
and end (1, tags), transitions (tags, tags) [from, to]. In the scaled algorithm, the
last axis of arrays is padded with zeros to `columns`, so that loops vectorise.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# The kernels' types are those of their numba signatures.

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fednotes.core.kernels import kernel, part, reduction
from fednotes.taggers.crf import Scores


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
    arrays = _arrays(emissions, lengths, scores)
    _partition(*arrays, with_counts, log_z.numpy(), unary.numpy(), pairs.numpy())
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
    outputs = torch.empty_like(unary), _empty(tags), _empty(tags, tags), _empty(tags)
    inputs = unary, pairs, lengths.contiguous(), weights.to(torch.float64).contiguous()
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
    start, transitions, end = scores
    tensors = (emissions, lengths, start[None], transitions, end[None])
    return [tensor.contiguous().numpy() for tensor in tensors]


# ---- kernels -------------------------------------------------------------------------

_SMALLEST_MESSAGE = 1e-100
_SMALLEST_TRANSITION = -115.0  # natural logarithm of 1e-50
_SMALLEST_EMISSION = -345.0  # natural logarithm of 1e-150
# The directions of `_pass`, and the constants of `_exp`.
_FORWARD, _BACKWARD = True, False
_LOG2E = 1.4426950408889634
_LN2_HIGH = 6.93147180369123816490e-01
_LN2_LOW = 1.90821492927058770002e-10
# 1.5 * 2**52: adding it rounds to an integer, kept in the low bits
_ROUND = 6755399441055744.0
_ONE_BITS = 1023 << 52


@part
def _exp(x, scale, bits, count):
    """Set x[:count] to exp(x), for x in [-345, 0] or -inf.

    exp(x) = 2**n exp(r), |r| <= ln(2)/2, Taylor to degree 13 (error below 1e-17).
    It is written out so that LLVM vectorises it; calling the C library for each number
    would take half of the total time. `scale` is scratch space, and `bits` is its int64
    view.
    """
    for k in range(count):
        scale[k] = x[k] * _LOG2E + _ROUND
    for k in range(count):
        n = scale[k] - _ROUND
        r = (x[k] - n * _LN2_HIGH) - n * _LN2_LOW
        p = 1.0 / 6227020800.0
        p = p * r + 1.0 / 479001600.0
        p = p * r + 1.0 / 39916800.0
        p = p * r + 1.0 / 3628800.0
        p = p * r + 1.0 / 362880.0
        p = p * r + 1.0 / 40320.0
        p = p * r + 1.0 / 5040.0
        p = p * r + 1.0 / 720.0
        p = p * r + 1.0 / 120.0
        p = p * r + 1.0 / 24.0
        p = p * r + 1.0 / 6.0
        p = p * r + 0.5
        p = p * r + 1.0
        p = p * r + 1.0
        x[k] = p if x[k] > -700.0 else 0.0
    for k in range(count):
        bits[k] = (bits[k] << 52) + _ONE_BITS
    for k in range(count):
        x[k] *= scale[k]


@part
def _multiply(source, s, matrix, target, t):
    """Set target[t] to source[s] @ matrix.

    Rows are processed in fours, so that the sums stay in registers.
    """
    rows, columns = matrix.shape
    for i in range(0, rows, 4):
        a, b, c, d = source[s, i], source[s, i + 1], source[s, i + 2], source[s, i + 3]
        if i == 0:
            for j in range(columns):
                target[t, j] = (a * matrix[0, j] + b * matrix[1, j]) + (
                    c * matrix[2, j] + d * matrix[3, j]
                )
        else:
            for j in range(columns):
                target[t, j] += (a * matrix[i, j] + b * matrix[i + 1, j]) + (
                    c * matrix[i + 2, j] + d * matrix[i + 3, j]
                )


@reduction
def _sum(array, t):
    total = 0.0
    for j in range(array.shape[1]):
        total += array[t, j]
    return total


@reduction
def _dot(left, right, t):
    total = 0.0
    for j in range(left.shape[1]):
        total += left[t, j] * right[t, j]
    return total


@part
def _lost(messages, length):
    """Count messages that are neither structural zeros nor safely above 0."""
    count = 0
    flat = messages.reshape(messages.size)
    for k in range(length * messages.shape[1]):
        count += (flat[k] < _SMALLEST_MESSAGE) & (flat[k] != 0.0)
    return count


@part
def _exp_scores(scores, out):
    """Set out to exp(score - maximum), 0 where forbidden.

    Returns the maximum, and whether no product can underflow.
    """
    top, safe = -np.inf, True
    for i in range(scores.shape[0]):
        for j in range(scores.shape[1]):
            top = max(top, scores[i, j])
    for i in range(scores.shape[0]):
        for j in range(scores.shape[1]):
            x = scores[i, j]
            if x != -np.inf:
                safe = safe and x - top >= _SMALLEST_TRANSITION  # False for NaN
                out[i, j] = math.exp(x - top)
    return top, safe and math.isfinite(top)


@part
def _load(emissions, n, length, factors, scratch, bits):
    """Set factors[t] to exp(emissions[n, t] - maximum_t).

    Returns Σ maximum_t, and whether no product can underflow.
    """
    tags, columns = emissions.shape[2], factors.shape[1]
    shift, unsafe = 0.0, 0
    for t in range(length):
        top = -np.inf
        for j in range(tags):
            top = emissions[n, t, j] if emissions[n, t, j] > top else top
        shift += top
        for j in range(tags):
            factors[t, j] = emissions[n, t, j] - top
        for j in range(tags, columns):
            factors[t, j] = -np.inf
    flat = factors.reshape(factors.size)
    for k in range(length * columns):  # NaN and infinity are unsafe too
        unsafe += not ((flat[k] >= _SMALLEST_EMISSION) | (flat[k] == -np.inf))
    if unsafe == 0:
        _exp(flat, scratch, bits, length * columns)
    return shift, unsafe == 0


@part
def _pass(length, forward, first, matrix, factors, arriving, leaving):
    """Compute the messages along a sentence, or from its end (transposed matrix).

    arriving[t] = leaving[t before] @ matrix and leaving[t] = arriving[t] * factors[t],
    scaled to sum to 1 at every fourth position. Returns the logarithm of the total
    scale, or NaN if a message may have lost digits.
    """
    columns = leaving.shape[1]
    log_scale, product = 0.0, 1.0
    for k in range(length):
        t = k if forward else length - 1 - k
        if k == 0:
            for j in range(columns):
                arriving[t, j] = first[0, j]
        else:
            _multiply(leaving, t - 1 if forward else t + 1, matrix, arriving, t)
        for j in range(columns):
            leaving[t, j] = arriving[t, j] * factors[t, j]
        if k % 4 == 3:
            total = _sum(leaving, t)
            if not total > 0.0:
                return np.nan
            for j in range(columns):
                leaving[t, j] /= total
            product *= total
            if product < 1e-100 or product > 1e100:  # take one logarithm for many steps
                log_scale += math.log(product)
                product = 1.0
    if _lost(leaving, length) > 0:
        return np.nan
    return log_scale + math.log(product)


@part
def _posteriors(  # noqa: C901, PLR0913 - loops that numba compiles
    n, length, matrix, alpha, beta, after, sums, unary, pairs
):
    """Set unary[n] to the posteriors, and pairs[n] to Σ_t p(y_t = i, y_t+1 = j).

    alpha are the forward messages that leave a position; beta and after are the
    backward messages that arrive and leave. Each position is normalised separately, so
    the scales of the messages do not matter.
    """
    tags, columns = pairs.shape[1], sums.shape[1]
    for t in range(length):
        scale = 1.0 / _dot(alpha, beta, t)
        for j in range(columns):
            alpha[t, j] *= scale
        for j in range(tags):
            unary[n, t, j] = alpha[t, j] * beta[t, j]
    for t in range(length - 1, length + 3):  # read by the last block of four
        for j in range(columns):
            alpha[t, j] = 0.0
            after[t + 1, j] = 0.0
    for i in range(tags):
        for j in range(columns):
            sums[i, j] = 0.0
    for t in range(0, length - 1, 4):
        for i in range(tags):
            a, b, c, d = alpha[t, i], alpha[t + 1, i], alpha[t + 2, i], alpha[t + 3, i]
            for j in range(columns):
                sums[i, j] += (a * after[t + 1, j] + b * after[t + 2, j]) + (
                    c * after[t + 3, j] + d * after[t + 4, j]
                )
    for i in range(tags):
        for j in range(tags):
            pairs[n, i, j] = sums[i, j] * matrix[i, j]


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
def _partition_in_log_space(  # noqa: C901, PLR0913 - loops that numba compiles
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


INPUTS = (
    "float64[:, :, ::1], int64[::1], float64[:, ::1], float64[:, ::1], float64[:, ::1]"
)


@kernel(f"void({INPUTS}, b1, float64[::1], float64[:, :, ::1], float64[:, :, ::1])")
def _partition(  # noqa: PLR0913 - the arrays of a compiled kernel
    emissions, lengths, start, transitions, end, gradient, log_z, unary, pairs
):
    """Set log_z (batch,) to log Z and, with `gradient`, the expected counts.

    unary (batch, tokens, tags) are the posteriors, 0 after a sentence's end, and pairs
    (batch, tags, tags) are the expected transitions. log_z is -inf if no sequence is
    allowed and NaN if an emission is NaN or +inf.
    """
    batch, tokens, tags = emissions.shape
    rows, columns = (tags + 3) // 4 * 4, (tags + 7) // 8 * 8
    first, last = np.zeros((1, columns)), np.zeros((1, columns))
    matrix, matrix_t = np.zeros((rows, columns)), np.zeros((rows, columns))
    top_start, safe_start = _exp_scores(start, first)
    top_end, safe_end = _exp_scores(end, last)
    top, safe = _exp_scores(transitions, matrix)
    transitions_t = transitions.T.copy()
    _exp_scores(transitions_t, matrix_t)
    safe = safe and safe_start and safe_end
    factors, alpha = np.empty((tokens + 4, columns)), np.empty((tokens + 4, columns))
    beta, after = np.empty_like(factors), np.empty_like(factors)
    scratch = beta.reshape(beta.size)
    bits = scratch.view(np.int64)
    sums = np.empty((tags, columns))
    for n in range(batch):
        length = lengths[n]
        fits, total = False, 0.0
        if safe:
            shift, fits = _load(emissions, n, length, factors, scratch, bits)
        if fits:
            log_scale = _pass(length, _FORWARD, first, matrix, factors, beta, alpha)
            for j in range(tags):
                total += alpha[length - 1, j] * last[0, j]
            log_z[n] = log_scale + shift + top_start + top_end + (length - 1) * top
            fits = not math.isnan(log_scale) and total > 0.0
        if fits and gradient:
            fits = not math.isnan(
                _pass(length, _BACKWARD, last, matrix_t, factors, beta, after)
            )
        if fits:
            log_z[n] += math.log(total)
            if gradient:
                _posteriors(n, length, matrix, alpha, beta, after, sums, unary, pairs)
        else:
            log_z[n] = _partition_in_log_space(
                emissions, n, length, start, transitions, transitions_t, end,
                alpha, beta, after, gradient, unary, pairs,
            )  # fmt: skip
        if gradient:
            unary[n, length:] = 0.0


@kernel(f"UniTuple(int64, 2)({INPUTS}, int64[:, ::1], float64[::1])")
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


@kernel(
    "void(float64[:, :, ::1], float64[:, :, ::1], int64[::1], float64[::1],"
    " float64[:, :, ::1], float64[::1], float64[:, ::1], float64[::1])"
)
def _weigh(  # noqa: PLR0913 - the arrays of a compiled kernel
    unary, pairs, lengths, weights, emissions, start, transitions, end
):
    """Set the gradients of emissions (weights[n] unary[n]), start, transitions and end.

    The last three are weighted sums in the order of the batch.
    """
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
