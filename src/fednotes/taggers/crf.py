"""The exact linear-chain conditional random field (Lafferty, McCallum and Pereira
2001).

    score(y) = start[y_1] + Σ_t emission[t, y_t] + Σ_t transitions[y_t, y_t+1] + end[y_L]
    p(y)     = exp(score(y)) / Z,  Z = Σ_y exp(score(y)) over the allowed y

The loss is -log p(gold). Its gradient is what the model expects to see minus what is
there, and comes from one forward-backward pass instead of from autograd:

    d loss / d emission[t, j]    = p(y_t = j) - [gold_t = j]
    d loss / d transitions[i, j] = Σ_t p(y_t = i, y_t+1 = j) - [gold_t = i, gold_t+1 = j]

In place of gold there may be a set of sequences (its sum of exp(score) takes the place
of exp(score(gold)), its posterior that of the counts) or a distribution over them,
given by its expected counts, in which the score is linear.

On CPU the recursions are compiled (`crf_kernels.py`, one thread), elsewhere `TorchOps`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fednotes.core.errors import ModelError

Mask = np.ndarray | Tensor | None
# start (tags,), transitions (tags, tags), end (tags,)
Scores = tuple[Tensor, Tensor, Tensor]
Counts = tuple[Tensor, Tensor]
"""Expected counts: of tags (batch, tokens, tags), of transitions (batch, tags, tags)."""
_Target = Tensor | Counts  # tags; allowed tags (bool); expected counts


class CRF(nn.Module):
    """A linear-chain CRF over `num_tags` tags.

    start_mask (tags,), transition_mask (tags, tags) [from, to] and end_mask (tags,):
    True where allowed (`data.tags.allowed_transitions` gives them); None allows
    everything. What is forbidden has probability 0 and gradient 0, exactly. The masks
    follow from the tag set and are not part of the state dict.

    Emissions are (batch, tokens, tags) natural-log scores, float32 or float64; lengths
    (batch,) integers in 1..tokens. What lies behind a sentence's end is never looked
    at. All is computed in float64 (float32 on devices without it) and given back in the
    emissions' type. Raises ModelError where shapes disagree or the constraints leave no
    sequence; an emission that is NaN or +inf gives NaN in its sentence.
    """

    start_mask: Tensor | None
    transition_mask: Tensor | None
    end_mask: Tensor | None

    def __init__(
        self,
        num_tags: int,
        start_mask: Mask = None,
        transition_mask: Mask = None,
        end_mask: Mask = None,
    ) -> None:
        super().__init__()
        if num_tags < 1:
            raise ModelError(f"a CRF needs at least one tag, not {num_tags}")
        self.num_tags = num_tags
        self.start = nn.Parameter(torch.empty(num_tags).uniform_(-0.1, 0.1))
        self.transitions = nn.Parameter(
            torch.empty(num_tags, num_tags).uniform_(-0.1, 0.1)
        )
        self.end = nn.Parameter(torch.empty(num_tags).uniform_(-0.1, 0.1))
        for name, mask, shape in (
            ("start_mask", start_mask, (num_tags,)),
            ("transition_mask", transition_mask, (num_tags, num_tags)),
            ("end_mask", end_mask, (num_tags,)),
        ):
            tensor = None if mask is None else torch.as_tensor(mask).clone()
            if tensor is not None and (
                tensor.dtype != torch.bool or tensor.shape != shape
            ):
                raise ModelError(
                    f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}, bool of {shape} is "
                    "expected"
                )
            self.register_buffer(name, tensor, persistent=False)

    def loss(self, emissions: Tensor, tags: Tensor, lengths: Tensor) -> Tensor:
        """Negative log likelihood of `tags` (batch, tokens) per sentence: (batch,).

        Raises ModelError when a tag is no tag of this CRF or is forbidden where it
            stands.
        """
        return self._losses(emissions, [tags.long()], lengths)[0]

    def split_loss(
        self, emissions: Tensor, target: _Target, allowed: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The loss of `target` (tags, or expected counts) in two parts, each (batch,).

        -log p(any sequence within `allowed`) (Tsuboi et al. 2008), `allowed` (batch,
        tokens, tags) bool being the tags that each token may have; and -log p(target |
        within `allowed`). Their sum is `loss`; of expected counts (`posterior` of
        another CRF; they get no gradient) E[-log p(y)], which distillation minimises
        (Wang et al. 2020b).
        """
        chosen = target.long() if isinstance(target, Tensor) else target
        source, rest = self._losses(emissions, [allowed.bool(), chosen], lengths)
        return source, rest

    @torch.no_grad()
    def posterior(
        self, emissions: Tensor, lengths: Tensor, allowed: Tensor | None = None
    ) -> Counts:
        """What this CRF expects to see, given that each token has one of its `allowed`
        tags.

        p(tag at token) (batch, tokens, tags), 0 behind the end, and Σ_t p(i at t, j at
        t + 1) (batch, tags, tags) [from, to]; in the emissions' type, without gradient.
        """
        scores, x, lengths, ops = self._prepare(emissions, lengths)
        if allowed is not None:
            _require_shape(allowed, x.shape)
            x = x.masked_fill(~allowed.to(x.device).bool(), -torch.inf)
        _, unary, pairs = _partition(ops, x, lengths, scores, True)
        return unary.to(emissions.dtype), pairs.to(emissions.dtype)

    @torch.no_grad()
    def chances(
        self, emissions: Tensor, lengths: Tensor, rows: Tensor, allowed: Tensor
    ) -> Tensor:
        """p(any sequence within `allowed`) (n,) float64, 0 where there is none.

        rows: (n,) whose sentence's. allowed: (n, tokens, tags) bool, as in
            `split_loss`.
        """
        asked, back = rows.to(emissions.device).unique(return_inverse=True)
        scores, x, lengths, ops = self._prepare(emissions[asked], lengths[asked])
        _require_shape(allowed, (len(back), *x.shape[1:]))
        whole, _, _ = _partition(ops, x, lengths, scores, False)
        within = x[back].masked_fill(~allowed.to(x.device), -torch.inf)
        part, _, _ = ops.partition(within, lengths[back], scores, False)
        return cast(Tensor, (part - whole[back]).exp().clamp(max=1.0))

    @torch.no_grad()
    def decode(self, emissions: Tensor, lengths: Tensor) -> Tensor:
        """The most probable tags (batch, tokens) int64, 0 behind the end (Viterbi).

        Raises ModelError also where emissions are not finite.
        """
        scores, x, lengths, ops = self._prepare(emissions, lengths)
        best, failed = ops.viterbi(x, lengths, scores)
        if failed >= 0:
            raise ModelError(
                f"no tag sequence for sentence {failed} of the batch: its emissions are not "
                "finite, or the constraints allow no sequence of its length"
            )
        return cast(Tensor, best)

    def _losses(
        self, emissions: Tensor, targets: Sequence[_Target], lengths: Tensor
    ) -> tuple[Tensor, ...]:
        """-log p(target | the one before it) of nested targets; the first, of all
        sequences."""
        scores, x, lengths, ops = self._prepare(emissions, lengths)
        moved: list[_Target] = []
        for target in targets:
            if isinstance(target, Tensor):
                _require_shape(
                    target, x.shape if target.dtype == torch.bool else x.shape[:2]
                )
                moved.append(target.to(x.device))
            else:
                unary, pairs = (part.detach().to(x.device, x.dtype) for part in target)
                _require_shape(unary, x.shape)
                _require_shape(pairs, (len(x), self.num_tags, self.num_tags))
                outside = torch.arange(x.shape[1], device=x.device) >= lengths[:, None]
                moved.append((unary.masked_fill(outside[..., None], 0.0), pairs))
        inputs = (emissions, self.start, self.transitions, self.end)
        gradient = torch.is_grad_enabled() and any(p.requires_grad for p in inputs)
        losses = _Loss.apply(*inputs, x, moved, lengths, scores, ops, gradient)
        return cast(tuple[Tensor, ...], losses)

    def _prepare(
        self, emissions: Tensor, lengths: Tensor
    ) -> tuple[Scores, Tensor, Tensor, Any]:
        """Masked scores, emissions in working precision, lengths, and who computes.

        Refuses shapes and lengths that would read out of bounds.
        """
        if emissions.dim() != 3 or emissions.shape[2] != self.num_tags:
            raise ModelError(
                f"emissions of shape {tuple(emissions.shape)} do not fit a CRF of "
                f"{self.num_tags} tags: (batch, tokens, tags) is expected"
            )
        if lengths.shape != emissions.shape[:1]:
            raise ModelError(
                f"{len(emissions)} sentences but lengths of {tuple(lengths.shape)}"
            )
        low, high = (int(lengths.min()), int(lengths.max())) if len(lengths) else (1, 1)
        if low < 1 or high > emissions.shape[1]:
            raise ModelError(
                f"sentence lengths {low} to {high} do not fit emissions of "
                f"{emissions.shape[1]} tokens"
            )
        # float64, but for devices that have none; -inf where forbidden
        dtype = torch.float32 if self.start.device.type == "mps" else torch.float64
        parameters = (self.start, self.transitions, self.end)
        masks = (self.start_mask, self.transition_mask, self.end_mask)
        start, transitions, end = (
            p.detach().to(dtype)
            if mask is None
            else p.detach().to(dtype).masked_fill(~mask, -torch.inf)
            for p, mask in zip(parameters, masks, strict=True)
        )
        x = emissions.detach().to(dtype)
        return (
            (start, transitions, end),
            x,
            lengths.to(x.device, torch.int64),
            self._ops(x),
        )

    def _ops(self, x: Tensor) -> Any:
        if x.device.type != "cpu":
            return TorchOps
        from fednotes.taggers import crf_kernels  # numba takes half a second to import

        return crf_kernels


