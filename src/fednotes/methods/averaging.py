"""Averaging of locally trained parameters, for pre-training and fine-tuning.

Dianbo Liu and Tim Miller (2020), "Federated pretraining and fine tuning of BERT using
clinical notes from multiple silos", section 3.2; McMahan et al. 2017 (FedAvg).

    paper       here
    t           `Server.round`, the global cycle
    T           `Averaging.cycles`
    K           the sites of the federation
    n_k         the weight of a site's update: patients in pre-training, notes in
                fine-tuning
    N           `Total.weight`
    Q_k^t       the parameters that a site returns from "train"
    Q_ag^t      `Server.shared` after `Server.step`

The server's step (`training/server_steps.py`) and the compression of updates
(`training/compression.py`) are settings. `training/local_trainer.py` takes the local
steps.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np
import torch
from annotated_types import Len
from torch import Tensor

from fednotes.core.counts import round_count, scale_sum
from fednotes.core.errors import (
    ConfigError,
    DivergedError,
    RefusedError,
    TrainingError,
)
from fednotes.core.federation import (
    EVALUATE,
    TRAIN,
    Federation,
    Option,
    SiteTasks,
    State,
)
from fednotes.core.numbers import (
    Epochs,
    FractionBelowOne,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)
from fednotes.core.seeds import Draws
from fednotes.core.settings import FilledIn, checked
from fednotes.core.tensors import (
    add_prefix,
    copy_tensors,
    list_shapes,
    load_into,
    nbytes,
    require_like,
    select_prefix,
)
from fednotes.core.update import Tensors, Total, Update
from fednotes.privacy.training import DPSupport
from fednotes.training import server_steps
from fednotes.training.compression import (
    Compression,
    choose_step_sizes,
    compute_mean_squares,
    count_bytes,
    decode_change,
    encode_change,
    list_encoded_shapes,
    require_step_sizes,
    unpack_total,
)
from fednotes.training.local_trainer import LocalTrainer, Optimizer, Step
from fednotes.training.precision import Precision
from fednotes.training.server_steps import (
    Aggregation,
    needs_each_update,
    sum_or_combine,
)
from fednotes.training.sites import (
    Best,
    RoundServer,
    agree_on_shares,
    compute_least_part,
    compute_part,
    keep_first_sum,
    list_batch_warnings,
)

BEST = -1  # a value of `keep_cycle`
Summarise = Callable[[Mapping[str, float]], dict[str, float]]


@checked(frozen=True)
class Averaging(Aggregation):
    """Settings shared by pre-training, fine-tuning and phenotyping.

    Attributes:
        cycles: T, the number of cycles. In each, every site trains, and then the mean
            of the models is taken.
        keep_cycle: Cycle whose model is the result: 0 is the last one, -1 the best one
            on held-out data. No cycle is run after the cycle with this number, but the
            learning rate is still scheduled over all `cycles`.
        local_epochs: Number of epochs at every site in a cycle. A fractional part
            stands for that part of an epoch's steps, but for at least one step. More
            epochs need fewer cycles, but let the sites' models drift apart.
        batch: What `batch_size` counts: the examples in a step of "each" site, or in
            one step of all sites together ("shared"). Shared batches are divided in
            proportion to the sites' numbers of examples, with at least one example and
            a quarter of an equal share for each site, so that a site takes about as
            many steps as pooled training would. If there are more sites than examples
            in a batch, sites of average size take one example per step and read their
            notes more than once in an epoch, and small sites take fewer steps.
        batch_size: Number of examples in a step; see `batch`.
        accumulate: Number of smaller batches into which each step is divided. Raise it
            if memory is short.
        learning_rate: Learning rate of AdamW at the sites. Its moments and schedule
            continue from cycle to cycle.
        lora_learning_rate: Learning rate of the LoRA matrices; 0 uses
            `learning_rate`. Set it if these matrices need larger steps than the layers
            that are trained completely.
        warmup: Fraction of a site's steps over which the learning rate rises.
        decay: Learning rate after the warm-up: with "linear" it falls to zero at the
            last step; with "constant" it does not change.
        weight_decay: Weight decay of AdamW.
        clip: Maximum L2 norm of a step's gradient; larger gradients are scaled down,
            and 0 does not clip. The norm is taken over shared and private parameters
            together, after the FedProx term is added.
        precision: Precision of the matrix products in training; "auto" is "bfloat16"
            where the processor has instructions for it (about twice as fast there),
            else "float32".
        proximal: μ of FedProx (Li et al. 2020): weight of the penalty on the distance
            to the parameters at the cycle's start. Raise it if the sites' models drift
            apart.
        server: Optimizer of the server: "average" is Eq. 1; "nesterov" adds momentum;
            "adam" and "yogi" are FedAdam and FedYogi, with `betas` and `adaptivity`
            (`training/server_steps.py`).
        server_learning_rate: Learning rate of the server. 0 uses 1, or 1e-3 with server
            = "adam" or "yogi", whose steps have about this size for each parameter.
        momentum: Momentum of server = "nesterov".
        betas: The two decay rates of server = "adam" or "yogi".
        adaptivity: τ of server = "adam" or "yogi": their second moments start at its
            square.
        compression: Encoding of the tensors that sites send: "packed" uses a few bits
            per number; "none" sends float32, or twice as many bytes with the secure
            sum.
        evaluate_every: Number of cycles between two evaluations and checkpoints.
        min_tokens: Minimum number of tokens behind an update of the word embeddings or
            the output bias. Such an update reveals which words occurred, so a site
            refuses to send one that is based on fewer tokens. Lower it only for public
            notes.
        min_steps: Minimum number of training steps behind an update of the word
            embeddings or the output bias, for the same reason as `min_tokens`.
        seed: The job's seed. A job fills it in.
    """

    cycles: PositiveInt = 15
    keep_cycle: int = 0
    local_epochs: Epochs = 1
    batch: Literal["each", "shared"] = "each"
    batch_size: PositiveInt = 32
    accumulate: PositiveInt = 1
    learning_rate: PositiveFloat = 1e-4
    lora_learning_rate: NonNegativeFloat = 0.0
    warmup: FractionBelowOne = 0.1
    decay: Literal["linear", "constant"] = "linear"
    weight_decay: NonNegativeFloat = 0.01
    clip: NonNegativeFloat = 1.0
    precision: Precision = "float32"
    proximal: NonNegativeFloat = 0.0
    server: server_steps.Kind = "average"
    server_learning_rate: NonNegativeFloat = 0.0
    momentum: FractionBelowOne = 0.5
    betas: Annotated[tuple[FractionBelowOne, ...], Len(2, 2)] = (0.9, 0.99)
    adaptivity: PositiveFloat = 1e-3
    compression: Compression = "none"
    evaluate_every: PositiveInt = 1
    min_tokens: NonNegativeInt = 10_000
    min_steps: NonNegativeInt = 10
    seed: FilledIn[int] = 0

    def __post_init__(self) -> None:
        """Check the settings against each other.

        Raises:
            ConfigError: No run can have these settings.
        """
        if not BEST <= self.keep_cycle <= self.cycles:
            raise ConfigError(
                f"keep_cycle = {self.keep_cycle}: expected one of the "
                f"{self.cycles} cycles, 0 for the last, or -1 for the best"
            )
        if self.accumulate > self.batch_size:
            raise ConfigError(
                f"accumulate = {self.accumulate}: expected at most batch_size = "
                f"{self.batch_size}, which gives parts of one example each"
            )
        if needs_each_update(self) and self.compression != "none":
            raise ConfigError(
                f'aggregation = "{self.aggregation}" needs each site\'s update, but '
                f'compression = "{self.compression}" encodes only sums: set '
                'compression = "none"'
            )

    @property
    def last_cycle(self) -> int:
        """The last cycle that is run: `keep_cycle` if positive, else `cycles`."""
        return self.keep_cycle if self.keep_cycle > 0 else self.cycles


# The settings with which the best cycle is the result, for `Method.keep_best`.
KEEP_BEST: Mapping[str, Any] = MappingProxyType({"keep_cycle": BEST})

C = TypeVar("C", bound=Averaging)


def remove_federation_settings(config: C) -> C:
    """Return settings for training in one place.

    They lack the server's step, compression, FedProx and the rule of aggregation.
    """
    return replace(
        config,
        server="average",
        server_learning_rate=0.0,
        compression="none",
        proximal=0.0,
        aggregation="mean",
    )


def make_alone_configs(config: C, sizes: Sequence[int]) -> tuple[C, ...]:
    """Return each site's settings for training alone, with its federated batch size.

    Args:
        config: The settings of the federation.
        sizes: Number of training examples of each site.
    """
    config = remove_federation_settings(config)
    if config.batch == "each":
        return (config,) * len(sizes)
    return tuple(
        replace(
            config,
            batch="each",
            batch_size=share,
            accumulate=min(share, config.accumulate),
        )
        for share in _divide_batch(config, sizes)
    )


def _divide_batch(config: Averaging, sizes: Sequence[int]) -> list[int]:
    """Return each site's part of a shared mini-batch, from their example counts."""
    examples = max(1, sum(sizes))
    batch = config.batch_size
    return [
        compute_part(
            batch, size, examples, compute_least_part(batch, config.sites, size)
        )
        for size in sizes
    ]


