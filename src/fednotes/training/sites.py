"""What methods have in common: optimizers, which model is kept, and how sites find and
judge mentions."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np
import torch
from annotated_types import Ge, Gt, Interval
from numpy.typing import NDArray
from pydantic import AllowInfNan
from torch import Tensor

from fednotes.core.counts import round_count, round_counts
from fednotes.core.errors import ConfigError, LossError, TrainingError
from fednotes.core.federation import Federation, MethodSite, State
from fednotes.core.seeds import Draws
from fednotes.core.store import write_json
from fednotes.core.tensors import (
    below,
    load_into,
    prefixed,
    require_like,
    restoring,
    snapshot,
)
from fednotes.core.types import Document, SiteData, TagSet
from fednotes.core.update import Tensors, Total, Update
from fednotes.metrics.spans import SpanCounts, document_counts, forms_of
from fednotes.taggers.corpora import PreparedCorpus
from fednotes.taggers.model import Model, ModelConfig
from fednotes.taggers.saving import build_model, save_model
from fednotes.taggers.token_classifier import TokenClassifierConfig, earlier_types

Count = Annotated[int, Ge(1)]
Number = Annotated[int, Ge(0)]
Size = Annotated[float, Ge(0), AllowInfNan(False)]
Rate = Annotated[float, Gt(0), AllowInfNan(False)]
Share = Annotated[float, Interval(gt=0, le=1)]
Part = Annotated[float, Interval(ge=0, lt=1)]


T = TypeVar("T", bound=Tensor)
# a mini-batch that grows by less, as by rounding, is not worth a warning
MUCH_LARGER = 1.25


class Best:
    """The best of models that are judged one after another, by a score of which more is
    better.

    wanted: whether it is asked for; its parameters are kept then. later: when the later
    of two equal ones is the better one; "at zero": while none has found anything yet.
    """

    def __init__(
        self,
        wanted: bool,
        later: Literal["never", "at zero", "always"],
        lowest: float = -1.0,
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


class Adam:
    """`torch.optim.Adam` over named tensors (Kingma and Ba 2015), updated in place by
    `step`.

    weight_decay: decoupled (AdamW; Loshchilov and Hutter 2019), of all but biases and
    normalisation layers (those with one dimension), as BERT's optimizer has it.
    """

    moments: ClassVar[tuple[str, ...]] = ("step", "exp_avg", "exp_avg_sq")

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        learning_rate: float,
        weight_decay: float = 0.0,
        factors: Mapping[str, float] | None = None,
    ) -> None:
        """factors: of the learning rate, by the first word of a parameter's name; else
        1."""
        self.parameters, self._rate = dict(parameters), learning_rate
        groups: dict[float, list[Tensor]] = {}
        for name, value in self.parameters.items():
            groups.setdefault((factors or {}).get(name.split(".")[0], 1.0), []).append(
                value
            )
        self._optimizer = self._made(groups or {1.0: [torch.zeros(0)]}, weight_decay)

    def _made(
        self, groups: Mapping[float, list[Tensor]], weight_decay: float
    ) -> torch.optim.Optimizer:
        """groups: factor of the learning rate → parameters; torch wants one at least."""
        if not weight_decay:
            made = [
                {"params": values, "factor": factor}
                for factor, values in groups.items()
            ]
            return torch.optim.Adam(made, lr=self._rate, fused=True)
        made = [
            {"params": [v for v in values if (v.dim() > 1) == decays], "factor": factor}
            | {"weight_decay": weight_decay if decays else 0.0}
            for factor, values in groups.items()
            for decays in (True, False)
        ]
        return torch.optim.AdamW(made, lr=self._rate, fused=True)

    def step(
        self,
        gradients: Mapping[str, Tensor | None] | None = None,
        *,
        rate: float | None = None,
    ) -> None:
        """One step along `gradients`, or along each parameter's own `.grad`.

        A parameter whose gradient is None rests. rate: this step's learning rate, if it
        is not the one given first.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = group["factor"] * (self._rate if rate is None else rate)
        if gradients is not None:
            for name, parameter in self.parameters.items():
                parameter.grad = gradients[name]
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def state(self, prefix: str = "adam") -> dict[str, Tensor]:
        """The moments and step counts: names `adam.exp_avg.<parameter>` and so on."""
        return {
            f"{prefix}.{key}.{name}": value
            for name, parameter in self.parameters.items()
            for key, value in self._optimizer.state.get(parameter, {}).items()
        }

    def restore(self, tensors: Tensors, prefix: str = "adam") -> None:
        """Take the moments from what `state` gave; parameters without any start afresh.

        Raises TrainingError for moments that do not fit their parameter.
        """
        self._optimizer.state.clear()
        for name, parameter in self.parameters.items():
            names = {key: f"{prefix}.{key}.{name}" for key in self.moments}
            found = {
                key: tensors[full].to("cpu" if key == "step" else parameter.device)
                for key, full in names.items()
                if full in tensors
            }
            if found:
                like = dict.fromkeys(self.moments, parameter) | {
                    "step": torch.zeros(())
                }
                require_like(like, found)
                self._optimizer.state[parameter] = found


