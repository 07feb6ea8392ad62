"""Training with differential privacy, for methods whose sites follow one gradient.

Abadi et al. 2016, "Deep learning with differential privacy", with the integer noise of
many sites (Kairouz, Liu, Steinke 2021, "The distributed discrete Gaussian mechanism").

    q       `Privacy.rate`: each unit of a site is drawn into a round with this
            probability, independently of the others
    g_u     the gradient of a unit's mean loss, over shared and private layers, as one
            vector
    C       `Privacy.clip`: g_u · min(1, C / |g_u|), then rounded to the grid towards 0
    σ       `Promise.noise`, of a sum. A site adds `Promise.site_noise` to shared
            layers. To its private layers, which no other noise hides, it adds the full
            σ.
    N       `Config.batch_size`, a constant: no number of units leaves a site or is used
            as a divisor

A site adds integers on its grid, so a sum is exact, also under the secure sum. Its
sensitivity is C, because rounding towards zero never lengthens a vector. Only this sum
leaves the site: no loss, no number of sentences, no evaluation counts. docs/privacy.md
has the argument.
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
    add_prefix,
    copy_tensors,
    fingerprint_tensors,
    list_shapes,
    load_into,
    seed_torch,
    select_prefix,
)
from fednotes.core.types import SiteData
from fednotes.core.update import Tensors, Total, Update
from fednotes.metrics.spans import SpanCounts
from fednotes.privacy.last_rounds import LastRounds
from fednotes.privacy.noise import (
    SCALE,
    Stream,
    clip_to_grid,
    draw_discrete_gaussian,
    draw_units,
)
from fednotes.privacy.promise import COUNTS, Promise, Unit
from fednotes.privacy.secure_sum.crypto import compute_receipt, hash_parts
from fednotes.privacy.units import group_documents, group_sentences
from fednotes.training.site_sampling import count_drawn_sites, count_round_sites
from fednotes.training.sites import Adam, Best, RoundServer

NOISY = "noisy_gradients"  # the task of a round
AGREED = "agreed."  # prefix in states, of tensors agreed before training
TOGETHER = 64  # sentences of a unit in one forward pass
MENTION_COUNTS = 3  # right predictions, predictions, gold mentions
logger = logging.getLogger(__name__)


class DPSupport(ABC):
    """A method's support for training with differential privacy.

    A method declares an instance as `dp`. A subclass must define the abstract methods.
    The defaults suit a method that finds mentions, whose noisy counts are those of the
    final model's mentions.

    Attributes:
        required_settings: Settings with a fixed value under [privacy]; a job may omit
            them.
        counts_before_training: Whether the noisy counts of `Privacy.counts` are
            published before training, which starts with the result of `agree`.
            Otherwise they evaluate the last round's model.
        can_average_rounds: Whether the models of several rounds may be averaged. False
            for a method that trains in stages.
        example_names: Names of a sum's examples in a site's policy.
    """

    required_settings: Mapping[str, Any] = MappingProxyType({})
    counts_before_training: ClassVar[bool] = False
    can_average_rounds: ClassVar[bool] = True
    example_names: ClassVar[tuple[str, ...]] = ("batch",)

    @abstractmethod
    def make_initial_parameters(
        self, config: Any, agreed: Tensors
    ) -> dict[str, Tensor]:
        """Return the shared parameters before training.

        Args:
            config: The settings of the run.
            agreed: The result of `agree`; empty if nothing is agreed.
        """

    @abstractmethod
    def loss(self, site: Any, indices: np.ndarray) -> Tensor:
        """Return the mean loss, (), over some sentences or other items of `units`."""

    @abstractmethod
    def count_rounds(self, config: Any, sums_per_epoch: int) -> int:
        """Return the maximum number of rounds, at `sums_per_epoch` rounds per epoch."""

    def group_units(self, site: Any, unit: Unit) -> list[np.ndarray]:
        """Return the indices of each unit's sentences, in the form of `loss`."""
        return group_sentences(site, unit)

    def hash_data(self, data: Any) -> bytes:
        """Return a digest of a site's training data."""
        texts = ((d.id, str(d.patient), d.text, repr(d.spans)) for d in data.train)
        return hash_parts(*(part for document in texts for part in document))

    def begin(self, site: Any, agreed: Tensors) -> None:
        """Prepare a site before its first answer, with the agreed tensors."""
        del site, agreed

    def prepare_round(self, site: Any, round: int, memory: Tensors) -> Tensors:
        """Prepare a site for an answer, after it loaded the received parameters.

        Parameters that do not require a gradient afterwards are not trained in this
        round.

        Args:
            site: The site.
            round: The round's number.
            memory: The result of the previous call; empty at first.

        Returns:
            Tensors that the site keeps for its next answer. They must depend only on
            parameters.
        """
        del site, round
        return memory

    # The noisy counts of `Privacy.counts`, by default counts of mentions.

    def count_size(self, config: Any) -> int:
        """Return the number of noisy counts; 0 if there is nothing to count.

        For mentions, these are correct predictions, predictions and gold mentions.
        """
        del config
        return MENTION_COUNTS

    def group_counted_units(self, site: Any, unit: Unit) -> Sequence[Any]:
        """Return each unit's items to count, in the form of `count_unit`."""
        return group_documents(site.id, site.data.valid, unit)

    def count_unit(
        self, site: Any, items: Any
    ) -> tuple[Sequence[int] | np.ndarray, Sequence[float] | np.ndarray]:
        """Count one unit's mentions.

        Args:
            site: The site.
            items: One element of `group_counted_units`, by default the unit's
                documents.

        Returns:
            The positions in the vector of noisy counts (length `count_size`) that the
            unit adds to, and the amounts.
        """
        types = site.data.tags.types  # a site annotates no others
        predicted = site.model.predict(items)
        total = SpanCounts.of(items, predicted, types=types).total
        counts = [float(total.strict), float(total.predicted), float(total.gold)]
        return range(MENTION_COUNTS), counts

    def agree(self, config: Any, counts: np.ndarray, deviation: float) -> Tensors:
        """Return the tensors with which training starts, if counts come before it.

        Args:
            config: The settings of the run.
            counts: The sum of all sites' noisy counts, (count_size,).
            deviation: Standard deviation of the noise in each number.
        """
        del config, counts, deviation
        return {}

    # Derived methods.

    def is_counting(self, config: Any) -> bool:
        """Return whether a run publishes noisy counts."""
        return bool(config.privacy.counts) and self.count_size(config) > 0

    def starts_with_counts(self, config: Any) -> bool:
        """Return whether training starts with noisy counts."""
        return self.counts_before_training and self.is_counting(config)

    def require_settings(self, config: Any) -> None:
        """Check that the settings allow training with differential privacy.

        Raises:
            ConfigError: A setting does not have its required value, or the job requests
                counts but has nothing to count.
        """
        drawn = count_drawn_sites(config)
        if (
            drawn is not None
            and config.privacy.counts
            and not self.starts_with_counts(config)
        ):
            raise ConfigError(
                f"[privacy] counts: with sites_per_round = {drawn}, a site does not "
                "know which round is its last one, after which it may count: leave "
                "counts or sites_per_round out"
            )
        self._require_averageable(config)
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

    def _require_averageable(self, config: Any) -> None:
        """Raise ConfigError if the last rounds of a job cannot be averaged."""
        averaged = config.privacy.averaged_rounds
        if averaged == 1:
            return
        drawn = count_drawn_sites(config)
        if not self.can_average_rounds:
            raise ConfigError(
                f"[privacy] averaged_rounds = {averaged}: this method trains in "
                "stages, and each stage starts from the last model of the one before: "
                "leave averaged_rounds out"
            )
        if drawn is not None:
            raise ConfigError(
                f"[privacy] averaged_rounds = {averaged}: with sites_per_round = "
                f"{drawn}, a site does not know which rounds are its last ones: leave "
                "averaged_rounds or sites_per_round out"
            )

    def make_promise(self, config: Any) -> Promise:
        """Return the guarantee of a run with these settings.

        Raises:
            ConfigError: No noise suffices for the guarantee, or there are fewer rounds
                than are to be averaged.
        """
        privacy = config.privacy
        rounds = self.count_rounds(config, privacy.epoch)
        if privacy.averaged_rounds > rounds:
            raise ConfigError(
                f"[privacy] averaged_rounds = {privacy.averaged_rounds}: this job has "
                f"{rounds:,} rounds: set averaged_rounds to at most that"
            )
        # A site may be drawn for each round, and others in a round add noise to it.
        sites = count_round_sites(config)
        return Promise.of(privacy, rounds, sites, config.min_sites)


