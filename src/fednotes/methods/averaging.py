"""Averaging of locally trained parameters: what pre-training and fine-tuning have in
common.

Dianbo Liu and Tim Miller (2020), "Federated pretraining and fine tuning of BERT using
clinical notes from multiple silos", section 3.2; McMahan et al. 2017 (FedAvg).

    paper       here
    t           `Server.round`, the global cycle
    T           `Averaging.cycles`
    K           the sites of the federation
    n_k         the weight of a site's update: patients in pre-training, notes in fine-tuning
    N           `Total.weight`
    Q_k^t       what a site returns from "train"
    Q_ag^t      `Server.shared` after `Server.step`

What the server makes of the mean is a value (`server_steps.py`), and so is what sites
send (`compression.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeVar

import torch
from annotated_types import Len
from torch import Tensor

from fednotes.core.counts import round_count, scale_sum
from fednotes.core.errors import ConfigError, RefusedError, TrainingError
from fednotes.core.federation import EVALUATE, TRAIN, Federation, SiteTasks, State
from fednotes.core.seeds import Draws
from fednotes.core.settings import checked
from fednotes.core.tensors import (
    below,
    load_into,
    nbytes,
    prefixed,
    require_like,
    seed_torch,
    shapes_of,
    snapshot,
)
from fednotes.core.update import Tensors, Total, Update
from fednotes.privacy.training import Privately
from fednotes.training import server_steps
from fednotes.training.compression import (
    Compression,
    agreed,
    decode,
    encode,
    opened,
    require_code,
    sent_shapes,
    sizes,
    told,
    told_shapes,
)
from fednotes.training.row_adam import RowAdam
from fednotes.training.server_steps import Aggregation, by_each, gathered
from fednotes.training.sites import (
    Adam,
    Best,
    Count,
    Number,
    Part,
    Rate,
    RoundServer,
    Share,
    Size,
    agree_on_shares,
    finite,
    larger_batch_warning,
    least_part,
    part_of,
)

BEST = -1  # of `keep_cycle`
# low-rank changes, by the first word of a parameter's name
CHANGES = ("lora", "private")
Judged = Callable[[Mapping[str, float]], dict[str, float]]
Optimizer = Adam | RowAdam


@checked(frozen=True)
class Averaging(Aggregation):
    """Settings that pre-training, fine-tuning and phenotyping have in common.

    Attributes:
        cycles: T, the number of cycles. In each, every site trains, and then the mean
            of the models is taken.
        keep_cycle: The cycle whose model is the result: 0 is the last, -1 the best on
            held-out data. No cycle is run after a numbered one, though the learning
            rate is still scheduled over all `cycles`.
        local_epochs: Epochs of training at every site in each cycle. A fractional part
            is that part of an epoch's steps.
        local_steps: Steps of training at every site in each cycle, in place of
            `local_epochs`; 0 uses `local_epochs`.
        batch: Whose step `batch_size` counts: "each" site's, or that of all sites
            together ("shared"). Shared batches are divided by the sites' numbers of
            examples, each site getting at least one example and a quarter of an equal
            part, so that a site takes about as many steps as one place with all notes
            would. Where there are more sites than examples in a batch, sites of average
            size take one example a step and read their notes more than once in an
            epoch, and small sites take fewer steps.
        batch_size: Number of examples in a step; see `batch`.
        accumulate: Number of smaller batches that a step is made of, where memory is
            short.
        learning_rate: Learning rate of AdamW at the sites. Its moments and schedule
            continue from cycle to cycle.
        lora_learning_rate: Learning rate of low-rank changes; 0 takes `learning_rate`.
        warmup: Fraction of a site's steps over which the learning rate rises.
        decay: Learning rate after the warm-up: "linear" falls to zero at the last step,
            "constant" stays.
        weight_decay: Weight decay of AdamW.
        clip: Largest norm of a step's gradient; 0 does not clip. The norm is taken over
            shared and private parameters together, after the term of FedProx was added.
        precision: Precision of the matrix products in training; "auto" is "bfloat16"
            where the processor has instructions for it (about twice as fast there),
            else "float32".
        proximal: μ of FedProx (Li et al. 2020), the pull towards the parameters at the
            cycle's start.
        server: "average" is Eq. 1; "nesterov" adds momentum; "adam" and "yogi" are
            FedAdam and FedYogi, with `betas` and `adaptivity` (`server_steps.py`).
        server_learning_rate: Learning rate of the server; 0 means 1, and 1e-3 for
            "adam" and "yogi", whose steps have about that size for each number.
        momentum: Momentum of server = "nesterov".
        betas: The two decay rates of server = "adam" and "yogi".
        adaptivity: τ of server = "adam" and "yogi": their second moments start at its
            square.
        compression: How sites encode what they send: "packed" uses a few bits a number,
            "top-k" the largest blocks (under the secure sum these take twice as many
            bytes, as do uncompressed updates).
        top_share: Fraction of the blocks that compression = "top-k" sends.
        evaluate_every: Number of cycles between two evaluations and checkpoints.
        min_tokens: Smallest number of tokens behind an update of word embeddings or of
            an output bias, since such an update tells which words it was made of.
        min_steps: Smallest number of steps behind an update of word embeddings or of an
            output bias.
        seed: The job's seed. A job fills it in.
    """

    cycles: Count = 15
    keep_cycle: int = 0
    local_epochs: Rate = 1
    local_steps: Number = 0
    batch: Literal["each", "shared"] = "each"
    batch_size: Count = 32
    accumulate: Count = 1
    learning_rate: Rate = 1e-4
    lora_learning_rate: Size = 0.0
    warmup: Part = 0.1
    decay: Literal["linear", "constant"] = "linear"
    weight_decay: Size = 0.01
    clip: Size = 1.0
    precision: Literal["float32", "bfloat16", "auto"] = "float32"
    proximal: Size = 0.0
    server: server_steps.Kind = "average"
    server_learning_rate: Size = 0.0
    momentum: Part = 0.5
    betas: Annotated[tuple[Part, ...], Len(2, 2)] = (0.9, 0.99)
    adaptivity: Rate = 1e-3
    compression: Compression = "none"
    top_share: Share = 0.05
    evaluate_every: Count = 1
    min_tokens: Number = 10_000
    min_steps: Number = 10
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigError for a value that no run can have."""
        if not BEST <= self.keep_cycle <= self.cycles:
            raise ConfigError(
                f"keep_cycle = {self.keep_cycle}: one of the {self.cycles} cycles, "
                "0 for the last, -1 for the best"
            )
        if self.accumulate > self.batch_size:
            raise ConfigError(
                f"accumulate = {self.accumulate}: at most batch_size = {self.batch_size}, one "
                "example in each part"
            )
        if by_each(self) and self.compression != "none":
            raise ConfigError(
                f'aggregation = "{self.aggregation}" looks at each site\'s update, compression = '
                f'"{self.compression}" is a code for sums: set compression = "none"'
            )

    @property
    def last_cycle(self) -> int:
        """The last cycle that is run: none is after the one that is asked for by
        number."""
        return self.keep_cycle if self.keep_cycle > 0 else self.cycles


