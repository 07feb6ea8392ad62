r"""Sites with different models learn from each other's predictions on public notes.

Daliang Li and Junpu Wang 2019, "FedMD: Heterogenous federated learning via model
distillation" (arXiv:1910.03581), with models that tag words. Tao Lin, Lingjing Kong,
Sebastian U. Stich and Martin Jaggi 2020, "Ensemble distillation for robust model fusion
in federated learning" (FedDF), also average predictions, but train models on the
server.

    paper           here
    m               the sites of the federation
    D_k             `Site.train_set`, the site's own notes
    D_0, d_j        `Site.public_set`, the public notes of all sites, cut into words
    f_k             `Site.model`, of a kind that each site chooses; it stays at the site
    f_k(x_i)        "posteriors" of `Site.predict`, of each public word
    f̃(x_i)          `compute_consensus`
    transfer        round 0: each site trains on its own notes
    communicate     the task "predict"
    digest, revisit the task "train", in the same steps; see `Site.train`

Encoders differ in their sub-words, so all sites cut the public notes into the same
words. A site's model predicts the site's entity types. Only types that two or more
sites annotate are exchanged: for each that a site annotates, it sends the probabilities
of the type's tags, and a 1; for the others it sends zeros. The sum of what sites send
therefore has the same shape whatever their models are, and is all that the server
needs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fednotes.core.cleaning import clean
from fednotes.core.counts import scale_sum
from fednotes.core.errors import ConfigError, TrainingError
from fednotes.core.federation import EVALUATE, TRAIN, Federation, State
from fednotes.core.numbers import (
    FractionBelowOne,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)
from fednotes.core.settings import FilledIn, checked
from fednotes.core.store import write_text
from fednotes.core.tensors import add_prefix, copy_tensors, load_into, select_prefix
from fednotes.core.types import Document, PublicNotes, SiteData, TagSet
from fednotes.core.update import Tensors, Total, Update
from fednotes.data.batches import Encoded, draw_epoch_batches, encode_corpus
from fednotes.data.split import make_sentence_documents, pool_documents, subsample
from fednotes.methods import read_presets
from fednotes.methods.base import Method
from fednotes.methods.model_kinds import make_unsupported_kind_error
from fednotes.taggers.corpora import PreparedCorpus
from fednotes.taggers.model import Model, ModelConfig
from fednotes.taggers.saving import (
    find_config_class,
    list_model_kinds,
    read_model_config,
)
from fednotes.taggers.tagger import TaggerConfig
from fednotes.taggers.word_targets import make_word_targets
from fednotes.training.local_trainer import LocalTrainer, Step
from fednotes.training.precision import Precision
from fednotes.training.sites import Best, MentionSite, summarise_mentions, unite_tags

PREDICT = "predict"
POSTERIORS, ANNOTATED = "posteriors", "annotated"
# Probabilities leave a site as multiples of this number. float16 holds each of them,
# and their sums are exact, so that the secure sum has the bits of the plain one.
GRID = 2.0**-10
FLOAT_BYTES = 4
# The maximum number of probabilities in an exchange, which bounds the memory that two
# sites could otherwise take at all others with entity types that no other site has.
MAX_PROBABILITIES = 2**25


@checked(frozen=True)
class Config:
    """Settings of sites that learn from each other's predictions on public notes.

    A site can set `first_epochs`, `local_epochs`, `batch_size`, `learning_rate`,
    `warmup`, `weight_decay`, `clip` and `public_weight` for itself, in
    [sites.NAME.training], and its model in [sites.NAME.model].

    Attributes:
        model: The model of a site that has none of its own.
        rounds: Number of times that sites exchange predictions. Before the first
            exchange, each site trains on its own notes. 0 exchanges nothing.
        first_epochs: Number of epochs on a site's own notes before the first exchange.
        local_epochs: Number of epochs after each exchange. Each step reads `batch_size`
            sentences of the site's own notes and as many public sentences.
        public_sentences: Number of sentences of the public notes to use, chosen with
            the job's seed; 0 uses all. What a site sends grows with this number.
        public_weight: Weight of the loss on public sentences. The loss on the site's
            own sentences has weight 1.
        batch_size: Number of the site's own sentences in a step, which also reads as
            many public sentences.
        learning_rate: Largest learning rate of AdamW, which starts anew in each round.
            Values to begin with are 3e-3 for a light tagger, 3e-4 for LoRA matrices and
            3e-5 for all parameters of an encoder.
        warmup: Fraction of a round's steps over which the learning rate rises.
        decay: Learning rate after the warm-up: with "linear" it falls to zero at the
            last step of the round; with "constant" it does not change.
        weight_decay: Weight decay of AdamW.
        clip: Maximum L2 norm of a step's gradient; 0 does not clip.
        precision: Precision of the matrix products in training; "auto" is "bfloat16"
            where the processor has instructions for it, else "float32".
        select: Which model a site keeps: the one of the "last" round, or of the round
            with the "best" F1 on the site's own validation data.
        seed: The job's seed. A job fills it in.
        tags: The complete tag set, the union over the sites. A job fills it in.
        shared_types: The types that two or more sites annotate. A job fills it in.
        public_words: Number of public words; 0 if unknown. A job fills it in.
        site_configs: Settings of the sites that have their own. A job fills it in.
    """

    model: FilledIn[ModelConfig] = field(default_factory=TaggerConfig)
    rounds: NonNegativeInt = 2
    first_epochs: PositiveInt = 10
    local_epochs: PositiveInt = 5
    public_sentences: NonNegativeInt = 2000
    public_weight: PositiveFloat = 1.0
    batch_size: PositiveInt = 16
    learning_rate: PositiveFloat = 3e-3
    warmup: FractionBelowOne = 0.1
    decay: Literal["linear", "constant"] = "linear"
    weight_decay: NonNegativeFloat = 0.01
    clip: NonNegativeFloat = 1.0
    precision: Precision = "float32"
    select: Literal["last", "best"] = "best"
    seed: FilledIn[int] = 0
    tags: FilledIn[TagSet] = field(default_factory=lambda: TagSet(()))
    shared_types: FilledIn[tuple[str, ...]] = ()
    public_words: FilledIn[int] = 0
    site_configs: FilledIn[Mapping[str, Any]] = field(default_factory=dict)

    # `LocalTrainer` has two further settings, which this method does not use.

    @property
    def lora_learning_rate(self) -> float:
        """0: LoRA matrices have the same learning rate as other parameters."""
        return 0.0

    @property
    def proximal(self) -> float:
        """0: there is no proximal term, because the server has no parameters."""
        return 0.0

    @property
    def epochs(self) -> int:
        """Number of epochs in all rounds together."""
        return self.first_epochs + self.rounds * self.local_epochs

    def for_site(self, site: str) -> Config:
        """Return the settings of one site, with the facts that concern all sites."""
        site_config: Config = self.site_configs.get(site, self)
        return replace(
            site_config,
            rounds=self.rounds,
            seed=self.seed,
            tags=self.tags,
            shared_types=self.shared_types,
            public_words=self.public_words,
            site_configs={},
        )


SITE_KEYS = frozenset(
    {
        "first_epochs",
        "local_epochs",
        "batch_size",
        "learning_rate",
        "warmup",
        "weight_decay",
        "clip",
        "public_weight",
    }
)


# ---- what is exchanged ---------------------------------------------------------------


def list_shared_tags(config: Config) -> tuple[str, ...]:
    """Return the tags whose probabilities are sent: those of shared types, without "O".

    The probability of "O" follows from the others.
    """
    return TagSet(config.shared_types, config.tags.scheme).tags[1:]


def round_to_grid(probabilities: np.ndarray) -> np.ndarray:
    """Return the nearest multiples of `GRID`."""
    return np.round(probabilities / GRID) * GRID


def compute_consensus(total: Total, config: Config) -> dict[str, Tensor]:
    """Return the mean probability of each tag over the sites that annotate its type.

    Args:
        total: The sum of what "predict" returned.
        config: The settings of the run.

    Returns:
        "posteriors", (words, tags), zero for a type that no site of the sum annotates;
        and "annotated", (types,), how many sites annotate each type.

    Raises:
        TrainingError: Sites returned other tensors or shapes, or numbers that are no
            probabilities.
    """
    tags = list_shared_tags(config)
    sums = total.tensors.get(POSTERIORS, torch.zeros(0))
    words = config.public_words or (len(sums) if sums.dim() else 0)
    types = len(config.shared_types)
    total.require({POSTERIORS: (words, len(tags)), ANNOTATED: (types,)})
    sites = total.tensors[ANNOTATED].double()
    per_tag = sites.repeat_interleave(len(tags) // types)
    is_count = (sites >= 0) & (sites <= total.sites) & (sites == sites.round())
    is_probability = (sums >= 0) & (sums <= per_tag)
    if not bool(is_count.all() & is_probability.all()):
        raise TrainingError(
            "the sum of the sites' predictions is not a sum of probabilities: a site "
            "sent other numbers"
        )
    mean = sums.double() / per_tag.clamp(min=1.0)  # [fedmd consensus]
    return {POSTERIORS: mean.float(), ANNOTATED: sites.float()}


def cut_public_sentences(
    public: PublicNotes, number: int, seed: int
) -> tuple[Document, ...]:
    """Return the sentences of the public notes that a job uses; the same at all sites.

    Args:
        public: The notes.
        number: The number of sentences; 0 returns all.
        seed: The job's seed.

    Raises:
        ConfigError: The notes contain no sentence.
    """
    sentences = tuple(
        each for each in make_sentence_documents(public.documents) if each.text.strip()
    )
    if not sentences:
        raise ConfigError("the public notes contain no sentence: name other notes")
    if not number or number >= len(sentences):
        return sentences
    return subsample(sentences, number / len(sentences), seed)


# ---- server --------------------------------------------------------------------------


def train(federation: Federation, config: Config) -> State:
    """Run Algorithm 1 of Li and Wang 2019; the server keeps no model.

    Args:
        federation: The sites.
        config: The settings of the run.

    Returns:
        The server's final state, which is only the number of rounds.
    """
    resumed = federation.resume()
    start = resumed.round if resumed is not None else 0
    stop = config.rounds + 1
    for round in federation.rounds(start, stop):
        number = round.number
        consensus: Mapping[str, Tensor] = {}
        if number:
            consensus = compute_consensus(federation.sum(PREDICT, round=number), config)
        trained = federation.sum(TRAIN, consensus, round=number)
        metrics = {
            "loss": trained.metric("loss") / max(1.0, trained.metric("examples"))
        }
        evaluated = federation.sum(EVALUATE, round=number)
        metrics["valid_f1"] = summarise_mentions(evaluated.metrics)["valid_f1"]
        round.commit(State(number + 1), metrics, evaluated=True)
    federation.sum("finish")
    return State(stop)


# ---- sites ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sentences(Step):
    """Sentences of a site's own notes and, after the first exchange, of public ones."""

    model: Model
    own: PreparedCorpus
    own_indices: np.ndarray
    public: PreparedCorpus | None
    public_indices: np.ndarray
    public_weight: float

    @property
    def examples(self) -> int:
        """The number of own words."""
        return int(self.own.encoded.lengths[self.own_indices].sum())

    def loss(self, batch: Sequence[Any]) -> Tensor:
        """Return the mean loss over own words plus the weighted one over public words.

        A batch has only this part, so the means need no other parts of `batch`.
        """
        del batch
        of_own = self.model.losses(self.own, self.own_indices).source
        loss = of_own.sum() / self.examples
        if self.public is None:
            return loss
        of_public = self.model.losses(self.public, self.public_indices).target
        words = int(self.public.encoded.lengths[self.public_indices].sum())
        return loss + self.public_weight * of_public.sum() / words  # [fedmd digest]


