"""Averaging of locally trained parameters: the server side of pre-training and fine-tuning.

Dianbo Liu and Tim Miller (2020), "Federated pretraining and fine tuning of BERT using clinical
notes from multiple silos", section 3.2; McMahan et al. 2017 (FedAvg).

    paper       here
    t           `Server.cycle`, the global cycle
    T           `Averaging.cycles`
    K           the sites of the federation
    n_k         the weight of a site's update: patients in pre-training, notes in fine-tuning
    N           `Total.weight`
    Q_k^t       what a site returns from "train"
    Q_ag^t      `Server.shared` after `Server.step`

A server optimizer other than "average" takes Q_ag^t - Q_ag^(t-1) as the negative gradient
(Reddi et al. 2021, "Adaptive federated optimization", Algorithm 2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from fednotes.core.errors import ConfigError, TrainingError
from fednotes.core.store import restoring
from fednotes.core.tensors import require_like, snapshot
from fednotes.core.update import Tensors, Total
from fednotes.federation import Federation, State
from fednotes.methods import compression as codes
from fednotes.methods.compression import Compression

BEST = -1  # of `keep_cycle`
Judged = Callable[[Mapping[str, float]], dict[str, float]]


@dataclass(frozen=True)
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

    cycles: int = 15
    keep_cycle: int = 0
    local_epochs: int = 1
    batch_size: int = 32
    accumulate: int = 1
    learning_rate: float = 1e-4
    warmup: float = 0.1
    decay: Literal["linear", "constant"] = "linear"
    weight_decay: float = 0.01
    clip: float = 1.0
    precision: Literal["float32", "bfloat16", "auto"] = "float32"
    proximal: float = 0.0
    server: Literal["average", "adam", "yogi"] = "average"
    server_learning_rate: float = 0.0
    betas: tuple[float, ...] = (0.9, 0.99)
    adaptivity: float = 1e-3
    compression: Compression = "none"
    top_share: float = 0.05
    evaluate_every: int = 1
    min_tokens: int = 10_000
    min_steps: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigError for a value that no run can have."""
        for name in ("cycles", "local_epochs", "batch_size", "accumulate", "evaluate_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}: at least 1 is needed")
        for name in ("learning_rate", "adaptivity"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} = {getattr(self, name)}: a number above 0 is needed")
        for name in (
            *("weight_decay", "clip", "proximal", "server_learning_rate"),
            *("min_tokens", "min_steps"),
        ):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} = {getattr(self, name)}: at least 0 is needed")
        if not 0 <= self.warmup < 1:
            raise ConfigError(f"warmup = {self.warmup}: a share of the steps, below 1")
        if not 0 < self.top_share <= 1:
            raise ConfigError(f"top_share = {self.top_share}: above 0 and at most 1")
        if not BEST <= self.keep_cycle <= self.cycles:
            raise ConfigError(
                f"keep_cycle = {self.keep_cycle}: one of the {self.cycles} cycles, "
                "0 for the last, -1 for the best"
            )
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas = {list(self.betas)}: two numbers, at least 0 and below 1")
        if self.batch_size % self.accumulate:
            raise ConfigError(
                f"accumulate = {self.accumulate}: it must divide batch_size = {self.batch_size}"
            )

    @property
    def last_cycle(self) -> int:
        """The last cycle that is run: none is after the one that is asked for by number."""
        return self.keep_cycle if self.keep_cycle > 0 else self.cycles

    @property
    def server_rate(self) -> float:
        """`server_learning_rate`, or what stands for 0."""
        return self.server_learning_rate or (1.0 if self.server == "average" else 1e-3)


def run_cycles(
    federation: Federation, config: Averaging, server: Server, warm_up: Collection[str] = ()
) -> State:
    """T global cycles. warm_up: the parameters that cycles before the first one train alone."""
    for cycle in federation.rounds(server.cycle, server.cycles):
        sent = server.sent(warm_up)
        given = {} if server.told is sent else sent  # nothing is sent twice
        total = federation.sum("train", given, cycle=cycle.number)  # an epoch at each site: Q_k^t
        if config.compression == "none":
            mean = total.mean()  # [bert eq 1] Σ n_k/N Q_k^t
        else:
            code = codes.agreed(total.mean(), config.compression, config.top_share)
            changes = federation.sum("send", code).mean()
            change = codes.decode(changes, code, sent, config.compression)
            mean = {name: sent[name] + change[name] for name in sent}
        server.step(mean, total)
        evaluated = server.due
        if evaluated:
            kept = server.judge(federation.sum("evaluate", server.shared, cycle=cycle.number))
            server.told = server.shared
            if kept:
                federation.sum("keep")  # what is private of the same cycle
        cycle.commit(server.state(), server.metrics, evaluated=evaluated)
    federation.sum("finish", {} if server.told is server.result else server.result)
    return server.state()