def list_size_warnings(config: Averaging, sizes: Sequence[int]) -> tuple[str, ...]:
    """Return a warning if the parts add up to much more than the mini-batch."""
    if config.batch != "shared":
        return ()
    shares = _divide_batch(config, [size for size in sizes if size])
    return list_batch_warnings(config.batch_size, shares)


class AveragingWithDP(DPSupport):
    """Averaging with differential privacy, one round per local step.

    A subclass defines the shared parameters and a unit's loss.
    """

    required_settings: Mapping[str, Any] = MappingProxyType(
        {
            "server": "average",
            "server_learning_rate": 0.0,
            "compression": "none",
            "batch": "each",
            "accumulate": 1,
            "keep_cycle": 0,
            "proximal": 0.0,
            "clip": 0.0,
            "decay": "constant",
            "warmup": 0.0,
            "weight_decay": 0.0,
            "lora_learning_rate": 0.0,
            "precision": "float32",
            "aggregation": "mean",
        }
    )

    def count_rounds(self, config: Any, sums_per_epoch: int) -> int:
        """Return the number of rounds in a run, at `sums_per_epoch` per epoch."""
        steps: float = config.cycles * config.local_epochs * sums_per_epoch
        return math.ceil(steps)


def estimate_traffic(
    config: Averaging,
    shared: Tensors,
    warm_up_cycles: int = 0,
    warm_up_bytes: int = 0,
) -> tuple[int, int]:
    """Return the maximum bytes that a site sends and receives in a run.

    Args:
        config: The settings of the run.
        shared: The shared parameters.
        warm_up_cycles: Number of cycles of a warm-up.
        warm_up_bytes: Size of the parameters that a warm-up trains.
    """
    bytes_up, step_size_bytes = count_bytes(shared, config.compression, config.sites)
    in_warm_up = warm_up_cycles * warm_up_bytes
    sent = in_warm_up + config.cycles * bytes_up

    # All shared parameters arrive in each cycle of the warm-up (without one, once at
    # the start) and after each cycle. Evaluated parameters are not sent again, except
    # the best ones at the end.
    times_received = max(1, warm_up_cycles) + config.cycles
    if config.keep_cycle == BEST:
        times_received += 1
    received = times_received * nbytes(shared) + config.cycles * step_size_bytes
    return sent, in_warm_up + received