class Site(MentionSite):
    """One site: its own model and notes, and the public notes.

    Before the site sends predictions, it writes them to `sent/round-N.tsv` beside its
    model, one line for each public word.

    Args:
        data: The site's documents, and the public notes.
        config: The settings of the run.
        **options: As for `MentionSite`.

    Attributes:
        parameters: All trained parameters; none of them leaves the site.
        public_set: The public sentences; None if nothing is exchanged.
        rounds: Number of completed rounds.
        steps: Number of training steps in all rounds.
    """

    tasks: ClassVar[frozenset[str]] = frozenset({PREDICT, TRAIN, EVALUATE, "finish"})
    rounds_counts = True
    config: Config

    def __init__(self, data: SiteData, config: Config, **options: Any) -> None:
        site_config = config.for_site(data.id)
        model = site_config.model.for_types(data.tags.types)
        site_config = replace(site_config, model=model)
        super().__init__(data, site_config, data.tags, **options)
        self.shared = {}
        self.private = self.model.trainable()
        self.parameters: dict[str, Tensor] = dict(self.private)
        self.rounds = 0
        self.steps = 0
        self.best = Best(
            keeps_tensors=site_config.select == "best", later="at zero", lowest=-1.0
        )
        self.public_set: PreparedCorpus | None = None
        if site_config.rounds:
            self.public_set = self._prepare_public_notes(options)

    def _prepare_public_notes(self, options: Mapping[str, Any]) -> PreparedCorpus:
        """Return the public sentences, without known annotation of any type."""
        assert self.data.public is not None  # `FedMD.configure` requires it
        config = self.config
        sentences = cut_public_sentences(
            self.data.public, config.public_sentences, config.seed
        )
        prepared = self.model.prepare(
            sentences,
            cache=options.get("cache"),
            progress=options.get("progress"),
            gold=False,
        )
        words = len(prepared.encoded.form)
        tags = len(list_shared_tags(config))
        if words * tags > MAX_PROBABILITIES:
            raise ConfigError(
                f"each exchange would send {words * tags:,} probabilities ({words:,} "
                f"public words × {tags:,} tags that two or more sites have), more than "
                f"{MAX_PROBABILITIES:,}: lower public_sentences, or list the entity "
                "types to learn in [tags] types"
            )
        return replace(prepared, known=frozenset())

    def describe_parameters(self) -> str:
        """Describe what is sent in place of parameters."""
        trained = sum(value.numel() for value in self.parameters.values())
        text = f"no parameter leaves a site ({trained:,} are trained)"
        if self.public_set is None:
            return text
        words = len(self.public_set.encoded.form)
        tags = len(list_shared_tags(self.config))
        return f"{text}; each exchange sends {words * tags:,} probabilities"

    def count_covered(self, task: str) -> dict[str, int]:
        """Return the steps, tokens and sentences behind the predictions.

        These are the steps that the site has made, because a lying server may ask for
        predictions before the first training, or after only a few epochs.
        """
        if task != PREDICT:
            return {}
        batch = self.config.batch_size
        left_over = self.num_examples % batch if self.steps <= 1 else 0
        # A training has whole epochs.
        tokens = int(self.train_set.encoded.lengths.sum()) if self.steps else 0
        return {
            "steps": self.steps,
            "tokens": tokens,
            "batch": left_over or min(batch, self.num_examples),
        }

    # Predictions on the public notes.

    def predict(self, tensors: Tensors, *, round: int) -> Update:
        """Return the probabilities of the shared tags for each public word."""
        del tensors
        posteriors, _ = self._compute_posteriors()
        own_tags = self.data.tags.tags
        sent = np.zeros((len(posteriors), len(list_shared_tags(self.config))))
        for column, tag in enumerate(list_shared_tags(self.config)):
            if tag in own_tags:
                sent[:, column] = posteriors[:, own_tags.index(tag)]
        rounded = round_to_grid(sent)
        self._write_sent(rounded, round)
        types = self.config.shared_types
        annotated = [float(name in self.data.tags.types) for name in types]
        return Update(
            {
                POSTERIORS: torch.from_numpy(rounded).float(),
                ANNOTATED: torch.tensor(annotated),
            }
        )

    def _compute_posteriors(self) -> tuple[np.ndarray, bool]:
        """Return (words, own tags) probabilities, and whether the model has a CRF."""
        assert self.public_set is not None
        soft = self.model.soften(self.public_set).soft
        assert soft is not None
        return soft.unary, soft.pairs.shape[-1] > 0

    def _write_sent(self, rounded: np.ndarray, round: int) -> None:
        """Write predictions as a table that a person can read.

        Args:
            rounded: (words, shared tags).
            round: The number of the round.
        """
        if self.directory is None or self.public_set is None:
            return
        lines = ["\t".join(("word", *list_shared_tags(self.config)))]
        rows = iter(rounded)
        for words in _iterate_sentences(self.public_set.encoded):
            for word in words:
                numbers = (f"{value:.3f}" for value in next(rows).tolist())
                lines.append("\t".join((word, *numbers)))
            lines.append("")
        write_text(self.directory / "sent" / f"round-{round}.tsv", "\n".join(lines))

    # Training.

    def train(self, tensors: Tensors, *, round: int) -> Update:
        """Train on the site's own notes and, after an exchange, on the public notes.

        The paper first trains on the public notes (digest), then on the site's own
        (revisit). Here each step does both, so that neither is forgotten.

        Args:
            tensors: Empty in round 0; afterwards what `compute_consensus` returned.
            round: The number of the round.
        """
        public = self._make_targets(tensors) if tensors else None
        config = self.config
        name = f"{self.id}, round {round}"
        trainer = LocalTrainer(
            name, config, self.private, draws=self.draws, device=self.model.device
        )
        epochs = config.first_epochs if public is None else config.local_epochs
        steps_in_epoch = math.ceil(self.num_examples / config.batch_size)
        public_batches = self._iterate_public_batches(public, round)
        loss = 0.0
        words = 0
        self.model.train()
        for epoch in range(epochs):
            rng = self.draws.rng_of("order", self.id, round, epoch)
            for indices in draw_epoch_batches(
                self.train_set.lengths, config.batch_size, rng
            ):
                step = _Sentences(
                    self.model,
                    self.train_set,
                    indices,
                    public,
                    next(public_batches),
                    config.public_weight,
                )
                planned = epochs * steps_in_epoch
                loss += trainer.step([step], planned=planned, start={})
                words += step.examples
                self.steps += 1
        self.rounds = round + 1
        return self._report_loss(loss / words)

    def _report_loss(self, mean: float) -> Update:
        """Return the loss, summed over the sentences as they are reported."""
        total = scale_sum(mean * self.num_examples, self.num_examples, self.count_step)
        return Update(metrics={"loss": total, "examples": self.reported_examples})

    def _iterate_public_batches(
        self, public: PreparedCorpus | None, round: int
    ) -> Iterator[np.ndarray]:
        """Yield batches of public sentences endlessly; empty ones without targets."""
        for epoch in count():
            if public is None:
                yield np.zeros(0, np.int64)
                continue
            rng = self.draws.rng_of("public order", self.id, round, epoch)
            yield from draw_epoch_batches(public.lengths, self.config.batch_size, rng)

    def _make_targets(self, tensors: Tensors) -> PreparedCorpus:
        """Return the public sentences with the consensus as soft targets.

        Raises:
            TrainingError: The tensors are not a consensus on these words.
        """
        assert self.public_set is not None
        own, has_crf = self._compute_posteriors()
        tags = list_shared_tags(self.config)
        consensus = tensors.get(POSTERIORS, torch.zeros(0)).double().numpy()
        sites = tensors.get(ANNOTATED, torch.zeros(0)).numpy()
        is_valid = (
            consensus.shape == (len(own), len(tags))
            and sites.shape == (len(self.config.shared_types),)
            and bool(((consensus >= 0) & (consensus <= 1)).all())
        )
        if not is_valid:
            raise TrainingError(
                f"site {self.id!r}: the server did not send probabilities for "
                f"{len(own):,} words and {len(tags)} tags: all sites need the same "
                "public notes and the same version of fednotes"
            )
        width = len(tags) // max(1, len(sites))
        columns = {
            tag: consensus[:, place]
            for place, tag in enumerate(tags)
            if sites[place // width] > 0  # [fedmd combine]
        }
        targets = combine_with_own(own, self.data.tags.tags, columns)
        soft = make_word_targets(self.public_set, targets, for_crf=has_crf)
        return replace(self.public_set, soft=soft)

    # Evaluation and the final model.

    def evaluate(self, tensors: Tensors, *, round: int) -> Update:
        """Return counts on validation data; keep the model if it is the best so far."""
        del tensors, round
        counts = self.count_mentions("valid")
        if counts.strict_f1 is not None:
            self.best.judge(counts.strict_f1, self.parameters)
        return self.report_counts(counts)

    def finish(self, tensors: Tensors) -> Update:
        """Test and save the kept model."""
        del tensors
        if self.best.tensors:
            load_into(self.parameters, self.best.tensors)
        return self.test_and_save()

    # State that must survive a restart.

    def state(self) -> State:
        """Return the site's model, and its best one."""
        best, facts = self.best.state()
        parameters = add_prefix("model.", copy_tensors(self.parameters))
        return State(self.rounds, parameters | best, facts | {"steps": self.steps})

    def restore(self, state: State) -> None:
        """Restore a saved state."""
        load_into(self.parameters, select_prefix("model.", state.tensors))
        self.best.restore(state, self.parameters)
        self.rounds = state.round
        self.steps = state.fact("steps", int)


def combine_with_own(
    own: np.ndarray, tags: Sequence[str], consensus: Mapping[str, np.ndarray]
) -> np.ndarray:
    """Return the targets of a site: the consensus, completed by the site's prediction.

    A tag without a consensus keeps the site's own probability. "O" gets 1 minus the sum
    of the other tags. This sum may exceed 1, because different sites may annotate the
    types of a tag set; the other tags are then divided by it, and "O" gets 0.

    Args:
        own: (words, tags) probabilities of the site's model.
        tags: The site's tags, "O" first.
        consensus: (words,) mean probabilities by tag.

    Returns:
        (words, tags) probabilities.
    """
    inside = np.stack([consensus.get(tag, own[:, i]) for i, tag in enumerate(tags)], 1)
    inside = inside[:, 1:]
    sums = inside.sum(1, keepdims=True)
    inside = inside / np.maximum(sums, 1.0)
    outside = np.maximum(0.0, 1.0 - sums)
    return np.concatenate([outside, inside], 1)  # [fedmd target]


def _iterate_sentences(encoded: Encoded) -> Iterator[list[str]]:
    """Yield the words of each sentence."""
    for start, end in zip(encoded.bounds[:-1], encoded.bounds[1:], strict=True):
        yield [encoded.forms[form] for form in encoded.form[start:end]]


# The interface to jobs.


class FedMD(Method):
    """Li and Wang 2019, for a job."""

    config_class: type[Any] = Config
    site_class: type[Any] = Site
    presets = read_presets("fedmd")
    reads_public_notes = True
    site_keys = SITE_KEYS
    no_dp_reason = (
        "sites send predictions of models that are trained on the notes without noise"
    )
    length_key = "first_epochs"
    keep_best = MappingProxyType({"select": "best"})

    def train(self, federation: Federation, config: Config) -> State:
        """Exchange predictions in rounds."""
        return train(federation, config)

    def read_model_config(self, table: Mapping[str, Any]) -> ModelConfig:
        """Return the settings of a model that gives each word probabilities of tags.

        Raises:
            ConfigError: The kind of model does not.
        """
        config = read_model_config(table, where="")
        if not _gives_probabilities(config):
            raise make_unsupported_kind_error("fedmd", config.kind)
        return config

    def list_models(self) -> Mapping[str, type[Any]]:
        """Return the settings classes of the models that predict probabilities."""
        classes = {kind: find_config_class(kind) for kind in list_model_kinds()}
        return {
            kind: each for kind, each in classes.items() if _gives_probabilities(each)
        }

    def summarise(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the micro F1 over all sites' validation mentions."""
        return summarise_mentions(metrics)

    def shares_outputs(self, config: Any) -> bool:
        """Return False, because sites have no output layer in common."""
        del config
        return False

    def configure(self, config: Config, sites: Sequence[SiteData]) -> Config:
        """Return the settings with the tags of all sites, and the types they share.

        Raises:
            ConfigError: Sites have different public notes or tagging schemes, or no
                type is annotated at two sites.
        """
        _require_same_public_notes(sites)
        schemes = {site.tags.scheme for site in sites}
        if len(schemes) > 1:
            raise ConfigError(
                f"sites have the tagging schemes {' and '.join(sorted(schemes))}, so "
                "their predictions cannot be averaged: set the same scheme for all"
            )
        sites_with = Counter(name for site in sites for name in site.tags.types)
        tags = unite_tags(sites)
        shared = tuple(name for name in tags.types if sites_with[name] > 1)
        if not shared and config.rounds:
            raise ConfigError(
                "no entity type is annotated at two sites, so no site can learn "
                "from another: map the labels to common names in label_map, or use "
                'another method, such as "distill"'
            )
        return replace(
            config,
            tags=tags,
            shared_types=shared,
            public_words=_count_public_words(config, sites[0]),
        )

    def configure_alone(
        self, config: Config, sites: Sequence[SiteData]
    ) -> tuple[Config, ...]:
        """Return each site's settings without an exchange, with as many epochs."""
        return tuple(
            replace(_merge_rounds(config.for_site(site.id)), tags=site.tags)
            for site in sites
        )

    def configure_pooled(
        self,
        config: Config,
        sites: Sequence[SiteData],
        complete: Sequence[SiteData] | None,
    ) -> tuple[tuple[SiteData, ...], Config]:
        """Return the pooled data and the settings of the job's [model] trained on it.

        It trains for as many epochs as in the federation. The sites' own models are not
        trained on the pooled data.

        Raises:
            ConfigError: The sites' types differ and no complete annotation is known.
        """
        source = complete or sites
        if len({frozenset(site.tags.types) for site in source}) > 1:
            raise ConfigError(
                'conditions has "pooled", which needs sites that all annotate the same '
                "types, or the complete annotation of every site: leave it out: "
                'conditions = ["alone", "federated"]'
            )
        together = pool_documents(source)
        pooled = replace(_merge_rounds(config), tags=together.tags, site_configs={})
        return (together,), pooled

    def plan_rounds(self, config: Config, sizes: Sequence[int]) -> tuple[int, int]:
        """Return the number of rounds and the sentences per round, as a mean."""
        rounds = config.rounds + 1
        return rounds, math.ceil(sum(sizes) * config.epochs / rounds)

    def count_steps(self, config: Config, sizes: Sequence[int]) -> int:
        """Return a site's number of steps in all rounds, averaged over the sites."""
        rounds, examples = self.plan_rounds(config, sizes)
        return math.ceil(rounds * examples / (config.batch_size * max(1, len(sizes))))

    def count_exchanges(self, config: Config, sizes: Sequence[int]) -> int:
        """Return the number of rounds with an exchange: all but the first one."""
        del sizes
        return config.rounds

    def estimate_traffic(
        self, config: Config, sizes: Sequence[int]
    ) -> tuple[int, int] | None:
        """Return the bytes that a site sends and receives.

        None if only the sites have the public notes.
        """
        del sizes
        if not config.public_words:
            return None
        numbers = config.public_words * len(list_shared_tags(config))
        size = FLOAT_BYTES * (numbers + len(config.shared_types))
        return config.rounds * size, config.rounds * size


def _merge_rounds(config: Config) -> Config:
    """Return settings that train once, for as many epochs as all rounds together."""
    return replace(config, rounds=0, first_epochs=config.epochs)


def _gives_probabilities(config: Any) -> bool:
    """Return whether a model predicts, and trains on, probabilities of words' tags.

    Args:
        config: The model's settings, or their class.
    """
    return bool(config.trains_on_posteriors and config.predicts_tags)


def _require_same_public_notes(sites: Sequence[SiteData]) -> None:
    """Raise ConfigError unless all sites have the same public notes."""
    first, *others = sites
    for site in sites:
        if site.public is None:
            raise ConfigError(
                f"site {site.id!r} has no public notes: give the path of the same "
                "notes at every site as `public`"
            )
    for site in others:
        assert first.public is not None
        assert site.public is not None
        if site.public.digest != first.public.digest:
            raise ConfigError(
                f"sites {first.id!r} and {site.id!r} have different public notes "
                f"(SHA-256 {clean(first.public.digest)[:12]} and "
                f"{clean(site.public.digest)[:12]}): give every site the same file"
            )


def _count_public_words(config: Config, site: SiteData) -> int:
    """Return the number of public words; 0 if only the digest of the notes is known."""
    if site.public is None or not site.public.documents:
        return 0
    sentences = cut_public_sentences(site.public, config.public_sentences, config.seed)
    return len(encode_corpus(sentences, site.tags).form)


METHOD = FedMD()