def train(federation: Federation, config: Any, support: DPSupport) -> State:
    """Train for all rounds that the privacy guarantee covers.

    Each round sums clipped gradients and takes one step.

    Args:
        federation: The sites, as `DPSite`.
        config: The settings of the run; `config.privacy` is set.
        support: How the method trains with differential privacy.

    Returns:
        The server's final state.
    """
    promise = support.make_promise(config)
    starts_with_counts = support.starts_with_counts(config)
    saved_state = federation.resume()
    agreed: Tensors = {}
    if saved_state is not None:
        agreed = select_prefix(AGREED, saved_state.tensors)
    elif starts_with_counts:
        agreed = _agree_on_start(federation, config, support, promise)

    server = Server(
        config, promise, support.make_initial_parameters(config, agreed), saved_state
    )
    server.agreed = agreed
    # Sites send noisy counts once: before the first round, or about the last model.
    judges_last_model = bool(config.privacy.counts) and not starts_with_counts
    rounds_between_reports = config.evaluate_every * promise.privacy.epoch
    for round in federation.rounds(server.round, promise.rounds):
        server.step(federation.sum(NOISY, server.shared, round=round.number))
        is_last = server.round == promise.rounds
        is_reported = is_last or server.round % rounds_between_reports == 0

        server.metrics = {}
        if is_reported:
            server.metrics["epsilon"] = promise.compute_epsilon(server.round)
        if is_last and judges_last_model:
            final = server.compute_final()
            server.judge(federation.sum(COUNTS, final, round=round.number))
        round.commit(server.state(), server.metrics, evaluated=is_reported)
    final = server.compute_final()
    federation.sum("finish", final)
    state = server.state()
    return replace(state, tensors={**state.tensors, **add_prefix("shared.", final)})


