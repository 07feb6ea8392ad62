"""The site side of fine-tuning: annotated notes → an entity recogniser."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fednotes.core.errors import ConfigError
from fednotes.core.seeds import rng_of
from fednotes.core.types import Document, SiteData
from fednotes.core.update import Tensors, Update
from fednotes.data.batches import buckets
from fednotes.methods.averaging_site import AveragingSite, Step
from fednotes.metrics.spans import SpanCounts, forms_of
from fednotes.models.build import build_model, kind_of
from fednotes.models.encoder_corpus import EncoderCorpus, by_encoder
from fednotes.models.model import Corpus, Model
from fednotes.models.saving import save_model

if TYPE_CHECKING:
    from fednotes.methods.finetune import Config


@dataclass(frozen=True)
class _Sentences(Step):
    """Some units of the training data (sentences, or stretches of documents)."""

    model: Model
    corpus: EncoderCorpus
    indices: np.ndarray

    @property
    def examples(self) -> int:
        return int(self.corpus.words[self.indices].sum())

    def loss(self, batch: Sequence[_Sentences]) -> torch.Tensor:
        """Of what the site annotated itself: where it has fewer types than the others, a word
        without annotation may be O or of any type that the site does not know."""
        words = sum(part.examples for part in batch)
        return self.model.losses(self.corpus, self.indices).source.sum() / max(1, words)


class Site(AveragingSite):
    """One silo: its annotated notes, and the tasks that the server may ask for.

    directory: where the finished model and its scores are written; None writes nothing.

    Raises ConfigError if the site has no training sentence.
    """

    def __init__(
        self,
        data: SiteData,
        config: Config,
        *,
        directory: Path | None = None,
        device: str = "cpu",
        cache: Path | None = None,
        progress: Any = None,
    ) -> None:
        self.data, self.config, self.directory = data, config, directory
        tags = data.tags if "classifier" in config.private else config.tags
        self.model = build_model(config.model, tags, config.seed, device)
        prepare = partial(self.model.prepare, cache=cache, progress=progress)
        self.train_set = prepare(data.train)
        if set(tags.types) > set(data.tags.types):  # silence about other types says nothing
            self.train_set = self.model.annotate(self.train_set, data.train, data.tags.types)
        self._read = by_encoder(self.train_set, kind_of(config.model))
        self.valid_set = prepare(data.valid, gold=False)
        self.test_set = prepare(data.test, gold=False)
        self.num_examples = self.train_set.sentences
        if self.num_examples == 0:
            raise ConfigError(f"site {data.id!r} has no training sentence")
        parameters = self.model.trainable()
        super().__init__(
            data.id,
            config,
            parameters,
            weight=num_notes(data.train),  # n_k, the number of notes
            per_epoch=math.ceil(self.num_examples / config.batch_size),
            private=[name for name in parameters if layer(name) in config.private],
            device=device,
        )
        if getattr(config.model, "train", "") == "all":
            steps = math.ceil(self.num_examples / config.batch_size)
            self.require_covered(len(self._read.ids), steps, "all")
        self.scores: dict[str, Any] = {}

    def described(self) -> str:
        """What is shared and what stays."""
        shared, private = (
            sum(p.numel() for p in part.values()) for part in (self.shared, self.private)
        )
        return f"{shared:,} parameters are shared, {private:,} are private to each site"

    def covered(self, task: str) -> dict[str, int]:
        """…and the tokens, as the encoder reads them."""
        told = super().covered(task)
        return {**told, "tokens": len(self._read.ids)} if told else told

    def steps(self, epoch: int) -> Iterator[list[Step]]:
        """The epoch's mini-batches of like length; their order depends on seed and site."""
        config = self.config
        rng = rng_of(config.seed, "order", self.id, epoch)
        self.model.train(True)
        for batch in buckets(self.train_set.lengths, config.batch_size, rng):
            size = config.batch_size // config.accumulate
            yield [
                _Sentences(self.model, self._read, batch[at : at + size])
                for at in range(0, len(batch), size)
            ]

    # judging

    def evaluate(self, tensors: Tensors, *, cycle: int) -> Update:
        """Counts on the site's validation data."""
        self.load(tensors)
        return Update(metrics=self.counts(self.data.valid, self.valid_set).to_metrics())

    def counts(
        self, documents: Sequence[Document], prepared: Corpus, seen: Collection[str] = frozenset()
    ) -> SpanCounts:
        """Right, wrong and missed mentions of the types that the documents are annotated with."""
        types = self.data.scored_types if documents is self.data.test else self.data.tags.types
        return SpanCounts.of(documents, self.model.predict(prepared), seen=seen, types=types)

    def finish(self, tensors: Tensors) -> Update:
        """Test counts of the model that was kept; save it."""
        self.load_kept(tensors)
        counts = self.counts(self.data.test, self.test_set, forms_of(self.data.train))
        self.scores = counts.scores()
        if self.directory is not None:
            save_model(self.model, self.directory / "model")
        return Update(metrics=counts.to_metrics())

    @property
    def valid_score(self) -> float | None:
        """Strict F1 of the present model on validation data; None where there is none."""
        return self.counts(self.data.valid, self.valid_set).strict_f1

    def scores_on(self, site: SiteData) -> dict[str, Any]:
        """This model's scores on another site's test data, that site's own types only."""
        predicted = self.model.predict(site.test)
        seen = forms_of(site.train)
        return SpanCounts.of(site.test, predicted, seen=seen, types=site.scored_types).scores()


def layer(name: str) -> str:
    """The layer that a parameter belongs to."""
    return name.split(".")[0]


def num_notes(documents: Sequence[Document]) -> int:
    """How many notes the documents are of; sentences of one note count once."""
    # [bert eq 1] n_k
    return len({(d.patient, d.meta.get("document", d.id)) for d in documents})
