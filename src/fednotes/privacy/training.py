"""Training with differential privacy, for methods whose sites descend one gradient.

Abadi et al. 2016, "Deep learning with differential privacy", with the noise of many
sites in whole numbers (Kairouz, Liu, Steinke 2021, "The distributed discrete Gaussian
mechanism").

    q       `Privacy.rate`: each unit of a site is drawn into a round with this
            probability, whoever else is drawn
    g_u     the gradient of a unit's mean loss, over shared and private layers, as one
            vector
    C       `Privacy.clip`: g_u · min(1, C / |g_u|), then cut to the grid towards zero
    σ       `Promise.noise`, of a sum. A site adds `Promise.share` to what is shared.
            To its private layers, which nobody else's noise hides, it adds all of σ.
    N       `Config.batch_size`, a constant: no number of units leaves a site, and none
            divides here

A site adds whole numbers of its grid, so a sum is exact, also under the secure sum, and
its sensitivity is C, because cutting towards zero lengthens no vector. Only that sum
leaves: no loss, no number of sentences, no count of an evaluation. docs/privacy.md has
the argument.
"""

from __future__ import annotations

import logging
import math
import platform
import secrets
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fednotes.core.errors import ConfigError, RefusedError
from fednotes.core.federation import Federation, MethodSite, State
from fednotes.core.tensors import (
    load_into,
    prefixed,
    seed_torch,
    shapes_of,
    snapshot,
    tensor_fingerprint,
    unprefixed,
)
from fednotes.core.types import SiteData
from fednotes.core.update import Tensors, Total, Update
from fednotes.metrics.spans import SpanCounts
from fednotes.privacy.noise import SCALE, Stream, chosen, cut, discrete_gaussian
from fednotes.privacy.promise import COUNTS, Promise, Unit
from fednotes.privacy.secure_sum.crypto import digest, receipt
from fednotes.privacy.units import group_documents, group_sentences
from fednotes.training.sites import Adam, Best, RoundServer

NOISY = "noisy_gradients"  # the task of a round
AGREED = "agreed."  # in states, before the names of what was agreed before training
TOGETHER = 64  # sentences of a unit in one pass
MENTION_COUNTS = 3  # right predictions, predictions, gold mentions
logger = logging.getLogger(__name__)


