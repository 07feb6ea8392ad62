"""The site side of distillation with heterogeneous tag sets: what surrounds local training."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fednotes.core.errors import ConfigError, LossError, RefusedError, TrainingError
from fednotes.core.seeds import rng_of, seed_of
from fednotes.core.store import write_json, write_text
from fednotes.core.tensors import load_into, require_like, snapshot
from fednotes.core.types import Document, SiteData, Span
from fednotes.core.update import Tensors, Update, contribution
from fednotes.data.batches import buckets
from fednotes.federation import State
from fednotes.methods.optim import Adam
from fednotes.metrics.spans import SpanCounts, forms_of
from fednotes.models.build import build_model
from fednotes.models.model import Corpus, Losses
from fednotes.models.saving import save_model

if TYPE_CHECKING:
    from fednotes.methods.distill import Config

FEWEST_CONTRIBUTORS = 3
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


class Site:
    """One platform: its notes, its instance weights, and the tasks that the server may ask for.

    directory: where the global model, its scores on this site's test data and the history of
    the instance weights are written; None writes nothing. cache: see `fedner_site.Site`.

    Raises ConfigError if the site has no training sentence, annotates a type outside the
    complete tag set.
    """

    tasks: ClassVar[frozenset[str]] = frozenset(
        {"begin", "update_weights", "train", "evaluate", "trace", "finish"}
    )

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
        self.data = data
        self.config = config
        self.directory = directory
        self.known = frozenset(data.tags.types)  # T_k
        self.model = build_model(config.model, config.tags, config.seed, device)
        _require_known(self.known, config, data.id)
        prepare = partial(self.model.prepare, cache=cache, progress=progress)
        self.train_set = prepare(data.train)
        self.valid_set = prepare(data.valid, gold=False)
        self.test_set = prepare(data.test, gold=False)
        self.num_examples = self.train_set.sentences
        if self.num_examples == 0:
            raise ConfigError(f"site {data.id!r} has no training sentence")
        self.parameters: dict[str, Tensor] = dict(self.model.trainable())
        self.weights = np.ones(self.num_examples)  # w_{i,t}
        self._next: tuple[int, np.ndarray] | None = None  # round t and w_{i,t+1}
        self.history: list[dict[str, Any]] = []  # of the weights, a line a round
        self.rounds = 0
        self.pseudo = 0  # mentions of other types in the current annotation
        self._begun: tuple[int, Corpus] | None = None
        self._source: Tensor | None = None  # (sentences, size) g_i^src, directions alone
        self._sent: Update | None = None
        self.scores: dict[str, Any] = {}

    @property
    def id(self) -> str:
        """The site's name in the job."""
        return self.data.id

    @property
    def eta(self) -> float:
        """η: the trained and sent parameters' part of the model, its frozen ones counted too."""
        sent = sum(value.numel() for value in self.parameters.values())
        return sent / (sent + self.model.frozen)

    def described(self) -> str:
        """What is trained and sent."""
        sent = sum(value.numel() for value in self.parameters.values())
        return (
            f"{sent:,} parameters are trained and sent each way a round "
            f"(η = {100 * self.eta:.2f} % of the model)"
        )

    def covered(self, task: str) -> dict[str, int]:
        """The local steps and tokens behind an update of this task; a site's policy asks."""
        if task != "train":
            return {"steps": 1, "batch": self.num_examples} if task == "begin" else {}
        batch, steps = self.config.batch_size, self._steps()
        left_out = max(0, math.ceil(self.num_examples / batch) - steps) * batch
        lengths = np.sort(self.train_set.lengths)[: self.num_examples - left_out]
        return {"steps": steps, "tokens": int(lengths.sum()), "batch": batch}  # at least

    def _steps(self) -> int:
        """Mini-batches of a round: E_loc epochs', at least one."""
        each = math.ceil(self.num_examples / self.config.batch_size)
        return max(1, round(self.config.local_epochs * each))

    # a round

    def begin(self, tensors: Tensors, *, round: int) -> Update:
        """Take θ_t, complete the annotation with it, and return ∂L^{T\\k}/∂q if asked for."""
        load_into(self.parameters, tensors)
        self._advance(round)
        corpus = self._complete(round)
        self._begun = (round, corpus)
        self._source = self._sent = None
        if not self.config.weighting:
            return Update()
        gradient = self._gradients(corpus, distils=round >= self.config.warmup)
        contributing = {"contributing": float(gradient.abs().max() > 0)}
        self._sent = Update({"target_gradient": gradient}, metrics=contributing)
        return self._sent

    def _complete(self, round: int) -> Corpus:
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
            return "marginal" if self.model.softens else "outside"
        return self.config.unannotated

    def _gradients(self, corpus: Corpus, distils: bool) -> Tensor:
        """Keep the direction of every g_i^src; return the target loss's gradient.

        With respect to the transfer parameter alone, and without updating the model. Zeros
        before a round distils: nothing trains on a target loss then.
        """
        if not distils:
            return torch.zeros(self.model.trainable()[self.model.transfer].numel())
        total: Tensor | None = None
        kept: Tensor | None = None
        for indices in _in_order(corpus.lengths, self.config.batch_size):
            # [tagsets eq 11] g_i^src (batch, size), and the sum of the target losses' (size,)
            source, target = self.model.gradients(corpus, indices)
            total = target.double() if total is None else total + target.double()  # [tagsets alg 2]
            if kept is None:
                kept = torch.zeros(self.num_examples, source.shape[1])
            # [tagsets alg 2]
            kept[torch.from_numpy(indices)] = torch.nn.functional.normalize(source).float().cpu()
        assert total is not None
        self._source = kept
        if self.config.target_gradient == "mean":
            total = total / self.num_examples  # [tagsets eq 7]
        return total.float().cpu()

    def update_weights(
        self, tensors: Tensors, *, round: int, included: str, contributing: int
    ) -> Update:
        """w_{t+1} = α w_t + (1 − α) cos(g_i^src, g^tgt), g^tgt being the sum without this site.

        This round still trains with w_t (Algorithm 1 and Eq. 10).

        included: the names of the sites in the sum, joined by commas. contributing: how many
        of them sent a gradient other than zero.
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
            raise TrainingError(f"site {self.id!r} sent no target gradient in this round")
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
            moved = alpha * self.weights + (1 - alpha) * cosines.numpy()  # [tagsets eq 12]
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
            torch.manual_seed(seed_of(self.config.seed, "dropout", self.id, round, step))
            self.model.train()
            loss, source, target = self._objective(corpus, indices, weights, how, round)
            value = float(loss.detach())
            if not math.isfinite(value):
                raise LossError(self.id, value, f"in round {round}", "lower learning_rate")
            loss.backward()
            adam.step()
            sums += np.array([value, source, target]) * len(indices)
            seen += len(indices)
        self._begun = None
        self._advance(round + 1)
        self.rounds = round + 1
        weight = self.num_examples if self.config.aggregation == "size" else 1  # [tagsets eq 1]
        trained = {name: value.cpu() for name, value in snapshot(self.parameters).items()}
        loss_sum, source_sum, target_sum = sums / (seen / self.num_examples)
        metrics = {
            "loss": loss_sum,
            "source": source_sum,
            "target": target_sum,
            "examples": self.num_examples,
            "pseudo": self.pseudo,
        }
        return Update(trained, weight, metrics)  # [tagsets eq 1]

    def _objective(
        self, corpus: Corpus, indices: np.ndarray, weights: np.ndarray, how: str, round: int
    ) -> tuple[Tensor, float, float]:
        """The mini-batch's loss, and its two parts as numbers."""
        return weighted_loss(self.model.losses(corpus, indices), weights[indices], how)

    def _batches(self, corpus: Corpus, round: int) -> Iterator[np.ndarray]:
        left = self._steps()
        for epoch in range(math.ceil(self.config.local_epochs)):
            rng = rng_of(self.config.seed, "order", self.id, round, epoch)
            batches = buckets(corpus.lengths, self.config.batch_size, rng)[:left]
            yield from batches
            left -= len(batches)

    def _begun_in(self, round: int) -> Corpus:
        if self._begun is None or self._begun[0] != round:
            raise TrainingError(
                f"site {self.id!r} has not begun round {round}: it was restarted in between"
            )
        return self._begun[1]

    # instance weights

    def _advance(self, round: int) -> None:
        """Go on to the weights that an earlier round made for the rounds after it."""
        if self._next is not None and self._next[0] < round:
            self.weights = self._next[1]
        self._next = None

    def _effective_weights(self) -> np.ndarray:
        """(sentences,) the weights as the source loss takes them."""
        weights = np.maximum(self.weights, 0) if self.config.clip_weights else self.weights
        if self.config.normalise_weights and abs(weights.mean()) > 1e-9:
            weights = weights / weights.mean()
        return weights

    def _note(self, round: int, cosines: np.ndarray) -> None:
        """Keep the distribution of the new weights at the site; it is no part of any update."""
        assert self._next is not None
        weights = self._next[1]
        line = {
            "round": round,
            "mean_weight": float(weights.mean()),
            "weight_quantiles": [float(x) for x in np.quantile(weights, QUANTILES)],
            "cosine_quantiles": [float(x) for x in np.quantile(cosines, QUANTILES)],
            "negative_cosines": float((cosines < 0).mean()),
        }
        self.history.append({k: _rounded(v) for k, v in line.items()})
        if self.directory is not None:
            lines = "".join(json.dumps(line) + "\n" for line in self.history)
            write_text(self.directory / "weights.jsonl", lines)

    # judging

    def evaluate(self, tensors: Tensors, *, round: int) -> Update:
        """Counts on the validation data, of the types that the site annotates."""
        load_into(self.parameters, tensors)
        counts = self._counts(self.data.valid, self.valid_set, self.data.tags.types)
        return Update(metrics=counts.to_metrics())

    def trace(self, tensors: Tensors) -> Update:
        """Counts of the model just evaluated on the test data; no choice depends on them.

        Raises RefusedError where the job does not trace.
        """
        if not self.config.trace:
            raise RefusedError(f"site {self.id!r}: the job does not trace the scores of test data")
        counts = self._counts(self.data.test, self.test_set, self.data.scored_types)
        return Update(metrics=counts.to_metrics())

    def finish(self, tensors: Tensors) -> Update:
        """Take the global model, count on the test data, save both."""
        load_into(self.parameters, tensors)
        seen = forms_of(self.data.train)
        counts = self._counts(self.data.test, self.test_set, self.data.scored_types, seen)
        self.scores = counts.scores()
        if self.directory is not None:
            save_model(self.model, self.directory / "model")
            write_json(self.directory / "scores.json", self.scores)
        return Update(metrics=counts.to_metrics())

    @property
    def valid_score(self) -> float | None:
        """Strict F1 of the present model on what validation data annotate; None where nothing."""
        return self._counts(self.data.valid, self.valid_set, self.data.tags.types).strict_f1

    def scores_on(self, site: SiteData) -> dict[str, Any]:
        """This model's scores on another site's test data."""
        predicted = self.model.predict(site.test)
        counts = SpanCounts.of(
            site.test, predicted, seen=forms_of(site.train), types=site.scored_types
        )
        return counts.scores()

    def _counts(
        self,
        documents: Sequence[Document],
        corpus: Corpus,
        types: Collection[str],
        seen: Collection[str] = frozenset(),
    ) -> SpanCounts:
        predicted = self.model.predict(corpus)
        return SpanCounts.of(documents, predicted, seen=seen, types=types)

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


