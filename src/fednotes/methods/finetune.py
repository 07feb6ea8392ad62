"""Fine-tuning of a pre-trained encoder for entity recognition across sites.

Dianbo Liu and Tim Miller (2020), "Federated pretraining and fine tuning of BERT using
clinical notes from multiple silos", sections 3.2 and 3.3. Each global cycle trains one
epoch at every site and then takes the mean of their parameters, weighted by numbers of
notes (`averaging.py`, Eq. 1).

With one site, or with all sites' notes pooled, this is ordinary fine-tuning. `private`
keeps layers at their sites, as in FedNER: with `["classifier"]` sites may have
different entity types. Without it, a site with fewer types than the others trains only
on the types that it annotates, and a missing mention of another type is not a negative
example; the methods `distill` and `adversarial` go further, on this same model (`kind =
"token-classifier"`). A type scorer (`taggers/type_scorer.py`) has no rows of outputs
that sites would need in common.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from torch import Tensor, nn

from fednotes.core.counts import round_counts
from fednotes.core.errors import ConfigError, RefusedError
from fednotes.core.federation import Federation, Option, State
from fednotes.core.numbers import PositiveFloat, PositiveInt
from fednotes.core.settings import FilledIn, checked
from fednotes.core.types import Document, SiteData, TagSet
from fednotes.core.update import Tensors, Total, Update
from fednotes.data.batches import draw_epoch_batches, encode_corpus
from fednotes.data.split import pool_documents
from fednotes.methods import averaging, read_presets
from fednotes.methods.averaging import (
    KEEP_BEST,
    Averaging,
    AveragingSite,
    AveragingWithDP,
    count_examples,
    count_steps,
    estimate_traffic,
    list_size_warnings,
    make_alone_configs,
    remove_federation_settings,
    run_cycles,
)
from fednotes.methods.base import Method
from fednotes.methods.model_kinds import make_unsupported_kind_error
from fednotes.metrics.thresholds import (
    THRESHOLDS,
    choose_threshold,
    count_at_thresholds,
    score_thresholds,
)
from fednotes.privacy.promise import Privacy
from fednotes.privacy.training import DPSupport
from fednotes.taggers.corpora import EncoderCorpus
from fednotes.taggers.model import Model, ModelConfig
from fednotes.taggers.saving import build_model, find_config_class, list_model_kinds
from fednotes.taggers.saving import read_model_config as any_model
from fednotes.taggers.token_classifier import TokenClassifierConfig
from fednotes.taggers.type_scorer import TypeScorer, TypeScorerConfig
from fednotes.training.local_trainer import Step
from fednotes.training.server_steps import fill_in_sites, needs_each_update
from fednotes.training.sites import (
    MentionSite,
    list_earlier_classifier_warnings,
    save_global_model,
    split_private,
    summarise_mentions,
    unite_tags,
)


@checked(frozen=True)
class Config(Averaging):
    """Settings of fine-tuning a model that finds mentions.

    Attributes:
        model: The model that every site trains.
        private: Layers that never leave a site: "classifier" or "encoder" of a token
            classifier; "crf", "lora" or "prompts" of an encoder-tagger; "classifier" or
            "lora" of a type scorer.
        choose_threshold: Whether the threshold of a type scorer is chosen in training.
            At each evaluation, sites count their validation mentions at several
            thresholds; the one with the best strict F1 over all sites is saved with the
            model. Without validation mentions, `threshold` of the model is saved.
        tags: The complete tag set, the union over the sites. A job fills it in.
        privacy, min_sites: As in the job's tables. A job fills them in.
    """

    model: FilledIn[ModelConfig] = field(default_factory=TokenClassifierConfig)
    cycles: PositiveInt = 6
    learning_rate: PositiveFloat = 2e-5
    private: tuple[str, ...] = ()
    choose_threshold: bool = False
    tags: FilledIn[TagSet] = field(default_factory=lambda: TagSet(()))
    privacy: FilledIn[Privacy | None] = None
    min_sites: FilledIn[int] = 0

    def __post_init__(self) -> None:
        """Check the settings against each other.

        Raises:
            ConfigError: No run can have these settings.
        """
        super().__post_init__()
        if not self.choose_threshold:
            return
        if not isinstance(self.model, TypeScorerConfig):
            raise ConfigError(
                'choose_threshold = true needs [model] kind = "type-scorer": leave it '
                "out for other kinds of models"
            )
        if self.privacy is not None:
            raise ConfigError(
                "choose_threshold = true counts validation mentions without noise: "
                "with [privacy], leave it out and set model.threshold"
            )


def train(federation: Federation, config: Config) -> State:
    """Run the global cycles of section 3.2; see `averaging.run_cycles`.

    Args:
        federation: The sites.
        config: The settings of the run.

    Returns:
        The server's final state.
    """
    server = Server(
        config, make_initial_parameters(config), summarise, federation.resume()
    )
    return run_cycles(federation, server)


class Server(averaging.Server):
    """The server of `averaging.py`, which also chooses a type scorer's threshold.

    Attributes:
        threshold: The threshold of the kept cycle; None if none was chosen.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.threshold: float | None = None
        super().__init__(*arguments, **options)

    def judge(self, total: Total) -> bool:
        """Record the held-out scores and the threshold; see `averaging.Server`."""
        is_kept = super().judge(total)
        f1_by_threshold = score_thresholds(total.metrics)
        for threshold, f1 in f1_by_threshold.items():
            self.metrics[f"valid_f1_at_{threshold:g}"] = f1
        if f1_by_threshold and (is_kept or not self.best.keeps_tensors):
            self.threshold = choose_threshold(f1_by_threshold)
        return is_kept

    def list_finish_options(self) -> Mapping[str, Option]:
        """Return the threshold, if one was chosen."""
        return {} if self.threshold is None else {"threshold": self.threshold}

    def state(self) -> State:
        """Return all state that the next cycle depends on."""
        state = super().state()
        return replace(state, facts={**state.facts, "threshold": self.threshold})

    def _restore(self, state: State) -> None:
        super()._restore(state)
        self.threshold = state.facts.get("threshold")


