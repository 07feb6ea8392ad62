"""Fine-tuning of a pre-trained encoder for entity recognition across silos.

Dianbo Liu and Tim Miller (2020), "Federated pretraining and fine tuning of BERT using clinical
notes from multiple silos", sections 3.2 and 3.3. One epoch at every silo in each global cycle,
then the mean of their parameters, weighted by numbers of notes (`averaging.py`, Eq. 1).

One site, or all sites' notes pooled, is ordinary fine-tuning. `private` keeps layers at their
sites, as FedNER does: with `["classifier"]` sites may have different entity types. Without it,
a site with fewer types than the others trains on what it annotated alone, its silence about
other types being no negative example; the methods `distill` and `adversarial` go further, on
this same model (`kind = "token-classifier"`).

The site side of fine-tuning: annotated notes → an entity recogniser.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fednotes.core.errors import ConfigError
from fednotes.core.federation import Federation, State
from fednotes.core.seeds import rng_of
from fednotes.core.tensors import nbytes
from fednotes.core.types import Document, SiteData, TagSet
from fednotes.core.update import Tensors, Update
from fednotes.data.batches import buckets
from fednotes.data.split import pool
from fednotes.methods.averaging import Averaging, AveragingSite, Server, Step, run_cycles
from fednotes.metrics.spans import SpanCounts, forms_of
from fednotes.taggers.corpora import EncoderCorpus, by_encoder
from fednotes.taggers.model import Corpus, Model
from fednotes.taggers.saving import ModelConfig, build_model, kind_of, save_model
from fednotes.taggers.saving import model_config as any_model
from fednotes.taggers.token_classifier import TokenClassifierConfig


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


KINDS = ("token-classifier", "encoder-tagger")


@dataclass(frozen=True)
class Config(Averaging):
    """The settings of one fine-tuning run; see also `Averaging`.

    private: layers that never leave a site: "classifier", "encoder" ("crf", "lora", "prompts"
        of an encoder-tagger).
    tags: the complete tag set, the union over the sites; a job fills it in.
    """

    model: ModelConfig = field(default_factory=TokenClassifierConfig)
    cycles: int = 6
    learning_rate: float = 2e-5
    private: tuple[str, ...] = ()
    tags: TagSet = field(default_factory=lambda: TagSet(()))


PRESETS: dict[str, dict[str, Any]] = {
    "paper": {
        "training": {
            "cycles": 6,
            "keep_cycle": 0,
            "local_epochs": 1,
            "batch_size": 32,
            "learning_rate": 2e-5,
            "warmup": 0.1,
            "decay": "linear",
            "weight_decay": 0.01,
            "clip": 1.0,
            "private": [],
            "server": "average",
            "compression": "none",
        },
        "model": {"kind": "token-classifier", "train": "all", "context": "sentence"},
    },
    "best": {"training": {"precision": "auto"}},
}


def train(federation: Federation, config: Config) -> State:
    """Global cycles of section 3.2; see `averaging.run_cycles`."""
    server = Server(config, initial(config), judged, federation.resume())
    return run_cycles(federation, config, server)


def initial(config: Config) -> dict[str, Tensor]:
    """What sites share, before training. Raises ConfigError for a private layer that is none."""
    model = build_model(config.model, config.tags, config.seed)
    _require_layers(config.private, {layer(name) for name in model.trainable()})
    shared = {n: p for n, p in model.trainable().items() if layer(n) not in config.private}
    return {name: parameter.detach() for name, parameter in shared.items()}


def judged(metrics: Mapping[str, float]) -> dict[str, float]:
    """Micro F1, strict, over all sites' validation mentions."""
    counts = SpanCounts.from_metrics(metrics)
    f1 = counts.scores()["strict"]["f1"]
    return {"held_out": f1 if counts.total.gold else -math.inf, "valid_f1": f1}


def _require_layers(private: tuple[str, ...], known: set[str]) -> None:
    for name in private:
        if name not in known:
            raise ConfigError(
                f"private = {list(private)}: no layer is called {name!r}; this model has "
                f"{', '.join(sorted(known))}"
            )
    if known <= set(private):
        raise ConfigError(
            f"private = {list(private)}: nothing is left to share; to train each site by itself "
            'set conditions = ["alone"]'
        )


# what a job asks of a method


def model_config(table: Mapping[str, Any]) -> ModelConfig:
    """The [model] table; kind = "token-classifier" if none is given. Raises ConfigError."""
    config = any_model({"kind": "token-classifier"} | dict(table))
    if kind_of(config) not in KINDS:
        raise ConfigError(
            f'kind = {kind_of(config)!r} is no model for method = "finetune", which takes '
            f"{' and '.join(KINDS)}; the methods fedner and distill take others"
        )
    return config


def for_sites(config: Config, sites: Sequence[SiteData]) -> Config:
    """The configuration with the union of the sites' entity types."""
    return replace(config, tags=reduce(TagSet.union, (site.tags for site in sites)))


def alone(config: Config, sites: Sequence[SiteData]) -> tuple[Config, ...]:
    """Each site's configuration where it trains by itself, on its own types."""
    return tuple(replace(config, tags=site.tags) for site in sites)


def pooled(
    config: Config, sites: Sequence[SiteData], complete: Sequence[SiteData] | None
) -> tuple[tuple[SiteData, ...], Config]:
    """One model trained on all sites' notes: the paper's centralised fine-tuning.

    Where sites annotate different types and no complete annotation is known, each keeps a
    classifier of its own over an encoder trained on all: a reference, not a bound.
    """
    if complete is None and len({frozenset(site.tags.types) for site in sites}) > 1:
        return tuple(sites), replace(config, private=("classifier",))
    together = pool(complete or sites)
    return (together,), replace(config, tags=together.tags, private=())


def planned(config: Config, sizes: Sequence[int]) -> tuple[int, int]:
    """Cycles, and the sentences of each at all sites together."""
    return config.last_cycle, sum(sizes) * config.local_epochs


def traffic(config: Config, sizes: Sequence[int]) -> tuple[int, int]:
    """Bytes that a site sends and is sent at most in a run, before any compression."""
    each = nbytes(initial(config))
    return config.cycles * each, (config.cycles + 1) * each  # what was judged is not sent again


def warnings(config: Config) -> tuple[str, ...]:
    """What a person should know before training."""
    if getattr(config.model, "train", "") != "all":
        return ()
    return (
        'train = "all" shares the word embeddings: the rows that change tell which words a '
        'site\'s notes have (train = "encoder" keeps them as they are)',
    )


def one_model(config: Config) -> bool:
    """Whether sites end with equal models, of which one copy is kept."""
    return not config.private