class _Loss(torch.autograd.Function):
    """The losses, with their gradients computed along (both come from the same
    messages)."""

    @staticmethod
    def forward(
        ctx: Any,
        emissions: Tensor,
        start: Tensor,
        transitions: Tensor,
        end: Tensor,
        x: Tensor,
        targets: Sequence[_Target],
        lengths: Tensor,
        scores: Scores,
        ops: Any,
        gradient: bool,
    ) -> tuple[Tensor, ...]:
        # the first four are here for autograd; their values are in `x` and `scores`
        losses, kept = [], []
        outer, unary, pairs = _partition(ops, x, lengths, scores, gradient)
        for target in targets:
            if isinstance(target, Tensor) and target.dtype == torch.bool:
                within = x.masked_fill(~target, -torch.inf)  # [tagsets crf eq 8]
                inner, of_unary, of_pairs = _partition(
                    ops, within, lengths, scores, gradient
                )
                # [tagsets crf eq 8]
                kept += [unary - of_unary, pairs - of_pairs]
                unary, pairs = of_unary, of_pairs
            elif isinstance(target, Tensor):
                inner = _path_score(ops, x, lengths, scores, target)
                if gradient:
                    ops.subtract_path(unary, pairs, target, lengths)
                kept += [unary, pairs]
            else:
                inner = _expected_score(
                    x, lengths, scores, *target
                )  # [tagsets crf soft]
                # [tagsets crf soft]
                kept += (
                    [unary - target[0], pairs - target[1]]
                    if gradient
                    else [unary, pairs]
                )
            # [tagsets crf eq 8] of what is allowed, [tagsets crf eq 9] of the target
            # within it
            losses.append((outer - inner).to(emissions.dtype))
            outer = inner
        ctx.save_for_backward(lengths, *kept)
        ctx.ops, ctx.dtypes = (
            ops,
            [t.dtype for t in (emissions, start, transitions, end)],
        )
        ctx.set_materialize_grads(False)
        return tuple(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *weights: Tensor | None) -> tuple[Tensor | None, ...]:
        lengths, *kept = ctx.saved_tensors
        total: list[Tensor] = []  # of emissions, start, transitions and end
        for k, weight in enumerate(weights):
            if weight is not None:
                part = ctx.ops.weigh(kept[2 * k], kept[2 * k + 1], lengths, weight)
                total = (
                    [a + b for a, b in zip(total, part, strict=True)]
                    if total
                    else [*part]
                )
        gradients = [g.to(dtype) for g, dtype in zip(total, ctx.dtypes, strict=False)]
        return (*gradients, *[None] * (10 - len(gradients)))


