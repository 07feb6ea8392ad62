r"""Soft targets from the probabilities of each word's tags.

In `TaggingModel.soften`, the teacher is one model. Here it is a table of probabilities
q_t(y), one row for each word, such as the mean over several models. A model
without a CRF trains on the table as it is. A CRF needs a distribution over sequences of
tags: that of independent words, within the sequences V that the scheme permits,

    q(y) = Π_t q_t(y_t) / Σ_{y' ∈ V} Π_t q_t(y'_t)        for y ∈ V
"""

from __future__ import annotations

import numpy as np
import torch

from fednotes.core.types import TagSet
from fednotes.data.tags import find_allowed_transitions
from fednotes.taggers.corpora import Batch, PreparedCorpus, batch_by_length
from fednotes.taggers.crf import CRF
from fednotes.taggers.partial import Soft

# Smaller probabilities are raised to this one, so that each sentence has a sequence
# that the scheme permits.
LEAST_PROBABILITY = 2.0**-14


def make_word_targets(
    corpus: PreparedCorpus, probabilities: np.ndarray, *, for_crf: bool
) -> Soft:
    """Return the soft targets of a corpus.

    Args:
        corpus: The corpus.
        probabilities: (tokens, tags) q_t(y); each row sums to 1.
        for_crf: Whether the model has a CRF.
    """
    unary = np.asarray(probabilities, np.float32)
    if not for_crf:
        return Soft(unary, np.zeros((corpus.sentences, 0, 0), np.float32))

    crf = _make_chain(corpus.encoded.tagset)
    tags = unary.shape[1]
    within = np.zeros_like(unary)
    pairs = np.zeros((corpus.sentences, tags, tags), np.float32)
    for chosen in batch_by_length(corpus.encoded.lengths):
        batch = Batch.of(corpus, chosen, torch.device("cpu"))
        scores = torch.from_numpy(unary[batch.tokens]).double()
        marginals, transitions = crf.compute_posterior(
            scores.clamp(min=LEAST_PROBABILITY).log(), batch.lengths
        )  # [fedmd chain]
        within[batch.tokens[batch.inside]] = marginals.numpy()[batch.inside]
        pairs[batch.rows] = transitions.numpy()
    return Soft(within, pairs)


def _make_chain(tagset: TagSet) -> CRF:
    """Return a CRF with the constraints of a scheme and no other scores."""
    masks = (torch.from_numpy(mask) for mask in find_allowed_transitions(tagset))
    with torch.random.fork_rng(devices=[]):
        crf = CRF(len(tagset.tags), *masks)
    for parameter in crf.parameters():
        torch.nn.init.zeros_(parameter)
    return crf
