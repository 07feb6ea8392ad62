"""The site side of averaging: epochs of AdamW from the common parameters to a site's own."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from fednotes.core.errors import ConfigError, LossError, RefusedError, TrainingError
from fednotes.core.seeds import seed_of
from fednotes.core.tensors import load_into, snapshot
from fednotes.core.update import Tensors, Update
from fednotes.federation import State
from fednotes.methods import compression as codes
from fednotes.methods.averaging import Averaging
from fednotes.methods.optim import Adam, Optimizer


class Step(Protocol):
    """A part of a mini-batch."""

    @property
    def examples(self) -> int:
        """How many words or masked tokens it has."""

    def loss(self, batch: Sequence[Any]) -> Tensor:
        """() what this part adds to the mean loss of all the parts of its batch."""


class AveragingSite:
    """Local training that pre-training and fine-tuning share.

    A subclass gives `steps` (an epoch's mini-batches) and the tasks "evaluate" and "finish".
    id: the site's name in the job. weight: n_k. parameters: all that is trained; of these,
    `private` stay here. before: cycles of a warm-up, which trains `warm_up` alone. per_epoch:
    mini-batches, about, of one epoch. optimizer: of all parameters, in place of AdamW.
    """

    tasks: ClassVar[frozenset[str]] = frozenset({"train", "send", "evaluate", "keep", "finish"})

    def __init__(
        self,
        id: str,
        config: Averaging,
        parameters: Mapping[str, torch.nn.Parameter],
        *,
        weight: float,
        per_epoch: int,
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
        self._per_update = config.local_epochs * per_epoch  # steps
        self._planned = config.cycles * self._per_update
        adam = Adam(self.parameters, config.learning_rate, config.weight_decay)
        self._adam: Optimizer = adam if optimizer is None else optimizer
        self._first = (first_rate, Adam({}, 1.0))
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
        """The local steps, and tokens, behind an update of this task; a site's policy asks."""
        behind = {"steps": self._per_update, "batch": self._averaging.batch_size}
        return behind if task in ("train", "send") else {}

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
        names = tensors.keys() if tensors.keys() < self.shared.keys() else None
        if names is not None:
            self.begin_warm_up()
        active = self.shared if names is None else {n: self.shared[n] for n in names}
        load_into(active, tensors)
        start = {n: value.to(self.device) for n, value in tensors.items()}
        adam = self._optimizer(active, names is not None)
        loss = examples = 0.0
        for local in range(self._averaging.local_epochs):  # [bert cycle]
            # [bert cycle]
            for parts in self.steps(cycle * self._averaging.local_epochs + local):
                loss += self._step(parts, adam, start, names is not None)  # [bert cycle]
                examples += sum(part.examples for part in parts)
        metrics = {"loss": loss, "examples": examples}
        if self._averaging.compression == "none":
            found = {name: value.cpu() for name, value in snapshot(active).items()}
            return Update(found, self.weight, metrics)  # [bert eq 1]
        self._change = {
            n: p.detach() - start[n] + self._left.get(n, torch.zeros_like(p))
            for n, p in active.items()
        }
        mean = codes.told(self._change, self._averaging.compression)
        return Update({n: value.cpu() for n, value in mean.items()}, self.weight, metrics)

    def send(self, tensors: Tensors) -> Update:
        """The change of the last "train" in the agreed code."""
        if not self._change:
            raise TrainingError(f"site {self.id!r} was asked to send a change before it trained")
        config = self._averaging
        codes.require_code(tensors, self._change, config.compression, config.top_share)
        sent, left = codes.encode(self._change, tensors, self._averaging.compression)
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

    def require_covered(self, tokens: int, steps: int, words: str) -> None:
        """Few tokens in an update of the embeddings or the output bias can be read off it.

        tokens, steps: of an epoch; those after it read the same tokens. words: the setting that
        shares them. Raises ConfigError.
        """
        config, steps = self._averaging, steps * self._averaging.local_epochs
        if tokens < config.min_tokens or steps < config.min_steps:
            raise ConfigError(
                f"site {self.id!r}: with train = {words!r} an update tells which words were in "
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

    def _optimizer(self, active: Mapping[str, torch.nn.Parameter], warming: bool) -> Optimizer:
        for name, parameter in self.parameters.items():
            parameter.requires_grad_(name in active or (not warming and name in self.private))
        if not warming:
            return self._adam
        rate, adam = self._first
        if not adam.parameters:
            adam = Adam(active, rate)
            self._first = (rate, adam)
        return adam

    def _step(self, parts: list[Step], adam: Optimizer, start: Tensors, warming: bool) -> float:
        """One optimizer step; Σ loss over its examples."""
        torch.manual_seed(seed_of(self._averaging.seed, "dropout", self.id, self.taken))
        total = 0.0
        for part in parts:
            with self._precision():
                loss = part.loss(parts)
            value = float(loss.detach())
            if not math.isfinite(value):
                raise LossError(self.id, value, f"at step {self.taken}", "lower learning_rate")
            loss.backward()
            total += value
        self._pull(start)
        if self._averaging.clip:
            torch.nn.utils.clip_grad_norm_(adam.parameters.values(), self._averaging.clip)
        adam.step(rate=self._first[0] if warming else self.rate())
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
        tensors = self._adam.state() | self._first[1].state("first")
        tensors |= {f"private.{name}": value.detach() for name, value in self.private.items()}
        tensors |= {f"left.{name}": value for name, value in self._left.items()}
        tensors |= {f"kept.{name}": value for name, value in self._kept.items()}
        return State(self.taken, tensors, {"before": self._taken_before})

    def restore(self, state: State) -> None:
        """Go back to a kept state."""
        self.taken, self._taken_before = state.round, int(state.facts["before"])
        self._adam.restore(state.tensors)
        self._restore_first(state.tensors)
        load_into(self.private, _below(state.tensors, "private."))
        self._kept = _below(state.tensors, "kept.")
        self._left = {n: v.to(self.device) for n, v in _below(state.tensors, "left.").items()}

    def _restore_first(self, tensors: Tensors) -> None:
        key = "first.exp_avg."
        names = [name.removeprefix(key) for name in tensors if name.startswith(key)]
        if names:
            adam = Adam({name: self.parameters[name] for name in names}, self._first[0])
            adam.restore(tensors, "first")
            self._first = (self._first[0], adam)


def has_bfloat16(device: torch.device) -> bool:
    """Whether matrix products in bfloat16 are built in, and not imitated."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities = getattr(torch.cpu, "get_capabilities", None)  # not in torch 2.6
    return capabilities is not None and bool(capabilities().get("amx_bf16"))


def _below(tensors: Tensors, prefix: str) -> dict[str, Any]:
    return {n.removeprefix(prefix): v for n, v in tensors.items() if n.startswith(prefix)}
