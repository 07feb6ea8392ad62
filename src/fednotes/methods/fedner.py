"""FedNER: medical named entity recognition with a shared and a private module.

Suyu Ge, Fangzhao Wu, Chuhan Wu, Tao Qi, Yongfeng Huang, Xing Xie (2020), "FedNER:
Privacy-preserving Medical Named Entity Recognition with Federated Learning".

    paper       here
    P           the sites of the federation
    S_i         `Site.train_set`, the training sentences of platform i; |S_i| is
                `num_examples`, or `reported_examples` as it leaves the site
    N           `Config.batch_size`
    N_i         the mini-batch of platform i in one round; |N_i| = `Site.share`
    θ_s         `Server.shared`, the layers that are not in `Config.private`
    θ_p^i       the layers in `Config.private` (BiLSTM and CRF in the paper)
    L^i         mean negative log likelihood of the mini-batch, `Tagger.loss`
    α           `Config.learning_rate`

For large word tables in θ_s, only the rows in use are sent (`word_rows.py`), with
identical results.

Eq. 1 sums over sentences. Here L^i is the mean, because Eq. 2 already weights by |S_i|,
and a sum over |N_i| ∝ |S_i| sentences would apply the weight twice.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fednotes.core.counts import scale_sum
from fednotes.core.errors import ConfigError
from fednotes.core.federation import EVALUATE, TRAIN, Federation, State
from fednotes.core.numbers import NonNegativeInt, PositiveFloat, PositiveInt
from fednotes.core.seeds import rng_of
from fednotes.core.settings import FilledIn, checked
from fednotes.core.tensors import (
    add_prefix,
    copy_tensors,
    list_shapes,
    load_into,
    nbytes,
    seed_torch,
    select_prefix,
)
from fednotes.core.types import SiteData, TagSet
from fednotes.core.update import Tensors, Total, Update
from fednotes.data.batches import draw_epoch_batches
from fednotes.data.split import pool_documents
from fednotes.data.text import split_sentences
from fednotes.methods import read_presets
from fednotes.methods.base import Method
from fednotes.methods.model_kinds import make_unsupported_kind_error
from fednotes.metrics.spans import SpanCounts
from fednotes.privacy.promise import Privacy
from fednotes.privacy.training import DPSupport
from fednotes.taggers.corpora import PreparedCorpus
from fednotes.taggers.tagger import (
    LAYERS,
    Tagger,
    TaggerConfig,
    build_tagger,
    read_tagger_config,
)
from fednotes.training import word_rows
from fednotes.training.precision import (
    Precision,
    require_float32,
    setting_precision,
)
from fednotes.training.server_steps import (
    Aggregation,
    fill_in_sites,
    needs_each_update,
    sum_or_combine,
)
from fednotes.training.site_sampling import count_drawn_sites
from fednotes.training.sites import (
    Adam,
    Best,
    MentionSite,
    RoundServer,
    agree_on_shares,
    compute_least_part,
    compute_part,
    keep_first_sum,
    list_batch_warnings,
    require_finite_loss,
    split_private,
    summarise_mentions,
    unite_tags,
)

GRADIENTS = "gradients"  # the task of a round of mini-batches


@checked(frozen=True)
class Config(Aggregation):
    """Settings of a FedNER run.

    Attributes:
        model: The tagger that every site runs.
        private: Layers that never leave a site, from words, characters, context, cnn,
            lstm and crf. `[]` shares all; the output layer of every site then has the
            complete tag set. Layers that the tagger does not have are ignored.
        exchange: Tensors that sites send. "gradients" is Algorithm 1: a round is one
            mini-batch. With "weights", a round is `local_epochs` epochs at each site,
            followed by the mean of the shared layers, which needs far fewer messages.
        local_epochs: Epochs at each site in a round of exchange = "weights".
        batch_size: N, the number of sentences in a batch of all sites together.
        least_share: Minimum number of a batch's sentences that a site contributes,
            regardless of what the server reports about the other sites; 0 uses a
            quarter of an equal share. Raise it to hide single sentences of a small site
            better.
        learning_rate: α of Adam, at the server and at the sites.
        precision: Precision of the matrix products in training; "auto" is "bfloat16"
            where the processor has instructions for it, else "float32". With
            differential privacy only "float32" is possible.
        epochs: Maximum number of passes over the training data.
        rounds: Maximum number of rounds, regardless of `epochs`; 0 disables the limit.
        evaluate_every: Number of epochs (with exchange = "weights": of rounds) between
            two evaluations and checkpoints.
        select: "best": each site ends with the tagger of its own best validation F1,
            and the run stops early (`patience`). "last": all rounds are run, and the
            last tagger is the result.
        patience: With select = "best": number of consecutive evaluations without a
            higher F1 on all validation data before the run stops.
        personal_epochs: Number of epochs in which each site trains its complete tagger
            alone after the last round. With select = "best", a site keeps the result
            only if its own validation F1 rises.
        seed: The job's seed. A job fills it in.
        tags: The complete tag set, the union over the sites. A job fills it in.
        privacy, min_sites: As in the job's tables. A job fills them in.
    """

    model: FilledIn[TaggerConfig] = field(default_factory=TaggerConfig)
    private: tuple[str, ...] = ("lstm", "crf")
    exchange: Literal["gradients", "weights"] = "gradients"
    local_epochs: PositiveInt = 1
    batch_size: PositiveInt = 64
    least_share: NonNegativeInt = 0
    learning_rate: PositiveFloat = 1e-3
    precision: Precision = "float32"
    epochs: PositiveInt = 30
    rounds: NonNegativeInt = 0
    evaluate_every: PositiveInt = 1
    select: Literal["last", "best"] = "best"
    patience: PositiveInt = 5
    personal_epochs: NonNegativeInt = 0
    seed: FilledIn[int] = 0
    tags: FilledIn[TagSet] = field(default_factory=lambda: TagSet(()))
    privacy: FilledIn[Privacy | None] = None
    min_sites: FilledIn[int] = 0

    def __post_init__(self) -> None:
        """Check the settings against each other.

        Raises:
            ConfigError: No run can have these settings.
        """
        for name in self.private:  # a known layer that this tagger lacks may be named
            if name not in LAYERS:
                raise ConfigError(
                    f"private = {list(self.private)}: no layer is called {name!r}: "
                    f"from bottom to top they are {', '.join(LAYERS)}"
                )
        if self.privacy:
            require_float32(self.precision)


def train(federation: Federation, config: Config) -> State:
    """Run Algorithm 1 of Ge et al. 2020.

    Args:
        federation: The sites.
        config: The settings of the run.

    Returns:
        The server's final state.
    """
    server = Server(config, federation.resume())
    if not server.examples:  # a resumed run has agreed already
        server.examples, server.batch = agree_on_shares(federation)
    task = GRADIENTS if config.exchange == "gradients" else TRAIN
    rounds, epoch = count_rounds(config, server.examples, server.batch)

    for round in federation.rounds(server.round, rounds):
        if server.is_converged:
            break
        if server.lacks_rows:
            server.mark(federation.sum("mark", round=round.number))

        sent = server.select_sent()
        # A gradient is already a change; parameters change relative to those sent.
        start = sent if task == TRAIN else {}
        total = sum_or_combine(  # [fedner alg 1]
            federation, config, task, sent, start, round=round.number
        )
        server.step(total)  # [fedner alg 1]

        done = round.number + 1
        is_evaluated = done == rounds or done % (config.evaluate_every * epoch) == 0
        if is_evaluated:
            server.judge(federation.sum(EVALUATE, server.shared, round=round.number))
        round.commit(server.state(), server.metrics, evaluated=is_evaluated)
    federation.sum("finish", server.shared)
    return server.state()


class Server(RoundServer):
    """The server: θ_s, its optimizer, and early stopping.

    Args:
        config: The settings of the run.
        resumed: The state to resume from; None at the first start.

    Attributes:
        examples: Σ|S_j|, once the sites have agreed; 0 before.
        batch: Σ|N_j|, once the sites have agreed; 0 before.
    """

    config: Config

    def __init__(self, config: Config, resumed: State | None) -> None:
        shared = make_initial_parameters(config)
        self._adam = Adam(shared, config.learning_rate)
        self._tables: tuple[str, ...] = ()
        if config.exchange == "gradients":
            self._tables = word_rows.find_tables(shared)
        # Rows of the word tables that the mini-batches of the next round read.
        self._rows: word_rows.Rows = {}
        self._largest_sum = 0  # largest number of sites in a sum so far
        self.examples = 0
        self.batch = 0
        # A new tagger predicts no mention, so that its score is 0.
        best = Best(keeps_tensors=False, later="at zero")
        super().__init__(config, shared, best, resumed)

    @property
    def is_converged(self) -> bool:
        """Whether `patience` evaluations did not improve the validation F1.

        Always False if the last tagger is selected.
        """
        return self.config.select == "best" and self.best.waited >= self.config.patience

    @property
    def lacks_rows(self) -> bool:
        """Whether sites must mark the rows of word tables that they read next."""
        return self._rows.keys() != set(self._tables)

    def mark(self, total: Total) -> None:
        """Record the rows of word tables that sites have marked."""
        total.require(word_rows.list_mark_shapes(self.shared, self._tables))
        self._take_rows(total)

    def _take_rows(self, total: Total) -> None:
        """Store the marked rows, and the largest number of sites in a sum so far."""
        self._rows = word_rows.find_marked(total.tensors, self._tables)
        self._largest_sum = max(self._largest_sum, total.sites)

    def select_sent(self) -> Tensors:
        """Return the parameters for the next round; of word tables, some rows."""
        return word_rows.select_rows(self.shared, self._rows)

    def step(self, total: Total) -> None:
        """Set θ_s by a step of Adam, or to the weighted mean of all sites' θ_s."""
        if self.config.exchange == "gradients":
            self._descend(total)
        else:
            total.require(list_shapes(self.shared))
            self.shared = total.mean()  # [fedner eq 2]
        self.round += 1
        self.metrics = {"loss": total.metric("loss") / total.weight}

    def _descend(self, total: Total) -> None:
        """Take a step of Adam along the mean of the sites' gradients."""
        shapes = word_rows.list_gradient_shapes(self.shared, self._rows, self._tables)
        total.require(shapes)
        mean = total.mean()  # [fedner eq 2] Σ |S_i| ∂L^i/∂θ_s / Σ |S_j|
        gradient = word_rows.fill_gradients(mean, self.shared, self._rows)
        self._adam.step(gradient)  # [fedner eq 2]
        self._rows = {}
        # Without the marks of all sites of the next round, these are summed again.
        is_next_round_alike = count_drawn_sites(self.config) is None
        if is_next_round_alike and total.sites >= self._largest_sum:
            self._take_rows(total)

    def state(self) -> State:
        """Return all state that the next round depends on."""
        state = super().state()
        tensors = {**state.tensors, **self._adam.state()}
        facts = {**state.facts, "examples": self.examples, "batch": self.batch}
        return replace(state, tensors=tensors, facts=facts)

    def _restore(self, state: State) -> None:
        super()._restore(state)
        self._adam.restore(state.tensors)
        self.examples = int(state.facts["examples"])
        self.batch = int(state.facts["batch"])