def _expected_score(
    x: Tensor, lengths: Tensor, scores: Scores, unary: Tensor, pairs: Tensor
) -> Tensor:
    """E[score(y)] (batch,) from the expected counts; what is not expected counts 0."""

    def product(count: Tensor, score: Tensor) -> Tensor:
        return torch.where(count == 0.0, 0.0, count * score)

    start, transitions, end = scores
    score = product(unary, x).sum((1, 2))
    score = (
        score
        + product(unary[:, 0], start).sum(1)
        + product(pairs, transitions).sum((1, 2))
    )
    score = score + product(_last(unary, lengths), end).sum(1)
    wrong = score == -torch.inf
    if bool(wrong.any()):
        raise ModelError(
            f"sentence {int(wrong.nonzero()[0, 0])} of the batch: a tag or transition is expected "
            "that this CRF's constraints forbid: the counts come from another tag set or scheme"
        )
    return score


def _partition(
    ops: Any, x: Tensor, lengths: Tensor, scores: Scores, gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    log_z, unary, pairs = ops.partition(x, lengths, scores, gradient)
    impossible = log_z == -torch.inf
    if bool(impossible.any()):
        raise ModelError(
            f"no tag sequence is allowed for sentence {int(impossible.nonzero()[0, 0])} of the "
            "batch: the constraints (and the allowed tags, if given) exclude each other"
        )
    return log_z, unary, pairs


def _require_shape(target: Tensor, expected: tuple[int, ...]) -> None:
    if target.shape != expected:
        raise ModelError(
            f"the target has shape {tuple(target.shape)}, the emissions ask for {tuple(expected)}"
        )


def _path_score(
    ops: Any, x: Tensor, lengths: Tensor, scores: Scores, tags: Tensor
) -> Tensor:
    """Score of the given tags (batch,).

    Raises ModelError for the first tag that is no tag or that the constraints forbid.
    """
    score, (n, t) = ops.path_score(x, lengths, scores, tags)
    if n >= 0:
        before = f"after tag {int(tags[n, t - 1])}" if t else "at the start"
        raise ModelError(
            f"sentence {n} of the batch has tag {int(tags[n, t])} at position {t} ({before}), "
            "which this CRF does not know or its constraints forbid: encode the tags with the "
            "tag set and scheme that the constraints were made for"
        )
    return cast(Tensor, score)


# ---- the recursions as torch operations ----------------------------------------------

_PAIR_BUDGET = 1 << 24  # numbers in one block of pair posteriors (128 MiB in float64)


class TorchOps:
    """The recursions for every device: log-space, all sentences at once, forward and
    backward messages one scan over two stacked batches. Functions, arguments, results:
    `crf_kernels.py`.
    """

    @staticmethod
    def partition(
        emissions: Tensor, lengths: Tensor, scores: Scores, gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """log Z (batch,), posteriors (batch, tokens, tags), transition counts (batch,
        tags, tags).

        The last two are empty without `gradient`. log Z is -inf where no sequence is
        allowed, NaN where an emission is NaN or +inf.
        """
        start, transitions, end = scores
        inside = _inside(lengths, emissions.shape[1])  # (batch, tokens)
        x = emissions.masked_fill(~inside[..., None], 0.0)
        broken = ~(x < torch.inf).flatten(1).all(1)
        x = x.masked_fill(broken[:, None, None], 0.0)
        position = torch.arange(x.shape[1], device=lengths.device)
        # (batch, tokens); padding stays in place
        mirrored = lengths[:, None] - 1 - position
        mirror = torch.where(mirrored >= 0, mirrored, position)[..., None].expand_as(x)
        runs, first, matrix = x[None], start[None, None], transitions[None, None]
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

    @staticmethod
    def path_score(
        emissions: Tensor, lengths: Tensor, scores: Scores, tags: Tensor
    ) -> tuple[Tensor, tuple[int, int]]:
        """Score of the given tags (batch,), added from left to right, so that padding
        changes no bit; sentence and position of the first tag that is none or
        forbidden, or (-1, -1)."""
        start, transitions, end = scores
        inside = _inside(lengths, tags.shape[1])
        unknown = inside & ((tags < 0) | (tags >= emissions.shape[2]))
        known = tags.masked_fill(~inside | unknown, 0)
        # (batch, tokens)
        step = torch.empty(tags.shape, dtype=start.dtype, device=tags.device)
        step[:, 0] = start[known[:, 0]]
        step[:, 1:] = transitions[known[:, :-1], known[:, 1:]]
        is_last = (
            torch.arange(tags.shape[1], device=tags.device) == lengths[:, None] - 1
        )
        step = step + torch.where(is_last, end[known], 0.0)
        wrong = (unknown | (inside & (step == -torch.inf))).nonzero()
        own = emissions.gather(2, known[..., None])[..., 0]
        score = _last((step + own).cumsum(1), lengths)
        return score, (int(wrong[0, 0]), int(wrong[0, 1])) if len(wrong) else (-1, -1)

    @staticmethod
    def subtract_path(
        unary: Tensor, pairs: Tensor, tags: Tensor, lengths: Tensor
    ) -> None:
        """Turn posteriors into gradients of the loss: take away the counts of the given
        tags."""
        inside = _inside(lengths, tags.shape[1])
        tags = tags.masked_fill(~inside, 0)
        unary.scatter_add_(2, tags[..., None], -inside[..., None].to(unary.dtype))
        steps = tags[:, :-1] * unary.shape[2] + tags[:, 1:]  # (batch, tokens - 1)
        pairs.flatten(1).scatter_add_(1, steps, -inside[:, 1:].to(pairs.dtype))

    @staticmethod
    def weigh(
        unary: Tensor, pairs: Tensor, lengths: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gradients of emissions (batch, tokens, tags), start, transitions and end."""
        weights = weights.to(unary.dtype)[:, None, None]
        unary = unary * weights
        return (
            unary,
            unary[:, 0].sum(0),
            (pairs * weights).sum(0),
            _last(unary, lengths).sum(0),
        )

    @staticmethod
    def viterbi(
        emissions: Tensor, lengths: Tensor, scores: Scores
    ) -> tuple[Tensor, int]:
        """Highest-scoring tags (batch, tokens), 0 behind a sentence's end; and the
        first sentence that has none (nothing allowed, or not finite), or -1."""
        start, transitions, end = scores
        tokens = emissions.shape[1]
        inside = _inside(lengths, tokens)
        x = emissions.masked_fill(~inside[..., None], 0.0)
        ways = [start + x[:, 0]]
        for t in range(1, tokens):
            ways.append((ways[-1].unsqueeze(-1) + transitions).amax(-2) + x[:, t])
        top = (_last(torch.stack(ways, dim=1), lengths) + end).amax(-1)
        bad = ~((top > -torch.inf) & (x < torch.inf).flatten(1).all(1))
        best = torch.zeros(emissions.shape[:2], dtype=torch.int64, device=x.device)
        following = best[:, 0]
        for t in range(tokens - 1, -1, -1):
            ends = (lengths - 1 == t)[:, None]
            following = (
                ways[t] + torch.where(ends, end, transitions.T[following])
            ).argmax(-1)
            best[:, t] = following
        return best.masked_fill(~inside, 0), int(bad.nonzero()[0, 0]) if bool(
            bad.any()
        ) else -1


def _inside(lengths: Tensor, tokens: int) -> Tensor:
    # (batch, tokens)
    return torch.arange(tokens, device=lengths.device) < lengths[:, None]


def _last(values: Tensor, lengths: Tensor) -> Tensor:
    """values (batch, tokens, tags) at each sentence's last token: (batch, tags)."""
    return values[torch.arange(len(values), device=values.device), lengths - 1]


def _scan(emissions: Tensor, first: Tensor, matrix: Tensor) -> Tensor:
    """Messages that arrive at each position, before its emission.

    emissions (runs, batch, tokens, tags), first (runs, 1, tags), matrix (runs, 1, tags,
    tags).
    """
    arriving = [first.expand(emissions[:, :, 0].shape)]
    for t in range(1, emissions.shape[2]):
        state = arriving[-1] + emissions[:, :, t - 1]  # (runs, batch, tags)
        arriving.append(torch.logsumexp(state.unsqueeze(-1) + matrix, dim=-2))
    return torch.stack(arriving, dim=2)


def _pairs(
    before: Tensor, after: Tensor, transitions: Tensor, inside: Tensor
) -> Tensor:
    """Σ_t exp(before[t, i] + transitions[i, j] + after[t + 1, j]), in blocks of
    positions."""
    batch, tokens, tags = before.shape
    total = before.new_zeros(batch, tags, tags)
    step = max(1, _PAIR_BUDGET // (batch * tags * tags))
    for t in range(0, tokens - 1, step):
        stop = min(t + step, tokens - 1)
        score = (
            before[:, t:stop, :, None]
            + transitions
            + after[:, t + 1 : stop + 1, None, :]
        )
        score = score.masked_fill(~inside[:, t + 1 : stop + 1, None, None], -torch.inf)
        total += score.exp().sum(1)  # (batch, block, tags, tags) -> (batch, tags, tags)
    return total