C = TypeVar("C", bound=Averaging)


def central(config: C) -> C:
    """Of training in one place: without what a server and few bytes add to it."""
    plain: dict[str, Any] = {
        "server": "average",
        "compression": "none",
        "proximal": 0.0,
    }
    plain["aggregation"] = "mean"
    return replace(config, **plain, server_learning_rate=0.0)


def parts(config: C, sizes: Sequence[int]) -> tuple[C, ...]:
    """Configurations of sites that train by themselves, each with the batch that it has
    in the federation. sizes: of their training data."""
    config = central(config)
    if config.batch == "each":
        return (config,) * len(sizes)
    pieces = config.accumulate
    return tuple(
        replace(config, batch="each", batch_size=one, accumulate=min(one, pieces))
        for one in _shares(config, sizes)
    )


def _shares(config: Averaging, sizes: Sequence[int]) -> list[int]:
    """Return each site's part of a shared mini-batch, of their numbers of examples."""
    whole, batch = max(1, sum(sizes)), config.batch_size
    least = [least_part(batch, config.sites, size) for size in sizes]
    return [
        part_of(batch, size, whole, low) for size, low in zip(sizes, least, strict=True)
    ]


def size_warnings(config: Averaging, sizes: Sequence[int]) -> tuple[str, ...]:
    """Return a warning where the parts of a shared mini-batch add up to much more than
    it."""
    if config.batch != "shared":
        return ()
    return larger_batch_warning(
        config.batch_size, _shares(config, [n for n in sizes if n])
    )


