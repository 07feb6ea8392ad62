"""The exact linear-chain conditional random field.

Lafferty, McCallum and Pereira 2001:

    score(y) = start[y_1] + Σ_t emission[t, y_t]
               + Σ_t transitions[y_t, y_t+1] + end[y_L]
    p(y)     = exp(score(y)) / Z,  Z = Σ_y exp(score(y)) over the allowed y

The loss is -log p(gold). Its gradient is the difference between expected and observed
counts, which one forward-backward pass computes without autograd:

    d loss / d emission[t, j]    = p(y_t = j) - [gold_t = j]
    d loss / d transitions[i, j] = Σ_t p(y_t = i, y_t+1 = j)
                                   - [gold_t = i, gold_t+1 = j]

The gold sequence may be replaced by

    a set of sequences           its Σ exp(score) replaces exp(score(gold)), and its
                                 posterior replaces the observed counts
    a distribution over          specified by its expected counts, in which the score
    sequences                    is linear

On a CPU the recursions are compiled (`crf_kernels.py`, single-threaded); other devices
use `TorchOps`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fednotes.core.errors import ModelError

Mask = np.ndarray | Tensor | None
Counts = tuple[Tensor, Tensor]
"""Expected counts of tags (batch, tokens, tags) and transitions (batch, tags, tags)."""
_Target = Tensor | Counts
"""Tags (batch, tokens), allowed tags (batch, tokens, tags) bool, or expected counts."""


class CrfScores(NamedTuple):
    """The parameters of a CRF, float32 or in working precision; -inf where forbidden.

    Attributes:
        start: (tags,).
        transitions: (tags, tags) [from, to].
        end: (tags,).
    """

    start: Tensor
    transitions: Tensor
    end: Tensor


class Recursions(Protocol):
    """The computations of a CRF: `crf_kernels.py` or `TorchOps`.

    Emissions are (batch, tokens, tags), float32 or in working precision, and lengths
    (batch,). Everything is computed, and results are, in working precision.
    """

    def compute_partition(
        self,
        emissions: Tensor,
        lengths: Tensor,
        scores: CrfScores,
        *,
        with_counts: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return log Z and, with `with_counts`, the expected counts.

        Returns:
            log Z (batch,), -inf if no sequence is allowed and NaN if an emission is NaN
            or +inf; posteriors (batch, tokens, tags), 0 after a sentence's end;
            expected transitions (batch, tags, tags). The last two are empty without
            `with_counts`.
        """

    def compute_path_loss(
        self,
        emissions: Tensor,
        lengths: Tensor,
        scores: CrfScores,
        tags: Tensor,
        *,
        with_counts: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return -log p(tags), tags (batch, tokens), and its gradients.

        It is `compute_partition` less `compute_path_score` and `subtract_path`, in one
        pass.

        Returns:
            Losses (batch,); gradients of emissions (batch, tokens, tags), 0 after a
            sentence's end, and of transitions (batch, tags, tags). Gradients are empty
            without `with_counts`. Losses and gradients of emissions may already be in
            the type of the emissions.

        Raises:
            ModelError: A tag does not exist or is forbidden at its position, or no
                sequence is allowed.
        """

    def compute_path_score(
        self, emissions: Tensor, lengths: Tensor, scores: CrfScores, tags: Tensor
    ) -> tuple[Tensor, tuple[int, int]]:
        """Return the score of given tags (batch, tokens).

        Returns:
            (batch,) scores; and the sentence and position of the first tag that does
            not exist or is forbidden, or (-1, -1).
        """

    def subtract_path(
        self, unary: Tensor, pairs: Tensor, tags: Tensor, lengths: Tensor
    ) -> None:
        """Subtract the counts of given tags from expected counts, in place."""

    def weigh_gradients(
        self, unary: Tensor, pairs: Tensor, lengths: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients of the weighted sum of the sentences' losses.

        Args:
            unary: (batch, tokens, tags) gradients of each sentence's loss.
            pairs: (batch, tags, tags) gradients of transitions.
            lengths: (batch,).
            weights: (batch,) the weight of each sentence's loss.

        Returns:
            The gradients of emissions, start, transitions and end. Those of emissions
            may already be in the type of the weights.
        """

    def find_best_tags(
        self, emissions: Tensor, lengths: Tensor, scores: CrfScores
    ) -> tuple[Tensor, int]:
        """Return the tags with the highest score.

        Returns:
            (batch, tokens) tags, 0 after a sentence's end; and the first sentence for
            which no sequence is allowed or an emission is not finite, or -1.
        """


class CRF(nn.Module):
    """A linear-chain CRF over `num_tags` tags.

    Emissions are (batch, tokens, tags) natural-log scores, float32 or float64; lengths
    are (batch,) integers from 1 to tokens. Values after a sentence's end are never
    used. Everything is computed in float64 (float32 on devices without it) and returned
    in the type of the emissions. An emission that is NaN or +inf gives NaN in its
    sentence.

    Forbidden tags and transitions have probability and gradient exactly 0. The masks
    are derived from the tag set (see `data.tags.find_allowed_transitions`) and are not
    part of the state dict.

    Args:
        num_tags: Number of tags.
        start_mask: (tags,) bool, True where a sentence may start with the tag; None
            allows everything.
        transition_mask: (tags, tags) [from, to] bool, True where a transition is
            allowed; None allows everything.
        end_mask: (tags,) bool, True where a sentence may end with the tag; None allows
            everything.

    Raises:
        ModelError: Shapes disagree, or the constraints leave no sequence.
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
        self._register_mask("start_mask", start_mask, (num_tags,))
        self._register_mask("transition_mask", transition_mask, (num_tags, num_tags))
        self._register_mask("end_mask", end_mask, (num_tags,))

    def _register_mask(self, name: str, mask: Mask, shape: tuple[int, ...]) -> None:
        """Store a mask as a buffer; raise ModelError if its type or shape is wrong."""
        tensor = None if mask is None else torch.as_tensor(mask).clone()
        if tensor is not None and (tensor.dtype != torch.bool or tensor.shape != shape):
            raise ModelError(
                f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}, expected "
                f"bool of {shape}"
            )
        self.register_buffer(name, tensor, persistent=False)

    def loss(self, emissions: Tensor, tags: Tensor, lengths: Tensor) -> Tensor:
        """Return (batch,), the negative log likelihood of `tags` (batch, tokens).

        Raises:
            ModelError: A tag does not exist or is forbidden at its position.
        """
        return self._compute_losses(emissions, [tags.long()], lengths)[0]

    def compute_loss_in_parts(
        self, emissions: Tensor, target: _Target, allowed: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of a target in two parts, each (batch,).

        The first part is -log p(any sequence within `allowed`) (Tsuboi et al. 2008),
        and the second is -log p(target | within `allowed`). Their sum is `loss`. For
        expected counts it is E[-log p(y)], which distillation minimises (Wang et al.
        2020b).

        Args:
            emissions: (batch, tokens, tags).
            target: Tags (batch, tokens), or expected counts: the `posterior` of another
                CRF, which receives no gradient.
            allowed: (batch, tokens, tags) bool, the tags that each token may have.
            lengths: (batch,).
        """
        chosen = target.long() if isinstance(target, Tensor) else target
        within_allowed, target_given_allowed = self._compute_losses(
            emissions, [allowed.bool(), chosen], lengths
        )
        return within_allowed, target_given_allowed

    @torch.no_grad()
    def compute_posterior(
        self, emissions: Tensor, lengths: Tensor, allowed: Tensor | None = None
    ) -> Counts:
        """Return the expected counts in the emissions' dtype, without gradient.

        Args:
            emissions: (batch, tokens, tags).
            lengths: (batch,).
            allowed: (batch, tokens, tags) bool, the tags that each token may have.

        Returns:
            p(tag at token) (batch, tokens, tags), 0 after the end; and Σ_t p(i at t, j
            at t + 1) (batch, tags, tags) [from, to].
        """
        scores, x, lengths, ops = self._prepare(emissions, lengths)
        if allowed is not None:
            _require_shape(allowed, x.shape)
            x = x.masked_fill(~allowed.to(x.device).bool(), -torch.inf)
        _, unary, pairs = _compute_partition(ops, x, lengths, scores, with_counts=True)
        return unary.to(emissions.dtype), pairs.to(emissions.dtype)

    @torch.no_grad()
    def compute_probability_within(
        self, emissions: Tensor, lengths: Tensor, rows: Tensor, allowed: Tensor
    ) -> Tensor:
        """Return (queries,) float64, p(any sequence within `allowed`).

        It is 0 if `allowed` contains no sequence.

        Args:
            emissions: (batch, tokens, tags).
            lengths: (batch,).
            rows: (queries,) the sentence of each query.
            allowed: (queries, tokens, tags) bool, the tags that each token may have.
        """
        # log Z of a sentence is computed once for all of its queries.
        sentences, sentence_of_query = rows.to(emissions.device).unique(
            return_inverse=True
        )
        scores, x, lengths, ops = self._prepare(
            emissions[sentences], lengths[sentences]
        )
        log_z, _, _ = _compute_partition(ops, x, lengths, scores, with_counts=False)

        x_of_query = x[sentence_of_query]  # (queries, tokens, tags)
        _require_shape(allowed, x_of_query.shape)
        within = x_of_query.masked_fill(~allowed.to(x.device), -torch.inf)
        log_z_within, _, _ = ops.compute_partition(
            within, lengths[sentence_of_query], scores, with_counts=False
        )
        return (log_z_within - log_z[sentence_of_query]).exp().clamp(max=1.0)

    @torch.no_grad()
    def find_best_tags(self, emissions: Tensor, lengths: Tensor) -> Tensor:
        """Return (batch, tokens) int64, the most probable tags; 0 after the end.

        Raises:
            ModelError: Emissions are not finite, shapes disagree, or no sequence is
                allowed.
        """
        scores, x, lengths, ops = self._prepare(emissions, lengths)
        best, failed = ops.find_best_tags(x, lengths, scores)
        if failed >= 0:
            raise ModelError(
                f"no tag sequence for sentence {failed} of the batch: its emissions "
                "are not finite, or the constraints allow no sequence of its length"
            )
        return best

    def _compute_losses(
        self, emissions: Tensor, targets: Sequence[_Target], lengths: Tensor
    ) -> tuple[Tensor, ...]:
        """Return -log p(target | preceding target) for nested targets.

        The first target is conditioned on all sequences.
        """
        scores, x, lengths, ops = self._prepare(emissions, lengths)
        parameters = (emissions, self.start, self.transitions, self.end)
        needs_gradient = torch.is_grad_enabled() and any(
            parameter.requires_grad for parameter in parameters
        )
        problem = _LossProblem(
            emissions=x,
            targets=[self._check_target(target, x, lengths) for target in targets],
            lengths=lengths,
            scores=scores,
            ops=ops,
            needs_gradient=needs_gradient,
        )
        return cast(tuple[Tensor, ...], _Loss.apply(*parameters, problem))

    def _check_target(self, target: _Target, x: Tensor, lengths: Tensor) -> _Target:
        """Check a target's shape, and return it on the emissions' device."""
        if isinstance(target, Tensor):
            is_lattice = target.dtype == torch.bool
            _require_shape(target, x.shape if is_lattice else x.shape[:2])
            return target.to(x.device)

        dtype = _choose_working_dtype(x.device)
        unary, pairs = (part.detach().to(x.device, dtype) for part in target)
        _require_shape(unary, x.shape)
        _require_shape(pairs, (len(x), self.num_tags, self.num_tags))
        outside = torch.arange(x.shape[1], device=x.device) >= lengths[:, None]
        return unary.masked_fill(outside[..., None], 0.0), pairs

    def _prepare(
        self, emissions: Tensor, lengths: Tensor
    ) -> tuple[CrfScores, Tensor, Tensor, Recursions]:
        """Return masked scores, emissions, lengths, and the recursions.

        float32 tensors are not copied: the recursions read them as they are.

        Raises:
            ModelError: Shapes or lengths would cause reads out of bounds.
        """
        if emissions.dim() != 3 or emissions.shape[2] != self.num_tags:
            raise ModelError(
                f"emissions of shape {tuple(emissions.shape)} do not match a CRF of "
                f"{self.num_tags} tags: expected (batch, tokens, tags)"
            )
        if lengths.shape != emissions.shape[:1]:
            raise ModelError(
                f"{len(emissions)} sentences but lengths of {tuple(lengths.shape)}"
            )
        sizes = lengths.tolist() or [1]
        shortest = min(sizes)
        longest = max(sizes)
        if shortest < 1 or longest > emissions.shape[1]:
            raise ModelError(
                f"sentence lengths {shortest} to {longest} do not match emissions of "
                f"{emissions.shape[1]} tokens"
            )

        scores = CrfScores(
            _mask(self.start, self.start_mask),
            _mask(self.transitions, self.transition_mask),
            _mask(self.end, self.end_mask),
        )
        x = _make_readable(emissions)
        lengths = lengths.to(x.device, torch.int64)
        return scores, x, lengths, self._choose_recursions(x.device)

    def _choose_recursions(self, device: torch.device) -> Recursions:
        """Return the recursions for a device: compiled ones for the CPU."""
        return _import_compiled_recursions() if device.type == "cpu" else TorchOps()


@functools.cache
def _import_compiled_recursions() -> Recursions:
    """Import the recursions for the CPU, when they are first needed."""
    from fednotes.taggers import crf_kernels  # numba takes half a second to import

    return crf_kernels


def _choose_working_dtype(device: torch.device) -> torch.dtype:
    """Return the type in which everything is computed on a device."""
    return torch.float32 if device.type == "mps" else torch.float64  # mps lacks float64


def _make_readable(values: Tensor) -> Tensor:
    """Return detached values in a type that the recursions read."""
    values = values.detach()
    if values.dtype == torch.float32:
        return values
    return values.to(_choose_working_dtype(values.device))


def _mask(parameter: Tensor, mask: Tensor | None) -> Tensor:
    """Return a parameter as the recursions read it, -inf where the mask is False."""
    values = _make_readable(parameter)
    return values if mask is None else values.masked_fill(~mask, -torch.inf)


@dataclass(frozen=True, eq=False)
class _LossProblem:
    """The inputs of `_Loss`, as the recursions read them and without gradients."""

    emissions: Tensor
    targets: Sequence[_Target]
    lengths: Tensor
    scores: CrfScores
    ops: Recursions
    needs_gradient: bool

    @property
    def path(self) -> Tensor | None:
        """The tags (batch, tokens) that are the only target, or None."""
        target = self.targets[0]
        if isinstance(target, Tensor) and target.dtype != torch.bool:
            return target
        return None


class _Loss(torch.autograd.Function):
    """The losses of nested targets.

    The forward pass also computes the gradients, which use the same messages.
    """

    @staticmethod
    def forward(
        ctx: Any,
        emissions: Tensor,
        start: Tensor,
        transitions: Tensor,
        end: Tensor,
        problem: _LossProblem,
    ) -> tuple[Tensor, ...]:
        """Return one loss (batch,) for each target.

        The first four arguments register the parameters with autograd; their values are
        in `problem`.
        """
        if problem.path is None:  # targets are allowed tags or expected counts
            losses, gradients = _compute_nested_losses(problem)
        else:
            loss, unary, pairs = problem.ops.compute_path_loss(
                problem.emissions,
                problem.lengths,
                problem.scores,
                problem.path,
                with_counts=problem.needs_gradient,
            )
            losses = [loss]
            gradients = [unary, pairs]

        ctx.save_for_backward(problem.lengths, *gradients)
        ctx.ops = problem.ops
        ctx.dtypes = [t.dtype for t in (emissions, start, transitions, end)]
        ctx.set_materialize_grads(False)
        return tuple(loss.to(emissions.dtype) for loss in losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *weights: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of emissions, start, transitions and end."""
        lengths, *gradients = ctx.saved_tensors
        total: list[Tensor] = []
        for number, weight in enumerate(weights):
            if weight is None:
                continue
            unary = gradients[2 * number]
            pairs = gradients[2 * number + 1]
            part = ctx.ops.weigh_gradients(unary, pairs, lengths, weight)
            if total:
                total = [a + b for a, b in zip(total, part, strict=True)]
            else:
                total = list(part)
        if not total:
            return (None,) * 5
        cast_back = [
            gradient if gradient.dtype == dtype else gradient.to(dtype)
            for gradient, dtype in zip(total, ctx.dtypes, strict=True)
        ]
        return (*cast_back, None)


def _compute_nested_losses(problem: _LossProblem) -> tuple[list[Tensor], list[Tensor]]:
    """Return a loss (batch,) for each target, and its gradients.

    Returns:
        The losses; for each of them, the gradients of emissions and of transitions.
    """
    ops = problem.ops
    x = problem.emissions
    lengths = problem.lengths
    scores = problem.scores
    with_counts = problem.needs_gradient
    losses: list[Tensor] = []
    gradients: list[Tensor] = []

    # `outer` is log Σ exp(score) of the preceding target; `unary` and `pairs` are its
    # expected counts.
    outer, unary, pairs = _compute_partition(
        ops, x, lengths, scores, with_counts=with_counts
    )
    for target in problem.targets:
        if not isinstance(target, Tensor):
            # [tagsets crf soft]
            inner = _compute_expected_score(x, lengths, scores, target)
            if with_counts:
                unary = unary - target[0]  # [tagsets crf soft]
                pairs = pairs - target[1]
            gradients += [unary, pairs]
        elif target.dtype == torch.bool:
            within = x.masked_fill(~target, -torch.inf)  # [tagsets crf eq 8]
            inner, inner_unary, inner_pairs = _compute_partition(
                ops, within, lengths, scores, with_counts=with_counts
            )
            # [tagsets crf eq 8]
            gradients += [unary - inner_unary, pairs - inner_pairs]
            unary = inner_unary
            pairs = inner_pairs
        else:
            inner = _compute_path_score(ops, x, lengths, scores, target)
            if with_counts:
                ops.subtract_path(unary, pairs, target, lengths)
            gradients += [unary, pairs]
        # [tagsets crf eq 8] for the allowed sequences, [tagsets crf eq 9] for the
        # target within them
        losses.append(outer - inner)
        outer = inner
    return losses, gradients


def _compute_expected_score(
    x: Tensor, lengths: Tensor, scores: CrfScores, counts: Counts
) -> Tensor:
    """Return E[score(y)] (batch,) from expected counts; a count of 0 adds 0.

    Raises:
        ModelError: A forbidden tag or transition has a nonzero count.
    """

    def multiply(count: Tensor, score: Tensor) -> Tensor:
        # A forbidden tag has the score -inf, and 0 · -inf would be NaN.
        return torch.where(count == 0.0, 0.0, count * score)

    unary, pairs = counts
    score = multiply(unary, x).sum((1, 2))
    score = (
        score
        + multiply(unary[:, 0], scores.start).sum(1)
        + multiply(pairs, scores.transitions).sum((1, 2))
    )
    score = score + multiply(_pick_last(unary, lengths), scores.end).sum(1)

    is_forbidden = score == -torch.inf
    if bool(is_forbidden.any()):
        raise ModelError(
            f"sentence {int(is_forbidden.nonzero()[0, 0])} of the batch: its counts "
            "include a tag or transition that this CRF's constraints forbid: they come "
            "from another tag set or scheme"
        )
    return score


def _compute_partition(
    ops: Recursions,
    x: Tensor,
    lengths: Tensor,
    scores: CrfScores,
    *,
    with_counts: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Call `ops.compute_partition`; raise ModelError if no sequence is allowed."""
    log_z, unary, pairs = ops.compute_partition(
        x, lengths, scores, with_counts=with_counts
    )
    is_impossible = log_z == -torch.inf
    if bool(is_impossible.any()):
        require_some_sequence(int(is_impossible.nonzero()[0, 0]))
    return log_z, unary, pairs


def require_some_sequence(impossible: int) -> None:
    """Raise ModelError unless `impossible`, a sentence without sequences, is -1."""
    if impossible >= 0:
        raise ModelError(
            f"no tag sequence is allowed for sentence {impossible} of the batch: the "
            "constraints (and the allowed tags, if given) exclude each other"
        )


def _require_shape(target: Tensor, expected: tuple[int, ...]) -> None:
    """Raise ModelError unless a target has the shape that the emissions need."""
    if target.shape != expected:
        raise ModelError(
            f"the target has shape {tuple(target.shape)}, but the emissions need "
            f"{tuple(expected)}"
        )


def _compute_path_score(
    ops: Recursions, x: Tensor, lengths: Tensor, scores: CrfScores, tags: Tensor
) -> Tensor:
    """Return (batch,), the score of given tags.

    Raises:
        ModelError: A tag does not exist or the constraints forbid it.
    """
    score, first_wrong = ops.compute_path_score(x, lengths, scores, tags)
    require_allowed_tags(tags, first_wrong)
    return score


def require_allowed_tags(tags: Tensor, first_wrong: tuple[int, int]) -> None:
    """Raise ModelError if there is a wrong tag; see `Recursions.compute_path_score`."""
    sentence, position = first_wrong
    if sentence >= 0:
        before = "at the start"
        if position:
            before = f"after tag {int(tags[sentence, position - 1])}"
        raise ModelError(
            f"sentence {sentence} of the batch has tag {int(tags[sentence, position])} "
            f"at position {position} ({before}), which this CRF does not know or its "
            "constraints forbid: encode the tags with the tag set and scheme that the "
            "constraints were made for"
        )


# ---- the recursions as torch operations ----------------------------------------------

# Numbers in one block of pair posteriors: 128 MiB in float64.
_PAIR_BUDGET = 1 << 24


class TorchOps:
    """The recursions for every device; see `Recursions`.

    They run in log space over all sentences at once. Forward and backward messages are
    computed in one scan over two stacked batches.
    """

    def compute_partition(
        self,
        emissions: Tensor,
        lengths: Tensor,
        scores: CrfScores,
        *,
        with_counts: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return log Z and the expected counts; see `Recursions.compute_partition`."""
        start, transitions, end = _use_working_precision(scores)
        inside = _mark_inside(lengths, emissions.shape[1])  # (batch, tokens)
        x = emissions.to(start.dtype).masked_fill(~inside[..., None], 0.0)
        is_broken = ~(x < torch.inf).flatten(1).all(1)
        x = x.masked_fill(is_broken[:, None, None], 0.0)

        # Without counts, one forward scan suffices.
        mirror = _find_mirrored_positions(lengths, x)
        runs = x[None]
        at_start = start[None, None]
        matrix = transitions[None, None]
        if with_counts:
            runs = torch.stack([x, x.gather(1, mirror)])
            at_start = torch.stack([start, end])[:, None]
            matrix = torch.stack([transitions, transitions.T])[:, None]
        arriving = _run_forward(runs, at_start, matrix)
        alpha = arriving[0] + x
        log_z = torch.logsumexp(_pick_last(alpha, lengths) + end, dim=-1)
        if not with_counts:
            empty = x.new_empty(0)
            return log_z.masked_fill(is_broken, torch.nan), empty, x.new_empty(0)

        beta = arriving[1].gather(1, mirror)
        finite = log_z.masked_fill(log_z == -torch.inf, 0.0)[:, None, None]
        unary = torch.exp(alpha + beta - finite).masked_fill(~inside[..., None], 0.0)
        pairs = _count_pairs(alpha - finite, x + beta, transitions, inside)
        is_broken_token = is_broken[:, None, None] & inside[..., None]
        unary = unary.masked_fill(is_broken_token, torch.nan)
        pairs = pairs.masked_fill(is_broken[:, None, None], torch.nan)
        return log_z.masked_fill(is_broken, torch.nan), unary, pairs

    def compute_path_loss(
        self,
        emissions: Tensor,
        lengths: Tensor,
        scores: CrfScores,
        tags: Tensor,
        *,
        with_counts: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return losses of given tags; see `Recursions.compute_path_loss`."""
        log_z, unary, pairs = _compute_partition(
            self, emissions, lengths, scores, with_counts=with_counts
        )
        score = _compute_path_score(self, emissions, lengths, scores, tags)
        if with_counts:
            self.subtract_path(unary, pairs, tags, lengths)
        return log_z - score, unary, pairs

    def compute_path_score(
        self, emissions: Tensor, lengths: Tensor, scores: CrfScores, tags: Tensor
    ) -> tuple[Tensor, tuple[int, int]]:
        """Return scores of given tags; see `Recursions.compute_path_score`.

        Sums run left to right, so padding does not change any bit of the result.
        """
        start, transitions, end = _use_working_precision(scores)
        inside = _mark_inside(lengths, tags.shape[1])
        unknown = inside & ((tags < 0) | (tags >= emissions.shape[2]))
        known = tags.masked_fill(~inside | unknown, 0)

        # (batch, tokens)
        step = torch.empty(tags.shape, dtype=start.dtype, device=tags.device)
        step[:, 0] = start[known[:, 0]]
        step[:, 1:] = transitions[known[:, :-1], known[:, 1:]]
        position = torch.arange(tags.shape[1], device=tags.device)
        is_last = position == lengths[:, None] - 1
        step = step + torch.where(is_last, end[known], 0.0)

        emitted = emissions.gather(2, known[..., None])[..., 0]
        score = _pick_last((step + emitted).cumsum(1), lengths)
        wrong = (unknown | (inside & (step == -torch.inf))).nonzero()
        if len(wrong):
            return score, (int(wrong[0, 0]), int(wrong[0, 1]))
        return score, (-1, -1)

    def subtract_path(
        self, unary: Tensor, pairs: Tensor, tags: Tensor, lengths: Tensor
    ) -> None:
        """Subtract the counts of given tags; see `Recursions.subtract_path`."""
        inside = _mark_inside(lengths, tags.shape[1])
        tags = tags.masked_fill(~inside, 0)
        unary.scatter_add_(2, tags[..., None], -inside[..., None].to(unary.dtype))
        steps = tags[:, :-1] * unary.shape[2] + tags[:, 1:]  # (batch, tokens - 1)
        pairs.flatten(1).scatter_add_(1, steps, -inside[:, 1:].to(pairs.dtype))

    def weigh_gradients(
        self, unary: Tensor, pairs: Tensor, lengths: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return weighted gradients; see `Recursions.weigh_gradients`."""
        weights = weights.to(unary.dtype)[:, None, None]
        emissions = unary * weights
        start = emissions[:, 0].sum(0)
        transitions = (pairs * weights).sum(0)
        end = _pick_last(emissions, lengths).sum(0)
        return emissions, start, transitions, end

    def find_best_tags(
        self, emissions: Tensor, lengths: Tensor, scores: CrfScores
    ) -> tuple[Tensor, int]:
        """Return the tags with the highest score; see `Recursions.find_best_tags`."""
        start, transitions, end = _use_working_precision(scores)
        tokens = emissions.shape[1]
        inside = _mark_inside(lengths, tokens)
        x = emissions.to(start.dtype).masked_fill(~inside[..., None], 0.0)
        ways = [start + x[:, 0]]
        for t in range(1, tokens):
            ways.append((ways[-1].unsqueeze(-1) + transitions).amax(-2) + x[:, t])
        highest = (_pick_last(torch.stack(ways, dim=1), lengths) + end).amax(-1)
        bad = ~((highest > -torch.inf) & (x < torch.inf).flatten(1).all(1))

        best = torch.zeros(emissions.shape[:2], dtype=torch.int64, device=x.device)
        following = best[:, 0]
        for t in range(tokens - 1, -1, -1):
            is_last = (lengths - 1 == t)[:, None]
            step = torch.where(is_last, end, transitions.T[following])
            following = (ways[t] + step).argmax(-1)
            best[:, t] = following
        failed = int(bad.nonzero()[0, 0]) if bool(bad.any()) else -1
        return best.masked_fill(~inside, 0), failed


def _use_working_precision(scores: CrfScores) -> CrfScores:
    """Return the scores in the type in which everything is computed."""
    dtype = _choose_working_dtype(scores.start.device)
    return CrfScores(*(score.to(dtype) for score in scores))


def _mark_inside(lengths: Tensor, tokens: int) -> Tensor:
    """Return (batch, tokens) bool, False after a sentence's end."""
    return torch.arange(tokens, device=lengths.device) < lengths[:, None]


def _find_mirrored_positions(lengths: Tensor, x: Tensor) -> Tensor:
    """Return indices, shaped like x, that reverse sentences but not their padding."""
    position = torch.arange(x.shape[1], device=lengths.device)
    mirrored = lengths[:, None] - 1 - position  # (batch, tokens)
    return torch.where(mirrored >= 0, mirrored, position)[..., None].expand_as(x)


def _pick_last(values: Tensor, lengths: Tensor) -> Tensor:
    """Return (batch, …), `values` (batch, tokens, …) at each sentence's last token."""
    return values[torch.arange(len(values), device=values.device), lengths - 1]


def _run_forward(emissions: Tensor, at_start: Tensor, matrix: Tensor) -> Tensor:
    """Run the forward algorithm; return the message arriving at each position.

    A message is the log-sum over all paths to a position, before its emission. Backward
    messages are the forward messages of reversed sentences.

    Args:
        emissions: (runs, batch, tokens, tags).
        at_start: (runs, 1, tags) scores of the first tag.
        matrix: (runs, 1, tags, tags) scores of transitions [from, to].
    """
    arriving = [at_start.expand(emissions[:, :, 0].shape)]
    for t in range(1, emissions.shape[2]):
        state = arriving[-1] + emissions[:, :, t - 1]  # (runs, batch, tags)
        arriving.append(torch.logsumexp(state.unsqueeze(-1) + matrix, dim=-2))
    return torch.stack(arriving, dim=2)


def _count_pairs(
    before: Tensor, after: Tensor, transitions: Tensor, inside: Tensor
) -> Tensor:
    """Return Σ_t exp(before[t, i] + transitions[i, j] + after[t + 1, j]).

    Positions are processed in blocks to limit memory.
    """
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
