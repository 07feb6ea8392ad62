"""The reading of a batch by models whose words are independent given the text.

Such models have a softmax on top. The loss of a sentence is the sum of its words'
cross-entropies (`partial.py`), also for partially annotated text. `CrfReading`
(`model.py`) is the counterpart for models with a CRF on top.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from fednotes.data.tags import make_span_mask
from fednotes.taggers.corpora import PreparedCorpus
from fednotes.taggers.model import Losses
from fednotes.taggers.partial import (
    compute_word_gradients,
    compute_word_losses,
    compute_word_posterior,
    find_allowed_tags,
    mark_unknown_tags,
)


@dataclass(frozen=True, eq=False)
class WordReading:
    """The `Reading` of a model without a CRF, for the words of some units.

    A unit is a sentence or a document, depending on the corpus. Words are in reading
    order, unit by unit in the order of `chosen`.

    Attributes:
        classifier: Maps states (words, width) to logits (words, tags).
        corpus: The corpus.
        chosen: (units,) indices of the units in the corpus.
        steps: The number of tokens of the longest unit.
        tokens: (words,) indices of the corpus's tokens that were read. Tokens that are
            not read are O.
        place: (words,) positions in (units, steps), flattened.
        logits: (words, tags).
        states: (words, width), the classifier's input.
        layers: (words, width) states above each layer; empty unless requested.
        confidence_meaning: Describes `compute_span_probabilities`, for
            `Model.confidence_meaning`.
    """

    confidence_meaning: ClassVar[str] = (
        "the product of its words' probabilities of the tags that make exactly this "
        "span with this label, given the text"
    )
    classifier: nn.Module
    corpus: PreparedCorpus
    chosen: np.ndarray
    steps: int
    tokens: np.ndarray
    place: Tensor
    logits: Tensor
    states: Tensor
    layers: tuple[Tensor, ...]

    def pad(self, values: Tensor) -> Tensor:
        """Return `values` (words, …) as (units, steps, …), zero elsewhere."""
        units = len(self.chosen)
        flat = values.new_zeros(units * self.steps, *values.shape[1:])
        placed = flat.index_copy(0, self.place, values)
        return placed.view(units, self.steps, *values.shape[1:])

    def _make_targets(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return tags, allowed tags and soft targets for `compute_word_losses`."""
        corpus = self.corpus
        device = self.logits.device
        tags = torch.from_numpy(corpus.encoded.tags[self.tokens]).to(device)
        allowed = soft = None
        if not corpus.complete:
            allowed = find_allowed_tags(tags, corpus.encoded.tagset, corpus.known)
        if corpus.soft is not None:
            soft = torch.from_numpy(corpus.soft.unary[self.tokens]).to(device)
        return tags, allowed, soft

    def find_best_tags(self) -> np.ndarray:
        """Return the predicted tags; see `Reading.find_best_tags`."""
        return self.logits.argmax(-1).cpu().numpy()

    def compute_span_probabilities(self, spans: np.ndarray) -> np.ndarray:
        """Return spans' probabilities: a product over each span and its neighbours.

        Because words are independent, this equals the sum over all tag sequences with
        the span.
        """
        # (units, steps, tags)
        probabilities = self.pad(self.logits.float().softmax(-1))
        table = probabilities.cpu().double().numpy()
        # Words that are not read are O.
        table[..., 0] += table.sum(-1) == 0
        return np.array(
            [
                self._compute_span_probability(table[unit], first, last, kind)
                for unit, first, last, kind in spans.tolist()
            ]
        )

    def _compute_span_probability(
        self, table: np.ndarray, first: int, last: int, kind: int
    ) -> float:
        """Return the probability of one span.

        Args:
            table: (steps, tags) probabilities of the unit's words.
            first: The span's first word.
            last: The word after its last one.
            kind: The index of its type, or -1 for no mention.
        """
        tagset = self.corpus.encoded.tagset
        # One row for the word before the span, one per word, one for the word after it.
        wanted = make_span_mask(tagset, kind, last - first)
        before = max(first - 1, 0)
        part = table[before : last + 1]
        rows = wanted[1:] if first == 0 else wanted
        each = (part * rows[: len(part)]).sum(-1)

        if kind >= 0:
            # Without a preceding word of this type, an I- or E- also opens a span; see
            # `find_spans`.
            width = len(tagset.prefixes)
            tags_of_type = 1 + kind * width + np.arange(width)
            continuing = tags_of_type[~wanted[1, tags_of_type]]
            opening = table[first, continuing].sum()
            if first:
                opening *= 1 - table[first - 1, tags_of_type].sum()
            each[first - before] += opening
        return float(each.prod())

    def compute_posterior(self) -> tuple[np.ndarray, np.ndarray]:
        """Return probabilities of tags; see `Reading.compute_posterior`.

        The transitions are empty, because words are independent.
        """
        _, allowed, _ = self._make_targets()
        assert allowed is not None
        within = compute_word_posterior(self.logits, allowed).float().cpu().numpy()
        return within, np.zeros((len(self.chosen), 0, 0), np.float32)

    def losses(self, *, with_states: bool) -> Losses:
        """Return the losses of units, each the sum over its words; see `Model.losses`.

        Each row of `outputs` is a word.
        """
        corpus = self.corpus
        of_words = compute_word_losses(self.logits, *self._make_targets())
        source, target = (self.pad(loss).sum(1) for loss in of_words)  # (units,)
        if not with_states:
            return Losses(source, target)

        words = torch.bincount(self.place // self.steps, minlength=len(self.chosen))
        count = words.clamp(min=1)[:, None]
        tags, _, _ = self._make_targets()
        return Losses(
            source,
            target,
            hidden=tuple(self.pad(layer).sum(1) / count for layer in self.layers),
            outputs=self.states,
            is_added=mark_unknown_tags(tags, corpus.encoded.tagset, corpus.known),
            score_states=self.classifier,
        )

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Return the gradients of the transfer parameter; see `Model.gradients`.

        A unit's gradient is Σ δ ⊗ h over its words, where δ is the closed-form gradient
        of the logits and h is the classifier's input.
        """
        source, target = compute_word_gradients(self.logits, *self._make_targets())
        states = self.states.to(source.dtype)  # (words, width)
        delta = self.pad(source).transpose(1, 2)  # (units, tags, steps)
        each = (delta @ self.pad(states)).flatten(1)
        total = (target.T @ states).flatten()
        return each, total
