"""The CRF's recursions as torch operations, for every device: log-space, all sentences at once.

Same functions, arguments and results as `crf_cpu`; forward and backward messages are
one scan over two stacked batches (the backward one runs over the reversed sentences), so that a
GPU is asked half as often.
"""

from __future__ import annotations

import torch
from torch import Tensor

_PAIR_BUDGET = 1 << 24  # numbers in one block of pair posteriors (128 MiB in float64)


def precision(device: torch.device) -> torch.dtype:
    """What to compute in: float64, but for devices that have none."""
    return torch.float32 if device.type == "mps" else torch.float64


def _reversal(lengths: Tensor, tokens: int) -> Tensor:
    """(batch, tokens): the positions of each sentence from its end; padding stays in place."""
    position = torch.arange(tokens, device=lengths.device)
    mirrored = lengths[:, None] - 1 - position
    return torch.where(mirrored >= 0, mirrored, position)


def _inside(lengths: Tensor, tokens: int) -> Tensor:
    return torch.arange(tokens, device=lengths.device) < lengths[:, None]  # (batch, tokens)


def _last(values: Tensor, lengths: Tensor) -> Tensor:
    """values (batch, tokens, tags) at each sentence's last token: (batch, tags)."""
    return values[torch.arange(len(values), device=values.device), lengths - 1]


def _scan(emissions: Tensor, first: Tensor, matrix: Tensor) -> Tensor:
    """Messages that arrive at each position, before its emission.

    emissions (runs, batch, tokens, tags), first (runs, 1, tags), matrix (runs, 1, tags, tags).
    """
    arriving = [first.expand(emissions[:, :, 0].shape)]
    for t in range(1, emissions.shape[2]):
        state = arriving[-1] + emissions[:, :, t - 1]  # (runs, batch, tags)
        arriving.append(torch.logsumexp(state.unsqueeze(-1) + matrix, dim=-2))
    return torch.stack(arriving, dim=2)


