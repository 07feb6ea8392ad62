"""Recover words from the convolutions or the LSTM of a light tagger.

Petrov et al. 2024, "DAGER", section 4.1; see `gradient_span` for the span and the
distance d. The lowest layers of a light tagger read one row x(v) per word v, whatever
its position:

    score of word v = −d(x(v))

x(v) is public: it is computed from public vectors, the hash and the character layer as
sent. Columns of contextual features depend on the sentence and are left out. Decoys are
words of the site that were in no mini-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fednotes.apps.audit.attack import Attack, Trial
from fednotes.apps.audit.attacks.gradient_span import (
    compute_outside_span,
    find_layer_update,
    measure_distance_to_span,
)
from fednotes.apps.audit.listening import Observation, TrainingRecord
from fednotes.apps.audit.scene import Scene
from fednotes.core.seeds import rng_of

MAX_DECOYS = 1500  # maximum number of the site's other words to try
CONVOLUTIONS = "cnn.weight"  # each of shape (offsets, outputs, width)
RECURRENT = "lstm.weight_ih_l0"  # of shape (directions, outputs, width)


def find_read_words(scene: Scene) -> Trial:
    """Try to tell the words of a mini-batch from the site's words that were in none."""
    update = find_layer_update(
        scene,
        observed_updates=find_observed_layers(scene),
        get_weights=get_layer_weights,
        layer_name="convolution or LSTM that reads words",
    )
    site = update.site
    corpora_of_site = [site.train_set, site.valid_set]
    corpora_read = [corpus for record in update.records for corpus, _ in record.batches]
    rows, word_ids = compute_word_rows(site.model, [*corpora_read, *corpora_of_site])
    words = [_list_distinct_words(record, word_ids) for record in update.records]
    at_site = np.concatenate([word_ids[id(corpus)] for corpus in corpora_of_site])
    absent = np.setdiff1d(at_site, np.concatenate(words))
    decoys = rng_of(0, "decoys").permutation(absent)[:MAX_DECOYS]

    width = rows.shape[1]
    # Without the columns of contextual features.
    gradients = [each[..., :width].flatten(0, -2) for each in update.gradients]
    outside = compute_outside_span(gradients)
    of_audited_site = words[0]
    return Trial.from_scores(
        _score_words(rows, of_audited_site, outside),
        _score_words(rows, decoys, outside),
    )


def get_layer_weights(model: Any) -> list[Tensor]:
    """Return the weights of the layers that read words."""
    return list(_get_layers(model).values())


def find_observed_layers(
    scene: Scene, *, only_convolutions: bool = False
) -> Iterator[tuple[Observation, list[Tensor]]]:
    """Yield the first observation in which these layers change, with their updates.

    Args:
        scene: The job.
        only_convolutions: Whether to yield nothing unless a convolution with two or
            more offsets changes.
    """
    names = list(_get_layers(scene.get_audited_site().model))
    for seen in scene.list_observed_trainings():
        steps = {name: seen.compute_descent(name) for name in names}
        changed_layers = {
            name: step
            for name, step in steps.items()
            if step is not None and step.any()
        }
        if not changed_layers:
            continue
        has_offsets = any(
            name.startswith(CONVOLUTIONS) and len(step) > 1
            for name, step in changed_layers.items()
        )
        if has_offsets or not only_convolutions:
            yield seen, list(changed_layers.values())
        return


@torch.no_grad()
def compute_word_rows(
    model: Any, corpora: Sequence[Any]
) -> tuple[Tensor, dict[int, np.ndarray]]:
    """Return the input rows of a tagger's layers for each word of some corpora.

    Args:
        model: A light tagger.
        corpora: Corpora that the tagger has prepared; a corpus may be repeated.

    Returns:
        (words, width) float64, the distinct rows without contextual features; and by
        the identity of each corpus, (tokens,) the row of each of its tokens.
    """
    rows: list[Tensor] = []
    positions: dict[int, np.ndarray] = {}
    for corpus in {id(corpus): corpus for corpus in corpora}.values():
        _, first, form = np.unique(
            corpus.encoded.form, return_index=True, return_inverse=True
        )
        positions[id(corpus)] = form + sum(len(part) for part in rows)
        parts = list(model._represent(replace(corpus, context=None), first))
        rows.append(torch.cat(parts, dim=1).double())
    distinct, merged = np.unique(torch.cat(rows).numpy(), axis=0, return_inverse=True)
    word_ids = {key: merged.ravel()[at] for key, at in positions.items()}
    return torch.from_numpy(distinct), word_ids


def list_read_sentences(
    record: TrainingRecord, word_ids: Mapping[int, np.ndarray]
) -> list[np.ndarray]:
    """Return the (tokens,) words of each sentence that was read.

    Args:
        record: What a site's model was trained on.
        word_ids: The second result of `compute_word_rows`.
    """
    sentences = []
    for corpus, numbers in record.batches:
        bounds = corpus.encoded.bounds
        for number in numbers:
            words = word_ids[id(corpus)]
            sentences.append(words[bounds[number] : bounds[number + 1]])
    return sentences


def _get_layers(model: Any) -> dict[str, Tensor]:
    """Return the layers that read words, if they read more than contextual features."""
    if not {"words", "characters"} & set(getattr(model, "layers", ())):
        return {}
    parameters = dict(model.named_parameters())
    convolutions = {
        name: value
        for name, value in parameters.items()
        if name.startswith(CONVOLUTIONS)
    }
    if convolutions:
        return convolutions
    return {RECURRENT: parameters[RECURRENT]} if RECURRENT in parameters else {}


def _list_distinct_words(
    record: TrainingRecord, word_ids: Mapping[int, np.ndarray]
) -> np.ndarray:
    """Return (words,) the distinct words that one site read, ascending."""
    sentences = list_read_sentences(record, word_ids)
    if not sentences:
        return np.zeros(0, np.int64)
    return np.unique(np.concatenate(sentences))


def _score_words(rows: Tensor, words: np.ndarray, outside: Tensor) -> Tensor:
    """Return (words,) −d(x(v)), without words whose row is zero."""
    chosen = rows[torch.from_numpy(words)]
    return -measure_distance_to_span(chosen[chosen.any(dim=1)], outside)


_SEES = "an update of a convolution or LSTM that reads words"
CLOSES = (
    "convolutions and LSTM that stay at the site (private); more "
    "sentences per batch; dropout; noise ([privacy])"
)

ATTACKS = (Attack("words from convolutions", _SEES, CLOSES, find_read_words),)
