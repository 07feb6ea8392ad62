"""Optimizers, model selection, and sites that train models to find mentions."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.rmsprop import rmsprop

from fednotes.core.counts import round_count, round_counts
from fednotes.core.errors import ConfigError, LossError, TrainingError
from fednotes.core.federation import Federation, MethodSite, State
from fednotes.core.seeds import Draws
from fednotes.core.store import write_json
from fednotes.core.tensors import (
    add_prefix,
    copy_tensors,
    load_into,
    require_like,
    restoring,
    select_prefix,
)
from fednotes.core.types import Document, SiteData, TagSet
from fednotes.core.update import Tensors, Total, Update
from fednotes.metrics.spans import SpanCounts, collect_forms, count_by_document
from fednotes.taggers.corpora import EncoderCorpus, PreparedCorpus
from fednotes.taggers.model import Model, ModelConfig
from fednotes.taggers.saving import build_model, save_model
from fednotes.taggers.token_classifier import TokenClassifierConfig, read_earlier_types

T = TypeVar("T", bound=Tensor)
# Smaller growth of a mini-batch, such as by rounding, needs no warning.
MUCH_LARGER = 1.25


class Best:
    """The best of a sequence of models; a larger score is better.

    Args:
        keeps_tensors: Whether the parameters of the best model are kept, because it is
            the result.
        later: When the later of two models with equal scores wins; "at zero" means only
            while all scores are 0.
        lowest: A score below all possible scores.

    Attributes:
        score: The best score so far.
        waited: Number of models scored since the best one.
        tensors: The parameters of the best model; empty unless `keeps_tensors`.
    """

    def __init__(
        self,
        *,
        keeps_tensors: bool,
        later: Literal["never", "at zero", "always"],
        lowest: float = -1.0,
    ) -> None:
        self.keeps_tensors = keeps_tensors
        self.score = lowest
        self.waited = 0
        self.tensors: dict[str, Tensor] = {}
        self._later = later

    def judge(self, score: float, tensors: Tensors) -> bool:
        """Record the current model's score; return whether its parameters are kept.

        Args:
            score: The current model's score.
            tensors: The model's parameters.
        """
        wins_ties = self._later == "always" or (self._later == "at zero" and score == 0)
        is_better = score > self.score or (wins_ties and score == self.score)
        if not is_better:
            self.waited += 1
            return False

        self.waited = 0
        self.score = score
        self.tensors = copy_tensors(tensors) if self.keeps_tensors else {}
        return self.keeps_tensors

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors and facts to save."""
        score = self.score if math.isfinite(self.score) else None
        return add_prefix("best.", self.tensors), {"best": score, "waited": self.waited}

    def restore(self, state: State, like: Tensors) -> None:
        """Restore a saved state.

        Args:
            state: The state.
            like: Parameters with the names and shapes that saved ones must have.
        """
        self.tensors = select_prefix("best.", state.tensors)
        if self.tensors:
            require_like(like, self.tensors)
        score = state.facts["best"]
        self.score = -math.inf if score is None else float(score)
        self.waited = int(state.facts["waited"])


class _Group(NamedTuple):
    """Parameters that an optimizer moves alike.

    Attributes:
        names: Their names.
        factor: Factor of their learning rate.
        weight_decay: Their weight decay.
    """

    names: list[str]
    factor: float
    weight_decay: float


def _group_parameters(
    parameters: Mapping[str, Tensor],
    weight_decay: float,
    factors: Mapping[str, float],
) -> list[_Group]:
    """Return the groups of an optimizer's parameters.

    Args:
        parameters: The parameters by name.
        weight_decay: Weight decay of those that have several dimensions.
        factors: Learning-rate factors by the first word of a parameter's name.
    """
    names: dict[tuple[float, float], list[str]] = {}
    for name, value in parameters.items():
        factor = factors.get(name.split(".")[0], 1.0)
        decay = weight_decay if value.dim() > 1 else 0.0
        names.setdefault((factor, decay), []).append(name)
    return [_Group(alike, factor, decay) for (factor, decay), alike in names.items()]