class RMSprop(Adam):
    """RMSprop over named tensors (Tieleman and Hinton 2012), as Keras 2 has it.

    w ← w − rate · g / (√a + 1e-7) with a ← 0.9 a + 0.1 g²: `rho` and `epsilon` are
    Keras'.
    """

    moments = ("step", "square_avg")

    def _made(
        self, groups: Mapping[float, list[Tensor]], weight_decay: float
    ) -> torch.optim.Optimizer:
        made = [
            {"params": values, "factor": factor} for factor, values in groups.items()
        ]
        # [phenotype rmsprop]
        return torch.optim.RMSprop(made, lr=self._rate, alpha=0.9, eps=1e-7)


class RoundServer:
    """What a server keeps from round to round: what is shared, and which of it is the
    best.

    A subclass makes what it keeps besides before it calls this one, which restores
    `resumed`.
    round: how many have ended. metrics: of the last one, for people.
    """

    def __init__(
        self, config: Any, shared: dict[str, Tensor], best: Best, resumed: State | None
    ) -> None:
        self.config, self.shared, self.best = config, shared, best
        self.round = 0
        self.metrics: dict[str, float] = {}
        if resumed is not None:
            with restoring("the newest checkpoint"):
                self._restore(resumed)

    def judge(self, total: Total) -> Any:
        """Note the micro F1 over what the sites' validation data annotate."""
        f1 = self.metrics["valid_f1"] = judged_mentions(total.metrics)["valid_f1"]
        self.best.judge(f1, self.shared)

    def state(self) -> State:
        """Everything that the next round depends on."""
        kept, facts = self.best.state()
        return State(self.round, prefixed("shared.", self.shared) | kept, facts)

    def _restore(self, state: State) -> None:
        load_into(self.shared, below(state.tensors, "shared."))
        self.best.restore(state, self.shared)
        self.round = state.round


def agree_on_shares(federation: Federation) -> tuple[int, int]:
    """Let every site learn Σ_j |S_j|, all sites' examples, and so its part of a
    mini-batch.

    Returns Σ_j |S_j| and the sum of the parts, about the job's batch_size.
    Raises ConfigError where there is no example, TrainingError for sums that no sites
        have.
    """
    examples = int(federation.sum("count").metric("examples"))
    if examples == 0:
        raise ConfigError(
            "no site has a training sentence: check the paths and `fraction`"
        )
    if examples < 0:
        raise TrainingError(
            f"the sites' numbers of examples add up to {examples:,}: one is wrong"
        )
    batch = int(federation.sum("take_share", examples=examples).metric("share"))
    if batch < 1:
        raise TrainingError(
            f"the sites' parts of a mini-batch add up to {batch:,}: one is wrong"
        )
    return examples, batch


