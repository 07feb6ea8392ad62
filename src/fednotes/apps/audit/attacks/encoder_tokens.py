"""Recover tokens and their positions from the lowest layers of an encoder.

Petrov et al. 2024, "DAGER", section 4.1; see `gradient_span` for the span and the
distance d. The lowest linear layers of an encoder read the embedding x(v, i) of token v
at position i, which anyone can compute for all v and i:

    score of token v           = −min_i d(x(v, i))
    score of place i, given v  = mean_j log d(x(v, j)) − log d(x(v, i)) + κ f(v, i)

f(v, i) = log(1 + n_v n_i), where n_v and n_i count how often token v and position i
occur: if both are frequent, the pair is slightly more likely. For positions, the
distance weights each direction by λ / (s² + λ) instead of testing whether it is spanned
(`compute_outside_span(soft=True)`). The paper's second step, which determines which
tokens belong to one sentence, is omitted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fednotes.apps.audit.attack import Attack, Trial
from fednotes.apps.audit.attacks.gradient_span import (
    compute_outside_span,
    find_layer_update,
    measure_distance_to_span,
)
from fednotes.apps.audit.listening import (
    Observation,
    TrainingRecord,
    find_present_and_absent,
)
from fednotes.apps.audit.scene import Scene
from fednotes.core.seeds import rng_of
from fednotes.taggers.model import evaluating

MAX_DECOYS = 1500  # maximum number of other tokens of the vocabulary to try
MAX_PLACES = 128  # number of positions of a sequence that are tried
TOKENS_A_CALL = 32  # number of tokens embedded together
# Of the largest movement in a round; smaller movements are rounding errors.
MIN_MOVEMENT = 0.05
FREQUENCY_WEIGHT = 0.02  # κ; a larger value would mask the gradient
LAYERS = "map that reads an encoder's embeddings"


def find_read_tokens(scene: Scene) -> Trial:
    """Distinguish the tokens that were read from tokens that no site read."""
    update = find_layer_update(
        scene,
        observed_updates=_find_observed_layers(scene),
        get_weights=_get_lowest_weights,
        layer_name=LAYERS,
    )
    library = _get_library(update.site.model)
    outside = compute_outside_span(update.gradients)
    is_present, is_absent = find_present_and_absent("", update.records)
    is_token = np.arange(len(is_absent)) != library.config.pad_token_id
    decoys = rng_of(0, "decoys").permutation(np.flatnonzero(is_absent & is_token))
    positions = getattr(library.config, "max_position_embeddings", MAX_PLACES)
    places = min(MAX_PLACES, positions - 2)

    present = _measure_distances(library, outside, np.flatnonzero(is_present), places)
    absent = _measure_distances(library, outside, decoys[:MAX_DECOYS], places)
    width, directions = outside.shape
    return Trial.from_scores(
        -present.min(dim=1).values,
        -absent.min(dim=1).values,
        span=float(width - directions),
        width=float(width),
    )


def infer_token_places(scene: Scene) -> Trial:
    """Infer the positions of tokens, given which tokens were read and how often."""
    update = find_layer_update(
        scene,
        observed_updates=_find_observed_layers(scene),
        get_weights=_get_lowest_weights,
        layer_name=LAYERS,
        columns_per_token=8,
    )
    model = update.site.model
    sequences = update.records[0].sequences
    tokens = np.setdiff1d(
        np.concatenate([ids.ravel() for ids in sequences]), _get_special_tokens(model)
    )
    places = min(MAX_PLACES, max(ids.shape[1] for ids in sequences))
    counts = np.stack([_count_places(one, tokens, places) for one in update.records])
    outside = compute_outside_span(update.gradients, soft=True)
    distances = _measure_distances(_get_library(model), outside, tokens, places).numpy()
    return Trial.from_pair_scores(score_places(distances, counts[0]), counts)


def score_places(distances: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the score of each position for each token, shape (tokens, places).

    Args:
        distances: (tokens, places) d of each token at each position.
        counts: (tokens, places) how often each token was at each position; the
            adversary knows only the sums over rows and columns.
    """
    log_distances = np.log(distances)
    nearness = log_distances.mean(1, keepdims=True) - log_distances
    frequency = np.log1p(np.outer(counts.sum(1), counts.sum(0)))  # [audit places]
    scores: np.ndarray = nearness + FREQUENCY_WEIGHT * frequency  # [audit places]
    return scores


# ---- an encoder's layers -------------------------------------------------------------


class _Reached(Exception):
    """Raised when the only layer of interest has read its input."""


def _get_library(model: Any) -> Any:
    """Return the Hugging Face model whose word embeddings are read, or None."""
    library = getattr(model, "library", None) or getattr(model, "model", None)
    return library if hasattr(library, "base_model") else None


def _get_special_tokens(model: Any) -> Sequence[int]:
    """Return the ids of special tokens, whose positions are public."""
    if hasattr(model, "specials"):
        ids: Sequence[int] = model.specials.all
    else:
        ids = model.tokenizer.all_special_ids
    return ids