def pseudo_complete(gold: Document, predicted: Document, known: Collection[str]) -> Document:
    """The gold mentions of the known types, and the predicted ones of all others.

    Where a prediction overlaps a gold mention the gold one wins.
    """
    taken = sorted((span.start, span.end) for span in gold.spans)
    # [tagsets eq 5]
    added = [
        span
        for span in predicted.spans
        if span.label not in known and not any(a < span.end and span.start < b for a, b in taken)
    ]
    spans: tuple[Span, ...] = tuple(sorted((*gold.spans, *added)))  # [tagsets eq 5]
    return replace(gold, spans=spans)


def weighted_loss(losses: Losses, weights: np.ndarray, how: str) -> tuple[Tensor, float, float]:
    """1/N Σ w_i L_i^{T_k} + 1/N Σ L_i^{T\\k} of a mini-batch, and its two parts as numbers.

    weights: (batch,) w_i. how: "marginal" leaves the second part out.
    """
    w = torch.as_tensor(weights, dtype=losses.source.dtype, device=losses.source.device)
    source = (w * losses.source).mean()  # [tagsets eq 10]
    target = losses.target.mean()  # [tagsets eq 7]
    total = source if how == "marginal" else source + target  # [tagsets eq 6] [tagsets eq 7]
    return total, float(source.detach()), float(target.detach())


def _in_order(lengths: np.ndarray, batch_size: int) -> Iterator[np.ndarray]:
    """Every sentence once, in batches of like length."""
    order = np.argsort(lengths, kind="stable")
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


def _require_known(known: frozenset[str], config: Config, site: str) -> None:
    odd = sorted(known - set(config.tags.types))
    if odd:
        raise ConfigError(
            f"site {site!r} annotates {odd[0]!r}, the job's complete tag set is "
            f"{', '.join(config.tags.types) or 'empty'}: map it to one of these in label_map, "
            "or leave it out with types"
        )


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [round(x, 5) for x in value]
    return round(value, 5) if isinstance(value, float) else value