def _agree_on_start(
    federation: Federation, config: Any, support: DPSupport, promise: Promise
) -> Tensors:
    """Sum the sites' noisy counts, and send the sites the tensors derived from them.

    Returns:
        The tensors with which training starts.
    """
    total = federation.sum(COUNTS, round=0)
    total.require({COUNTS: (support.count_size(config),)})
    counts = total.tensors[COUNTS].double() * promise.count_grid
    deviation = promise.count_grid * SCALE * math.sqrt(max(1, config.sites))
    agreed = support.agree(config, counts.numpy(), deviation)
    federation.sum("begin", agreed)
    return agreed


class Server(RoundServer):
    """The server: shared parameters, optimizer, and the agreed tensors.

    Args:
        config: The settings of the run.
        promise: The run's guarantee.
        initial: The shared parameters before training.
        resumed: The state to resume from; None at the first start.
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
        self._unit = promise.grids.shared / config.batch_size  # [abadi descent]
        self._counted = promise.count_grid
        self._last_rounds = _make_last_rounds(promise)
        best = Best(keeps_tensors=False, later="never")
        super().__init__(config, initial, best, resumed)

    def step(self, total: Total) -> None:
        """Update θ_s by Adam along (Σ clipped g_u + noise) / N."""
        shapes = list_shapes(self.shared)
        # A method with two stages trains only some of the shared parameters in each.
        trained_shapes = {
            name: shapes[name] for name in total.tensors if name in shapes
        }
        total.require(trained_shapes)
        gradients: dict[str, Tensor | None] = dict.fromkeys(self.shared)
        for name, value in total.tensors.items():
            gradients[name] = (value * self._unit).float()  # [abadi descent]
        self._adam.step(gradients)  # [abadi descent]
        self.round += 1
        self._last_rounds.add(self.shared, self.round)

    def compute_final(self) -> Tensors:
        """Return the shared parameters to release: the mean over the last rounds."""
        return self._last_rounds.compute(self.shared, self.round)

    def judge(self, total: Total) -> None:
        """Record the micro F1 computed from the sites' noisy counts of mentions."""
        total.require({COUNTS: (MENTION_COUNTS,)})
        counts = total.tensors[COUNTS].double() * self._counted
        correct, predicted, gold = counts.tolist()
        f1 = 2 * correct / max(1.0, predicted + gold)
        # The noise can move F1 out of its range.
        self.metrics["valid_f1"] = min(1.0, max(0.0, f1))

    def state(self) -> State:
        """Return all state that the next round depends on."""
        state = super().state()
        tensors = {
            **state.tensors,
            **add_prefix(AGREED, self.agreed),
            **self._adam.state(),
            **self._last_rounds.state(),
        }
        return replace(state, tensors=tensors)

    def _restore(self, state: State) -> None:
        super()._restore(state)
        self._adam.restore(state.tensors)
        self._last_rounds.restore(state.tensors)


