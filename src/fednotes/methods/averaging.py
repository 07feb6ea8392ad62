"""Averaging of locally trained parameters: what pre-training and fine-tuning have in common.

Dianbo Liu and Tim Miller (2020), "Federated pretraining and fine tuning of BERT using clinical
notes from multiple silos", section 3.2; McMahan et al. 2017 (FedAvg).

    paper       here
    t           `Server.round`, the global cycle
    T           `Averaging.cycles`
    K           the sites of the federation
    n_k         the weight of a site's update: patients in pre-training, notes in fine-tuning
    N           `Total.weight`
    Q_k^t       what a site returns from "train"
    Q_ag^t      `Server.shared` after `Server.step`

A server optimizer other than "average" takes Q_ag^t - Q_ag^(t-1) as the negative gradient
(Reddi et al. 2021, "Adaptive federated optimization", Algorithm 2).

Compression makes updates smaller that still add. A sum over sites is all that a server ever sees,
so sites must agree on a code before they send; each keeps its change until the code is agreed on:

    "int8"    told: mean squares of each tensor.   agreed: one step size for each tensor
    "top-k"   told: mean square of each block.     agreed: the blocks with the largest sums

What a site could not send is added to its next change: error feedback (Seide et al. 2014;
Karimireddy et al. 2019). Blocks of `BLOCK` neighbours in place of single numbers, chosen by
the sum and not by each site: no indices travel upwards, and the values add under a secure sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Protocol

import torch
from annotated_types import Len
from torch import Tensor

from fednotes.core.errors import ConfigError, RefusedError, TrainingError
from fednotes.core.federation import EVALUATE, TRAIN, Federation, SiteTasks, State
from fednotes.core.seeds import seed_of
from fednotes.core.settings import checked
from fednotes.core.tensors import below, load_into, prefixed, require_like, snapshot
from fednotes.core.update import Tensors, Total, Update
from fednotes.methods.sites import (
    Adam,
    Best,
    Count,
    Number,
    Part,
    Rate,
    RoundServer,
    Share,
    Size,
    finite,
    rising,
)
from fednotes.patients.dan import RowAdam

Compression = Literal["none", "int8", "top-k"]
BLOCK = 64
LEVELS = 127
RANGE = 4.0  # standard deviations that eight bits span; what lies beyond waits for its next turn
BEST = -1  # of `keep_cycle`
Judged = Callable[[Mapping[str, float]], dict[str, float]]
Optimizer = Adam | RowAdam


@checked(frozen=True)
class Averaging:
    """Settings that pre-training and fine-tuning have in common.

    cycles: T; in each, `local_epochs` epochs at every site, then the mean.
    keep_cycle: the cycle whose model is the result; 0 is the last, -1 the best on held-out data.
        A named one is the last that is run, though rates are laid over all `cycles`.
    batch_size: of one site's step; made of `accumulate` smaller ones where memory is short.
    learning_rate: of AdamW at the sites; rises over the first `warmup` of a site's steps, then
        falls to zero with the last one (decay = "linear") or stays. Moments and schedule go on
        from cycle to cycle.
    clip: the most that the gradient's norm may be; 0 does not clip.
    precision: of the matrix products in training; "auto" is "bfloat16" where the processor has
        instructions for it (nearly twice as fast there), else "float32".
    proximal: μ of FedProx (Li et al. 2020), the pull back to the cycle's first parameters.
    server: "average" (Eq. 1); or FedAdam, FedYogi with betas and adaptivity.
        server_learning_rate: 0 is 1 for the average and 1e-3 for the others, whose steps are of
        about that size for each number.
    compression: of what sites send: "int8", or "top-k", the top_share of all blocks.
    evaluate_every: cycles between two evaluations and checkpoints.
    min_tokens, min_steps: the least that an update of word embeddings or of an output bias may
        cover, for it tells the words that it was made of.
    """

    cycles: Count = 15
    keep_cycle: int = 0
    local_epochs: Count = 1
    batch_size: Count = 32
    accumulate: Count = 1
    learning_rate: Rate = 1e-4
    warmup: Part = 0.1
    decay: Literal["linear", "constant"] = "linear"
    weight_decay: Size = 0.01
    clip: Size = 1.0
    precision: Literal["float32", "bfloat16", "auto"] = "float32"
    proximal: Size = 0.0
    server: Literal["average", "adam", "yogi"] = "average"
    server_learning_rate: Size = 0.0
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
        if self.batch_size % self.accumulate:
            raise ConfigError(
                f"accumulate = {self.accumulate}: it must divide batch_size = {self.batch_size}"
            )

    @property
    def last_cycle(self) -> int:
        """The last cycle that is run: none is after the one that is asked for by number."""
        return self.keep_cycle if self.keep_cycle > 0 else self.cycles


def run_cycles(federation: Federation, server: Server) -> State:
    """T global cycles, after those of the warm-up."""
    config = server.config
    for cycle in federation.rounds(server.round, server.cycles):
        sent = server.sent
        given = {} if server.told is sent else sent  # nothing is sent twice
        total = federation.sum(TRAIN, given, cycle=cycle.number)  # an epoch at each site: Q_k^t
        if config.compression == "none":
            mean = total.mean()  # [bert eq 1] Σ n_k/N Q_k^t
        else:
            code = agreed(total.mean(), config.compression, config.top_share)
            changes = federation.sum("send", code).mean()
            change = decode(changes, code, sent, config.compression)
            mean = {name: sent[name] + change[name] for name in sent}
        server.step(mean, total)
        evaluated = server.due
        if evaluated:
            kept = server.judge(federation.sum(EVALUATE, server.shared, cycle=cycle.number))
            server.told = server.shared
            if kept:
                federation.sum("keep")  # what is private of the same cycle
        cycle.commit(server.state(), server.metrics, evaluated=evaluated)
    federation.sum("finish", {} if server.told is server.result else server.result)
    return server.state()


class Server(RoundServer):
    """Q_ag, the server's optimizer, and the cycle that is kept.

    initial: the parameters that sites share, before training. before: cycles that train `warm_up`
    alone; they are not counted in T. judged: a sum of counts → numbers for people, among them
    "held_out", of which more is better (-inf where nothing is).
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
        self.told: Tensors | None = None  # what "evaluate" sent last, which sites remember
        self._moments: dict[str, Tensor] = {}
        best = Best(config.keep_cycle == BEST, "never", -math.inf)
        super().__init__(config, snapshot(initial), best, resumed)  # rounds: the warm-up's too

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

    def step(self, mean: Tensors, total: Total) -> None:
        """Q_ag^t from the mean of the sites' Q_k^t."""
        self.shared = self.shared | self._moved(mean)
        self.round += 1
        self.metrics = {"loss": total.metrics["loss"] / max(1.0, total.metrics["examples"])}
        for name, value in mean.items():
            if not bool(torch.isfinite(value).all()):
                raise TrainingError(
                    f"cycle {self.round}: parameter {name!r} is no longer finite at some site: "
                    "lower learning_rate"
                )

    def _moved(self, mean: Tensors) -> dict[str, Tensor]:
        config = self.config
        if self.round < self.before:
            return dict(mean)
        rate = config.server_learning_rate or (1.0 if config.server == "average" else 1e-3)
        if config.server == "average":
            return {
                n: mean[n] if rate == 1 else w + rate * (mean[n] - w)
                for n, w in self.shared.items()
            }
        (fast, slow), moved = config.betas, {}
        for name, weight in self.shared.items():
            change = mean[name] - weight  # Δ_t
            zero = torch.zeros_like(weight)
            first = self._moments.get(f"first.{name}", zero)
            second = self._moments.get(f"second.{name}", zero + config.adaptivity**2)
            square = change.square()
            first = fast * first + (1 - fast) * change
            if config.server == "adam":
                second = slow * second + (1 - slow) * square
            else:
                second = second - (1 - slow) * square * (second - square).sign()
            self._moments |= {f"first.{name}": first, f"second.{name}": second}
            step = first / (second.sqrt() + config.adaptivity)
            moved[name] = weight + rate * step
        return moved

    def judge(self, total: Total) -> bool:
        """Note what held-out data say; whether this cycle's model is kept.

        Raises TrainingError where the best is asked for and nothing is held out.
        """
        found = self._judged(total.metrics)
        self.metrics |= {name: value for name, value in found.items() if math.isfinite(value)}
        if self.best.wanted and found["held_out"] == -math.inf:
            raise TrainingError(
                "keep_cycle = -1 asks for the best cycle, but no site holds anything out to judge "
                "by: name a cycle, or 0 for the last"
            )
        # a warm-up's cycle is never kept
        return self.round > self.before and self.best.judge(found["held_out"], self.shared)

    def state(self) -> State:
        """Everything that the next cycle depends on."""
        state = super().state()
        return replace(state, tensors={**state.tensors, **prefixed("moment.", self._moments)})

    def _restore(self, state: State) -> None:
        super()._restore(state)
        self._moments = below(state.tensors, "moment.")  # first.NAME, second.NAME
        for name, value in self._moments.items():
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

    A subclass gives `steps` (an epoch's mini-batches) and the tasks "evaluate" and "finish".
    id: the site's name in the job. weight: n_k. parameters: all that is trained; of these,
    `private` stay here. before: cycles of a warm-up, which trains `warm_up` alone. examples: of an
    epoch; tokens: where they are known. optimizer: of all parameters, in place of AdamW.
    """

    tasks: ClassVar[frozenset[str]] = frozenset({TRAIN, "send", EVALUATE, "keep", "finish"})

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
    ) -> None:
        self._id, self._averaging, self.weight = id, config, weight
        self.parameters = dict(parameters)
        self.shared = {n: p for n, p in self.parameters.items() if n not in private}
        self.private = {n: p for n, p in self.parameters.items() if n in private}
        self.device = torch.device(device)
        self._before, self._warm_up = before, tuple(warm_up)
        self._covered_tokens = {} if tokens is None else {"tokens": tokens}
        self._per_update = config.local_epochs * math.ceil(examples / config.batch_size)  # steps
        self._planned = config.cycles * self._per_update
        adam = Adam(self.parameters, config.learning_rate, config.weight_decay)
        self._adam: Optimizer = adam if optimizer is None else optimizer
        self._first = Adam({n: self.parameters[n] for n in warm_up}, first_rate)
        self.taken = 0  # steps, those of a warm-up included
        self._taken_before = 0  # of them in the warm-up
        self._change: dict[str, Tensor] = {}  # waits for "send"
        self._left: dict[str, Tensor] = {}  # what could not be sent so far
        self._told: Tensors | None = None  # what "evaluate" was given last
        self._kept: dict[str, Tensor] = {}  # private parameters of the cycle that is kept

    @property
    def id(self) -> str:
        """The site's name in the job."""
        return self._id

    def steps(self, epoch: int) -> Iterable[list[Step]]:
        """An epoch's mini-batches, each in parts; their order depends on seed and site."""
        raise NotImplementedError

    def covered(self, task: str) -> dict[str, int]:
        """The local steps, mini-batch and tokens behind an update of this task."""
        behind = {
            "steps": self._per_update,
            "batch": self._averaging.batch_size,
            **self._covered_tokens,
        }
        return behind if task in (TRAIN, "send") else {}

    def train(self, tensors: Tensors, *, cycle: int) -> Update:
        """`local_epochs` epochs from the given parameters; returns Q_k^t with weight n_k.

        Fewer tensors than are shared: these alone are trained, a warm-up. None: those that
        were just evaluated.
        """
        tensors = self._known(tensors)
        if tensors.keys() != set(self._warm_up if cycle < self._before else self.shared):
            raise RefusedError(
                f"site {self.id!r}: cycle {cycle} of the job trains other parameters than the "
                f"{len(tensors)} that came"
            )
        warming = tensors.keys() < self.shared.keys()
        if warming:
            self.begin_warm_up()
        active = {name: p for name, p in self.shared.items() if name in tensors}
        load_into(active, tensors)
        start = {n: value.to(self.device) for n, value in tensors.items()}
        for name, parameter in self.parameters.items():
            parameter.requires_grad_(name in active or (not warming and name in self.private))
        adam = self._first if warming else self._adam
        loss = examples = 0.0
        for local in range(self._averaging.local_epochs):  # [bert cycle]
            # [bert cycle]
            for parts in self.steps(cycle * self._averaging.local_epochs + local):
                loss += self._step(parts, adam, start, warming)  # [bert cycle]
                examples += sum(part.examples for part in parts)
        metrics = {"loss": loss, "examples": examples}
        if self._averaging.compression == "none":
            found = {name: value.cpu() for name, value in snapshot(active).items()}
            return Update(found, self.weight, metrics)  # [bert eq 1]
        self._change = {
            n: p.detach() - start[n] + self._left.get(n, torch.zeros_like(p))
            for n, p in active.items()
        }
        means = told(self._change, self._averaging.compression)
        return Update({n: value.cpu() for n, value in means.items()}, self.weight, metrics)

    def send(self, tensors: Tensors) -> Update:
        """The change of the last "train" in the agreed code."""
        if not self._change:
            raise TrainingError(f"site {self.id!r} was asked to send a change before it trained")
        config = self._averaging
        require_code(tensors, self._change, config.compression, config.top_share)
        sent, left = encode(self._change, tensors, self._averaging.compression)
        self._left |= left
        self._change = {}
        return Update(sent, self.weight)

    def begin_warm_up(self) -> None:
        """Put what a warm-up does not send to its first values, where another may have used it."""

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
        """Few tokens in an update of the embeddings or the output bias can be read off it: those
        of an epoch, as later ones read the same tokens. Raises ConfigError.
        """
        config, tokens, steps = self._averaging, self._covered_tokens["tokens"], self._per_update
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
            raise TrainingError(f"site {self.id!r} has no parameters: it was restarted in between")
        return self._told

    def _step(self, parts: list[Step], adam: Optimizer, start: Tensors, warming: bool) -> float:
        """One optimizer step; Σ loss over its examples."""
        torch.manual_seed(seed_of(self._averaging.seed, "dropout", self.id, self.taken))
        total = 0.0
        for part in parts:
            with self._precision():
                loss = part.loss(parts)
            total += finite(loss, self.id, f"at step {self.taken}")
            loss.backward()
        self._pull(start)
        if self._averaging.clip:
            torch.nn.utils.clip_grad_norm_(adam.parameters.values(), self._averaging.clip)
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
        """FedProx: the gradient of μ/2 |w - w_t|² over the shared parameters."""
        if not self._averaging.proximal:
            return
        for name, value in start.items():
            parameter = self.shared[name]
            if parameter.grad is not None:
                parameter.grad.add_(parameter.detach() - value, alpha=self._averaging.proximal)

    def rate(self) -> float:
        """The learning rate of the next step: a linear rise, then a linear fall to zero."""
        config, done = self._averaging, self.taken - self._taken_before
        rising = config.warmup * self._planned
        if done < rising:
            return config.learning_rate * (done + 1) / (rising + 1)
        if config.decay == "constant":
            return config.learning_rate
        left = (self._planned - done) / max(1.0, self._planned - rising)
        return config.learning_rate * min(1.0, max(0.0, left))

    # what a restart must not lose

    def state(self) -> State:
        """Moments, private parameters and what could not be sent so far."""
        tensors = self._adam.state() | self._first.state("first")
        tensors |= prefixed("private.", {n: p.detach() for n, p in self.private.items()})
        tensors |= prefixed("left.", self._left) | prefixed("kept.", self._kept)
        return State(self.taken, tensors, {"before": self._taken_before})

    def restore(self, state: State) -> None:
        """Go back to a kept state."""
        self.taken, self._taken_before = state.round, int(state.facts["before"])
        self._adam.restore(state.tensors)
        self._first.restore(state.tensors, "first")
        load_into(self.private, below(state.tensors, "private."))
        self._kept = below(state.tensors, "kept.")
        self._left = {n: v.to(self.device) for n, v in below(state.tensors, "left.").items()}


def has_bfloat16(device: torch.device) -> bool:
    """Whether matrix products in bfloat16 are built in, and not imitated."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities = getattr(torch.cpu, "get_capabilities", None)  # not in torch 2.6
    return capabilities is not None and bool(capabilities().get("amx_bf16"))


# ---- compression


def told(change: Tensors, compression: Compression) -> dict[str, Tensor]:
    """What a site says of its change: mean squares, (1,) or (blocks,) a tensor."""
    return {name: _rows(value, compression).square().mean(1) for name, value in change.items()}


def agreed(means: Tensors, compression: Compression, share: float) -> dict[str, Tensor]:
    """The code, from the weighted means of what sites told.

    int8: the step size of each tensor, (1,). top-k: the chosen blocks of each tensor, int32 in
    ascending order, together the `share` of all blocks with the largest means (one at least).
    """
    if compression == "int8":
        return {name: RANGE / LEVELS * mean.sqrt() for name, mean in means.items()}
    names = list(means)
    everything = torch.cat([means[name] for name in names])
    count = max(1, round(share * len(everything)))
    chosen = torch.zeros(len(everything), dtype=torch.bool)
    chosen[everything.argsort(descending=True, stable=True)[:count]] = True
    parts = chosen.split([len(means[name]) for name in names])
    return {
        name: part.nonzero().flatten().to(torch.int32)
        for name, part in zip(names, parts, strict=True)
    }


def require_code(code: Tensors, change: Tensors, compression: Compression, share: float) -> None:
    """Pass a code that `agreed` can have given for this change. Raises RefusedError."""
    parts = {name: len(_rows(value, compression)) for name, value in change.items()}
    dtype = torch.float32 if compression == "int8" else torch.int32
    right = code.keys() == parts.keys() and all(
        value.dtype is dtype and value.dim() == 1 for value in code.values()
    )
    if right and compression == "int8":
        right = all(len(step) == 1 and 0 <= float(step) < math.inf for step in code.values())
    elif right:
        wanted = max(1, round(share * sum(parts.values())))
        right = sum(map(len, code.values())) == wanted and all(
            rising(chosen, parts[name]) for name, chosen in code.items()
        )
    if not right:
        raise RefusedError(
            "the code for the changes is none of this job: a step size for each tensor, or the "
            "job's share of all blocks, each once and in order"
        )


def encode(
    change: Tensors, code: Tensors, compression: Compression
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A change in the agreed code, and what of it is left for the next time.

    Returns int8 of the tensor's shape, or float32 (chosen blocks, `BLOCK`); and float32 of the
    tensors' shapes. change = decode(sent) + left, up to rounding.
    """
    sent, left = {}, {}
    for name, value in change.items():
        if compression == "int8":
            step = code[name].to(value.device)
            levels = torch.where(step > 0, value / step, torch.zeros_like(value))
            sent[name] = levels.round().clamp(-LEVELS, LEVELS).to(torch.int8).cpu()
            left[name] = value - sent[name].to(value.device) * step
        else:
            blocks, chosen = _rows(value, compression), code[name].long().to(value.device)
            sent[name] = blocks[chosen].cpu()
            blocks = blocks.index_fill(0, chosen, 0.0)
            left[name] = blocks.flatten()[: value.numel()].reshape(value.shape)
    return sent, left


def decode(
    means: Tensors, code: Tensors, like: Mapping[str, Tensor], compression: Compression
) -> dict[str, Tensor]:
    """The mean change, from the weighted means of what sites sent; float32 as `like`."""
    found = {}
    for name, value in like.items():
        if compression == "int8":
            found[name] = means[name] * code[name]
        else:
            blocks = torch.zeros_like(_rows(value, compression))
            blocks[code[name].long()] = means[name]
            found[name] = blocks.flatten()[: value.numel()].reshape(value.shape)
    return found


def _rows(value: Tensor, compression: Compression) -> Tensor:
    """(1, numbers); or (blocks, BLOCK), the last one filled with zeros."""
    flat = value.flatten()
    if compression == "int8":
        return flat[None]
    return torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
