"""Training on so few sentences that none can be held out to decide when to stop."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice

import numpy as np

from fednotes.core.seeds import Draws
from fednotes.core.tensors import seed_torch
from fednotes.data.batches import draw_epoch_batches
from fednotes.taggers.corpora import PreparedCorpus
from fednotes.taggers.model import Model
from fednotes.training.sites import Adam, require_finite_loss


def train_on_few_sentences(
    model: Model,
    corpus: PreparedCorpus,
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    draws: Draws,
    site: str,
) -> None:
    """Train a model for a fixed number of steps of Adam.

    Args:
        model: The model, which is changed.
        corpus: The sentences, prepared by the model. If they lack annotation of some
            of its types, a word without annotation may have one of these types.
        steps: Number of mini-batches.
        batch_size: Number of sentences in a mini-batch.
        learning_rate: Learning rate of Adam.
        draws: Source of the order of sentences and of dropout.
        site: Name of the site, from which the draws are derived.

    Raises:
        LossError: The loss is not finite.
    """
    adam = Adam(model.trainable(), learning_rate)
    model.train()
    batches = islice(_iterate_batches(corpus, batch_size, draws, site), steps)
    for step, indices in enumerate(batches):
        seed_torch(draws.seed_of("few sentences", site, step), model.device)
        loss = model.losses(corpus, indices).source.mean()
        require_finite_loss(loss, site, f"at step {step}")
        loss.backward()
        adam.step()
    model.eval()


def _iterate_batches(
    corpus: PreparedCorpus, batch_size: int, draws: Draws, site: str
) -> Iterator[np.ndarray]:
    """Yield mini-batches without end, epoch after epoch."""
    for epoch in count():
        rng = draws.rng_of("order of few sentences", site, epoch)
        yield from draw_epoch_batches(corpus.lengths, batch_size, rng)
