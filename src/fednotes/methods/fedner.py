"""FedNER: medical named entity recognition with a shared and a private module.

Suyu Ge, Fangzhao Wu, Chuhan Wu, Tao Qi, Yongfeng Huang, Xing Xie (2020), "FedNER:
Privacy-preserving Medical Named Entity Recognition with Federated Learning".

    paper       here
    P           the sites of the federation
    S_i         `Site.train_set`, the training sentences of platform i; |S_i| = `num_examples`
    N           `Config.batch_size`
    N_i         the mini-batch of platform i in one round; |N_i| = `Site.share`
    θ_s         `Server.shared`, the layers that are not in `Config.private`
    θ_p^i       the layers in `Config.private` (BiLSTM and CRF in the paper)
    L^i         mean negative log likelihood of the mini-batch, `Tagger.loss`
    α           `Config.learning_rate`

Of large word tables in θ_s, rows travel (`word_rows.py`); the numbers are the same.

Eq. 1 sums over sentences; L^i is the mean here, because Eq. 2 weights by |S_i| already and a
sum over |N_i| ∝ |S_i| sentences would weight twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, Literal

from torch import Tensor

from fednotes.core.errors import ConfigError
from fednotes.core.store import restoring
from fednotes.core.tensors import load_into, nbytes
from fednotes.core.types import SiteData, TagSet
from fednotes.core.update import Tensors, Total
from fednotes.data.split import pool
from fednotes.data.text import split_sentences
from fednotes.federation import Federation, State
from fednotes.methods import word_rows
from fednotes.methods.fedner_site import Site as Site
from fednotes.methods.fedner_site import batch_share
from fednotes.methods.optim import Adam
from fednotes.metrics.spans import SpanCounts
from fednotes.models.tagger import build_tagger
from fednotes.models.tagger_config import LAYERS, TaggerConfig, tagger_config


@dataclass(frozen=True)
class Config:
    """The settings of one FedNER run.

    model: the tagger that every site runs.
    private: the layers that never leave a site, of words, characters, context, cnn, lstm,
        crf; `[]` shares all (then every site's output layer has the complete tag set). A
        layer that the tagger lacks may be named.
    exchange: "gradients" (Algorithm 1: a round is one mini-batch) or "weights" (a round is
        `local_epochs` epochs at each site, then the mean of the shared layers).
    batch_size: N, sentences of all sites together. least_share: how many of them each site
        holds at least, whatever it is told of the others; 0: a quarter of an equal share.
    learning_rate: α of Adam, on both sides.
    epochs: at most so many passes over the training data. rounds: if not 0, at most so many
        rounds, whatever `epochs` says.
    evaluate_every: epochs (with "weights": rounds) between two evaluations and checkpoints.
    select: "best", each site ends with the tagger of its own best validation F1, and the run
        stops after `patience` evaluations without a better F1 on all validation data; or
        "last", all rounds are run and the last one's tagger is the result.
    personal_epochs: epochs of the whole tagger at each site alone, after the federation
        ends; with "best", kept only where the site's own validation F1 rises.
    tags: the complete tag set, the union over the sites. sites: how many there are; 0: not
        known. A job fills both in.
    """

    model: TaggerConfig = field(default_factory=TaggerConfig)
    private: tuple[str, ...] = ("lstm", "crf")
    exchange: Literal["gradients", "weights"] = "gradients"
    local_epochs: int = 1
    batch_size: int = 64
    least_share: int = 0
    learning_rate: float = 1e-3
    epochs: int = 30
    rounds: int = 0
    evaluate_every: int = 1
    select: Literal["last", "best"] = "best"
    patience: int = 5
    personal_epochs: int = 0
    seed: int = 0
    tags: TagSet = field(default_factory=lambda: TagSet(()))
    sites: int = 0

    def __post_init__(self) -> None:
        for name in ("local_epochs", "batch_size", "epochs", "evaluate_every", "patience"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}: at least 1 is needed")
        if not 0 < self.learning_rate < math.inf:
            raise ConfigError(f"learning_rate = {self.learning_rate}: a number above 0 is needed")
        for name in ("rounds", "personal_epochs", "least_share"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} = {getattr(self, name)}: at least 0 is needed")
        if self.exchange not in ("gradients", "weights"):
            raise ConfigError(
                f'exchange = {self.exchange!r}: expected "gradients" (a mini-batch a round) '
                'or "weights" (local epochs a round)'
            )
        _check_layers(self.private)


# "best" was chosen by scores of test sets (docs/results.md); `fednotes reproduce fedner-default`
# judges such settings by validation data
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {
        "training": {
            "private": ["lstm", "crf"],
            "exchange": "gradients",
            "batch_size": 64,
            "least_share": 1,
            "learning_rate": 0.001,
            "epochs": 30,
            "select": "last",
            "personal_epochs": 0,
        },
        "model": {
            "tagger": "elmoner",
            "char_dim": 100,
            "char_filters": 200,
            "char_width": 3,
            "cnn_filters": 200,
            "cnn_widths": [3],
            "lstm_units": 200,
            "lstm_layers": 1,
            "dropout": 0.2,
        },
        "with_word_vectors": {"train_words": True},
    },
    "best": {"training": {"learning_rate": 0.003, "patience": 8, "personal_epochs": 5}},
}


def train(federation: Federation, config: Config) -> State:
    """Algorithm 1 of Ge et al. 2020."""
    server = Server(config, federation.resume())
    if not server.examples:  # a resumed run has agreed before
        server.examples, server.batch = agree_on_shares(federation)
    examples, batch = server.examples, server.batch  # Σ|S_j|, Σ|N_j|
    task = "gradients" if config.exchange == "gradients" else "train"
    last = total_rounds(config, examples, batch) - 1
    period = config.evaluate_every * rounds_per_epoch(config, examples, batch)
    for round in federation.rounds(server.round, last + 1):
        if server.converged:
            break
        if server.lacks_rows:
            server.mark(federation.sum("mark", round=round.number))
        total = federation.sum(task, server.sent, round=round.number)  # [fedner alg 1]
        server.step(total)  # [fedner alg 1]
        evaluated = (round.number + 1) % period == 0 or round.number == last
        if evaluated:
            server.judge(federation.sum("evaluate", server.shared, round=round.number))
        round.commit(server.state(), server.metrics, evaluated=evaluated)
    federation.sum("finish", server.shared)
    return server.state()


class Server:
    """θ_s, its optimizer, and when to stop."""

    def __init__(self, config: Config, resumed: State | None) -> None:
        self.config = config
        self.shared = initial(config)
        self._adam = Adam(self.shared, config.learning_rate)
        by_rows = config.exchange == "gradients"
        self._tables = word_rows.tables(self.shared) if by_rows else ()
        self._rows: word_rows.Rows = {}  # of the tables, that the next round's mini-batches read
        self._most = 0  # sites in a sum so far
        self.round = 0
        self.examples = self.batch = 0  # Σ|S_j|, Σ|N_j|, once agreed
        self.best = -1.0
        self.waited = 0  # evaluations since the best one
        self.metrics: dict[str, float] = {}
        if resumed is not None:
            with restoring("the newest checkpoint"):
                self._restore(resumed)

    @property
    def converged(self) -> bool:
        """No better validation F1 for `patience` evaluations, where the best one is selected."""
        return self.config.select == "best" and self.waited >= self.config.patience

    @property
    def lacks_rows(self) -> bool:
        """Whether it is to be asked which rows of word tables the next mini-batches read."""
        return self._rows.keys() != set(self._tables)

    def mark(self, total: Total) -> None:
        """Take the rows that sites have marked."""
        self._rows = word_rows.marked(total.tensors, self._tables)
        self._most = max(self._most, total.sites)

    @property
    def sent(self) -> Tensors:
        """What a round of training begins with."""
        return word_rows.some(self.shared, self._rows)

    def step(self, total: Total) -> None:
        """θ_s ← θ_s − α ∂L/∂θ_s by Adam; or θ_s ← the weighted mean of the sites' θ_s."""
        if self.config.exchange == "gradients":
            mean = total.mean()  # [fedner eq 2] Σ |S_i| ∂L^i/∂θ_s / Σ |S_j|
            gradient = word_rows.whole(mean, self.shared, self._rows)
            self._adam.step(gradient)  # [fedner eq 2]
            self._rows = {}
            if total.sites >= self._most:  # else marks of a site are missing
                self.mark(total)
        else:
            self.shared = total.mean()  # [fedner eq 2]
        self.round += 1
        self.metrics = {"loss": total.metrics["loss"] / total.weight}

    def judge(self, total: Total) -> None:
        """Note the micro F1 over every site's validation counts.

        A first F1 of zero does not count as waiting: a tagger says O until it has seen enough.
        """
        f1 = SpanCounts.from_metrics(total.metrics).scores()["strict"]["f1"]
        self.waited = 0 if f1 > self.best or f1 == 0 >= self.best else self.waited + 1
        self.best = max(f1, self.best)
        self.metrics["valid_f1"] = f1

    def state(self) -> State:
        """Everything that the next round depends on."""
        tensors = {f"shared.{name}": value for name, value in self.shared.items()}
        facts = {
            "best": self.best,
            "waited": self.waited,
            "examples": self.examples,
            "batch": self.batch,
        }
        return State(self.round, tensors | self._adam.state(), facts)

    def _restore(self, state: State) -> None:
        load_into(self.shared, {n: state.tensors[f"shared.{n}"] for n in self.shared})
        self._adam.restore(state.tensors)
        self.round = state.round
        self.best, self.waited = float(state.facts["best"]), int(state.facts["waited"])
        self.examples, self.batch = int(state.facts["examples"]), int(state.facts["batch"])


def initial(config: Config) -> dict[str, Tensor]:
    """θ_s before training, which follows from the seed."""
    tagger = build_tagger(config.model, config.tags, config.seed)
    return {
        name: parameter.detach()
        for name, parameter in tagger.trainable().items()
        if name.split(".")[0] not in config.private
    }


def agree_on_shares(federation: Federation) -> tuple[int, int]:
    """Let every site learn Σ_j |S_j|, and so its |N_i|; return Σ_j |S_j| and Σ_j |N_j|."""
    examples = int(federation.sum("count").metrics["sentences"])
    if examples == 0:
        raise ConfigError("no site has a training sentence: check the paths and `fraction`")
    batch = federation.sum("take_share", examples=examples).metrics["share"]
    return examples, int(batch)


def rounds_per_epoch(config: Config, examples: int, batch: int) -> int:
    """An epoch of mini-batches, or one round of weights."""
    return math.ceil(examples / batch) if config.exchange == "gradients" else 1


def total_rounds(config: Config, examples: int, batch: int) -> int:
    """The most rounds that a run can take.

    examples: Σ_j |S_j|. batch: Σ_j |N_j|, about N (see `batch_share`).
    """
    if config.rounds:
        return config.rounds
    if config.exchange == "weights":
        return math.ceil(config.epochs / config.local_epochs)
    return config.epochs * rounds_per_epoch(config, examples, batch)


# what a job asks of a method


def model_config(table: Mapping[str, Any]) -> TaggerConfig:
    """The [model] table. Raises ConfigError."""
    config = tagger_config(table)
    config.require_input()
    return config


def for_sites(config: Config, sites: Sequence[SiteData]) -> Config:
    """The configuration with what only the sites together can say."""
    tags = reduce(TagSet.union, (site.tags for site in sites))
    return replace(config, tags=tags, sites=len(sites))


def alone(config: Config, sites: Sequence[SiteData]) -> tuple[Config, ...]:
    """Each site's configuration where it trains by itself: the mini-batch that it has in the
    federation."""
    sizes = [sum(len(split_sentences(d)) for d in site.train) for site in sites]
    shares = [batch_share(size, sum(sizes), config) for size in sizes]
    return tuple(replace(config, batch_size=share, sites=1) for share in shares)


def pooled(
    config: Config, sites: Sequence[SiteData], complete: Sequence[SiteData] | None
) -> tuple[tuple[SiteData, ...], Config]:
    """One model trained on all sites' sentences.

    With complete labels, or one tag set everywhere: simply all sentences together. Otherwise
    one output layer for each site's tag set over layers trained on all, which is this same
    method with a private CRF alone: a reference, not a bound.
    """
    schemes = {site.tags.scheme for site in sites}
    types = {frozenset(site.tags.types) for site in sites}
    source = complete or sites
    if len(schemes) > 1 or (complete is None and len(types) > 1):
        heads = replace(config, private=("crf",), exchange="gradients", personal_epochs=0)
        return tuple(sites), heads
    together = pool(source)
    return (together,), replace(config, tags=together.tags, personal_epochs=0, sites=1)


def planned(config: Config, sizes: Sequence[int]) -> tuple[int, int]:
    """The most rounds that a run of sites of these sizes can take, and the sentences of each."""
    config = replace(config, sites=len(sizes))
    batch = sum(batch_share(size, sum(sizes), config) for size in sizes)
    each = batch if config.exchange == "gradients" else sum(sizes) * config.local_epochs
    return total_rounds(config, sum(sizes), batch), each


def traffic(config: Config, sizes: Sequence[int]) -> tuple[int, int]:
    """Bytes that a site sends and is sent at most in a run of sites of these sizes."""
    each, rounds = nbytes(initial(config)), planned(config, sizes)[0]
    batch = sum(batch_share(size, sum(sizes), config) for size in sizes)
    period = config.evaluate_every * rounds_per_epoch(config, sum(sizes), batch)
    return rounds * each, (rounds + math.ceil(rounds / period) + 1) * each


def beyond(config: Config) -> str:
    """What a setting adds to the published method, in a word for tables."""
    return "local fine-tuning" if config.personal_epochs else ""


def _check_layers(private: tuple[str, ...]) -> None:
    """A known layer that this tagger lacks may be named; an unknown one is a mistake."""
    for name in private:
        if name not in LAYERS:
            raise ConfigError(
                f"private = {list(private)}: no layer is called {name!r}; "
                f"from bottom to top they are {', '.join(LAYERS)}"
            )
