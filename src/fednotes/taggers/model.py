"""What a method may ask of a model that finds entities: the tagger's side of every method.

Four kinds fulfil it: `Tagger` (light, a CRF on frozen features), `EncoderTagger` (a frozen
encoder tuned by prompts or LoRA, a CRF on top), `TokenClassifier` (an encoder that is trained
itself) and `PromptBart` (a pointer network).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fednotes.core.types import Document, TagSet


class Corpus(Protocol):
    """A corpus as a model reads it. Belongs to its site."""

    @property
    def known(self) -> frozenset[str]:
        """The types whose annotation is the site's own; a span of another type is pseudo."""

    @property
    def sentences(self) -> int:
        """Number of sentences (or pieces of sentences too long for the model)."""

    @property
    def lengths(self) -> np.ndarray:
        """(sentences,) tokens or sub-words, for batches of like length."""

    @property
    def documents(self) -> tuple[Document, ...]:
        """The documents, in their order."""


@dataclass(frozen=True)
class Losses:
    """The loss of some sentences, split by where each target comes from.

    source: (sentences,) of what the site annotated itself. target: (sentences,) of what was
    added for types that it does not annotate; zeros where nothing was.

    Only if asked for (`states=True`), for adversarial methods:
    hidden: one (sentences, width) a layer that represents text, mean over the sentence.
    outputs: (steps, width) states right below the output scores, one for each predicted
    target. pseudo: (steps,) bool, those that predict an added target. score: (steps, width) →
    (steps, candidates) unnormalised scores, -inf where a candidate is not allowed.
    """

    source: Tensor
    target: Tensor
    hidden: tuple[Tensor, ...] = ()
    outputs: Tensor | None = None
    pseudo: Tensor | None = None
    score: Callable[[Tensor], Tensor] | None = None


class Model(Protocol):
    """An entity recogniser for one tag set.

    tagset: the types that it predicts. transfer: the name of the small trainable parameter
    whose gradient says how well one loss serves another. widths: of `Losses.hidden`.
    softens: whether it can train on a posterior in place of a best guess.

    A corpus that a method here takes is one that this same model prepared.
    """

    tagset: TagSet
    transfer: str
    softens: bool

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""

    @property
    def frozen(self) -> int:
        """How many numbers of its backbone and tables are never trained."""

    @property
    def widths(self) -> tuple[int, ...]:
        """The columns of each layer of `Losses.hidden`."""

    @property
    def output_width(self) -> int:
        """The columns of `Losses.outputs`."""

    def trainable(self) -> dict[str, nn.Parameter]:
        """Name → parameter, sorted by name, of everything that training changes and sends."""

    def prepare(
        self,
        documents: Sequence[Document],
        cache: Path | None = None,
        progress: Callable[[int, int], None] | None = None,
        gold: bool = True,
    ) -> Corpus:
        """Encode a corpus and look up all that training does not change; every type known."""

    def annotate(
        self, corpus: Any, documents: Sequence[Document], known: Collection[str]
    ) -> Corpus:
        """The same texts with the spans of `documents` as the annotation."""

    def soften(self, corpus: Any) -> Corpus:
        """The same corpus whose target is this model's posterior, given the known types' spans.

        Raises ConfigError where `softens` is False.
        """

    def losses(
        self, corpus: Any, indices: Sequence[int] | np.ndarray, *, states: bool = False
    ) -> Losses:
        """The losses of some sentences, in the order of `indices`."""

    def gradients(self, corpus: Any, indices: Sequence[int] | np.ndarray) -> tuple[Tensor, Tensor]:
        """Gradients with respect to the transfer parameter alone, without dropout.

        Returns (sentences, size): of each sentence's source loss; and (size,): of the sum of
        their target losses. No parameter's `.grad` changes.
        """

    def predict(self, documents: Any) -> tuple[Document, ...]:
        """The documents (or a corpus') with predicted spans in place of their own."""

    def train(self, mode: bool = True) -> nn.Module:
        """Training mode (dropout) on or off."""
