r"""One global model for sites whose notes are annotated with different entity types.

Rui Wang, Tong Yu, Junda Wu, Handong Zhao, Sungchul Kim, Ruiyi Zhang, Subrata Mitra,
Ricardo Henao (2023), "Federated Domain Adaptation for Named Entity Recognition via
Distilling with Heterogeneous Tag Sets".

    paper       here
    K           the sites of the federation
    D_k, N_k    `Site.train_set`, its sentences; N_k = `Site.num_examples`
    T_k, T      `Site.known`, `Config.tags`
    θ_t, θ_t^k  `Server.shared`, `Site.parameters` after local training
    m_k         set by `Config.aggregation`: 1 / K, or N_k / Σ N_j
    E_loc       `Config.local_epochs`
    L_i^{T_k}   `Losses.source`, the loss of the site's own annotation (Eq. 8)
    L_i^{T\k}  `Losses.target`, the loss of the pseudo-annotation (Eq. 9)
    q           the model's `transfer` parameter
    w_i         `Site.weights`, which never leave the site
    g^tgt       in `Site.update_weights`, the sum without the site's own part
    α           `Config.momentum`
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fednotes.core.counts import round_count, scale_sum
from fednotes.core.errors import ConfigError, RefusedError, TrainingError
from fednotes.core.federation import EVALUATE, TRAIN, Federation, State
from fednotes.core.numbers import (
    Epochs,
    FractionBelowOne,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)
from fednotes.core.settings import FilledIn, checked
from fednotes.core.store import write_text
from fednotes.core.tensors import (
    copy_tensors,
    list_shapes,
    load_into,
    nbytes,
    require_like,
    seed_torch,
)
from fednotes.core.types import Document, SiteData, Span, TagSet
from fednotes.core.update import Tensors, Total, Update, compute_contribution
from fednotes.data.batches import draw_epoch_batches
from fednotes.data.split import pool_documents
from fednotes.data.tags import decode_tags, encode_tags
from fednotes.methods import read_presets
from fednotes.methods.base import Method
from fednotes.privacy.promise import Privacy
from fednotes.privacy.training import DPSupport
from fednotes.taggers.corpora import PreparedCorpus
from fednotes.taggers.model import Losses, ModelConfig
from fednotes.taggers.saving import build_model, read_model_config
from fednotes.taggers.tagger import TaggerConfig
from fednotes.taggers.token_classifier import TokenClassifierConfig
from fednotes.training.precision import (
    Precision,
    require_float32,
    setting_precision,
)
from fednotes.training.site_sampling import SiteSampling
from fednotes.training.sites import (
    Adam,
    Best,
    MentionSite,
    RoundServer,
    list_earlier_classifier_warnings,
    require_finite_loss,
    save_global_model,
    summarise_mentions,
    unite_tags,
)

FEWEST_CONTRIBUTORS = 3
LARGEST_LEARNING_RATE = 1e-3  # above it, a token classifier diverges
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
Unannotated = Literal["pseudo", "soft", "marginal", "outside"]


@checked(frozen=True)
class Config(SiteSampling):
    """Settings of a run of distillation with instance weights.

    With differential privacy, a round consists of E_loc epochs of noisy sums of
    gradients. θ_t is then the model that the sites received at the start of the round.
    A unit's annotation is completed when the unit is drawn, from its own text alone.

    Attributes:
        model: The model that every site trains; only its trainable parameters travel.
        unannotated: Treatment of tokens that the site has not annotated. "pseudo": they
            get the types that θ_t predicts and that the site does not annotate (the
            paper's distillation). "soft": θ_t's posterior, given the site's annotation
            (models with a CRF). "marginal": the likelihood is summed over all types
            that the site does not annotate (models with a CRF; no distillation).
            "outside": they are not entities (the paper's ablation without
            distillation).
        warmup: Number of rounds before predictions of θ_t are used. Until then, tokens
            without an annotation are treated as with "marginal", or as with "outside"
            if the model has no CRF.
        weighting: Whether sentences have instance weights in the source loss. This
            needs unannotated = "pseudo" and at least three sites.
        momentum: α, the momentum of the instance weights.
        clip_weights: Whether negative instance weights are set to 0.
        normalise_weights: Whether the instance weights are divided by their mean, so
            that their mean is 1. It needs clip_weights, because the mean of weights of
            both signs may be zero or negative.
        target_gradient: Whether a site's target gradient is the "mean" over its
            sentences (Eq. 7) or their "sum" (Algorithm 2).
        aggregation: m_k, the sites' weights in the mean: "uniform", or in proportion to
            their "size".
        rounds: Number of rounds.
        local_epochs: E_loc, the number of epochs at each site in a round. A fractional
            part stands for that part of an epoch's mini-batches. More epochs need fewer
            rounds, but let the sites' models drift apart.
        batch_size: Number of sentences in a mini-batch of a site.
        learning_rate: Learning rate of Adam; its moments start at zero in each round.
        precision: Precision of the matrix products in training; "auto" is "bfloat16"
            where the processor has instructions for it, else "float32". With
            differential privacy only "float32" is possible.
        evaluate_every: Number of rounds between two evaluations and checkpoints.
        trace: Whether every evaluation also scores the test data, to plot F1 against
            bytes or seconds. These scores are not used to choose a model.
        select: Model to keep: that of the "last" round, or that of the "best"
            evaluation, by F1 on the validation data as annotated by the sites.
        seed: The job's seed. A job fills it in.
        tags: The complete tag set, the union over the sites. A job fills it in.
        privacy, sites, min_sites: As in the job's tables. A job fills them in.
    """

    model: FilledIn[ModelConfig] = field(default_factory=TaggerConfig)
    unannotated: Unannotated = "pseudo"
    warmup: NonNegativeInt = 0
    weighting: bool = True
    momentum: FractionBelowOne = 0.9
    clip_weights: bool = False
    normalise_weights: bool = False
    target_gradient: Literal["mean", "sum"] = "mean"
    aggregation: Literal["uniform", "size"] = "uniform"
    rounds: PositiveInt = 25
    local_epochs: Epochs = 1
    batch_size: PositiveInt = 8
    learning_rate: PositiveFloat = 3e-5
    precision: Precision = "float32"
    evaluate_every: PositiveInt = 1
    trace: bool = False
    select: Literal["last", "best"] = "last"
    seed: FilledIn[int] = 0
    tags: FilledIn[TagSet] = field(default_factory=lambda: TagSet(()))
    privacy: FilledIn[Privacy | None] = None
    sites: FilledIn[int] = 0
    min_sites: FilledIn[int] = 0

    def __post_init__(self) -> None:
        """Check the settings against each other.

        Raises:
            ConfigError: No run can have these settings.
        """
        if self.privacy and not self.model.trains_on_posteriors:
            raise ConfigError(
                "[privacy] needs a model that tags words, and [model] kind = "
                f'{self.model.kind!r} does not: set kind = "tagger", "encoder-tagger" '
                'or "token-classifier"'
            )
        if self.privacy:
            require_float32(self.precision)
        if (
            self.unannotated in ("soft", "marginal")
            and not self.model.trains_on_posteriors
        ):
            raise ConfigError(
                f'unannotated = "{self.unannotated}" needs a model with a CRF: '
                'with the pointer model, use "pseudo" or "outside"'
            )
        if self.warmup >= self.rounds and self.unannotated in ("pseudo", "soft"):
            raise ConfigError(
                f"warmup = {self.warmup}: with rounds = {self.rounds} nothing would be "
                "distilled: lower warmup, or raise rounds"
            )
        if self.weighting and self.unannotated != "pseudo":
            why = (
                "learns from the model that it starts from, so its target gradient is "
                "zero"
                if self.unannotated == "soft"
                else "has no target loss to weight for"
            )
            raise ConfigError(
                f'unannotated = "{self.unannotated}" {why}: set weighting = false, '
                'or unannotated = "pseudo"'
            )
        if self.normalise_weights and not self.clip_weights:
            raise ConfigError(
                "normalise_weights = true divides the weights by their mean, which "
                "negative weights can bring to zero or below, so that every sign would "
                "change: set clip_weights = true, or normalise_weights = false"
            )


def train(
    federation: Federation, config: Config, shared: Tensors | None = None
) -> State:
    """Run Algorithm 1 of Wang et al. 2023.

    Args:
        federation: The sites.
        config: The settings of the run.
        shared: θ_1, if it is not the model's own initial values.

    Returns:
        The server's final state.

    Raises:
        RefusedError: Instance weights are on, and there are fewer than three sites.
    """
    server = Server(config, federation.resume(), shared)
    for round in federation.rounds(server.round, config.rounds):
        number = round.number
        # [tagsets alg 1] θ_t, with which sites complete their annotation (Eq. 4 and 5)
        target = federation.sum("begin", server.shared, round=number)
        if config.weighting:
            _update_weights(federation, target, number)  # w_{t+1}: Eq. 10 to 12
        total = federation.sum(TRAIN, round=number)  # [tagsets alg 1]
        server.step(total)  # [tagsets alg 1]

        is_due = (round.number + 1) % config.evaluate_every == 0
        is_evaluated = is_due or number == config.rounds - 1
        if is_evaluated:
            server.judge(federation.sum(EVALUATE, server.shared, round=number))
            if config.trace:
                traced = summarise_mentions(federation.sum("trace").metrics)
                server.metrics["test_f1"] = traced["valid_f1"]
        round.commit(server.state(), server.metrics, evaluated=is_evaluated)
    federation.sum("finish", server.best.tensors or server.shared)
    return server.state()


def _update_weights(federation: Federation, target: Total, round: int) -> None:
    """Send every site the sum of the target gradients.

    Each site subtracts its own gradient. With two contributors, each would be left with
    the other's gradient, so three are required. Sites whose gradient is zero do not
    count: they annotate all types, or their model predicts nothing yet. In a round with
    fewer contributors the weights do not change.
    """
    sites = len(target.included)
    if sites < FEWEST_CONTRIBUTORS and round == 0:
        raise RefusedError(_explain_too_few(sites))
    contributing = int(target.metric("contributing"))
    if min(contributing, sites) >= FEWEST_CONTRIBUTORS:
        federation.sum(
            "update_weights",
            target.tensors,
            round=round,
            included=",".join(target.included),
            contributing=contributing,
        )


def _explain_too_few(sites: int) -> str:
    """Return why instance weights are refused with this number of sites."""
    return (
        f"instance weights need {FEWEST_CONTRIBUTORS} sites, but there are {sites}: "
        "with two, each would receive the other's gradient; set training.weighting = "
        "false"
    )


class Server(RoundServer):
    """The server: θ_t, and the choice of the kept model.

    Args:
        config: The settings of the run.
        resumed: The state to resume from; None at the first start.
        shared: θ_1, if it is not the model's own initial values.
    """

    def __init__(
        self, config: Config, resumed: State | None, shared: Tensors | None
    ) -> None:
        first = dict(shared) if shared is not None else make_initial_parameters(config)
        # If no model can be scored, the last one is kept.
        best = Best(keeps_tensors=config.select == "best", later="always")
        super().__init__(config, first, best, resumed)

    def step(self, total: Total) -> None:
        """Set θ_{t+1} = Σ m_k θ_t^k."""
        total.require(list_shapes(self.shared))
        self.shared = total.mean()  # [tagsets eq 1]
        sentences = max(1.0, total.metric("examples"))
        self.metrics = {
            name: total.metric(name) / sentences
            for name in ("loss", "source", "target")
        }
        self.metrics["pseudo"] = total.metric("pseudo")
        self.round += 1


def make_initial_parameters(config: Config) -> dict[str, Any]:
    """Return θ_1, the model's initial values, derived from the seed."""
    model = build_model(config.model, config.tags, config.seed)
    return copy_tensors(model.trainable())


class Site(MentionSite):
    """One platform: its notes, its instance weights, and its tasks.

    It also writes the history of the weights to `weights.jsonl`, which stays at the
    site.

    Args:
        data: The site's documents.
        config: The settings of the run.
        **options: As for `MentionSite`.

    Attributes:
        known: T_k, the types that the site annotates.
        parameters: θ_t^k, all parameters that are trained and sent.
        weights: w_{i,t}, of shape (sentences,).
        history: The distribution of the weights, one entry per round.
        rounds: Number of completed rounds.
        pseudo: Number of predicted mentions of other types in the current annotation.
        teacher: θ_t, in training with differential privacy.

    Raises:
        ConfigError: The site annotates a type outside the complete tag set, or has no
            training sentence.
    """

    tasks: ClassVar[frozenset[str]] = frozenset(
        {"begin", "update_weights", TRAIN, EVALUATE, "trace", "finish"}
    )
    for_all_sites = frozenset({EVALUATE, "trace"})
    builds_on: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {"update_weights": ("begin",), TRAIN: ("begin",), "trace": (EVALUATE,)}
    )
    rounds_counts = True
    config: Config

    def __init__(self, data: SiteData, config: Config, **options: Any) -> None:
        self.known = frozenset(data.tags.types)
        unknown = sorted(self.known - set(config.tags.types))
        if unknown:
            raise ConfigError(
                f"site {data.id!r} annotates {unknown[0]!r}, but the job's complete "
                f"tag set is {', '.join(config.tags.types) or 'empty'}: map it to one "
                "of these in label_map, or leave it out with types"
            )
        super().__init__(data, config, config.tags, **options)
        self.shared = self.model.trainable()
        self.private = {}
        self.parameters: dict[str, Tensor] = dict(self.shared)
        self.weights = np.ones(self.num_examples)
        self.history: list[dict[str, Any]] = []
        self.rounds = 0
        self.pseudo = 0
        self.teacher: Tensors = {}

        # State of the current round.
        self._begun: tuple[int, PreparedCorpus] | None = None  # t, completed corpus
        self._next: tuple[int, np.ndarray] | None = None  # t and w_{i,t+1}
        self._directions: Tensor | None = None  # g_i^src / |g_i^src|, (sentences, size)
        self._sent: Update | None = None  # the target gradient
        # The corpus with only the site's own annotation.
        self._unfilled: PreparedCorpus | None = None

    @property
    def eta(self) -> float:
        """η, the fraction of the model that is trained and sent."""
        sent = self._count_sent()
        return sent / (sent + self.model.count_frozen())

    def _count_sent(self) -> int:
        """Return the number of parameters that are trained and sent."""
        return sum(value.numel() for value in self.parameters.values())

    def describe_parameters(self) -> str:
        """Describe what is trained and sent."""
        return (
            f"{self._count_sent():,} parameters are trained and sent each way per "
            f"round (η = {100 * self.eta:.2f} % of the model)"
        )

    def count_covered(self, task: str) -> dict[str, int]:
        """Return the steps, tokens and sentences behind an update of this task."""
        if task == "begin":
            sentences = self.num_examples
            if self.draws.is_secret:
                sentences = halve(sentences)
            return {"steps": 1, "batch": sentences}
        if task == TRAIN:
            batch = self.config.batch_size
            steps = self._count_steps()
            batches_left_out = max(0, math.ceil(self.num_examples / batch) - steps)
            sentences = self.num_examples - batches_left_out * batch
            # A lower bound: the tokens of the shortest sentences.
            tokens = int(np.sort(self.train_set.lengths)[:sentences].sum())
            left_over = self.num_examples % batch if steps == 1 else 0
            smallest = left_over or min(batch, self.num_examples)
            return {"steps": steps, "tokens": tokens, "batch": smallest}
        return {}

    def _count_steps(self) -> int:
        """Return the number of mini-batches in a round, at least one."""
        batches_in_epoch = math.ceil(self.num_examples / self.config.batch_size)
        return max(1, round(self.config.local_epochs * batches_in_epoch))

    # The start of a round: completing the annotation (Eq. 4 and 5).

    def begin(self, tensors: Tensors, *, round: int) -> Update:
        r"""Load θ_t and complete the annotation with it.

        Returns:
            ∂L^{T\k}/∂q as "target_gradient" if sentences have weights.
        """
        load_into(self.parameters, tensors)
        self._apply_next_weights(round)
        corpus = self._make_training_corpus(round)
        self._begun = (round, corpus)
        self._directions = None
        self._sent = None
        if not self.config.weighting:
            return Update()

        gradient = self._compute_gradients(corpus, round)
        contributing = float(gradient.abs().max() > 0)
        self._sent = Update(
            {"target_gradient": gradient}, metrics={"contributing": contributing}
        )
        return self._sent

    def _make_training_corpus(self, round: int) -> PreparedCorpus:
        """Return the training set, with unannotated types treated as in this round."""
        treatment = self._choose_treatment(round)
        if treatment == "outside":
            return self.train_set
        if treatment == "pseudo":
            return self._complete_by_prediction()

        corpus = self.model.annotate(self.train_set, self.data.train, self.known)
        if treatment == "soft":
            return self.model.soften(corpus)
        return corpus

    def _complete_by_prediction(self) -> PreparedCorpus:
        """Return the training set with pseudo-complete annotation by the current model.

        `pseudo` is set to the number of mentions that the model adds.
        """
        predicted = self.model.predict(self.train_set)  # Eq. 4
        overlaps = self.config.tags.overlaps
        documents = tuple(
            pseudo_complete(gold, guess, self.known, overlaps=overlaps)
            for gold, guess in zip(self.data.train, predicted, strict=True)
        )
        self.pseudo = _count_spans(documents) - _count_spans(self.data.train)
        return self.model.annotate(self.train_set, documents, self.known)

    def _choose_treatment(self, round: int) -> Unannotated:
        """Choose how a round treats the types that the site does not annotate."""
        if self.known >= set(self.config.tags.types):
            return "outside"  # the site annotates all types
        is_warming_up = round < self.config.warmup
        if is_warming_up and self.config.unannotated in ("pseudo", "soft"):
            return "marginal" if self.config.model.trains_on_posteriors else "outside"
        return self.config.unannotated

    # Instance weights (Eq. 10 to 12).

    def _compute_gradients(self, corpus: PreparedCorpus, round: int) -> Tensor:
        """Store the direction of every g_i^src; return the target loss's gradient.

        Both are gradients with respect to q alone, and the model is not updated. During
        warm-up there is no target loss, so the gradient is zero and no direction is
        stored.
        """
        size = self.model.trainable()[self.model.transfer].numel()
        if round < self.config.warmup:
            return torch.zeros(size)

        total = torch.zeros(size, dtype=torch.float64)
        self._directions = torch.zeros(self.num_examples, size)
        by_length = np.argsort(corpus.lengths, kind="stable")
        is_counted = self._draw_counted_sentences(round)
        # A batch has either only counted sentences or none.
        for is_added in (True, False):
            sentences = by_length[is_counted[by_length] == is_added]
            for indices in _cut_into_batches(sentences, self.config.batch_size):
                # [tagsets eq 11] g_i^src (batch, size), and the sum of the target
                # losses' gradients (size,)
                source, target = self.model.gradients(corpus, indices)
                if is_added:
                    total += target.double().cpu()  # [tagsets alg 2]
                direction = torch.nn.functional.normalize(source).float().cpu()
                self._directions[torch.from_numpy(indices)] = (
                    direction  # [tagsets alg 2]
                )

        counted = int(is_counted.sum())
        if self.config.target_gradient == "mean":
            total = total / counted  # [tagsets eq 7]
        elif counted < self.num_examples:
            total = total * (self.num_examples / counted)
        return total.float()

    def _draw_counted_sentences(self, round: int) -> np.ndarray:
        """Choose the sentences that count in the target gradient, (sentences,) bool.

        If draws are derived from the job's seed, all sentences count, as in the paper.
        If draws are secret, a random half counts. A gradient over all notes has no
        randomness, so the difference between the sums of two jobs would be the gradient
        of a site that is in only one of them.
        """
        if not self.draws.is_secret:
            return np.ones(self.num_examples, bool)

        rng = self.draws.rng_of("target", self.id, round)
        order = rng.permutation(self.num_examples)
        is_counted = np.zeros(self.num_examples, bool)
        is_counted[order[: halve(self.num_examples)]] = True
        return is_counted

    def update_weights(
        self, tensors: Tensors, *, round: int, included: str, contributing: int
    ) -> Update:
        """Set w_{t+1} = α w_t + (1 − α) cos(g_i^src, g^tgt).

        g^tgt is the sum over the other sites. This round still trains with w_t
        (Algorithm 1 and Eq. 10).

        Args:
            tensors: The sum of the target gradients.
            round: The round's number.
            included: Names of the sites in the sum, joined by commas.
            contributing: Number of these sites that sent a nonzero gradient.

        Raises:
            RefusedError: Fewer than three sites contributed, so the remainder could be
                a single site's gradient.
            TrainingError: The site was restarted during the round.
        """
        names = included.split(",")
        contributors = min(contributing, len(names))
        if contributors < FEWEST_CONTRIBUTORS:
            raise RefusedError(
                f"site {self.id!r} refuses a sum of {contributors} sites' target "
                f"gradients: {FEWEST_CONTRIBUTORS} are needed, or it could receive one "
                "site's own"
            )
        self._find_corpus(round)
        if self._sent is None or self._directions is None:
            raise TrainingError(
                f"site {self.id!r} sent no target gradient in this round"
            )
        own_part = compute_contribution(self._sent)
        require_like(own_part, tensors)
        others = tensors["target_gradient"]
        if self.id in names:
            others = others - own_part["target_gradient"]  # [tagsets eq 11]
        if float(others.norm()) > 0:
            self._move_weights(round, others)
        return Update()

    def _move_weights(self, round: int, others: Tensor) -> None:
        """Move the weights towards the cosines with the others' gradient, (size,)."""
        assert self._directions is not None
        # [tagsets eq 12]
        direction = torch.nn.functional.normalize(others, dim=0)
        cosines = (self._directions.double() @ direction).numpy()
        # A zero gradient has no direction, so the sentence keeps its weight.
        has_gradient = (self._directions.abs().sum(1) > 0).numpy()
        alpha = self.config.momentum
        moved = alpha * self.weights + (1 - alpha) * cosines  # [tagsets eq 12]
        weights = np.where(has_gradient, moved, self.weights)
        self._next = (round, weights)
        self._record_weights(round, weights, cosines[has_gradient])

    def _apply_next_weights(self, round: int) -> None:
        """Replace the weights by those that an earlier round computed, if any."""
        if self._next is not None and self._next[0] < round:
            self.weights = self._next[1]
        self._next = None

    def _compute_effective_weights(self) -> np.ndarray:
        """Return the weights of the source loss, (sentences,)."""
        weights = self.weights
        if self.config.clip_weights:
            weights = np.maximum(weights, 0)
        if not self.config.normalise_weights:
            return weights

        mean = weights.mean()  # at least 0, because the weights were clipped
        return weights / mean if mean > 0 else weights

    def _record_weights(
        self, round: int, weights: np.ndarray, cosines: np.ndarray
    ) -> None:
        """Add the distribution of the next weights to the site's local history."""
        self.history.append(
            {
                "round": round,
                "mean_weight": _round_value(weights.mean()),
                "weight_quantiles": [
                    _round_value(x) for x in np.quantile(weights, QUANTILES)
                ],
                "cosine_quantiles": [
                    _round_value(x) for x in np.quantile(cosines, QUANTILES)
                ],
                "negative_cosines": _round_value((cosines < 0).mean()),
            }
        )
        if self.directory is not None:
            lines = "".join(json.dumps(entry) + "\n" for entry in self.history)
            write_text(self.directory / "weights.jsonl", lines)

    # Local training.

    def train(self, tensors: Tensors, *, round: int) -> Update:
        """Train for E_loc epochs from θ_t on the completed annotation.

        Returns:
            θ_t^k with weight 1, or with the number of sentences if aggregation is
            "size".
        """
        del tensors  # θ_t came with "begin"
        corpus = self._find_corpus(round)
        treatment = self._choose_treatment(round)
        adam = Adam(self.parameters, self.config.learning_rate)
        weights = self._compute_effective_weights()
        losses = np.zeros(3)  # total, source, target; sums over sentences
        trained = 0
        for step, indices in enumerate(self._iterate_batches(corpus, round)):
            seed = self.draws.seed_of("dropout", self.id, round, step)
            seed_torch(seed, self.model.device)
            self.model.train()
            with setting_precision(self.config.precision, self.model.device):
                loss, source, target = self._compute_objective(
                    corpus, indices, weights, treatment, round
                )
            value = require_finite_loss(loss, self.id, f"in round {round}")
            loss.backward()
            adam.step()
            losses += np.array([value, source, target]) * len(indices)
            trained += len(indices)

        self._begun = None
        self._apply_next_weights(round + 1)
        self.rounds = round + 1
        mean_losses = losses / (trained / self.num_examples)
        return self._report_training(mean_losses.tolist())

    def _report_training(self, losses: list[float]) -> Update:
        """Return θ_t^k with its weight, and the losses summed over all sentences."""
        size = self.reported_examples
        weight = size if self.config.aggregation == "size" else 1  # [tagsets eq 1]
        metrics = {
            name: scale_sum(value, self.num_examples, self.count_step)
            for name, value in zip(("loss", "source", "target"), losses, strict=True)
        }
        metrics["examples"] = size
        metrics["pseudo"] = round_count(self.pseudo, self.count_step)
        parameters = copy_tensors(self.parameters)
        sent = {name: value.cpu() for name, value in parameters.items()}
        return Update(sent, weight, metrics)  # [tagsets eq 1]

    def _compute_objective(
        self,
        corpus: PreparedCorpus,
        indices: np.ndarray,
        weights: np.ndarray,
        treatment: Unannotated,
        round: int,
    ) -> tuple[Tensor, float, float]:
        """Return the mini-batch's loss, and its source and target parts as numbers."""
        del round
        losses = self.model.losses(corpus, indices)
        return compute_weighted_loss(losses, weights[indices], treatment)

    def _iterate_batches(
        self, corpus: PreparedCorpus, round: int
    ) -> Iterator[np.ndarray]:
        """Yield the mini-batches of a round, (batch,) sentences each."""
        left = self._count_steps()
        for epoch in range(math.ceil(self.config.local_epochs)):
            rng = self.draws.rng_of("order", self.id, round, epoch)
            batches = draw_epoch_batches(corpus.lengths, self.config.batch_size, rng)[
                :left
            ]
            yield from batches
            left -= len(batches)

    def _find_corpus(self, round: int) -> PreparedCorpus:
        """Return the corpus with which this round began.

        Raises:
            TrainingError: The site has not begun this round.
        """
        if self._begun is None or self._begun[0] != round:
            raise TrainingError(
                f"site {self.id!r} has not begun round {round}: it was restarted in "
                "between"
            )
        return self._begun[1]

    # Training with differential privacy.

    def complete_sentences(
        self, indices: np.ndarray
    ) -> tuple[PreparedCorpus, Unannotated]:
        """Complete some sentences with `teacher`, using only these sentences.

        Args:
            indices: The sentences, (n,).

        Returns:
            The training set with these sentences completed, and the treatment of the
            types that the site does not annotate.
        """
        treatment = self._choose_treatment(self.rounds)
        if treatment == "outside":
            return self.train_set, treatment
        if self._unfilled is None:
            self._unfilled = self.model.annotate(
                self.train_set, self.data.train, self.known
            )
        if treatment == "marginal":
            return self._unfilled, treatment

        present = copy_tensors(self.shared)
        load_into(self.shared, self.teacher)
        try:
            if treatment == "soft":
                return self.model.soften(self._unfilled, indices), treatment
            guessed = self.model.predict_tags(self._unfilled, indices)
        finally:
            load_into(self.shared, present)
        return self._fill_in(self._unfilled, indices, guessed), treatment

    def _fill_in(
        self, corpus: PreparedCorpus, indices: np.ndarray, guessed: np.ndarray
    ) -> PreparedCorpus:
        """Return the corpus with the guessed mentions of other types in some sentences.

        Args:
            corpus: The corpus with the site's own annotation.
            indices: The sentences, (n,).
            guessed: The tag of every token of the corpus, (tokens,).
        """
        encoded = corpus.encoded
        tags = encoded.tags.copy()
        for sentence in indices.tolist():
            part = slice(encoded.bounds[sentence], encoded.bounds[sentence + 1])
            offsets = encoded.offsets[part]
            document = encoded.documents[encoded.sentence_document[sentence]]
            gold_spans = decode_tags(encoded.tags[part], offsets, encoded.tagset)
            guessed_spans = decode_tags(guessed[part], offsets, encoded.tagset)
            completed = pseudo_complete(
                replace(document, spans=tuple(gold_spans)),
                replace(document, spans=tuple(guessed_spans)),
                self.known,
            )
            tags[part], _ = encode_tags(completed.spans, offsets, encoded.tagset)
        return replace(corpus, encoded=replace(encoded, tags=tags))

    # Evaluation and the final model.

    def evaluate(self, tensors: Tensors, *, round: int) -> Update:
        """Return counts on validation data, for the types that the site annotates."""
        del round
        load_into(self.parameters, tensors)
        return self.report_counts(self.count_mentions("valid"))

    def trace(self, tensors: Tensors) -> Update:
        """Return the last evaluated model's counts on the test data.

        They do not influence the run.

        Raises:
            RefusedError: The job does not trace.
        """
        del tensors
        if not self.config.trace:
            raise RefusedError(
                f"site {self.id!r}: the server asked for scores on test data, but the "
                "job does not set trace = true"
            )
        return self.report_counts(self.count_mentions("test"))

    def finish(self, tensors: Tensors) -> Update:
        """Load the global model, test it and save it."""
        load_into(self.parameters, tensors)
        return self.test_and_save()

    # State that must survive a restart.

    def state(self) -> State:
        """Return the instance weights and their history; the server has the rest."""
        weights = self.weights if self._next is None else self._next[1]
        tensors = {"weights": torch.from_numpy(weights.copy())}
        return State(self.rounds, tensors, {"history": self.history})

    def restore(self, state: State) -> None:
        """Restore a saved state."""
        self.weights = state.tensors["weights"].numpy().copy()
        self._next = None
        self.history = list(state.facts["history"])
        self.rounds = state.round