class Adam:
    """Adam over named tensors (Kingma and Ba 2015), in torch's implementation.

    It calls the function behind `torch.optim.Adam`. That class imports torch's
    compiler, which takes almost a second and 70 MiB in every process.

    Args:
        parameters: The parameters that `step` changes in place, by name.
        learning_rate: The learning rate.
        weight_decay: Decoupled weight decay (AdamW; Loshchilov and Hutter 2019) of all
            parameters except one-dimensional ones (biases and normalisation layers), as
            in BERT's optimizer.
        factors: Learning-rate factors by the first word of a parameter's name; 1 for
            all others.
    """

    moments: ClassVar[tuple[str, ...]] = ("step", "exp_avg", "exp_avg_sq")

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        learning_rate: float,
        weight_decay: float = 0.0,
        factors: Mapping[str, float] | None = None,
    ) -> None:
        self.parameters = dict(parameters)
        self._rate = learning_rate
        self._torch_step = adamw if weight_decay else adam
        self._groups = _group_parameters(self.parameters, weight_decay, factors or {})
        # The moments of parameters that have moved, by name.
        self._state: dict[str, dict[str, Tensor]] = {}

    @torch.no_grad()
    def step(
        self,
        gradients: Mapping[str, Tensor | None] | None = None,
        *,
        rate: float | None = None,
    ) -> None:
        """Take a step and clear the gradients.

        Args:
            gradients: The gradient of each parameter by name, None for parameters that
                do not move. By default each parameter's `.grad`.
            rate: The learning rate of this step; None takes the optimizer's.
        """
        if gradients is not None:
            for name, parameter in self.parameters.items():
                parameter.grad = gradients[name]

        for group in self._groups:
            self._move_group(group, self._rate if rate is None else rate)
        for parameter in self.parameters.values():
            parameter.grad = None
        for function in _after_steps:
            function()

    def _move_group(self, group: _Group, rate: float) -> None:
        """Move the parameters of a group that have gradients."""
        moving: list[Tensor] = []
        gradients: list[Tensor] = []
        states: list[dict[str, Tensor]] = []
        for name in group.names:
            parameter = self.parameters[name]
            if parameter.grad is None:
                continue
            if name not in self._state:
                self._state[name] = self._make_moments(parameter)
            moving.append(parameter)
            gradients.append(parameter.grad)
            states.append(self._state[name])
        if moving:
            moments = {key: [state[key] for state in states] for key in self.moments}
            self._call_torch(moving, gradients, moments, group, rate * group.factor)

    def _make_moments(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the moments of a parameter before its first step."""
        return {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }

    def _call_torch(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        moments: Mapping[str, list[Tensor]],
        group: _Group,
        rate: float,
    ) -> None:
        """Let torch move parameters of a group, and update their moments."""
        self._torch_step(
            parameters,
            gradients,
            moments["exp_avg"],
            moments["exp_avg_sq"],
            [],  # max_exp_avg_sqs, which AMSGrad needs
            moments["step"],
            fused=True,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=rate,
            weight_decay=group.weight_decay,
            eps=1e-8,
            maximize=False,
        )

    def state(self, prefix: str = "adam") -> dict[str, Tensor]:
        """Return moments and step counts as `adam.exp_avg.<parameter>` and so on."""
        return {
            f"{prefix}.{key}.{name}": value
            for name in self.parameters
            for key, value in self._state.get(name, {}).items()
        }

    def restore(self, tensors: Tensors, prefix: str = "adam") -> None:
        """Restore moments from `state`; parameters without moments start afresh.

        Raises:
            TrainingError: Moments do not match their parameter.
        """
        self._state.clear()
        saved = select_prefix(f"{prefix}.", tensors)
        for name, parameter in self.parameters.items():
            fresh = self._make_moments(parameter)
            moments = {
                key: saved[f"{key}.{name}"].to(moment.device)
                for key, moment in fresh.items()
                if f"{key}.{name}" in saved
            }
            if moments:
                require_like(fresh, moments)
                self._state[name] = moments


class RMSprop(Adam):
    """RMSprop over named tensors (Tieleman and Hinton 2012), as in Keras 2.

    w ← w − rate · g / (√a + 1e-7) with a ← 0.9 a + 0.1 g²: `rho` and `epsilon` are
    Keras'.
    """

    moments = ("step", "square_avg")

    def _make_moments(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the moments of a parameter before its first step."""
        return {"step": torch.zeros(()), "square_avg": torch.zeros_like(parameter)}

    def _call_torch(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        moments: Mapping[str, list[Tensor]],
        group: _Group,
        rate: float,
    ) -> None:
        """Let torch move parameters of a group, and update their moments."""
        del group
        rmsprop(  # [phenotype rmsprop]
            parameters,
            gradients,
            moments["square_avg"],
            [],  # grad_avgs, which the centered form needs
            [],  # momentum_buffer_list
            moments["step"],
            lr=rate,
            alpha=0.9,
            eps=1e-7,
            weight_decay=0.0,
            momentum=0.0,
            centered=False,
        )


# Called after each step of every optimizer.
_after_steps: list[Callable[[], None]] = []


@contextmanager
def calling_after_steps(function: Callable[[], None]) -> Iterator[None]:
    """Call a function after each step of every optimizer in the context."""
    _after_steps.append(function)
    try:
        yield
    finally:
        _after_steps.remove(function)


class RoundServer:
    """A server's state between rounds: the shared parameters and the best ones.

    A subclass must create its other state before it calls this `__init__`, which
    restores `resumed`.

    Args:
        config: The settings of the run.
        shared: The shared parameters before training.
        best: The rule by which a model is kept.
        resumed: The state to resume from; None at the first start.

    Attributes:
        round: Number of completed rounds.
        metrics: Scores and losses of the last round, for reports.
    """

    def __init__(
        self, config: Any, shared: dict[str, Tensor], best: Best, resumed: State | None
    ) -> None:
        self.config = config
        self.shared = shared
        self.best = best
        self.round = 0
        self.metrics: dict[str, float] = {}
        if resumed is not None:
            with restoring("the newest checkpoint"):
                self._restore(resumed)

    def judge(self, total: Total) -> Any:
        """Record the micro F1 over all sites' validation mentions."""
        f1 = summarise_mentions(total.metrics)["valid_f1"]
        self.metrics["valid_f1"] = f1
        self.best.judge(f1, self.shared)

    def state(self) -> State:
        """Return all state that the next round depends on."""
        best, facts = self.best.state()
        return State(self.round, add_prefix("shared.", self.shared) | best, facts)

    def _restore(self, state: State) -> None:
        load_into(self.shared, select_prefix("shared.", state.tensors))
        self.best.restore(state, self.shared)
        self.round = state.round


def agree_on_shares(federation: Federation) -> tuple[int, int]:
    """Send every site Σ_j |S_j|, from which it derives its part of a mini-batch.

    Returns:
        Σ_j |S_j|, the number of examples of all sites, and the sum of the parts, which
        is about the job's batch_size.

    Raises:
        ConfigError: No site has an example.
        TrainingError: A sum is impossible, so the number of some site is wrong.
    """
    examples = int(federation.sum("count").metric("examples"))
    if examples == 0:
        raise ConfigError(
            "no site has a training sentence: check the paths and `fraction`"
        )
    if examples < 0:
        raise TrainingError(
            f"the sites' numbers of examples add up to {examples:,}, so one of them is "
            "wrong"
        )
    batch = int(federation.sum("take_share", examples=examples).metric("share"))
    if batch < 1:
        raise TrainingError(
            f"the sites' parts of a mini-batch add up to {batch:,}, so one of them is "
            "wrong"
        )
    return examples, batch


def keep_first_sum(known: int, examples: int, size: int) -> int:
    """Return the number of examples of all sites that the server sent first.

    A site divides its own number of examples by this number to get its part of a
    mini-batch. If the site checked or used each number that the server sends, the
    server could try different numbers and infer the site's own number from the replies.

    Args:
        known: The result of the first call in a run; 0 before it.
        examples: The number that the server sent.
        size: The site's number of examples, used if the server's number is smaller.
    """
    return known or max(examples, size)


def compute_part(batch: int, size: int, examples: int, least: int = 1) -> int:
    """Return a site's part of a mini-batch over all sites: size / examples · batch.

    It is rounded to the nearest integer (a half up).

    Args:
        batch: Examples in a mini-batch of all sites together.
        size: Number of the site's examples.
        examples: Number of all sites' examples.
        least: Minimum part.
    """
    return max(least, (2 * size * batch + examples) // (2 * examples))  # [fedner batch]


def compute_least_part(batch: int, sites: int, size: int, wanted: int = 0) -> int:
    """Return the minimum examples of a site in a mini-batch, whatever others have.

    Args:
        batch: Examples in a mini-batch of all sites together.
        sites: Number of sites; 0 if unknown.
        size: Number of the site's examples.
        wanted: The job's minimum; 0 is a quarter of an equal share.
    """
    quarter = -(-batch // (4 * sites)) if sites else 1
    return max(1, min(wanted or quarter, size))


def list_batch_warnings(batch: int, shares: Sequence[int]) -> tuple[str, ...]:
    """Return a warning if the parts add up to much more than the job's mini-batch.

    Args:
        batch: `batch_size` of the job, in examples of all sites together.
        shares: Each site's part of a mini-batch, in examples (`compute_part`).

    Returns:
        One warning with the numbers and the reason, or an empty tuple.
    """
    total = sum(shares)
    if total <= MUCH_LARGER * batch:
        return ()
    smallest = min(shares)
    examples = "1 example" if smallest == 1 else f"{smallest:,} examples"
    return (
        f"batch_size = {batch:,} becomes {total:,}: each of the {len(shares):,} sites "
        f"adds at least {examples} to every mini-batch, however few notes it has; set "
        f"batch_size to {total:,} or more to choose the size yourself",
    )


def require_finite_loss(
    loss: Tensor, site: str, where: str, remedy: str = "lower learning_rate"
) -> float:
    """Return a loss, (), as a number; raise LossError unless it is finite.

    Args:
        loss: The loss.
        site: The site's name, for the message.
        where: The step at which it was computed, for the message.
        remedy: A likely remedy, for the message.

    Raises:
        LossError: The loss is not finite.
    """
    value = float(loss.detach())
    if not math.isfinite(value):
        raise LossError(site, value, where, remedy)
    return value


class MentionSite(MethodSite):
    """A site that trains a mention model and evaluates it against its annotation.

    Args:
        data: The site's documents.
        config: The settings of the run.
        tags: The tags that the model predicts.
        directory: Folder for the finished model and its scores; if None, nothing is
            written.
        device: Device that holds the model.
        cache: Folder for frozen contextual features (`encoders/features.py`); None
            computes them in memory.
        progress: Called with the number of features computed so far and the total.
        draws: Source of all randomness in an update; derived from the job's seed if
            None, as in a simulation.
        count_step: Weights and counts leave the site as multiples of this number;
            everything that stays at the site uses exact numbers.

    Attributes:
        with_scores: Whether scores are written next to each model.
        tells_forms: Whether scores separate test mentions by whether they have a form
            seen in training.
        shared: The parameters that leave the site.
        private: The parameters that stay at the site.
        scores: The scores on the site's test data, after "finish".

    Raises:
        ConfigError: The site has no training sentence.
    """

    with_scores: ClassVar[bool] = True
    tells_forms = True
    count_step = 1
    shared: dict[str, torch.nn.Parameter]
    private: dict[str, torch.nn.Parameter]

    def __init__(  # noqa: PLR0913 - the options of every method
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
        self.data = data
        self.config = config
        self.directory = directory
        self.draws = draws or Draws(config.seed)
        self.count_step = count_step
        model = config.model.for_types(tags.types)
        self.model: Model = build_model(model, tags, config.seed, device)
        prepare = partial(self.model.prepare, cache=cache, progress=progress)
        self.train_set = prepare(data.train)
        self.valid_set = prepare(data.valid, gold=False)
        self.test_set = prepare(data.test, gold=False)
        self.num_examples = self.train_set.sentences
        if self.num_examples == 0:
            raise ConfigError(f"site {data.id!r} has no training sentence")
        self.scores: dict[str, Any] = {}
        # Counts of each site's test documents, (documents, 4), by the site's name.
        self._by_document: dict[str, NDArray[np.int64]] = {}

    @property
    def id(self) -> str:
        """The site's name in the job."""
        return self.data.id

    def describe_parameters(self) -> str:
        """Describe how many parameters are shared and private."""
        shared = sum(parameter.numel() for parameter in self.shared.values())
        private = sum(parameter.numel() for parameter in self.private.values())
        return f"{shared:,} parameters are shared, {private:,} are private to each site"

    @staticmethod
    def list_judged_types(site: SiteData) -> tuple[str, ...]:
        """Return the types by which predictions on a site's test data are scored."""
        return site.scored_types

    def count_mentions(
        self, part: Literal["valid", "test"], seen: Collection[str] = ()
    ) -> SpanCounts:
        """Count the right, wrong and missed mentions in a part of the data.

        Args:
            part: The part of the data.
            seen: Forms of mentions in the training data.
        """
        if part == "valid":
            documents = self.data.valid
            corpus = self.valid_set
            types: tuple[str, ...] = self.data.tags.types
        else:
            documents = self.data.test
            corpus = self.test_set
            types = self.list_judged_types(self.data)
        predicted = self.model.predict(corpus)
        return SpanCounts.of(documents, predicted, seen=frozenset(seen), types=types)

    def test_and_save(self) -> Update:
        """Test and save the current model; return the counts."""
        counts = self._evaluate_on_test_data(self.data, self.test_set)
        self.scores = self._compute_scores(counts)
        if self.directory is not None:
            save_model(self.model, self.directory / "model")
            if self.with_scores:
                write_json(self.directory / "scores.json", self.scores)
        return self.report_counts(counts)

    @property
    def reported_examples(self) -> int:
        """The number of training sentences, rounded as it leaves the site."""
        return round_count(self.num_examples, self.count_step)

    def report_counts(self, counts: SpanCounts) -> Update:
        """Return counts of mentions, rounded as they leave the site."""
        return Update(metrics=round_counts(counts.to_metrics(), self.count_step))

    def score_on(self, site: SiteData) -> dict[str, Any]:
        """Return this model's scores on another site's test data, for its types."""
        counts = self._evaluate_on_test_data(site, site.test)
        return self._compute_scores(counts)

    def measure_reading(self) -> dict[str, int]:
        """Return the numbers of words and sub-words; see `MethodSite`."""
        corpus = self.train_set
        if not isinstance(corpus, EncoderCorpus):
            return {}
        return {"words": int(corpus.words.sum()), "pieces": len(corpus.pieces.ids)}

    def find_document_counts(self, site: str) -> NDArray[np.int64] | None:
        """Return the counts of a site's test documents; see `MethodSite`."""
        return self._by_document.get(site)

    def _evaluate_on_test_data(
        self, site: SiteData, corpus: PreparedCorpus | Sequence[Document]
    ) -> SpanCounts:
        """Return the current model's counts on a site's test data.

        The counts of each document are stored, for `find_document_counts`.

        Args:
            site: The site.
            corpus: Its test documents, prepared or as they are.
        """
        predicted = self.model.predict(corpus)
        types = self.list_judged_types(site)
        self._by_document[site.id] = count_by_document(
            site.test, predicted, types=types
        )
        return SpanCounts.of(
            site.test, predicted, seen=self._find_forms(site), types=types
        )

    def _find_forms(self, site: SiteData) -> frozenset[str]:
        """Return the forms of a site's training mentions, if scores separate them."""
        return collect_forms(site.train) if self.tells_forms else frozenset()

    def _compute_scores(self, counts: SpanCounts) -> dict[str, Any]:
        """Return the scores computed from counts of mentions."""
        scores = counts.scores()
        if not self.tells_forms:
            del scores["unseen"]  # without forms, all mentions count as unseen
        return scores

    @property
    def valid_score(self) -> float | None:
        """Strict F1 of the current model on validation data; None without mentions."""
        return self.count_mentions("valid").strict_f1


def summarise_mentions(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the strict micro F1 over all sites' validation mentions.

    Returns:
        "valid_f1", and "held_out", which is the same or -inf without mentions.
    """
    counts = SpanCounts.from_metrics(metrics)
    f1 = float(counts.scores()["strict"]["f1"])
    return {"held_out": f1 if counts.total.gold else -math.inf, "valid_f1": f1}


def is_ascending(positions: Tensor, stop: int) -> bool:
    """Return whether these are strictly ascending positions from 0 to `stop` - 1."""
    is_within = (positions >= 0) & (positions < stop)
    is_vector = positions.dim() == 1
    rises = bool((positions.diff() > 0).all())
    return is_vector and bool(is_within.all()) and rises


def unite_tags(sites: Sequence[SiteData]) -> TagSet:
    """Return the complete tag set, the union over the sites.

    Raises:
        ConfigError: Some sites keep overlapping mentions and others do not.
    """
    keeping = [site.id for site in sites if site.tags.overlaps]
    if 0 < len(keeping) < len(sites):
        other = next(site.id for site in sites if not site.tags.overlaps)
        raise ConfigError(
            f'site {keeping[0]!r} keeps overlapping mentions (flatten = "keep"), and '
            f"site {other!r} does not: set the same `flatten` at all sites"
        )
    return reduce(TagSet.union, (site.tags for site in sites))


def list_earlier_classifier_warnings(config: Any) -> tuple[str, ...]:
    """Return a warning if models start from an already trained classifier.

    Args:
        config: A method's settings. If its `tags` are not known yet, the warning names
            all types of the earlier classifier.
    """
    model = config.model
    if not isinstance(model, TokenClassifierConfig):
        return ()
    wanted: TagSet = config.tags
    types = [
        type
        for type in read_earlier_types(model.encoder)
        if not wanted.types or type in wanted.types
    ]
    if not types:
        return ()
    return (
        (
            "the encoder is an earlier classifier: its outputs for "
            f"{', '.join(types)} are reused, and the others start at random; "
            "every site must have this same folder"
        ),
    )


def split_private(
    parameters: Mapping[str, T], private: Collection[str]
) -> tuple[dict[str, T], dict[str, T]]:
    """Split parameters into the shared ones and those of the private layers."""
    shared: dict[str, T] = {}
    of_private: dict[str, T] = {}
    for name, parameter in parameters.items():
        layer = name.split(".")[0]
        (of_private if layer in private else shared)[name] = parameter
    return shared, of_private


def save_global_model(
    model: ModelConfig, tags: TagSet, seed: int, final: State, folder: Path
) -> bool:
    """Write the mention model that all sites end with; return True.

    Args:
        model: The model's settings.
        tags: The tags that it predicts.
        seed: The job's seed.
        final: The server's final state.
        folder: Folder to which the model is written.
    """
    global_model = build_model(model, tags, seed)
    parameters = global_model.trainable()
    load_into(parameters, select_final(final, parameters))
    save_model(global_model, folder)
    return True


def select_final(final: State, names: Collection[str]) -> dict[str, Tensor]:
    """Return the final parameters of a run: the best model's if kept, else the last."""
    parameters = select_prefix("best.", final.tensors) or select_prefix(
        "shared.", final.tensors
    )
    return {name: parameters[name] for name in names}