def summarise(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the strict micro F1 over all sites' validation mentions.

    If mentions were counted at several thresholds, it is that of the best one.
    """
    f1_by_threshold = score_thresholds(metrics)
    if not f1_by_threshold:
        return summarise_mentions(metrics)
    f1 = max(f1_by_threshold.values())
    return {"held_out": f1, "valid_f1": f1}


def make_initial_parameters(config: Config) -> dict[str, Tensor]:
    """Return the shared parameters before training.

    Raises:
        ConfigError: A private layer does not exist, or all layers are private.
    """
    parameters = build_model(config.model, config.tags, config.seed).trainable()
    layers = {name.split(".")[0] for name in parameters}
    unknown = [name for name in config.private if name not in layers]
    if unknown:
        raise ConfigError(
            f"private = {list(config.private)}: no layer is called {unknown[0]!r}: "
            f"this model has {', '.join(sorted(layers))}"
        )
    if layers <= set(config.private):
        raise ConfigError(
            f"private = {list(config.private)}: nothing is left to share: to train "
            'each site by itself set conditions = ["alone"]'
        )
    shared, _ = split_private(parameters, config.private)
    return {name: parameter.detach() for name, parameter in shared.items()}


@dataclass(frozen=True)
class _Sentences(Step):
    """A batch of training units: sentences, or stretches of documents."""

    model: Model
    corpus: EncoderCorpus
    indices: np.ndarray

    @property
    def examples(self) -> int:
        """The number of words."""
        return int(self.corpus.words[self.indices].sum())

    def loss(self, batch: Sequence[_Sentences]) -> Tensor:
        """Return this part's contribution to the batch's mean loss over words, ().

        If the site has fewer types than the others, a word without annotation may be O
        or any type that the site does not annotate. If there are soft targets from a
        teacher, their loss is added.
        """
        words = sum(part.examples for part in batch)
        losses = self.model.losses(self.corpus, self.indices)
        loss = losses.source
        if self.corpus.soft is not None:
            loss = loss + losses.target
        return loss.sum() / max(1, words)


def draw_batches(
    model: Model,
    corpus: EncoderCorpus,
    *,
    size: int,
    part_size: int,
    rng: np.random.Generator,
) -> Iterator[list[Step]]:
    """Yield an epoch's mini-batches of units of similar length, split into parts.

    Args:
        model: The model that is trained.
        corpus: The model's training data.
        size: Number of units in a mini-batch.
        part_size: Number of units in a part of a mini-batch.
        rng: Source of the random order.
    """
    model.train()
    for batch in draw_epoch_batches(corpus.lengths, size, rng):
        yield [
            _Sentences(model, corpus, batch[start : start + part_size])
            for start in range(0, len(batch), part_size)
        ]


class Site(AveragingSite, MentionSite):
    """One site: its annotated notes, and the tasks that the server requests.

    Args:
        data: The site's documents.
        config: The settings of the run.
        **options: As for `MentionSite`.

    Raises:
        ConfigError: The site has no training sentence, or the word embeddings are
            trained on too few tokens or steps.
    """

    config: Config
    with_scores = False
    rounds_counts = True

    def __init__(self, data: SiteData, config: Config, **options: Any) -> None:
        tags = data.tags if "classifier" in config.private else config.tags
        MentionSite.__init__(self, data, config, tags, **options)
        if set(tags.types) > set(data.tags.types):
            # A missing mention of a type that the site does not annotate means nothing.
            self.train_set = self.model.annotate(
                self.train_set, data.train, data.tags.types
            )
        self._read = self.model.require_corpus(self.train_set)
        parameters, private = self._choose_trained()
        AveragingSite.__init__(
            self,
            data.id,
            config,
            parameters,
            weight=count_notes(data.train),  # n_k: the number of notes
            examples=self.num_examples,
            private=private,
            device=options.get("device", "cpu"),
            draws=self.draws,
            count_step=self.count_step,
        )
        if config.model.trains_word_embeddings:
            self.require_covered()

    def _choose_trained(self) -> tuple[Mapping[str, nn.Parameter], Collection[str]]:
        """Return all trained parameters, and the names of those that stay local."""
        parameters = self.model.trainable()
        _, private = split_private(parameters, self.config.private)
        return parameters, private

    def count_example_tokens(self) -> np.ndarray:
        """Return the number of sub-words of each sentence, (sentences,)."""
        return np.asarray(self._read.pieces.lengths)

    def iterate_steps(self, epoch: int, first: int = 0) -> Iterator[list[Step]]:
        """Yield the epoch's mini-batches of sentences of similar length."""
        rng = self.draws.rng_of("order", self.id, epoch)
        batches = draw_batches(
            self.model,
            self._read,
            size=self.share,
            part_size=self._part_size,
            rng=rng,
        )
        return islice(batches, first, None)

    def evaluate(self, tensors: Tensors, *, cycle: int) -> Update:
        """Return counts on the site's validation data."""
        del cycle
        self.load(tensors)
        if not self.config.choose_threshold:
            return self.report_counts(self.count_mentions("valid"))
        assert isinstance(self.model, TypeScorer)
        predicted = self.model.predict_by_threshold(self.valid_set, THRESHOLDS)
        metrics = count_at_thresholds(self.data.valid, predicted, self.data.tags.types)
        return Update(metrics=round_counts(metrics, self.count_step))

    def finish(self, tensors: Tensors, *, threshold: float = 0.0) -> Update:
        """Test and save the model of the kept cycle.

        Args:
            tensors: The model's shared parameters.
            threshold: The threshold that the server has chosen; 0 if it chose none.

        Raises:
            RefusedError: No server of this job chooses this threshold.
        """
        self.take_threshold(threshold)
        self.load_kept(tensors)
        return self.test_and_save()

    def take_threshold(self, threshold: float) -> None:
        """Set the model's threshold.

        Args:
            threshold: The threshold that the server has chosen; 0 changes nothing.

        Raises:
            RefusedError: No server of this job chooses this threshold.
        """
        if not threshold:
            return
        if not self.config.choose_threshold or threshold not in THRESHOLDS:
            raise RefusedError(
                f"site {self.id!r} received the threshold {threshold:g}, which is not "
                "one of those that this job chooses from"
            )
        self.model.config = replace(self.model.config, threshold=threshold)


def count_notes(documents: Sequence[Document]) -> int:
    """Return the number of notes; sentences of the same note count once."""
    notes = {
        (document.patient, document.meta.get("document", document.id))
        for document in documents
    }
    return len(notes)  # [bert eq 1] n_k


# The interface to jobs.


class FinetuneWithDP(AveragingWithDP):
    """Fine-tuning with differential privacy."""

    def make_initial_parameters(
        self, config: Any, agreed: Tensors
    ) -> dict[str, Tensor]:
        """Return the shared parameters before training."""
        del agreed
        return make_initial_parameters(config)

    def loss(self, site: Any, indices: np.ndarray) -> Tensor:
        """Return the mean loss over the words of some sentences or stretches."""
        part = _Sentences(site.model, site._read, indices)
        return part.loss([part])


class Finetune(Method):
    """Fine-tuning as in Liu and Miller 2020, for a job."""

    config_class: type[Any] = Config
    site_class: type[Any] = Site
    presets = read_presets("finetune")
    length_key = "cycles"
    keep_best = KEEP_BEST
    personal: Mapping[str, Any] = MappingProxyType({"private": ["classifier"]})
    dp: DPSupport | None = FinetuneWithDP()

    def train(self, federation: Federation, config: Any) -> State:
        """Run the global cycles of section 3.2."""
        return train(federation, config)

    def read_model_config(self, table: Mapping[str, Any]) -> ModelConfig:
        """Return the settings of a model that has an encoder.

        Raises:
            ConfigError: The model has no encoder.
        """
        config = any_model({"kind": "token-classifier"} | dict(table), where="")
        if not config.encodes:
            raise make_unsupported_kind_error("finetune", config.kind)
        return config

    def list_models(self) -> Mapping[str, type[Any]]:
        """Return the settings classes of all models that have an encoder."""
        classes = {kind: find_config_class(kind) for kind in list_model_kinds()}
        return {kind: each for kind, each in classes.items() if each.encodes}

    def summarise(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the micro F1 over all sites' validation mentions."""
        return summarise(metrics)

    def configure(self, config: Any, sites: Sequence[SiteData]) -> Any:
        """Return the settings with the number of sites and the union of their tags."""
        return fill_in_sites(
            config, [site.id for site in sites], tags=unite_tags(sites)
        )

    def configure_alone(
        self, config: Any, sites: Sequence[SiteData]
    ) -> tuple[Config, ...]:
        """Return each site's settings, with its entity types."""
        # A shared mini-batch is divided in proportion to the numbers of training units:
        # sentences, or stretches of documents.
        sizes = [0] * len(sites)
        if config.batch == "shared":
            sizes = [_count_units(config, site) for site in sites]
        settings = make_alone_configs(config, sizes)
        return tuple(
            replace(alone, tags=site.tags, model=alone.model.for_types(site.tags.types))
            for alone, site in zip(settings, sites, strict=True)
        )

    def configure_pooled(
        self,
        config: Any,
        sites: Sequence[SiteData],
        complete: Sequence[SiteData] | None,
    ) -> tuple[tuple[SiteData, ...], Config]:
        """Return the pooled data and the settings of centralised fine-tuning.

        If sites annotate different types and no complete annotation is known, each site
        keeps its own classifier on top of an encoder that is trained on all notes. This
        is a reference, not an upper bound.
        """
        types = {frozenset(site.tags.types) for site in sites}
        if complete is None and len(types) > 1:
            heads = replace(config, private=("classifier",), aggregation="mean")
            return tuple(sites), heads
        together = pool_documents(complete or sites)
        return (together,), replace(
            remove_federation_settings(config), tags=together.tags, private=()
        )

    def plan_rounds(self, config: Any, sizes: Sequence[int]) -> tuple[int, int]:
        """Return the number of cycles, and of sentences per cycle over all sites."""
        return config.last_cycle, count_examples(config, sizes)

    def shares_outputs(self, config: Any) -> bool:
        """Return whether the output layer is shared."""
        return not {"classifier", "crf"} & set(config.private)

    def count_steps(self, config: Any, sizes: Sequence[int]) -> int:
        """Return the steps of a site in all cycles, as the mean over the sites."""
        return count_steps(config, sizes)

    def sends_integers(self, config: Any) -> bool:
        """Return whether updates are packed into integers."""
        packed: bool = config.compression == "packed"
        return packed

    def estimate_traffic(self, config: Any, sizes: Sequence[int]) -> tuple[int, int]:
        """Return the bytes that a site sends and receives."""
        del sizes
        return estimate_traffic(config, make_initial_parameters(config))

    def list_warnings(self, config: Any) -> tuple[str, ...]:
        """Warn if word embeddings are shared, or if a trained classifier is reused."""
        if not config.model.trains_word_embeddings:
            return list_earlier_classifier_warnings(config)
        return (
            *list_earlier_classifier_warnings(config),
            'train = "all" shares the word embeddings: the rows that change reveal '
            'which words a site\'s notes have (train = "encoder" keeps them as they '
            "are)",
        )

    def list_size_warnings(self, config: Any, sizes: Sequence[int]) -> tuple[str, ...]:
        """Return a warning if the parts add up to much more than the mini-batch."""
        return list_size_warnings(config, sizes)

    def ends_with_one_model(self, config: Any) -> bool:
        """Return whether no layer is private."""
        return not config.private

    def save_model(self, config: Any, final: State, folder: Path) -> bool:
        """Write the global model if no layer is private."""
        if config.private:
            return False
        model = config.model
        threshold = final.facts.get("threshold")
        if threshold is not None:
            model = replace(model, threshold=threshold)
        return save_global_model(model, config.tags, config.seed, final, folder)

    def needs_each_update(self, config: Any) -> bool:
        """Return whether the aggregation looks at each site's update."""
        return needs_each_update(config)


def _count_units(config: Config, site: SiteData) -> int:
    """Return the number of sentences, or of stretches, that a site trains on."""
    corpus = encode_corpus(
        site.train,
        site.tags,
        max_tokens=config.model.max_unit_words,
        unit=config.model.unit,
    )
    return corpus.sentences


METHOD = Finetune()
