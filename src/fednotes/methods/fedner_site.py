"""The site side of FedNER: PlatformUpdate of Algorithm 1, and what surrounds it."""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from fednotes.core.errors import ConfigError, LossError, RefusedError
from fednotes.core.seeds import rng_of, seed_of
from fednotes.core.store import write_json
from fednotes.core.tensors import load_into, snapshot
from fednotes.core.types import Document, SiteData
from fednotes.core.update import Tensors, Update
from fednotes.data.batches import buckets
from fednotes.federation import State
from fednotes.methods import word_rows
from fednotes.methods.optim import Adam
from fednotes.metrics.spans import SpanCounts, forms_of
from fednotes.models.saving import save_model
from fednotes.models.tagger import Prepared, build_tagger

if TYPE_CHECKING:
    from fednotes.methods.fedner import Config


class Site:
    """One platform: its data, its private module, and the tasks that the server may ask for.

    directory: where the finished tagger and its scores are written; None writes nothing.
    cache: folder for frozen contextual features (`models/features.py`); None computes them
    in memory.

    Raises ConfigError if the site has no training sentence.
    """

    tasks: ClassVar[frozenset[str]] = frozenset(
        {"count", "take_share", "mark", "gradients", "train", "evaluate", "finish"}
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
        tags = data.tags if "crf" in config.private else config.tags
        self.tagger = build_tagger(config.model, tags, config.seed, device=device)
        prepare = partial(self.tagger.prepare, cache=cache, progress=progress)
        self.train_set = prepare(data.train)
        self.valid_set = prepare(data.valid, gold=False)
        self.test_set = prepare(data.test, gold=False)
        self.num_examples = self.train_set.sentences
        if self.num_examples == 0:
            raise ConfigError(f"site {data.id!r} has no training sentence")
        self.share = config.batch_size
        parameters = self.tagger.trainable()
        self.shared = {n: p for n, p in parameters.items() if _layer(n) not in config.private}
        self.private = {n: p for n, p in parameters.items() if _layer(n) in config.private}
        by_rows = config.exchange == "gradients"
        self.tables = word_rows.tables(self.shared) if by_rows else ()
        self._secret = secrets.randbits(63)  # of the marks
        local = self.private if config.exchange == "gradients" else parameters
        self.adam = Adam(local, config.learning_rate)
        self.steps = 0  # mini-batches so far
        self._order: list[np.ndarray] = []
        self._ordered: tuple[int, int] | None = None  # epoch and share of that order
        self.best_f1 = -1.0
        self.best: dict[str, torch.Tensor] = {}
        self.scores: dict[str, Any] = {}

    @property
    def id(self) -> str:
        """The site's name in the job."""
        return self.data.id

    def described(self) -> str:
        """What is shared and what stays."""
        shared, private = (
            sum(p.numel() for p in part.values()) for part in (self.shared, self.private)
        )
        return f"{shared:,} parameters are shared, {private:,} are private to each site"

    def covered(self, task: str) -> dict[str, int]:
        """The local steps and tokens behind an update of this task; a site's policy asks."""
        if task in ("mark", "gradients"):
            return {"steps": 1, "batch": self._smallest()}
        steps = self.config.local_epochs * self._batches_per_epoch()
        tokens = int(self.train_set.lengths.sum())  # an epoch more reads the same ones
        behind = {"steps": steps, "tokens": tokens, "batch": self._smallest()}
        return behind if task == "train" else {}

    def _smallest(self) -> int:
        """Sentences of an epoch's smallest mini-batch, which may be its last one."""
        whole, short = divmod(self.num_examples, self.share)
        if short >= least_share(self.num_examples, self.config):
            return short
        return self.share if whole > 1 else self.num_examples

    def count(self, tensors: Tensors) -> Update:
        """|S_i|."""
        return Update(metrics={"sentences": self.num_examples})

    def take_share(self, tensors: Tensors, *, examples: int) -> Update:
        """Set |N_i|, of the job's N and Σ|S_j|, `examples`; the sum is of the shares.

        Raises RefusedError for fewer than this site has alone.
        """
        if examples < self.num_examples:
            raise RefusedError(
                f"site {self.id!r} has more sentences than the sum of all it is told"
            )
        self.share = batch_share(self.num_examples, examples, self.config)
        return Update(metrics={"share": self.share})

    # training

    def mark(self, tensors: Tensors, *, round: int) -> Update:
        """The rows of word tables that the next mini-batch reads (`word_rows.py`)."""
        return Update(self._marks())

    def _marks(self) -> dict[str, torch.Tensor]:
        if not self.tables:
            return {}
        read = self.tagger.word_rows(self.train_set, self._batch(self.steps))
        rng = rng_of(self._secret, "marks", self.id, self.steps)
        return word_rows.marks(read, self.shared, self.tables, rng)

    def gradients(self, tensors: Tensors, *, round: int) -> Update:
        """One mini-batch: step θ_p, return ∂L^i/∂θ_s with weight |S_i|; of tables the rows that
        came."""
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
        return Update(told, self.num_examples, self._reported(loss))  # [fedner eq 2]

    def train(self, tensors: Tensors, *, round: int) -> Update:
        """`local_epochs` epochs of the whole tagger; return θ_s with weight |S_i|."""
        load_into(self.shared, tensors)
        batches = self.config.local_epochs * self._batches_per_epoch()
        loss = sum(self._local_step(self.adam) for _ in range(batches)) / batches
        # [fedner eq 2]
        return Update(
            {name: value.cpu() for name, value in snapshot(self.shared).items()},
            self.num_examples,
            self._reported(loss),
        )

    def _reported(self, loss: float) -> dict[str, float]:
        return {"loss": loss * self.num_examples, "examples": self.num_examples}

    def _local_step(self, adam: Adam) -> float:
        loss = self._backward(self._batch(self.steps))
        adam.step()
        return loss

    def _backward(self, batch: np.ndarray) -> float:
        """Gradients of the mini-batch's mean loss into every parameter's `.grad`."""
        torch.manual_seed(seed_of(self.config.seed, "dropout", self.id, self.steps))
        self.tagger.train()
        loss = self.tagger.loss(self.train_set, batch)  # L^i
        value = float(loss.detach())
        if not math.isfinite(value):
            remedy = "lower learning_rate, or check the word vectors and features for NaN"
            raise LossError(self.id, value, f"at mini-batch {self.steps}", remedy)
        loss.backward()
        self.steps += 1
        return value

    def _batches_per_epoch(self) -> int:
        whole, short = divmod(self.num_examples, self.share)
        return whole + (short >= least_share(self.num_examples, self.config) or not whole)

    def _batch(self, step: int) -> np.ndarray:
        """The mini-batch of a step: an epoch's order depends on seed, site and epoch alone."""
        epoch, position = divmod(step, self._batches_per_epoch())
        if self._ordered != (epoch, self.share):
            rng = rng_of(self.config.seed, "order", self.id, epoch)
            least = least_share(self.num_examples, self.config)  # of the epoch's odd one too
            self._order = buckets(self.train_set.lengths, self.share, rng, least=least)
            self._ordered = (epoch, self.share)
        return self._order[position]

    # judging and keeping the best

    def evaluate(self, tensors: Tensors, *, round: int) -> Update:
        """Counts on the site's validation data; keep the tagger if it is the best so far and
        the best is selected."""
        load_into(self.shared, tensors)
        counts = self._judge()
        return Update(metrics=counts.to_metrics())

    def _judge(self) -> SpanCounts:
        counts = self.counts(self.data.valid, self.valid_set)
        f1 = counts.scores()["strict"]["f1"]
        better = f1 > self.best_f1 or f1 == 0 >= self.best_f1  # the later one while none finds any
        if better and self.config.select == "best":
            self.best_f1 = f1
            self.best = snapshot(self.tagger.trainable())
        return counts

    def finish(self, tensors: Tensors) -> Update:
        """Personal epochs, back to the best tagger, test counts, save."""
        if self.best:
            load_into(self.tagger.trainable(), self.best)
        else:
            load_into(self.shared, tensors)
        self._personalise(self.config.personal_epochs)
        counts = self.counts(self.data.test, self.test_set, forms_of(self.data.train))
        self.scores = counts.scores()
        if self.directory is not None:
            save_model(self.tagger, self.directory / "model")
            write_json(self.directory / "scores.json", self.scores)
        return Update(metrics=counts.to_metrics())

    @property
    def valid_score(self) -> float | None:
        """Strict F1 of the tagger that is kept, on validation data; None where there is none."""
        judged = self.best_f1 >= 0 and any(document.spans for document in self.data.valid)
        return self.best_f1 if judged else None

    def _personalise(self, epochs: int) -> None:
        """Epochs of the whole tagger on the site's own data, a fresh optimizer."""
        adam = Adam(self.tagger.trainable(), self.config.learning_rate)
        for _ in range(epochs):
            for _ in range(self._batches_per_epoch()):
                self._local_step(adam)
            self._judge()
        if self.best:
            load_into(self.tagger.trainable(), self.best)

    def counts(
        self, documents: Sequence[Document], prepared: Prepared, seen: Collection[str] = frozenset()
    ) -> SpanCounts:
        """Right, wrong and missed mentions of the types that this site annotates."""
        predicted = self.tagger.predict(prepared)
        return SpanCounts.of(documents, predicted, seen=seen, types=self.data.tags.types)

    def scores_on(self, site: SiteData) -> dict[str, Any]:
        """This tagger's scores on another site's test data, that site's own types only."""
        predicted = self.tagger.predict(site.test)
        seen = forms_of(site.train)
        return SpanCounts.of(site.test, predicted, seen=seen, types=site.tags.types).scores()

    # what a restart must not lose

    def state(self) -> State:
        """Private parameters, optimizer moments and the best tagger so far."""
        own = self.private if self.config.exchange == "gradients" else self.tagger.trainable()
        tensors = {f"private.{name}": value.detach() for name, value in own.items()}
        tensors |= self.adam.state() | {f"best.{n}": value for n, value in self.best.items()}
        facts: dict[str, Any] = {"best_f1": self.best_f1, "share": self.share}
        if self.tables:
            facts["secret"] = self._secret
        return State(self.steps, tensors, facts)

    def restore(self, state: State) -> None:
        """Go back to a kept state."""
        own = self.private if self.config.exchange == "gradients" else self.tagger.trainable()
        load_into(own, dict(_without_prefix(state.tensors, "private.")))
        self.adam.restore(state.tensors)
        self.best = dict(_without_prefix(state.tensors, "best."))
        self.steps, self.best_f1 = state.round, float(state.facts["best_f1"])
        self.share = int(state.facts["share"])
        if self.tables:
            self._secret = int(state.facts["secret"])


def batch_share(size: int, examples: int, config: Config) -> int:
    """|N_i| = |S_i| / Σ|S_j| · N to the nearest whole number (a half up), at least one.

    size: |S_i|. examples: Σ|S_j|. Not below the job's `least_share` either, as far as the site
    has so many: a server that tells too large a sum gets no gradient of a single sentence. The
    shares of all sites may sum to a little more or less than N.
    """
    # [fedner batch]
    nearest = (2 * size * config.batch_size + examples) // (2 * examples)
    return max(nearest, least_share(size, config))


def least_share(size: int, config: Config) -> int:
    """The fewest sentences of a site of this size in a mini-batch of the job."""
    quarter = -(-config.batch_size // (4 * config.sites)) if config.sites else 1
    return max(1, min(config.least_share or quarter, size))


def _layer(name: str) -> str:
    return name.split(".")[0]


def _without_prefix(tensors: Tensors, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in tensors.items():
        if name.startswith(prefix):
            yield name.removeprefix(prefix), value