class DPSupport(ABC):
    """How a method trains with differential privacy.

    A method declares an instance as `dp`. A subclass must define the abstract methods.
    The others describe a method that finds mentions, whose noisy counts are those of
    the last model's mentions.

    Attributes:
        required_settings: Settings that must have one value under [privacy]; a job need
            not give them.
        counts_before_training: Whether the noisy counts of `Privacy.counts` come before
            training, which begins with what follows from them (`agree`). Otherwise they
            judge the last round's model.
        example_names: What a site's policy calls the examples behind a sum.
    """

    required_settings: Mapping[str, Any] = MappingProxyType({})
    counts_before_training: ClassVar[bool] = False
    example_names: ClassVar[tuple[str, ...]] = ("batch",)

    @abstractmethod
    def initial(self, config: Any, agreed: Tensors) -> dict[str, Tensor]:
        """Return what sites share before training.

        Args:
            config: The settings of the run.
            agreed: What `agree` returned; empty where nothing is agreed.
        """

    @abstractmethod
    def loss(self, site: Any, indices: np.ndarray) -> Tensor:
        """Return the mean loss, (), of some sentences, or of what `units` numbers."""

    @abstractmethod
    def count_rounds(self, config: Any, sums_per_epoch: int) -> int:
        """Return the largest number of rounds, at `sums_per_epoch` rounds an epoch."""

    def units(self, site: Any, unit: Unit) -> list[np.ndarray]:
        """Return the numbers of each unit's sentences, as `loss` takes them."""
        return group_sentences(site, unit)

    def digest(self, data: Any) -> bytes:
        """Return a digest of a site's training data."""
        texts = ((d.id, str(d.patient), d.text, repr(d.spans)) for d in data.train)
        return digest(*(part for document in texts for part in document))

    def begin(self, site: Any, agreed: Tensors) -> None:
        """Prepare a site before its first answer, with what all sites agreed on."""
        del site, agreed

    def prepare_round(self, site: Any, round: int, memory: Tensors) -> Tensors:
        """Prepare a site for an answer, after it took the parameters of the question.

        Parameters that require no gradient afterwards are not trained in this round.

        Args:
            site: The site.
            round: The round's number.
            memory: What the call before this one returned; empty at first.

        Returns:
            Tensors that the site keeps for its next answer. They must follow from
            parameters alone.
        """
        del site, round
        return memory

    # The noisy counts of `Privacy.counts`, by default those of mentions.

    def count_size(self, config: Any) -> int:
        """Return how many numbers the noisy counts are; 0 if there is nothing to count.

        For mentions: right predictions, predictions, gold mentions.
        """
        del config
        return MENTION_COUNTS

    def counted_units(self, site: Any, unit: Unit) -> Sequence[Any]:
        """Return what is counted of each unit, as `count_unit` takes it."""
        return group_documents(site.id, site.data.valid, unit)

    def count_unit(
        self, site: Any, counted: Any
    ) -> tuple[Sequence[int] | np.ndarray, Sequence[float] | np.ndarray]:
        """Return the places of one unit's counts, and the counts there."""
        types = site.data.tags.types  # a site annotates no others
        predicted = site.model.predict(counted)
        total = SpanCounts.of(counted, predicted, types=types).total
        counts = [float(total.strict), float(total.predicted), float(total.gold)]
        return range(MENTION_COUNTS), counts

    def agree(self, config: Any, counts: np.ndarray, deviation: float) -> Tensors:
        """Return what training begins with, where counts come before it.

        Args:
            config: The settings of the run.
            counts: The sum of all sites' noisy counts, (count_size,).
            deviation: Standard deviation of the noise in each number.
        """
        del config, counts, deviation
        return {}

    # What follows from these.

    def is_counting(self, config: Any) -> bool:
        """Return whether a run publishes noisy counts."""
        return bool(config.privacy.counts) and self.count_size(config) > 0

    def agrees_first(self, config: Any) -> bool:
        """Return whether training begins with noisy counts."""
        return self.counts_before_training and self.is_counting(config)

    def require(self, config: Any) -> None:
        """Check that the settings allow training with differential privacy.

        Raises:
            ConfigError: A setting has another value than it must have, or the job asks
                for counts and has nothing to count.
        """
        if config.privacy.counts and not self.count_size(config):
            raise ConfigError(
                "[privacy] counts: this job has nothing to count: leave it out"
            )
        for name, required in self.required_settings.items():
            value = getattr(config, name)
            if value != required:
                raise ConfigError(
                    f"{name} = {value!r}: under [privacy] it must be {required!r}, "
                    "because each round is one sum of clipped gradients and nothing "
                    "else leaves a site"
                )

    def make_promise(self, config: Any) -> Promise:
        """Return what a run with these settings promises.

        Raises:
            ConfigError: No noise can keep the promise.
        """
        privacy = config.privacy
        rounds = self.count_rounds(config, privacy.epoch)
        return Promise.of(privacy, rounds, config.sites, config.min_sites)


def train(federation: Federation, config: Any, support: DPSupport) -> State:
    """Train all rounds of a promise: in each, a sum of clipped gradients, and a step.

    Args:
        federation: The sites, as `DPSite`.
        config: The settings of the run; `config.privacy` is set.
        support: How the method trains with differential privacy.

    Returns:
        The server's last state.
    """
    promise = support.make_promise(config)
    resumed = federation.resume()
    if resumed is not None:
        agreed: Tensors = unprefixed(AGREED, resumed.tensors)
    elif support.agrees_first(config):
        agreed = _agree(federation, config, support, promise)
    else:
        agreed = {}

    server = Server(config, promise, support.initial(config, agreed), resumed)
    server.agreed = agreed
    judges_last_model = bool(config.privacy.counts) and not support.agrees_first(config)
    every = config.evaluate_every * promise.privacy.epoch
    for round in federation.rounds(server.round, promise.rounds):
        server.step(federation.sum(NOISY, server.shared, round=round.number))
        is_last = server.round == promise.rounds
        is_reported = is_last or server.round % every == 0

        server.metrics = {}
        if is_reported:
            server.metrics["epsilon"] = promise.epsilon(server.round)
        if is_last and judges_last_model:
            server.judge(federation.sum(COUNTS, server.shared, round=round.number))
        round.commit(server.state(), server.metrics, evaluated=is_reported)
    federation.sum("finish", server.shared)
    return server.state()


def _agree(
    federation: Federation, config: Any, support: DPSupport, promise: Promise
) -> Tensors:
    """Sum the sites' noisy counts; tell the sites what follows from them."""
    total = federation.sum(COUNTS, round=0)
    total.require({COUNTS: (support.count_size(config),)})
    counts = total.tensors[COUNTS].double() * promise.counted
    deviation = promise.counted * SCALE * math.sqrt(max(1, config.sites))
    agreed = support.agree(config, counts.numpy(), deviation)
    federation.sum("begin", agreed)
    return agreed


