"""Fine-tuning of a pre-trained encoder for entity recognition across silos.

Dianbo Liu and Tim Miller (2020), "Federated pretraining and fine tuning of BERT using
clinical notes from multiple silos", sections 3.2 and 3.3. One epoch at every silo in
each global cycle, then the mean of their parameters, weighted by numbers of notes
(`averaging.py`, Eq. 1).

One site, or all sites' notes pooled, is ordinary fine-tuning. `private` keeps layers at
their sites, as FedNER does: with `["classifier"]` sites may have different entity
types. Without it, a site with fewer types than the others trains on what it annotated
alone, its silence about other types being no negative example; the methods `distill`
and `adversarial` go further, on this same model (`kind = "token-classifier"`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from fednotes.core.errors import ConfigError
from fednotes.core.federation import Federation, Method, State
from fednotes.core.settings import checked
from fednotes.core.types import Document, SiteData, TagSet
from fednotes.core.update import Tensors, Update
from fednotes.data.batches import buckets, encode_corpus
from fednotes.data.split import pool
from fednotes.methods import presets
from fednotes.methods.averaging import (
    Averaging,
    AveragingSite,
    Server,
    Step,
    central,
    examples_of,
    parts,
    private_by,
    run_cycles,
    size_warnings,
    traffic_of,
)
from fednotes.privacy.promise import Privacy
from fednotes.taggers.corpora import EncoderCorpus
from fednotes.taggers.model import Model, ModelConfig
from fednotes.taggers.saving import build_model, kinds, model_class
from fednotes.taggers.saving import model_config as any_model
from fednotes.taggers.token_classifier import TokenClassifierConfig
from fednotes.training.server_steps import by_each, for_names
from fednotes.training.sites import (
    Count,
    MentionSite,
    Rate,
    all_tags,
    begun_from,
    judged_mentions,
    parted,
    save_global,
)


@checked(frozen=True)
class Config(Averaging):
    """Settings of fine-tuning a model that finds mentions.

    Attributes:
        model: The model that every site trains.
        private: Layers that never leave a site: "classifier" or "encoder" of a token
            classifier; "crf", "lora" or "prompts" of an encoder-tagger.
        tags: The complete tag set, the union over the sites. A job fills it in.
        privacy, min_sites: As in the job's tables. A job fills them in.
    """

    model: ModelConfig = field(default_factory=TokenClassifierConfig)
    cycles: Count = 6
    learning_rate: Rate = 2e-5
    private: tuple[str, ...] = ()
    tags: TagSet = field(default_factory=lambda: TagSet(()))
    privacy: Privacy | None = None
    min_sites: int = 0


def train(federation: Federation, config: Config) -> State:
    """Global cycles of section 3.2; see `averaging.run_cycles`."""
    return run_cycles(
        federation,
        Server(config, initial(config), judged_mentions, federation.resume()),
    )


def initial(config: Config) -> dict[str, Tensor]:
    """What sites share, before training.

    Raises ConfigError for a private layer that is none.
    """
    parameters = build_model(config.model, config.tags, config.seed).trainable()
    known = {name.split(".")[0] for name in parameters}
    if odd := [name for name in config.private if name not in known]:
        raise ConfigError(
            f"private = {list(config.private)}: no layer is called {odd[0]!r}; this model has "
            f"{', '.join(sorted(known))}"
        )
    if known <= set(config.private):
        raise ConfigError(
            f"private = {list(config.private)}: nothing is left to share; to train each site by "
            'itself set conditions = ["alone"]'
        )
    return {
        name: value.detach()
        for name, value in parted(parameters, config.private)[0].items()
    }


@dataclass(frozen=True)
class _Sentences(Step):
    """Some units of the training data (sentences, or stretches of documents)."""

    model: Model
    corpus: EncoderCorpus
    indices: np.ndarray

    @property
    def examples(self) -> int:
        return int(self.corpus.words[self.indices].sum())

    def loss(self, batch: Sequence[_Sentences]) -> Tensor:
        """Of what the site annotated itself: where it has fewer types than the others,
        a word without annotation may be O or of any type that the site does not know.
        And of a teacher's soft targets, where there are any."""
        words = sum(part.examples for part in batch)
        found = self.model.losses(self.corpus, self.indices)
        each = found.source if self.corpus.soft is None else found.source + found.target
        return each.sum() / max(1, words)