def halve(number: int) -> int:
    """Return half of a number, rounded up."""
    return -(-number // 2)


def _cut_into_batches(sentences: np.ndarray, size: int) -> list[np.ndarray]:
    """Split sentences into batches of `size`; the last one may be smaller."""
    batches = np.split(sentences, range(size, len(sentences), size))
    return [batch for batch in batches if len(batch)]


def _count_spans(documents: Iterable[Document]) -> int:
    """Return the number of mentions in some documents."""
    return sum(len(document.spans) for document in documents)


def pseudo_complete(
    gold: Document,
    predicted: Document,
    known: Collection[str],
    *,
    overlaps: bool = False,
) -> Document:
    """Return a document with pseudo-complete annotation (Eq. 5).

    It has its gold mentions and the predicted mentions of other types. A prediction
    that overlaps a gold mention is dropped, unless mentions may overlap.

    Args:
        gold: The document with the mentions of the known types.
        predicted: The same document with a model's mentions.
        known: The types that the site annotates.
        overlaps: Whether mentions of different types may overlap.
    """
    gold_bounds = (
        [] if overlaps else sorted((span.start, span.end) for span in gold.spans)
    )
    # [tagsets eq 5]
    added = [
        span
        for span in predicted.spans
        if span.label not in known
        and not any(start < span.end and span.start < end for start, end in gold_bounds)
    ]
    spans: tuple[Span, ...] = tuple(sorted((*gold.spans, *added)))  # [tagsets eq 5]
    return replace(gold, spans=spans)


def compute_weighted_loss(
    losses: Losses, weights: np.ndarray, treatment: Unannotated
) -> tuple[Tensor, float, float]:
    r"""Return the loss of a mini-batch with pseudo-complete annotation.

    It is 1/N Σ w_i L_i^{T_k} + 1/N Σ L_i^{T\k}.

    Args:
        losses: The source and the target loss of each sentence, (batch,).
        weights: w_i, (batch,).
        treatment: Treatment of unannotated types. "marginal" has no second sum, because
            it has no targets for them.

    Returns:
        The loss, (), and its source and target parts as numbers.
    """
    w = torch.as_tensor(weights, dtype=losses.source.dtype, device=losses.source.device)
    source = (w * losses.source).mean()  # [tagsets eq 10]
    target = losses.target.mean()  # [tagsets eq 7]
    if treatment == "marginal":
        total = source
    else:
        total = source + target  # [tagsets eq 6] [tagsets eq 7]
    return total, float(source.detach()), float(target.detach())


def _round_value(value: float) -> float:
    """Round a number for the history of the weights."""
    return round(float(value), 5)


# The interface to jobs.


class DistillWithDP(DPSupport):
    """Distillation with differential privacy.

    A round of the method is E_loc epochs of noisy sums of gradients. θ_t is the first
    model that sites receive in the round. A unit's annotation is completed when the
    unit is drawn, using only the unit's text.
    """

    required_settings = MappingProxyType(
        {"weighting": False, "aggregation": "size", "select": "last", "trace": False}
    )

    def make_initial_parameters(
        self, config: Config, agreed: Tensors
    ) -> dict[str, Tensor]:
        """Return θ_1."""
        del agreed
        return make_initial_parameters(config)

    def loss(self, site: Site, indices: np.ndarray) -> Tensor:
        """Return the mean loss over some sentences, completed using only these."""
        corpus, treatment = site.complete_sentences(indices)
        losses = site.model.losses(corpus, indices)
        loss, _, _ = compute_weighted_loss(losses, np.ones(len(indices)), treatment)
        return loss

    def count_rounds(self, config: Config, sums_per_epoch: int) -> int:
        """Return the number of noisy sums, at `sums_per_epoch` per epoch."""
        return config.rounds * _count_sums_in_round(config, sums_per_epoch)

    def prepare_round(self, site: Site, round: int, memory: Tensors) -> Tensors:
        """Store θ_t, the model received first in this round of the method."""
        privacy = site.config.privacy
        assert privacy is not None
        site.rounds = round // _count_sums_in_round(site.config, privacy.epoch)
        if int(memory.get("round", torch.tensor(-1))) != site.rounds:
            memory = {**copy_tensors(site.shared), "round": torch.tensor(site.rounds)}
        site.teacher = {
            name: value for name, value in memory.items() if name != "round"
        }
        return memory


def _count_sums_in_round(config: Config, epoch: int) -> int:
    """Return the noisy sums in a round of the method, at `epoch` per epoch."""
    return math.ceil(config.local_epochs * epoch)


class Distill(Method):
    """Wang et al. 2023, for a job."""

    config_class: type[Any] = Config
    site_class: type[Any] = Site
    presets = read_presets("distill")
    dp: DPSupport | None = DistillWithDP()
    length_key = "rounds"
    keep_best = MappingProxyType({"select": "best"})

    def train(self, federation: Federation, config: Any) -> State:
        """Run Algorithm 1."""
        return train(federation, config)

    def read_model_config(self, table: Mapping[str, Any]) -> ModelConfig:
        """Return the settings of a model of any kind."""
        return read_model_config(table, where="")

    def summarise(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the micro F1 over all sites' validation mentions."""
        return summarise_mentions(metrics)

    def configure(self, config: Any, sites: Sequence[SiteData]) -> Any:
        """Return the settings with the number of sites and the complete tag set.

        Raises:
            RefusedError: The job has instance weights and fewer than three sites in a
                round.
            ConfigError: Differential privacy cannot be combined with "pseudo" where
                mentions may overlap, or sites differ in whether they may.
        """
        num_sites = config.sites_per_round or len(sites)
        if config.weighting and num_sites < FEWEST_CONTRIBUTORS:
            raise RefusedError(_explain_too_few(num_sites))
        tags = unite_tags(sites)
        if tags.overlaps and config.privacy and config.unannotated == "pseudo":
            raise ConfigError(
                'unannotated = "pseudo" with [privacy] needs mentions that do not '
                'overlap: set unannotated = "soft", or flatten = "outermost" at each '
                "site"
            )
        return replace(config, tags=tags, sites=len(sites))

    def configure_alone(
        self, config: Any, sites: Sequence[SiteData]
    ) -> tuple[Any, ...]:
        """Return each site's settings, with its own types and without distillation."""
        plain = replace(config, weighting=False, unannotated="outside")
        return tuple(
            replace(
                plain, tags=site.tags, model=config.model.for_types(site.tags.types)
            )
            for site in sites
        )

    def configure_pooled(
        self,
        config: Any,
        sites: Sequence[SiteData],
        complete: Sequence[SiteData] | None,
    ) -> tuple[tuple[SiteData, ...], Any]:
        """Return the pooled data and the settings of training on all types.

        The model is an upper bound, because every type is annotated in all sentences.

        Raises:
            ConfigError: The sites' types differ and no complete annotation is known.
        """
        source = complete or sites
        if len({frozenset(site.tags.types) for site in source}) > 1:
            raise ConfigError(
                'conditions has "pooled", which needs the complete annotation of every '
                'site: leave it out: conditions = ["alone", "federated"]'
            )
        together = pool_documents(source)
        pooled = replace(
            config, tags=together.tags, weighting=False, unannotated="outside"
        )
        return (together,), pooled

    def plan_rounds(self, config: Config, sizes: Sequence[int]) -> tuple[int, int]:
        """Return the number of rounds and the sentences per round."""
        return config.rounds, math.ceil(sum(sizes) * config.local_epochs)

    def count_steps(self, config: Config, sizes: Sequence[int]) -> int:
        """Return a site's number of steps in all rounds, averaged over the sites."""
        rounds, examples = self.plan_rounds(config, sizes)
        return math.ceil(rounds * examples / (config.batch_size * max(1, len(sizes))))

    def estimate_traffic(self, config: Any, sizes: Sequence[int]) -> tuple[int, int]:
        """Return the bytes that a site sends and receives.

        Instance weights add little and are not counted.
        """
        del sizes
        return estimate_traffic(config, nbytes(make_initial_parameters(config)))

    def list_warnings(self, config: Config) -> tuple[str, ...]:
        """Warn if the learning rate is so high that a token classifier diverges."""
        is_classifier = isinstance(config.model, TokenClassifierConfig)
        if not is_classifier or config.learning_rate <= LARGEST_LEARNING_RATE:
            return list_earlier_classifier_warnings(config)
        return (
            f"learning_rate = {config.learning_rate:g}: a token classifier diverges "
            f"above {LARGEST_LEARNING_RATE:g}; only a light tagger trains so fast",
            *list_earlier_classifier_warnings(config),
        )

    def save_model(self, config: Config, final: State, folder: Path) -> bool:
        """Write the global model, ready for `fednotes predict`."""
        return save_global_model(config.model, config.tags, config.seed, final, folder)


def estimate_traffic(config: Config, size: int) -> tuple[int, int]:
    """Return the bytes that a site sends and receives for a model of `size` bytes.

    The model is sent once per round. It is received once per round, once per evaluation
    and once at the end.
    """
    evaluations = math.ceil(config.rounds / config.evaluate_every)
    return config.rounds * size, (config.rounds + evaluations + 1) * size


METHOD = Distill()