def private_by(
    initial: Callable[[Any], dict[str, Tensor]],
    loss: Callable[..., Tensor],
    **more: Any,
) -> Privately:
    """How such a method trains with differential privacy, in so many rounds as local
    steps. more: of `Privately`, and further settings that must have one value."""
    settings: dict[str, Any] = {
        **{"server": "average", "server_learning_rate": 0.0, "compression": "none"},
        **{
            "batch": "each",
            "accumulate": 1,
            "keep_cycle": 0,
            "proximal": 0.0,
            "clip": 0.0,
        },
        **{
            "decay": "constant",
            "warmup": 0.0,
            "weight_decay": 0.0,
            "lora_learning_rate": 0.0,
        },
        **{"precision": "float32", "aggregation": "mean"},
    }

    own = settings | more.pop("settings", {})
    return Privately(own, initial, loss, private_rounds, **more)


def private_rounds(config: Averaging, epoch: int) -> int:
    """Local steps of a run, of so many to an epoch."""
    return math.ceil(
        config.cycles * (config.local_steps or config.local_epochs * epoch)
    )


def traffic_of(
    config: Averaging, shared: Tensors, before: int = 0, head: int = 0
) -> tuple[int, int]:
    """Bytes that a site sends and is sent at most in a run. head: bytes of a warm-up's
    cycle."""
    up, code = sizes(shared, config.compression, config.top_share, config.sites)
    each, warming = nbytes(shared), before * head
    sent = max(1, before) + config.cycles  # what was judged is not sent again
    sent += config.keep_cycle == BEST  # but the best, in the end
    return warming + config.cycles * up, warming + sent * each + config.cycles * code


def examples_of(config: Averaging, sizes: Sequence[int]) -> int:
    """Examples of a cycle at all sites together, of their numbers of examples."""
    sites, batch = len(sizes), config.batch_size
    shared = config.batch == "shared"
    if config.local_steps:
        return config.local_steps * (max(batch, sites) if shared else batch * sites)
    # times that an epoch is read
    again = sites / batch if shared and sites > batch else 1.0
    return math.ceil(sum(sizes) * config.local_epochs * again)


def run_cycles(federation: Federation, server: Server) -> State:
    """T global cycles, after those of the warm-up."""
    config = server.config
    # a resumed run has agreed before
    if config.batch == "shared" and not server.examples:
        server.examples, _ = agree_on_shares(federation)
    for cycle in federation.rounds(server.round, server.cycles):
        sent = server.sent
        given = {} if server.told is sent else sent  # nothing is sent twice
        here, number = (federation, config), cycle.number
        # an epoch at each site: Q_k^t
        total = gathered(*here, TRAIN, given, sent, cycle=number)
        if config.compression == "none":
            server.require_returned(total, shapes_of(sent))
            mean = server.mean(total)  # [bert eq 1] Σ n_k/N Q_k^t
        else:
            server.require_returned(total, told_shapes(sent, config.compression))
            sizes_told = server.mean(total)
            server.require_finite(sizes_told)
            code = agreed(sizes_told, config.compression, config.top_share)
            asked = federation.sum("send", code, weight=total.weight, sites=total.sites)
            coded = sent_shapes(code, sent, config.compression, total.sites)
            server.require_returned(asked, coded)
            changes = server.mean(opened(asked, sent, config.compression, total.sites))
            change = decode(changes, code, sent, config.compression)
            mean = {name: sent[name] + change[name] for name in sent}
        server.step(mean, total)
        evaluated = server.due
        if evaluated:
            kept = server.judge(
                federation.sum(EVALUATE, server.shared, cycle=cycle.number)
            )
            server.told = server.shared
            if kept:
                federation.sum("keep")  # what is private of the same cycle
        cycle.commit(server.state(), server.metrics, evaluated=evaluated)
    federation.sum("finish", {} if server.told is server.result else server.result)
    return server.state()