def make_initial_parameters(config: Config) -> dict[str, Tensor]:
    """Return θ_s before training, derived from the seed."""
    parameters = build_tagger(config.model, config.tags, config.seed).trainable()
    shared, _ = split_private(parameters, config.private)
    return {name: parameter.detach() for name, parameter in shared.items()}


class Site(MentionSite):
    """One platform: its data, its private module, and its tasks.

    Args:
        data: The site's documents.
        config: The settings of the run.
        **options: As for `MentionSite`.

    Attributes:
        share: |N_i|, the number of sentences in a mini-batch.
        tables: Names of the shared word tables of which only rows are sent.
        steps: Number of mini-batches so far.
        best: The tagger that the site keeps.
    """

    rounds_counts = True
    tasks: ClassVar[frozenset[str]] = frozenset(
        {"count", "take_share", "mark", GRADIENTS, TRAIN, EVALUATE, "finish"}
    )
    read_only = frozenset({"count", "mark"})
    model: Tagger
    train_set: PreparedCorpus

    def __init__(self, data: SiteData, config: Config, **options: Any) -> None:
        tags = data.tags if "crf" in config.private else config.tags
        super().__init__(data, config, tags, **options)
        parameters = self.model.trainable()
        self.shared, self.private = split_private(parameters, config.private)
        self.share = config.batch_size
        self._all_examples = 0
        self.steps = 0
        self.best = Best(keeps_tensors=config.select == "best", later="at zero")
        # F1 on validation data, if the last tagger is selected.
        self._last_score: float | None = None

        # When gradients are exchanged, the server steps the shared layers and a site
        # only its private ones.
        exchanges_gradients = config.exchange == "gradients"
        self._stepped = self.private if exchanges_gradients else parameters
        self.adam = Adam(self._stepped, config.learning_rate)
        self.tables = word_rows.find_tables(self.shared) if exchanges_gradients else ()
        self._mark_secret = secrets.randbits(63)  # randomises the marks of word rows

        self._batches: list[np.ndarray] = []
        # The (epoch, share) that `_batches` were drawn for.
        self._batches_of: tuple[int, int] | None = None

    def count_covered(self, task: str) -> dict[str, int]:
        """Return the steps, tokens and smallest mini-batch behind an update."""
        batches, smallest = self._plan_epoch()
        if task in ("mark", GRADIENTS):
            return {"steps": 1, "batch": smallest}
        if task == TRAIN:
            return {
                "steps": self.config.local_epochs * batches,
                "tokens": int(self.train_set.lengths.sum()),  # the same in every epoch
                "batch": smallest,
            }
        return {}

    def _plan_epoch(self) -> tuple[int, int]:
        """Return an epoch's number of mini-batches, and the size of the smallest.

        Left-over sentences form a mini-batch, unless they are fewer than the job's
        least share.
        """
        full, left_over = divmod(self.num_examples, self.share)
        if full == 0 or left_over >= compute_least_share(
            self.num_examples, self.config
        ):
            return full + 1, left_over
        return full, self.share if full > 1 else self.num_examples

    def count(self, tensors: Tensors) -> Update:
        """Return |S_i|."""
        del tensors
        return Update(metrics={"examples": self.reported_examples})

    def take_share(self, tensors: Tensors, *, examples: int) -> Update:
        """Set |N_i| from the job's N and Σ|S_j|; return it.

        Args:
            tensors: Ignored.
            examples: Σ|S_j|. Only the first value in a run has an effect
                (`keep_first_sum`).
        """
        del tensors
        size = self.reported_examples
        self._all_examples = keep_first_sum(self._all_examples, examples, size)
        self.share = compute_batch_share(size, self._all_examples, self.config)
        return Update(metrics={"share": self.share})

    # Training.

    def mark(self, tensors: Tensors, *, round: int) -> Update:
        """Return marks of the word-table rows that the next mini-batch reads."""
        del tensors, round
        return Update(self._mark_rows())

    def _mark_rows(self) -> dict[str, Tensor]:
        """Return random marks of the word-table rows that the next mini-batch reads."""
        if not self.tables:
            return {}
        rows = self.model.find_word_rows(self.train_set, self._select_batch(self.steps))
        rng = rng_of(self._mark_secret, "marks", self.id, self.steps)
        return word_rows.make_marks(rows, self.shared, self.tables, rng)

    def gradients(self, tensors: Tensors, *, round: int) -> Update:
        """Train on one mini-batch: step θ_p, and return ∂L^i/∂θ_s with weight |S_i|.

        Args:
            tensors: θ_s; of word tables, the rows that the sites' mini-batches read.
            round: The round's number.
        """
        del round
        received_rows = word_rows.load_rows(self.shared, tensors, self.tables)
        loss = self._backward(self._select_batch(self.steps))
        gradients = self._collect_gradients(received_rows)
        self.adam.step()  # [fedner private] θ_p^i ← θ_p^i − α ∂L^i/∂θ_p^i
        sent = gradients | self._mark_rows()
        # [fedner eq 2]
        return Update(sent, self.reported_examples, self._report_loss(loss))

    def _collect_gradients(self, rows: word_rows.Rows) -> dict[str, Tensor]:
        """Return ∂L^i/∂θ_s, with only some rows of word tables; clear `.grad`."""
        gradients = {}
        for name, parameter in self.shared.items():
            if parameter.grad is None:
                gradients[name] = torch.zeros_like(parameter)
            else:
                gradients[name] = parameter.grad.cpu()
            parameter.grad = None
        for name, ids in rows.items():
            gradients[name] = gradients[name][ids]
        return gradients

    def train(self, tensors: Tensors, *, round: int) -> Update:
        """Train the whole tagger for `local_epochs`; return θ_s with weight |S_i|."""
        del round
        load_into(self.shared, tensors)
        batches_in_epoch, _ = self._plan_epoch()
        batches = self.config.local_epochs * batches_in_epoch
        loss = sum(self._take_local_step(self.adam) for _ in range(batches)) / batches
        shared = {
            name: value.cpu() for name, value in copy_tensors(self.shared).items()
        }
        # [fedner eq 2]
        return Update(shared, self.reported_examples, self._report_loss(loss))

    def _report_loss(self, loss: float) -> dict[str, float]:
        """Return a mean loss as a sum over sentences, rounded as it leaves the site."""
        total = scale_sum(loss * self.num_examples, self.num_examples, self.count_step)
        return {"loss": total, "examples": self.reported_examples}

    def _take_local_step(self, adam: Adam) -> float:
        """Train on one mini-batch without the server; return its mean loss."""
        loss = self._backward(self._select_batch(self.steps))
        adam.step()
        return loss

    def _backward(self, batch: np.ndarray) -> float:
        """Compute the gradients of a mini-batch's mean loss; return the loss."""
        seed = self.draws.seed_of("dropout", self.id, self.steps)
        seed_torch(seed, self.model.device)
        self.model.train()
        with setting_precision(self.config.precision, self.model.device):
            loss = self.model.loss(self.train_set, batch)  # L^i
        remedy = "lower learning_rate, or check the word vectors and features for NaN"
        value = require_finite_loss(
            loss, self.id, f"at mini-batch {self.steps}", remedy
        )
        loss.backward()
        self.steps += 1
        return value

    def _select_batch(self, step: int) -> np.ndarray:
        """Return the sentences of a step's mini-batch.

        An epoch's order depends only on the draws, the site and the epoch.
        """
        batches_in_epoch, _ = self._plan_epoch()
        epoch, position = divmod(step, batches_in_epoch)
        if self._batches_of != (epoch, self.share):
            rng = self.draws.rng_of("order", self.id, epoch)
            least = compute_least_share(self.num_examples, self.config)
            lengths = self.train_set.lengths
            self._batches = draw_epoch_batches(lengths, self.share, rng, min_size=least)
            self._batches_of = (epoch, self.share)
        return self._batches[position]

    # Evaluation and the best tagger.

    def evaluate(self, tensors: Tensors, *, round: int) -> Update:
        """Return counts on the site's validation data.

        With select = "best", the tagger is kept if it is the best so far.
        """
        del round
        load_into(self.shared, tensors)
        return self.report_counts(self._judge())

    def _judge(self) -> SpanCounts:
        """Score the tagger on validation data, and keep it if it is the best so far."""
        counts = self.count_mentions("valid")
        f1 = counts.scores()["strict"]["f1"]
        self.best.judge(f1, self.model.trainable())
        return counts

    def finish(self, tensors: Tensors) -> Update:
        """Train personal epochs, select the tagger, test it and save it."""
        # Needed even if a better tagger is kept: this checks the names and shapes.
        load_into(self.shared, tensors)
        if self.best.tensors:
            load_into(self.model.trainable(), self.best.tensors)
        self._personalise(self.config.personal_epochs)
        if not self.best.keeps_tensors and self._has_valid_mentions:
            self._last_score = self.count_mentions("valid").scores()["strict"]["f1"]
        return self.test_and_save()

    @property
    def _has_valid_mentions(self) -> bool:
        """Whether the site's validation data contain mentions."""
        return any(document.spans for document in self.data.valid)

    @property
    def valid_score(self) -> float | None:
        """Strict validation F1 of the kept tagger; None without validation mentions."""
        if not self._has_valid_mentions:
            return None
        if not self.best.keeps_tensors:
            return self._last_score
        return self.best.score if self.best.score >= 0 else None

    @staticmethod
    def list_judged_types(site: SiteData) -> tuple[str, ...]:
        """Return the types that the site annotates, the only ones that are scored."""
        return site.tags.types

    def _personalise(self, epochs: int) -> None:
        """Train the whole tagger on the site's data with a fresh optimizer."""
        adam = Adam(self.model.trainable(), self.config.learning_rate)
        for _ in range(epochs):
            batches_in_epoch, _ = self._plan_epoch()
            for _ in range(batches_in_epoch):
                self._take_local_step(adam)
            self._judge()
        if self.best.tensors:
            load_into(self.model.trainable(), self.best.tensors)

    # State that must survive a restart.

    def state(self) -> State:
        """Return the locally stepped parameters, their moments and the best tagger."""
        best_tensors, facts = self.best.state()
        stepped = {name: value.detach() for name, value in self._stepped.items()}
        tensors = {
            **add_prefix("private.", stepped),
            **self.adam.state(),
            **best_tensors,
        }
        facts["share"] = self.share
        facts["all"] = self._all_examples
        if self.tables:
            facts["secret"] = self._mark_secret
        return State(self.steps, tensors, facts)

    def restore(self, state: State) -> None:
        """Restore a saved state."""
        load_into(self._stepped, select_prefix("private.", state.tensors))
        self.adam.restore(state.tensors)
        self.best.restore(state, self.model.trainable())
        self.steps = state.round
        self.share = int(state.facts["share"])
        self._all_examples = int(state.facts.get("all", 0))
        if self.tables:
            self._mark_secret = int(state.facts["secret"])


