"""One global model for sites whose notes are annotated with different entity types.

Rui Wang, Tong Yu, Junda Wu, Handong Zhao, Sungchul Kim, Ruiyi Zhang, Subrata Mitra, Ricardo
Henao (2023), "Federated Domain Adaptation for Named Entity Recognition via Distilling with
Heterogeneous Tag Sets".

    paper       here
    K           the sites of the federation
    D_k, N_k    `Site.train_set`, its sentences; N_k = `Site.num_examples`
    T_k, T      `Site.known`, `Config.tags`
    θ_t, θ_t^k  `Server.shared`, `Site.parameters` after local training
    m_k         `Config.aggregation`: 1 / K, or N_k / Σ N_j
    E_loc       `Config.local_epochs`
    L_i^{T_k}   `Losses.source`, what the site's own annotation costs (Eq. 8)
    L_i^{T\\k}  `Losses.target`, what the pseudo-annotation costs (Eq. 9)
    q           the model's `transfer` parameter
    w_i         `Site.weights`, which never leave the site
    g^tgt       what `Site.update_weights` is left with: the sum without the site's own part
    α           `Config.momentum`
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, Literal

from fednotes.core.errors import ConfigError, RefusedError
from fednotes.core.store import restoring
from fednotes.core.tensors import nbytes, require_like, snapshot
from fednotes.core.types import SiteData, TagSet
from fednotes.core.update import Tensors, Total
from fednotes.data.split import pool
from fednotes.federation import Federation, State
from fednotes.methods.distill_site import FEWEST_CONTRIBUTORS
from fednotes.methods.distill_site import Site as Site
from fednotes.metrics.spans import SpanCounts
from fednotes.models.build import ModelConfig, build_model
from fednotes.models.build import model_config as model_config
from fednotes.models.prompt_bart import PromptBartConfig
from fednotes.models.tagger_config import TaggerConfig

Unannotated = Literal["pseudo", "soft", "marginal", "outside"]


@dataclass(frozen=True)
class Config:
    """The settings of one run.

    model: what every site trains; only its trainable parameters travel.
    unannotated: what a token may be that the site's own annotation leaves open.
        "pseudo": what θ_t predicts of the other types (the paper's distillation);
        "soft": θ_t's posterior given the site's annotation (models with a CRF);
        "marginal": anything, summed over (models with a CRF; no distillation);
        "outside": no entity (the paper's ablation without distillation).
    warmup: rounds before θ_t is asked; until then "marginal" stands in, or "outside" where
        the model has no CRF.
    weighting: instance weights on the source loss; needs "pseudo" and three sites or more.
    momentum: α. clip_weights: negative ones count as 0. normalise_weights: to a mean of 1.
    target_gradient: "mean" over a site's sentences (Eq. 7), or "sum" (Algorithm 2).
    aggregation: m_k, "uniform" or in proportion to the sites' "size".
    rounds, batch_size, learning_rate: of Adam, started anew in each round.
    local_epochs: E_loc; below 1, or between whole numbers, so many of an epoch's mini-batches.
    evaluate_every: rounds between two evaluations and checkpoints.
    trace: score the test data too at every evaluation, to draw F1 against bytes or seconds;
        nothing is chosen by it.
    select: the model that is kept, of the "last" round or of the "best" evaluation, by F1 on
        what the sites' validation data annotate.
    tags: the complete tag set T, the union over the sites; a job fills it in.
    """

    model: ModelConfig = field(default_factory=TaggerConfig)
    unannotated: Unannotated = "pseudo"
    warmup: int = 0
    weighting: bool = True
    momentum: float = 0.9
    clip_weights: bool = False
    normalise_weights: bool = False
    target_gradient: Literal["mean", "sum"] = "mean"
    aggregation: Literal["uniform", "size"] = "uniform"
    rounds: int = 25
    local_epochs: float = 1
    batch_size: int = 8
    learning_rate: float = 3e-5
    evaluate_every: int = 1
    trace: bool = False
    select: Literal["last", "best"] = "last"
    seed: int = 0
    tags: TagSet = field(default_factory=lambda: TagSet(()))

    def __post_init__(self) -> None:
        for name in ("rounds", "batch_size", "evaluate_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}: at least 1 is needed")
        if not 0 < self.local_epochs < math.inf:
            raise ConfigError(f"local_epochs = {self.local_epochs}: a number above 0 is needed")
        if self.warmup < 0:
            raise ConfigError(f"warmup = {self.warmup}: at least 0 is needed")
        if not 0 < self.learning_rate < math.inf:
            raise ConfigError(f"learning_rate = {self.learning_rate}: a number above 0 is needed")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum = {self.momentum}: expected 0 up to, not including, 1")
        if self.unannotated in ("soft", "marginal") and isinstance(self.model, PromptBartConfig):
            raise ConfigError(
                f'unannotated = "{self.unannotated}" needs a model with a CRF; '
                'the pointer model takes "pseudo" or "outside"'
            )
        if self.warmup >= self.rounds and self.unannotated in ("pseudo", "soft"):
            raise ConfigError(
                f"warmup = {self.warmup}: with rounds = {self.rounds} nothing would be distilled"
            )
        if self.weighting and self.unannotated != "pseudo":
            why = (
                "learns from the model that it starts from, so its target gradient is zero"
                if self.unannotated == "soft"
                else "has no target loss to weight for"
            )
            raise ConfigError(
                f'unannotated = "{self.unannotated}" {why}: set weighting = false, '
                'or unannotated = "pseudo"'
            )


# "paper" is Appendix C; "best" is what few runs on a CPU suggest: docs/results.md
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {
        "training": {
            "unannotated": "pseudo",
            "warmup": 0,
            "weighting": True,
            "momentum": 0.9,
            "clip_weights": False,
            "normalise_weights": False,
            "target_gradient": "mean",
            "aggregation": "uniform",
            "rounds": 25,
            "local_epochs": 1,
            "batch_size": 8,
            "learning_rate": 3e-5,
            "select": "last",
        },
        "model": {
            "kind": "prompt-bart",
            "prompts": 10,
            "prompt_hidden": 400,
            "tune_cross_attention": False,
            "dropout": 0.1,
        },
    },
    "best": {
        "training": {
            "unannotated": "soft",
            "weighting": False,
            "rounds": 30,
            "batch_size": 16,
            "learning_rate": 3e-3,
        },
        "model": {
            "contextual": "minilm#layer=5",
            "project": 128,
            "char_dim": 32,
            "char_filters": 64,
            "cnn_filters": 128,
            "lstm_units": 100,
        },
    },
}


def train(federation: Federation, config: Config, shared: Tensors | None = None) -> State:
    """Algorithm 1 of Wang et al. 2023.

    shared: θ_1, if it is not the model's own initial values.
    Raises RefusedError for instance weights with fewer than three sites.
    """
    server = Server(config, federation.resume(), shared)
    for round in federation.rounds(server.round, config.rounds):
        # [tagsets alg 1] θ_t; Eq. 4 and 5
        begun = federation.sum("begin", server.shared, round=round.number)
        if config.weighting:
            _update_weights(federation, begun, round.number)  # w_{t+1}: Eq. 10 to 12
        total = federation.sum("train", round=round.number)  # [tagsets alg 1]
        server.step(total)  # [tagsets alg 1]
        evaluated = (round.number + 1) % config.evaluate_every == 0
        if evaluated or round.number == config.rounds - 1:
            server.judge(federation.sum("evaluate", server.shared, round=round.number))
            if config.trace:
                server.metrics["test_f1"] = _f1(federation.sum("trace"))
            evaluated = True
        round.commit(server.state(), server.metrics, evaluated=evaluated)
    federation.sum("finish", server.chosen)
    return server.state()


def _update_weights(federation: Federation, begun: Total, round: int) -> None:
    """Send every site the sum of the target gradients, from which it takes its own part.

    Of two contributors each would be left with the other's vector, so three are needed, not
    counting sites whose gradient is zero (all types annotated, or nothing predicted yet). In a
    round with fewer the weights stay as they are.
    """
    if len(begun.included) < FEWEST_CONTRIBUTORS and round == 0:
        raise RefusedError(_too_few(len(begun.included)))
    contributing = int(begun.metrics["contributing"])
    if min(contributing, len(begun.included)) >= FEWEST_CONTRIBUTORS:
        included = ",".join(begun.included)
        federation.sum(
            "update_weights",
            begun.tensors,
            round=round,
            included=included,
            contributing=contributing,
        )


def _too_few(sites: int) -> str:
    return (
        f"instance weights need {FEWEST_CONTRIBUTORS} sites, here are {sites}: with two, each "
        "would receive the other's gradient; set training.weighting = false"
    )


class Server:
    """θ_t, and which of them is kept."""

    def __init__(self, config: Config, resumed: State | None, shared: Tensors | None) -> None:
        self.config = config
        self.shared = dict(shared) if shared is not None else initial(config)
        self.best: dict[str, Any] = {}
        self.best_f1 = -1.0
        self.round = 0
        self.metrics: dict[str, float] = {}
        if resumed is not None:
            with restoring("the newest checkpoint"):
                self._restore(resumed)

    @property
    def chosen(self) -> Tensors:
        """The model that the run ends with."""
        return self.best if self.config.select == "best" and self.best else self.shared

    def step(self, total: Total) -> None:
        """θ_{t+1} = Σ m_k θ_t^k."""
        self.shared = total.mean()  # [tagsets eq 1]
        sentences = total.metrics["examples"]
        self.metrics = {
            name: total.metrics[name] / sentences for name in ("loss", "source", "target")
        }
        self.metrics["pseudo"] = total.metrics["pseudo"]
        self.round += 1

    def judge(self, total: Total) -> None:
        """Note the micro F1 over what the sites' validation data annotate.

        A later model replaces an equal one, so the last is kept where nothing can be judged.
        """
        f1 = _f1(total)
        self.metrics["valid_f1"] = f1
        if f1 >= self.best_f1:
            self.best_f1 = f1
            self.best = snapshot(self.shared) if self.config.select == "best" else {}

    def state(self) -> State:
        """Everything that the next round depends on."""
        tensors = {f"shared.{name}": value for name, value in self.shared.items()}
        tensors |= {f"best.{name}": value for name, value in self.best.items()}
        return State(self.round, tensors, {"best_f1": self.best_f1})

    def _restore(self, state: State) -> None:
        shared = {name: state.tensors[f"shared.{name}"] for name in self.shared}
        require_like(self.shared, shared)
        if f"best.{next(iter(shared))}" in state.tensors:
            self.best = {name: state.tensors[f"best.{name}"] for name in shared}
            require_like(shared, self.best)
        self.shared = shared
        self.round, self.best_f1 = state.round, float(state.facts["best_f1"])


def initial(config: Config) -> dict[str, Any]:
    """θ_1: the model's initial values, which follow from the seed."""
    model = build_model(config.model, config.tags, config.seed)
    return snapshot(model.trainable())


def _f1(total: Total) -> float:
    """Strict micro F1 of summed counts."""
    return float(SpanCounts.from_metrics(total.metrics).scores()["strict"]["f1"])


# what a job asks of a method


def for_sites(config: Config, sites: Sequence[SiteData]) -> Config:
    """The configuration with what only the sites together can say.

    Raises RefusedError for instance weights with fewer than three sites.
    """
    if config.weighting and len(sites) < FEWEST_CONTRIBUTORS:
        raise RefusedError(_too_few(len(sites)))
    return replace(config, tags=reduce(TagSet.union, (site.tags for site in sites)))


def alone(config: Config, sites: Sequence[SiteData]) -> tuple[Config, ...]:
    """Each site's configuration where it trains by itself: its own types, nothing to distil."""
    plain = replace(config, weighting=False, unannotated="outside")
    return tuple(
        replace(plain, tags=site.tags, model=_worded(config.model, site.tags)) for site in sites
    )


def _worded(model: ModelConfig, tags: TagSet) -> ModelConfig:
    """A pointer model's settings without the words of types that it will not have."""
    if not isinstance(model, PromptBartConfig):
        return model
    words = {label: text for label, text in model.label_words.items() if label in tags.types}
    return replace(model, label_words=words)


def pooled(
    config: Config, sites: Sequence[SiteData], complete: Sequence[SiteData] | None
) -> tuple[tuple[SiteData, ...], Config]:
    """One model on all sites' sentences with every type annotated: the upper bound.

    Raises ConfigError where no complete annotation is at hand.
    """
    source = complete or sites
    types = {frozenset(site.tags.types) for site in source}
    if len(types) > 1:
        raise ConfigError(
            'conditions has "pooled", which needs the complete annotation of every site: '
            'leave it out: conditions = ["alone", "federated"]'
        )
    together = pool(source)
    plain = replace(config, tags=together.tags, weighting=False, unannotated="outside")
    return (together,), plain


def traffic(config: Config, sizes: Sequence[int]) -> tuple[int, int]:
    """Bytes that a site sends and is sent at most in a run; instance weights add little."""
    return messages(config, nbytes(initial(config)))


def messages(config: Config, each: int) -> tuple[int, int]:
    """The same of a model of so many bytes: sent in every round, judged and at the end."""
    judged = math.ceil(config.rounds / config.evaluate_every)
    return config.rounds * each, (config.rounds + judged + 1) * each


def planned(config: Config, sizes: Sequence[int]) -> tuple[int, int]:
    """The most rounds that a run can take, and the sentences of each."""
    return config.rounds, math.ceil(sum(sizes) * config.local_epochs)
