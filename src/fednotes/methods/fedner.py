"""FedNER: medical named entity recognition with a shared and a private module.

Suyu Ge, Fangzhao Wu, Chuhan Wu, Tao Qi, Yongfeng Huang, Xing Xie (2020), "FedNER:
Privacy-preserving Medical Named Entity Recognition with Federated Learning".

    paper       here
    P           the sites of the federation
    S_i         `Site.train_set`, the training sentences of platform i; |S_i| = `num_examples`,
                and where the server needs it `reported_examples`
    N           `Config.batch_size`
    N_i         the mini-batch of platform i in one round; |N_i| = `Site.share`
    θ_s         `Server.shared`, the layers that are not in `Config.private`
    θ_p^i       the layers in `Config.private` (BiLSTM and CRF in the paper)
    L^i         mean negative log likelihood of the mini-batch, `Tagger.loss`
    α           `Config.learning_rate`

Of large word tables in θ_s, rows travel (`word_rows.py`); the numbers are the same.

Eq. 1 sums over sentences; L^i is the mean here, because Eq. 2 weights by |S_i| already
and a sum over |N_i| ∝ |S_i| sentences would weight twice.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fednotes.core.errors import ConfigError, RefusedError
from fednotes.core.federation import EVALUATE, TRAIN, Federation, Method, State
from fednotes.core.seeds import rng_of
from fednotes.core.settings import checked
from fednotes.core.tensors import (
    below,
    load_into,
    nbytes,
    prefixed,
    seed_torch,
    shapes_of,
    snapshot,
)
from fednotes.core.types import SiteData, TagSet
from fednotes.core.update import Tensors, Total, Update
from fednotes.data.batches import buckets
from fednotes.data.split import pool
from fednotes.data.text import split_sentences
from fednotes.methods import presets
from fednotes.metrics.spans import SpanCounts
from fednotes.privacy.promise import Privacy
from fednotes.privacy.training import Privately
from fednotes.taggers.corpora import PreparedCorpus
from fednotes.taggers.tagger import (
    LAYERS,
    Tagger,
    TaggerConfig,
    build_tagger,
    tagger_config,
)
from fednotes.training import word_rows
from fednotes.training.server_steps import Aggregation, by_each, for_names, gathered
from fednotes.training.sites import (
    Adam,
    Best,
    Count,
    MentionSite,
    Number,
    Rate,
    RoundServer,
    agree_on_shares,
    all_tags,
    finite,
    judged_mentions,
    larger_batch_warning,
    least_part,
    part_of,
    parted,
)

GRADIENTS = "gradients"  # the task of a round of mini-batches


@checked(frozen=True)
class Config(Aggregation):
    """Settings of a FedNER run.

    Attributes:
        model: The tagger that every site runs.
        private: Layers that never leave a site, of words, characters, context, cnn,
            lstm and crf. `[]` shares all; the output layer of every site then has the
            complete tag set. A layer that the tagger lacks may be named.
        exchange: "gradients" is Algorithm 1: a round is one mini-batch. With "weights"
            a round is `local_epochs` epochs at each site, then the mean of the shared
            layers.
        local_epochs: Epochs at each site in a round of exchange = "weights".
        batch_size: N, the number of sentences in a batch of all sites together.
        least_share: Smallest number of a batch's sentences that a site contributes,
            whatever it is told of the others; 0 is a quarter of an equal share.
        learning_rate: α of Adam, at the server and at the sites.
        epochs: Largest number of passes over the training data.
        rounds: Largest number of rounds, whatever `epochs` says; 0 disables the limit.
        evaluate_every: Number of epochs (with exchange = "weights": of rounds) between
            two evaluations and checkpoints.
        select: "best": each site ends with the tagger of its own best validation F1,
            and the run stops early (`patience`). "last": all rounds are run, and the
            last tagger is the result.
        patience: With select = "best": number of evaluations without a better F1 on all
            validation data after which the run stops.
        personal_epochs: Epochs in which each site trains its whole tagger alone after
            the federation ends; with select = "best" the result is kept only where the
            site's own validation F1 rises.
        seed: The job's seed. A job fills it in.
        tags: The complete tag set, the union over the sites. A job fills it in.
        privacy, min_sites: As in the job's tables. A job fills them in.
    """

    model: TaggerConfig = field(default_factory=TaggerConfig)
    private: tuple[str, ...] = ("lstm", "crf")
    exchange: Literal["gradients", "weights"] = "gradients"
    local_epochs: Count = 1
    batch_size: Count = 64
    least_share: Number = 0
    learning_rate: Rate = 1e-3
    epochs: Count = 30
    rounds: Number = 0
    evaluate_every: Count = 1
    select: Literal["last", "best"] = "best"
    patience: Count = 5
    personal_epochs: Number = 0
    seed: int = 0
    tags: TagSet = field(default_factory=lambda: TagSet(()))
    privacy: Privacy | None = None
    min_sites: int = 0

    def __post_init__(self) -> None:
        for name in self.private:  # a known layer that this tagger lacks may be named
            if name not in LAYERS:
                raise ConfigError(
                    f"private = {list(self.private)}: no layer is called {name!r}; "
                    f"from bottom to top they are {', '.join(LAYERS)}"
                )


def train(federation: Federation, config: Config) -> State:
    """Algorithm 1 of Ge et al. 2020."""
    server = Server(config, federation.resume())
    if not server.examples:  # a resumed run has agreed before
        server.examples, server.batch = agree_on_shares(federation)
    task = GRADIENTS if config.exchange == "gradients" else TRAIN
    rounds, epoch = schedule(config, server.examples, server.batch)  # of Σ|S_j|, Σ|N_j|
    for round in federation.rounds(server.round, rounds):
        if server.converged:
            break
        if server.lacks_rows:
            server.mark(federation.sum("mark", round=round.number))
        sent, number = server.sent, round.number
        start = sent if task == TRAIN else {}  # a gradient is a change by itself
        total = gathered(
            federation, config, task, sent, start, round=number
        )  # [fedner alg 1]
        server.step(total)  # [fedner alg 1]
        done = round.number + 1
        evaluated = done % (config.evaluate_every * epoch) == 0 or done == rounds
        if evaluated:
            server.judge(federation.sum(EVALUATE, server.shared, round=round.number))
        round.commit(server.state(), server.metrics, evaluated=evaluated)
    federation.sum("finish", server.shared)
    return server.state()


class Server(RoundServer):
    """θ_s, its optimizer, and when to stop."""

    config: Config

    def __init__(self, config: Config, resumed: State | None) -> None:
        shared = initial(config)
        self._adam = Adam(shared, config.learning_rate)
        self._tables = (
            word_rows.tables(shared) if config.exchange == "gradients" else ()
        )
        # of the tables, that the next round's mini-batches read
        self._rows: word_rows.Rows = {}
        self._most = 0  # sites in a sum so far
        self.examples = self.batch = 0  # Σ|S_j|, Σ|N_j|, once agreed
        # taggers say O at first
        super().__init__(config, shared, Best(False, "at zero"), resumed)

    @property
    def converged(self) -> bool:
        """No better validation F1 for `patience` evaluations, where the best one is
        selected."""
        return self.config.select == "best" and self.best.waited >= self.config.patience

    @property
    def lacks_rows(self) -> bool:
        """Whether it is to be asked which rows of word tables the next mini-batches
        read."""
        return self._rows.keys() != set(self._tables)

    def mark(self, total: Total) -> None:
        """Take the rows that sites have marked."""
        total.require(word_rows.mark_shapes(self.shared, self._tables))
        self._take_rows(total)

    def _take_rows(self, total: Total) -> None:
        self._rows = word_rows.marked(total.tensors, self._tables)
        self._most = max(self._most, total.sites)

    @property
    def sent(self) -> Tensors:
        """What a round of training begins with."""
        return word_rows.some(self.shared, self._rows)

    def step(self, total: Total) -> None:
        """θ_s ← θ_s − α ∂L/∂θ_s by Adam; or θ_s ← the weighted mean of the sites' θ_s."""
        if self.config.exchange == "gradients":
            total.require(
                word_rows.gradient_shapes(self.shared, self._rows, self._tables)
            )
            mean = total.mean()  # [fedner eq 2] Σ |S_i| ∂L^i/∂θ_s / Σ |S_j|
            gradient = word_rows.whole(mean, self.shared, self._rows)
            self._adam.step(gradient)  # [fedner eq 2]
            self._rows = {}
            if total.sites >= self._most:  # else marks of a site are missing
                self._take_rows(total)
        else:
            total.require(shapes_of(self.shared))
            self.shared = total.mean()  # [fedner eq 2]
        self.round += 1
        self.metrics = {"loss": total.metric("loss") / total.weight}

    def state(self) -> State:
        """Everything that the next round depends on."""
        state = super().state()
        facts = {**state.facts, "examples": self.examples, "batch": self.batch}
        return replace(
            state, tensors={**state.tensors, **self._adam.state()}, facts=facts
        )

    def _restore(self, state: State) -> None:
        super()._restore(state)
        self._adam.restore(state.tensors)
        self.examples, self.batch = (
            int(state.facts["examples"]),
            int(state.facts["batch"]),
        )