# Numbers of sentences and rounds.


def count_rounds(config: Config, examples: int, batch: int) -> tuple[int, int]:
    """Return the maximum number of rounds in a run, and the number in an epoch.

    Args:
        config: The settings of the run.
        examples: Σ_j |S_j|.
        batch: Σ_j |N_j|, about N (see `compute_batch_share`).
    """
    if config.exchange == "weights":
        return config.rounds or math.ceil(config.epochs / config.local_epochs), 1
    rounds_in_epoch = math.ceil(examples / batch)
    return config.rounds or config.epochs * rounds_in_epoch, rounds_in_epoch


def compute_batch_share(size: int, examples: int, config: Config) -> int:
    """Return |N_i| = |S_i| / Σ|S_j| · N, rounded to the nearest integer (halves up).

    It is at least `compute_least_share`, if the site has that many sentences. Otherwise
    a server could announce too large a sum and get the gradient of one sentence. The
    shares of all sites may add up to slightly more or less than N.

    Args:
        size: |S_i|.
        examples: Σ|S_j|.
        config: The settings of the run.
    """
    return compute_part(
        config.batch_size, size, examples, compute_least_share(size, config)
    )


def compute_least_share(size: int, config: Config) -> int:
    """Return the minimum sentences per mini-batch of a site of this size."""
    return compute_least_part(config.batch_size, config.sites, size, config.least_share)