class Site(AveragingSite, MentionSite):
    """One silo: its annotated notes, and the tasks that the server may ask for."""

    config: Config
    with_scores = False
    rounds_counts = True

    def __init__(self, data: SiteData, config: Config, **options: Any) -> None:
        """Options and errors are those of `MentionSite`."""
        tags = data.tags if "classifier" in config.private else config.tags
        MentionSite.__init__(self, data, config, tags, **options)
        # silence about other types says nothing
        if set(tags.types) > set(data.tags.types):
            self.train_set = self.model.annotate(
                self.train_set, data.train, data.tags.types
            )
        self._read = self.model.require_corpus(self.train_set)
        parameters, private = self._trained()
        AveragingSite.__init__(
            self,
            data.id,
            config,
            parameters,
            weight=num_notes(data.train),  # n_k, the number of notes
            examples=self.num_examples,
            tokens=len(self._read.pieces.ids),
            private=private,
            device=options.get("device", "cpu"),
            draws=self.draws,
            count_step=self.count_step,
        )
        if getattr(config.model, "train", "") == "all":
            self.require_covered()

    def _trained(self) -> tuple[Mapping[str, nn.Parameter], Collection[str]]:
        """All that is trained, and the names of what stays here."""
        parameters = self.model.trainable()
        return parameters, parted(parameters, self.config.private)[1]

    def steps(self, epoch: int, first: int = 0) -> Iterator[list[Step]]:
        """The epoch's mini-batches of like length; their order depends on draws and
        site."""
        rng = self.draws.rng_of("order", self.id, epoch)
        self.model.train(True)
        for batch in buckets(self.train_set.lengths, self.share, rng)[first:]:
            yield [
                _Sentences(self.model, self._read, batch[at : at + self._part])
                for at in range(0, len(batch), self._part)
            ]

    def evaluate(self, tensors: Tensors, *, cycle: int) -> Update:
        """Counts on the site's validation data."""
        self.load(tensors)
        return self.report_counts(self.counts("valid"))

    def finish(self, tensors: Tensors) -> Update:
        """Test counts of the model that was kept; save it."""
        self.load_kept(tensors)
        return self.tested()


def num_notes(documents: Sequence[Document]) -> int:
    """How many notes the documents are of; sentences of one note count once."""
    # [bert eq 1] n_k
    return len({(d.patient, d.meta.get("document", d.id)) for d in documents})


# what a job asks of a method


def model_config(table: Mapping[str, Any]) -> ModelConfig:
    """The [model] table; kind = "token-classifier" if none is given.

    Raises ConfigError.
    """
    config = any_model({"kind": "token-classifier"} | dict(table))
    if not config.encodes:
        raise ConfigError(
            f'kind = {config.kind!r} is no model for method = "finetune", which takes '
            f"{' and '.join(models())}; the method distill takes it"
        )
    return config


def models() -> dict[str, type[ModelConfig]]:
    """Those that fine-tuning trains: kind → the class of its settings."""
    return {kind: own for kind in kinds() if (own := model_class(kind)).encodes}


def for_sites(config: Config, sites: Sequence[SiteData]) -> Config:
    """The configuration with the union of the sites' entity types."""
    return for_names(config, [site.id for site in sites], tags=all_tags(sites))


def alone(config: Config, sites: Sequence[SiteData]) -> tuple[Config, ...]:
    """Each site's configuration where it trains by itself, on its own types."""
    read: dict[str, Any] = {"max_tokens": getattr(config.model, "max_tokens", None)}
    # so batches are of what is trained
    read["unit"] = getattr(config.model, "context", "sentence")
    shared = config.batch == "shared"  # else no batch depends on how much a site has
    sizes = [
        encode_corpus(s.train, s.tags, **read).sentences if shared else 0 for s in sites
    ]
    own = parts(config, sizes)
    return tuple(
        replace(each, tags=site.tags) for each, site in zip(own, sites, strict=True)
    )


def pooled(
    config: Config, sites: Sequence[SiteData], complete: Sequence[SiteData] | None
) -> tuple[tuple[SiteData, ...], Config]:
    """One model trained on all sites' notes: the paper's centralised fine-tuning.

    Where sites annotate different types and no complete annotation is known, each keeps
    a classifier of its own over an encoder trained on all: a reference, not a bound.
    """
    if complete is None and len({frozenset(site.tags.types) for site in sites}) > 1:
        return tuple(sites), replace(
            config, private=("classifier",), aggregation="mean"
        )
    together = pool(complete or sites)
    return (together,), replace(central(config), tags=together.tags, private=())


def planned(config: Config, sizes: Sequence[int]) -> tuple[int, int]:
    """Cycles, and the sentences of each at all sites together."""
    return config.last_cycle, examples_of(config, sizes)


def traffic(config: Config, sizes: Sequence[int]) -> tuple[int, int]:
    """Bytes that a site sends and is sent at most in a run."""
    return traffic_of(config, initial(config))


def warnings(config: Config) -> tuple[str, ...]:
    """What a person should know before training."""
    if getattr(config.model, "train", "") != "all":
        return begun_from(config)
    return (
        *begun_from(config),
        'train = "all" shares the word embeddings: the rows that change tell which words a '
        'site\'s notes have (train = "encoder" keeps them as they are)',
    )


def private_loss(site: Site, indices: np.ndarray) -> Tensor:
    """The mean loss of the words of some units."""
    part = _Sentences(site.model, site._read, indices)
    return part.loss([part])


def one_model(config: Config) -> bool:
    """Whether sites end with equal models, of which one copy is kept."""
    return not config.private


def save(config: Config, final: State, folder: Path) -> bool:
    """The global model of a run's last state, where no layer is private."""
    if config.private:
        return False
    return save_global(config.model, config.tags, config.seed, final, folder)


METHOD = Method(
    Config,
    Site,
    train,
    model_config,
    presets("finetune"),
    planned,
    pooled,
    judged_mentions,
    models=models,
    for_sites=for_sites,
    alone=alone,
    traffic=traffic,
    warnings=warnings,
    size_warnings=size_warnings,
    one_model=one_model,
    save=save,
    each=by_each,
    private=private_by(initial, private_loss),
)