def initial(config: Config) -> dict[str, Tensor]:
    """θ_s before training, which follows from the seed."""
    parameters = build_tagger(config.model, config.tags, config.seed).trainable()
    return {
        name: value.detach()
        for name, value in parted(parameters, config.private)[0].items()
    }


class Site(MentionSite):
    """One platform: its data, its private module, and the tasks that the server may ask
    for."""

    rounds_counts = True
    tasks: ClassVar[frozenset[str]] = frozenset(
        {"count", "take_share", "mark", GRADIENTS, TRAIN, EVALUATE, "finish"}
    )
    model: Tagger
    train_set: PreparedCorpus

    def __init__(self, data: SiteData, config: Config, **options: Any) -> None:
        """Options and errors are those of `MentionSite`."""
        tags = data.tags if "crf" in config.private else config.tags
        super().__init__(data, config, tags, **options)
        self.share = config.batch_size
        parameters = self.model.trainable()
        self.shared, self.private = parted(parameters, config.private)
        self._by_gradients = config.exchange == "gradients"
        self.tables = word_rows.tables(self.shared) if self._by_gradients else ()
        self._secret = secrets.randbits(63)  # of the marks
        # what it trains itself
        self._own = self.private if self._by_gradients else parameters
        self.adam = Adam(self._own, config.learning_rate)
        self.steps = 0  # mini-batches so far
        self._order: list[np.ndarray] = []
        self._ordered: tuple[int, int] | None = None  # epoch and share of that order
        self.best = Best(config.select == "best", "at zero")
        # on validation data, where the last one is kept
        self._last_score: float | None = None

    def covered(self, task: str) -> dict[str, int]:
        """The local steps, tokens and smallest mini-batch behind an update of this
        task."""
        batches, smallest = self._epoch()
        if task in ("mark", GRADIENTS):
            return {"steps": 1, "batch": smallest}
        tokens = int(self.train_set.lengths.sum())  # an epoch more reads the same ones
        steps = self.config.local_epochs * batches
        return (
            {"steps": steps, "tokens": tokens, "batch": smallest}
            if task == TRAIN
            else {}
        )

    def _epoch(self) -> tuple[int, int]:
        """An epoch's mini-batches, and the sentences of its smallest one, which may be
        its last."""
        whole, short = divmod(self.num_examples, self.share)
        if not whole or short >= least_share(self.num_examples, self.config):
            return whole + 1, short
        return whole, self.share if whole > 1 else self.num_examples

    def count(self, tensors: Tensors) -> Update:
        """|S_i|."""
        return Update(metrics={"examples": self.reported_examples})

    def take_share(self, tensors: Tensors, *, examples: int) -> Update:
        """Set |N_i|, of the job's N and Σ|S_j|, `examples`; the sum is of the shares.

        Raises RefusedError for fewer than this site has alone.
        """
        if examples < self.reported_examples:
            raise RefusedError(
                f"site {self.id!r} has more sentences than the sum of all it is told"
            )
        self.share = batch_share(self.reported_examples, examples, self.config)
        return Update(metrics={"share": self.share})

    # training

    def mark(self, tensors: Tensors, *, round: int) -> Update:
        """The rows of word tables that the next mini-batch reads (`word_rows.py`)."""
        return Update(self._marks())

    def _marks(self) -> dict[str, torch.Tensor]:
        if not self.tables:
            return {}
        read = self.model.word_rows(self.train_set, self._batch(self.steps))
        rng = rng_of(self._secret, "marks", self.id, self.steps)
        return word_rows.marks(read, self.shared, self.tables, rng)

    def gradients(self, tensors: Tensors, *, round: int) -> Update:
        """One mini-batch: step θ_p, return ∂L^i/∂θ_s with weight |S_i|; of tables the
        rows that came."""
        rows = word_rows.take(self.shared, tensors, self.tables)
        loss = self._backward(self._batch(self.steps))
        gradients = {
            name: torch.zeros_like(value) if value.grad is None else value.grad.cpu()
            for name, value in self.shared.items()
        }
        gradients |= {name: gradients[name][ids] for name, ids in rows.items()}
        for parameter in self.shared.values():
            parameter.grad = None
        self.adam.step()  # [fedner private] θ_p^i ← θ_p^i − α ∂L^i/∂θ_p^i
        told = gradients | self._marks()
        # [fedner eq 2]
        return Update(told, self.reported_examples, self._reported(loss))

    def train(self, tensors: Tensors, *, round: int) -> Update:
        """`local_epochs` epochs of the whole tagger; return θ_s with weight |S_i|."""
        load_into(self.shared, tensors)
        batches = self.config.local_epochs * self._epoch()[0]
        loss = sum(self._local_step(self.adam) for _ in range(batches)) / batches
        # [fedner eq 2]
        return Update(
            {name: value.cpu() for name, value in snapshot(self.shared).items()},
            self.reported_examples,
            self._reported(loss),
        )

    def _reported(self, loss: float) -> dict[str, float]:
        return {
            "loss": loss * self.reported_examples,
            "examples": self.reported_examples,
        }

    def _local_step(self, adam: Adam) -> float:
        loss = self._backward(self._batch(self.steps))
        adam.step()
        return loss

    def _backward(self, batch: np.ndarray) -> float:
        """Gradients of the mini-batch's mean loss into every parameter's `.grad`."""
        seed = self.draws.seed_of("dropout", self.id, self.steps)
        seed_torch(seed, self.model.device)
        self.model.train()
        loss = self.model.loss(self.train_set, batch)  # L^i
        remedy = "lower learning_rate, or check the word vectors and features for NaN"
        value = finite(loss, self.id, f"at mini-batch {self.steps}", remedy)
        loss.backward()
        self.steps += 1
        return value

    def _batch(self, step: int) -> np.ndarray:
        """The mini-batch of a step: an epoch's order depends on draws, site and epoch
        alone."""
        epoch, position = divmod(step, self._epoch()[0])
        if self._ordered != (epoch, self.share):
            rng = self.draws.rng_of("order", self.id, epoch)
            # of the epoch's odd one too
            least = least_share(self.num_examples, self.config)
            self._order = buckets(self.train_set.lengths, self.share, rng, least=least)
            self._ordered = (epoch, self.share)
        return self._order[position]

    # judging and keeping the best

    def evaluate(self, tensors: Tensors, *, round: int) -> Update:
        """Counts on the site's validation data; keep the tagger if it is the best so
        far and the best is selected."""
        load_into(self.shared, tensors)
        return self.report_counts(self._judge())

    def _judge(self) -> SpanCounts:
        counts = self.counts("valid")
        self.best.judge(counts.scores()["strict"]["f1"], self.model.trainable())
        return counts

    def finish(self, tensors: Tensors) -> Update:
        """Personal epochs, back to the best tagger, test counts, save."""
        # This also checks what came where a better tagger was kept.
        load_into(self.shared, tensors)
        if self.best.tensors:
            load_into(self.model.trainable(), self.best.tensors)
        self._personalise(self.config.personal_epochs)
        if not self.best.wanted and self._is_judged:
            self._last_score = self.counts("valid").scores()["strict"]["f1"]
        return self.tested()

    @property
    def _is_judged(self) -> bool:
        """Whether the site's validation data have mentions to be found."""
        return any(document.spans for document in self.data.valid)

    @property
    def valid_score(self) -> float | None:
        """The strict F1 on validation data of the tagger that is kept; None if there is
        none."""
        if not self._is_judged:
            return None
        if not self.best.wanted:
            return self._last_score
        return self.best.score if self.best.score >= 0 else None

    @staticmethod
    def judged_types(site: SiteData) -> tuple[str, ...]:
        """Those that the site annotates: its output layer knows no others."""
        return site.tags.types

    def _personalise(self, epochs: int) -> None:
        """Epochs of the whole tagger on the site's own data, a fresh optimizer."""
        adam = Adam(self.model.trainable(), self.config.learning_rate)
        for _ in range(epochs):
            for _ in range(self._epoch()[0]):
                self._local_step(adam)
            self._judge()
        if self.best.tensors:
            load_into(self.model.trainable(), self.best.tensors)

    # what a restart must not lose

    def state(self) -> State:
        """Private parameters, optimizer moments and the best tagger so far."""
        kept, facts = self.best.state()
        own = {name: value.detach() for name, value in self._own.items()}
        tensors = prefixed("private.", own) | self.adam.state() | kept
        facts |= {"share": self.share} | (
            {"secret": self._secret} if self.tables else {}
        )
        return State(self.steps, tensors, facts)

    def restore(self, state: State) -> None:
        """Go back to a kept state."""
        load_into(self._own, below(state.tensors, "private."))
        self.adam.restore(state.tensors)
        self.best.restore(state, self.model.trainable())
        self.steps, self.share = state.round, int(state.facts["share"])
        if self.tables:
            self._secret = int(state.facts["secret"])


