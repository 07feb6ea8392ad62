"""One global model for sites whose notes are annotated with different entity types.

Rui Wang, Tong Yu, Junda Wu, Handong Zhao, Sungchul Kim, Ruiyi Zhang, Subrata Mitra,
Ricardo Henao (2023), "Federated Domain Adaptation for Named Entity Recognition via
Distilling with Heterogeneous Tag Sets".

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

import json
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from fednotes.core.counts import round_count, scale_sum
from fednotes.core.errors import ConfigError, RefusedError, TrainingError
from fednotes.core.federation import EVALUATE, TRAIN, Federation, Method, State
from fednotes.core.settings import checked
from fednotes.core.store import write_text
from fednotes.core.tensors import (
    load_into,
    nbytes,
    require_like,
    seed_torch,
    shapes_of,
    snapshot,
)
from fednotes.core.types import Document, SiteData, Span, TagSet
from fednotes.core.update import Tensors, Total, Update, contribution
from fednotes.data.batches import buckets
from fednotes.data.split import pool
from fednotes.data.tags import decode, encode
from fednotes.methods import presets
from fednotes.privacy.promise import Privacy
from fednotes.privacy.training import Privately
from fednotes.taggers.corpora import PreparedCorpus
from fednotes.taggers.model import Losses, ModelConfig
from fednotes.taggers.saving import build_model, model_config
from fednotes.taggers.tagger import TaggerConfig
from fednotes.taggers.token_classifier import TokenClassifierConfig
from fednotes.training.sites import (
    Adam,
    Best,
    Count,
    MentionSite,
    Number,
    Part,
    Rate,
    RoundServer,
    all_tags,
    begun_from,
    finite,
    judged_mentions,
    save_global,
)

FEWEST_CONTRIBUTORS = 3
FASTEST = 1e-3  # learning rate of a token classifier
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
Unannotated = Literal["pseudo", "soft", "marginal", "outside"]


@checked(frozen=True)
class Config:
    """Settings of a run of distillation with instance weights.

    With differential privacy a round is E_loc epochs of noisy sums of gradients. θ_t is
    then what sites received first in the round, and a unit's annotation is completed
    when the unit is drawn, from its own text alone.

    Attributes:
        model: The model that every site trains; only its trainable parameters travel.
        unannotated: What a token may be that the site's own annotation leaves open.
            "pseudo": what θ_t predicts of the other types (the paper's distillation);
            "soft": θ_t's posterior given the site's annotation (models with a CRF);
            "marginal": anything, summed over (models with a CRF; no distillation);
            "outside": no entity (the paper's ablation without distillation).
        warmup: Number of rounds before θ_t is asked; until then "marginal" is used, or
            "outside" where the model has no CRF.
        weighting: Whether the source loss has instance weights; this needs unannotated
            = "pseudo" and three or more sites.
        momentum: α, the momentum of the instance weights.
        clip_weights: Whether negative instance weights count as 0.
        normalise_weights: Whether the weights are divided by their mean, so that it
            becomes 1. This needs clip_weights, because the mean of weights of both
            signs may be zero or negative.
        target_gradient: "mean" over a site's sentences (Eq. 7), or "sum" (Algorithm 2).
        aggregation: m_k: "uniform", or in proportion to the sites' "size".
        rounds: Number of rounds.
        local_epochs: E_loc, the epochs at each site in a round. A fractional part is
            that part of an epoch's mini-batches.
        batch_size: Number of sentences in a mini-batch of a site.
        learning_rate: Learning rate of Adam, which starts anew in each round.
        evaluate_every: Number of rounds between two evaluations and checkpoints.
        trace: Whether the test data are scored too at every evaluation, to draw F1
            against bytes or seconds. Nothing is chosen by these scores.
        select: Which model is kept: that of the "last" round, or that of the "best"
            evaluation by F1 on what the sites' validation data annotate.
        seed: The job's seed. A job fills it in.
        tags: The complete tag set, the union over the sites. A job fills it in.
        privacy, sites, min_sites: As in the job's tables. A job fills them in.
    """

    model: ModelConfig = field(default_factory=TaggerConfig)
    unannotated: Unannotated = "pseudo"
    warmup: Number = 0
    weighting: bool = True
    momentum: Part = 0.9
    clip_weights: bool = False
    normalise_weights: bool = False
    target_gradient: Literal["mean", "sum"] = "mean"
    aggregation: Literal["uniform", "size"] = "uniform"
    rounds: Count = 25
    local_epochs: Rate = 1
    batch_size: Count = 8
    learning_rate: Rate = 3e-5
    evaluate_every: Count = 1
    trace: bool = False
    select: Literal["last", "best"] = "last"
    seed: int = 0
    tags: TagSet = field(default_factory=lambda: TagSet(()))
    privacy: Privacy | None = None
    sites: int = 0
    min_sites: int = 0

    def __post_init__(self) -> None:
        if self.privacy and not self.model.softens:
            raise ConfigError(
                f"[privacy] takes models that tag words, not [model] kind = {self.model.kind!r}: "
                'set kind = "tagger", "encoder-tagger" or "token-classifier"'
            )
        if self.unannotated in ("soft", "marginal") and not self.model.softens:
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
        if self.normalise_weights and not self.clip_weights:
            raise ConfigError(
                "normalise_weights = true divides the weights by their mean, which negative "
                "weights can bring to zero or below, so that every sign would change: set "
                "clip_weights = true, or normalise_weights = false"
            )


C = TypeVar("C", bound=Config)  # the adversarial baselines' too


def train(
    federation: Federation, config: Config, shared: Tensors | None = None
) -> State:
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
        total = federation.sum(TRAIN, round=round.number)  # [tagsets alg 1]
        server.step(total)  # [tagsets alg 1]
        evaluated = (round.number + 1) % config.evaluate_every == 0
        if evaluated or round.number == config.rounds - 1:
            server.judge(federation.sum(EVALUATE, server.shared, round=round.number))
            if config.trace:
                found = judged_mentions(federation.sum("trace").metrics)
                server.metrics["test_f1"] = found["valid_f1"]
            evaluated = True
        round.commit(server.state(), server.metrics, evaluated=evaluated)
    federation.sum("finish", server.best.tensors or server.shared)
    return server.state()


def _update_weights(federation: Federation, begun: Total, round: int) -> None:
    """Send every site the sum of the target gradients, from which it takes its own
    part.

    Of two contributors each would be left with the other's vector, so three are needed,
    not counting sites whose gradient is zero (all types annotated, or nothing predicted
    yet). In a round with fewer the weights stay as they are.
    """
    if len(begun.included) < FEWEST_CONTRIBUTORS and round == 0:
        raise RefusedError(_too_few(len(begun.included)))
    contributing = int(begun.metric("contributing"))
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


class Server(RoundServer):
    """θ_t, and which of them is kept."""

    def __init__(
        self, config: Config, resumed: State | None, shared: Tensors | None
    ) -> None:
        first = dict(shared) if shared is not None else initial(config)
        # the last where nothing can be judged
        best = Best(config.select == "best", "always")
        super().__init__(config, first, best, resumed)

    def step(self, total: Total) -> None:
        """θ_{t+1} = Σ m_k θ_t^k."""
        total.require(shapes_of(self.shared))
        self.shared = total.mean()  # [tagsets eq 1]
        sentences = max(1.0, total.metric("examples"))
        self.metrics = {
            name: total.metric(name) / sentences
            for name in ("loss", "source", "target")
        }
        self.metrics["pseudo"] = total.metric("pseudo")
        self.round += 1


def initial(config: Config) -> dict[str, Any]:
    """θ_1: the model's initial values, which follow from the seed."""
    model = build_model(config.model, config.tags, config.seed)
    return snapshot(model.trainable())


class Site(MentionSite):
    """One platform: its notes, its instance weights, and the tasks that the server may
    ask for.

    It also writes the history of the weights. Raises ConfigError as `MentionSite`, and
    for a type outside the complete tag set.
    """

    tasks: ClassVar[frozenset[str]] = frozenset(
        {"begin", "update_weights", TRAIN, EVALUATE, "trace", "finish"}
    )
    rounds_counts = True
    config: Config

    def __init__(self, data: SiteData, config: Config, **options: Any) -> None:
        self.known = frozenset(data.tags.types)  # T_k
        if odd := sorted(self.known - set(config.tags.types)):
            raise ConfigError(
                f"site {data.id!r} annotates {odd[0]!r}, the job's complete tag set is "
                f"{', '.join(config.tags.types) or 'empty'}: map it to one of these in label_map, "
                "or leave it out with types"
            )
        super().__init__(data, config, config.tags, **options)
        self.shared, self.private = self.model.trainable(), {}
        self.parameters: dict[str, Tensor] = dict(self.shared)
        self.weights = np.ones(self.num_examples)  # w_{i,t}
        self._next: tuple[int, np.ndarray] | None = None  # round t and w_{i,t+1}
        self.history: list[dict[str, Any]] = []  # of the weights, a line a round
        self.rounds = 0
        self.pseudo = 0  # mentions of other types in the current annotation
        self._begun: tuple[int, PreparedCorpus] | None = None
        self._open: PreparedCorpus | None = None  # with the site's own annotation alone
        self.teacher: Tensors = {}  # θ_t, of training with differential privacy
        # (sentences, size) g_i^src, directions alone
        self._source: Tensor | None = None
        self._sent: Update | None = None

    @property
    def eta(self) -> float:
        """η: the trained and sent parameters' part of the model, its frozen ones
        counted too."""
        sent = sum(value.numel() for value in self.parameters.values())
        return sent / (sent + self.model.count_frozen())

    def described(self) -> str:
        """What is trained and sent."""
        sent = sum(value.numel() for value in self.parameters.values())
        return (
            f"{sent:,} parameters are trained and sent each way a round "
            f"(η = {100 * self.eta:.2f} % of the model)"
        )

    def covered(self, task: str) -> dict[str, int]:
        """The local steps, tokens and sentences behind an update of this task."""
        if task != TRAIN:
            whole = self.num_examples
            batch = half(whole) if self.draws.is_secret else whole
            return {"steps": 1, "batch": batch} if task == "begin" else {}
        batch, steps = self.config.batch_size, self._steps()
        left_out = max(0, math.ceil(self.num_examples / batch) - steps) * batch
        lengths = np.sort(self.train_set.lengths)[: self.num_examples - left_out]
        # at least
        return {"steps": steps, "tokens": int(lengths.sum()), "batch": batch}

    def _steps(self) -> int:
        """Mini-batches of a round: E_loc epochs', at least one."""
        each = math.ceil(self.num_examples / self.config.batch_size)
        return max(1, round(self.config.local_epochs * each))

    # a round

    def begin(self, tensors: Tensors, *, round: int) -> Update:
        """Take θ_t, complete the annotation with it, and return ∂L^{T\\k}/∂q if asked
        for."""
        load_into(self.parameters, tensors)
        self._advance(round)
        corpus = self._complete(round)
        self._begun = (round, corpus)
        self._source = self._sent = None
        if not self.config.weighting:
            return Update()
        gradient = self._gradients(corpus, round)
        contributing = {"contributing": float(gradient.abs().max() > 0)}
        self._sent = Update({"target_gradient": gradient}, metrics=contributing)
        return self._sent

    def _complete(self, round: int) -> PreparedCorpus:
        """The training set with what this round takes the unannotated types to be."""
        how = self._unannotated(round)
        if how == "outside":
            return self.train_set
        if how == "pseudo":
            predicted = self.model.predict(self.train_set)  # Eq. 4
            documents = tuple(
                pseudo_complete(gold, guess, self.known)
                for gold, guess in zip(self.data.train, predicted, strict=True)
            )
            self.pseudo = sum(len(d.spans) for d in documents) - sum(
                len(d.spans) for d in self.data.train
            )
            return self.model.annotate(self.train_set, documents, self.known)
        corpus = self.model.annotate(self.train_set, self.data.train, self.known)
        return self.model.soften(corpus) if how == "soft" else corpus

    def _unannotated(self, round: int) -> str:
        """How this round treats the types that the site does not annotate."""
        if self.known >= set(self.config.tags.types):
            return "outside"  # nothing is left unannotated
        if round < self.config.warmup and self.config.unannotated in ("pseudo", "soft"):
            return "marginal" if self.config.model.softens else "outside"
        return self.config.unannotated

    def _gradients(self, corpus: PreparedCorpus, round: int) -> Tensor:
        """Keep the direction of every g_i^src; return the target loss's gradient.

        With respect to the transfer parameter alone, and without updating the model.
        Zeros before a round distils: nothing trains on a target loss then.
        """
        if round < self.config.warmup:
            return torch.zeros(self.model.trainable()[self.model.transfer].numel())
        size, batch = (
            self.parameters[self.model.transfer].numel(),
            self.config.batch_size,
        )
        total = torch.zeros(size, dtype=torch.float64)
        self._source = torch.zeros(self.num_examples, size)
        order = np.argsort(corpus.lengths, kind="stable")  # batches of like length
        counted = self._counted(round)
        for sentences, adds in (
            (order[counted[order]], True),
            (order[~counted[order]], False),
        ):
            for indices in np.split(sentences, range(batch, len(sentences), batch)):
                if not len(indices):
                    continue
                # [tagsets eq 11] g_i^src (batch, size), and the sum of the target
                # losses' (size,)
                source, target = self.model.gradients(corpus, indices)
                if adds:
                    total += target.double().cpu()  # [tagsets alg 2]
                direction = torch.nn.functional.normalize(source).float().cpu()
                self._source[torch.from_numpy(indices)] = direction  # [tagsets alg 2]
        number = int(counted.sum())
        if self.config.target_gradient == "mean":
            total = total / number  # [tagsets eq 7]
        elif number < self.num_examples:
            total = total * (self.num_examples / number)
        return total.float()

    def _counted(self, round: int) -> np.ndarray:
        """(sentences,) whether each sentence is in this round's target gradient.

        All are, as in the paper, where draws follow from the job's seed. Where they are
        secret, a half of them is: a gradient over all notes has no draw in it, and so
        the difference of the sums of two jobs would be the gradient of the one site
        that is in one of them alone.
        """
        if not self.draws.is_secret:
            return np.ones(self.num_examples, bool)
        counted = np.zeros(self.num_examples, bool)
        order = self.draws.rng_of("target", self.id, round).permutation(
            self.num_examples
        )
        counted[order[: half(self.num_examples)]] = True
        return counted

    def update_weights(
        self, tensors: Tensors, *, round: int, included: str, contributing: int
    ) -> Update:
        """w_{t+1} = α w_t + (1 − α) cos(g_i^src, g^tgt), g^tgt being the sum without
        this site.

        This round still trains with w_t (Algorithm 1 and Eq. 10).

        included: the names of the sites in the sum, joined by commas. contributing: how
        many of them sent a gradient other than zero.
        Raises RefusedError if fewer than three did: the rest would be one other site's.
        """
        names = included.split(",")
        if min(contributing, len(names)) < FEWEST_CONTRIBUTORS:
            raise RefusedError(
                f"site {self.id!r} refuses a sum of {min(contributing, len(names))} sites' "
                f"target gradients: {FEWEST_CONTRIBUTORS} are needed, or it could be told one "
                "site's own"
            )
        self._begun_in(round)
        if self._sent is None or self._source is None:
            raise TrainingError(
                f"site {self.id!r} sent no target gradient in this round"
            )
        own = contribution(self._sent)
        require_like(own, tensors)
        others = tensors["target_gradient"]
        if self.id in names:
            others = others - own["target_gradient"]  # [tagsets eq 11]
        # [tagsets eq 12]
        cosines = self._source.double() @ torch.nn.functional.normalize(others, dim=0)
        if float(others.norm()) > 0:
            # A sentence whose own gradient is zero says nothing; its weight stays.
            told = (self._source.abs().sum(1) > 0).numpy()
            alpha = self.config.momentum
            moved = (
                alpha * self.weights + (1 - alpha) * cosines.numpy()
            )  # [tagsets eq 12]
            self._next = (round, np.where(told, moved, self.weights))  # [tagsets eq 12]
            self._note(round, cosines.numpy()[told])
        return Update()

    def train(self, tensors: Tensors, *, round: int) -> Update:
        """E_loc epochs on the completed annotation from θ_t; return θ_t^k.

        Its weight is 1, or the number of sentences where aggregation goes by size.
        """
        corpus = self._begun_in(round)
        how = self._unannotated(round)
        adam = Adam(self.parameters, self.config.learning_rate)
        sums, seen = np.zeros(3), 0
        weights = self._effective_weights()
        for step, indices in enumerate(self._batches(corpus, round)):
            seed = self.draws.seed_of("dropout", self.id, round, step)
            seed_torch(seed, self.model.device)
            self.model.train()
            loss, source, target = self._objective(corpus, indices, weights, how, round)
            value = finite(loss, self.id, f"in round {round}")
            loss.backward()
            adam.step()
            sums += np.array([value, source, target]) * len(indices)
            seen += len(indices)
        self._begun = None
        self._advance(round + 1)
        self.rounds = round + 1
        size = self.reported_examples
        weight = size if self.config.aggregation == "size" else 1  # [tagsets eq 1]
        sums = sums / (seen / self.num_examples)
        trained = {
            name: value.cpu() for name, value in snapshot(self.parameters).items()
        }
        metrics = {
            name: scale_sum(value, self.num_examples, self.count_step)
            for name, value in zip(
                ("loss", "source", "target"), sums.tolist(), strict=True
            )
        }
        metrics["examples"] = size
        metrics["pseudo"] = round_count(self.pseudo, self.count_step)
        return Update(trained, weight, metrics)  # [tagsets eq 1]

    def _objective(
        self,
        corpus: PreparedCorpus,
        indices: np.ndarray,
        weights: np.ndarray,
        how: str,
        round: int,
    ) -> tuple[Tensor, float, float]:
        """The mini-batch's loss, and its two parts as numbers."""
        return weighted_loss(self.model.losses(corpus, indices), weights[indices], how)

    def _batches(self, corpus: PreparedCorpus, round: int) -> Iterator[np.ndarray]:
        left = self._steps()
        for epoch in range(math.ceil(self.config.local_epochs)):
            rng = self.draws.rng_of("order", self.id, round, epoch)
            batches = buckets(corpus.lengths, self.config.batch_size, rng)[:left]
            yield from batches
            left -= len(batches)

    def _begun_in(self, round: int) -> PreparedCorpus:
        if self._begun is None or self._begun[0] != round:
            raise TrainingError(
                f"site {self.id!r} has not begun round {round}: it was restarted in between"
            )
        return self._begun[1]

    def taught(self, indices: np.ndarray) -> tuple[PreparedCorpus, str]:
        """The training set in which some sentences are completed by `teacher`, from
        these alone; and how."""
        how = self._unannotated(self.rounds)
        if how == "outside":
            return self.train_set, how
        if self._open is None:
            self._open = self.model.annotate(
                self.train_set, self.data.train, self.known
            )
        if how == "marginal":
            return self._open, how
        corpus, present = self._open, snapshot(self.shared)
        load_into(self.shared, self.teacher)
        try:
            if how == "soft":
                return self.model.soften(corpus, indices), how
            found = self.model.predict_tags(corpus, indices)
        finally:
            load_into(self.shared, present)
        encoded = corpus.encoded
        tags = encoded.tags.copy()
        for row in indices.tolist():
            part = slice(encoded.bounds[row], encoded.bounds[row + 1])
            offsets, of = (
                encoded.offsets[part],
                encoded.documents[encoded.sentence_document[row]],
            )
            gold, guess = (
                replace(of, spans=tuple(decode(ids[part], offsets, encoded.tagset)))
                for ids in (encoded.tags, found)
            )
            completed = pseudo_complete(gold, guess, self.known)
            tags[part], _ = encode(completed.spans, offsets, encoded.tagset)
        return replace(corpus, encoded=replace(encoded, tags=tags)), how

    # instance weights

    def _advance(self, round: int) -> None:
        """Go on to the weights that an earlier round made for the rounds after it."""
        if self._next is not None and self._next[0] < round:
            self.weights = self._next[1]
        self._next = None

    def _effective_weights(self) -> np.ndarray:
        """Return the weights, of shape (sentences,), as the source loss takes them."""
        weights = (
            np.maximum(self.weights, 0) if self.config.clip_weights else self.weights
        )
        if not self.config.normalise_weights:
            return weights

        mean = weights.mean()  # at least 0, because the weights were clipped
        return weights / mean if mean > 0 else weights

    def _note(self, round: int, cosines: np.ndarray) -> None:
        """Keep the distribution of the new weights at the site; it is no part of any
        update."""
        assert self._next is not None
        weights = self._next[1]
        line = {
            "round": round,
            "mean_weight": _rounded(weights.mean()),
            "weight_quantiles": [_rounded(x) for x in np.quantile(weights, QUANTILES)],
            "cosine_quantiles": [_rounded(x) for x in np.quantile(cosines, QUANTILES)],
            "negative_cosines": _rounded((cosines < 0).mean()),
        }
        self.history.append(line)
        if self.directory is not None:
            lines = "".join(json.dumps(line) + "\n" for line in self.history)
            write_text(self.directory / "weights.jsonl", lines)

    # judging

    def evaluate(self, tensors: Tensors, *, round: int) -> Update:
        """Counts on the validation data, of the types that the site annotates."""
        load_into(self.parameters, tensors)
        return self.report_counts(self.counts("valid"))

    def trace(self, tensors: Tensors) -> Update:
        """Counts of the model just evaluated on the test data; no choice depends on
        them.

        Raises RefusedError where the job does not trace.
        """
        if not self.config.trace:
            raise RefusedError(
                f"site {self.id!r}: the job does not trace the scores of test data"
            )
        return self.report_counts(self.counts("test"))

    def finish(self, tensors: Tensors) -> Update:
        """Take the global model, count on the test data, save both."""
        load_into(self.parameters, tensors)
        return self.tested()

    # what a restart must not lose

    def state(self) -> State:
        """The instance weights and their history; all else comes from the server."""
        weights = self.weights if self._next is None else self._next[1]
        tensors = {"weights": torch.from_numpy(weights.copy())}
        return State(self.rounds, tensors, {"history": self.history})

    def restore(self, state: State) -> None:
        """Go back to a kept state."""
        self.weights, self._next = state.tensors["weights"].numpy().copy(), None
        self.history = list(state.facts["history"])
        self.rounds = state.round


def half(number: int) -> int:
    """Return half of a number of sentences, rounded up."""
    return -(-number // 2)


def pseudo_complete(
    gold: Document, predicted: Document, known: Collection[str]
) -> Document:
    """The gold mentions of the known types, and the predicted ones of all others.

    Where a prediction overlaps a gold mention the gold one wins.
    """
    taken = sorted((span.start, span.end) for span in gold.spans)
    # [tagsets eq 5]
    added = [
        span
        for span in predicted.spans
        if span.label not in known
        and not any(a < span.end and span.start < b for a, b in taken)
    ]
    spans: tuple[Span, ...] = tuple(sorted((*gold.spans, *added)))  # [tagsets eq 5]
    return replace(gold, spans=spans)


def weighted_loss(
    losses: Losses, weights: np.ndarray, how: str
) -> tuple[Tensor, float, float]:
    """1/N Σ w_i L_i^{T_k} + 1/N Σ L_i^{T\\k} of a mini-batch, and its two parts as
    numbers.

    weights: (batch,) w_i. how: "marginal" leaves the second part out.
    """
    w = torch.as_tensor(weights, dtype=losses.source.dtype, device=losses.source.device)
    source = (w * losses.source).mean()  # [tagsets eq 10]
    target = losses.target.mean()  # [tagsets eq 7]
    total = (
        source if how == "marginal" else source + target
    )  # [tagsets eq 6] [tagsets eq 7]
    return total, float(source.detach()), float(target.detach())


def _rounded(value: float) -> float:
    return round(float(value), 5)


# what a job asks of a method


def for_sites(config: C, sites: Sequence[SiteData]) -> C:
    """The configuration with what only the sites together can say.

    Raises RefusedError for instance weights with fewer than three sites.
    """
    if config.weighting and len(sites) < FEWEST_CONTRIBUTORS:
        raise RefusedError(_too_few(len(sites)))
    return replace(config, tags=all_tags(sites), sites=len(sites))


def alone(config: C, sites: Sequence[SiteData]) -> tuple[C, ...]:
    """Each site's configuration where it trains by itself: its own types, nothing to
    distil."""
    plain = replace(config, weighting=False, unannotated="outside")
    return tuple(
        replace(plain, tags=site.tags, model=config.model.for_types(site.tags.types))
        for site in sites
    )


def pooled(
    config: C, sites: Sequence[SiteData], complete: Sequence[SiteData] | None
) -> tuple[tuple[SiteData, ...], C]:
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
    """Bytes that a site sends and is sent at most in a run; instance weights add
    little."""
    return messages(config, nbytes(initial(config)))


def messages(config: Config, each: int) -> tuple[int, int]:
    """The same of a model of so many bytes: sent in every round, judged and at the end."""
    judged = math.ceil(config.rounds / config.evaluate_every)
    return config.rounds * each, (config.rounds + judged + 1) * each


def planned(config: Config, sizes: Sequence[int]) -> tuple[int, int]:
    """The most rounds that a run can take, and the sentences of each."""
    return config.rounds, math.ceil(sum(sizes) * config.local_epochs)


def warnings(config: Config) -> tuple[str, ...]:
    """What a person should know before training."""
    if config.learning_rate <= FASTEST or not isinstance(
        config.model, TokenClassifierConfig
    ):
        return begun_from(config)
    told = f"learning_rate = {config.learning_rate:g}: a token classifier diverges above {FASTEST:g}"
    return (f"{told}; a light tagger alone trains so fast", *begun_from(config))


def save(config: Config, final: State, folder: Path) -> bool:
    """The global model of a run's last state, ready for `fednotes predict`."""
    return save_global(config.model, config.tags, config.seed, final, folder)


def private_round(config: Config, epoch: int) -> int:
    """Noisy sums in a round with differential privacy, of so many to an epoch."""
    return math.ceil(config.local_epochs * epoch)


def private_before(site: Site, round: int, kept: Tensors) -> Tensors:
    """The round that an answer is of, and its θ_t: what the first answer of it was
    asked with."""
    privacy = site.config.privacy
    assert privacy is not None
    site.rounds = round // private_round(site.config, privacy.epoch)
    if int(kept.get("round", torch.tensor(-1))) != site.rounds:
        kept = {**snapshot(site.shared), "round": torch.tensor(site.rounds)}
    site.teacher = {name: value for name, value in kept.items() if name != "round"}
    return kept


def private_loss(site: Site, indices: np.ndarray) -> Tensor:
    """The mean loss of some sentences, their annotation completed from them alone."""
    corpus, how = site.taught(indices)
    return weighted_loss(
        site.model.losses(corpus, indices), np.ones(len(indices)), how
    )[0]


METHOD = Method(
    Config,
    Site,
    train,
    model_config,
    presets("distill"),
    planned,
    pooled,
    judged_mentions,
    for_sites=for_sites,
    alone=alone,
    traffic=traffic,
    warnings=warnings,
    save=save,
    private=Privately(
        {"weighting": False, "aggregation": "size", "select": "last", "trace": False},
        initial,
        private_loss,
        lambda config, epoch: config.rounds * private_round(config, epoch),
        before=private_before,
    ),
)
