"""The exact linear-chain conditional random field (Lafferty, McCallum and Pereira 2001).

    score(y) = start[y_1] + Σ_t emission[t, y_t] + Σ_t transitions[y_t, y_t+1] + end[y_L]
    p(y)     = exp(score(y)) / Z,  Z = Σ_y exp(score(y)) over the allowed y

The loss is -log p(gold). Its gradient is what the model expects to see minus what is there, and
comes from one forward-backward pass instead of from autograd:

    d loss / d emission[t, j]    = p(y_t = j) - [gold_t = j]
    d loss / d transitions[i, j] = Σ_t p(y_t = i, y_t+1 = j) - [gold_t = i, gold_t+1 = j]

In place of gold there may be a set of sequences (its sum of exp(score) takes the place of
exp(score(gold)), its posterior that of the counts) or a distribution over them, given by its
expected counts, in which the score is linear.

`crf_cpu` does this on CPU (compiled kernels, one thread), `crf_torch` everywhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fednotes.core.errors import ModelError
from fednotes.taggers.kernels import crf_torch

Backend = Literal["auto", "numba", "torch"]
Mask = np.ndarray | Tensor | None
_Scores = tuple[Tensor, Tensor, Tensor]
Counts = tuple[Tensor, Tensor]
"""Expected counts: of tags (batch, tokens, tags), of transitions (batch, tags, tags)."""
_Target = Tensor | Counts  # tags; allowed tags (bool); expected counts


class CRF(nn.Module):
    """A linear-chain CRF over `num_tags` tags.

    start_mask (tags,), transition_mask (tags, tags) [from, to] and end_mask (tags,): True where
    allowed (`data.tags.allowed_transitions` gives them); None allows everything. What is
    forbidden has probability 0 and gradient 0, exactly. The masks follow from the tag set and
    are not part of the state dict.

    backend: "numba" (CPU only) and "torch" (any device) agree; "auto" takes the first on CPU.

    Emissions are (batch, tokens, tags) natural-log scores, float32 or float64; lengths (batch,)
    integers in 1..tokens. What lies behind a sentence's end is never looked at. All is computed
    in float64 (float32 on devices without it) and given back in the emissions' type.
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
        *,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        if num_tags < 1:
            raise ModelError(f"a CRF needs at least one tag, not {num_tags}")
        self.num_tags, self.backend = num_tags, backend
        self.start = nn.Parameter(torch.empty(num_tags).uniform_(-0.1, 0.1))
        self.transitions = nn.Parameter(torch.empty(num_tags, num_tags).uniform_(-0.1, 0.1))
        self.end = nn.Parameter(torch.empty(num_tags).uniform_(-0.1, 0.1))
        for name, mask, shape in (
            ("start_mask", start_mask, (num_tags,)),
            ("transition_mask", transition_mask, (num_tags, num_tags)),
            ("end_mask", end_mask, (num_tags,)),
        ):
            self.register_buffer(name, _mask(name, mask, shape), persistent=False)

    def loss(self, emissions: Tensor, tags: Tensor, lengths: Tensor) -> Tensor:
        """Negative log likelihood of `tags` (batch, tokens) per sentence: (batch,).

        NaN for a sentence with an emission that is NaN or +inf. Raises ModelError when a tag is
        no tag of this CRF or is forbidden where it stands, or when shapes disagree.
        """
        return self._losses(emissions, [tags.long()], lengths)[0]

    def partial_loss(self, emissions: Tensor, allowed: Tensor, lengths: Tensor) -> Tensor:
        """-log p(any sequence within `allowed`) per sentence: (batch,).

        allowed: (batch, tokens, tags) bool, the tags that each token may have (Tsuboi et al.
        2008). Raises ModelError when `allowed` and the constraints leave no sequence.
        """
        return self._losses(emissions, [allowed.bool()], lengths)[0]

    def expected_loss(self, emissions: Tensor, counts: Counts, lengths: Tensor) -> Tensor:
        """E[-log p(y)] per sentence (batch,), over a distribution with these expected counts.

        = log Z - Σ_t counts[t]·emissions[t] - (start, transitions and end likewise). With
        `posterior` of another CRF this is what distillation of structures minimises (Wang et
        al. 2020b). The counts get no gradient. Raises ModelError when shapes disagree or
        something is expected that the constraints forbid.
        """
        return self._losses(emissions, [counts], lengths)[0]

    def split_loss(
        self, emissions: Tensor, target: Tensor | Counts, allowed: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The loss of `target` (tags, or expected counts) in two parts, each (batch,).

        -log p(within `allowed`), as `partial_loss`; and -log p(target | within `allowed`). They
        share their forward and backward messages, and their sum is `loss` (`expected_loss`).
        Raises ModelError as these do.
        """
        chosen = target.long() if isinstance(target, Tensor) else target
        source, rest = self._losses(emissions, [allowed.bool(), chosen], lengths)
        return source, rest

    @torch.no_grad()
    def posterior(
        self, emissions: Tensor, lengths: Tensor, allowed: Tensor | None = None
    ) -> Counts:
        """What this CRF expects to see, given that each token has one of its `allowed` tags.

        p(tag at token) (batch, tokens, tags), 0 behind the end, and Σ_t p(i at t, j at t + 1)
        (batch, tags, tags) [from, to]; in the emissions' type, without gradient. NaN where an
        emission is NaN or +inf; raises ModelError when the constraints leave no sequence.
        """
        scores, x, lengths, ops = self._prepare(emissions, lengths)
        if allowed is not None:
            _require_shape(allowed, x.shape)
            x = x.masked_fill(~allowed.to(x.device).bool(), -torch.inf)
        _, unary, pairs = _partition(ops, x, lengths, scores, True)
        return unary.to(emissions.dtype), pairs.to(emissions.dtype)

    def marginals(self, emissions: Tensor, lengths: Tensor) -> Tensor:
        """p(tag at token) (batch, tokens, tags): the first part of `posterior`."""
        return self.posterior(emissions, lengths)[0]

    @torch.no_grad()
    def decode(self, emissions: Tensor, lengths: Tensor) -> Tensor:
        """The most probable tags (batch, tokens) int64, 0 behind the end (Viterbi).

        Raises ModelError when the constraints leave no sequence or emissions are not finite.
        """
        scores, x, lengths, ops = self._prepare(emissions, lengths)
        best, failed = ops.viterbi(x, lengths, *scores)
        if failed >= 0:
            raise ModelError(
                f"no tag sequence for sentence {failed} of the batch: its emissions are not "
                "finite, or the constraints allow no sequence of its length"
            )
        return cast(Tensor, best)

    def extra_repr(self) -> str:
        constrained = any(m is not None for m in (self.start_mask, self.transition_mask))
        return f"{self.num_tags}, constrained={constrained}, backend={self.backend!r}"

    def _losses(
        self, emissions: Tensor, targets: Sequence[_Target], lengths: Tensor
    ) -> tuple[Tensor, ...]:
        """-log p(target | the one before it) of nested targets; the first, of all sequences."""
        scores, x, lengths, ops = self._prepare(emissions, lengths)
        moved: list[_Target] = []
        for target in targets:
            if isinstance(target, Tensor):
                _require_shape(target, x.shape if target.dtype == torch.bool else x.shape[:2])
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
    ) -> tuple[_Scores, Tensor, Tensor, ModuleType]:
        """Masked scores, emissions in working precision, lengths, and who computes.

        Refuses shapes and lengths that would read out of bounds.
        """
        if emissions.dim() != 3 or emissions.shape[2] != self.num_tags:
            raise ModelError(
                f"emissions of shape {tuple(emissions.shape)} do not fit a CRF of "
                f"{self.num_tags} tags: (batch, tokens, tags) is expected"
            )
        if lengths.shape != emissions.shape[:1]:
            raise ModelError(f"{len(emissions)} sentences but lengths of {tuple(lengths.shape)}")
        low, high = (int(lengths.min()), int(lengths.max())) if len(lengths) else (1, 1)
        if low < 1 or high > emissions.shape[1]:
            raise ModelError(
                f"sentence lengths {low} to {high} do not fit emissions of "
                f"{emissions.shape[1]} tokens"
            )
        scores = self._scores()
        x = emissions.detach().to(scores[0].dtype)
        return scores, x, lengths.to(x.device, torch.int64), self._ops(x.device.type == "cpu")

    def _ops(self, on_cpu: bool) -> ModuleType:
        if self.backend == "numba" and not on_cpu:
            raise ModelError("the compiled CRF runs on CPU only: use backend 'auto' or 'torch'")
        if self.backend == "torch" or not on_cpu:
            return crf_torch
        from fednotes.taggers.kernels import crf  # numba takes half a second to import

        return crf

    def _scores(self) -> _Scores:
        """start, transitions and end without gradient, in float64, -inf where forbidden."""
        dtype = crf_torch.precision(self.start.device)
        start, transitions, end = (
            p.detach().to(dtype) for p in (self.start, self.transitions, self.end)
        )
        if self.start_mask is not None:
            start = start.masked_fill(~self.start_mask, -torch.inf)
        if self.transition_mask is not None:
            transitions = transitions.masked_fill(~self.transition_mask, -torch.inf)
        if self.end_mask is not None:
            end = end.masked_fill(~self.end_mask, -torch.inf)
        return start, transitions, end


class _Loss(torch.autograd.Function):
    """The losses, with their gradients computed along (both come from the same messages)."""

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
        scores: _Scores,
        ops: ModuleType,
        gradient: bool,
    ) -> tuple[Tensor, ...]:
        # the first four are here for autograd; their values are in `x` and `scores`
        losses, kept = [], []
        outer, unary, pairs = _partition(ops, x, lengths, scores, gradient)
        for target in targets:
            if isinstance(target, Tensor) and target.dtype == torch.bool:
                within = x.masked_fill(~target, -torch.inf)  # [tagsets crf eq 8]
                inner, of_unary, of_pairs = _partition(ops, within, lengths, scores, gradient)
                # [tagsets crf eq 8]
                kept += [unary - of_unary, pairs - of_pairs]
                unary, pairs = of_unary, of_pairs
            elif isinstance(target, Tensor):
                inner, wrong = ops.path_score(x, lengths, *scores, target)
                _require_allowed(target, wrong)
                if gradient:
                    ops.subtract_path(unary, pairs, target, lengths)
                kept += [unary, pairs]
            else:
                inner = _expected_score(x, lengths, scores, *target)  # [tagsets crf soft]
                # [tagsets crf soft]
                kept += [unary - target[0], pairs - target[1]] if gradient else [unary, pairs]
            # [tagsets crf eq 8] of what is allowed, [tagsets crf eq 9] of the target within it
            losses.append((outer - inner).to(emissions.dtype))
            outer = inner
        ctx.save_for_backward(lengths, *kept)
        ctx.ops, ctx.dtypes = ops, [t.dtype for t in (emissions, start, transitions, end)]
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
                total = [a + b for a, b in zip(total, part, strict=True)] if total else [*part]
        gradients = [g.to(dtype) for g, dtype in zip(total, ctx.dtypes, strict=False)]
        return (*gradients, *[None] * (10 - len(gradients)))


def _expected_score(
    x: Tensor, lengths: Tensor, scores: _Scores, unary: Tensor, pairs: Tensor
) -> Tensor:
    """E[score(y)] (batch,) from the expected counts."""
    start, transitions, end = scores
    rows = torch.arange(len(x), device=x.device)
    score = _product(unary, x).sum((1, 2))
    score = score + _product(unary[:, 0], start).sum(1) + _product(pairs, transitions).sum((1, 2))
    score = score + _product(unary[rows, lengths - 1], end).sum(1)
    wrong = score == -torch.inf
    if bool(wrong.any()):
        raise ModelError(
            f"sentence {int(wrong.nonzero()[0, 0])} of the batch: a tag or transition is expected "
            "that this CRF's constraints forbid: the counts come from another tag set or scheme"
        )
    return score


def _product(count: Tensor, score: Tensor) -> Tensor:
    """count · score, 0 where the count is, whatever the score."""
    return torch.where(count == 0.0, 0.0, count * score)


def _partition(
    ops: ModuleType, x: Tensor, lengths: Tensor, scores: _Scores, gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    log_z, unary, pairs = ops.partition(x, lengths, *scores, gradient)
    impossible = log_z == -torch.inf
    if bool(impossible.any()):
        raise ModelError(
            f"no tag sequence is allowed for sentence {int(impossible.nonzero()[0, 0])} of the "
            "batch: the constraints (and the allowed tags, if given) exclude each other"
        )
    return log_z, unary, pairs


# ---- errors ----------------------------------------------------------------------------------


def _mask(name: str, mask: Mask, shape: tuple[int, ...]) -> Tensor | None:
    if mask is None:
        return None
    tensor = torch.as_tensor(mask)
    if tensor.dtype != torch.bool or tensor.shape != shape:
        raise ModelError(
            f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}, bool of {shape} is expected"
        )
    return tensor.clone()


def _require_shape(target: Tensor, expected: tuple[int, ...]) -> None:
    if target.shape != expected:
        raise ModelError(
            f"the target has shape {tuple(target.shape)}, the emissions ask for {tuple(expected)}"
        )


def _require_allowed(tags: Tensor, wrong: tuple[int, int]) -> None:
    n, t = wrong
    if n >= 0:
        before = f"after tag {int(tags[n, t - 1])}" if t else "at the start"
        raise ModelError(
            f"sentence {n} of the batch has tag {int(tags[n, t])} at position {t} ({before}), "
            "which this CRF does not know or its constraints forbid: encode the tags with the "
            "tag set and scheme that the constraints were made for"
        )