# how many sentences and rounds


def schedule(config: Config, examples: int, batch: int) -> tuple[int, int]:
    """The most rounds that a run can take; and the rounds of an epoch.

    examples: Σ_j |S_j|. batch: Σ_j |N_j|, about N (see `batch_share`).
    """
    if config.exchange == "weights":
        return config.rounds or math.ceil(config.epochs / config.local_epochs), 1
    epoch = math.ceil(examples / batch)
    return config.rounds or config.epochs * epoch, epoch


def batch_share(size: int, examples: int, config: Config) -> int:
    """|N_i| = |S_i| / Σ|S_j| · N to the nearest whole number (a half up), at least one.

    size: |S_i|. examples: Σ|S_j|. Not below the job's `least_share` either, as far as
    the site has so many: a server that tells too large a sum gets no gradient of a
    single sentence. The shares of all sites may sum to a little more or less than N.
    """
    return part_of(config.batch_size, size, examples, least_share(size, config))


def least_share(size: int, config: Config) -> int:
    """The fewest sentences of a site of this size in a mini-batch of the job."""
    return least_part(config.batch_size, config.sites, size, config.least_share)


def size_warnings(config: Config, sizes: Sequence[int]) -> tuple[str, ...]:
    """Return a warning where the sites' mini-batches add up to much more than
    `batch_size`."""
    shares = [batch_share(size, sum(sizes), config) for size in sizes if size]
    return larger_batch_warning(config.batch_size, shares)