class Server(RoundServer):
    """What sites share, its optimizer, and what was agreed before training.

    Args:
        config: The settings of the run.
        promise: What the run promises.
        initial: What sites share before training.
        resumed: The state to go on from, if any.
    """

    agreed: Tensors

    def __init__(
        self,
        config: Any,
        promise: Promise,
        initial: dict[str, Tensor],
        resumed: State | None,
    ) -> None:
        self._adam = Adam(initial, config.learning_rate)
        self._unit = promise.grids[0] / config.batch_size  # [abadi descent]
        self._counted = promise.counted
        super().__init__(config, initial, Best(wanted=False, later="never"), resumed)

    def step(self, total: Total) -> None:
        """θ_s ← θ_s − α (Σ clipped g_u + noise) / N, by Adam."""
        # A method of two stages trains some of what is shared in each of them.
        shapes = shapes_of(self.shared)
        total.require({name: shapes[name] for name in total.tensors if name in shapes})
        gradients: dict[str, Tensor | None] = dict.fromkeys(self.shared)
        for name, value in total.tensors.items():
            gradients[name] = (value * self._unit).float()  # [abadi descent]
        self._adam.step(gradients)  # [abadi descent]
        self.round += 1

    def judge(self, total: Total) -> None:
        """Note the micro F1 that follows from the sites' noisy counts of mentions."""
        total.require({COUNTS: (MENTION_COUNTS,)})
        counts = total.tensors[COUNTS].double() * self._counted
        right, predicted, gold = counts.tolist()
        f1 = 2 * right / max(1.0, predicted + gold)
        self.metrics["valid_f1"] = min(1.0, max(0.0, f1))

    def state(self) -> State:
        """Return everything that the next round depends on."""
        state = super().state()
        tensors = {
            **state.tensors,
            **prefixed(AGREED, self.agreed),
            **self._adam.state(),
        }
        return replace(state, tensors=tensors)

    def _restore(self, state: State) -> None:
        super()._restore(state)
        self._adam.restore(state.tensors)