# The interface to jobs.


class FedNERWithDP(DPSupport):
    """FedNER with differential privacy: the sum of Eq. 2 with clipping and noise."""

    required_settings = MappingProxyType(
        {
            "exchange": "gradients",
            "select": "last",
            "personal_epochs": 0,
            "aggregation": "mean",
        }
    )

    def make_initial_parameters(
        self, config: Config, agreed: Tensors
    ) -> dict[str, Tensor]:
        """Return θ_s before training."""
        del agreed
        return make_initial_parameters(config)

    def loss(self, site: Site, indices: np.ndarray) -> Tensor:
        """Return the mean loss over some sentences."""
        return site.model.loss(site.train_set, indices)

    def count_rounds(self, config: Config, sums_per_epoch: int) -> int:
        """Return the number of rounds, at `sums_per_epoch` rounds an epoch."""
        return config.rounds or config.epochs * sums_per_epoch


class FedNER(Method):
    """Ge et al. 2020, for a job."""

    config_class = Config
    site_class = Site
    presets = read_presets("fedner")
    training_tasks = (GRADIENTS, TRAIN)
    dp = FedNERWithDP()
    keep_best = MappingProxyType({"select": "best"})
    personal = MappingProxyType({"personal_epochs": 5})

    def train(self, federation: Federation, config: Config) -> State:
        """Run Algorithm 1."""
        return train(federation, config)

    def read_model_config(self, table: Mapping[str, Any]) -> TaggerConfig:
        """Return the settings of the light tagger, the only supported model.

        Raises:
            ConfigError: The table names another kind of model, or a tagger without
                input layers.
        """
        if "kind" in table:
            raise make_unsupported_kind_error("fedner", table["kind"])
        config = read_tagger_config(table, where="")
        config.require_input()
        return config

    def list_models(self) -> Mapping[str, type[Any]]:
        """Return the class of the light tagger's settings."""
        return {"tagger": TaggerConfig}

    def summarise(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the micro F1 over all sites' validation mentions."""
        return summarise_mentions(metrics)

    def configure(self, config: Config, sites: Sequence[SiteData]) -> Config:
        """Return the settings with the number of sites and the union of their tags."""
        return fill_in_sites(
            config, [site.id for site in sites], tags=unite_tags(sites)
        )

    def configure_alone(
        self, config: Config, sites: Sequence[SiteData]
    ) -> tuple[Config, ...]:
        """Return each site's settings, with its mini-batch size in the federation."""
        sizes = [
            sum(len(split_sentences(document)) for document in site.train)
            for site in sites
        ]
        shares = [compute_batch_share(size, sum(sizes), config) for size in sizes]
        alone = replace(config, aggregation="mean", sites=1)
        return tuple(replace(alone, batch_size=share) for share in shares)

    def configure_pooled(
        self,
        config: Config,
        sites: Sequence[SiteData],
        complete: Sequence[SiteData] | None,
    ) -> tuple[tuple[SiteData, ...], Config]:
        """Return the pooled data and the settings of one model of all sentences.

        With complete labels, or the same tag set everywhere, all sentences are pooled.
        Otherwise the model has one output layer for each site's tag set, on top of
        layers that are trained on all sentences. This is the same method with only the
        CRF private; it is a reference, not an upper bound. Layers are trained on all
        sentences only if every step uses all sites' gradients, so it exchanges
        gradients, for as many epochs as a federation that exchanges weights.
        """
        config = replace(config, aggregation="mean")
        schemes = {site.tags.scheme for site in sites}
        types = {frozenset(site.tags.types) for site in sites}
        if len(schemes) > 1 or (complete is None and len(types) > 1):
            heads = replace(
                _configure_gradient_exchange(config),
                private=("crf",),
                personal_epochs=0,
            )
            return tuple(sites), heads

        together = pool_documents(complete or sites)
        pooled = replace(config, tags=together.tags, personal_epochs=0, sites=1)
        return (together,), pooled

    def plan_rounds(self, config: Config, sizes: Sequence[int]) -> tuple[int, int]:
        """Return the maximum number of rounds and the sentences per round."""
        batch = _sum_shares(config, sizes)
        rounds, _ = count_rounds(config, sum(sizes), batch)
        if config.exchange == "gradients":
            return rounds, batch
        return rounds, sum(sizes) * config.local_epochs

    def name_length_key(self, config: Config, measure: str) -> str:
        """Return the key that limits the length: `rounds`, if it is set."""
        del measure
        return "rounds" if config.rounds else "epochs"

    def shares_outputs(self, config: Config) -> bool:
        """Return whether the CRF is shared."""
        return "crf" not in config.private

    def count_steps(self, config: Config, sizes: Sequence[int]) -> int:
        """Return the maximum number of steps; each is of one batch of all sites."""
        rounds, examples = self.plan_rounds(config, sizes)
        return math.ceil(rounds * examples / max(1, _sum_shares(config, sizes)))

    def count_personal_epochs(self, config: Config) -> int:
        """Return the epochs that each site trains by itself after the last round."""
        return config.personal_epochs

    def estimate_traffic(self, config: Config, sizes: Sequence[int]) -> tuple[int, int]:
        """Return the maximum number of bytes that a site sends and receives."""
        rounds, epoch_rounds = count_rounds(
            config, sum(sizes), _sum_shares(config, sizes)
        )
        size = nbytes(make_initial_parameters(config))
        evaluations = math.ceil(rounds / (config.evaluate_every * epoch_rounds))
        # Before each round, each evaluation and the end, a site receives the model.
        return rounds * size, (rounds + evaluations + 1) * size

    def list_size_warnings(
        self, config: Config, sizes: Sequence[int]
    ) -> tuple[str, ...]:
        """Return a warning if the parts add up to much more than `batch_size`."""
        shares = [
            compute_batch_share(size, sum(sizes), config) for size in sizes if size
        ]
        return list_batch_warnings(config.batch_size, shares)

    def name_extension(self, config: Config) -> str:
        """Name the personal epochs, which the paper does not have."""
        return "local fine-tuning" if config.personal_epochs else ""

    def needs_each_update(self, config: Config) -> bool:
        """Return whether the aggregation looks at each site's update."""
        return needs_each_update(config)


def _configure_gradient_exchange(config: Config) -> Config:
    """Return settings that exchange gradients for the same number of epochs."""
    if config.exchange == "gradients":
        return config

    local = config.local_epochs
    rounds, _ = count_rounds(config, examples=1, batch=1)  # depends on neither
    return replace(
        config,
        exchange="gradients",
        epochs=rounds * local,
        rounds=0,
        evaluate_every=config.evaluate_every * local,
    )


def _sum_shares(config: Config, sizes: Sequence[int]) -> int:
    """Return Σ|N_j| for sites of these sizes."""
    config = replace(config, sites=len(sizes))
    return sum(compute_batch_share(size, sum(sizes), config) for size in sizes)


METHOD = FedNER()
