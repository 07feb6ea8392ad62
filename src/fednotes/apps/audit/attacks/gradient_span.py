"""The span of a layer's gradient, which contains the inputs that the layer read.

Petrov et al. 2024, "DAGER: Exact Gradient Inversion for Large Language Models", section
4.1. A linear layer Y = X Wᵀ has the gradient

    ∂L/∂W = (∂L/∂Y)ᵀ X        X (tokens, width)

Its rows are sums of the rows of X. If there are fewer tokens than columns, the gradient
does not span the complete space, and an input row x in the span was in the batch:

    d(x) = |x − P x| / |x|    P projects onto the rows of the gradient

Dropout changes the rows, more tokens than columns span everything, and a step of Adam
consists of signs of such sums, so d is small rather than zero. The paper compares d
with a threshold; here, d ranks the candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fednotes.apps.audit.attack import NotApplicable
from fednotes.apps.audit.listening import Observation, TrainingRecord, recording_batches
from fednotes.apps.audit.scene import Scene
from fednotes.taggers.model import evaluating

ROUNDING = 1e-6  # smaller singular values, relative to the largest, are rounding
# Of the columns; if more are spanned, only the largest directions count as spanned.
MAX_SPAN = 0.8
SOFTNESS = 1e-8  # λ as a fraction of the largest s²


class LayerUpdate(NamedTuple):
    """An adversary's knowledge of the layers that read a site's inputs.

    Attributes:
        site: The audited site, with the parameters that it computed with.
        gradients: (…, width) the update of each layer.
        records: What each site was trained on, the audited site first.
    """

    site: Any
    gradients: Sequence[Tensor]
    records: Sequence[TrainingRecord]


def find_layer_update(
    scene: Scene,
    *,
    observed_updates: Iterable[tuple[Observation, list[Tensor]]],
    get_weights: Callable[[Any], list[Tensor]],
    layer_name: str,
    columns_per_token: int = 2,
) -> LayerUpdate:
    """Return the update of the layers to invert; for the control, from few sentences.

    Args:
        scene: The job.
        observed_updates: Observations with the updates of the layers, lazily.
        get_weights: Returns the weights of a model's layers, each (…, width).
        layer_name: Name of the layers, for the message.
        columns_per_token: The control's batch has at most width / `columns_per_token`
            tokens.

    Raises:
        NotApplicable: No update of these layers leaves a site.
    """
    if scene.is_control:
        return _make_control_update(scene, get_weights, columns_per_token)
    for seen, gradients in observed_updates:
        return LayerUpdate(scene.restore_observed_site(seen), gradients, seen.records)
    raise NotApplicable(f"no {layer_name} leaves a site")


def compute_outside_span(gradients: Sequence[Tensor], *, soft: bool = False) -> Tensor:
    """Return (width, directions) the directions outside the span of gradients.

    Args:
        gradients: (rows, width) of each layer.
        soft: Whether to return all directions, each weighted by (λ / (s² + λ))^½ with
            its singular value s, instead of only those that are not spanned.
    """
    rows = torch.cat([gradient / gradient.norm() for gradient in gradients])
    squares, directions = torch.linalg.eigh(rows.T @ rows)  # ascending s²
    squares = (squares / squares[-1]).clamp(min=0)
    if soft:
        weights: Tensor = directions * (SOFTNESS / (squares + SOFTNESS)).sqrt()
        return weights
    rank = min(int((squares > ROUNDING**2).sum()), int(MAX_SPAN * len(squares)))
    outside: Tensor = directions[:, : len(squares) - rank]
    return outside


def measure_distance_to_span(rows: Tensor, outside: Tensor) -> Tensor:
    """Return (…,) the fraction d(x) of each row outside the span, from 0 to 1.

    Args:
        rows: (…, width).
        outside: (width, directions) from `compute_outside_span`.
    """
    fraction: Tensor = (rows @ outside).norm(dim=-1) / rows.norm(dim=-1)
    return fraction


def _make_control_update(
    scene: Scene, get_weights: Callable[[Any], list[Tensor]], columns_per_token: int
) -> LayerUpdate:
    """Return a gradient without dropout, of few enough sentences to have a span."""
    model = scene.get_audited_site().model
    width = get_weights(model)[0].shape[-1]
    if "context" in getattr(model, "layers", ()):
        # The attack cannot use columns of contextual features, so only the others
        # count.
        context = model.config.project or model.encoder.dim
        columns_per_token = -(-columns_per_token * width // (width - context))
    site = scene.make_undefended(
        batch="each", batch_size=2, accumulate=1, length=max(8, width // 4)
    ).get_audited_site()
    model = site.model
    weights = get_weights(model)
    record = TrainingRecord()
    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        stack.enter_context(
            recording_batches([model], lambda: record, only_training=False)
        )
        for weight in weights:
            stack.callback(weight.requires_grad_, weight.requires_grad)
            weight.requires_grad_(True)  # noqa: FBT003 - torch takes it by position
        loss = _compute_loss_of_few_tokens(site, width // columns_per_token)
        gradients = torch.autograd.grad(loss, weights)
    return LayerUpdate(site, [gradient.double() for gradient in gradients], (record,))


def _compute_loss_of_few_tokens(site: Any, max_tokens: int) -> Tensor:
    """Return the loss of as many texts as have `max_tokens` tokens, at least one."""
    if not hasattr(site.model, "tagset"):
        (part, *_) = next(iter(site.iterate_steps(0)))
        site.model.eval()  # drawing a batch has switched to training mode
        loss: Tensor = part.loss([part])
        return loss
    lengths = site.train_set.lengths + 2  # with an encoder's two special tokens
    short = np.flatnonzero(lengths <= max(max_tokens, lengths.min()))
    count = int((lengths[short].cumsum() <= max_tokens).sum())
    total: Tensor = site.model.losses(
        site.train_set, short[: max(1, count)]
    ).source.sum()
    return total