class DPSite(MethodSite):
    """A site from which nothing leaves but noisy sums.

    Which units are in a round, and their dropout, follow from the secret and from all
    that the round's answer depends on. Their noise follows from these and from the very
    sum that it is added to. So what is done again after a fault has the same answer,
    and no two different sums have the same noise.

    Args:
        site: The method's own site, whose model is trained. It gets `tells_forms =
            False`.
        data: What the site holds.
        config: The settings of the run; `config.privacy` is set.
        support: How the method trains with differential privacy.
        secret: 32 bytes that are this site's alone, because whoever knows them can take
            its noise off. New ones are drawn if None.
        question: Returns the name by which the secure sum knows the present request; at
            most one sum of it is opened.

    Raises:
        ConfigError: The training data do not say which unit they belong to, or `delta`
            promises nothing to so many units.
    """

    tasks: ClassVar[frozenset[str]] = frozenset({NOISY, COUNTS, "begin", "finish"})
    rounds_counts = True  # no number leaves without noise

    def __init__(
        self,
        site: Any,
        data: Any,
        config: Any,
        support: DPSupport,
        *,
        secret: bytes | None = None,
        question: Callable[[], bytes] = bytes,
    ) -> None:
        self.site = site
        self.site.tells_forms = False
        self.support = support
        self.promise = support.make_promise(config)
        self.num_examples = site.num_examples
        self.scores = site.scores
        self.steps = 0
        self.lost = 0  # answers whose every gradient failed, so that noise alone left
        self._config = config
        self._noise_secret = secret or secrets.token_bytes(32)
        self._question = question
        self._kept: Tensors = {}
        self._data = support.digest(data)

        unit, delta = self.promise.privacy.unit, self.promise.privacy.delta
        self.units = support.units(site, unit)
        if delta * len(self.units) >= 1:
            raise ConfigError(
                f"delta = {delta:g}: site {data.id!r} has {len(self.units):,} units; a "
                "delta of 1 / units or more promises none of them anything: lower it"
            )
        self._counted_units: Sequence[Any] = ()
        if support.is_counting(config):
            self._counted_units = support.counted_units(site, unit)
        self._begin({})

    def begin(self, tensors: Tensors) -> Update:
        """Take what all sites agreed on, by their noisy counts."""
        is_other = self._agreed and tensor_fingerprint(
            self._agreed
        ) != tensor_fingerprint(tensors)
        if self.steps or is_other or not self.support.agrees_first(self._config):
            raise RefusedError(
                f"site {self.id!r}: there is nothing to agree on, or training has begun"
            )
        self._begin(tensors)
        return Update()

    def _begin(self, agreed: Tensors) -> None:
        """Prepare the first answer, unless sites have yet to agree on something."""
        if agreed or not self.support.agrees_first(self._config):
            self.support.begin(self.site, agreed)
        self._agreed = snapshot(agreed)
        self._shared: dict[str, torch.nn.Parameter] = self.site.shared
        self._own: dict[str, torch.nn.Parameter] = self.site.private
        self._adam = Adam(self._own, self._config.learning_rate)
        shared_grid, private_grid = self.promise.grids
        self._grids = {
            **dict.fromkeys(self._shared, shared_grid),
            **dict.fromkeys(self._own, private_grid),
        }

    # A round.

    def noisy_gradients(self, tensors: Tensors, *, round: int) -> Update:
        """Return Σ of the drawn units' clipped gradients, with noise, in whole numbers.

        The private layers take a step along theirs, which stay here.

        Raises:
            RefusedError: All rounds of the promise are done.
        """
        if self.steps >= self.promise.rounds:
            raise RefusedError(
                f"site {self.id!r}: the job promises {self.promise.rounds:,} rounds, "
                "and all of them are done"
            )
        load_into(self._shared, tensors)
        self._kept = self.support.prepare_round(self.site, round, self._kept)
        key = self._key(round)
        total = self._sum_clipped(Stream(key))

        stream = Stream(receipt(key, "noise", tensor_fingerprint(total)))
        for value in total.values():
            noise = torch.from_numpy(discrete_gaussian(stream, value.numel()))
            value += noise.reshape(value.shape)  # [abadi noise]
        self.steps += 1

        if self._own:
            unit = self.promise.grids[1] / self._config.batch_size
            self._adam.step(
                {name: (total[name] * unit).to(p) for name, p in self._own.items()}
            )
        shared = {name: total[name] for name in total if name in self._shared}
        return Update(shared)

    def _sum_clipped(self, stream: Stream) -> dict[str, Tensor]:
        """Return Σ of the clipped gradients of units that are drawn from the stream."""
        total = {
            name: torch.zeros(parameter.shape, dtype=torch.int64)
            for name, parameter in self._learning.items()
        }
        self.site.model.train()
        # The seeds of dropout are secret. By public ones, leaving out one unit would
        # change the dropout of every unit behind it, and all of these would move the
        # sum.
        dropout = stream.words(len(self.units)) >> np.uint64(1)
        drawn = chosen(stream, len(self.units), self.promise.privacy.rate)
        device = next(iter(self._parameters.values())).device

        failures = Counter[str]()
        for unit in np.flatnonzero(drawn):
            seed_torch(int(dropout[unit]), device)
            try:
                clipped = self.clipped(self.units[unit])
            except Exception as error:
                # A refusal would tell of the unit, so it adds nothing instead.
                failures[type(error).__name__] += 1
                continue
            for name, part in clipped.items():
                total[name] += part  # [abadi noise]

        if failures:  # for this site's people alone
            logger.warning("gradients that cannot be computed: %s", dict(failures))
            self.lost += not any(value.any() for value in total.values())
        return total

    @property
    def _learning(self) -> dict[str, torch.nn.Parameter]:
        return {name: p for name, p in self._parameters.items() if p.requires_grad}

    @property
    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        return {**self._shared, **self._own}

    def clipped(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return a unit's gradient, at most C long, in whole numbers of the grid.

        No other unit is in a pass with it, because rounding would let that unit change
        the result.

        Args:
            indices: The unit's sentences.
        """
        gradients: dict[str, Tensor] = {}
        parameters = self._learning
        for start in range(0, len(indices), TOGETHER):
            part = indices[start : start + TOGETHER]
            loss = self.support.loss(self.site, part) * (len(part) / len(indices))
            if not loss.requires_grad:  # it depends on nothing that learns now
                continue
            of_part: Sequence[Tensor | None] = torch.autograd.grad(
                loss, [*parameters.values()], allow_unused=True
            )
            for name, gradient in zip(parameters, of_part, strict=True):
                if gradient is None:
                    continue
                earlier = gradients.get(name)
                gradients[name] = gradient if earlier is None else earlier + gradient
        return cut(gradients, self.promise.privacy.clip, self._grids)

    def _key(self, round: int) -> bytes:
        """Return the key of the randomness of the next answer."""
        tensors = {name: p.detach() for name, p in self._parameters.items()}
        tensors |= prefixed("kept.", self._kept)
        tensors |= prefixed(AGREED, self._agreed)
        return receipt(
            self._noise_secret,
            repr(self.promise),
            repr(self._config),
            self.steps,
            round,
            self._question(),
            tensor_fingerprint(tensors),
            self._data,
            platform.node(),
            torch.__version__,
            torch.get_num_threads(),
        )

    # Noisy counts and the end.

    def noisy_counts(self, tensors: Tensors, *, round: int) -> Update:
        """Return Σ of each unit's counts, clipped, with noise, in whole numbers.

        Counts are of the data before the first round, or of the last round's model.

        Raises:
            RefusedError: The job has no counts, or none at this time.
        """
        agrees_first = self.support.agrees_first(self._config)
        due_at = 0 if agrees_first else self.promise.rounds
        if not self.support.is_counting(self._config) or self.steps != due_at:
            time = "before training" if agrees_first else "after training"
            raise RefusedError(
                f"site {self.id!r}: the job sends no counts, or only {time}"
            )
        load_into({} if agrees_first else self._shared, tensors)
        size = self.support.count_size(self._config)
        total = torch.zeros(size, dtype=torch.int64)
        grids = {COUNTS: self.promise.counted}
        for counted in self._counted_units:
            # A refusal would tell of the unit, so it adds nothing instead.
            with suppress(Exception):
                places, counts = self.support.count_unit(self.site, counted)
                vector = {COUNTS: torch.as_tensor(counts)}
                clipped = cut(vector, self.promise.privacy.counted, grids)
                # [abadi counts]
                total.index_add_(0, torch.as_tensor(places), clipped[COUNTS])

        stream = Stream(
            receipt(self._key(round), COUNTS, tensor_fingerprint({COUNTS: total}))
        )
        noise = discrete_gaussian(stream, len(total))
        total += torch.from_numpy(noise)  # [abadi counts]
        return Update({COUNTS: total})

    def finish(self, tensors: Tensors) -> Update:
        """Test the last round's model and save it; the scores stay here.

        Raises:
            RefusedError: The parameters are not finite.
        """
        if not all(bool(value.isfinite().all()) for value in tensors.values()):
            raise RefusedError(
                f"site {self.id!r}: the model that came has numbers that are not finite"
            )
        load_into(self._shared, tensors)
        self.site.finish(tensors)
        self.scores = self.site.scores
        return Update()

    # What a job asks of a site.

    @property
    def id(self) -> str:
        """The site's name in the job."""
        return str(self.site.id)

    def described(self) -> str:
        """Describe what is shared, what stays, and what is promised."""
        return f"{self.site.described()}; {self.promise}"

    def scores_on(self, site: SiteData) -> dict[str, Any]:
        """Return the finished model's scores on another site's test data."""
        scores: dict[str, Any] = self.site.scores_on(site)
        return scores

    def document_counts(self, site: str) -> NDArray[np.int64] | None:
        """Return the counts of the finished model; see `MethodSite`."""
        counts: NDArray[np.int64] | None = self.site.document_counts(site)
        return counts

    def covered(self, task: str) -> dict[str, int]:
        """Return the one step behind an update, and the number of expected examples."""
        expected = int(self.promise.privacy.rate * self.num_examples)
        examples = {NOISY: expected, COUNTS: len(self._counted_units)}
        if task not in examples:
            return {}
        return {"steps": 1, **dict.fromkeys(self.support.example_names, examples[task])}

    def counted_places(self) -> list[Any]:
        """Return the places at which each unit counts, before noise is added.

        They never leave the site; its own audit compares them with what does.
        """
        return [
            self.support.count_unit(self.site, unit)[0] for unit in self._counted_units
        ]

    def state(self) -> State:
        """Return private layers, optimizer, what `prepare_round` keeps, and secret."""
        private = {name: p.detach() for name, p in self._own.items()}
        tensors = {
            **prefixed("private.", private),
            **prefixed("kept.", self._kept),
            **prefixed(AGREED, self._agreed),
            **self._adam.state(),
        }
        return State(self.steps, tensors, {"secret": self._noise_secret.hex()})

    def restore(self, state: State) -> None:
        """Go back to a saved state."""
        self._begin(unprefixed(AGREED, state.tensors))
        load_into(self._own, unprefixed("private.", state.tensors))
        self._kept = unprefixed("kept.", state.tensors)
        self._adam.restore(state.tensors)
        self._noise_secret = bytes.fromhex(state.fact("secret", str))
        self.steps = state.round