# what a job asks of a method


def model_config(table: Mapping[str, Any]) -> TaggerConfig:
    """The [model] table, of the light tagger alone. Raises ConfigError."""
    if "kind" in table:
        raise ConfigError(
            f'kind = {table["kind"]!r} is no model for method = "fedner", which takes "tagger"; '
            "the methods distill and finetune take others"
        )
    config = tagger_config(table)
    config.require_input()
    return config


def for_sites(config: Config, sites: Sequence[SiteData]) -> Config:
    """The configuration with what only the sites together can say."""
    return for_names(config, [site.id for site in sites], tags=all_tags(sites))


def alone(config: Config, sites: Sequence[SiteData]) -> tuple[Config, ...]:
    """Each site's configuration where it trains by itself: the mini-batch that it has
    in the federation."""
    sizes = [sum(len(split_sentences(d)) for d in site.train) for site in sites]
    shares = [batch_share(size, sum(sizes), config) for size in sizes]
    config = replace(config, aggregation="mean", sites=1)
    return tuple(replace(config, batch_size=share) for share in shares)


def pooled(
    config: Config, sites: Sequence[SiteData], complete: Sequence[SiteData] | None
) -> tuple[tuple[SiteData, ...], Config]:
    """One model trained on all sites' sentences.

    With complete labels, or one tag set everywhere: simply all sentences together.
    Otherwise one output layer for each site's tag set over layers trained on all, which
    is this same method with a private CRF alone: a reference, not a bound. Layers are
    trained on all sentences only where every step has all sites' gradients, so it
    exchanges gradients, for as many epochs as a federation that exchanges weights
    takes.
    """
    schemes, config = (
        {site.tags.scheme for site in sites},
        replace(config, aggregation="mean"),
    )
    types = {frozenset(site.tags.types) for site in sites}
    source = complete or sites
    if len(schemes) > 1 or (complete is None and len(types) > 1):
        heads = replace(_by_gradients(config), private=("crf",), personal_epochs=0)
        return tuple(sites), heads
    together = pool(source)
    return (together,), replace(config, tags=together.tags, personal_epochs=0, sites=1)