def _make_last_rounds(promise: Promise) -> LastRounds:
    """Return the empty mean over the last rounds of a run."""
    return LastRounds(promise.rounds, promise.privacy.averaged_rounds)


class DPSite(MethodSite):
    """A site that sends only noisy sums.

    The units drawn into a round, and their dropout, are derived from the secret and
    from everything that the round's answer depends on. The noise is derived from these
    and from the sum to which it is added. Therefore a repetition after a fault has the
    same answer, and two different sums never have the same noise.

    Args:
        site: The method's own site, whose model is trained. Its `tells_forms` is set to
            False.
        data: The site's data.
        config: The settings of the run; `config.privacy` is set.
        support: How the method trains with differential privacy.
        secret: 32 bytes known only to this site, because anyone who knows them can
            remove its noise. None draws new ones.
        name_request: Returns the name of the current request in the secure sum; at most
            one sum with this name is opened.

    Raises:
        ConfigError: The training data do not identify their units, or `delta` is too
            large for the number of units.
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
        name_request: Callable[[], bytes] = bytes,
    ) -> None:
        self.site = site
        self.site.tells_forms = False
        self.support = support
        self.promise = support.make_promise(config)
        self.num_examples = site.num_examples
        self.scores = site.scores
        self.steps = 0
        self.noise_only_answers = 0  # number of answers in which every gradient failed
        self._config = config
        self._noise_secret = secret or secrets.token_bytes(32)
        self._name_request = name_request
        self._memory: Tensors = {}  # of `DPSupport.prepare_round`
        self._data = support.hash_data(data)

        unit = self.promise.privacy.unit
        delta = self.promise.privacy.delta
        self.units = support.group_units(site, unit)
        if delta * len(self.units) >= 1:
            raise ConfigError(
                f"delta = {delta:g} is too large for site {data.id!r}, which has "
                f"{len(self.units):,} units: set it well below 1 / units"
            )
        self._counted_units: Sequence[Any] = ()
        if support.is_counting(config):
            self._counted_units = support.group_counted_units(site, unit)
        self._begin({})

    def begin(self, tensors: Tensors) -> Update:
        """Load the tensors that the server derived from all sites' noisy counts.

        Raises:
            RefusedError: The job has no such tensors, training has begun, or other
                tensors were loaded before.
        """
        is_changed = bool(self._agreed) and (
            fingerprint_tensors(self._agreed) != fingerprint_tensors(tensors)
        )
        if (
            self.steps
            or is_changed
            or not self.support.starts_with_counts(self._config)
        ):
            raise RefusedError(
                f"site {self.id!r}: there is nothing to agree on, or training has begun"
            )
        self._begin(tensors)
        return Update()

    def _begin(self, agreed: Tensors) -> None:
        """Prepare the site for its first answer, and start its optimizer.

        The method prepares its own site later if an agreement is still pending.
        """
        if agreed or not self.support.starts_with_counts(self._config):
            self.support.begin(self.site, agreed)
        self._agreed = copy_tensors(agreed)
        self._shared: dict[str, torch.nn.Parameter] = self.site.shared
        self._private: dict[str, torch.nn.Parameter] = self.site.private
        self._adam = Adam(self._private, self._config.learning_rate)
        self._last_rounds = _make_last_rounds(self.promise)
        shared_grid, private_grid = self.promise.grids
        # Layer to the step of the grid on which its gradients are integers.
        self._grids = {
            **dict.fromkeys(self._shared, shared_grid),
            **dict.fromkeys(self._private, private_grid),
        }

    # A round.

    def noisy_gradients(self, tensors: Tensors, *, round: int) -> Update:
        """Return the integer sum of the drawn units' clipped gradients, with noise.

        The private layers take a step along their gradients, which stay at the site.

        Raises:
            RefusedError: All rounds of the guarantee are done.
        """
        if self.steps >= self.promise.rounds:
            raise RefusedError(
                f"site {self.id!r}: the job's privacy guarantee covers "
                f"{self.promise.rounds:,} rounds, and all of them are done"
            )
        load_into(self._shared, tensors)
        self._memory = self.support.prepare_round(self.site, round, self._memory)
        key = self._derive_key(round)
        total = self._sum_clipped(Stream(key))

        stream = Stream(compute_receipt(key, "noise", fingerprint_tensors(total)))
        for value in total.values():
            noise = torch.from_numpy(draw_discrete_gaussian(stream, value.numel()))
            value += noise.reshape(value.shape)  # [abadi noise]
        self.steps += 1

        if self._private:
            unit = self.promise.grids.private / self._config.batch_size
            private_gradients = {
                name: (total[name] * unit).to(parameter)
                for name, parameter in self._private.items()
            }
            self._adam.step(private_gradients)
            self._last_rounds.add(self._private, self.steps)
        return Update({name: total[name] for name in total if name in self._shared})

    def _sum_clipped(self, stream: Stream) -> dict[str, Tensor]:
        """Return the sum of clipped gradients over units drawn with the stream."""
        total = {
            name: torch.zeros(parameter.shape, dtype=torch.int64)
            for name, parameter in self._trained_parameters.items()
        }
        self.site.model.train()
        # The seeds of dropout are secret. With public seeds, leaving out one unit would
        # change the dropout of all later units, and all of these would change the sum.
        dropout_seeds = stream.draw_words(len(self.units)) >> np.uint64(1)
        is_drawn = draw_units(stream, len(self.units), self.promise.privacy.rate)
        device = next(iter(self._parameters.values())).device

        failures = Counter[str]()
        for unit in np.flatnonzero(is_drawn):
            seed_torch(int(dropout_seeds[unit]), device)
            try:
                gradient = self.clip_gradient(self.units[unit])
            except Exception as error:
                # A refusal would reveal the unit, so it adds nothing instead.
                failures[type(error).__name__] += 1
                continue
            for name, part in gradient.items():
                total[name] += part  # [abadi noise]

        if failures:  # logged at this site only
            logger.warning("gradients that cannot be computed: %s", dict(failures))
            has_gradients = any(value.any() for value in total.values())
            if not has_gradients:
                self.noise_only_answers += 1
        return total

    @property
    def _trained_parameters(self) -> dict[str, torch.nn.Parameter]:
        """The parameters that are trained now, by name."""
        return {name: p for name, p in self._parameters.items() if p.requires_grad}

    @property
    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        """All shared and private parameters, by name."""
        return {**self._shared, **self._private}

    def clip_gradient(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return a unit's gradient, clipped to the norm C, as integers on the grid.

        No other unit is in the same forward pass, because rounding would let it change
        the result.

        Args:
            indices: The unit's sentences.
        """
        gradients: dict[str, Tensor] = {}
        parameters = self._trained_parameters
        for start in range(0, len(indices), TOGETHER):
            part = indices[start : start + TOGETHER]
            loss = self.support.loss(self.site, part) * (len(part) / len(indices))
            if not loss.requires_grad:  # it depends on no parameter that is trained now
                continue
            part_gradients: Sequence[Tensor | None] = torch.autograd.grad(
                loss, [*parameters.values()], allow_unused=True
            )
            for name, gradient in zip(parameters, part_gradients, strict=True):
                if gradient is None:
                    continue
                if name in gradients:
                    gradient = gradients[name] + gradient
                gradients[name] = gradient
        return clip_to_grid(gradients, self.promise.privacy.clip, self._grids)

    def _derive_key(self, round: int) -> bytes:
        """Return the key of all randomness in the next answer."""
        tensors = {name: p.detach() for name, p in self._parameters.items()}
        tensors |= add_prefix("kept.", self._memory)
        tensors |= add_prefix(AGREED, self._agreed)
        return compute_receipt(
            self._noise_secret,
            repr(self.promise),
            repr(self._config),
            self.steps,
            round,
            self._name_request(),
            fingerprint_tensors(tensors),
            self._data,
            platform.node(),
            torch.__version__,
            torch.get_num_threads(),
        )

    # Noisy counts and the final model.

    def noisy_counts(self, tensors: Tensors, *, round: int) -> Update:
        """Return the integer sum of the units' clipped counts, with noise.

        They count the data before the first round, or evaluate the last round's model.

        Raises:
            RefusedError: The job has no counts, or not at this time.
        """
        starts_with_counts = self.support.starts_with_counts(self._config)
        time = "before training" if starts_with_counts else "after training"
        due_step = 0 if starts_with_counts else self.promise.rounds
        if not self.support.is_counting(self._config) or self.steps != due_step:
            raise RefusedError(
                f"site {self.id!r}: the job sends no counts, or only {time}"
            )
        expected_parameters = {} if starts_with_counts else self._shared
        load_into(expected_parameters, tensors)
        self._load_final_private()
        size = self.support.count_size(self._config)
        total = torch.zeros(size, dtype=torch.int64)
        grids = {COUNTS: self.promise.count_grid}
        for items in self._counted_units:
            # A refusal would reveal the unit, so it adds nothing instead.
            with suppress(Exception):
                positions, counts = self.support.count_unit(self.site, items)
                vector = {COUNTS: torch.as_tensor(counts)}
                clipped = clip_to_grid(vector, self.promise.privacy.counted, grids)
                # [abadi counts]
                total.index_add_(0, torch.as_tensor(positions), clipped[COUNTS])

        total_fingerprint = fingerprint_tensors({COUNTS: total})
        stream = Stream(
            compute_receipt(self._derive_key(round), COUNTS, total_fingerprint)
        )
        noise = draw_discrete_gaussian(stream, len(total))
        total += torch.from_numpy(noise)  # [abadi counts]
        return Update({COUNTS: total})

    def finish(self, tensors: Tensors) -> Update:
        """Test the last round's model and save it; the scores stay at the site.

        Raises:
            RefusedError: The parameters are not finite.
        """
        if not all(bool(value.isfinite().all()) for value in tensors.values()):
            raise RefusedError(
                f"site {self.id!r}: the received model contains numbers that are not "
                "finite"
            )
        load_into(self._shared, tensors)
        self._load_final_private()
        self.site.finish(tensors)
        self.scores = self.site.scores
        return Update()

    def _load_final_private(self) -> None:
        """Replace the private layers by their mean over the last rounds."""
        load_into(self._private, self._last_rounds.compute(self._private, self.steps))

    # The interface to jobs.

    @property
    def id(self) -> str:
        """The site's name in the job."""
        return str(self.site.id)

    def describe_parameters(self) -> str:
        """Describe shared and private parameters, and the guarantee."""
        return f"{self.site.describe_parameters()}; {self.promise}"

    def score_on(self, site: SiteData) -> dict[str, Any]:
        """Return the finished model's scores on another site's test data."""
        scores: dict[str, Any] = self.site.score_on(site)
        return scores

    def find_document_counts(self, site: str) -> NDArray[np.int64] | None:
        """Return the counts of the finished model; see `MethodSite`."""
        counts: NDArray[np.int64] | None = self.site.find_document_counts(site)
        return counts

    def count_covered(self, task: str) -> dict[str, int]:
        """Return the single step and the expected number of examples of an update."""
        expected = int(self.promise.privacy.rate * self.num_examples)
        examples = {NOISY: expected, COUNTS: len(self._counted_units)}
        if task not in examples:
            return {}
        return {"steps": 1, **dict.fromkeys(self.support.example_names, examples[task])}

    def list_counted_positions(self) -> list[Any]:
        """Return the positions of each unit's counts, before noise is added.

        They never leave the site; its own audit compares them with the noisy counts.
        """
        positions_of_units = []
        for items in self._counted_units:
            positions, _ = self.support.count_unit(self.site, items)
            positions_of_units.append(positions)
        return positions_of_units

    def state(self) -> State:
        """Return private layers, optimizer state, stored tensors, and the secret."""
        private = {name: p.detach() for name, p in self._private.items()}
        tensors = {
            **add_prefix("private.", private),
            **add_prefix("kept.", self._memory),
            **add_prefix(AGREED, self._agreed),
            **self._adam.state(),
            **self._last_rounds.state(),
        }
        return State(self.steps, tensors, {"secret": self._noise_secret.hex()})

    def restore(self, state: State) -> None:
        """Restore a saved state."""
        self._begin(select_prefix(AGREED, state.tensors))
        load_into(self._private, select_prefix("private.", state.tensors))
        self._memory = select_prefix("kept.", state.tensors)
        self._adam.restore(state.tensors)
        self._last_rounds.restore(state.tensors)
        self._noise_secret = bytes.fromhex(state.fact("secret", str))
        self.steps = state.round