def partition(
    emissions: Tensor,
    lengths: Tensor,
    start: Tensor,
    transitions: Tensor,
    end: Tensor,
    gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """log Z (batch,), posteriors (batch, tokens, tags), transition counts (batch, tags, tags).

    The last two are empty without `gradient`. log Z is -inf where
    no sequence is allowed, NaN where an emission is NaN or +inf.
    """
    inside = _inside(lengths, emissions.shape[1])  # (batch, tokens)
    x = emissions.masked_fill(~inside[..., None], 0.0)
    broken = ~(x < torch.inf).flatten(1).all(1)
    x = x.masked_fill(broken[:, None, None], 0.0)
    runs, first, matrix = x[None], start[None, None], transitions[None, None]
    mirror = _reversal(lengths, x.shape[1])[..., None].expand_as(x)
    if gradient:
        runs = torch.stack([x, x.gather(1, mirror)])
        first = torch.stack([start, end])[:, None]
        matrix = torch.stack([transitions, transitions.T])[:, None]
    arriving = _scan(runs, first, matrix)
    alpha = arriving[0] + x
    log_z = torch.logsumexp(_last(alpha, lengths) + end, dim=-1)
    if not gradient:
        return log_z.masked_fill(broken, torch.nan), x.new_empty(0), x.new_empty(0)
    beta = arriving[1].gather(1, mirror)
    finite = log_z.masked_fill(log_z == -torch.inf, 0.0)[:, None, None]
    unary = torch.exp(alpha + beta - finite).masked_fill(~inside[..., None], 0.0)
    pairs = _pairs(alpha - finite, x + beta, transitions, inside)
    unary = unary.masked_fill(broken[:, None, None] & inside[..., None], torch.nan)
    pairs = pairs.masked_fill(broken[:, None, None], torch.nan)
    return log_z.masked_fill(broken, torch.nan), unary, pairs


def _pairs(before: Tensor, after: Tensor, transitions: Tensor, inside: Tensor) -> Tensor:
    """Σ_t exp(before[t, i] + transitions[i, j] + after[t + 1, j]), in blocks of positions."""
    batch, tokens, tags = before.shape
    total = before.new_zeros(batch, tags, tags)
    step = max(1, _PAIR_BUDGET // (batch * tags * tags))
    for t in range(0, tokens - 1, step):
        stop = min(t + step, tokens - 1)
        score = before[:, t:stop, :, None] + transitions + after[:, t + 1 : stop + 1, None, :]
        score = score.masked_fill(~inside[:, t + 1 : stop + 1, None, None], -torch.inf)
        total += score.exp().sum(1)  # (batch, block, tags, tags) -> (batch, tags, tags)
    return total


def path_score(
    emissions: Tensor,
    lengths: Tensor,
    start: Tensor,
    transitions: Tensor,
    end: Tensor,
    tags: Tensor,
) -> tuple[Tensor, tuple[int, int]]:
    """Score of the given tags (batch,); (sentence, position) of the first tag that is no tag or
    that the constraints forbid, (-1, -1) when there is none."""
    inside = _inside(lengths, tags.shape[1])
    unknown = inside & ((tags < 0) | (tags >= emissions.shape[2]))
    tags = tags.masked_fill(~inside | unknown, 0)
    step = torch.empty(tags.shape, dtype=start.dtype, device=tags.device)  # (batch, tokens)
    step[:, 0] = start[tags[:, 0]]
    step[:, 1:] = transitions[tags[:, :-1], tags[:, 1:]]
    is_last = torch.arange(tags.shape[1], device=tags.device) == lengths[:, None] - 1
    step = step + torch.where(is_last, end[tags], 0.0)
    wrong = unknown | (inside & (step == -torch.inf))
    if bool(wrong.any()):
        n, t = wrong.nonzero()[0].tolist()
        return start.new_empty(0), (n, t)
    own = emissions.gather(2, tags[..., None])[..., 0]
    return (step + own).masked_fill(~inside, 0.0).sum(1), (-1, -1)


def subtract_path(unary: Tensor, pairs: Tensor, tags: Tensor, lengths: Tensor) -> None:
    """Turn posteriors into gradients of the loss: take away the counts of the given tags."""
    inside = _inside(lengths, tags.shape[1])
    tags = tags.masked_fill(~inside, 0)
    unary.scatter_add_(2, tags[..., None], -inside[..., None].to(unary.dtype))
    steps = tags[:, :-1] * unary.shape[2] + tags[:, 1:]  # (batch, tokens - 1)
    pairs.flatten(1).scatter_add_(1, steps, -inside[:, 1:].to(pairs.dtype))


def weigh(
    unary: Tensor, pairs: Tensor, lengths: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of emissions (batch, tokens, tags), start, transitions and end."""
    weights = weights.to(unary.dtype)[:, None, None]
    unary = unary * weights
    return unary, unary[:, 0].sum(0), (pairs * weights).sum(0), _last(unary, lengths).sum(0)


def viterbi(
    emissions: Tensor, lengths: Tensor, start: Tensor, transitions: Tensor, end: Tensor
) -> tuple[Tensor, int]:
    """Highest-scoring tags (batch, tokens), 0 behind a sentence's end; and the first sentence
    that has none (nothing allowed, or not finite), or -1."""
    tokens = emissions.shape[1]
    inside = _inside(lengths, tokens)
    x = emissions.masked_fill(~inside[..., None], 0.0)
    scores = [start + x[:, 0]]
    for t in range(1, tokens):
        scores.append((scores[-1].unsqueeze(-1) + transitions).amax(-2) + x[:, t])
    top = (_last(torch.stack(scores, dim=1), lengths) + end).amax(-1)
    bad = ~((top > -torch.inf) & (x < torch.inf).flatten(1).all(1))
    best = torch.zeros(emissions.shape[:2], dtype=torch.int64, device=x.device)
    following = best[:, 0]
    for t in range(tokens - 1, -1, -1):
        ends = (lengths - 1 == t)[:, None]
        following = (scores[t] + torch.where(ends, end, transitions.T[following])).argmax(-1)
        best[:, t] = following
    return best.masked_fill(~inside, 0), int(bad.nonzero()[0, 0]) if bool(bad.any()) else -1