def count_examples(config: Averaging, sizes: Sequence[int]) -> int:
    """Return the examples per cycle over all sites, from their example counts."""
    sites = len(sizes)
    batch = config.batch_size
    is_shared = config.batch == "shared"
    # With more sites than examples in a batch, an epoch reads notes more than once.
    times_read = sites / batch if is_shared and sites > batch else 1.0
    return math.ceil(sum(sizes) * config.local_epochs * times_read)


def count_steps(config: Averaging, sizes: Sequence[int]) -> int:
    """Return the steps of a site in all cycles, as the mean over the sites.

    Args:
        config: The settings of the run.
        sizes: Number of training examples of each site.
    """
    batch = config.batch_size
    if config.batch == "each":
        batch *= max(1, len(sizes))
    return math.ceil(config.last_cycle * count_examples(config, sizes) / batch)


def run_cycles(federation: Federation, server: Server) -> State:
    """Run T global cycles, after those of the warm-up.

    Args:
        federation: The sites.
        server: The server at its first cycle, or a resumed one.

    Returns:
        The server's final state.
    """
    config = server.config
    if config.batch == "shared" and not server.examples:
        # A resumed run has agreed already.
        server.examples, _ = agree_on_shares(federation)

    for cycle in federation.rounds(server.round, server.cycles):
        sent = server.select_sent()
        # Sites still have the parameters that they have just evaluated.
        tensors = {} if server.evaluated is sent else sent
        total = sum_or_combine(
            federation, config, TRAIN, tensors, sent, cycle=cycle.number
        )  # an epoch at each site: Q_k^t
        if config.compression == "none":
            server.require_returned(total, list_shapes(sent))
            mean = server.compute_mean(total)  # [bert eq 1] Σ n_k/N Q_k^t
        else:
            mean = _collect_encoded_changes(federation, server, sent, total)
        server.step(mean, total)

        is_evaluated = server.is_evaluation_due
        if is_evaluated:
            counts = federation.sum(EVALUATE, server.shared, cycle=cycle.number)
            is_kept = server.judge(counts)
            server.evaluated = server.shared
            if is_kept:
                federation.sum("keep")  # the private parameters of the same cycle
        cycle.commit(server.state(), server.metrics, evaluated=is_evaluated)
    result = server.result
    tensors = {} if server.evaluated is result else result
    federation.sum("finish", tensors, **server.list_finish_options())
    return server.state()