def part_of(batch: int, size: int, examples: int, least: int = 1) -> int:
    """A site's part of a mini-batch of all sites together: size / examples · batch to
    the nearest whole number (a half up), not below `least`."""
    return max(least, (2 * size * batch + examples) // (2 * examples))  # [fedner batch]


def least_part(batch: int, sites: int, size: int, asked: int = 0) -> int:
    """The fewest examples that a site of this size holds of a mini-batch, whatever it
    is told of the others: as the job asks, else a quarter of an equal share. sites: 0
    where not known."""
    quarter = -(-batch // (4 * sites)) if sites else 1
    return max(1, min(asked or quarter, size))


def larger_batch_warning(batch: int, shares: Sequence[int]) -> tuple[str, ...]:
    """Return a warning where the sites' parts add up to much more than the job's
    mini-batch.

    Args:
        batch: `batch_size` of the job, in examples of all sites together.
        shares: Each site's part of a mini-batch, in examples, as `part_of` gives it.

    Returns:
        One warning with the numbers and the reason, or none.
    """
    total, least = sum(shares), min(shares, default=0)
    if total <= MUCH_LARGER * batch:
        return ()
    examples = "1 example" if least == 1 else f"{least:,} examples"
    return (
        f"batch_size = {batch:,} becomes {total:,}: each of the {len(shares):,} sites adds at "
        f"least {examples} to every mini-batch, however few notes it has; set batch_size to "
        f"{total:,} or more to choose the size yourself",
    )


def finite(
    loss: Tensor, site: str, where: str, remedy: str = "lower learning_rate"
) -> float:
    """A loss as a number. Raises LossError."""
    value = float(loss.detach())
    if not math.isfinite(value):
        raise LossError(site, value, where, remedy)
    return value


class MentionSite(MethodSite):
    """A site that trains a model to find mentions, and judges it by its own annotation.

    tags: what the model predicts. directory: where the finished model and its scores
    are written; None writes nothing. cache: folder for frozen contextual features
    (`encoders/features.py`); None computes them in memory. draws: where all draws that
    shape an update come from; None: the job's seed, as in a simulation. count_step:
    weights and counts are sent as multiples of it; what is trained, chosen and written
    here goes by exact ones.

    Raises ConfigError if the site has no training sentence.
    """

    with_scores: ClassVar[bool] = True  # beside each model
    tells_forms = True  # which test mentions have a form that training had
    count_step = 1
    shared: dict[str, torch.nn.Parameter]
    private: dict[str, torch.nn.Parameter]

    def __init__(
        self,
        data: SiteData,
        config: Any,
        tags: TagSet,
        directory: Path | None = None,
        device: str = "cpu",
        cache: Path | None = None,
        progress: Callable[[int, int], None] | None = None,
        draws: Draws | None = None,
        count_step: int = 1,
    ) -> None:
        self.data, self.config, self.directory = data, config, directory
        self.draws = draws or Draws(config.seed)
        self.count_step = count_step
        self.model: Model = build_model(config.model, tags, config.seed, device)
        prepare = partial(self.model.prepare, cache=cache, progress=progress)
        self.train_set = prepare(data.train)
        self.valid_set = prepare(data.valid, gold=False)
        self.test_set = prepare(data.test, gold=False)
        self.num_examples = self.train_set.sentences
        if self.num_examples == 0:
            raise ConfigError(f"site {data.id!r} has no training sentence")
        self.scores: dict[str, Any] = {}
        # site → counts of its test documents
        self._by_document: dict[str, NDArray[np.int64]] = {}

    @property
    def id(self) -> str:
        """The site's name in the job."""
        return self.data.id

    def described(self) -> str:
        """What is shared and what stays."""
        shared, own = (
            sum(p.numel() for p in part.values())
            for part in (self.shared, self.private)
        )
        return f"{shared:,} parameters are shared, {own:,} are private to each site"

    @staticmethod
    def judged_types(site: SiteData) -> tuple[str, ...]:
        """The types that predictions on a site's test data are judged by."""
        return site.scored_types

    def counts(
        self, part: Literal["valid", "test"], seen: Collection[str] = ()
    ) -> SpanCounts:
        """Right, wrong and missed mentions in that part of the data.

        seen: forms of mentions that training had.
        """
        if part == "valid":
            documents, corpus, types = (
                self.data.valid,
                self.valid_set,
                self.data.tags.types,
            )
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
        counts = self._test_counts(self.data, self.test_set)
        self.scores = self._scores(counts)
        if self.directory is not None:
            save_model(self.model, self.directory / "model")
            if self.with_scores:
                write_json(self.directory / "scores.json", self.scores)
        return self.report_counts(counts)

    @property
    def reported_examples(self) -> int:
        """The number of training sentences as it leaves the site."""
        return round_count(self.num_examples, self.count_step)

    def report_counts(self, counts: SpanCounts) -> Update:
        """Return counts of mentions as they leave the site."""
        return Update(metrics=round_counts(counts.to_metrics(), self.count_step))

    def scores_on(self, site: SiteData) -> dict[str, Any]:
        """This model's scores on another site's test data, that site's own types only."""
        return self._scores(self._test_counts(site, site.test))

    def document_counts(self, site: str) -> NDArray[np.int64] | None:
        """Return the counts of a site's test documents, (documents, 4); see
        `MethodSite`."""
        return self._by_document.get(site)

    def _test_counts(
        self, site: SiteData, corpus: PreparedCorpus | Sequence[Document]
    ) -> SpanCounts:
        """Judge the present model on a site's test data, and keep the counts by
        document."""
        predicted, types = self.model.predict(corpus), self.judged_types(site)
        self._by_document[site.id] = document_counts(site.test, predicted, types=types)
        return SpanCounts.of(site.test, predicted, seen=self._forms(site), types=types)

    def _forms(self, site: SiteData) -> frozenset[str]:
        return frozenset(forms_of(site.train)) if self.tells_forms else frozenset()

    def _scores(self, counts: SpanCounts) -> dict[str, Any]:
        scores = counts.scores()
        if not self.tells_forms:  # then all count as unseen
            del scores["unseen"]
        return scores

    @property
    def valid_score(self) -> float | None:
        """Strict F1 of the present model on validation data; None where nothing is
        annotated."""
        return self.counts("valid").strict_f1


def judged_mentions(metrics: Mapping[str, float]) -> dict[str, float]:
    """Micro F1, strict, over all sites' validation mentions."""
    counts = SpanCounts.from_metrics(metrics)
    f1 = float(counts.scores()["strict"]["f1"])
    return {"held_out": f1 if counts.total.gold else -math.inf, "valid_f1": f1}


def rising(places: Tensor, stop: int) -> bool:
    """Whether these are places before `stop`, each once and in order."""
    within = (places >= 0) & (places < stop)
    return places.dim() == 1 and bool(within.all()) and bool((places.diff() > 0).all())


def all_tags(sites: Sequence[SiteData]) -> TagSet:
    """The complete tag set, the union over the sites."""
    return reduce(TagSet.union, (site.tags for site in sites))


def begun_from(config: Any) -> tuple[str, ...]:
    """A warning where models begin as an earlier classifier, with the types that are
    taken over. config: a method's; where its `tags` are not known yet, of all types
    there."""
    if not isinstance(model := config.model, TokenClassifierConfig):
        return ()
    wanted: TagSet = config.tags
    found = [
        t for t in earlier_types(model.encoder) if t in wanted.types or not wanted.types
    ]
    told = (
        f"the encoder is an earlier classifier: its outputs for {', '.join(found)} are taken "
        "over, the others begin anew; every site must have this very folder"
    )
    return (told,) if found else ()


def parted(
    parameters: Mapping[str, T], private: Collection[str]
) -> tuple[dict[str, T], dict[str, T]]:
    """The parameters that are shared, and those of the private layers."""
    own = {name: p for name, p in parameters.items() if name.split(".")[0] in private}
    return {name: p for name, p in parameters.items() if name not in own}, own


def save_global(
    model: ModelConfig, tags: TagSet, seed: int, final: State, folder: Path
) -> bool:
    """Write the model of mentions that all sites end with: the one that was kept, if
    one was."""
    made = build_model(model, tags, seed)
    parameters = made.trainable()
    load_into(parameters, ended(final, parameters))
    save_model(made, folder)
    return True


def ended(final: State, names: Collection[str]) -> dict[str, Tensor]:
    """The parameters that a run ends with: those it kept as the best, if it did."""
    found = below(final.tensors, "best.") or below(final.tensors, "shared.")
    return {name: found[name] for name in names}