class Server:
    """Q_ag, the server's optimizer, and the cycle that is kept.

    initial: the parameters that sites share, before training. before: cycles that train the
    warm-up's parameters alone; they are not counted in T. judged: a sum of counts → numbers
    for people, among them "held_out", of which more is better (-inf where nothing is).
    """

    def __init__(
        self,
        config: Averaging,
        initial: Tensors,
        judged: Judged,
        resumed: State | None,
        *,
        before: int = 0,
    ) -> None:
        self.config, self.before, self._judged = config, before, judged
        self.shared = snapshot(initial)
        self.kept: dict[str, torch.Tensor] = {}
        self.told: Tensors | None = None  # what "evaluate" sent last, which sites remember
        self.cycle = 0  # those of the warm-up included
        self.best = -math.inf
        self.metrics: dict[str, float] = {}
        self._moments: dict[str, torch.Tensor] = {}
        if resumed is not None:
            with restoring("the newest checkpoint"):
                self._restore(resumed)

    @property
    def cycles(self) -> int:
        """All that are run."""
        return self.before + self.config.last_cycle

    @property
    def due(self) -> bool:
        """Whether the cycle that has ended is to be judged: the last one is."""
        number = self.cycle - self.before  # of the warm-up's: 0 and below
        return self.cycle == self.cycles or number % self.config.evaluate_every == 0

    @property
    def result(self) -> dict[str, torch.Tensor]:
        """The parameters of the cycle that is kept."""
        return self.kept or self.shared

    def sent(self, warm_up: Collection[str]) -> dict[str, torch.Tensor]:
        """What the next cycle trains."""
        if self.cycle >= self.before:
            return self.shared
        return {name: self.shared[name] for name in warm_up}

    def step(self, mean: Tensors, total: Total) -> None:
        """Q_ag^t from the mean of the sites' Q_k^t."""
        self.shared = self.shared | self._moved(mean)
        self.cycle += 1
        self.metrics = {"loss": total.metrics["loss"] / max(1.0, total.metrics["examples"])}
        for name, value in mean.items():
            if not bool(torch.isfinite(value).all()):
                raise TrainingError(
                    f"cycle {self.cycle}: parameter {name!r} is no longer finite at some site: "
                    "lower learning_rate"
                )

    def _moved(self, mean: Tensors) -> dict[str, torch.Tensor]:
        config = self.config
        if config.server == "average" or self.cycle < self.before:
            rate = config.server_rate
            if rate == 1 or self.cycle < self.before:
                return dict(mean)
            return {n: w + rate * (mean[n] - w) for n, w in self.shared.items()}
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
            moved[name] = weight + config.server_rate * step
        return moved

    def judge(self, total: Total) -> bool:
        """Note what held-out data say; whether this cycle's model is kept.

        Raises TrainingError where the best is asked for and nothing is held out.
        """
        found = self._judged(total.metrics)
        self.metrics |= {name: value for name, value in found.items() if math.isfinite(value)}
        best, number = self.config.keep_cycle == BEST, self.cycle - self.before
        score = found["held_out"]
        if best and score == -math.inf:
            raise TrainingError(
                "keep_cycle = -1 asks for the best cycle, but no site holds anything out to judge "
                "by: name a cycle, or 0 for the last"
            )
        kept = best and number > 0 and score > self.best
        if kept:
            self.kept = snapshot(self.shared)
        if number > 0:
            self.best = max(self.best, score)
        return kept

    def state(self) -> State:
        """Everything that the next cycle depends on."""
        tensors = {f"shared.{name}": value for name, value in self.shared.items()}
        tensors |= {f"kept.{name}": value for name, value in self.kept.items()}
        tensors |= {f"moment.{name}": value for name, value in self._moments.items()}
        facts = {"best": None if self.best == -math.inf else self.best}
        return State(self.cycle, tensors, facts)

    def _restore(self, state: State) -> None:
        found: dict[str, dict[str, torch.Tensor]] = {"shared": {}, "kept": {}, "moment": {}}
        for name, value in state.tensors.items():
            kind, _, rest = name.partition(".")
            found[kind][rest] = value
            like = rest.partition(".")[2] if kind == "moment" else rest  # first.NAME, second.NAME
            require_like({name: self.shared[like]}, {name: value})
        self.shared = {name: found["shared"][name] for name in self.shared}
        self.kept, self._moments = found["kept"], found["moment"]
        self.cycle = state.round
        best = state.facts["best"]
        self.best = -math.inf if best is None else float(best)