def _collect_encoded_changes(
    federation: Federation, server: Server, sent: Tensors, mean_squares: Total
) -> dict[str, Tensor]:
    """Ask the sites for their encoded changes, and return their parameters' mean.

    Sites have reported the mean squares of their changes. The mean of these gives a
    step size for each tensor, and sites send their changes in whole steps.

    Args:
        federation: The sites.
        server: The server.
        sent: The parameters at the start of the cycle.
        mean_squares: The sum of the sites' mean squares.
    """
    server.require_returned(mean_squares, dict.fromkeys(sent, (1,)))
    means = server.compute_mean(mean_squares)
    server.require_finite(means)
    steps = choose_step_sizes(means)

    sites = mean_squares.sites
    coded = federation.sum("send", steps, weight=mean_squares.weight, sites=sites)
    server.require_returned(coded, list_encoded_shapes(sent, sites))
    mean_levels = server.compute_mean(unpack_total(coded, sent, sites))
    change = decode_change(mean_levels, steps, sent)
    return {name: sent[name] + change[name] for name in sent}


class Server(RoundServer):
    """The server: Q_ag, its optimizer, and the kept cycle.

    Args:
        config: The settings of the run.
        initial: The parameters that sites share, before training.
        summarise: Turns a sum of counts into scores, among them "held_out": larger is
            better, and it is -inf if nothing is held out.
        resumed: The state to resume from; None at the first start.
        warm_up_cycles: Number of cycles of a warm-up, which are not part of T.
        warm_up: Names of the parameters that a warm-up trains.

    Attributes:
        evaluated: The parameters last sent by "evaluate", which sites remember.
        examples: Number of examples of all sites, once agreed; 0 before.
    """

    config: Averaging

    def __init__(
        self,
        config: Averaging,
        initial: Tensors,
        summarise: Summarise,
        resumed: State | None,
        *,
        warm_up_cycles: int = 0,
        warm_up: Collection[str] = (),
    ) -> None:
        self.warm_up_cycles = warm_up_cycles
        self._warm_up = warm_up
        self._summarise = summarise
        self.evaluated: Tensors | None = None
        self.examples = 0
        self._optimizer = server_steps.make_server_step(
            config.server,
            config.server_learning_rate,
            momentum=config.momentum,
            betas=config.betas,
            adaptivity=config.adaptivity,
        )
        best = Best(
            keeps_tensors=config.keep_cycle == BEST, later="never", lowest=-math.inf
        )
        super().__init__(config, copy_tensors(initial), best, resumed)

    @property
    def cycles(self) -> int:
        """Number of cycles that are run, including the warm-up."""
        return self.warm_up_cycles + self.config.last_cycle

    @property
    def is_evaluation_due(self) -> bool:
        """Whether the cycle that just ended is evaluated; the last one always is."""
        number = self.round - self.warm_up_cycles  # 0 or less in the warm-up
        return self.round == self.cycles or number % self.config.evaluate_every == 0

    @property
    def result(self) -> dict[str, Tensor]:
        """The parameters of the kept cycle."""
        return self.best.tensors or self.shared

    def select_sent(self) -> dict[str, Tensor]:
        """Return the parameters that the next cycle trains."""
        if self.round >= self.warm_up_cycles:
            return self.shared
        return {name: self.shared[name] for name in self._warm_up}

    def list_finish_options(self) -> Mapping[str, Option]:
        """Return the options of the last task, which a subclass may define."""
        return {}

    def require_returned(
        self, total: Total, shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Check the names and shapes of what sites returned.

        Raises:
            TrainingError: They differ from those expected.
        """
        total.require(shapes)

    def compute_mean(self, total: Total) -> dict[str, Tensor]:
        """Return the weighted mean of the tensors that sites sent in a cycle."""
        return total.mean()

    def step(self, mean: Tensors, total: Total) -> None:
        """Compute Q_ag^t from the mean of the sites' Q_k^t.

        Args:
            mean: Σ n_k/N Q_k^t.
            total: The sum, for its metrics.
        """
        self.require_finite(mean)
        is_warm_up = self.round < self.warm_up_cycles
        stepped = mean if is_warm_up else self._optimizer(self.shared, mean)
        self.shared = {**self.shared, **stepped}
        self.round += 1
        examples = max(1.0, total.metric("examples"))
        self.metrics = {"loss": total.metric("loss") / examples}

    def require_finite(self, mean: Tensors) -> None:
        """Check the numbers that sites sent in this cycle.

        Raises:
            DivergedError: A number is not finite, because training diverged.
        """
        for name, value in mean.items():
            if not bool(torch.isfinite(value).all()):
                raise DivergedError(
                    f"cycle {self.round + 1}: parameter {name!r} is no longer finite "
                    "at one of the sites: lower learning_rate"
                )

    def judge(self, total: Total) -> bool:
        """Record the held-out scores; return whether this cycle's model is kept.

        Raises:
            TrainingError: The best cycle is to be kept, but nothing is held out.
        """
        scores = self._summarise(total.metrics)
        self.metrics |= {
            n: score for n, score in scores.items() if math.isfinite(score)
        }
        held_out = scores["held_out"]
        if self.best.keeps_tensors and held_out == -math.inf:
            raise TrainingError(
                "keep_cycle = -1 selects the best cycle, but no site has "
                "held-out data: give the number of a cycle, or 0 for the last"
            )
        if self.round <= self.warm_up_cycles:  # a cycle of the warm-up is never kept
            return False
        return self.best.judge(held_out, self.shared)

    def state(self) -> State:
        """Return all state that the next cycle depends on."""
        state = super().state()
        tensors = {**state.tensors, **add_prefix("moment.", self._optimizer.moments)}
        facts = {**state.facts, "examples": self.examples}
        return replace(state, tensors=tensors, facts=facts)

    def _restore(self, state: State) -> None:
        super()._restore(state)
        self.examples = int(state.facts.get("examples", 0))
        # The names of moments are first.NAME and second.NAME.
        moments = select_prefix("moment.", state.tensors)
        for name, value in moments.items():
            parameter = name.partition(".")[2]
            require_like({name: self.shared[parameter]}, {name: value})
        self._optimizer.moments = moments


def _count_fewest_batches(steps: int, batches_per_epoch: int) -> int:
    """Return the fewest different mini-batches of an epoch that a cycle will have.

    A cycle begins where the last one ended, so the end of an epoch may cut it into two
    parts. Both parts may read the same examples, because each epoch reads all of them.
    Only the mini-batches of the larger part are therefore sure to be different.

    Args:
        steps: Number of steps of each cycle.
        batches_per_epoch: Number of mini-batches of an epoch.
    """
    # Within their epochs, cycles begin at multiples of the greatest common divisor.
    # Both parts of a cycle are therefore such multiples, and the larger one is smallest
    # if the cut is as near to the middle as these allow.
    divisor = math.gcd(steps, batches_per_epoch)
    larger_part = divisor * math.ceil(steps / (2 * divisor))
    return min(batches_per_epoch, larger_part)


class AveragingSite(SiteTasks):
    """A site whose parameters are averaged after local training.

    Pre-training, fine-tuning and stage 1 of phenotyping share it. A subclass defines
    `steps` (an epoch's mini-batches) and the tasks "evaluate" and "finish".

    Args:
        id: The site's name in the job.
        config: The settings of the run.
        parameters: All trained parameters by name.
        weight: n_k.
        examples: Number of examples in an epoch.
        private: Names of the parameters that stay at the site.
        warm_up_cycles: Number of cycles of a warm-up, which trains only `warm_up`.
        warm_up: Names of the parameters that a warm-up trains.
        warm_up_rate: Learning rate of the warm-up.
        device: Device of the model.
        optimizer: Optimizer of all parameters; None creates AdamW.
        draws: Random draws for order and dropout; None derives them from the job's
            seed.
        count_step: The weight and all counts leave the site as multiples of this
            number; local training uses exact numbers.

    Attributes:
        shared: The parameters that are averaged.
        private: The parameters that stay at the site.
        share: Number of examples in a step, once agreed.
        weight: n_k, rounded as it leaves the site.
        trainer: Takes the optimizer steps.
    """

    tasks: ClassVar[frozenset[str]] = frozenset(
        {"count", "take_share", TRAIN, "send", EVALUATE, "keep", "finish"}
    )
    for_all_sites: ClassVar[frozenset[str]] = frozenset({EVALUATE, "keep"})
    builds_on: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {"send": (TRAIN,)}
    )

    def __init__(  # noqa: PLR0913 - all but two are optional, by keyword
        self,
        id: str,
        config: Averaging,
        parameters: Mapping[str, torch.nn.Parameter],
        *,
        weight: float,
        examples: int,
        private: Collection[str] = (),
        warm_up_cycles: int = 0,
        warm_up: Collection[str] = (),
        warm_up_rate: float = 0.0,
        device: torch.device | str = "cpu",
        optimizer: Optimizer | None = None,
        draws: Draws | None = None,
        count_step: int = 1,
    ) -> None:
        self._id = id
        self._averaging = config
        self.count_step = count_step
        self.weight = weight if count_step == 1 else round_count(weight, count_step)
        self.draws = draws or Draws(config.seed)
        self.parameters = dict(parameters)
        self.shared = {n: p for n, p in self.parameters.items() if n not in private}
        self.private = {n: p for n, p in self.parameters.items() if n in private}
        self.device = torch.device(device)
        self.share = config.batch_size
        self._examples = examples
        self._warm_up_cycles = warm_up_cycles
        self._warm_up = tuple(warm_up)
        self.trainer = LocalTrainer(
            id,
            config,
            self.parameters,
            draws=self.draws,
            device=self.device,
            optimizer=optimizer,
            warm_up=self._warm_up,
            warm_up_rate=warm_up_rate,
        )

        # If cycles are not whole epochs: the current epoch, and its steps so far.
        self._epoch = 0
        self._steps_in_epoch = 0
        # Steps of an epoch over all sites' examples; 0 if an epoch is over this site's.
        self._common_steps = 0
        self._all_examples = 0
        self._change: dict[str, Tensor] = {}  # sent by the next "send"
        self._unsent: dict[str, Tensor] = {}  # rounding error carried over
        self._evaluated: Tensors | None = None  # last received by "evaluate"
        self._kept_private: dict[str, Tensor] = {}  # of the kept cycle

    @property
    def id(self) -> str:
        """The site's name in the job."""
        return self._id

    @abstractmethod
    def iterate_steps(self, epoch: int, first: int = 0) -> Iterable[list[Step]]:
        """Yield an epoch's mini-batches of `share` examples, each split into parts.

        Their order depends only on the draws, the site and the epoch.

        Args:
            epoch: The epoch's number.
            first: Number of mini-batches to skip.
        """

    # Numbers of examples and steps.

    @property
    def reported_examples(self) -> int:
        """The number of examples in an epoch, rounded as it leaves the site."""
        return round_count(self._examples, self.count_step)

    @property
    def _part_size(self) -> int:
        """Number of examples in a part of a mini-batch."""
        return -(-self.share // self._averaging.accumulate)

    @property
    def _steps_per_epoch(self) -> int:
        """Number of steps in an epoch over this site's examples."""
        return math.ceil(self._examples / self.share)

    @property
    def _steps_per_cycle(self) -> int:
        """Number of steps in a cycle, at least one."""
        steps_per_epoch = self._common_steps or self._steps_per_epoch
        return max(1, round(self._averaging.local_epochs * steps_per_epoch))

    @property
    def _has_whole_epochs(self) -> bool:
        """Whether each cycle is a number of complete epochs."""
        epochs = self._averaging.local_epochs
        return not self._common_steps and epochs == int(epochs)

    @property
    def _planned_steps(self) -> int:
        """Number of steps in all cycles, excluding a warm-up."""
        return self._averaging.cycles * self._steps_per_cycle

    def count(self, tensors: Tensors) -> Update:
        """Return the site's number of examples."""
        del tensors
        return Update(metrics={"examples": self.reported_examples})

    def take_share(self, tensors: Tensors, *, examples: int) -> Update:
        """Set this site's part of a shared mini-batch; return it.

        Args:
            tensors: Ignored.
            examples: Number of examples of all sites. Only the first value in a run has
                an effect (`keep_first_sum`).
        """
        del tensors
        size = self.reported_examples  # the sum is over rounded numbers too
        self._all_examples = keep_first_sum(self._all_examples, examples, size)
        if self._averaging.batch == "shared":
            batch = self._averaging.batch_size
            sites = self._averaging.sites
            least = compute_least_part(batch, sites, size)
            self.share = compute_part(batch, size, self._all_examples, least)
            if sites > batch:
                # At most as many as if all sites had this size, even if the server's
                # sum is larger.
                all_examples = min(self._all_examples, sites * size)
                self._common_steps = math.ceil(all_examples / batch)
        return Update(metrics={"share": self.share})

    def count_example_tokens(self) -> np.ndarray | None:
        """Return the tokens of each example of the newest epoch, (examples,).

        Examples have no tokens in common. None if they have no tokens.
        """
        return None

    def count_covered(self, task: str) -> dict[str, int]:
        """Return the steps, mini-batch and tokens behind an update of this task.

        They are lower bounds for the newest cycle or, before the first cycle, for every
        cycle.
        """
        if task not in (TRAIN, "send"):
            return {}
        lengths = self.count_example_tokens()
        examples = self._examples if lengths is None else len(lengths)
        epoch_batches = math.ceil(examples / self.share)
        steps = self._steps_per_cycle
        if self._has_whole_epochs:
            steps = max(1, int(self._averaging.local_epochs) * epoch_batches)
        # If a cycle is one step, it may be the epoch's last and smallest mini-batch.
        left_over = examples % self.share if steps == 1 else 0
        smallest_batch = left_over or min(self.share, examples or self.share)
        coverage = {"steps": steps, "batch": smallest_batch}
        if lengths is not None:
            read_batches = self._count_batches(steps, epoch_batches)
            unread_batches = epoch_batches - read_batches
            fewest_read = max(0, examples - unread_batches * self.share)
            # A lower bound: the tokens of the shortest examples, each once.
            shortest = np.sort(lengths)[:fewest_read]
            coverage["tokens"] = int(shortest.sum())
        return coverage

    def _count_batches(self, steps: int, in_epoch: int) -> int:
        """Return how many different mini-batches of one epoch a cycle has at least.

        Args:
            steps: Number of steps of the cycle.
            in_epoch: Number of mini-batches of an epoch.
        """
        if not self._steps_in_epoch:
            return _count_fewest_batches(steps, in_epoch)
        of_this_epoch = min(steps, self._steps_in_epoch)
        return min(in_epoch, max(of_this_epoch, steps - of_this_epoch))

    def require_covered(self) -> None:
        """Check that enough tokens and steps are behind an update of word embeddings.

        If an update of the embeddings or of the output bias covers few tokens, they can
        be read off it.

        Raises:
            ConfigError: There are fewer than the settings require.
        """
        config = self._averaging
        coverage = self.count_covered(TRAIN)
        tokens = coverage["tokens"]
        steps = coverage["steps"]
        if tokens < config.min_tokens or steps < config.min_steps:
            raise ConfigError(
                f"site {self.id!r}: with train = 'all' an update reveals which words "
                f"were in it. It covers {tokens:,} tokens in {steps} steps; min_tokens "
                f"= {config.min_tokens:,} and min_steps = {config.min_steps} are "
                'needed: set train = "encoder" (the embeddings stay), or use more '
                "notes or smaller batches"
            )

    # Training.

    def train(self, tensors: Tensors, *, cycle: int) -> Update:
        """Train for a cycle; return Q_k^t with weight n_k, or mean squares of changes.

        Args:
            tensors: Q_ag^{t-1}; in a warm-up only the parameters that it trains. If
                empty, training starts from the last evaluated parameters.
            cycle: The cycle's number, including cycles of the warm-up.

        Raises:
            RefusedError: The parameters are not those that this cycle of the job
                trains.
            TrainingError: `tensors` is empty, and the site was restarted in between.
        """
        tensors = self._choose_parameters(tensors)
        self._require_names(tensors, cycle)
        is_warm_up = tensors.keys() < self.shared.keys()
        if is_warm_up:
            self.begin_warm_up()
        trained = {name: p for name, p in self.shared.items() if name in tensors}
        load_into(trained, tensors)
        start = {name: value.to(self.device) for name, value in tensors.items()}
        for name, parameter in self.parameters.items():
            is_trained = name in trained or (not is_warm_up and name in self.private)
            parameter.requires_grad_(is_trained)

        loss = 0.0
        examples = 0
        for parts in self._iterate_batches(cycle):
            loss += self._step(parts, start, is_warm_up=is_warm_up)  # [bert cycle]
            examples += sum(part.examples for part in parts)
        epochs = math.ceil(self._averaging.local_epochs)
        metrics = {
            "loss": scale_sum(loss, examples, self.count_step, epochs),
            "examples": float(round_count(examples, self.count_step, epochs)),
        }

        if self._averaging.compression == "none":
            return self._make_update(copy_tensors(trained), metrics)  # [bert eq 1]
        self._change = {
            name: parameter.detach() - start[name] + self._find_unsent(name, parameter)
            for name, parameter in trained.items()
        }
        return self._make_update(compute_mean_squares(self._change), metrics)

    def _find_unsent(self, name: str, parameter: Tensor) -> Tensor:
        """Return what rounding left of a parameter's changes; zeros at first."""
        return self._unsent.get(name, torch.zeros_like(parameter))

    def _require_names(self, tensors: Tensors, cycle: int) -> None:
        """Raise RefusedError unless the tensors are those that a cycle trains."""
        is_warm_up = cycle < self._warm_up_cycles
        expected = set(self._warm_up if is_warm_up else self.shared)
        odd = sorted(tensors.keys() ^ expected)
        if odd:
            problem = "is not among them" if odd[0] in tensors else "is missing"
            raise RefusedError(
                f"site {self.id!r}: cycle {cycle} of the job trains different "
                f"parameters from the {len(tensors)} received: {odd[0]!r} {problem}"
            )

    def _iterate_batches(self, cycle: int) -> Iterator[list[Step]]:
        """Yield the mini-batches of a cycle."""
        if self._has_whole_epochs:
            epochs = int(self._averaging.local_epochs)
            for local in range(epochs):  # [bert cycle]
                yield from self.iterate_steps(cycle * epochs + local)  # [bert cycle]
            return

        # Parts of epochs: continue where the previous cycle ended.
        left = self._steps_per_cycle if self._examples else 0
        while left:
            epoch = self.iterate_steps(self._epoch, self._steps_in_epoch)
            for parts in islice(epoch, left):
                left -= 1
                self._steps_in_epoch += 1
                yield parts
            if left:
                self._epoch += 1
                self._steps_in_epoch = 0

    def _step(self, parts: list[Step], start: Tensors, *, is_warm_up: bool) -> float:
        """Take one optimizer step; return the loss summed over its examples."""
        if is_warm_up:
            return self.trainer.step_in_warm_up(parts, start=start)
        return self.trainer.step(parts, planned=self._planned_steps, start=start)

    def begin_warm_up(self) -> None:
        """Reset parameters that a warm-up does not send; sites may share a model."""

    def send(self, tensors: Tensors, *, weight: float, sites: int) -> Update:
        """Return the change of the last "train" in whole quantisation steps.

        Args:
            tensors: The step size of each tensor.
            weight: Weight of the sum from which the step sizes were derived.
            sites: Number of sites in that sum.

        Raises:
            TrainingError: The site has not trained.
            RefusedError: No server of this job can make this request.
        """
        if not self._change:
            raise TrainingError(
                f"site {self.id!r} was asked for its change before it trained: start "
                "the run again"
            )
        config = self._averaging
        require_step_sizes(tensors, self._change)
        has_weight = 0 <= weight < math.inf
        if not has_weight or not 1 <= sites <= (config.sites or sites):
            raise RefusedError(
                f"site {self.id!r} received an impossible sum, of weight {weight:g} "
                f"over {sites} sites"
            )
        # Refusing weights below this site's weight would reveal its weight.
        weight = max(weight, self.weight)
        part = sites * self.weight / weight if weight else 0.0
        sent, unsent = encode_change(self._change, tensors, part, sites)
        self._unsent |= unsent
        self._change = {}
        return self._make_update(sent, {}, part)

    def _make_update(
        self, tensors: Tensors, metrics: Mapping[str, float], part: float | None = None
    ) -> Update:
        """Return the site's update in a cycle, with its weight.

        Args:
            tensors: The tensors to send.
            metrics: Losses and counts to report.
            part: Factor by which the tensors are already weighted; None if they are
                not.
        """
        sent = {name: value.cpu() for name, value in tensors.items()}
        if part is None:
            return Update(sent, self.weight, metrics)
        return Update(sent, metrics={**metrics, "part": part})

    # Evaluated and kept parameters.

    def keep(self, tensors: Tensors) -> Update:
        """Keep the private parameters of the cycle that was just evaluated."""
        del tensors
        self._kept_private = copy_tensors(self.private)
        return Update()

    def load(self, tensors: Tensors) -> None:
        """Load the parameters to evaluate, and remember them."""
        self._evaluated = self._choose_parameters(tensors)
        load_into(self.shared, self._evaluated)

    def load_kept(self, tensors: Tensors) -> None:
        """Load the parameters of the kept cycle."""
        self.load(tensors)
        if self._kept_private:
            load_into(self.private, self._kept_private)

    def _choose_parameters(self, tensors: Tensors) -> Tensors:
        """Return the tensors that the server sent, or the last evaluated ones.

        The server sends none if it means the parameters that the sites evaluated last.

        Args:
            tensors: The tensors that the server sent, which may be none.

        Raises:
            TrainingError: The server sent none, but this site has been restarted since
                the evaluation and no longer has them.
        """
        # Sites that share no parameters receive none.
        if tensors or not self.shared:
            return tensors
        if self._evaluated is None:
            raise TrainingError(
                f"site {self.id!r} has no parameters: it was restarted since the last "
                "evaluation"
            )
        return self._evaluated

    # State that must survive a restart.

    def state(self) -> State:
        """Return what is carried over to the next round.

        This is moments, private parameters and rounding errors.
        """
        private = {name: p.detach() for name, p in self.private.items()}
        tensors = {
            **self.trainer.state(),
            **add_prefix("private.", private),
            **add_prefix("left.", self._unsent),
            **add_prefix("kept.", self._kept_private),
        }
        facts = {
            "before": self.trainer.steps_in_warm_up,
            "share": self.share,
            "common": self._common_steps,
            "all": self._all_examples,
            "epoch": self._epoch,
            "begun": self._steps_in_epoch,
        }
        return State(self.trainer.steps_taken, tensors, facts)

    def restore(self, state: State) -> None:
        """Restore a saved state."""
        facts = state.facts
        self.trainer.restore(state.tensors, state.round, int(facts["before"]))
        self.share = int(facts.get("share", self.share))
        self._common_steps = int(facts.get("common", 0))
        self._all_examples = int(facts.get("all", 0))
        self._epoch = int(facts.get("epoch", 0))
        self._steps_in_epoch = int(facts.get("begun", 0))
        load_into(self.private, select_prefix("private.", state.tensors))
        self._kept_private = select_prefix("kept.", state.tensors)
        unsent = select_prefix("left.", state.tensors)
        self._unsent = {name: value.to(self.device) for name, value in unsent.items()}