class Server(RoundServer):
    """Q_ag, the server's optimizer, and the cycle that is kept.

    initial: the parameters that sites share, before training. before: cycles that train
    `warm_up` alone; they are not counted in T. judged: a sum of counts → numbers for
    people, among them "held_out", of which more is better (-inf where nothing is).
    """

    config: Averaging

    def __init__(
        self,
        config: Averaging,
        initial: Tensors,
        judged: Judged,
        resumed: State | None,
        *,
        before: int = 0,
        warm_up: Collection[str] = (),
    ) -> None:
        self.before, self._judged, self._warm_up = before, judged, warm_up
        # what "evaluate" sent last, which sites remember
        self.told: Tensors | None = None
        self.examples = 0  # of all sites, once agreed
        self._optimizer = server_steps.server_step(
            config.server,
            config.server_learning_rate,
            momentum=config.momentum,
            betas=config.betas,
            adaptivity=config.adaptivity,
        )
        best = Best(config.keep_cycle == BEST, "never", -math.inf)
        # rounds: the warm-up's too
        super().__init__(config, snapshot(initial), best, resumed)

    @property
    def cycles(self) -> int:
        """All that are run."""
        return self.before + self.config.last_cycle

    @property
    def due(self) -> bool:
        """Whether the cycle that has ended is to be judged: the last one is."""
        number = self.round - self.before  # of the warm-up's: 0 and below
        return self.round == self.cycles or number % self.config.evaluate_every == 0

    @property
    def result(self) -> dict[str, Tensor]:
        """The parameters of the cycle that is kept."""
        return self.best.tensors or self.shared

    @property
    def sent(self) -> dict[str, Tensor]:
        """What the next cycle trains."""
        if self.round >= self.before:
            return self.shared
        return {name: self.shared[name] for name in self._warm_up}

    def require_returned(
        self, total: Total, shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Check the names and shapes of what sites returned. Raises TrainingError."""
        total.require(shapes)

    def mean(self, total: Total) -> dict[str, Tensor]:
        """The mean of what sites sent in a cycle, whatever they weigh it by."""
        return total.mean()

    def step(self, mean: Tensors, total: Total) -> None:
        """Q_ag^t from the mean of the sites' Q_k^t."""
        self.require_finite(mean)
        warming = self.round < self.before
        self.shared = self.shared | dict(
            mean if warming else self._optimizer(self.shared, mean)
        )
        self.round += 1
        self.metrics = {
            "loss": total.metric("loss") / max(1.0, total.metric("examples"))
        }

    def require_finite(self, mean: Tensors) -> None:
        """Pass what sites sent in this cycle.

        Raises TrainingError where training went astray.
        """
        for name, value in mean.items():
            if not bool(torch.isfinite(value).all()):
                raise TrainingError(
                    f"cycle {self.round + 1}: parameter {name!r} is no longer finite at some site: "
                    "lower learning_rate"
                )

    def judge(self, total: Total) -> bool:
        """Note what held-out data say; whether this cycle's model is kept.

        Raises TrainingError where the best is asked for and nothing is held out.
        """
        found = self._judged(total.metrics)
        self.metrics |= {
            name: value for name, value in found.items() if math.isfinite(value)
        }
        if self.best.wanted and found["held_out"] == -math.inf:
            raise TrainingError(
                "keep_cycle = -1 asks for the best cycle, but no site holds anything out to judge "
                "by: name a cycle, or 0 for the last"
            )
        # a warm-up's cycle is never kept
        return self.round > self.before and self.best.judge(
            found["held_out"], self.shared
        )

    def state(self) -> State:
        """Everything that the next cycle depends on."""
        state = super().state()
        tensors = {**state.tensors, **prefixed("moment.", self._optimizer.moments)}
        return replace(
            state, tensors=tensors, facts={**state.facts, "examples": self.examples}
        )

    def _restore(self, state: State) -> None:
        super()._restore(state)
        self.examples = int(state.facts.get("examples", 0))
        # first.NAME, second.NAME
        self._optimizer.moments = below(state.tensors, "moment.")
        for name, value in self._optimizer.moments.items():
            require_like({name: self.shared[name.partition(".")[2]]}, {name: value})


class Step(Protocol):
    """A part of a mini-batch."""

    @property
    def examples(self) -> int:
        """How many words or masked tokens it has."""

    def loss(self, batch: Sequence[Any]) -> Tensor:
        """() what this part adds to the mean loss of all the parts of its batch."""


class AveragingSite(SiteTasks):
    """Local training that pre-training and fine-tuning share.

    A subclass gives `steps` (an epoch's mini-batches) and the tasks "evaluate" and
    "finish".
    id: the site's name in the job. weight: n_k. parameters: all that is trained; of
    these, `private` stay here. before: cycles of a warm-up, which trains `warm_up`
    alone. examples: of an epoch; tokens: where they are known. optimizer: of all
    parameters, in place of AdamW.
    draws: of orders and dropout; None: the job's seed. share: examples of a step, once
    it is agreed on. count_step: the weight and all counts are sent as multiples of it;
    `weight` is the one that is sent, and what is trained here goes by exact numbers.
    """

    tasks: ClassVar[frozenset[str]] = frozenset(
        {"count", "take_share", TRAIN, "send", EVALUATE, "keep", "finish"}
    )

    def __init__(
        self,
        id: str,
        config: Averaging,
        parameters: Mapping[str, torch.nn.Parameter],
        *,
        weight: float,
        examples: int,
        tokens: int | None = None,
        private: Collection[str] = (),
        before: int = 0,
        warm_up: Collection[str] = (),
        first_rate: float = 0.0,
        device: torch.device | str = "cpu",
        optimizer: Optimizer | None = None,
        draws: Draws | None = None,
        count_step: int = 1,
    ) -> None:
        self._id, self._averaging = id, config
        self.count_step = count_step
        self.weight = weight if count_step == 1 else round_count(weight, count_step)
        self.draws = draws or Draws(config.seed)
        self.parameters = dict(parameters)
        self.shared = {n: p for n, p in self.parameters.items() if n not in private}
        self.private = {n: p for n, p in self.parameters.items() if n in private}
        self.device = torch.device(device)
        self._before, self._warm_up = before, tuple(warm_up)
        self.share, self._examples, self._covered_tokens = (
            config.batch_size,
            examples,
            tokens,
        )
        factor = (
            config.lora_learning_rate or config.learning_rate
        ) / config.learning_rate
        factors = dict.fromkeys(CHANGES, factor)
        adam = Adam(self.parameters, config.learning_rate, config.weight_decay, factors)
        self._adam: Optimizer = adam if optimizer is None else optimizer
        self._first = Adam({n: self.parameters[n] for n in warm_up}, first_rate)
        # with local steps: an epoch, and the steps of it so far
        self._epoch = self._begun = 0
        self.taken = 0  # steps, those of a warm-up included
        self._taken_before = 0  # of them in the warm-up
        self._common = 0  # steps of an epoch of all sites' examples; 0: of one's own
        self._change: dict[str, Tensor] = {}  # waits for "send"
        self._left: dict[str, Tensor] = {}  # what could not be sent so far
        self._told: Tensors | None = None  # what "evaluate" was given last
        # private parameters of the cycle that is kept
        self._kept: dict[str, Tensor] = {}

    @property
    def id(self) -> str:
        """The site's name in the job."""
        return self._id

    def steps(self, epoch: int, first: int = 0) -> Iterable[list[Step]]:
        """An epoch's mini-batches of `share` examples from the first-th on, each in
        parts; their order depends on draws and site."""
        raise NotImplementedError

    @property
    def reported_examples(self) -> int:
        """The number of an epoch's examples as it leaves the site."""
        return round_count(self._examples, self.count_step)

    @property
    def _part(self) -> int:
        """Examples of a part of a mini-batch."""
        return -(-self.share // self._averaging.accumulate)

    @property
    def _per_epoch(self) -> int:
        """Steps of an epoch."""
        return math.ceil(self._examples / self.share)

    @property
    def _per_update(self) -> int:
        """Steps of a cycle."""
        config = self._averaging
        per_epoch = self._common or self._per_epoch
        return config.local_steps or max(1, round(config.local_epochs * per_epoch))

    def count(self, tensors: Tensors) -> Update:
        """How many examples the site has."""
        return Update(metrics={"examples": self.reported_examples})

    def take_share(self, tensors: Tensors, *, examples: int) -> Update:
        """Take this site's part of `batch_size`, of all sites' examples.

        Raises RefusedError for fewer than this site has alone.
        """
        size = self.reported_examples  # the sum is of such numbers too
        if examples < size:
            raise RefusedError(
                f"site {self.id!r} has more examples than the sum of all it is told"
            )
        if self._averaging.batch == "shared":
            batch, sites = self._averaging.batch_size, self._averaging.sites
            self.share = part_of(batch, size, examples, least_part(batch, sites, size))
            # at most as many as if all were of this size, whatever it is told
            if sites > batch:
                self._common = math.ceil(min(examples, sites * size) / batch)
        return Update(metrics={"share": self.share})

    def covered(self, task: str) -> dict[str, int]:
        """The local steps, mini-batch and tokens behind an update of this task."""
        if task not in (TRAIN, "send"):
            return {}
        behind = {"steps": self._per_update, "batch": self.share}
        if self._covered_tokens is not None:  # an epoch more reads the same ones
            part = min(1.0, self._per_update / max(1, self._per_epoch))
            behind["tokens"] = int(part * self._covered_tokens)
        return behind

    def _batches(self, cycle: int) -> Iterator[list[Step]]:
        """The mini-batches of a cycle."""
        epochs, left = (
            self._averaging.local_epochs,
            self._per_update if self._examples else 0,
        )
        if not (self._averaging.local_steps or self._common) and epochs == int(epochs):
            for local in range(int(epochs)):  # [bert cycle]
                yield from self.steps(cycle * int(epochs) + local)  # [bert cycle]
            return
        while left:
            for parts in islice(self.steps(self._epoch, self._begun), left):
                left, self._begun = left - 1, self._begun + 1
                yield parts
            if left:
                self._epoch, self._begun = self._epoch + 1, 0

    def train(self, tensors: Tensors, *, cycle: int) -> Update:
        """A cycle's steps from the given parameters; returns Q_k^t with weight n_k.

        Fewer tensors than are shared: these alone are trained, a warm-up. None: those
        that were just evaluated.
        """
        tensors = self._known(tensors)
        expected = set(self._warm_up if cycle < self._before else self.shared)
        if odd := sorted(tensors.keys() ^ expected):
            what = "is not among them" if odd[0] in tensors else "is missing"
            raise RefusedError(
                f"site {self.id!r}: cycle {cycle} of the job trains other parameters than the "
                f"{len(tensors)} that came: {odd[0]!r} {what}"
            )
        warming = tensors.keys() < self.shared.keys()
        if warming:
            self.begin_warm_up()
        active = {name: p for name, p in self.shared.items() if name in tensors}
        load_into(active, tensors)
        start = {n: value.to(self.device) for n, value in tensors.items()}
        for name, parameter in self.parameters.items():
            parameter.requires_grad_(
                name in active or (not warming and name in self.private)
            )
        adam = self._first if warming else self._adam
        loss, examples = 0.0, 0
        for parts in self._batches(cycle):
            loss += self._step(parts, adam, start, warming)  # [bert cycle]
            examples += sum(part.examples for part in parts)
        metrics = {
            "loss": scale_sum(loss, examples, self.count_step),
            "examples": float(round_count(examples, self.count_step)),
        }
        if self._averaging.compression == "none":
            return self._sends(snapshot(active), metrics)  # [bert eq 1]
        self._change = {
            n: p.detach() - start[n] + self._left.get(n, torch.zeros_like(p))
            for n, p in active.items()
        }
        return self._sends(told(self._change, self._averaging.compression), metrics)

    def send(self, tensors: Tensors, *, weight: float, sites: int) -> Update:
        """The change of the last "train" in the agreed code. weight, sites: of the last
        sum.

        Raises TrainingError before "train", RefusedError for what no server of this job
            can ask.
        """
        if not self._change:
            raise TrainingError(
                f"site {self.id!r} was asked to send a change before it trained"
            )
        config = self._averaging
        require_code(tensors, self._change, config.compression, config.top_share)
        if not (
            self.weight <= weight < math.inf and 1 <= sites <= (config.sites or sites)
        ):
            raise RefusedError(
                f"site {self.id!r} is told a sum of weight {weight:g} of {sites} sites: not one "
                "that it can be in"
            )
        part = sites * self.weight / weight if weight else 0.0
        sent, left = encode(self._change, tensors, config.compression, part, sites)
        self._left |= left
        self._change = {}
        return self._sends(sent, {}, part if config.compression == "packed" else None)

    def _sends(
        self, tensors: Tensors, metrics: Mapping[str, float], part: float | None = None
    ) -> Update:
        """What leaves the site in a cycle, with its weight. part: what it is weighed by
        already."""
        sent = {n: value.cpu() for n, value in tensors.items()}
        if part is None:
            return Update(sent, self.weight, metrics)
        return Update(sent, metrics={**metrics, "part": part})

    def begin_warm_up(self) -> None:
        """Put what a warm-up does not send to its first values, where another may have
        used it."""

    def keep(self, tensors: Tensors) -> Update:
        """The cycle that was just judged is the one to keep: of what is private too."""
        self._kept = snapshot(self.private)
        return Update()

    def load(self, tensors: Tensors) -> None:
        """Take the parameters to judge, and remember them."""
        self._told = self._known(tensors)
        load_into(self.shared, self._told)

    def load_kept(self, tensors: Tensors) -> None:
        """Take the parameters of the cycle that is kept."""
        self.load(tensors)
        if self._kept:
            load_into(self.private, self._kept)

    def require_covered(self) -> None:
        """Few tokens in an update of the embeddings or the output bias can be read off
        it: those of an epoch, as later ones read the same tokens. Raises ConfigError.
        """
        config, behind = self._averaging, self.covered(TRAIN)
        tokens, steps = behind["tokens"], behind["steps"]
        if tokens < config.min_tokens or steps < config.min_steps:
            raise ConfigError(
                f"site {self.id!r}: with train = 'all' an update tells which words were in "
                f"it; it covers {tokens:,} tokens in {steps} steps, min_tokens "
                f"= {config.min_tokens:,} and min_steps = {config.min_steps} are asked: train "
                '"encoder" (the embeddings stay), or more notes or smaller batches'
            )

    def _known(self, tensors: Tensors) -> Tensors:
        """What was sent, or, where nothing was, what was sent last."""
        if tensors or not self.shared:
            return tensors
        if self._told is None:
            raise TrainingError(
                f"site {self.id!r} has no parameters: it was restarted in between"
            )
        return self._told

    def _step(
        self, parts: list[Step], adam: Optimizer, start: Tensors, warming: bool
    ) -> float:
        """One optimizer step; Σ loss over its examples."""
        seed = self.draws.seed_of("dropout", self.id, self.taken)
        seed_torch(seed, self.device)
        total = 0.0
        for part in parts:
            with self._precision():
                loss = part.loss(parts)
            total += finite(loss, self.id, f"at step {self.taken}")
            loss.backward()
        self._pull(start)
        if self._averaging.clip:
            torch.nn.utils.clip_grad_norm_(
                adam.parameters.values(), self._averaging.clip
            )
        adam.step(rate=None if warming else self.rate())
        self.taken += 1
        self._taken_before += warming
        return total * sum(part.examples for part in parts)

    def _precision(self) -> AbstractContextManager[None]:
        return torch.autocast(
            self.device.type,
            dtype=torch.bfloat16,
            enabled=self._averaging.precision == "bfloat16"
            or (self._averaging.precision == "auto" and has_bfloat16(self.device)),
        )

    def _pull(self, start: Tensors) -> None:
        """Add the gradient of μ/2 |w - w_t|², FedProx's term, over the shared
        parameters.

        The term is part of the objective that a site descends (Li et al. 2020), so it
        is added before the gradient is clipped.
        """
        if not self._averaging.proximal:
            return
        for name, value in start.items():
            parameter = self.shared[name]
            if parameter.grad is not None:
                parameter.grad.add_(
                    parameter.detach() - value, alpha=self._averaging.proximal
                )

    def rate(self) -> float:
        """The learning rate of the next step: a linear rise, then a linear fall to
        zero."""
        config, done = self._averaging, self.taken - self._taken_before
        planned = config.cycles * self._per_update
        rising = config.warmup * planned
        if done < rising:
            return config.learning_rate * (done + 1) / (rising + 1)
        if config.decay == "constant":
            return config.learning_rate
        left = (planned - done) / max(1.0, planned - rising)
        return config.learning_rate * min(1.0, max(0.0, left))

    # what a restart must not lose

    def state(self) -> State:
        """Moments, private parameters and what could not be sent so far."""
        tensors = self._adam.state() | self._first.state("first")
        tensors |= prefixed(
            "private.", {n: p.detach() for n, p in self.private.items()}
        )
        tensors |= prefixed("left.", self._left) | prefixed("kept.", self._kept)
        facts = {
            "before": self._taken_before,
            "share": self.share,
            "common": self._common,
        }
        return State(
            self.taken, tensors, {**facts, "epoch": self._epoch, "begun": self._begun}
        )

    def restore(self, state: State) -> None:
        """Go back to a kept state."""
        self.taken, self._taken_before = state.round, int(state.facts["before"])
        self.share = int(state.facts.get("share", self.share))
        self._common = int(state.facts.get("common", 0))
        self._epoch, self._begun = (
            int(state.facts.get(n, 0)) for n in ("epoch", "begun")
        )
        self._adam.restore(state.tensors)
        self._first.restore(state.tensors, "first")
        load_into(self.private, below(state.tensors, "private."))
        self._kept = below(state.tensors, "kept.")
        self._left = {
            n: v.to(self.device) for n, v in below(state.tensors, "left.").items()
        }


def has_bfloat16(device: torch.device) -> bool:
    """Whether matrix products in bfloat16 are built in, and not imitated."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities = getattr(torch.cpu, "get_capabilities", None)  # not in torch 2.6
    found = {} if capabilities is None else capabilities()
    return bool(found.get("amx_bf16") or found.get("avx512_bf16"))
