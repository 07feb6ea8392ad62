"""What methods have in common: which model is kept, and how sites find and judge mentions."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Interval
from pydantic import AllowInfNan
from torch import Tensor

from fednotes.core.errors import ConfigError, LossError
from fednotes.core.federation import MethodSite, State
from fednotes.core.store import write_json
from fednotes.core.tensors import below, load_into, prefixed, require_like, snapshot
from fednotes.core.types import Document, SiteData, TagSet
from fednotes.core.update import Tensors, Update
from fednotes.metrics.spans import SpanCounts, forms_of
from fednotes.taggers.corpora import PreparedCorpus
from fednotes.taggers.model import Model, ModelConfig
from fednotes.taggers.saving import build_model, save_model

Count = Annotated[int, Ge(1)]
Number = Annotated[int, Ge(0)]
Size = Annotated[float, Ge(0), AllowInfNan(False)]
Rate = Annotated[float, Gt(0), AllowInfNan(False)]
Share = Annotated[float, Interval(gt=0, le=1)]
Part = Annotated[float, Interval(ge=0, lt=1)]


class Best:
    """The best of models that are judged one after another, by a score of which more is better.

    wanted: whether it is asked for; its parameters are kept then. later: when the later of two
    equal ones is the better one; "at zero": while none has found anything yet.
    """

    def __init__(
        self, wanted: bool, later: Literal["never", "at zero", "always"], lowest: float = -1.0
    ) -> None:
        self.wanted, self._later, self.score = wanted, later, lowest
        self.waited = 0  # judgements since the best one
        self.tensors: dict[str, Tensor] = {}

    def judge(self, score: float, tensors: Tensors) -> bool:
        """Whether the present model, which has these parameters, is the best so far."""
        equal = self._later == "always" or (self._later == "at zero" and score == 0)
        better = score > self.score or (equal and score == self.score)
        self.waited = 0 if better else self.waited + 1
        if better:
            self.score = score
            self.tensors = snapshot(tensors) if self.wanted else {}
        return better and self.wanted

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and facts of a state."""
        score = self.score if math.isfinite(self.score) else None
        return prefixed("best.", self.tensors), {"best": score, "waited": self.waited}

    def restore(self, state: State, like: Tensors) -> None:
        """Go on from a state whose kept parameters, if any, must be as these."""
        self.tensors, score = below(state.tensors, "best."), state.facts["best"]
        if self.tensors:
            require_like(like, self.tensors)
        self.score = -math.inf if score is None else float(score)
        self.waited = int(state.facts["waited"])


def finite(loss: Tensor, site: str, where: str, remedy: str = "lower learning_rate") -> float:
    """A loss as a number. Raises LossError."""
    value = float(loss.detach())
    if not math.isfinite(value):
        raise LossError(site, value, where, remedy)
    return value


class MentionSite(MethodSite):
    """A site that trains a model to find mentions, and judges it by its own annotation.

    tags: what the model predicts. directory: where the finished model and its scores are written;
    None writes nothing. cache: folder for frozen contextual features (`encoders/features.py`); None
    computes them in memory.

    Raises ConfigError if the site has no training sentence.
    """

    with_scores: ClassVar[bool] = True  # beside each model

    def __init__(
        self,
        data: SiteData,
        config: Any,
        tags: TagSet,
        directory: Path | None = None,
        device: str = "cpu",
        cache: Path | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.data, self.config, self.directory = data, config, directory
        self.model: Model = build_model(config.model, tags, config.seed, device)
        prepare = partial(self.model.prepare, cache=cache, progress=progress)
        self.train_set = prepare(data.train)
        self.valid_set = prepare(data.valid, gold=False)
        self.test_set = prepare(data.test, gold=False)
        self.num_examples = self.train_set.sentences
        if self.num_examples == 0:
            raise ConfigError(f"site {data.id!r} has no training sentence")
        self.scores: dict[str, Any] = {}

    @property
    def id(self) -> str:
        """The site's name in the job."""
        return self.data.id

    @staticmethod
    def judged_types(site: SiteData) -> tuple[str, ...]:
        """The types that predictions on a site's test data are judged by."""
        return site.scored_types

    def counts(self, part: Literal["valid", "test"], seen: Collection[str] = ()) -> SpanCounts:
        """Right, wrong and missed mentions in that part of the data.

        seen: forms of mentions that training had.
        """
        if part == "valid":
            documents, corpus, types = self.data.valid, self.valid_set, self.data.tags.types
        else:
            documents, corpus = self.data.test, self.test_set
            types = self.judged_types(self.data)
        return self._counts(documents, corpus, types, seen)

    def _counts(
        self,
        documents: Sequence[Document],
        corpus: PreparedCorpus | Sequence[Document],
        types: Collection[str],
        seen: Collection[str],
    ) -> SpanCounts:
        predicted = self.model.predict(corpus)
        return SpanCounts.of(documents, predicted, seen=frozenset(seen), types=types)

    def tested(self) -> Update:
        """Test counts of the present model, which is written."""
        counts = self.counts("test", forms_of(self.data.train))
        self.scores = counts.scores()
        if self.directory is not None:
            save_model(self.model, self.directory / "model")
            if self.with_scores:
                write_json(self.directory / "scores.json", self.scores)
        return Update(metrics=counts.to_metrics())

    def scores_on(self, site: SiteData) -> dict[str, Any]:
        """This model's scores on another site's test data, that site's own types only."""
        types = self.judged_types(site)
        return self._counts(site.test, site.test, types, forms_of(site.train)).scores()

    @property
    def valid_score(self) -> float | None:
        """Strict F1 of the present model on validation data; None where nothing is annotated."""
        return self.counts("valid").strict_f1


def judged_mentions(metrics: Mapping[str, float]) -> dict[str, float]:
    """Micro F1, strict, over all sites' validation mentions."""
    counts = SpanCounts.from_metrics(metrics)
    f1 = float(counts.scores()["strict"]["f1"])
    return {"held_out": f1 if counts.total.gold else -math.inf, "valid_f1": f1}


def all_tags(sites: Sequence[SiteData]) -> TagSet:
    """The complete tag set, the union over the sites."""
    return reduce(TagSet.union, (site.tags for site in sites))


def layer(name: str) -> str:
    """The layer that a parameter belongs to."""
    return name.split(".")[0]


def shared_and_private(shared: Tensors, private: Tensors) -> str:
    """What is shared and what stays, for people."""
    sizes = [sum(value.numel() for value in part.values()) for part in (shared, private)]
    return f"{sizes[0]:,} parameters are shared, {sizes[1]:,} are private to each site"


def save_global(model: ModelConfig, tags: TagSet, seed: int, final: State, folder: Path) -> bool:
    """Write the model of mentions that all sites end with: the one that was kept, if one was."""
    made = build_model(model, tags, seed)
    parameters = made.trainable()
    load_into(parameters, ended(final, parameters))
    save_model(made, folder)
    return True


def ended(final: State, names: Collection[str]) -> dict[str, Tensor]:
    """The parameters that a run ends with: those it kept as the best, if it did."""
    found = below(final.tensors, "best.") or below(final.tensors, "shared.")
    return {name: found[name] for name in names}