def _record_inputs(
    library: Any, layers: Sequence[nn.Linear], ids: Tensor
) -> list[tuple[Any, Tensor]]:
    """Run a model on token ids; return layers with their inputs, as they are computed.

    If there is only one layer, the computation stops at its input.
    """
    inputs: list[tuple[Any, Tensor]] = []

    def record_input(layer: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        inputs.append((layer, arguments[0]))
        if len(layers) == 1:
            raise _Reached

    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(evaluating(library))
        stack.enter_context(suppress(_Reached))
        for layer in layers:
            stack.callback(layer.register_forward_pre_hook(record_input).remove)
        library.base_model(input_ids=ids)
    return inputs


def _find_lowest_layers(library: Any) -> list[nn.Linear]:
    """Return the layers that read the output of the embeddings."""
    linear = [module for module in library.modules() if isinstance(module, nn.Linear)]
    inputs = _record_inputs(library, linear, torch.full((1, 4), 5))
    embedded = inputs[0][1]
    return [layer for layer, value in inputs if value is embedded]


def _get_lowest_weights(model: Any) -> list[Tensor]:
    """Return the weights of the layers that read the output of the embeddings."""
    return [layer.weight for layer in _find_lowest_layers(_get_library(model))]


def _measure_distances(
    library: Any, outside: Tensor, tokens: np.ndarray, places: int
) -> Tensor:
    """Return the distance d of each token at each position, shape (tokens, places).

    Args:
        library: The Hugging Face model.
        outside: (width, directions) from `compute_outside_span`.
        tokens: (tokens,) the tokens' ids.
        places: Number of positions.
    """
    lowest_layer = _find_lowest_layers(library)[0]
    parts = []
    for ids in torch.from_numpy(tokens)[:, None].split(TOKENS_A_CALL):
        repeated = ids.expand(-1, places)
        [(_, embeddings)] = _record_inputs(library, [lowest_layer], repeated)
        parts.append(measure_distance_to_span(embeddings.double(), outside))
    return torch.cat(parts)


def _find_observed_layers(scene: Scene) -> Iterator[tuple[Observation, list[Tensor]]]:
    """Yield the observations in which the lowest layers move, with their updates.

    In a LoRA adapter, one factor starts at zero, so the first step moves the other
    only by rounding errors; such rounds are left out.
    """
    model = scene.get_audited_site().model
    library = _get_library(model)
    if library is None:
        return
    lowest = _find_lowest_layers(library)
    movements = []
    for seen in scene.list_observed_trainings():
        updates = [
            *_list_weight_updates(model, lowest, seen),
            *_list_lora_updates(model, lowest, seen),
        ]
        updates = [update for update in updates if update.any()]
        movement = sum(float(update.norm()) for update in updates)
        movements.append((movement, seen, updates))
    largest = max((movement for movement, *_ in movements), default=0)
    for movement, seen, updates in movements:
        if updates and movement >= MIN_MOVEMENT * largest:
            yield seen, updates


def _list_weight_updates(
    model: Any, lowest: Sequence[nn.Linear], seen: Observation
) -> list[Tensor]:
    """Return the updates of the lowest layers' weights, as far as they are sent."""
    # By identity: `model` names the very tensors that the layers hold.
    names = {id(value): name for name, value in model.trainable().items()}
    updates = []
    for layer in lowest:
        name = names.get(id(layer.weight))
        if name is None:
            continue  # this weight is not trained
        update = seen.compute_descent(name)
        if update is not None:
            updates.append(update)
    return updates


def _list_lora_updates(
    model: Any, lowest: Sequence[nn.Linear], seen: Observation
) -> list[Tensor]:
    """Return the updates of LoRA adapters in the lowest layers, if any are sent.

    A LoRA adapter is a product of two factors. This returns the updates of the
    factor that reads a layer's input.
    """
    # The tensor "lora.down" holds this factor of all adapted layers: stacked if all
    # layers have the same size, otherwise side by side.
    stacked_factors = seen.compute_descent("lora.down")
    if stacked_factors is None:
        return []
    adapted_layers = getattr(model, "adapted_layers", [])
    if stacked_factors.dim() == 3:
        factors = list(stacked_factors)
    else:
        widths = [layer.in_features for layer in adapted_layers]
        factors = list(stacked_factors.split(widths, dim=1))
    return [
        factor
        for layer, factor in zip(adapted_layers, factors, strict=True)
        if any(layer is low for low in lowest)
    ]


def _count_places(
    record: TrainingRecord, tokens: np.ndarray, places: int
) -> np.ndarray:
    """Return (tokens, places) how often each token was at each position.

    Args:
        record: What a site's model was trained on.
        tokens: (tokens,) the tokens' ids, ascending.
        places: Number of positions.
    """
    counts = np.zeros((len(tokens), places))
    for ids in record.sequences:
        row, place = np.nonzero(np.isin(ids[:, :places], tokens))
        np.add.at(counts, (np.searchsorted(tokens, ids[row, place]), place), 1)
    return counts


_SEES = "an update of the layers that read an encoder's embeddings"
_CLOSES = 'frozen lowest layers (train = "top"); noise ([privacy])'

ATTACKS = (
    Attack("tokens from the lowest layers", _SEES, _CLOSES, find_read_tokens),
    Attack(
        "positions from the lowest layers",
        _SEES,
        f"{_CLOSES}; more local steps",
        infer_token_places,
    ),
)