def _by_gradients(config: Config) -> Config:
    """Return the settings under which gradients are exchanged for as many epochs."""
    if config.exchange == "gradients":
        return config
    local = config.local_epochs
    # does not depend on either number
    rounds, _ = schedule(config, examples=1, batch=1)
    return replace(
        config,
        exchange="gradients",
        epochs=rounds * local,
        rounds=0,
        evaluate_every=config.evaluate_every * local,
    )


def planned(config: Config, sizes: Sequence[int]) -> tuple[int, int]:
    """The most rounds that a run of sites of these sizes can take, and the sentences of
    each."""
    batch = _batch_of(config, sizes)
    each = batch if config.exchange == "gradients" else sum(sizes) * config.local_epochs
    return schedule(config, sum(sizes), batch)[0], each


def traffic(config: Config, sizes: Sequence[int]) -> tuple[int, int]:
    """Bytes that a site sends and is sent at most in a run of sites of these sizes."""
    rounds, epoch = schedule(config, sum(sizes), _batch_of(config, sizes))
    each, judged = (
        nbytes(initial(config)),
        math.ceil(rounds / (config.evaluate_every * epoch)),
    )
    return rounds * each, (rounds + judged + 1) * each


def _batch_of(config: Config, sizes: Sequence[int]) -> int:
    """Σ|N_j| of sites of these sizes."""
    config = replace(config, sites=len(sizes))
    return sum(batch_share(size, sum(sizes), config) for size in sizes)


def private_rounds(config: Config, epoch: int) -> int:
    """The rounds of a run with differential privacy, of so many to an epoch."""
    return config.rounds or config.epochs * epoch


def private_loss(site: Site, indices: np.ndarray) -> torch.Tensor:
    """The mean loss of some sentences."""
    return site.model.loss(site.train_set, indices)


def beyond(config: Config) -> str:
    """What a setting adds to the published method, in a word for tables."""
    return "local fine-tuning" if config.personal_epochs else ""


METHOD = Method(
    Config,
    Site,
    train,
    model_config,
    presets("fedner"),
    planned,
    pooled,
    judged_mentions,
    models=lambda: {"tagger": TaggerConfig},
    size_warnings=size_warnings,
    trains=(GRADIENTS, TRAIN),
    for_sites=for_sites,
    alone=alone,
    traffic=traffic,
    beyond=beyond,
    each=by_each,
    private=Privately(
        {
            **{"exchange": "gradients", "select": "last", "personal_epochs": 0},
            "aggregation": "mean",
        },
        initial,
        private_loss,
        private_rounds,
    ),
)
